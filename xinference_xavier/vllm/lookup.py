# SPDX-License-Identifier: Apache-2.0
"""What a waiting request can load: found without waiting, promised only under leases.

A request's plan is a chain of runs over its block hashes: from the own tiers where they hold the
next block, else from the peer that holds the longest run of what follows. Own runs are leased in
the index at once. Peers' runs are reserved by the control thread, beginning when vLLM adds the
request, so that the first lookup often finds the grants; else vLLM is told to ask again, until
``lookup_timeout_s``. What is promised is the contiguous part that is granted with a safety margin
left on every lease.

All methods run on the engine's thread. None waits for an RPC or a copy; lookups only try the
index's lock, and giving a lease back takes it, which others hold for a few hundred keys at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime, Reservation, ReservationState
from xinference_xavier.store.index import Grant, SnapshotIndex, StoreClosed
from xinference_xavier.store.jobs import OWN_STORE
from xinference_xavier.vllm.compat import Blocks
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.pace import Pace

logger = logging.getLogger(__name__)

PROMISE_S: Final = 2.0
"""Life of a lease on blocks that vLLM has not allocated space for; such leases are not renewed."""

MARGIN_S: Final = 0.5
"""A promise is given only while every lease under it lasts at least this long."""

MOST_RUNS: Final = 16
"""Runs of one plan: a prefix shredded over more sources is loaded up to there."""

RUN_BLOCKS: Final = 256
"""Longest run of the own tiers: bounds how long the index's lock is held."""

Row = tuple[int, int, int]
"""Tier, slot, generation."""


class _IndexBusy(Exception):
    """The index's lock was held by another thread, which takes microseconds: ask again."""


class WaitingRequest(Protocol):
    """The part of vLLM's ``Request`` that a lookup reads."""

    request_id: str
    block_hashes: Sequence[bytes]


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one source, from block ``first`` of the request on.

    ``hold`` is the own index's grant or the reservation at the peer ``member``.
    """

    member: int
    first: int
    wanted: int
    hold: Grant | Reservation

    @property
    def rows(self) -> Sequence[Row]:
        """Return what is granted, a prefix of what was wanted."""
        return self.hold.rows

    @property
    def expires(self) -> float:
        """Return the ``time.monotonic()`` instant at which the lease ends."""
        return self.hold.expires

    @property
    def waiting(self) -> bool:
        """Whether the peer has not answered yet."""
        return isinstance(self.hold, Reservation) and self.hold.state is ReservationState.PENDING


@dataclass(slots=True)
class Promise:
    """The plan of one request, from block ``start`` on."""

    request_id: str
    start: int
    runs: list[Run] = field(default_factory=list)
    ask_until: float | None = None

    def granted(self, now: float) -> int:
        """Return the end (a block number) of what can be promised: contiguous, leased, in time.

        A run that is granted in part is the last one.
        """
        end = self.start
        for run in self.runs:
            if run.first != end or run.waiting or run.expires < now + MARGIN_S:
                break
            end += len(run.rows)
            if len(run.rows) < run.wanted:
                break
        return end


class Lookups:
    """The lookup side of one replica's connector."""

    def __init__(
        self,
        *,
        index: SnapshotIndex,
        control: ControlRuntime,
        mirror: Mirror,
        blocks: Blocks,
        block_tokens: int,
        lookup_timeout_s: float,
        min_load_tokens: int | None,
        pace: Pace,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._control = control
        self._mirror = mirror
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._lookup_timeout_s = lookup_timeout_s
        self._min_load_tokens = min_load_tokens
        self._pace = pace
        self._counters = counters
        self._clock = clock
        self._promises: dict[str, Promise] = {}
        self._missed: dict[str, str] = {}

    @property
    def promises(self) -> Mapping[str, Promise]:
        """Return the plans of waiting requests, by request id."""
        return self._promises

    @property
    def open(self) -> int:
        """How many plans and misses wait for vLLM to settle their requests."""
        return len(self._promises) + len(self._missed)

    def begin(self, request: WaitingRequest) -> None:
        """Start reserving for a request that vLLM just added."""
        keys = request.block_hashes
        if not keys:
            return
        try:
            self._plan(request, self._locally_cached(keys))
        except _IndexBusy:
            return  # the lookup asks again

    def matched(self, request: WaitingRequest, local_blocks: int, *, room: int) -> int | None:
        """Return how many blocks after ``local_blocks`` can be loaded; None means ask again.

        At most ``room`` blocks may be loaded now. Called any number of times.
        """
        request_id = request.request_id
        if room <= 0:
            self.drop(request_id)
            return self._miss(request_id, "busy")
        now = self._clock()
        promise = self._promises.get(request_id)
        if promise is not None and not self._fits(promise, local_blocks, now):
            self.drop(request_id)
            promise = None
        if promise is None:
            try:
                promise = self._plan(request, local_blocks)
            except _IndexBusy:
                return None
        if promise is None:
            return self._miss(request_id, "cold")
        if any(run.waiting for run in promise.runs):
            if promise.ask_until is None:
                promise.ask_until = now + self._lookup_timeout_s
            if now < promise.ask_until:
                return None
        count, reason = self._offer(
            promise, local_blocks, min(promise.granted(now), local_blocks + room)
        )
        if reason is None:
            return count
        self.drop(request_id)
        return self._miss(request_id, reason)

    def take(self, request_id: str) -> Promise | None:
        """Hand over a plan whose blocks vLLM has allocated; its leases are the caller's now."""
        self._missed.pop(request_id, None)
        return self._promises.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Give back what a request's plan holds, if it has one."""
        promise = self._promises.pop(request_id, None)
        for run in promise.runs if promise is not None else ():
            self.release(run)

    def settled(self, request_id: str) -> None:
        """Count a request that vLLM schedules or ends without a load of ours."""
        self.drop(request_id)
        reason = self._missed.pop(request_id, None)
        if reason is not None:
            self._counters.lookups_missed[reason] += 1

    def drop_all(self) -> None:
        """Give back every plan, at a reset or at the end."""
        for request_id in list(self._promises):
            self.drop(request_id)

    def release(self, run: Run) -> None:
        """End a run's lease, whatever its state; never raises."""
        try:
            if isinstance(run.hold, Reservation):
                self._control.release(run.hold)
            else:
                self._index.release(run.hold.lease_id)
        except StoreClosed:
            return
        except Exception:
            # Fail open: a lease that is not given back runs out, and others wait to be released.
            self._counters.errors["release"] += 1
            logger.exception("Xavier could not release a lease of member %d", run.member)

    def _miss(self, request_id: str, reason: str) -> int:
        self._missed[request_id] = reason
        return 0

    def _fits(self, promise: Promise, local_blocks: int, now: float) -> bool:
        """Whether a plan still answers the question: it starts early enough and is not stale."""
        return promise.start <= local_blocks and all(
            run.waiting or not run.rows or run.expires >= now + MARGIN_S for run in promise.runs
        )

    def _offer(self, promise: Promise, start: int, end: int) -> tuple[int, str | None]:
        """Return how many blocks from ``start`` on to load of those granted before ``end``.

        With a reason instead where loading is not worth it, or nothing is granted.
        """
        if end <= start:
            late = any(run.waiting for run in promise.runs)
            return 0, "late" if late else "refused"
        if self._min_load_tokens is not None:
            short = (end - start) * self._block_tokens < self._min_load_tokens
            return (0, "short") if short else (end - start, None)
        for run in promise.runs:
            if run.first >= end:
                break
            if run.first + len(run.rows) > start and not self._pace.worth_loading(run.member):
                end = max(run.first, start)
                break
        return (end - start, None) if end > start else (0, "slow")

    def _locally_cached(self, keys: Sequence[bytes]) -> int:
        """Return about how many leading blocks vLLM's own prefix cache holds.

        vLLM evicts the tail of a prefix first, so a binary search finds the edge; where it does
        not, the plan only starts too early or is made again.
        """
        if not self._blocks.is_cached(keys[0]):
            return 0  # most often, and much cheaper to find out than to search for
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._blocks.is_cached(keys[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _plan(self, request: WaitingRequest, start: int) -> Promise | None:
        """Lease and reserve what follows block ``start``; None when nobody has that block.

        Raises :class:`_IndexBusy`; holds nothing after any exception.
        """
        keys = request.block_hashes
        if start >= len(keys):
            return None
        request_id = request.request_id
        usable = self._control.usable_mask()
        run = self._run(keys, start, request_id, usable)
        if run is None:
            return None
        promise = Promise(request_id, start, [run])
        self._promises[request_id] = promise
        position = start + run.wanted
        try:
            while position < len(keys) and len(promise.runs) < MOST_RUNS:
                run = self._run(keys, position, request_id, usable)
                if run is None:
                    break
                promise.runs.append(run)
                position += run.wanted
        except Exception:
            self.drop(request_id)
            raise
        return promise

    def _run(self, keys: Sequence[bytes], first: int, request_id: str, usable: int) -> Run | None:
        """Lease or reserve what follows block ``first``, from one source."""
        if self._index.knows(keys[first]):
            run = self._own_run(keys, first, request_id)
            if run is not None:
                return run
        return self._peer_run(keys, first, request_id, usable)

    def _own_run(self, keys: Sequence[bytes], first: int, request_id: str) -> Run | None:
        try:
            grant = self._index.acquire(
                keys[first : first + RUN_BLOCKS],
                reader=None,
                request=request_id,
                now=self._clock(),
                duration=PROMISE_S,
                wait=False,
            )
        except StoreClosed:
            return None
        if grant is None:
            raise _IndexBusy
        if not grant.rows:
            return None
        return Run(OWN_STORE, first, len(grant.rows), grant)

    def _peer_run(
        self, keys: Sequence[bytes], first: int, request_id: str, usable: int
    ) -> Run | None:
        found = self._mirror.longest(keys, first, usable)
        if found is None:
            if self._mirror.overflowed:
                # It may have dropped what the directory knows; the next request profits.
                self._control.ask(keys[first:])
            return None
        member, count = found
        hold = self._control.reserve(member, keys[first : first + count], request_id)
        return Run(member, first, count, hold)
