# SPDX-License-Identifier: Apache-2.0
"""Copies between KV blocks on a GPU and slots on it, on another one, or in host memory.

Each thread copies on a stream of its own, ordered with the engine's compute stream by events
alone: a copy waits on the device for the forward that it is marked behind, the compute stream
waits for nothing of ours, and a thread waits for its own copies only in ``fence``. The copies
themselves are one kernel launch per batch (``store.kernels``), or one copy per run of slots.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.cuda import CudaApi, CudaError, Event
from xinference_xavier.store.device import IntArray, Mark, runs
from xinference_xavier.store.pinning import page_aligned

SCRATCH_BYTES: Final = 16 << 20
"""Device memory through which slots in unpinned host memory are packed and unpacked."""

LANES: Final = 8
"""Threads that may copy: the worker's main thread, its copy and load threads, and the one that
serves peers over sockets."""

INDEX_ROWS: Final = 4096
"""Block and slot numbers that a thread may have under way; a longer batch goes in pieces."""

_INDEX_BYTES: Final = INDEX_ROWS * 16


def device_bytes(slot_bytes: int, spans: int) -> int:
    """Return the device memory that a :class:`CudaDevice` takes for itself.

    ``spans`` is the number of pieces of a block (``len(layout.spans)``).
    """
    return _aligned(spans * 32) + LANES * _INDEX_BYTES + max(SCRATCH_BYTES, slot_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


class CudaMark(Mark):
    """An event behind the engine's work; without one, the call and the error that there was."""

    def __init__(self, event: Event | None, failed: tuple[str, str] | None = None) -> None:
        self.event = event
        self.failed = failed


class _Lane:
    """What one thread copies with: a stream, and a ring of room for indices."""

    def __init__(self, api: CudaApi, indices: torch.Tensor, host: torch.Tensor) -> None:
        """``indices`` is device memory, int64 ``[2 * INDEX_ROWS]``, for this lane alone.

        ``host`` is host memory of the same shape, pinned if possible.
        """
        self._api = api
        self._indices = indices
        self._host = host
        self._used = 0
        with contextlib.ExitStack() as undo:
            self.stream = api.stream_create()
            undo.callback(api.stream_destroy, self.stream)
            self._event = api.event_create()
            undo.callback(api.event_destroy, self._event)
            # After a fence that failed, something may be under way still.
            undo.callback(self.fence)
            self._undo = undo.pop_all()

    def upload(self, blocks: IntArray, slots: IntArray) -> torch.Tensor:
        """Queue the way of indices to the device, int64 ``[2 * n]``: blocks, then slots.

        At most :data:`INDEX_ROWS` each.
        """
        count = 2 * len(blocks)
        if self._used + count > len(self._indices):
            self.fence()
        area = slice(self._used, self._used + count)
        self._host.numpy()[area] = np.concatenate((blocks, slots))
        target, source = self._indices[area], self._host[area]
        self._api.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes, self.stream)
        self._used += count
        return target

    def fence(self) -> None:
        # An event's waiter can sleep; that of a stream may spin, on a core that the engine needs.
        self._api.event_record(self._event, self.stream)
        self._api.event_synchronize(self._event)
        # Nothing of this lane is under way: its room for indices is free again.
        self._used = 0

    def close(self) -> None:
        self._undo.close()


class CudaDevice:
    """The :class:`~xinference_xavier.store.device.Device` of a KV cache on a GPU.

    ``data`` may be this device's memory, a peer's mapped by CUDA IPC, or host memory: pinned, the
    kernel reads and writes it where it is, else it goes through a scratch area, one thread at a
    time; that also writes the padding behind a block's last byte. Methods raise
    :class:`CudaError`; after one, what the thread had started may still run.
    """

    def __init__(self, layout: BlockLayout, views: Sequence[torch.Tensor], api: CudaApi) -> None:
        """Bind to a KV cache: layout and views as ``layout.probe_layout`` gives them.

        Copies block 0 out and back in, on the calling thread, which compiles the kernels and shows
        now, and not at the first request, whether they run here. Nothing may use block 0 meanwhile.
        """
        # Imports Triton, which is not there on every host.
        from xinference_xavier.store import kernels

        self._kernel = kernels.copy_spans
        self._spans = kernels.SpanTable.of(layout, views)
        # The table holds addresses: the views must outlive it.
        self._views = tuple(views)
        self._api = api
        self._slot_bytes = layout.slot_bytes
        self._scratch_lock = threading.Lock()
        self._lanes: deque[_Lane] = deque()
        self._thread = threading.local()
        self._marks: deque[Event] = deque()
        self._closed = False
        with contextlib.ExitStack() as undo:
            area = api.allocate(device_bytes(layout.slot_bytes, len(layout.spans)))
            undo.callback(api.free, area)
            host = page_aligned(LANES * _INDEX_BYTES)
            # Now and for all threads: pinning may hold up the device. Where nothing can be pinned,
            # an upload may wait for its stream, on its own thread.
            with contextlib.suppress(CudaError):
                api.host_register(host)
                undo.callback(api.host_unregister, host)
            undo.callback(self._close_marks)
            undo.callback(self._close_lanes)
            table = _aligned(self._spans.rows.nbytes)
            scratch = table + LANES * _INDEX_BYTES
            slots = (len(area) - scratch) // layout.slot_bytes
            self._table = area[: self._spans.rows.nbytes].view(torch.int64)
            rings = (part.view(torch.int64).chunk(LANES) for part in (area[table:scratch], host))
            self._free_rings = deque(zip(*rings, strict=True))
            self._scratch = area[scratch : scratch + slots * layout.slot_bytes].view(
                slots, layout.slot_bytes
            )
            self._prove()
            self._undo = undo.pop_all()

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        """See :class:`Device`."""
        if self._direct(data):
            self._launch(block_ids, data, slots, to_slots=True)
            return

        def copy(part: slice, places: IntArray) -> None:
            self._launch(block_ids[part], self._scratch, places, to_slots=True)
            self.move(self._scratch, places, data, slots[part])

        self._through_scratch(len(slots), copy)

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        """See :class:`Device`."""
        if self._direct(data):
            self._launch(block_ids, data, slots, to_slots=False)
            return

        def copy(part: slice, places: IntArray) -> None:
            self.move(data, slots[part], self._scratch, places)
            self._launch(block_ids[part], self._scratch, places, to_slots=False)

        self._through_scratch(len(slots), copy)

    def move(
        self, source: torch.Tensor, source_slots: IntArray, target: torch.Tensor, slots: IntArray
    ) -> None:
        """See :class:`Device`. One copy per run of slots, in the order that has the fewest."""
        order = np.argsort(source_slots)
        stream = self._lane().stream
        for start, slot, n in runs(source_slots[order], slots[order]):
            self._api.memcpy(
                target.data_ptr() + slot * self._slot_bytes,
                source.data_ptr() + start * self._slot_bytes,
                n * self._slot_bytes,
                stream,
            )

    def mark(self) -> Mark:
        """See :class:`Device`."""
        try:
            event = self._marks.pop() if self._marks else self._api.event_create()
        except CudaError as error:
            return CudaMark(None, (error.call, error.name))
        mark = CudaMark(event)
        weakref.finalize(mark, self._reuse, event).atexit = False
        try:
            self._api.event_record(event, self._api.compute_stream())
        except CudaError as error:
            # Not the error itself: its traceback would keep the mark alive.
            mark.failed = error.call, error.name
        return mark

    def after(self, mark: Mark | None) -> None:
        """See :class:`Device`."""
        if mark is None:
            return
        assert isinstance(mark, CudaMark)
        if mark.failed is not None:
            raise CudaError(*mark.failed)
        if mark.event is not None:
            self._api.stream_wait(self._lane().stream, mark.event)

    def fence(self) -> None:
        """See :class:`Device`."""
        lane: _Lane | None = getattr(self._thread, "lane", None)
        if lane is not None:
            lane.fence()

    def close(self) -> None:
        """See :class:`Device`. Raises the last :class:`CudaError` when all is tried."""
        if not self._closed:
            self._undo.close()

    # --- inside ------------------------------------------------------------------------------

    def _lane(self) -> _Lane:
        """Return the calling thread's lane, made at its first copy."""
        lane: _Lane | None = getattr(self._thread, "lane", None)
        if lane is None:
            if not self._free_rings:
                raise RuntimeError(f"more than {LANES} threads copy with one device")
            rings = self._free_rings.popleft()
            try:
                lane = self._thread.lane = _Lane(self._api, *rings)
            except BaseException:
                self._free_rings.append(rings)
                raise
            self._lanes.append(lane)
        return lane

    def _direct(self, data: torch.Tensor) -> bool:
        """Whether the kernel may take the slots where they are."""
        return data.data_ptr() % self._spans.grain == 0 and self._api.reachable(data)

    def _launch(
        self, blocks: IntArray, data: torch.Tensor, slots: IntArray, *, to_slots: bool
    ) -> None:
        lane = self._lane()
        for start in range(0, len(blocks), INDEX_ROWS):
            part = slice(start, start + INDEX_ROWS)
            rows = len(blocks[part])
            indices = lane.upload(blocks[part], slots[part])
            self._api.launch(
                self._kernel,
                self._spans.programs(rows),
                (
                    self._table,
                    indices,
                    data.data_ptr(),
                    self._slot_bytes,
                    rows,
                    len(self._spans.rows),
                    self._spans.chunks,
                ),
                self._spans.constants(to_slots=to_slots),
                lane.stream,
            )

    def _through_scratch(self, count: int, copy: Callable[[slice, IntArray], None]) -> None:
        """Copy rows in batches that fit the scratch area; ``copy`` gets the rows and its slots."""
        size = len(self._scratch)
        for start in range(0, count, size):
            part = slice(start, min(count, start + size))
            with self._scratch_lock:
                try:
                    copy(part, np.arange(part.stop - start, dtype=np.int64))
                finally:
                    # Another thread's copies may use the area next.
                    self.fence()

    def _prove(self) -> None:
        """Upload the table and run both kernels."""
        lane = self._lane()
        rows = torch.from_numpy(self._spans.rows)
        self._api.memcpy(self._table.data_ptr(), rows.data_ptr(), rows.nbytes, lane.stream)
        self.after(self.mark())
        first = np.zeros(1, dtype=np.int64)
        self.gather(first, self._scratch, first)
        self.scatter(self._scratch, first, first)
        self.fence()

    def _reuse(self, event: Event) -> None:
        """Take back the event of a mark that is gone. Runs wherever the mark's last user was."""
        self._marks.append(event)
        if self._closed:
            with contextlib.suppress(CudaError):
                self._close_marks()

    def _close_marks(self) -> None:
        self._closed = True
        # Two threads may drop their last marks at once.
        with contextlib.suppress(IndexError):
            while True:
                self._api.event_destroy(self._marks.pop())

    def _close_lanes(self) -> None:
        with contextlib.ExitStack() as every:
            while self._lanes:
                every.callback(self._lanes.pop().close)
