# SPDX-License-Identifier: Apache-2.0
"""A session whose directory answers by the test's word: what it does while its mirror changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from xinference_xavier.control.messages import (
    Delta,
    MemberCleared,
    MemberGone,
    MemberInfo,
    Timing,
    pack_keys,
)
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.session import DirectorySession

KEYS = [number.to_bytes(32, "big") for number in range(4096)]
MEMBER = 3


class Nobody:
    def reset(self) -> None: ...
    def joined(self, number: int, info: MemberInfo) -> None: ...
    def gone(self, number: int) -> None: ...


class Session(DirectorySession):
    """Its directory says, once ``answered`` is set, that the member holds every key."""

    def __init__(self, mirror: Mirror) -> None:
        nothing = cast(Any, None)
        super().__init__(
            address="nowhere",
            key=nothing,
            fingerprint=b"",
            introduce=nothing,
            index=nothing,
            outbox=nothing,
            mirror=mirror,
            members=Nobody(),
            post=nothing,
            timing=Timing(),
        )
        self.answered = asyncio.Event()
        self.asked = 0

    async def holders(self, keys: Sequence[bytes]) -> list[int]:
        self.asked += 1
        if keys:
            await self.answered.wait()
        return [1 << MEMBER] * len(keys)


@pytest.mark.parametrize("event", [MemberGone(MEMBER), MemberCleared(MEMBER), None])
def test_an_answer_from_before_a_member_went_says_nothing_of_it(
    event: MemberGone | MemberCleared | None,
) -> None:
    async def run() -> int:
        mirror = Mirror()
        session = Session(mirror)
        asking = asyncio.create_task(session.ask(KEYS[:1]))
        await asyncio.sleep(0)
        assert session.asked == 1
        if event is not None:
            await session._apply(event)
        session.answered.set()
        await asking
        return mirror.holders(KEYS[0])

    assert asyncio.run(run()) == (0 if event else 1 << MEMBER)


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_change_lets_the_directory_hear_of_us(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def run() -> tuple[int, int]:
        mirror = Mirror()
        session = Session(mirror)
        session.answered.set()
        await session._apply(Delta(1 << MEMBER, pack_keys(KEYS)))
        before = session.asked
        monkeypatch.setattr(session, "_poll_s", 0.0)
        if fails:
            monkeypatch.setattr(session, "holders", None)  # which cannot be called
        await session._apply(MemberGone(MEMBER))
        return session.asked - before, len(mirror)

    heard, left = asyncio.run(run())
    assert left == 0
    assert (heard > 0) is not fails
