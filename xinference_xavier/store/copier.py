# SPDX-License-Identifier: Apache-2.0
"""The copy engine: runs a worker's store jobs, one after the other, off its main thread.

The scheduler side decides, this engine moves bytes. Jobs come in the order in which the index
planned them and are run in that order by one thread, so that a slot reused by a later job is never
written before an earlier job has read it. Whatever goes wrong becomes failed rows of that job's
result: nothing here may stop the engine's loop (R7).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue

import numpy as np
import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.checksum import Checksummer
from xinference_xavier.store.device import Device, IntArray, Mark
from xinference_xavier.store.jobs import StoreJob, StoreResult, Tier
from xinference_xavier.store.threads import start_thread

logger = logging.getLogger(__name__)

CHECKSUM = "checksum"
"""Value of ``verify`` with which slots carry checksums."""


class EngineClosed(RuntimeError):
    """The engine was closed and takes no more jobs."""


class CopyEngine:
    """Stores KV blocks into the arenas and demotes slots from the device tier to the host tier.

    ``submit`` and ``poll`` are for the worker's main thread and never wait. Each job gives exactly
    one result. A row that is not reported failed is published: its slot holds the block's bytes,
    its checksum if ``verify`` is ``"checksum"`` (else 0), and its generation.
    """

    def __init__(
        self,
        *,
        layout: BlockLayout,
        arenas: Mapping[Tier, SlotMemory],
        device: Device,
        verify: str,
    ) -> None:
        """Start the thread ``xavier-copy``. ``arenas`` lacks a tier whose budget is zero."""
        self._layout = layout
        self._arenas = dict(arenas)
        self._slots = {int(tier): arena.slots for tier, arena in arenas.items()}
        self._device = device
        self._checksummer = Checksummer(layout.block_bytes) if verify == CHECKSUM else None
        self._jobs: SimpleQueue[tuple[StoreJob, Mark | None] | None] = SimpleQueue()
        self._results: SimpleQueue[StoreResult] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self._abandon = threading.Event()
        self._thread = start_thread(self._run, "xavier-copy")

    @property
    def pending(self) -> int:
        """Jobs submitted whose result was not polled yet."""
        return self._pending

    def submit(self, job: StoreJob, after: Mark | None = None) -> None:
        """Queue a job whose copies run after a mark: the forward that fills its blocks.

        Raises :class:`EngineClosed` after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed(f"copy engine is closed: store job {job.job_id} is not taken")
            self._pending += 1
            self._jobs.put((job, after))

    def poll(self) -> list[StoreResult]:
        """Return the results that are ready, in job order, each once."""
        results: list[StoreResult] = []
        while not self._results.empty():
            results.append(self._results.get())
        with self._lock:
            self._pending -= len(results)
        return results

    def close(self, deadline_s: float) -> bool:
        """Refuse new jobs and finish the queued ones within ``deadline_s`` seconds. Idempotent.

        Returns whether everything ended. Jobs not begun by then are reported failed and one that
        is running ends in its own time: until a later call returns True, the copy thread may
        still touch KV blocks and arenas.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(deadline_s)
        self._abandon.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            job, after = taken
            if self._abandon.is_set():
                result = _failed(job, "closed")
            else:
                start = time.monotonic()
                try:
                    self._device.after(after)
                    result = self._copy(job)
                except Exception as error:  # fail open: a bad job must not end the thread
                    logger.exception("store job %d failed", job.job_id)
                    result = _failed(job, f"{type(error).__name__}: {error}")
                result.seconds = time.monotonic() - start
            self._results.put(result)

    def _copy(self, job: StoreJob) -> StoreResult:
        result = StoreResult(job.job_id)
        self._demote(job.demotions, result)
        self._store(job.stores, len(job.demotions), result)
        return result

    def _demote(self, rows: IntArray, result: StoreResult) -> None:
        """Run the demotions in one batch."""
        result.failed_demotions = set(range(len(rows)))
        source, target = self._arenas.get(Tier.DEVICE), self._arenas.get(Tier.HOST)
        if source is None or target is None:
            good = []
        else:
            good = [
                row
                for row, (device_slot, host_slot, _) in enumerate(rows.tolist())
                if 0 <= device_slot < source.slots and 0 <= host_slot < target.slots
            ]
            if good and self._move(source, target, rows[good], result):
                result.failed_demotions.difference_update(good)
        if result.failed_demotions and result.reason is None:
            result.reason = "demotion outside the arenas"

    def _move(
        self, source: SlotMemory, target: SlotMemory, rows: IntArray, result: StoreResult
    ) -> bool:
        from_slots, slots = rows[:, 0], rows[:, 1]
        withdraw(target.meta, slots)
        try:
            try:
                self._device.move(source.data, from_slots, target.data, slots)
            finally:
                self._device.fence()
            # The bytes are the same, so the checksum moves along.
            publish(target.meta, slots, rows[:, 2], source.meta.numpy()[from_slots, 1])
        except Exception as error:  # fail open: the rows are reported, the index drops them
            self._blame(result, error)
            return False
        result.nbytes += len(slots) * self._layout.slot_bytes
        return True

    def _store(self, rows: IntArray, demotions: int, result: StoreResult) -> None:
        """Run the stores, one batch per tier, except those whose demotion failed."""
        result.failed_stores = set(range(len(rows)))
        batches: dict[int, list[int]] = {}
        for row, (block, tier, slot, _, after) in enumerate(rows.tolist()):
            runnable = -1 <= after < demotions and after not in result.failed_demotions
            known = 0 <= block < self._layout.num_blocks and 0 <= slot < self._slots.get(tier, 0)
            if runnable and known:
                batches.setdefault(tier, []).append(row)
        for tier, batch in batches.items():
            if self._gather(self._arenas[Tier(tier)], rows[batch], result):
                result.failed_stores.difference_update(batch)
        if result.failed_stores and result.reason is None:
            result.reason = "store outside the KV cache or the arenas"

    def _gather(self, arena: SlotMemory, rows: IntArray, result: StoreResult) -> bool:
        slots = rows[:, 2]
        withdraw(arena.meta, slots)
        try:
            try:
                self._device.gather(rows[:, 0], arena.data, slots)
            finally:
                self._device.fence()
            publish(arena.meta, slots, rows[:, 3], self._checksums(arena.data, slots))
        except Exception as error:  # fail open: as for demotions
            self._blame(result, error)
            return False
        result.nbytes += len(slots) * self._layout.slot_bytes
        return True

    def _checksums(self, data: torch.Tensor, slots: IntArray) -> IntArray:
        if self._checksummer is None:
            return np.zeros(len(slots), dtype=np.int64)
        return self._checksummer.through(self._device, data, slots)

    @staticmethod
    def _blame(result: StoreResult, error: Exception) -> None:
        logger.error("store job %d: %s", result.job_id, error, exc_info=error)
        if result.reason is None:
            result.reason = f"{type(error).__name__}: {error}"


def withdraw(meta: torch.Tensor, slots: IntArray) -> None:
    """Mark slots as being written: from here on no reader takes them for anything."""
    meta.numpy()[slots, 0] = 0


def publish(
    meta: torch.Tensor, slots: IntArray, generations: IntArray, checksums: IntArray
) -> None:
    """Mark slots as complete, the generation last."""
    array = meta.numpy()
    array[slots, 1] = checksums
    array[slots, 0] = generations


def _failed(job: StoreJob, reason: str) -> StoreResult:
    return StoreResult(
        job.job_id,
        failed_demotions=set(range(len(job.demotions))),
        failed_stores=set(range(len(job.stores))),
        reason=reason,
    )
