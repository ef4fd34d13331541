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
from queue import Empty, SimpleQueue
from typing import Final

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import CHECKSUM, EngineClosed
from xinference_xavier.store.device import Device
from xinference_xavier.store.jobs import LoadJob, LoadResult, SegmentResult, Tier
from xinference_xavier.store.threads import start_thread
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.links import LinkStatus, PeerLinks
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.segment import Means, SegmentLoad, Verifier
from xinference_xavier.transport.select import Transports

logger = logging.getLogger(__name__)

REAP_S: Final = 2.0
"""How often idle load threads look for dead peers."""


@dataclass(frozen=True, slots=True)
class _Task:
    job: LoadJob
    peers: Mapping[int, WorkerHandle]
    submitted: float


class LoadEngine:
    """Runs load jobs on a few threads ``xavier-load-N``.

    ``submit``, ``poll`` and ``status`` are for the worker's main thread and never wait. Each job
    gives exactly one result, within its timeout plus the end of a local copy.

    Failed rows carry one reason per segment: ``generation`` (the slot holds something else),
    ``checksum``, ``timeout``, ``transfer`` (the read failed), ``unavailable`` (no path to the
    peer), ``skipped`` (an earlier row of the prefix failed, so this one is useless) or ``closed``.
    """

    def __init__(
        self,
        *,
        layout: BlockLayout,
        arenas: Mapping[Tier, Arena],
        device: Device,
        verify: str,
        staging: range,
        transports: Transports,
        threads: int = 2,
        reap_s: float = REAP_S,
    ) -> None:
        """Start the threads. ``staging`` are slots at the end of our host arena."""
        self._links = PeerLinks(transports)
        self._means = Means(
            layout=layout,
            arenas=dict(arenas),
            device=device,
            links=self._links,
            pool=StagingPool(staging, transports.quarantined),
        )
        self._verify = verify == CHECKSUM
        self._reap_s = reap_s
        self._next_reap = time.monotonic() + reap_s
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._results: SimpleQueue[LoadResult] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self._abandon = threading.Event()
        self._threads = [start_thread(self._run, f"xavier-load-{i}") for i in range(threads)]

    @property
    def pending(self) -> int:
        """Jobs submitted whose result was not polled yet."""
        return self._pending

    def submit(self, job: LoadJob, peers: Mapping[int, WorkerHandle]) -> None:
        """Queue a job; its timeout begins now. ``peers`` has the handle of each member in it.

        Raises :class:`EngineClosed` after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed(f"load engine is closed: load job {job.job_id} is not taken")
            self._pending += 1
            self._tasks.put(_Task(job, peers, time.monotonic()))

    def poll(self) -> list[LoadResult]:
        """Return the results that are ready, each once."""
        results: list[LoadResult] = []
        while not self._results.empty():
            results.append(self._results.get())
        with self._lock:
            self._pending -= len(results)
        return results

    def status(self) -> dict[int, LinkStatus]:
        """Return the transport in use and its measured bandwidth, per member."""
        return self._links.status()

    def close(self, deadline_s: float) -> bool:
        """Refuse new jobs and finish the queued ones within ``deadline_s`` seconds. Idempotent.

        Returns whether everything ended. Jobs not begun by then are reported failed; running ones
        end by their own timeout, and until a later call returns True they may write KV blocks.
        Connections close with their last user.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._abandon.set()
        self._links.close()
        return not any(thread.is_alive() for thread in self._threads)

    # --- the load threads -------------------------------------------------------------------

    def _run(self) -> None:
        verifier = Verifier(self._means.layout, self._means.device) if self._verify else None
        more = False
        while True:
            try:
                task = self._tasks.get(timeout=0 if more else self._reap_s)
            except Empty:
                more = self._tidy()
                continue
            if task is None:
                return
            self._results.put(self._load(task, verifier))
            more = self._tidy()

    def _tidy(self) -> bool:
        """Do a bit of work between loads; return whether there is more of it."""
        try:
            with self._lock:
                now = time.monotonic()
                due = now >= self._next_reap
                if due:
                    self._next_reap = now + self._reap_s
            if due:
                self._links.reap()
            return self._tasks.empty() and self._links.warm()
        except Exception:  # fail open: a transport that misbehaves must not end the thread
            logger.exception("looking after connections failed")
            return False

    def _load(self, task: _Task, verifier: Verifier | None) -> LoadResult:
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
                    deadline=task.submitted + job.timeout_s,
                    verifier=verifier,
                ).run()
                if part.failed_rows:
                    stop = "skipped"
            else:
                rows = set(range(len(segment.rows)))
                part = SegmentResult(segment.member, "none", failed_rows=rows, reason=stop)
            result.segments.append(part)
        result.seconds = time.monotonic() - task.submitted
        return result
