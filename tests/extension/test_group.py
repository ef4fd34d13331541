# SPDX-License-Identifier: Apache-2.0
"""A replica among stand-ins of Xinference's actors, in a real xoscar pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.control.client import Contact, Member, contact_of
from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.names import KEEP_SECRET
from xinference_xavier.extension.secrets import Secrets
from xinference_xavier.extension.vllm import group
from xinference_xavier.options import Deployment

KEY = GroupKey("m", "the secret of the tests")
OWN = Contact("own:5", KEY.credential(b"f" * 32, "m-rep0", 7))


class Replica(xo.StatelessActor):
    async def get_worker_binding(self) -> dict[str, Any]:
        return {"protocol": 1, "address": self.address}


class Worker(xo.StatelessActor):
    async def get_supervisor_ref(self, add_worker: bool) -> Any:
        if add_worker:
            raise RuntimeError("a question must not register the worker")
        return await xo.actor_ref(address=self.address, uid="supervisor")


class Supervisor(xo.StatelessActor):
    def __init__(self, replicas: int | None, states: dict[str, str]) -> None:
        super().__init__()
        self.replicas = replicas
        self.states = states
        self.dead: list[str] = []
        self.reports: list[Any] = []
        self.secrets = Secrets()

    async def get_instance_info(self, model_name: str | None, model_uid: str) -> list[Any]:
        known = model_name is None and model_uid == "m" and self.replicas is not None
        return [{"replica": self.replicas}] if known else []

    async def get_replica_statuses(self, model_uid: str) -> list[Any]:
        return [
            {"replica_model_uid": uid, "status": status}
            for uid, status in self.states.items()
            if uid.startswith(f"{model_uid}-")
        ]

    async def mark_replica_dead(self, replica_model_uid: str) -> None:
        self.dead.append(replica_model_uid)

    async def marked_dead(self) -> list[str]:
        return self.dead

    async def call_extension(self, name: str, operation: str, payload: Any) -> Any:
        if operation == KEEP_SECRET:
            return self.secrets.keep(payload["model_uid"], payload["secret"])
        self.reports.append((name, operation, payload))
        return None

    async def reported(self) -> list[Any]:
        return self.reports


def in_pool(
    work: Callable[[str], Awaitable[Any]],
    replicas: int | None = 2,
    states: dict[str, str] | None = None,
) -> Any:
    """Run ``work(address)`` beside a pool with the three actors at ``address``."""

    async def run() -> Any:
        pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
        try:
            address = pool.external_address
            await xo.create_actor(Replica, address=address, uid="m-rep0")
            await xo.create_actor(Worker, address=address, uid="worker")
            await xo.create_actor(
                Supervisor, replicas, states or {}, address=address, uid="supervisor"
            )
            return await work(address)
        finally:
            await pool.stop()

    return asyncio.run(run())


def deployment(**values: Any) -> Deployment:
    return Deployment.from_mapping(
        {
            "xavier_directory": "127.0.0.1:7",
            "xavier_namespace": "m",
            "xavier_member": "m-rep0",
            **values,
        }
    )


def test_a_replica_finds_its_worker_and_supervisor() -> None:
    async def work(address: str) -> Any:
        return address, await group.find_placement(address, "m", "m-rep0")

    address, placement = in_pool(work)
    assert placement == group.Placement(address, address, 2)
    place = placement.deployment("m", "m-rep0")
    assert place.xavier_directory == address
    assert place.xavier_host == "127.0.0.1"


def test_all_replicas_of_a_model_learn_the_secret_that_the_first_one_made() -> None:
    async def work(address: str) -> Any:
        found = [
            await group.find_placement(address, uid, "m-rep0", offer)
            for uid, offer in [("m", "first"), ("m", "second"), ("other", "third"), ("m", None)]
        ]
        assert "first" not in repr(found)
        return [placement.secret for placement in found]

    assert in_pool(work) == ["first", "first", "third", None]


def test_a_model_that_the_supervisor_does_not_know_yet_counts_as_one_replica() -> None:
    async def work(address: str) -> Any:
        return await group.find_placement(address, "m", "m-rep0")

    assert in_pool(work, replicas=None).replicas == 1


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]", "::"])
def test_a_wildcard_is_never_advertised(wildcard: str) -> None:
    placement = group.Placement("10.0.0.1:7", f"{wildcard}:8", 1)
    assert placement.deployment("m", "m-rep0").xavier_host is None


@pytest.mark.parametrize(
    ("listening", "reached"),
    [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("10.0.0.1:7", "10.0.0.1:7")],
)
def test_a_supervisor_that_listens_everywhere_is_reached_on_loopback(
    listening: str, reached: str
) -> None:
    placement = group.Placement(listening, "10.0.0.2:8", 1)
    assert placement.deployment("model", "model-rep0").xavier_directory == reached


def test_final_counters_reach_the_extension_beside_the_supervisor() -> None:
    async def work(address: str) -> Any:
        place = deployment(xavier_directory=address)
        await group.report_final(place, {"replica": "m-rep0"})
        supervisor = await xo.actor_ref(address=address, uid="supervisor")
        return await supervisor.reported()

    assert in_pool(work) == [("xinference-xavier", "record_final", {"replica": "m-rep0"})]


@pytest.mark.parametrize(
    ("states", "dead"),
    [
        ({"m-rep0": "TERMINATING", "m-rep1": "READY"}, ["m-rep0"]),
        # The supervisor would give up the whole model at once.
        ({"m-rep0": "TERMINATING"}, []),
        ({"m-rep0": "TERMINATING", "m-rep1": "TERMINATING"}, []),
        ({"m-rep0": "TERMINATING", "other-rep1": "READY"}, []),
        # A replica that runs out of memory is stopped too, and comes back.
        ({"m-rep0": "READY", "m-rep1": "READY"}, []),
        ({"m-rep1": "READY"}, []),
    ],
)
def test_only_a_replica_that_is_removed_beside_others_gets_no_new_requests(
    states: dict[str, str], dead: list[str]
) -> None:
    async def work(address: str) -> Any:
        await group.send_no_more(deployment(xavier_directory=address))
        supervisor = await xo.actor_ref(address=address, uid="supervisor")
        return await supervisor.marked_dead()

    assert in_pool(work, states=states) == dead


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two members in the directory; returns what their peers were asked."""
    asked: list[Any] = []

    async def members(address: str, key: GroupKey, *, timeout_s: float) -> list[Member]:
        infos = [MemberInfo(f"m-rep{n}", 7, f"peer{n}:1", "host", 0.0) for n in range(2)]
        return [Member(n, info, contact_of(info, b"f" * 32, key)) for n, info in enumerate(infos)]

    async def call(contact: Contact, method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
        asked.append((contact.address, method, args, timeout_s))
        return {"blocks": 0}

    monkeypatch.setattr(group, "directory_members", members)
    monkeypatch.setattr(group, "peer_call", call)
    return asked


def test_a_replica_closes_its_own_peer_and_no_other(peers: list[Any]) -> None:
    assert asyncio.run(group.leave(deployment(xavier_member="m-rep1"), KEY, 8)) == {"blocks": 0}
    [(address, method, (drain_s,), timeout_s)] = peers
    assert (address, method) == ("peer1:1", "close")
    assert 0 < drain_s < timeout_s <= 8


def test_a_replica_describes_its_own_peer(peers: list[Any]) -> None:
    assert asyncio.run(group.describe(deployment(), KEY, 3)) == {"blocks": 0}
    assert peers == [("peer0:1", "describe", (), 3)]


def test_a_replica_that_knows_its_peer_asks_no_directory(
    peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def members(address: str, key: GroupKey, *, timeout_s: float) -> list[Member]:
        raise AssertionError("the directory was asked")

    monkeypatch.setattr(group, "directory_members", members)
    asyncio.run(group.describe(deployment(), KEY, 3, peer=OWN))
    asyncio.run(group.leave(deployment(), KEY, 8, peer=OWN))
    assert [(address, method) for address, method, *_ in peers] == [
        ("own:5", "describe"),
        ("own:5", "close"),
    ]


@pytest.mark.parametrize(
    "place", [{"xavier_member": "m-rep9"}, {"xavier_directory": None}], ids=["gone", "alone"]
)
def test_a_replica_that_is_in_no_directory_has_no_peer(
    peers: list[Any], place: dict[str, Any]
) -> None:
    with pytest.raises(LookupError):
        asyncio.run(group.leave(deployment(**place), KEY, 8))
    assert peers == []
