# SPDX-License-Identifier: Apache-2.0
"""Who is let into a group, and what a peer or a directory does for anybody else: nothing."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import xoscar as xo

from tests.control.control_harness import (
    FINGERPRINT,
    NAMESPACE,
    PATIENT,
    SECRET,
    Cluster,
    Replica,
    cluster,
    eventually,
    fill,
    key_of,
    keys,
)
from xinference_xavier.control.client import (
    PEER_METHODS,
    Contact,
    contact_of,
    directory_members,
    directory_ref,
    peer_call,
)
from xinference_xavier.control.directory_actor import DirectoryActor
from xinference_xavier.control.messages import (
    Credential,
    LeaseGrant,
    MemberInfo,
    Publication,
    Refused,
    Reply,
    Ticket,
    pack_keys,
)
from xinference_xavier.control.peer import PeerActor, PeerState
from xinference_xavier.store.index import SnapshotIndex

EPOCH = 7
OWN = key_of(SECRET).credential(FINGERPRINT, "a", EPOCH)

WRONG = {
    "no secret": (key_of(None).credential(FINGERPRINT, "a", EPOCH), Refused.SECRET),
    "another secret": (key_of(SECRET + ".").credential(FINGERPRINT, "a", EPOCH), Refused.SECRET),
    "another member": (key_of(SECRET).credential(FINGERPRINT, "b", EPOCH), Refused.SECRET),
    "another life": (key_of(SECRET).credential(FINGERPRINT, "a", EPOCH + 1), Refused.EPOCH),
    "another model": (key_of(SECRET).credential(b"m" * 32, "a", EPOCH), Refused.FINGERPRINT),
    "an empty proof": (Credential(FINGERPRINT, EPOCH, b""), Refused.SECRET),
    "a guess": (Credential(FINGERPRINT, EPOCH, bytes(32)), Refused.SECRET),
    "the directory's": (Credential(FINGERPRINT, EPOCH, key_of(SECRET).admission()), Refused.SECRET),
}


class Source:
    """A peer with ten blocks, one of them leased. Whatever a hook is asked for is noted."""

    def __init__(self) -> None:
        self.index = SnapshotIndex(device_slots=64, host_slots=8, spare_slots=4)
        fill(self.index, keys(0, 10))
        self.lease = self.index.acquire(
            keys(0, 1), reader="b:1", request="r", now=0.0, duration=1e9
        ).lease_id
        self.asked: list[str] = []

        def hook(name: str) -> Callable[..., dict[str, Any]]:
            return lambda *args: self.asked.append(name) or {}

        self.state = PeerState(
            index=self.index,
            fingerprint=FINGERPRINT,
            workers=(),
            status_hook=hook("describe"),
            audit_hook=hook("audit"),
            clear_hook=hook("clear"),
            close_hook=hook("close"),
            limit_hook=hook("set_limits"),
            withdraw_hook=lambda: None,
            credentials={EPOCH: OWN},
        )
        self.actor = PeerActor(self.state)

    def calls(self) -> dict[str, tuple[Any, ...]]:
        """Return arguments for each method, behind the credential."""
        return {
            "introduce": (),
            "reserve": ("b:1", "r", pack_keys(keys(0, 4)), 5.0),
            "sample": ("doctor", 0, 4, 5.0),
            "renew": ([self.lease], 9e9),
            "release": ([self.lease],),
            "describe": (),
            "audit": (),
            "clear": (),
            "set_limits": (0, 0),
            "close": (1.0,),
        }

    async def call(self, method: str, shown: Credential) -> Any:
        return await getattr(self.actor, method)(shown, *self.calls()[method])


def on_a_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def methods_of(actor: type) -> set[str]:
    """Return what a remote caller can call of our own."""
    return {
        name
        for name, member in vars(actor).items()
        if inspect.iscoroutinefunction(member) and not name.startswith("_")
    }


# -- a peer ----------------------------------------------------------------------------------------


def test_every_method_of_a_peer_is_tried_here() -> None:
    assert methods_of(PeerActor) == set(Source().calls())
    assert set(PEER_METHODS) < methods_of(PeerActor)


@pytest.mark.parametrize("method", Source().calls())
def test_the_right_credential_is_obeyed(method: str) -> None:
    source = Source()
    answer = on_a_loop(source.call(method, OWN))
    if method in PEER_METHODS:
        assert source.asked == [method]
    else:
        assert answer in ((), [True], 1) or isinstance(answer, LeaseGrant)
    assert not source.state.refused
    source.index.check_invariants()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", Source().calls())
def test_any_other_changes_nothing_is_told_nothing_and_is_counted(method: str, wrong: str) -> None:
    shown, reason = WRONG[wrong]
    source = Source()
    before = source.index.counters()

    async def refused() -> None:
        if method in PEER_METHODS:
            with pytest.raises(PermissionError, match=reason.value):
                await source.call(method, shown)
        else:
            nothing: Any = {"renew": [False], "release": 0}.get(method, reason)
            assert await source.call(method, shown) == nothing

    on_a_loop(refused())
    assert source.asked == []
    assert source.index.counters() == before
    assert source.state.refused == {reason.value: 1}
    assert on_a_loop(source.call("reserve", OWN)).lease_id
    source.index.check_invariants()


# -- a directory -----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


def test_every_method_of_a_directory_wants_a_ticket_or_an_admission() -> None:
    first = {
        name: list(inspect.signature(getattr(DirectoryActor, name)).parameters)[1:2]
        for name in methods_of(DirectoryActor)
    }
    # It counts, and tells no names.
    assert first.pop("describe") == []
    assert {name for name, [shown] in first.items() if shown == "admission"} == {"join", "members"}
    assert {shown for [shown] in first.values()} == {"admission", "ticket"}


def test_a_ticket_cannot_be_made_from_what_strangers_are_told(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    source.fill(0, 4)
    eventually(lambda: source.runtime.member_number)

    async def intrude() -> None:
        ref = await directory_ref(directory.address, NAMESPACE, PATIENT)
        stranger = key_of(None)
        joined = await ref.join(
            stranger.admission(), FINGERPRINT, MemberInfo("x", 1, "127.0.0.1:1", "host", 0.0)
        )
        assert joined.strangers == 1
        assert [name async for name in names(ref, stranger.admission())] == ["x"]
        for guess in (b"", bytes(32), FINGERPRINT):
            assert [name async for name in names(ref, guess)] == []
        # Even one who knows a member's number and epoch lacks the name of its group.
        known = joined.ticket
        for of_group in (known.group, bytes(32) + FINGERPRINT, FINGERPRINT, b""):
            forged = Ticket(known.incarnation, of_group, 1, source.runtime.epoch)
            assert await ref.leave(forged) is Reply.STALE
            assert await ref.publish(forged, Publication(1, clear=True)) is Reply.STALE
            assert await ref.poll(forged, None, 0.0) is Reply.STALE
            assert await ref.holders(forged, pack_keys(keys(0, 4))) is Reply.STALE
        update = await ref.poll(known, None, 0.0)
        assert update.events == ()

    asyncio.run(intrude())
    with_secret = asyncio.run(directory_members(directory.address, key_of(SECRET)))
    assert [member.info.name for member in with_secret] == ["a"]


async def names(ref: xo.ActorRefType[DirectoryActor], admission: bytes) -> Any:
    for _, _, info in await ref.members(admission):
        yield info.name


def test_a_name_cannot_be_taken_from_a_member_without_its_secret(group: Cluster) -> None:
    directory = group.directory()
    member = group.local("a", directory.address, PATIENT)
    other = group.local("b", directory.address, PATIENT)
    eventually(other.members)
    impostor = group.local("a", directory.address, PATIENT, secret=None)
    eventually(lambda: impostor.runtime.member_number)
    epochs = {info.epoch for info in other.members().values()}
    assert epochs == {member.runtime.epoch}
    assert impostor.members() == {}


# -- whole replicas --------------------------------------------------------------------------------


def shares(source: Replica, reader: Replica) -> bool:
    """Whether the reader hears of blocks that the source gets now."""
    source.fill(0, 8)
    number = eventually(lambda: reader.sees(0, 8))
    reservation = reader.runtime.reserve(number, keys(0, 8), "request")
    eventually(lambda: reservation.rows or reservation.reason)
    return len(reservation.rows) == 8


def test_a_replica_with_another_secret_says_so_and_goes_on_alone(
    group: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    eventually(lambda: source.members() and reader.members())
    alone = group.local("c", directory.address, PATIENT, secret="another one of the tests")
    eventually(lambda: alone.runtime.status()["strangers"] == 2)
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "2 replicas of this model in test-model have another secret" in error.getMessage()
    assert "XINFERENCE_XAVIER_SECRET or XINFERENCE_XAVIER_SECRET_FILE" in error.getMessage()
    assert SECRET not in caplog.text
    # Its own store serves it, and the others share as before.
    alone.fill(0, 8)
    assert alone.index.counters().device_blocks == 8
    assert shares(source, reader)
    assert alone.members() == {}
    assert alone.mirror.longest(keys(0, 8), 0, -1) is None
    for replica in (source, reader, alone):
        replica.index.check_invariants()


@pytest.mark.parametrize("secret", [SECRET, None])
def test_replicas_of_one_secret_share_and_of_none_too(group: Cluster, secret: str | None) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT, secret)
    reader = group.local("b", directory.address, PATIENT, secret)
    assert shares(source, reader)
    assert source.runtime.status()["strangers"] == 0
    source.index.check_invariants()


def test_a_replica_answers_nobody_without_its_secret_over_the_network(group: Cluster) -> None:
    replica = group.local("a", None, PATIENT)
    told = replica.runtime.contact
    info = MemberInfo("a", replica.runtime.epoch, told.address, "host", 0.0)
    assert asyncio.run(peer_call(told, "describe"))["thread"]
    assert contact_of(info, FINGERPRINT, key_of(SECRET)) == told
    guesses = [contact_of(info, FINGERPRINT, key_of(other)) for other in (None, SECRET + ".")]
    guesses.append(Contact(told.address, Credential(FINGERPRINT, info.epoch, bytes(32))))
    for guess in guesses:
        with pytest.raises(PermissionError, match="the replica refuses: wrong secret"):
            asyncio.run(peer_call(guess, "close", 1.0))
    assert replica.closes == 0
    assert replica.runtime.status()["refused_calls"] == {"wrong secret": 3}
