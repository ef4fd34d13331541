# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between vLLM versions, and nothing else.

Developed on 0.27.1; the names used here were compared with 0.32 (see docs/design.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.core.block_pool import BlockPool


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


def measures_kv_scales(cache: CacheConfig) -> bool:
    """Whether the scales of the KV cache are measured at run time; since 0.28 they never are."""
    return bool(getattr(cache, "calculate_kv_scales", False))


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
