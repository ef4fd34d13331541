# SPDX-License-Identifier: Apache-2.0
"""Connections are shared, kept, and closed once, after their last user."""

from __future__ import annotations

import dataclasses

import pytest

from xinference_xavier.transport.base import Connection, TransportUnavailable, WorkerHandle
from xinference_xavier.transport.links import PeerLinks

PEER = WorkerHandle(rank=0, host_id="host", layout_digest="same", arenas={})
RESTARTED = dataclasses.replace(PEER, rank=1)


class Plain(Connection):
    """Counts its closes and does as it is told."""

    transport = "plain"

    def __init__(self) -> None:
        self.closes = 0
        self.living = True
        self.cold = 2

    def view(self, tier):
        return None

    def fetch(self, tier, slots, staging, *, deadline):
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
        self.refuses = False

    def connect(self, peer: WorkerHandle) -> Plain:
        if self.refuses:
            raise TransportUnavailable("no way")
        self.opened.append(Plain())
        return self.opened[-1]


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def links(connector: Connector) -> PeerLinks:
    return PeerLinks(connector)


def use(links: PeerLinks, member: int = 1, peer: WorkerHandle = PEER) -> Connection:
    with links.use(member, peer) as connection:
        return connection


def test_users_of_one_member_share_a_connection_that_stays_open(links: PeerLinks) -> None:
    with links.use(1, PEER) as first, links.use(1, PEER) as second:
        assert first is second
    assert use(links) is first
    assert first.closes == 0
    assert use(links, member=2) is not first


def test_a_restarted_peer_gets_a_new_connection_while_the_old_one_is_in_use(
    links: PeerLinks,
) -> None:
    with links.use(1, PEER) as old:
        new = use(links, peer=RESTARTED)
        assert new is not old
        assert old.closes == 0
    assert (old.closes, new.closes) == (1, 0)


def test_a_late_failure_of_the_old_connection_spares_the_new_one(links: PeerLinks) -> None:
    with links.use(1, PEER) as old:
        new = use(links, peer=RESTARTED)
        links.retire(old)
    assert (old.closes, new.closes) == (1, 0)
    assert use(links, peer=RESTARTED) is new


def test_a_refusal_leaves_no_trace(links: PeerLinks, connector: Connector) -> None:
    connector.refuses = True
    with pytest.raises(TransportUnavailable):
        use(links)
    assert links.status() == {}
    connector.refuses = False
    use(links)
    assert set(links.status()) == {1}


def test_only_the_dead_are_reaped(links: PeerLinks) -> None:
    dead, living = use(links), use(links, member=2)
    dead.living = False
    links.reap()
    links.reap()
    assert (dead.closes, living.closes) == (1, 0)


def test_bandwidth_is_over_all_loads_since_opening(links: PeerLinks) -> None:
    links.account(1, 10, 1.0)
    use(links)
    links.account(1, 0, 5.0)
    links.account(1, 300, 1.0)
    links.account(1, 100, 3.0)
    assert links.status() == {
        1: {"transport": "plain", "bytes": 400, "seconds": 4.0, "bytes_per_s": 100.0}
    }


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
    with links.use(1, PEER) as connection:
        links.close()
        assert connection.closes == 0
    assert connection.closes == 1
    links.close()
    assert connection.closes == 1
    with pytest.raises(TransportUnavailable, match="closed"):
        use(links)
