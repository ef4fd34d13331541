# SPDX-License-Identifier: Apache-2.0
"""A worker that only loads, for the measurements of transports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from xinference_xavier.bench.blocks import Cache
from xinference_xavier.bench.source import HOST
from xinference_xavier.control.messages import Row
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import LoadJob, LoadSegment, Tier
from xinference_xavier.transport.base import Connection, WorkerHandle
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.select import Transports

MOST_STAGING: Final = 256
"""Staging slots of a worker."""

MEMBER: Final = 1
LIMIT_S: Final = 60.0
POLL_S: Final = 2e-4


class Reader:
    """Our worker: KV cache, arena with staging slots at its end, and one transport."""

    def __init__(self, handle: WorkerHandle, cache: Cache, arena: Arena, transport: str) -> None:
        """Raises :class:`TransportUnavailable`."""
        self._handle = handle
        self._blocks = cache.layout.num_blocks
        self.staging = range(arena.slots - min(MOST_STAGING, arena.slots), arena.slots)
        self._transports = Transports.start(
            choice=transport,
            arenas={Tier.HOST: arena},
            staging={Tier.HOST: self.staging},
            host=HOST,
            layout_digest=cache.layout.digest(),
        )
        self._engine = LoadEngine(
            layout=cache.layout,
            arenas={Tier.HOST: arena},
            device=cache.device,
            verify="off",
            staging={Tier.HOST: self.staging},
            transports=self._transports,
        )
        self._connection: Connection | None = None
        self._random = np.random.default_rng(0)
        self._jobs = 0
        try:
            self._connection = self._transports.connect(
                MEMBER,
                handle,
                Tier.HOST,
                pools={Tier.HOST: StagingPool(self.staging, frozenset)},
                deadline=time.monotonic() + LIMIT_S,
            )
        except BaseException:
            self.close()
            raise

    def load(self, first: int, count: int) -> float:
        """Load slots into scattered KV blocks as for a request.

        Returns the seconds on the load thread: the hand-over between threads is no part of a
        transport.
        """
        return self.load_rows(
            [(int(Tier.HOST), slot, slot + 1) for slot in range(first, first + count)]
        )

    def load_rows(self, granted: Sequence[Row]) -> float:
        """Do as :meth:`load` with what a source granted."""
        blocks = self._random.permutation(self._blocks)[: len(granted)]
        rows = np.column_stack([np.array(granted, dtype=np.int64), blocks])
        self._jobs += 1
        job = LoadJob(self._jobs, "bench", (LoadSegment(MEMBER, rows),), LIMIT_S)
        self._engine.submit(job, {MEMBER: self._handle})
        while not (results := self._engine.poll()):
            time.sleep(POLL_S)
        segment = results[0].segments[0]
        if segment.failed_rows:
            raise RuntimeError(
                f"{len(segment.failed_rows)} of {len(rows)} blocks: {segment.reason}"
            )
        return segment.seconds

    def fetch(self, first: int, count: int) -> float:
        """Read slots into staging slots, as many at once as there are; return the seconds."""
        if self._connection is None:
            raise RuntimeError("the reader is closed")
        started = time.perf_counter()
        for at in range(0, count, len(self.staging)):
            n = min(len(self.staging), count - at)
            slots = range(first + at, first + at + n)
            deadline = time.monotonic() + LIMIT_S
            self._connection.fetch(slots, self.staging[:n], deadline=deadline)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close connections and transport; the arena is the caller's."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.close(LIMIT_S)
        self._transports.close()
