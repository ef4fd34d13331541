# SPDX-License-Identifier: Apache-2.0
"""What the measurements with real engines have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.engines import BLOCK_TOKENS, Engine, describe, wait_until

KV_BLOCKS: Final = 1200
"""vLLM's own KV cache of each engine, at least. The connector pins up to an eighth of it per step;
with less than eight steps' worth it would skip saves, and look faster than it is."""

ELEMENT_BYTES: Final = 4
"""The engines compute in float32: some CPUs only emulate bfloat16, at a quarter of the speed."""


def make_engine(
    name: str,
    *,
    model: Path,
    folder: Path,
    core: int,
    longest: int,
    extra: Mapping[str, object] | None,
) -> Engine:
    """Return an engine for prompts of at most ``longest`` tokens; all arms differ in ``extra``."""
    return Engine(
        name,
        model,
        folder / f"{name}.log",
        core,
        extra=None if extra is None else {"xavier_gpu_first": True, **extra},
        kv_blocks=max(KV_BLOCKS, 4 * (longest // BLOCK_TOKENS + 1)),
        max_model_len=longest,
        environment={"PYTHONHASHSEED": "0"},
    )


def default_core() -> int:
    """Return the last CPU that this process may use: the first one serves most interrupts."""
    return max(os.sched_getaffinity(0))


def settle(directory: str, members: int) -> dict[str, dict[str, Any]]:
    """Wait until every copy into the stores has ended; return the members' statuses.

    Without it, what one request left to do would be measured with the next one, of another arm.
    """
    found: dict[str, dict[str, Any]] = {}

    def idle() -> bool:
        nonlocal found
        found = describe(directory)
        return len(found) == members and not any(
            status["pinned_blocks"] or status["store_jobs"] or status["load_jobs"]
            for status in found.values()
        )

    wait_until(idle, f"{members} replicas in the directory, none of them copying")
    return found
