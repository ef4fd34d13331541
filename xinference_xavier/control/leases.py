# SPDX-License-Identifier: Apache-2.0
"""The reader's side of leases: reserve, renew and give back blocks of other replicas.

A :class:`Reservation` is read by the engine thread; everything else here runs on the control
thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import xoscar as xo

from xinference_xavier.control.breaker import Breaker, Plane
from xinference_xavier.control.client import bounded
from xinference_xavier.control.messages import (
    MAX_KEYS,
    NAME_CHARACTERS,
    Credential,
    LeaseGrant,
    MemberInfo,
    Refused,
    Row,
    Timing,
    pack_keys,
    unpack_rows,
)
from xinference_xavier.store.jobs import Tier

if TYPE_CHECKING:
    from xinference_xavier.control.peer import PeerActor


class ReservationState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    FAILED = "failed"
    RELEASED = "released"


class Reservation:
    """Blocks asked of one member, and what it granted.

    ``rows`` are (tier, slot, generation) of the granted prefix, empty until then. ``lease_id`` is
    the lease on the first of them; ``further`` are those on the others, for a source leases a few
    hundred blocks at a time. ``expires`` is the ``time.monotonic()`` instant at which all of them
    end, counted from before the request was sent; ``reason`` says why it failed. The control
    thread sets ``state`` last, so whoever sees GRANTED sees the rows.
    """

    __slots__ = (
        "_released",
        "_state",
        "expires",
        "further",
        "lease_id",
        "member",
        "reason",
        "request_id",
        "rows",
    )

    def __init__(self, member: int, request_id: str) -> None:
        self.member = member
        self.request_id = request_id
        self.rows: list[Row] = []
        self.expires = 0.0
        self.reason: str | None = None
        self.lease_id = 0
        self.further: tuple[int, ...] = ()
        self._state = ReservationState.PENDING
        self._released = False

    @property
    def state(self) -> ReservationState:
        return ReservationState.RELEASED if self._released else self._state

    @property
    def leases(self) -> tuple[int, ...]:
        """All leases of a grant."""
        return (self.lease_id, *self.further)

    def give_up(self) -> bool:
        """Mark as released, from the engine thread; False if it was already."""
        first, self._released = not self._released, True
        return first

    def grant(
        self, lease_id: int, rows: list[Row], expires: float, further: tuple[int, ...] = ()
    ) -> None:
        self.lease_id, self.rows, self.expires, self.further = lease_id, rows, expires, further
        self._state = ReservationState.GRANTED

    def fail(self, reason: str) -> None:
        self.reason = reason
        self._state = ReservationState.FAILED


@dataclass(eq=False, slots=True)
class Peer:
    """Another member, as this replica knows it; ``ref`` is None until it has answered once.

    ``credential`` is what it wants to see with each call.
    """

    number: int
    info: MemberInfo
    credential: Credential
    breaker: Breaker
    ref: xo.ActorRefType[PeerActor] | None = None
    meeting: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self.ref is not None and self.breaker.usable


class LeaseKeeper:
    """Keeps every lease this replica has at others, until it is given back.

    How calls went is told to the peer's breaker; ``judged(peer)`` is called whenever that may have
    changed. ``missed(peer, key)`` is called when the peer says that it does not have a block it was
    asked for.
    """

    def __init__(
        self,
        *,
        reader: Callable[[], str],
        timing: Timing,
        judged: Callable[[Peer], None],
        missed: Callable[[Peer, bytes], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._reader = reader
        self._timing = timing
        self._judged = judged
        self._missed = missed
        # By identity: a reservation belongs to one peer for its whole life, whatever becomes of
        # the member's number.
        self._granted: dict[Reservation, Peer] = {}
        self._held: dict[Reservation, Peer] = {}
        self._returning: dict[Peer, list[int]] = {}
        self._renewing: dict[Peer, list[Reservation]] = {}
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the engine asked for -------------------------------------------------------------

    def reserve(self, reservation: Reservation, peer: Peer | None, keys: Sequence[bytes]) -> None:
        """Send a request, unless nobody waits for it any more or the breaker lets nothing through.

        The engine thread may not have seen yet that the peer was set aside.
        """
        if peer is None or peer.ref is None:
            self._failed(reservation, "unknown member")
        elif reservation.state is ReservationState.PENDING:
            if not peer.breaker.admit(reservation):
                self._failed(reservation, f"breaker {peer.breaker.state}")
                return
            if peer.breaker.on_trial(reservation):
                self._judged(peer)
            self._spawn(self._reserve(reservation, peer, peer.ref, keys))

    def hold(self, reservation: Reservation) -> None:
        """Renew a grant from now on, until it is released."""
        peer = self._granted.get(reservation)
        if peer is not None and reservation not in self._held:
            self._held[reservation] = peer
            self._renewing.setdefault(peer, []).append(reservation)
            self._flush_soon()

    def release(self, reservation: Reservation) -> None:
        """Give a grant back. One that is still on its way is given back when it arrives."""
        self._held.pop(reservation, None)
        peer = self._granted.pop(reservation, None)
        if peer is not None:
            self._give_back_soon(peer, reservation.leases)
            self.counters["given back"] += 1
            self._end_trial(reservation, peer)

    async def renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._timing.renew_s)
            for reservation, peer in self._held.items():
                self._renewing.setdefault(peer, []).append(reservation)
            self._send()

    def held(self) -> int:
        """Return the number of leases that this replica has at others."""
        return len(self._granted)

    def in_flight(self) -> int:
        """Return the number of calls that others have not answered yet."""
        return len(self._tasks)

    async def drain(self) -> None:
        """Give everything back and wait for the calls in flight; each has its deadline."""
        for reservation in list(self._granted):
            self.release(reservation)
        self._send()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- calls ---------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _flush_soon(self) -> None:
        # Once per turn of the loop: what one engine step gives back travels together.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _give_back_soon(self, peer: Peer, leases: Iterable[int]) -> None:
        self._returning.setdefault(peer, []).extend(leases)
        self._flush_soon()

    def _send(self) -> None:
        self._scheduled = False
        renewing, self._renewing = self._renewing, {}
        returning, self._returning = self._returning, {}
        for peer, reservations in renewing.items():
            self._spawn(self._renew(peer, reservations))
        for peer, leases in returning.items():
            self._spawn(self._give_back(peer, leases))

    async def _reserve(
        self,
        reservation: Reservation,
        peer: Peer,
        ref: xo.ActorRefType[PeerActor],
        keys: Sequence[bytes],
    ) -> None:
        sent = time.monotonic()
        duration = self._timing.promise_s
        call = ref.reserve(
            peer.credential,
            self._reader(),
            reservation.request_id[:NAME_CHARACTERS],  # clients may choose it
            pack_keys(keys[:MAX_KEYS]),
            duration,
        )
        try:
            answer = await bounded(call, self._timing.reserve_timeout_s)
            rows = [] if isinstance(answer, Refused) else _granted_rows(answer, len(keys))
        except Exception as error:
            # Whatever a peer or the network does is a failed reservation, never more.
            self._failed(reservation, describe(error))
            self._call_failed(peer, error)
            return
        if isinstance(answer, Refused):
            self._failed(reservation, answer.value)
            if answer in (Refused.DRAINING, Refused.CLOSED):
                peer.breaker.trip(time.monotonic(), answer.value)
                self._judged(peer)
            self._end_trial(reservation, peer)
            return
        peer.breaker.success(Plane.CONTROL)
        self._judged(peer)
        self._arrived(reservation, peer, answer, rows, sent + duration)
        granted = len(reservation.rows)
        if answer.missing and granted < len(keys):
            self._missed(peer, keys[granted])

    def _arrived(
        self,
        reservation: Reservation,
        peer: Peer,
        answer: LeaseGrant,
        rows: list[Row],
        expires: float,
    ) -> None:
        if not answer.lease_id:
            self._failed(reservation, "not held")
            self._end_trial(reservation, peer)
            return
        # Entered before it is looked at: a release that the engine thread posts from now on
        # finds it here.
        self._granted[reservation] = peer
        reservation.grant(answer.lease_id, rows, expires, answer.further)
        self.counters["granted"] += 1
        if peer.breaker.on_trial(reservation):
            # Its request may wait for long; nothing can be loaded under an expired promise.
            asyncio.get_running_loop().call_later(
                self._timing.promise_s, self._forgo_trial, reservation, peer
            )
        if reservation.state is ReservationState.RELEASED:
            self.release(reservation)

    def _failed(self, reservation: Reservation, reason: str) -> None:
        reservation.fail(reason)
        self.counters["reserve failed"] += 1

    def _call_failed(self, peer: Peer, error: BaseException) -> None:
        peer.breaker.failure(Plane.CONTROL, time.monotonic(), describe(error))
        self._judged(peer)

    def _forgo_trial(self, reservation: Reservation, peer: Peer) -> None:
        if reservation not in self._held:
            self._end_trial(reservation, peer)

    def _end_trial(self, reservation: Reservation, peer: Peer) -> None:
        if peer.breaker.end_trial(reservation):
            self._judged(peer)

    async def _renew(self, peer: Peer, reservations: list[Reservation]) -> None:
        if peer.ref is None:
            return
        sent = time.monotonic()
        duration = self._timing.lease_s
        leases = [lease for reservation in reservations for lease in reservation.leases]
        try:
            alive = await bounded(
                peer.ref.renew(peer.credential, leases, duration), self._timing.call_timeout_s
            )
            if len(alive) != len(leases):
                raise ValueError(f"{len(alive)} answers for {len(leases)} leases")
        except Exception as error:
            # The next round tries again; until then ``expires`` tells how long the lease lasts.
            self.counters["renewals failed"] += 1
            self._call_failed(peer, error)
            return
        ended = {lease for lease, renewed in zip(leases, alive, strict=True) if not renewed}
        for reservation in reservations:
            if ended.isdisjoint(reservation.leases):
                reservation.expires = sent + duration
            elif self._held.pop(reservation, None) is not None:
                del self._granted[reservation]
                reservation.fail("lease lost")
                self.counters["lost"] += 1
                if left := set(reservation.leases) - ended:
                    self._give_back_soon(peer, sorted(left))
                self._end_trial(reservation, peer)

    async def _give_back(self, peer: Peer, leases: list[int]) -> None:
        if peer.ref is None:
            return
        try:
            await bounded(peer.ref.release(peer.credential, leases), self._timing.call_timeout_s)
        except Exception as error:
            # The source's reaper ends them instead.
            self.counters["releases failed"] += len(leases)
            self._call_failed(peer, error)


def _granted_rows(answer: LeaseGrant, asked: int) -> list[Row]:
    """Return the rows of a grant for ``asked`` blocks; raises what shows that it is none.

    Rows that make no sense would fail the load or, where there are too many, promise vLLM blocks
    that its request does not have. A lease whose number is none could be neither renewed nor given
    back.
    """
    rows = unpack_rows(answer.rows)
    if len(rows) > asked:
        raise ValueError(f"{len(rows)} rows for {asked} blocks")
    if unknown := {tier for tier, _, _ in rows} - set(Tier):
        raise ValueError(f"rows of unknown tiers {sorted(unknown)}")
    # Lease 0 is a miss; then there are no rows.
    leases = (answer.lease_id, *answer.further) if rows else (answer.lease_id,)
    if not all(type(lease) is int and (lease > 0) is bool(rows) for lease in leases):
        raise ValueError(f"leases {leases!r:.80} on {len(rows)} rows")
    return rows


def describe(error: BaseException) -> str:
    """Say in a few words what went wrong with a remote call."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
