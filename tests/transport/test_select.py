# SPDX-License-Identifier: Apache-2.0
"""The choice of a transport: the fastest that connects, and every refusal counted."""

from __future__ import annotations

import sys

import pytest

from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport import select
from xinference_xavier.transport.base import (
    Connection,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.select import PREFERENCE, Transports

PEER = WorkerHandle(rank=0, host_id="host", layout_digest="same", arenas={})


class Named(Transport):
    """Connects to an object that tells the transport's name, or refuses."""

    def __init__(self, name: str, refusal: str | None = None, stuck: tuple[int, ...] = ()) -> None:
        self.name = name  # type: ignore[misc]  # one class stands for several transports
        self.refusal = refusal
        self.stuck = frozenset(stuck)
        self.closes = 0

    def connect(self, peer: WorkerHandle) -> Connection:
        if self.refusal is not None:
            raise TransportUnavailable(self.refusal)
        return self.name  # type: ignore[return-value]  # only passed through

    def quarantined(self) -> frozenset[int]:
        return self.stuck

    def close(self) -> None:
        self.closes += 1


def test_the_first_that_connects_is_taken() -> None:
    transports = Transports([Named("a"), Named("b")], layout_digest="same")
    assert transports.connect(PEER) == "a"
    assert transports.refusals() == {}


def test_a_refusal_falls_back_and_is_counted_under_its_reason() -> None:
    transports = Transports([Named("a", "no way"), Named("b")], layout_digest="same")
    assert transports.connect(PEER) == "b"
    assert transports.connect(PEER) == "b"
    assert transports.refusals() == {("a", "no way"): 2}


def test_when_none_connects_every_reason_is_told() -> None:
    transports = Transports([Named("a", "no way"), Named("b", "no road")], layout_digest="same")
    with pytest.raises(TransportUnavailable, match="a: no way; b: no road"):
        transports.connect(PEER)


def test_without_transports_no_peer_is_reached() -> None:
    with pytest.raises(TransportUnavailable, match="no transport"):
        Transports([], layout_digest="same").connect(PEER)


def test_a_peer_with_another_layout_is_never_connected() -> None:
    transports = Transports([Named("a")], layout_digest="other")
    with pytest.raises(TransportUnavailable, match="same is not ours other"):
        transports.connect(PEER)
    assert sum(transports.refusals().values()) == 1


def test_quarantine_is_the_union_over_transports() -> None:
    transports = Transports([Named("a", stuck=(1, 2)), Named("b", stuck=(2, 5))], layout_digest="")
    assert transports.quarantined() == {1, 2, 5}
    assert Transports([], layout_digest="").quarantined() == frozenset()


def test_closing_closes_every_transport() -> None:
    parts = [Named("a"), Named("b")]
    Transports(parts, layout_digest="").close()
    assert [part.closes for part in parts] == [1, 1]


@pytest.fixture
def arenas():
    made = {tier: Arena.create(4, 4096, "select") for tier in Tier}
    yield made
    for arena in made.values():
        arena.close()


def start(arenas: dict[Tier, Arena], **changes: object) -> Transports:
    settings = {
        "choice": "auto",
        "arenas": arenas,
        "staging": range(2, 4),
        "host": None,
        "layout_digest": "same",
    }
    return Transports.start(**(settings | changes))


def test_a_forced_transport_is_the_only_one(arenas: dict[Tier, Arena]) -> None:
    transports = start(arenas, choice="shm")
    with pytest.raises(TransportUnavailable, match=r"^shm: the peer is on another host$"):
        transports.connect(PEER)
    assert transports.published() == {"nixl": None, "xoscar": None}


def test_a_forced_transport_that_does_not_start_fails_the_launch(
    arenas: dict[Tier, Arena],
) -> None:
    with pytest.raises(TransportUnavailable, match="address"):
        start(arenas, choice="xoscar", host=None)


def test_auto_leaves_out_what_does_not_start_and_counts_it(
    arenas: dict[Tier, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise TransportUnavailable("no plug-in")

    monkeypatch.setattr("xinference_xavier.transport.nixl.NixlTransport", refuse)
    monkeypatch.setitem(sys.modules, "xinference_xavier.transport.xoscar", None)
    transports = start(arenas, host="127.0.0.1")
    reasons = dict(transports.refusals())
    transports.close()
    assert reasons.pop(("nixl", "no plug-in")) == 1
    assert [name for name, _ in reasons] == ["xoscar"]
    assert transports.published() == {"nixl": None, "xoscar": None}


def test_a_start_that_breaks_off_closes_what_it_had_started(
    arenas: dict[Tier, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Named("shm")
    monkeypatch.setattr(select, "ShmTransport", lambda: started)
    with pytest.raises(ValueError, match="staging"):
        start(arenas, staging=range(3, 9))
    assert started.closes == 1


@pytest.mark.parametrize("choice", ["nixl", "xoscar"])
def test_without_staging_slots_nothing_can_be_fetched(
    arenas: dict[Tier, Arena], choice: str
) -> None:
    with pytest.raises(TransportUnavailable, match="staging"):
        start(arenas, choice=choice, staging=range(4, 4))


def test_an_unknown_choice_names_the_known_ones(arenas: dict[Tier, Arena]) -> None:
    with pytest.raises(ValueError, match=", ".join(PREFERENCE)):
        start(arenas, choice="carrier pigeon")
