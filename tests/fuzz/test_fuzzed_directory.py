# SPDX-License-Identifier: Apache-2.0
"""Whatever a directory is told, its honest members learn the truth about each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from xinference_xavier.control.directory_actor import DirectoryActor
from xinference_xavier.control.messages import (
    Cursor,
    Delta,
    Joined,
    MemberInfo,
    MemberJoined,
    Publication,
    Reply,
    Ticket,
    Update,
    check_member,
    pack_keys,
)
from xinference_xavier.control.mirror import Mirror

ADMISSION, FINGERPRINT = b"a" * 32, b"f" * 32
KEYS = [number.to_bytes(32, "big") for number in range(40)]
HEARTBEAT_S = 60.0


def info(name: str, epoch: int = 1) -> MemberInfo:
    return MemberInfo(name, epoch, "127.0.0.1:1", "host", 0.0)


class Member:
    """An honest member: what it holds, and what it knows of the others."""

    def __init__(self, actor: DirectoryActor, name: str) -> None:
        self.actor = actor
        self.info = info(name)
        self.cursor: Cursor | None = None
        self.mirror = Mirror()
        self.others: dict[int, MemberInfo] = {}

    async def join(self) -> None:
        joined = await self.actor.join(ADMISSION, FINGERPRINT, self.info)
        self.ticket = joined.ticket

    async def hold(self, keys: list[bytes], seq: int) -> None:
        publication = Publication(seq, pack_keys(keys))
        assert await self.actor.publish(self.ticket, publication) is Reply.OK

    async def follow(self) -> None:
        """Read all news; everything in them has the form that it must have."""
        while True:
            update = await self.actor.poll(self.ticket, self.cursor, 0.0)
            assert isinstance(update, Update)
            if update.reset:
                self.mirror.reset()
                self.others.clear()
            for event in update.events:
                if isinstance(event, Delta):
                    self.mirror.apply(event.members, event.added, event.removed)
                    continue
                list(self.mirror.removing_member(event.number))
                if isinstance(event, MemberJoined):
                    check_member(event.info)
                    self.others[event.number] = event.info
            if update.cursor == self.cursor:
                return
            self.cursor = update.cursor


def messages(ticket: Ticket) -> dict[str, tuple[Any, ...]]:
    """What a member may say that has this ticket."""
    return {
        "join": (ADMISSION, FINGERPRINT, info("guest", 2)),
        "publish": (ticket, Publication(1, pack_keys(KEYS[:3]), pack_keys(KEYS[3:5]))),
        "poll": (ticket, Cursor(0, None), 0.0),
        "holders": (ticket, pack_keys(KEYS[:4])),
        "members": (ADMISSION,),
        "leave": (ticket,),
    }


async def tell(actor: DirectoryActor, method: str, arguments: Any) -> Any:
    try:
        # What waits for news waits for as long as it may; nobody here does.
        async with asyncio.timeout(0.01):
            return await getattr(actor, method)(*arguments)
    except Exception as error:  # it travels to who asked
        return error


def test_the_unchanged_messages_are_obeyed() -> None:
    async def run() -> None:
        actor = DirectoryActor(HEARTBEAT_S)
        guest = await actor.join(ADMISSION, FINGERPRINT, info("guest"))
        for method, arguments in messages(guest.ticket).items():
            if method != "join":
                assert not isinstance(await tell(actor, method, arguments), Exception), method
        assert isinstance(await tell(actor, "join", messages(guest.ticket)["join"]), Joined)

    asyncio.run(run())


Said = list[tuple[str, Any]]


def honest_members_learn_the_truth(say: Callable[[Ticket], Said]) -> None:
    """Let a guest say things; two others still learn all of each other, and nothing wrong."""

    async def run() -> None:
        actor = DirectoryActor(HEARTBEAT_S)
        one, other = Member(actor, "one"), Member(actor, "other")
        await one.join()
        await other.join()
        await one.hold(KEYS[:10], 1)
        guest = (await actor.join(ADMISSION, FINGERPRINT, info("guest"))).ticket
        for method, arguments in say(guest):
            await tell(actor, method, arguments if isinstance(arguments, tuple) else ())
            while actor._core.sweep():
                pass
        await one.hold(KEYS[10:20], 2)
        await other.follow()
        assert other.others[one.ticket.number] == one.info
        bit = 1 << one.ticket.number
        assert all(other.mirror.holders(key) & bit for key in KEYS[:20])
        assert not any(other.mirror.holders(key) & bit for key in KEYS[20:])
        await one.follow()
        assert one.others[other.ticket.number] == other.info

    asyncio.run(run())


@in_both_lanes(few=60, many=5_000)
@given(data=st.data())
def test_honest_members_learn_the_truth_whatever_a_guest_says(data: st.DataObject) -> None:
    def say(ticket: Ticket) -> Said:
        valid = messages(ticket)
        methods = data.draw(st.lists(st.sampled_from(sorted(valid)), min_size=1, max_size=10))
        return [(method, data.draw(mutated(valid[method]))) for method in methods]

    honest_members_learn_the_truth(say)


@pytest.mark.parametrize(
    "guest",
    [
        "a text",
        replace(info("guest"), epoch=-1),
        replace(info("guest"), epoch=[1]),
        replace(info("guest"), name=None),
        replace(info("guest"), name="g" * 2000),
        replace(info("guest"), address=7),
        replace(info("guest"), workers=("junk",)),
    ],
)
def test_no_member_meets_a_guest_that_is_none(guest: Any) -> None:
    honest_members_learn_the_truth(lambda ticket: [("join", (ADMISSION, FINGERPRINT, guest))])


@pytest.mark.parametrize(
    "publication",
    [
        Publication(1, "x" * 64),  # type: ignore[arg-type]
        Publication(1, removed=[b"k" * 32]),  # type: ignore[arg-type]
        Publication(float("nan"), b"k" * 32),  # type: ignore[arg-type]
    ],
)
def test_no_member_reads_keys_that_are_none(publication: Publication) -> None:
    honest_members_learn_the_truth(lambda ticket: [("publish", (ticket, publication))])


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), 1e300, -1.0])
def test_a_wait_of_no_sensible_length_ends(wait_s: float) -> None:
    async def run() -> None:
        actor = DirectoryActor(0.05)
        ticket = (await actor.join(ADMISSION, FINGERPRINT, info("one"))).ticket
        update = await actor.poll(ticket, None, 0.0)
        async with asyncio.timeout(20):
            again = await actor.poll(ticket, update.cursor, wait_s)
        assert again.events == ()

    asyncio.run(run())
