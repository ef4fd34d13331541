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

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.copier import CHECKSUM, EngineClosed
from xinference_xavier.store.device import Device, Mark
from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    SegmentResult,
    Tier,
)
from xinference_xavier.store.threads import start_thread
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.links import PeerLinks
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.promotion import promote
from xinference_xavier.transport.segment import Means, SegmentLoad, Verifier, tiers_of
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.tasks import Tasks

logger = logging.getLogger(__name__)

REAP_S: Final = 2.0
"""How often idle load threads look for dead peers."""

QUARANTINE_S: Final = 0.1
"""How often they ask whether quarantined staging slots came free, while there are any."""


@dataclass(frozen=True, slots=True)
class _Task:
    job: LoadJob
    peers: Mapping[int, WorkerHandle]
    after: Mark | None
    submitted: float


class LoadEngine:
    """Runs load jobs on a few threads ``xavier-load-N``.

    ``submit``, ``poll`` and ``quarantined`` are for the worker's main thread and never wait. Each
    job gives exactly one result, within its timeout plus the end of a local copy.

    Of several threads the first takes only loads that no peer can hold up (see ``tasks``). It does
    not look after connections either, since closing one may wait for its transport.

    Failed rows carry one reason per segment: ``generation`` (the slot holds something else),
    ``checksum``, ``timeout``, ``transfer`` (the read failed), ``unavailable`` (no path to the
    peer), ``skipped`` (an earlier row of the prefix failed, so this one is useless) or ``closed``.
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
            self._pending += 1
            quick = all(
                segment.member == OWN_STORE or self._is_mapped(segment, peers)
                for segment in job.segments
            )
            self._tasks.put(_Task(job, peers, after, time.monotonic()), quick=quick)

    def poll(self) -> list[LoadResult]:
        """Return the results that are ready, each once."""
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
            result = self._load(task, quick, verifier)
            if not quick:
                self._look_at_quarantine()
            self._results.put(result)
            if not only_quick:
                pause = self._tidy()

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
        for segment in job.segments:
            if stop is None:
                part = SegmentLoad(
                    self._means,
                    segment,
                    request_id=job.request_id,
                    peer=task.peers.get(segment.member),
                    after=task.after,
                    deadline=task.submitted + job.timeout_s,
                    quick=quick,
                    verifier=verifier,
                ).run()
                if part.failed_rows:
                    stop = "skipped"
            else:
                rows = set(range(len(segment.rows)))
                part = SegmentResult(segment.member, "none", failed_rows=rows, reason=stop)
            result.segments.append(part)
        if stop is None and len(job.promotions):
            result.promoted = promote(self._means, job)
        result.seconds = time.monotonic() - task.submitted
        return result
