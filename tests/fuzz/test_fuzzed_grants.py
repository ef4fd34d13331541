# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer answers: a grant that makes sense, or a failed reservation; and it is over."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from xinference_xavier.control.breaker import Breaker
from xinference_xavier.control.leases import LeaseKeeper, Peer, Reservation, ReservationState
from xinference_xavier.control.messages import (
    Credential,
    LeaseGrant,
    MemberInfo,
    Timing,
    pack_rows,
)

TIMING = Timing()
KEYS = [bytes([number]) * 32 for number in range(4)]
INFO = MemberInfo("a", 11, "a:1", "host", 0.0)
GRANT = LeaseGrant(7, pack_rows([(0, 5, 9), (1, 6, 10), (0, 1, 2)]), further=(8,), missing=True)

RIGHT: dict[str, Any] = {"reserve": GRANT, "renew": [True, True], "release": 2}

answers = st.sampled_from(sorted(RIGHT)).flatmap(
    lambda call: mutated(RIGHT[call]).map(lambda answer: {**RIGHT, call: answer})
)


class Source:
    """Stands for a peer's actor: gives these answers."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    async def reserve(self, *args: Any) -> Any:
        return self.told["reserve"]

    async def renew(self, *args: Any) -> Any:
        return self.told["renew"]

    async def release(self, *args: Any) -> Any:
        return self.told["release"]


def check_grant(reservation: Reservation) -> None:
    """What the engine's thread reads of a grant is what it takes for granted."""
    assert 0 < len(reservation.rows) <= len(KEYS)
    assert all(type(part) is int for row in reservation.rows for part in row)
    assert all(type(lease) is int and lease > 0 for lease in reservation.leases)


async def _drained(keeper: LeaseKeeper) -> None:
    await asyncio.wait_for(keeper.drain(), 10)
    assert (keeper.held(), keeper.in_flight()) == (0, 0)


@in_both_lanes(few=100, many=5_000)
@given(told=answers)
def test_a_changed_answer_is_a_grant_or_a_failure(told: dict[str, Any]) -> None:
    died: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: died.append(context))
        keeper = LeaseKeeper(
            reader=lambda: "b:2",
            timing=TIMING,
            judged=lambda peer: None,
            missed=lambda peer, key: None,
        )
        breaker = Breaker(TIMING.breaker_min_s, TIMING.breaker_max_s)
        source = Source(told)
        peer = Peer(3, INFO, Credential(b"f" * 32, 11, b"p" * 32), breaker, ref=source)
        reservation = Reservation(3, "request")
        keeper.reserve(reservation, peer, KEYS)
        while keeper.in_flight():
            await asyncio.sleep(0)
        assert reservation.state in (ReservationState.GRANTED, ReservationState.FAILED)
        if reservation.state is ReservationState.GRANTED:
            check_grant(reservation)
        keeper.hold(reservation)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        keeper.release(reservation)
        await _drained(keeper)
        # One that answers rightly is used again.
        source.told = RIGHT
        again = Reservation(3, "another")
        peer.breaker = Breaker(TIMING.breaker_min_s, TIMING.breaker_max_s)
        keeper.reserve(again, peer, KEYS)
        while keeper.in_flight():
            await asyncio.sleep(0)
        assert again.state is ReservationState.GRANTED
        keeper.release(again)
        await _drained(keeper)

    asyncio.run(run())
    gc.collect(0)  # tasks that died tell so when they go
    assert died == []
