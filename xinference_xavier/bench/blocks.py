# SPDX-License-Identifier: Apache-2.0
"""KV caches and arenas of the reference model's block, for the measurements without an engine.

One block is 16 tokens of Qwen2.5-0.5B in bfloat16: 24 layers of 8 KiB, 192 KiB in all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.layout import BlockLayout, probe_layout
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device import CpuDevice

LAYERS: Final = 24
HEADS: Final = 2
HEAD_DIM: Final = 64
BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = LAYERS * 2 * HEADS * HEAD_DIM * 2 * BLOCK_TOKENS

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache of ``blocks`` blocks in the CPU backend's layout, with its device."""

    layers: dict[str, torch.Tensor]
    layout: BlockLayout
    device: CpuDevice

    @classmethod
    def make(cls, blocks: int) -> Cache:
        """Allocate and fill it: pages never written would all be the one page of zeros."""
        layers = {
            f"layers.{layer}.attn": torch.full(
                (blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), layer + 1.0, dtype=torch.bfloat16
            )
            for layer in range(LAYERS)
        }
        layout, views = probe_layout(layers, num_blocks=blocks, block_tokens=BLOCK_TOKENS)
        return cls(layers, layout, CpuDevice(layout, views))


def filled_arena(slots: int, name: str) -> Arena:
    """Return an arena with random bytes; slot ``s`` has generation ``s + 1`` and no checksum."""
    arena = Arena.create(slots, BLOCK_BYTES, f"bench-{name}")
    random = np.random.default_rng(slots)
    for row in arena.data.numpy():
        row[:] = random.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    arena.meta.numpy()[:, 0] = np.arange(slots) + 1
    return arena


def seconds_of_row_copies(target: Bytes, targets: Ints, source: Bytes, sources: Ints) -> float:
    """Return the time of one plain memory copy per row."""
    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    started = time.perf_counter()
    for to, at in pairs:
        target[to] = source[at]
    return time.perf_counter() - started


def seconds_of_run_copy(target: Bytes, to: int, source: Bytes, at: int, rows: int) -> float:
    """Return the time of one plain memory copy of ``rows`` consecutive rows."""
    started = time.perf_counter()
    target[to : to + rows] = source[at : at + rows]
    return time.perf_counter() - started
