# SPDX-License-Identifier: Apache-2.0
"""The copy engine: runs a worker's store jobs, one after the other, off its main thread.

The scheduler side decides, this engine moves bytes. Jobs come in the order in which the index
planned them and are run in that order by one thread, so that a slot reused by a later job is never
written before an earlier job has read it. Whatever goes wrong becomes failed rows of that job's
result: nothing here may stop the engine's loop (R7).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue

import numpy as np
import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.checksum import Checksummer, Mask, Verifier
from xinference_xavier.store.device import Device, IntArray, Mark
from xinference_xavier.store.jobs import StoreJob, StoreResult, Tier, failed_store
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
        verifies = verify == CHECKSUM
        self._checksummer = Checksummer(layout.block_bytes) if verifies else None
        self._verifier = Verifier(layout, device) if verifies else None
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
                result = failed_store(job, "closed")
            else:
                start = time.monotonic()
                try:
                    self._device.after(after)
                    result = self._copy(job)
                except Exception as error:  # fail open: a bad job must not end the thread
                    logger.exception("store job %d failed", job.job_id)
                    result = failed_store(job, f"{type(error).__name__}: {error}")
                result.seconds = time.monotonic() - start
            self._results.put(result)

    def _copy(self, job: StoreJob) -> StoreResult:
        result = StoreResult(job.job_id)
        self._demote(job.demotions, result)
        self._store(job.stores, len(job.demotions), result)
        return result

    def _demote(self, rows: IntArray, result: StoreResult) -> None:
        """Run the demotions in one batch."""
        if not len(rows):
            return
        source, target = self._arenas.get(Tier.DEVICE), self._arenas.get(Tier.HOST)
        good: list[int] = []
        if source is not None and target is not None:
            good = [
                row
                for row, (device_slot, host_slot, _) in enumerate(rows.tolist())
                if 0 <= device_slot < source.slots and 0 <= host_slot < target.slots
            ]
            if good:
                moved = self._move(source, target, _part(rows, good), result)
                good = list(itertools.compress(good, moved))
        result.failed_demotions = set(range(len(rows))).difference(good)
        if result.failed_demotions and result.reason is None:
            result.reason = "demotion outside the arenas"

    def _move(
        self, source: SlotMemory, target: SlotMemory, rows: IntArray, result: StoreResult
    ) -> Mask:
        """Return which of ``rows`` are published."""
        from_slots, slots = rows[:, 0], rows[:, 1]
        withdraw(target.meta, slots)
        try:
            try:
                self._device.move(source.data, from_slots, target.data, slots)
            finally:
                self._device.fence()
            # The bytes are to be the same, so the checksum moves along.
            checksums: IntArray = source.meta.numpy()[from_slots, 1]
            good = np.ones(len(slots), dtype=np.bool_)
            if self._checksummer is not None:
                found = self._checksummer.through(self._device, target.data, slots)
                good = found == checksums
                if not good.all():
                    # What was damaged before moves as it is, and its readers find out: it would
                    # be the victim again and again, and keep new blocks out of the device tier.
                    before = self._checksummer.through(self._device, source.data, from_slots)
                    good |= found == before
            publish(target.meta, slots[good], rows[good, 2], checksums[good])
        except Exception as error:  # fail open: the rows are reported, the index drops them
            self._blame(result, error)
            return np.zeros(len(slots), dtype=np.bool_)
        self._count(good, result)
        return good

    def _store(self, rows: IntArray, demotions: int, result: StoreResult) -> None:
        """Run the stores, one batch per tier, except those whose demotion failed."""
        if not len(rows):
            return
        result.failed_stores = set(range(len(rows)))
        batches: dict[int, list[int]] = {}
        for row, (block, tier, slot, _, after) in enumerate(rows.tolist()):
            runnable = -1 <= after < demotions and after not in result.failed_demotions
            known = 0 <= block < self._layout.num_blocks and 0 <= slot < self._slots.get(tier, 0)
            if runnable and known:
                batches.setdefault(tier, []).append(row)
        for tier, batch in batches.items():
            stored = self._gather(self._arenas[Tier(tier)], _part(rows, batch), result)
            result.failed_stores.difference_update(itertools.compress(batch, stored))
        if result.failed_stores and result.reason is None:
            result.reason = "store outside the KV cache or the arenas"

    def _gather(self, arena: SlotMemory, rows: IntArray, result: StoreResult) -> Mask:
        """Return which of ``rows`` are published."""
        blocks, slots = rows[:, 0], rows[:, 2]
        withdraw(arena.meta, slots)
        try:
            try:
                self._device.gather(blocks, arena.data, slots)
            finally:
                self._device.fence()
            checksums, good = self._verified(arena.data, slots, blocks)
            publish(arena.meta, slots[good], rows[good, 3], checksums[good])
        except Exception as error:  # fail open: as for demotions
            self._blame(result, error)
            return np.zeros(len(rows), dtype=np.bool_)
        self._count(good, result)
        return good

    def _count(self, good: Mask, result: StoreResult) -> None:
        """Note which of the copied rows were published."""
        if not good.all():
            logger.error("Xavier: %d blocks were not copied as they are", int((~good).sum()))
            result.reason = result.reason or CHECKSUM
        result.nbytes += int(good.sum()) * self._layout.slot_bytes

    def _verified(
        self, data: torch.Tensor, slots: IntArray, blocks: IntArray
    ) -> tuple[IntArray, Mask]:
        """Return the checksums of slots, and which are those of the blocks they were filled from.

        A wrong copy would otherwise be published with its own checksum, and pass at every reader.
        """
        if self._checksummer is None or self._verifier is None:
            return np.zeros(len(slots), dtype=np.int64), np.ones(len(slots), dtype=np.bool_)
        checksums = self._checksummer.through(self._device, data, slots)
        return checksums, self._verifier.equal(blocks, checksums)

    @staticmethod
    def _blame(result: StoreResult, error: Exception) -> None:
        logger.error("store job %d: %s", result.job_id, error, exc_info=error)
        if result.reason is None:
            result.reason = f"{type(error).__name__}: {error}"


def _part(rows: IntArray, chosen: list[int]) -> IntArray:
    """The chosen rows, ascending; mostly that is all of them."""
    return rows if len(chosen) == len(rows) else rows[chosen]


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
