# SPDX-License-Identifier: Apache-2.0
"""Connections are shared, kept, and closed once, after their last user."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from tests.waiting import WAIT_S
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    Connection,
    TransferFailed,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.links import PeerLinks
from xinference_xavier.transport.pool import StagingPool

ARENA = SimpleNamespace(slots=8)
PEER = WorkerHandle(rank=0, host_id="host", layout_digest="same", arenas={Tier.HOST: ARENA})
RESTARTED = dataclasses.replace(PEER, rank=1)
BOTH = dataclasses.replace(PEER, arenas={Tier.HOST: ARENA, Tier.DEVICE: ARENA})


class Plain(Connection):
    """Counts its closes and does as it is told."""

    transport = "plain"

    def __init__(self, mapped: bool) -> None:
        self.mapped = mapped
        self.closes = 0
        self.living = True
        self.cold = 2

    def view(self):
        return "memory" if self.mapped else None

    def fetch(self, slots, staging, *, deadline):
        raise AssertionError

    def warm(self) -> bool:
        self.cold -= 1
        if self.cold < -1:
            raise RuntimeError("boom")
        return self.cold > 0

    def alive(self) -> bool:
        return self.living

    def close(self) -> None:
        self.closes += 1


class Connector:
    """Opens a new connection each time, or refuses."""

    def __init__(self) -> None:
        self.opened: list[Plain] = []
        self.refuses: bool | Tier = False
        self.mapped: bool | Tier = False
        self.opening = lambda: None
        self.notes: list[tuple[object, ...]] = []

    def connect(self, member, peer, tier, *, pools, deadline) -> Plain:
        self.opening()
        if self.refuses is True or self.refuses is tier:
            raise TransportUnavailable("no way")
        self.opened.append(Plain(self.mapped is True or self.mapped is tier))
        return self.opened[-1]

    def failed(self, member, tier, transport, error) -> None:
        self.notes.append(("failed", member, tier, transport, str(error)))

    def worked(self, member, tier, transport) -> None:
        self.notes.append(("worked", member, tier, transport))


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def links(connector: Connector) -> PeerLinks:
    return PeerLinks(connector, {Tier.HOST: StagingPool(range(1), frozenset)})


def use(links: PeerLinks, member: int = 1, peer: WorkerHandle = PEER) -> Plain:
    """Return the connection to the host tier."""
    with links.use(member, peer, deadline=soon()) as paths:
        return paths[Tier.HOST]


def soon() -> float:
    return time.monotonic() + WAIT_S


def test_users_of_one_member_share_a_connection_that_stays_open(links: PeerLinks) -> None:
    with (
        links.use(1, PEER, deadline=soon()) as first,
        links.use(1, PEER, deadline=soon()) as second,
    ):
        assert first is second
    assert use(links) is first[Tier.HOST]
    assert first[Tier.HOST].closes == 0
    assert use(links, member=2) is not first[Tier.HOST]


def test_a_restarted_peer_gets_a_new_connection_while_the_old_one_is_in_use(
    links: PeerLinks,
) -> None:
    with links.use(1, PEER, deadline=soon()) as paths:
        old = paths[Tier.HOST]
        new = use(links, peer=RESTARTED)
        assert new is not old
        assert old.closes == 0
    assert (old.closes, new.closes) == (1, 0)


def test_a_late_failure_of_the_old_connection_spares_the_new_one(
    links: PeerLinks, connector: Connector
) -> None:
    with links.use(1, PEER, deadline=soon()) as paths:
        old = paths[Tier.HOST]
        new = use(links, peer=RESTARTED)
        links.failed(old, TransferFailed("broken"))
    assert (old.closes, new.closes) == (1, 0)
    assert use(links, peer=RESTARTED) is new
    assert connector.notes == []


def test_a_failed_connection_is_reported_once_and_replaced(
    links: PeerLinks, connector: Connector
) -> None:
    with links.use(1, PEER, deadline=soon()) as paths:
        old = paths[Tier.HOST]
        links.failed(old, TransferFailed("broken"))
        links.failed(old, TransferFailed("broken again"))
        assert old.closes == 0
    assert old.closes == 1
    assert connector.notes == [("failed", 1, Tier.HOST, "plain", "broken")]
    assert use(links) is not old


def test_a_refusal_leaves_no_trace(links: PeerLinks, connector: Connector) -> None:
    connector.refuses = True
    with pytest.raises(TransportUnavailable):
        use(links)
    links.worked(1, [Tier.HOST], 10, 1.0)
    assert connector.notes == []
    connector.refuses = False
    assert use(links) is connector.opened[0]


def test_a_load_waits_for_another_ones_connect_until_its_deadline(
    links: PeerLinks, connector: Connector
) -> None:
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    connector.opening = hang
    first = threading.Thread(target=use, args=(links,))
    first.start()
    assert inside.wait(WAIT_S)
    with pytest.raises(TimeoutError), links.use(1, PEER, deadline=time.monotonic()):
        pass
    go.set()
    first.join(WAIT_S)
    assert use(links) is connector.opened[0]
    assert connector.opened[0].closes == 0


def test_only_memory_that_is_mapped_is_given_without_a_connect(
    links: PeerLinks, connector: Connector
) -> None:
    def refused(peer: WorkerHandle) -> None:
        assert not links.mapped(1, peer, [Tier.HOST])
        with pytest.raises(TransportUnavailable), links.use_mapped(1, peer, [Tier.HOST]):
            pass

    refused(PEER)
    fetching = use(links)
    refused(PEER)
    links.failed(fetching, TransferFailed("broken"))
    connector.mapped = True
    mapped = use(links)
    assert links.mapped(1, PEER, [Tier.HOST])
    refused(RESTARTED)
    with links.use_mapped(1, PEER, [Tier.HOST]) as paths:
        assert paths == {Tier.HOST: mapped}
        links.close()
        assert mapped.closes == 0
    assert mapped.closes == 1
    refused(PEER)


def test_a_peer_one_of_whose_tiers_is_out_of_reach_is_not_used(
    links: PeerLinks, connector: Connector
) -> None:
    connector.refuses = Tier.HOST
    with pytest.raises(TransportUnavailable):
        use(links, peer=BOTH)
    assert [connection.closes for connection in connector.opened] == [1]
    connector.refuses = False
    with links.use(1, BOTH, deadline=soon()) as paths:
        assert set(paths) == {Tier.DEVICE, Tier.HOST}


def test_an_empty_tier_needs_no_connection(links: PeerLinks) -> None:
    empty = SimpleNamespace(slots=0)
    peer = dataclasses.replace(PEER, arenas={Tier.HOST: ARENA, Tier.DEVICE: empty})
    with links.use(1, peer, deadline=soon()) as paths:
        assert set(paths) == {Tier.HOST}


def test_a_failure_is_told_of_its_tier_and_retires_the_whole_link(
    links: PeerLinks, connector: Connector
) -> None:
    with links.use(1, BOTH, deadline=soon()) as paths:
        links.failed(paths[Tier.DEVICE], TransferFailed("broken"))
        assert [connection.closes for connection in connector.opened] == [0, 0]
    assert connector.notes == [("failed", 1, Tier.DEVICE, "plain", "broken")]
    assert [connection.closes for connection in connector.opened] == [1, 1]


def test_a_load_that_worked_speaks_for_the_tiers_it_read(
    links: PeerLinks, connector: Connector
) -> None:
    use(links, peer=BOTH)
    links.worked(1, [Tier.DEVICE], 10, 1.0)
    assert connector.notes == [("worked", 1, Tier.DEVICE, "plain")]


def test_a_link_of_which_one_tier_is_mapped_is_quick_for_that_tier(
    links: PeerLinks, connector: Connector
) -> None:
    connector.mapped = Tier.HOST
    use(links, peer=BOTH)
    assert links.mapped(1, BOTH, [Tier.HOST])
    assert not links.mapped(1, BOTH, [Tier.DEVICE])
    assert not links.mapped(1, BOTH, [Tier.DEVICE, Tier.HOST])
    with pytest.raises(TransportUnavailable), links.use_mapped(1, BOTH, [Tier.DEVICE]):
        pass


def test_a_peer_is_dead_when_one_of_its_arenas_is(links: PeerLinks, connector: Connector) -> None:
    use(links, peer=BOTH)
    connector.opened[1].living = False
    links.reap()
    assert [connection.closes for connection in connector.opened] == [1, 1]


def test_only_the_dead_are_reaped(links: PeerLinks) -> None:
    dead, living = use(links), use(links, member=2)
    dead.living = False
    links.reap()
    links.reap()
    assert (dead.closes, living.closes) == (1, 0)


def test_the_first_load_that_brings_bytes_is_logged_with_its_bandwidth(
    links: PeerLinks, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    links.worked(1, [Tier.HOST], 10, 1.0)
    use(links)
    links.worked(1, [Tier.HOST], 0, 5.0)
    assert caplog.messages == []
    links.worked(1, [Tier.HOST], 3_000_000_000, 2.0)
    links.worked(1, [Tier.HOST], 100, 3.0)
    (line,) = caplog.messages
    assert "over plain" in line
    assert "1.50 GB/s" in line
    assert connector.notes == [("worked", 1, Tier.HOST, "plain")] * 2


def test_warming_goes_on_until_every_connection_is_warm(
    links: PeerLinks, connector: Connector
) -> None:
    assert not links.warm()
    use(links)
    use(links, member=2)
    calls = 0
    while links.warm():
        calls += 1
    assert calls == 4
    assert [connection.cold for connection in connector.opened] == [0, 0]


def test_a_connection_that_fails_to_warm_is_not_asked_again(links: PeerLinks) -> None:
    connection = use(links)
    connection.cold = -1
    with pytest.raises(RuntimeError):
        links.warm()
    assert not links.warm()
    links.close()
    assert connection.closes == 1


def test_closing_waits_for_users_and_opens_nothing_more(links: PeerLinks) -> None:
    with links.use(1, PEER, deadline=soon()) as paths:
        connection = paths[Tier.HOST]
        links.close()
        assert connection.closes == 0
    assert connection.closes == 1
    links.close()
    assert connection.closes == 1
    with pytest.raises(TransportUnavailable, match="closed"):
        use(links)
