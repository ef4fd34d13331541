# SPDX-License-Identifier: Apache-2.0
"""The reader's side of leases, against a peer that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from xinference_xavier.control.breaker import FAILURES_TO_OPEN, Breaker, BreakerState, Plane
from xinference_xavier.control.leases import LeaseKeeper, Peer, Reservation, ReservationState
from xinference_xavier.control.messages import (
    Credential,
    LeaseGrant,
    MemberInfo,
    Refused,
    Timing,
    pack_rows,
    unpack_keys,
)

TIMING = Timing(renew_s=0.001, reserve_timeout_s=30.0, call_timeout_s=30.0)
KEYS = [bytes([number]) * 32 for number in range(4)]
SHOWN = Credential(b"f" * 32, 11, b"p" * 32)
ROWS = [(0, 5, 9), (1, 6, 10)]
CUT = "iterative unpacking requires a buffer of a multiple of 24 bytes"
ODD_TIER = "rows of unknown tiers [2]"
ODD_LEASE = "leases (7, None) on 2 rows"


@dataclass
class FakePeer:
    """Answers in place of a PeerActor's reference."""

    answer: Any = field(default_factory=lambda: LeaseGrant(7, pack_rows(ROWS)))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    alive: bool = True
    ended: set[int] = field(default_factory=set)
    broken: bool = False
    curt: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, *args: Any) -> Any:
        self.calls.append(("reserve", *args))
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def renew(self, *args: Any) -> list[bool]:
        self.calls.append(("renew", *args))
        self.renewed.set()
        if self.broken:
            raise ConnectionError("gone")
        answer = [self.alive and lease not in self.ended for lease in args[1]]
        return answer[1:] if self.curt else answer

    async def release(self, *args: Any) -> int:
        self.calls.append(("release", *args))
        if self.broken:
            raise ConnectionError("gone")
        return len(args[1])

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class RecordingBreaker(Breaker):
    """Also notes what it is told of calls."""

    def __init__(self) -> None:
        super().__init__(1.0, 30.0)
        self.verdicts: list[str | None] = []
        self.refusals: list[str] = []

    def success(self, plane: Plane) -> None:
        assert plane is Plane.CONTROL
        self.verdicts.append(None)
        super().success(plane)

    def failure(self, plane: Plane, now: float, reason: str) -> None:
        assert plane is Plane.CONTROL
        self.verdicts.append(reason)
        super().failure(plane, now, reason)

    def trip(self, now: float, reason: str) -> None:
        self.refusals.append(reason)
        super().trip(now, reason)


class Scene:
    """A keeper and one fake peer."""

    def __init__(self) -> None:
        self.usable: list[bool] = []
        self.missed: list[bytes] = []
        self.breaker = RecordingBreaker()
        self.fake = FakePeer()
        self.keeper = LeaseKeeper(
            reader=lambda: "b:2",
            timing=TIMING,
            judged=lambda peer: self.usable.append(peer.usable),
            missed=lambda peer, key: self.missed.append(key),
        )
        info = MemberInfo("a", 11, "a:1", "host", 0.0)
        self.peer = Peer(3, info, SHOWN, self.breaker, ref=self.fake)

    async def ask(self) -> Reservation:
        reservation = Reservation(3, "request")
        self.keeper.reserve(reservation, self.peer, KEYS)
        await self.turn()
        return reservation

    async def granted(self) -> Reservation:
        self.fake.gate.set()
        reservation = await self.ask()
        await self.quiet()
        assert reservation.state is ReservationState.GRANTED
        return reservation

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def quiet(self) -> None:
        while self.keeper.in_flight():
            await asyncio.sleep(0)


def scene(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            await test(Scene())

        asyncio.run(asyncio.wait_for(main(), 30))

    run.__name__ = test.__name__
    return run


@scene
async def test_a_grant_brings_rows_and_counts_its_life_from_before_it_was_asked(s: Scene) -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    reservation = await s.ask()
    sent_by = loop.time()
    s.fake.gate.set()
    await s.quiet()
    assert reservation.state is ReservationState.GRANTED
    assert reservation.rows == ROWS
    assert before <= reservation.expires - TIMING.promise_s <= sent_by
    ((_, shown, reader, request, keys, duration),) = s.fake.named("reserve")
    assert (shown, reader, request) == (SHOWN, "b:2", "request")
    assert (unpack_keys(keys), duration) == (KEYS, TIMING.promise_s)
    assert s.breaker.verdicts == [None]


@scene
async def test_released_before_it_was_sent_nothing_is_sent(s: Scene) -> None:
    reservation = Reservation(3, "request")
    assert reservation.give_up()
    s.keeper.reserve(reservation, s.peer, KEYS)
    s.keeper.release(reservation)
    await s.turn()
    assert s.fake.calls == []


@scene
async def test_released_while_pending_the_grant_goes_back_on_arrival(s: Scene) -> None:
    reservation = await s.ask()
    assert reservation.give_up()
    s.keeper.release(reservation)
    s.fake.gate.set()
    await s.quiet()
    await s.turn()
    assert s.fake.named("release") == [("release", SHOWN, [7])]
    assert reservation.state is ReservationState.RELEASED
    assert s.keeper.held() == 0


@scene
async def test_a_second_release_is_not_sent(s: Scene) -> None:
    reservation = await s.granted()
    assert reservation.give_up()
    assert not reservation.give_up()
    s.keeper.release(reservation)
    s.keeper.release(reservation)
    await s.turn()
    assert len(s.fake.named("release")) == 1


@scene
async def test_what_one_turn_gives_back_travels_together(s: Scene) -> None:
    reservations = []
    for lease in (1, 2, 3):
        s.fake.answer = LeaseGrant(lease, pack_rows(ROWS))
        reservations.append(await s.granted())
    for reservation in reservations:
        s.keeper.release(reservation)
    await s.turn()
    assert s.fake.named("release") == [("release", SHOWN, [1, 2, 3])]


@scene
async def test_a_held_grant_is_renewed_at_once_and_again_until_released(s: Scene) -> None:
    reservation = await s.granted()
    promised = reservation.expires
    s.keeper.hold(reservation)
    await s.turn()
    assert s.fake.named("renew") == [("renew", SHOWN, [7], TIMING.lease_s)]
    assert reservation.expires > promised
    renewing = asyncio.create_task(s.keeper.renew_for_ever())
    s.fake.renewed.clear()
    await s.fake.renewed.wait()
    s.keeper.release(reservation)
    await s.quiet()
    renewals = len(s.fake.named("renew"))
    await asyncio.sleep(TIMING.renew_s * 3)
    assert len(s.fake.named("renew")) == renewals
    renewing.cancel()


@scene
async def test_an_unheld_grant_is_never_renewed(s: Scene) -> None:
    await s.granted()
    renewing = asyncio.create_task(s.keeper.renew_for_ever())
    await asyncio.sleep(TIMING.renew_s * 3)
    assert s.fake.named("renew") == []
    renewing.cancel()


@scene
async def test_a_lease_that_the_source_ended_fails_and_is_not_given_back(s: Scene) -> None:
    reservation = await s.granted()
    s.fake.alive = False
    s.keeper.hold(reservation)
    await s.turn()
    assert (reservation.state, reservation.reason) == (ReservationState.FAILED, "lease lost")
    s.keeper.release(reservation)
    await s.turn()
    assert s.fake.named("release") == []


@scene
async def test_a_failed_renewal_blames_the_peer_and_leaves_the_expiry(s: Scene) -> None:
    reservation = await s.granted()
    expires = reservation.expires
    s.fake.broken = True
    s.keeper.hold(reservation)
    await s.quiet()
    await s.turn()
    assert (reservation.state, reservation.expires) == (ReservationState.GRANTED, expires)
    assert s.breaker.verdicts == [None, "gone"]
    s.keeper.release(reservation)
    await s.turn()
    assert s.breaker.verdicts == [None, "gone", "gone"]
    assert s.keeper.counters["releases failed"] == 1


@scene
async def test_renewals_that_fail_three_times_in_a_row_set_the_peer_aside(s: Scene) -> None:
    reservation = await s.granted()
    s.fake.broken = True
    s.keeper.hold(reservation)
    renewing = asyncio.create_task(s.keeper.renew_for_ever())
    while s.breaker.state is not BreakerState.OPEN:
        await asyncio.sleep(0)
    renewing.cancel()
    assert s.keeper.counters["renewals failed"] == FAILURES_TO_OPEN
    assert s.usable[-1] is False
    # What was promised stays so: the load goes on until its lease ends.
    assert reservation.state is ReservationState.GRANTED


@scene
async def test_a_renewal_that_lacks_an_answer_is_a_failed_one(s: Scene) -> None:
    reservation = await s.granted()
    s.fake.curt = True
    s.keeper.hold(reservation)
    await s.quiet()
    await s.turn()
    assert reservation.state is ReservationState.GRANTED
    assert s.breaker.verdicts == [None, "0 answers for 1 leases"]
    assert s.keeper.counters["renewals failed"] == 1


@pytest.mark.parametrize(
    ("answer", "reason", "verdicts", "refusals"),
    [
        (LeaseGrant(0, b""), "not held", [None], []),
        (Refused.DRAINING, "draining", [], ["draining"]),
        (Refused.CLOSED, "closed", [], ["closed"]),
        (Refused.EPOCH, "stale epoch", [], []),
        (ConnectionError("reset\nby peer"), "reset", ["reset"], []),
        (LeaseGrant(7, pack_rows(ROWS)[:-8]), CUT, [CUT], []),
        (LeaseGrant(7, pack_rows(3 * ROWS)), "6 rows for 4 blocks", ["6 rows for 4 blocks"], []),
        (LeaseGrant(7, pack_rows([(2, 5, 9)])), ODD_TIER, [ODD_TIER], []),
        (LeaseGrant(7, pack_rows(ROWS), further=(None,)), ODD_LEASE, [ODD_LEASE], []),
    ],
)
def test_failures_are_told_apart(
    answer: Any, reason: str, verdicts: list[str | None], refusals: list[str]
) -> None:
    @scene
    async def run(s: Scene) -> None:
        s.fake.answer = answer
        s.fake.gate.set()
        reservation = await s.ask()
        await s.quiet()
        assert (reservation.state, reservation.reason) == (ReservationState.FAILED, reason)
        assert (s.breaker.verdicts, s.breaker.refusals) == (verdicts, refusals)
        assert s.keeper.held() == 0

    run()


@scene
async def test_drain_gives_everything_back_and_waits_for_it(s: Scene) -> None:
    await s.granted()
    s.fake.answer = LeaseGrant(8, pack_rows(ROWS))
    await s.granted()
    await s.keeper.drain()
    assert s.fake.named("release") == [("release", SHOWN, [7, 8])]
    assert (s.keeper.held(), s.keeper.in_flight()) == (0, 0)


@scene
async def test_a_grant_of_several_leases_is_kept_and_given_back_as_one(s: Scene) -> None:
    s.fake.answer = LeaseGrant(7, pack_rows(ROWS), (8, 9))
    reservation = await s.granted()
    s.keeper.hold(reservation)
    await s.turn()
    s.keeper.release(reservation)
    await s.turn()
    assert s.fake.named("renew") == [("renew", SHOWN, [7, 8, 9], TIMING.lease_s)]
    assert s.fake.named("release") == [("release", SHOWN, [7, 8, 9])]


@scene
async def test_of_a_grant_that_lost_one_lease_the_others_go_back(s: Scene) -> None:
    s.fake.answer = LeaseGrant(7, pack_rows(ROWS), (8, 9))
    reservation = await s.granted()
    s.fake.ended = {8}
    s.keeper.hold(reservation)
    await s.turn()
    await s.quiet()
    assert (reservation.state, reservation.reason) == (ReservationState.FAILED, "lease lost")
    assert s.fake.named("release") == [("release", SHOWN, [7, 9])]
    assert s.keeper.held() == 0


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        (LeaseGrant(0, b"", missing=True), [KEYS[0]]),
        (LeaseGrant(7, pack_rows(ROWS), missing=True), [KEYS[2]]),
        (LeaseGrant(7, pack_rows(ROWS)), []),
        (LeaseGrant(0, b""), []),
    ],
)
def test_what_the_peer_says_is_missing_is_told(answer: LeaseGrant, missed: list[bytes]) -> None:
    @scene
    async def run(s: Scene) -> None:
        s.fake.answer = answer
        s.fake.gate.set()
        await s.ask()
        await s.quiet()
        assert s.missed == missed

    run()


# -- a peer whose loads failed ---------------------------------------------------------------------


def half_open(s: Scene) -> None:
    for _ in range(FAILURES_TO_OPEN):
        Breaker.failure(s.breaker, Plane.DATA, 0.0, "generation")
    s.breaker.probed(True, 0.0)


@scene
async def test_one_reservation_tries_and_the_others_are_turned_away(s: Scene) -> None:
    half_open(s)
    trial = await s.ask()
    assert s.usable == [False]
    other = await s.ask()
    assert (other.state, other.reason) == (ReservationState.FAILED, "breaker half-open")
    assert len(s.fake.named("reserve")) == 1
    s.fake.gate.set()
    await s.quiet()
    assert trial.state is ReservationState.GRANTED
    assert not s.peer.usable


@scene
async def test_an_open_breaker_lets_no_reservation_through(s: Scene) -> None:
    s.breaker.trip(0.0, "draining")
    late = await s.ask()
    assert (late.state, late.reason) == (ReservationState.FAILED, "breaker open")
    assert s.fake.calls == []


@pytest.mark.parametrize("answer", [LeaseGrant(0, b""), Refused.EPOCH])
def test_a_trial_without_a_grant_makes_room_for_the_next(answer: Any) -> None:
    @scene
    async def run(s: Scene) -> None:
        half_open(s)
        s.fake.answer = answer
        s.fake.gate.set()
        await s.ask()
        await s.quiet()
        assert s.usable[-1]
        assert s.breaker.state is BreakerState.HALF_OPEN

    run()


@scene
async def test_a_trial_that_is_given_back_without_a_load_makes_room_for_the_next(s: Scene) -> None:
    half_open(s)
    trial = await s.granted()
    assert not s.peer.usable
    s.keeper.release(trial)
    assert s.usable[-1]


@scene
async def test_a_trial_whose_load_does_not_begin_in_time_makes_room_for_the_next(s: Scene) -> None:
    half_open(s)
    due: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, call: Callable[..., None], *args: Any, **rest: Any) -> Any:
        if delay == TIMING.promise_s:
            due.append(partial(call, *args))
        return later(delay, call, *args, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", call_later)
        loading = await s.granted()
        s.keeper.hold(loading)
        due.pop()()
        assert not s.peer.usable
        s.keeper.release(loading)
        await s.granted()
    assert not s.peer.usable
    due.pop()()
    assert s.usable[-1]
