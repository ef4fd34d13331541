# SPDX-License-Identifier: Apache-2.0
"""The load engine: fills KV blocks from our own tiers and from peers, off the main thread.

A load is right or reported. Each row's generation is compared with the promised one before and
after its copy, so bytes of a slot that was reassigned meanwhile never count; every row that was
not loaded, for whatever reason, is in the result's failed rows, and vLLM recomputes its block.

Only local copies write into KV blocks, and a load thread is inside each of them until it ends.
So when a result is there, nothing of its job can write any more, also after a timeout: a late
network read hits only staging slots, which stay out of use until it is over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.checksum import Verifier
from xinference_xavier.store.copier import CHECKSUM, EngineClosed
from xinference_xavier.store.device import Device, Mark
from xinference_xavier.store.jobs import (
    NOT_STARTED,
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    Tier,
    failed_segment,
)
from xinference_xavier.store.threads import start_thread
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.gate import Gate
from xinference_xavier.transport.links import PeerLinks
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.promotion import promote
from xinference_xavier.transport.segment import Means, SegmentLoad, tiers_of
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.tasks import Tasks

logger = logging.getLogger(__name__)

REAP_S: Final = 2.0
"""How often idle load threads look for dead peers."""

QUARANTINE_S: Final = 0.1
"""How often they ask whether quarantined staging slots came free, while there are any."""


OVERDUE_S: Final = 0.5
"""A load is given up this long after its deadline; its thread, which knows more, comes first."""


@dataclass(slots=True)
class _Task:
    job: LoadJob
    peers: Mapping[int, WorkerHandle]
    after: Mark | None
    submitted: float
    gate: Gate = field(default_factory=Gate)
    segment: int | None = None
    """The segment that is being loaded, None before the first."""
    slow: bool = False
    """Whether the thread that has it is one of those that load from peers."""
    stuck: bool = False
    """Whether it was given up while such a thread had it."""

    @property
    def deadline(self) -> float:
        return self.submitted + self.job.timeout_s


class LoadEngine:
    """Runs load jobs on a few threads ``xavier-load-N``.

    ``submit``, ``poll`` and ``quarantined`` are for the worker's main thread and never wait. Each
    job gives exactly one result, within its timeout plus the end of a local copy: :meth:`poll`
    gives up what hangs elsewhere. While every thread that may run loads from peers hangs, such
    loads fail at once.

    Of several threads the first takes only loads that no peer can hold up (see ``tasks``). It does
    not look after connections either, since closing one may wait for its transport.

    Failed rows carry one reason per segment: ``generation`` (the slot holds something else),
    ``checksum``, ``timeout``, ``transfer`` (the read failed), ``unavailable`` (no path to the
    peer), ``skipped`` (an earlier row of the prefix failed, so this one is useless), ``closed`` or
    ``not started`` (no thread was free in time).
    """

    def __init__(
        self,
        *,
        layout: BlockLayout,
        arenas: Mapping[Tier, SlotMemory],
        device: Device,
        verify: str,
        staging: Mapping[Tier, range],
        transports: Transports,
        threads: int = 3,
        reap_s: float = REAP_S,
    ) -> None:
        """Start the threads. ``staging`` are slots at the end of our arenas."""
        pools = {
            tier: StagingPool(slots, partial(transports.quarantined, tier))
            for tier, slots in staging.items()
        }
        self._transports = transports
        self._links = PeerLinks(transports, pools)
        self._means = Means(
            layout=layout,
            arenas=dict(arenas),
            device=device,
            links=self._links,
            pools=pools,
        )
        self._verify = verify == CHECKSUM
        self._reap_s = reap_s
        self._next_reap = time.monotonic() + reap_s
        self._tasks: Tasks[_Task] = Tasks()
        self._results: SimpleQueue[LoadResult] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._running: dict[int, _Task] = {}
        self._stuck = 0
        self._slow_threads = threads if threads == 1 else threads - 1
        self._closed = False
        self._quarantined = 0
        self._looking = threading.Lock()
        self._abandon = threading.Event()
        self._threads = [
            start_thread(partial(self._run, i == 0 and threads > 1), f"xavier-load-{i}")
            for i in range(threads)
        ]

    @property
    def pending(self) -> int:
        """Jobs submitted whose result was not polled yet."""
        return self._pending

    @property
    def quarantined(self) -> int:
        """Staging slots into which a timed-out transfer may still write, when last asked.

        That is before the result of the load in question is there, and soon after the transfer
        ended.
        """
        return self._quarantined

    def submit(
        self, job: LoadJob, peers: Mapping[int, WorkerHandle], after: Mark | None = None
    ) -> None:
        """Queue a job; its timeout begins now. ``peers`` has the handle of each member in it.

        Its blocks are written after a mark: forwards in flight may still use them for requests
        that had them before. Raises :class:`EngineClosed` after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed(f"load engine is closed: load job {job.job_id} is not taken")
            quick = all(
                segment.member == OWN_STORE or self._is_mapped(segment, peers)
                for segment in job.segments
            )
            task = _Task(job, peers, after, time.monotonic())
            self._pending += 1  # last: a job that cannot even be looked at has no result
            if not quick and self._stuck >= self._slow_threads:
                peers_first = (n for n, s in enumerate(job.segments) if s.member != OWN_STORE)
                task.segment = next(peers_first)  # our own store is not to blame
                self._results.put(_failed(task, "unavailable"))
                return
            self._running[job.job_id] = task
            self._tasks.put(task, quick=quick)

    def poll(self) -> list[LoadResult]:
        """Return the results that are ready, each once."""
        self._give_up_overdue()
        results: list[LoadResult] = []
        while not self._results.empty():
            results.append(self._results.get())
        with self._lock:
            self._pending -= len(results)
        return results

    def close(self, deadline_s: float) -> bool:
        """Refuse new jobs and finish the queued ones within ``deadline_s`` seconds. Idempotent.

        Returns whether everything ended. Jobs not begun by then are reported failed; running ones
        end by their own timeout, and until a later call returns True they may write KV blocks.
        Connections close with their last user.
        """
        with self._lock:
            self._closed = True
            self._tasks.close()
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._abandon.set()
        self._links.close()
        return not any(thread.is_alive() for thread in self._threads)

    # --- the load threads -------------------------------------------------------------------

    def _run(self, only_quick: bool) -> None:
        verifier = Verifier(self._means.layout, self._means.device) if self._verify else None
        pause = self._reap_s
        while True:
            try:
                taken = self._tasks.get(only_quick=only_quick, timeout=pause)
            except Empty:
                pause = self._reap_s if only_quick else self._tidy()
                continue
            if taken is None:
                return
            task, quick = taken
            task.slow = not only_quick
            result = self._load(task, quick, verifier)
            if not quick:
                self._look_at_quarantine()
            self._end(task, result)
            if not only_quick:
                pause = self._tidy()

    def _end(self, task: _Task, result: LoadResult) -> None:
        """Report a load, unless that was done because its thread, this one, was stuck."""
        with self._lock:
            if task.gate.shut():
                del self._running[task.job.job_id]
                self._results.put(result)
            elif task.stuck:
                self._stuck -= 1

    def _give_up_overdue(self) -> None:
        """Report loads whose thread hangs, or that no thread took since all of them hang."""
        if not self._running:
            return
        limit = time.monotonic() - OVERDUE_S
        with self._lock:
            for task in [task for task in self._running.values() if task.deadline < limit]:
                if not task.gate.shut():
                    continue  # it writes into KV blocks: nothing may be reported before that ends
                del self._running[task.job.job_id]
                begun = task.segment is not None
                task.stuck = begun and task.slow
                self._stuck += task.stuck
                logger.error(
                    "Xavier gave up the load of request %s: %s",
                    task.job.request_id,
                    "its thread hangs" if begun else "no thread was free",
                )
                self._results.put(_failed(task, "timeout" if begun else NOT_STARTED))

    def _tidy(self) -> float:
        """Do a bit of work between loads; return in how many seconds there is more of it."""
        try:
            with self._lock:
                now = time.monotonic()
                due = now >= self._next_reap
                if due:
                    self._next_reap = now + self._reap_s
            if due:
                self._links.reap()
            if self._quarantined:
                self._look_at_quarantine()
            if self._tasks.empty() and self._links.warm():
                return 0.0
            return min(self._reap_s, QUARANTINE_S) if self._quarantined else self._reap_s
        except Exception:  # fail open: a transport that misbehaves must not end the thread
            logger.exception("looking after connections failed")
            return self._reap_s

    def _look_at_quarantine(self) -> None:
        try:
            # One at a time: a thread that looked earlier must not write later.
            with self._looking:
                self._quarantined = sum(
                    len(self._transports.quarantined(tier)) for tier in self._means.pools
                )
        except Exception:  # fail open: as in `_tidy`; the last number stays
            logger.exception("asking for quarantined staging slots failed")

    def _is_mapped(self, segment: LoadSegment, peers: Mapping[int, WorkerHandle]) -> bool:
        peer = peers.get(segment.member)
        return peer is not None and self._links.mapped(segment.member, peer, tiers_of(segment))

    def _load(self, task: _Task, quick: bool, verifier: Verifier | None) -> LoadResult:
        job = task.job
        result = LoadResult(job.job_id, job.request_id)
        stop = "closed" if self._abandon.is_set() else None
        for task.segment, segment in enumerate(job.segments):
            if stop is None:
                part = SegmentLoad(
                    self._means,
                    segment,
                    request_id=job.request_id,
                    peer=task.peers.get(segment.member),
                    after=task.after,
                    deadline=task.deadline,
                    quick=quick,
                    verifier=verifier,
                    gate=task.gate,
                ).run()
                if part.failed_rows:
                    stop = "skipped"
            else:
                part = failed_segment(segment, stop)
            result.segments.append(part)
        if stop is None and len(job.promotions):
            with contextlib.suppress(TimeoutError), task.gate.writing():
                # Through the gate: a load that is given up leaves the device slots to others.
                result.promoted = promote(self._means, job)
        result.seconds = time.monotonic() - task.submitted
        return result


def _failed(task: _Task, reason: str) -> LoadResult:
    """Return the result of a load of which nothing counts; ``reason`` is its current segment's."""
    current = task.segment or 0
    segments = [
        failed_segment(segment, reason if number == current else "skipped")
        for number, segment in enumerate(task.job.segments)
    ]
    seconds = time.monotonic() - task.submitted
    return LoadResult(task.job.job_id, task.job.request_id, segments, seconds)
