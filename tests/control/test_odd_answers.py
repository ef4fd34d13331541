# SPDX-License-Identifier: Apache-2.0
"""A directory or a peer that answers nonsense, as one of another version might, is asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from control_harness import FINGERPRINT, QUICK, SECRET, key_of

from xinference_xavier.control import group as group_module
from xinference_xavier.control import session as session_module
from xinference_xavier.control.group import Group
from xinference_xavier.control.messages import Joined, MemberInfo, Ticket
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.session import DirectorySession, Outbox
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.transport.base import WorkerHandle

JOINED = Joined(Ticket(1, b"g" * 64, 3, 11), 10.0, 0)
WORKER = WorkerHandle(rank=0, host_id="host", layout_digest="layout", arenas={})
INFO = MemberInfo("a", 11, "127.0.0.1:1", "host", 0.0)


class Answers:
    """Stands for an actor: gives these answers, one per call."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    async def answer(self, *args: Any) -> Any:
        return next(self._answers)

    join = introduce = answer


def test_a_directory_whose_answer_is_no_admission_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Answers(None, object(), JOINED)

    async def found(*args: Any) -> Answers:
        return directory

    monkeypatch.setattr(session_module, "directory_ref", found)
    mirror = Mirror()
    key = key_of(SECRET)
    session = DirectorySession(
        address="127.0.0.1:1",
        key=key,
        fingerprint=FINGERPRINT,
        introduce=lambda again: INFO,
        index=SnapshotIndex(device_slots=8, host_slots=0, spare_slots=0),
        outbox=Outbox(),
        mirror=mirror,
        members=Group(fingerprint=FINGERPRINT, key=key, ranks=1, mirror=mirror, timing=QUICK),
        post=lambda callback: None,
        timing=QUICK,
    )
    ticket = asyncio.run(session._join())
    assert (ticket, session.joins, session.failures) == (JOINED.ticket, 1, 2)


def test_a_peer_that_does_not_name_all_its_workers_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Answers((), (WORKER, WORKER), (WORKER,))

    async def reached(*args: Any) -> None: ...

    async def found(*args: Any, **named: Any) -> Answers:
        return peer

    monkeypatch.setattr(group_module, "reach", reached)
    monkeypatch.setattr(group_module.xo, "actor_ref", found)

    async def meet() -> list[str | None]:
        group = Group(
            fingerprint=FINGERPRINT, key=key_of(SECRET), ranks=1, mirror=Mirror(), timing=QUICK
        )
        group.joined(3, INFO)
        reasons: list[str | None] = []
        while not group.usable:
            (member,) = group.describe()
            if member["reason"] not in reasons:
                reasons.append(member["reason"])
            await asyncio.sleep(0)
        assert group.infos[3].workers == (WORKER,)
        return reasons

    reasons = asyncio.run(asyncio.wait_for(meet(), 30))
    assert reasons == [
        None,
        "handles of 0 workers, not of 1",
        "handles of 2 workers, not of 1",
    ]
