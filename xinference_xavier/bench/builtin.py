# SPDX-License-Identifier: Apache-2.0
"""The store of the Xavier that is built into Xinference, driven as its own transfer actor does.

It is imported from the installed package and runs unmodified, with the CPU as its "GPU": what it
does for CUDA only (streams, fences) is not called here, which favours it. Its copies are torch's,
whose team of threads is the larger part of its cost on a CPU, and more so where other work runs. So
it is measured both as it runs, with torch's default, and with one thread.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

TIERED: Final = "xinference.model.llm.xavier.backends.torch.tiered_snapshot"

BATCH: Final = 64
"""Blocks per call, as its own actor batches them."""


class BuiltinUnavailable(Exception):
    """The built-in store cannot be measured here; ``str()`` is the reason."""


class BuiltinStore:
    """A full store whose every admission demotes a block and evicts another."""

    def __init__(self, layers: dict[str, torch.Tensor], block_bytes: int, blocks: int) -> None:
        """Fill both tiers with ``blocks`` blocks each. Raises :class:`BuiltinUnavailable`."""
        try:
            module = importlib.import_module(TIERED)
        except ImportError as error:
            raise BuiltinUnavailable(f"Xinference's store is not installed: {error}") from error
        self._layers = layers
        self._store: Any = module.TieredKVSnapshotStore(
            blocks, blocks * block_bytes, block_bytes, torch.device("cpu")
        )
        self._next_key = 0
        have = len(next(iter(layers.values())))
        for _ in range(2 * blocks // BATCH + 1):
            self.admit([number % have for number in range(BATCH)], threads=1)

    def admit(self, block_ids: Sequence[int], *, threads: int) -> float:
        """Gather, stage and publish new blocks with that many threads; return the seconds."""
        default = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return sum(
                self._admit(list(block_ids[start : start + BATCH]))
                for start in range(0, len(block_ids), BATCH)
            )
        finally:
            torch.set_num_threads(default)

    def _admit(self, block_ids: list[int]) -> float:
        keys = list(range(self._next_key, self._next_key + len(block_ids)))
        self._next_key += len(block_ids)
        started = time.perf_counter()
        index = torch.tensor(block_ids, dtype=torch.long)
        values = {name: cache.index_select(0, index) for name, cache in self._layers.items()}
        self._store.stage_blocks(keys, values)
        self._store.publish(keys, set(self._layers))
        self._store.take_evicted()
        return time.perf_counter() - started

    @property
    def demotions(self) -> int:
        """Return how many blocks went from the upper tier to the lower one."""
        return int(self._store.metrics["demotions"])
