# SPDX-License-Identifier: Apache-2.0
"""Loads under way: from vLLM's allocation to the report of every rank.

A load that was announced to vLLM always ends in exactly one result, whatever happened to its
sources in between: rows that can no longer be loaded are shipped with generation 0, which no
slot ever has, so that the worker reports their blocks as failed and vLLM computes them.

All methods run on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np

from xinference_xavier.control.runtime import ControlRuntime, MemberInfo, Reservation
from xinference_xavier.store.index import Promotion, SnapshotIndex, StoreClosed
from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    Tier,
)
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.lookup import Lookups, Promise, Run
from xinference_xavier.vllm.pace import Pace
from xinference_xavier.vllm.sources import Part, Sources

logger = logging.getLogger(__name__)

MOST_LOADS: Final = 16
"""Loads under way at a time."""

POOL_SHARE: Final = 4
"""Loads together fill at most one of this many parts of vLLM's KV blocks (R14), unless there is
only one."""

OVERTIME_S: Final = 60.0
"""An own lease outlives the load's timeout by this: the worker may report late, never early."""

REMEMBERED_HITS: Final = 65536
"""Keys whose first hit at a peer is remembered, to store them again at the second."""

LOST: Final = (int(Tier.HOST), 0, 0)
"""A row that cannot be loaded: no slot ever has generation 0."""


@dataclass(slots=True)
class _Load:
    request_id: str
    keys: Sequence[bytes]
    first_block: int
    block_ids: list[int]
    runs: list[Run]
    parts: list[Part]
    """One per shipped segment."""
    promotions: list[Promotion]
    promoted: set[int]
    """Rows of all promotions together that no rank has failed."""
    ranks_left: int
    failed: set[int] = field(default_factory=set)
    """Failed blocks, counted from ``first_block``."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that ended. Of the request's blocks, those from ``first`` to before ``until`` hold
    their content; ``sources`` says from where, as (source, number of blocks) in their order, and
    ``store_again`` came from a peer for the second time."""

    request_id: str
    first: int
    until: int
    complete: bool
    sources: tuple[tuple[str, int], ...]
    store_again: tuple[int, ...]


class Loads:
    """The load side of one replica's connector."""

    def __init__(
        self,
        *,
        index: SnapshotIndex,
        control: ControlRuntime,
        lookups: Lookups,
        ranks: int,
        pool_blocks: int,
        block_tokens: int,
        timeout_s: float,
        promote: bool,
        pace: Pace,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``promote``: blocks of the host tier that are loaded go back to the device tier, as
        long as it has free slots."""
        self._index = index
        self._control = control
        self._lookups = lookups
        self._ranks = ranks
        self._pool_blocks = pool_blocks
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._promotes = promote
        self._counters = counters
        self._clock = clock
        self._next_job = 1
        self._loads: dict[int, _Load] = {}
        self._unshipped: list[LoadJob] = []
        self._blocks_in_flight = 0
        self._hit_once: OrderedDict[bytes, None] = OrderedDict()
        self._sources = Sources(
            control=control,
            info=self._info,
            pace=pace,
            counters=counters,
            block_tokens=block_tokens,
        )

    @property
    def jobs(self) -> int:
        """How many loads have not been reported by every rank."""
        return len(self._loads)

    def sources(self) -> dict[str, dict[str, object]]:
        """Return what was loaded, by member name; any thread."""
        return self._sources.to_dict()

    def request_ids(self) -> set[str]:
        """Return the requests whose loads are under way."""
        return {load.request_id for load in self._loads.values()}

    def room(self) -> int:
        """Return how many more blocks may be loaded now (R14).

        A load that is alone may have any size, or long prompts could never be loaded.
        """
        if len(self._loads) >= MOST_LOADS:
            return 0
        if not self._loads:
            return self._pool_blocks
        return self._pool_blocks // POOL_SHARE - self._blocks_in_flight

    def begin(
        self,
        request_id: str,
        promise: Promise | None,
        *,
        keys: Sequence[bytes],
        first_block: int,
        block_ids: Sequence[int],
    ) -> None:
        """Start the load of ``block_ids``, the request's blocks from ``first_block`` on."""
        runs = promise.runs if promise is not None else []
        promotions: list[Promotion] = []
        try:
            segments = self._segments(runs, first_block, block_ids, promotions)
        except Exception:
            # Fail open: vLLM waits for this load, so it must go out, as one that fails.
            self._counters.errors["begin load"] += 1
            logger.exception("Xavier could not make the load of request %s", request_id)
            segments = [_segment(OWN_STORE, [LOST] * len(block_ids), block_ids)]
        moves = [row for promotion in promotions for row in promotion.rows]
        job_id = self._next_job
        self._next_job += 1
        self._loads[job_id] = _Load(
            request_id,
            keys[first_block : first_block + len(block_ids)],
            first_block,
            list(block_ids),
            list(runs),
            [Part(segment.member, len(segment.rows)) for segment in segments],
            promotions,
            set(range(len(moves))),
            self._ranks,
        )
        self._blocks_in_flight += len(block_ids)
        table = np.array(moves, dtype=np.int64).reshape(-1, 3)
        self._unshipped.append(LoadJob(job_id, request_id, tuple(segments), self._timeout_s, table))

    def _segments(
        self,
        runs: Sequence[Run],
        first_block: int,
        block_ids: Sequence[int],
        promotions: list[Promotion],
    ) -> list[LoadSegment]:
        """Map the runs onto the blocks and keep their leases; the rest of the blocks is lost.

        Appends what is to be promoted with them to ``promotions``.
        """
        segments: list[LoadSegment] = []
        position, end = first_block, first_block + len(block_ids)
        for run in runs:
            stop = min(run.first + len(run.rows), end)
            if run.first > position or stop <= position:
                continue
            rows = run.rows[position - run.first : stop - run.first]
            ids = block_ids[position - first_block : stop - first_block]
            segments.append(_segment(run.member, rows, ids))
            self._hold(run)
            if self._promotes and run.member == OWN_STORE:
                promotions += self._promotion(run, position - run.first, stop - position)
            position = stop
        if position < end:
            lost = [LOST] * (end - position)
            segments.append(_segment(OWN_STORE, lost, block_ids[position - first_block :]))
        return segments

    def ship(self) -> tuple[list[LoadJob], dict[int, tuple[WorkerHandle, ...]]]:
        """Return the loads that start in this step, and the handles of the peers they read."""
        jobs, self._unshipped = self._unshipped, []
        peers: dict[int, tuple[WorkerHandle, ...]] = {}
        for job in jobs:
            for segment in job.segments:
                info = self._info(segment.member)
                if info is not None:
                    peers[segment.member] = info.workers
        return jobs, peers

    def completed(self, results: Iterable[LoadResult]) -> list[Loaded]:
        """Take the ranks' reports and return the loads that every rank has reported."""
        ended = []
        for result in results:
            load = self._loads.get(result.job_id)
            if load is None:
                self._counters.errors["unknown load job"] += 1
                continue
            load.ranks_left -= 1
            try:
                self._note(load, result)
            except Exception:
                # Fail open: leases and counts hang on the end of this load, whatever was reported.
                self._counters.errors["load report"] += 1
                logger.exception("Xavier could not read the report of load %d", result.job_id)
                load.failed.update(range(len(load.block_ids)))
                load.promoted.clear()
            if load.ranks_left == 0:
                del self._loads[result.job_id]
                ended.append(self._end(load))
        return ended

    def _hold(self, run: Run) -> None:
        """Keep a run's lease from now to the end of the load."""
        try:
            if isinstance(run.hold, Reservation):
                self._control.hold(run.hold)
            else:
                self._index.renew(
                    run.hold.lease_id,
                    now=self._clock(),
                    duration=self._timeout_s + OVERTIME_S,
                )
        except StoreClosed:
            return
        except Exception:
            # Fail open: vLLM waits for this load. If the lease runs out, generations tell.
            self._counters.errors["hold"] += 1
            logger.exception("Xavier could not hold a lease of member %d", run.member)

    def _promotion(self, run: Run, first: int, count: int) -> list[Promotion]:
        """Find device slots for blocks of an own run: one promotion, or none."""
        if isinstance(run.hold, Reservation):
            return []
        try:
            planned = self._index.promote(run.hold.lease_id, first, count, wait=False)
        except StoreClosed:
            return []
        except Exception:
            # Fail open: the load itself goes on, its blocks stay in the host tier.
            self._counters.errors["promote"] += 1
            logger.exception("Xavier could not plan a promotion")
            return []
        return [planned] if planned is not None and planned.rows else []

    def _finish_promotions(self, load: _Load) -> None:
        """Let blocks move whose copies are good on every rank; free all other slots."""
        start = 0
        for promotion in load.promotions:
            end = start + len(promotion.rows)
            good = {row - start for row in load.promoted if start <= row < end}
            start = end
            try:
                self._index.finish_promotion(promotion.promotion_id, good)
            except StoreClosed:
                return
            except Exception:
                # Fail open: the leases of this load must still be released.
                self._counters.errors["promote"] += 1
                logger.exception("Xavier could not finish promotion %d", promotion.promotion_id)

    def _info(self, member: int) -> MemberInfo | None:
        if member == OWN_STORE:
            return None
        try:
            return self._control.member_info(member)
        except Exception:
            # Fail open: vLLM waits for the load, whose rows the worker now reports as failed.
            self._counters.errors["member info"] += 1
            logger.exception("Xavier does not know how to reach member %d", member)
            return None

    def _note(self, load: _Load, result: LoadResult) -> None:
        offset = 0
        for part, segment in zip(load.parts, result.segments, strict=False):
            part.add(segment)
            load.failed.update(offset + row for row in segment.failed_rows)
            offset += part.rows
        # A report that lacks segments has loaded nothing of them.
        load.failed.update(range(offset, len(load.block_ids)))
        load.promoted &= result.promoted

    def _end(self, load: _Load) -> Loaded:
        try:
            self._sources.judge(load.parts)
        except Exception:
            # Fail open: leases hang on the end of this load.
            self._counters.errors["load report"] += 1
            logger.exception("Xavier could not judge the load of request %s", load.request_id)
        self._finish_promotions(load)
        for run in load.runs:
            self._lookups.release(run)
        self._blocks_in_flight -= len(load.block_ids)
        good = min(load.failed, default=len(load.block_ids))
        self._counters.loads += 1
        self._counters.failed_blocks += len(load.failed)
        sources, store_again = self._sort_out(load, good)
        for source, blocks in sources:
            self._counters.loaded_tokens[source] += blocks * self._block_tokens
        return Loaded(
            load.request_id,
            load.first_block,
            load.first_block + good,
            not load.failed,
            tuple(sources),
            tuple(store_again),
        )

    def _sort_out(self, load: _Load, good: int) -> tuple[list[tuple[str, int]], list[int]]:
        """Return the usable blocks by source, and those a peer gave for the second time."""
        sources: list[str] = []
        again: list[int] = []
        position = load.first_block
        for run in load.runs:
            stop = min(run.first + len(run.rows), load.first_block + good)
            if run.first > position:
                break
            owner = "own" if run.member == OWN_STORE else "peer"
            for block in range(position, stop):
                tier = Tier(run.rows[block - run.first][0]).name.lower()
                sources.append(f"{owner}_{tier}")
                key = load.keys[block - load.first_block]
                if run.member != OWN_STORE and self._second_hit(key):
                    again.append(block)
            position = max(position, stop)
        return [(name, len(list(blocks))) for name, blocks in groupby(sources)], again

    def _second_hit(self, key: bytes) -> bool:
        if key in self._hit_once:
            del self._hit_once[key]
            return True
        self._hit_once[key] = None
        if len(self._hit_once) > REMEMBERED_HITS:
            self._hit_once.popitem(last=False)
        return False


def _segment(
    member: int, rows: Sequence[tuple[int, int, int]], block_ids: Sequence[int]
) -> LoadSegment:
    table = np.empty((len(block_ids), 4), dtype=np.int64)
    table[:, :3] = rows
    table[:, 3] = block_ids
    return LoadSegment(member, table)
