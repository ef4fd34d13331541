# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that packs KV blocks into slots and unpacks them again.

One launch copies any number of blocks of any number of layers: where their bytes lie stands in a
table on the device, so that layers, dtypes and layouts are data and not code. Importing this
module imports Triton; only a CUDA device does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from xinference_xavier.layout import ALIGNMENT, BlockLayout

CHUNK_BYTES: Final = 8192
"""Bytes of one span that one program copies at a time: 64 for each of its 128 threads."""

PROGRAMS: Final = 256
"""Programs of a launch at most. Together they have 2 MiB under way, enough to keep a bus busy, and
mostly a GPU's memory; and they leave the engine's kernels room on the multiprocessors, which a
program holds as long as it waits for a bus."""

_WIDEST: Final = 16
"""Bytes that one thread loads or stores at once, at most."""

_WORDS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["data", "slot_bytes", "rows", "spans", "chunks"])  # type: ignore[untyped-decorator]
def copy_spans(  # type: ignore[no-untyped-def]
    table,  # int64 [spans, 4]: address of block 0, bytes between blocks, bytes, offset in slot
    indices,  # int64 [2, rows]: blocks, then slots
    data,  # address of slot 0
    slot_bytes,
    rows,
    spans,
    chunks,
    WORD: tl.constexpr,  # integer type that copies whole spans
    WORD_BYTES: tl.constexpr,
    GRAIN: tl.constexpr,  # power of two that all addresses and sizes are multiples of, at most 16
    CHUNK: tl.constexpr,  # bytes that a program copies at a time, a power of two
    TO_SLOTS: tl.constexpr,
):
    """Copy chunks of spans of blocks into their slots, or out of them."""
    word = tl.arange(0, CHUNK // WORD_BYTES)
    for piece in range(tl.program_id(0), rows * spans * chunks, tl.num_programs(0)):
        start = piece % chunks * CHUNK
        span = piece // chunks % spans
        row = piece // chunks // spans
        # 64 bits from here on: a KV cache has more bytes than 32 bits count.
        block = tl.load(indices + row)
        slot = tl.load(indices + rows + row)
        paged = tl.load(table + span * 4) + block * tl.load(table + span * 4 + 1) + start
        packed = data + slot * slot_bytes + tl.load(table + span * 4 + 3) + start
        left = (tl.load(table + span * 4 + 2) - start) // WORD_BYTES
        # What the compiler cannot know and needs for 16-byte accesses.
        left = tl.multiple_of(left, GRAIN // WORD_BYTES)
        paged = tl.multiple_of(paged.to(tl.pointer_type(WORD)), GRAIN)
        packed = tl.multiple_of(packed.to(tl.pointer_type(WORD)), GRAIN)
        inside = word < left
        if TO_SLOTS:
            tl.store(packed + word, tl.load(paged + word, mask=inside), mask=inside)
        else:
            tl.store(paged + word, tl.load(packed + word, mask=inside), mask=inside)


@dataclass(frozen=True)
class SpanTable:
    """What :func:`copy_spans` needs to know about one KV cache.

    ``rows`` is int64 ``[spans, 4]``, for the kernel's ``table``; ``chunks`` counts the pieces of
    the longest span.
    """

    rows: npt.NDArray[np.int64]
    slot_bytes: int
    chunks: int
    grain: int
    chunk_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, views: Sequence[torch.Tensor]) -> SpanTable:
        """Describe a KV cache: layout and views as ``layout.probe_layout`` gives them."""
        rows = np.array(
            [
                (view.data_ptr(), view.stride(0), span.nbytes, span.offset)
                for view, span in zip(views, layout.spans, strict=True)
            ],
            dtype=np.int64,
        )
        longest = int(rows[:, 2].max())
        chunk_bytes = min(CHUNK_BYTES, 1 << (longest - 1).bit_length())
        # Slots are multiples of ALIGNMENT, in any arena.
        grain = math.gcd(_WIDEST, ALIGNMENT, *rows.reshape(-1).tolist())
        return cls(rows, layout.slot_bytes, -(-longest // chunk_bytes), grain, chunk_bytes)

    def programs(self, rows: int) -> int:
        """Return how many programs copy ``rows`` blocks."""
        return min(PROGRAMS, rows * len(self.rows) * self.chunks)

    def constants(self, *, to_slots: bool) -> dict[str, Any]:
        """Return the kernel's constexprs."""
        word_bytes = min(8, self.grain)
        return {
            "WORD": _WORDS[word_bytes],
            "WORD_BYTES": word_bytes,
            "GRAIN": self.grain,
            "CHUNK": self.chunk_bytes,
            "TO_SLOTS": to_slots,
        }
