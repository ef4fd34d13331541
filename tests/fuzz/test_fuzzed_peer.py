# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer's actor is asked: an answer or an exception for who asked, and nothing else.

The index stays right, no lease outlives the heartbeat limit, nothing is leased past a reader's
share, and the actor goes on answering.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from xinference_xavier.control.messages import LeaseGrant, Refused, pack_keys, unpack_rows
from xinference_xavier.control.peer import LEASE_KEYS, PeerActor, PeerState
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.store.index import SnapshotIndex

FINGERPRINT = b"f" * 32
SHOWN = GroupKey("fuzz", "secret").credential(FINGERPRINT, "a", 7)
KEYS = [number.to_bytes(32, "big") for number in range(12)]
SHARE = 0.5

MESSAGES: dict[str, tuple[Any, ...]] = {
    "introduce": (SHOWN,),
    "reserve": (SHOWN, "b:1", "request", pack_keys(KEYS), 2.0),
    "sample": (SHOWN, "b:1", 0, 4, 2.0),
    "renew": (SHOWN, [1, 2], 8.0),
    "release": (SHOWN, [1, 2]),
    "set_limits": (SHOWN, 8, 4),
    "clear": (SHOWN,),
    "describe": (SHOWN,),
    "audit": (SHOWN,),
}

messages = st.sampled_from(sorted(MESSAGES)).flatmap(
    lambda method: st.tuples(st.just(method), mutated(MESSAGES[method]))
)


class Source:
    """A peer's actor over a real index, called as xoscar would call it."""

    def __init__(self) -> None:
        self.index = SnapshotIndex(device_slots=8, host_slots=8, spare_slots=2, reader_share=SHARE)
        self.fill()
        state = PeerState(
            index=self.index,
            fingerprint=FINGERPRINT,
            workers=(),
            status_hook=dict,
            audit_hook=dict,
            clear_hook=self._clear,
            close_hook=lambda deadline_s: {},
            limit_hook=self._limit,
            withdraw_hook=lambda: None,
        )
        state.credentials[SHOWN.epoch] = SHOWN
        self.heartbeat_s = state.timing.heartbeat_s
        self.actor = PeerActor(state)

    def fill(self) -> None:
        admission = self.index.admit([(key, number) for number, key in enumerate(KEYS)])
        if admission.job_id:
            self.index.commit(admission.job_id)

    def _clear(self) -> dict[str, Any]:
        self.index.clear()
        return {}

    def _limit(self, device: int | None, host: int | None) -> dict[str, Any]:
        self.index.set_limits(device_slots=device, host_slots=host)
        return {}

    async def call(self, method: str, arguments: Any) -> Any:
        called: Callable[..., Awaitable[Any]] = getattr(self.actor, method)
        try:
            return await called(*arguments)
        except Exception as error:  # it travels to who asked
            return error

    def check(self) -> None:
        self.index.check_invariants()
        # Whatever was asked: what one reader holds is within its share, and ends.
        self.index.reap(time.monotonic() + self.heartbeat_s + 1)
        assert self.index.counters().leases == 0
        self.index.check_invariants()


def test_the_unchanged_messages_are_obeyed() -> None:
    async def run() -> None:
        source = Source()
        for method in ("introduce", "reserve", "sample", "renew", "release", "describe"):
            answer = await source.call(method, MESSAGES[method])
            assert not isinstance(answer, Exception | Refused), (method, answer)
        source.check()

    asyncio.run(run())


@in_both_lanes(few=60, many=5_000)
@given(sent=st.lists(messages, min_size=1, max_size=12))
def test_changed_messages_are_refused_or_obeyed(sent: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        source = Source()
        for method, arguments in sent:
            await source.call(method, arguments if isinstance(arguments, tuple) else ())
            source.index.check_invariants()
        source.check()
        source.index.set_limits(device_slots=8, host_slots=6)
        source.fill()
        grant = await source.call("reserve", MESSAGES["reserve"])
        assert isinstance(grant, LeaseGrant)
        assert len(unpack_rows(grant.rows)) == int(SHARE * 14)
        source.check()

    asyncio.run(run())


@pytest.mark.parametrize("duration", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("method", ["reserve", "sample", "renew"])
def test_no_lease_is_given_for_a_time_that_is_none(method: str, duration: float) -> None:
    async def run() -> None:
        source = Source()
        answer = await source.call(method, (*MESSAGES[method][:-1], duration))
        assert isinstance(answer, ValueError)
        assert "duration_s" in str(answer)
        assert source.index.counters().leases == 0
        source.check()

    asyncio.run(run())


def test_a_nameless_reader_is_not_taken_for_the_replica_itself() -> None:
    """To whom no share applies."""

    async def run() -> None:
        source = Source()
        shown, _, *rest = MESSAGES["reserve"]
        assert isinstance(await source.call("reserve", (shown, None, *rest)), ValueError)
        assert source.index.counters().leases == 0

    asyncio.run(run())


def test_many_leases_in_one_message_let_others_in_between() -> None:
    async def run() -> None:
        source = Source()
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count())
        answer = await source.call("renew", (SHOWN, list(range(10 * LEASE_KEYS)), 2.0))
        other.cancel()
        assert answer == [False] * (10 * LEASE_KEYS)
        assert turns >= 9

    asyncio.run(run())
