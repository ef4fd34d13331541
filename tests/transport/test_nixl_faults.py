# SPDX-License-Identifier: Apache-2.0
"""Errors that a healthy NIXL does not show, with an agent that makes them on demand."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from fetch_peer import LIMIT_S, soon

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport import nixl, nixl_agent
from xinference_xavier.transport.base import (
    SlotView,
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.nixl_agent import NixlError, Region, State, Transfer

SLOT_BYTES = 64
STAGING = range(4, 8)


class FakeAgent:
    """Counts what it holds. ``script`` names the calls that fail, or gives states of transfers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.fail_at: dict[str, int] = {}
        self.states: list[State] = []
        self.closed = False

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if self.fail_at.get(name) == self.calls[name]:
            raise NixlError(f"{name} failed")

    def register(self, region: Region) -> None:
        self._call("register")
        self.held["memory"] += 1

    def metadata(self) -> bytes:
        return b"agent"

    def add_peer(self, metadata: bytes) -> str:
        self._call("add_peer")
        self.held["peer"] += 1
        return "peer"

    def remove_peer(self, name: str) -> None:
        self.held["peer"] -= 1

    def prepare(self, peer: str | None, region: Region, unit: int) -> int:
        self._call("prepare")
        if peer is not None:
            self.held["list"] += 1
        return self.calls["prepare"]

    def release_prepared(self, prepared: int) -> None:
        self.held["list"] -= 1

    def read(self, *args: Any) -> Transfer:
        self._call("read")
        self.held["transfer"] += 1
        return Transfer(self, self.calls["read"])  # type: ignore[arg-type]

    def post(self, handle: int) -> tuple[State, str]:
        return self.states.pop(0), "as told"

    status = post

    def release(self, handle: int) -> None:
        self.held["transfer"] -= 1

    def close(self, running: Any = ()) -> None:
        for transfer in running:
            transfer.release()
        self.held["memory"] = 0
        self.closed = True

    def balance(self) -> dict[str, int]:
        return {key: count for key, count in self.held.items() if count}


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[FakeAgent]:
    made: list[FakeAgent] = []

    def make(name: str) -> FakeAgent:
        made.append(FakeAgent(name))
        return made[-1]

    monkeypatch.setattr(nixl, "Agent", make)
    monkeypatch.setenv("UCX_TLS", "all")
    return made


def make_transport() -> nixl.NixlTransport:
    view = SlotView(
        torch.zeros((8, SLOT_BYTES), dtype=torch.uint8), torch.zeros((8, 2), dtype=torch.int64)
    )
    return nixl.NixlTransport(
        views={Tier.HOST: view},
        slot_bytes=SLOT_BYTES,
        staging={Tier.HOST: STAGING},
        agent_name="test",
    )


def peer_of(transport: nixl.NixlTransport, agent: bytes = b"other") -> WorkerHandle:
    advert = replace(nixl.decode(transport.metadata()), agent=agent)
    return WorkerHandle(0, "test", "test", {}, nixl=advert.encode())


@pytest.mark.parametrize("call", ["register", "prepare"])
def test_a_failed_start_closes_the_agent(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(FakeAgent, call, lambda *args: (_ for _ in ()).throw(NixlError("no")))
    with pytest.raises(TransportUnavailable, match="no"):
        make_transport()
    assert agents[0].closed


@pytest.mark.parametrize(("call", "at"), [("add_peer", 1), ("prepare", 3), ("prepare", 4)])
def test_a_failed_connect_leaves_nothing(agents: list[FakeAgent], call: str, at: int) -> None:
    transport = make_transport()
    agents[0].fail_at[call] = at
    with pytest.raises(TransportUnavailable, match=f"{call} failed"):
        transport.connect(peer_of(transport), Tier.HOST)
    assert agents[0].balance() == {"memory": 3}
    transport.connect(peer_of(transport), Tier.HOST)


def test_everything_is_released_in_any_order_of_closing(agents: list[FakeAgent]) -> None:
    transport = make_transport()
    connections = [
        transport.connect(peer_of(transport, name), Tier.HOST) for name in (b"a", b"a", b"b")
    ]
    assert agents[0].held["peer"] == 2
    connections[0].close()
    assert agents[0].held["peer"] == 2
    connections[1].close()
    assert agents[0].held["peer"] == 1
    transport.close()
    connections[2].close()
    assert agents[0].balance() == {}


def test_a_read_that_cannot_be_made_quarantines_nothing(agents: list[FakeAgent]) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    agents[0].fail_at["read"] = 1
    with pytest.raises(TransferFailed, match="read failed"):
        connection.fetch([1], [4], deadline=soon())
    assert transport.quarantined(Tier.HOST) == frozenset()
    assert connection.alive()


@pytest.mark.parametrize("when", ["posting", "polling", "reading meta"])
def test_an_error_whose_extent_is_unknown_keeps_the_staging_until_close(
    agents: list[FakeAgent], when: str
) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    agents[0].states = {
        "posting": [State.UNKNOWN],
        "polling": [State.RUNNING, State.RUNNING, State.UNKNOWN],
        "reading meta": [State.DONE, State.UNKNOWN],
    }[when]
    with pytest.raises(TransferFailed, match="as told"):
        connection.fetch([1, 2], [4, 6], deadline=soon())
    assert transport.quarantined(Tier.HOST) == {4, 6}
    assert not connection.alive()
    with pytest.raises(TransportUnavailable, match="failed"):
        transport.connect(peer_of(transport), Tier.HOST)
    connection.close()
    assert transport.quarantined(Tier.HOST) == {4, 6}
    assert agents[0].held["peer"] == 1  # still the owner of that transfer
    transport.close()
    assert agents[0].balance() == {}


def test_a_disconnected_read_frees_its_staging_at_once(agents: list[FakeAgent]) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    agents[0].states = [State.RUNNING, State.DISCONNECTED]
    with pytest.raises(TransferFailed) as failure:
        connection.fetch([1], [4], deadline=soon())
    assert not isinstance(failure.value, TransferTimeout)
    assert transport.quarantined(Tier.HOST) == frozenset()
    connection.close()
    assert agents[0].balance() == {"memory": 3}


def test_a_late_end_frees_the_staging_and_the_closed_peer(agents: list[FakeAgent]) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    agents[0].states = [State.RUNNING] * 100_000
    with pytest.raises(TransferTimeout):
        connection.fetch([1], [4], deadline=soon(0.5))
    connection.close()
    agents[0].states = [State.RUNNING]
    assert transport.quarantined(Tier.HOST) == {4}
    assert agents[0].held["peer"] == 1
    agents[0].states = [State.DONE]
    assert transport.quarantined(Tier.HOST) == frozenset()
    assert agents[0].balance() == {"memory": 3}


def test_fetches_and_quarantine_do_not_wait_for_a_peer_that_is_being_wired_up(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    inside, go = threading.Event(), threading.Event()

    def hang(self: FakeAgent, metadata: bytes) -> str:
        inside.set()
        assert go.wait(LIMIT_S)
        raise NixlError("add_peer failed")

    monkeypatch.setattr(FakeAgent, "add_peer", hang)
    failures: list[Exception] = []

    def connect() -> None:
        try:
            transport.connect(peer_of(transport, b"slow"), Tier.HOST)
        except TransportUnavailable as exc:
            failures.append(exc)

    wiring = threading.Thread(target=connect)
    wiring.start()
    assert inside.wait(LIMIT_S)
    agents[0].states = [State.DONE, State.DONE]
    connection.fetch([1], [4], deadline=soon())
    assert transport.quarantined(Tier.HOST) == frozenset()
    with pytest.raises(TransportUnavailable, match="busy"):
        transport.connect(peer_of(transport, b"third"), Tier.HOST, deadline=time.monotonic())
    connection.close()
    assert agents[0].held["peer"] == 1  # it is forgotten by the next who may
    go.set()
    wiring.join(LIMIT_S)
    assert len(failures) == 1
    transport.quarantined(Tier.HOST)
    assert agents[0].held["peer"] == 0


def test_a_read_that_brought_nothing_is_no_generation(agents: list[FakeAgent]) -> None:
    transport = make_transport()
    connection = transport.connect(peer_of(transport), Tier.HOST)
    agents[0].states = [State.DONE, State.DONE]
    assert connection.fetch([1], [4], deadline=soon()).tolist() == [[-1, -1]]


def test_closing_is_bounded_and_keeps_the_memory_until_the_agent_is_gone(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = make_transport()
    go, closed = threading.Event(), threading.Event()

    def hang(self: FakeAgent, running: Any = ()) -> None:
        assert go.wait(LIMIT_S)
        closed.set()

    monkeypatch.setattr(FakeAgent, "close", hang)
    # Nobody may take the memory away meanwhile.
    assert not transport.close(0.01)
    assert not transport.close(0.01)
    with pytest.raises(TransportUnavailable, match="closed"):
        transport.connect(peer_of(transport), Tier.HOST)
    assert transport._views
    go.set()
    assert transport.close(LIMIT_S)
    assert closed.is_set()
    assert not transport._views


def fake_bindings(**members: Any) -> types.ModuleType:
    module = types.ModuleType("nixl._bindings")
    module.__dict__.update(
        nixlBackendError=type("nixlBackendError", (Exception,), {}),
        nixlRemoteDisconnectError=type("nixlRemoteDisconnectError", (Exception,), {}),
        nixlAgentConfig=types.SimpleNamespace,
        NIXL_THREAD_SYNC_RW="rw",
        NIXL_SUCCESS=0,
        NIXL_IN_PROG=1,
    )
    module.__dict__.update(members)
    return module


class RawAgent:
    """The bindings' agent as far as the constructor of ``Agent`` goes."""

    plugins = ("UCX",)
    error: Exception | None = None
    config: Any = None
    options: Any = None

    def __init__(self, name: str, config: Any) -> None:
        RawAgent.config = config

    def getAvailPlugins(self) -> list[str]:
        return list(self.plugins)

    def createBackend(self, name: str, options: dict[str, str]) -> int:
        if self.error is not None:
            raise self.error
        RawAgent.options = options
        return 1


def test_without_the_ucx_plugin_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RawAgent, "plugins", ("POSIX",))
    monkeypatch.setitem(sys.modules, "nixl._bindings", fake_bindings(nixlAgent=RawAgent))
    with pytest.raises(TransportUnavailable, match=r"no UCX plug-in .*POSIX"):
        nixl_agent.Agent("test")


def test_a_backend_that_does_not_start_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = fake_bindings(nixlAgent=RawAgent)
    monkeypatch.setattr(RawAgent, "error", bindings.nixlBackendError("no devices"))
    monkeypatch.setitem(sys.modules, "nixl._bindings", bindings)
    with pytest.raises(TransportUnavailable, match="no devices"):
        nixl_agent.Agent("test")


def test_an_agent_sleeps_while_idle_and_is_safe_for_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._bindings", fake_bindings(nixlAgent=RawAgent))
    nixl_agent.Agent("test")
    assert RawAgent.config.useProgThread  # a passive source must serve
    assert RawAgent.config.pthrDelay > 0  # zero spins on a core for ever
    assert not RawAgent.config.useListenThread
    assert RawAgent.config.syncMode == "rw"


def test_ucx_emulates_nothing_unless_the_operator_has_chosen_its_transports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._bindings", fake_bindings(nixlAgent=RawAgent))
    monkeypatch.delenv("UCX_TLS", raising=False)
    nixl_agent.Agent("test")
    assert RawAgent.options == {"engine_config": "PROTO_EMULATION_ENABLE=n"}
    monkeypatch.setenv("UCX_TLS", "tcp")
    nixl_agent.Agent("test")
    assert RawAgent.options == {}
