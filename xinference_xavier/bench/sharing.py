# SPDX-License-Identifier: Apache-2.0
"""What the measurements with real engines have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Engine,
    cpu_seconds,
    describe,
    wait_until,
)

KV_BLOCKS: Final = 1200
"""vLLM's own KV cache of each engine, at least. The connector pins up to an eighth of it per step;
with less than eight steps' worth it would skip saves, and look faster than it is."""

ELEMENT_BYTES: Final = 4
"""The engines compute in float32: some CPUs only emulate bfloat16, at a quarter of the speed."""

SETTLE_S: Final = 60.0

BUSY: Final = ("pinned_blocks", "store_jobs", "load_jobs")
"""Fields of a replica's status that are zero when nothing is copied."""

REST_S: Final = 0.4
REST_SHARE: Final = 0.3
"""Engines rest when they use less than this share of a core for that long."""


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
    Raises TimeoutError when it takes too long, RuntimeError when the connector of one has failed:
    the engine then goes on without it, and there is nothing to measure.
    """
    found: dict[str, dict[str, Any]] = {}
    busy: dict[str, dict[str, int]] = {}

    def idle() -> bool:
        nonlocal found, busy
        found = describe(directory)
        busy = {name: {key: status[key] for key in BUSY} for name, status in found.items()}
        failed = any(status["hook_failures"] for status in found.values())
        quiet = not any(any(values.values()) for values in busy.values())
        return failed or (len(found) == members and quiet)

    try:
        wait_until(idle, f"{members} idle replicas in the directory", SETTLE_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; found: {busy}") from None
    failures = {name: status["hook_failures"] for name, status in found.items()}
    if any(failures.values()):
        raise RuntimeError(f"hooks of the connector failed: {failures}")
    return found


def rest(
    engines: Sequence[Engine], *, helpers: Sequence[int] = (), main_threads: bool = False
) -> None:
    """Wait until no engine computes or spins, or no main thread of its processes does.

    ``helpers`` are processes beside the engines, which must rest as well.

    A worker of vLLM polls for about a second for more work after each request. All engines are
    bound to one core, so the next engine's request would share the core with that.
    """

    def used_s() -> float:
        return sum(engine.cpu_seconds(main_threads=main_threads) for engine in engines) + sum(
            cpu_seconds(pid) for pid in helpers
        )

    before = used_s()

    def quiet() -> bool:
        nonlocal before
        time.sleep(REST_S)
        now = used_s()
        used, before = now - before, now
        return used < REST_SHARE * REST_S

    wait_until(quiet, "all engines are idle", SETTLE_S)
