# SPDX-License-Identifier: Apache-2.0
"""Copies between KV blocks and slots, in batches.

A :class:`Device` is bound to one KV cache. The CPU one copies whole cache lines past the caches
(see ``streaming``), and what is not made of such with numpy. Both work in the calling thread and
release the interpreter lock during a copy, where torch's index operations would start an OpenMP
team of their own beside the one that vLLM pins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.streaming import Pieces, stream, streamer

IntArray = npt.NDArray[np.int64]
_Array = npt.NDArray[Any]

_WORTH_SORTING: Final = 64
"""Blocks from which on sorting saves more than it takes. Measured: 2 % then, 10 to 20 % of 1000."""


class Mark:
    """A point in the work that was given to the engine's compute stream. Opaque, used once."""


class Device(Protocol):
    """Moves whole blocks. ``data`` tensors are uint8 ``[slots, slot_bytes]``, rows contiguous.

    Each thread's copies run in the order in which it started them, and in no order with those of
    other threads or with the engine's forwards unless :meth:`after` or :meth:`fence` says so. A
    copy may return before it has run and reads its source when it runs; :meth:`fence` waits for
    those of the calling thread. A copy that raises may have started a part of its work, so that
    only a fence makes its memory free again.

    Index arrays of one call have equal lengths and were checked by the caller. Destinations of one
    call must not repeat. Callable from several threads at once.
    """

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        """Pack KV blocks into slots."""

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        """Unpack slots, of our own arena or a mapped one, into KV blocks."""

    def move(
        self, source: torch.Tensor, source_slots: IntArray, target: torch.Tensor, slots: IntArray
    ) -> None:
        """Copy packed slots between two arenas."""

    def mark(self) -> Mark | None:
        """Return the point up to which the engine has given work to its compute stream.

        For the thread that launches forwards; waits for nothing and never raises: what went wrong
        is raised by :meth:`after`. None when that work is done already, as on a CPU.
        """

    def after(self, mark: Mark | None) -> None:
        """Let what this thread starts from now on run after a mark. Waits for nothing itself."""

    def fence(self) -> None:
        """Return when every copy that this thread has started is complete."""

    def close(self) -> None:
        """Wait for all copies that were started and release what they used. Idempotent.

        No thread may be inside a call.
        """


class _Band:
    """Consecutive spans whose rows are evenly spaced in memory: one strided array for all.

    vLLM allocates its layers one after the other with equal sizes, so that a few bands, often a
    single one, cover all layers and a block is one strided copy instead of one per layer.
    """

    def __init__(self, views: Sequence[torch.Tensor], offset: int) -> None:
        first = views[0].numpy()
        self._offset = offset
        self._spans = len(views)
        self._span_bytes = views[0].shape[1]
        pitch = views[1].data_ptr() - views[0].data_ptr() if len(views) > 1 else 0
        row = views[0].stride(0)
        self._places = Pieces(views[0].data_ptr(), row, pitch, len(first))
        # The widest word that every row, step and place in the slot is a multiple of.
        grain = math.gcd(views[0].data_ptr(), pitch, row, self._span_bytes, offset, 8)
        self._dtype: np.dtype[Any] = np.dtype(f"u{grain}")
        self._blocks: _Array = as_strided(
            first.view(self._dtype),
            shape=(len(first), self._spans, self._span_bytes // grain),
            strides=(row, pitch, grain),
        )

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        """Pack these spans of KV blocks into slots."""
        block_ids, slots = _in_order(block_ids, slots)
        if not self._stream(self._in_slots(data), slots, self._places, block_ids):
            packed = self._slots(data)
            for block, slot, n in runs(block_ids, slots):
                packed[slot : slot + n] = self._blocks[block : block + n]

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        """Unpack these spans of slots into KV blocks."""
        block_ids, slots = _in_order(block_ids, slots)
        if not self._stream(self._places, block_ids, self._in_slots(data), slots):
            packed = self._slots(data)
            for block, slot, n in runs(block_ids, slots):
                self._blocks[block : block + n] = packed[slot : slot + n]

    def _stream(self, target: Pieces, targets: IntArray, source: Pieces, sources: IntArray) -> bool:
        return stream(target, targets, source, sources, count=self._spans, nbytes=self._span_bytes)

    def _in_slots(self, data: torch.Tensor) -> Pieces:
        start = data.data_ptr() + self._offset
        return Pieces(start, data.stride(0), self._span_bytes, len(data))

    def _slots(self, data: torch.Tensor) -> _Array:
        """Return this band's part of all slots, ``[slots, spans, words]``, sharing memory."""
        part = data.numpy()[:, self._offset : self._offset + self._spans * self._span_bytes]
        return part.view(self._dtype).reshape(len(data), *self._blocks.shape[1:])


class CpuDevice:
    """The :class:`Device` of a KV cache in host memory. Copies are done when a call returns."""

    def __init__(self, layout: BlockLayout, views: Sequence[torch.Tensor]) -> None:
        """Bind to a KV cache: layout and views as ``layout.probe_layout`` gives them."""
        # Bands address memory by strides, across tensors: the views must outlive them.
        self._views = tuple(views)
        self._bands = [
            _Band([self._views[i] for i in group], layout.spans[group[0]].offset)
            for group in _bands(self._views)
        ]
        streamer()  # compiled now, not when the first request waits for its load

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        """See :class:`Device`."""
        for band in self._bands:
            band.gather(block_ids, data, slots)

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        """See :class:`Device`."""
        for band in self._bands:
            band.scatter(data, slots, block_ids)

    def move(
        self, source: torch.Tensor, source_slots: IntArray, target: torch.Tensor, slots: IntArray
    ) -> None:
        """See :class:`Device`."""
        to, at = (Pieces(d.data_ptr(), d.stride(0), 0, len(d)) for d in (target, source))
        if source.shape[1] != target.shape[1]:
            raise ValueError(f"slots of {source.shape[1]} bytes to slots of {target.shape[1]}")
        if not stream(to, slots, at, source_slots, count=1, nbytes=source.shape[1]):
            from_array, to_array = source.numpy().view(np.uint64), target.numpy().view(np.uint64)
            for start, slot, n in runs(source_slots, slots):
                to_array[slot : slot + n] = from_array[start : start + n]

    def mark(self) -> None:
        """See :class:`Device`."""

    def after(self, mark: Mark | None) -> None:
        """See :class:`Device`."""

    def fence(self) -> None:
        """See :class:`Device`."""

    def close(self) -> None:
        """See :class:`Device`."""


def _in_order(block_ids: IntArray, slots: IntArray) -> tuple[IntArray, IntArray]:
    """Return the pairs in the order of their blocks, where they are many.

    Each span of a block is small, and the next block's lies beside it: that order meets most pages
    once only.
    """
    if len(block_ids) < _WORTH_SORTING:
        return block_ids, slots
    order = np.argsort(block_ids)
    return block_ids[order], slots[order]


def runs(a: IntArray, b: IntArray) -> list[tuple[int, int, int]]:
    """Return (first of a, first of b, length) of the runs in which both count up by one.

    A plain loop: on the few hundred numbers of a job it is faster than numpy's calls.
    """
    found: list[tuple[int, int, int]] = []
    start = (-1, -1)
    length = 0
    for first, second in zip(a.tolist(), b.tolist(), strict=True):
        if length and (first, second) == (start[0] + length, start[1] + length):
            length += 1
            continue
        if length:
            found.append((*start, length))
        start, length = (first, second), 1
    if length:
        found.append((*start, length))
    return found


def _bands(views: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group consecutive views of equal shape, stride and spacing."""
    groups: list[list[int]] = []
    pitch: int | None = None
    for i, view in enumerate(views):
        if groups:
            last = views[groups[-1][-1]]
            step = view.data_ptr() - last.data_ptr()
            same = view.shape == last.shape and view.stride(0) == last.stride(0)
            if same and pitch in (None, step):
                groups[-1].append(i)
                pitch = step
                continue
        groups.append([i])
        pitch = None
    return groups
