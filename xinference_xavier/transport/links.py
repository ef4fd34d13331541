# SPDX-License-Identifier: Apache-2.0
"""The open connections of a worker, one set per peer, shared by its load threads.

A *link* is a connection to each tier of a peer, opened together by the first load that needs the
peer, and kept. It is all or nothing: a peer one of whose tiers cannot be reached is not used, since
its promises name slots of any tier. A link is retired when the peer shows another handle (a
restart), when a transfer over it failed or timed out, or when the peer is dead; a retired link
closes with its last user, so that nobody loses memory from under a running copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    Connection,
    TransferFailed,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.pool import StagingPool

logger = logging.getLogger(__name__)

Paths = Mapping[Tier, Connection]
"""The connections to the tiers of one peer."""


class Connector(Protocol):
    """What opens connections: :class:`~xinference_xavier.transport.select.Transports`."""

    def connect(
        self,
        member: int,
        peer: WorkerHandle,
        tier: Tier,
        *,
        pools: Mapping[Tier, StagingPool],
        deadline: float,
    ) -> Connection:
        """Open a path to a tier of a peer or raise :class:`TransportUnavailable`."""

    def failed(self, member: int, tier: Tier, transport: str, error: TransferFailed) -> None:
        """Note that a read from a peer failed."""

    def worked(self, member: int, tier: Tier, transport: str) -> None:
        """Note that a load from a peer succeeded."""


@dataclass(slots=True)
class _Link:
    member: int
    peer: WorkerHandle
    opening: threading.Lock = field(default_factory=threading.Lock)
    paths: dict[Tier, Connection] | None = None
    users: int = 0
    retired: bool = False
    measured: bool = False
    mapped: frozenset[Tier] = frozenset()
    cold: list[Connection] = field(default_factory=list)
    """Connections that may have something to prepare."""


class PeerLinks:
    """Links by directory member number. Every method may be called from any thread."""

    def __init__(self, connector: Connector, pools: Mapping[Tier, StagingPool]) -> None:
        """``pools`` lend the staging slots with which a new path is probed."""
        self._connector = connector
        self._pools = pools
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False

    @contextlib.contextmanager
    def use(self, member: int, peer: WorkerHandle, *, deadline: float) -> Iterator[Paths]:
        """Give the connections to a peer for the length of the block, opening them if need be.

        Raises :class:`TransportUnavailable` when no transport reaches one of the peer's tiers,
        TimeoutError when another load was still opening the link at ``deadline`` (monotonic).
        """
        link = self._enter(member, peer)
        try:
            yield self._opened(link, deadline)
        finally:
            self._leave(link)

    @contextlib.contextmanager
    def use_mapped(self, member: int, peer: WorkerHandle, tiers: Iterable[int]) -> Iterator[Paths]:
        """Give the connections of a peer whose ``tiers`` are mapped; never opens any, never waits.

        Raises :class:`TransportUnavailable` when they are not (any more).
        """
        with self._lock:
            link = self._mapped(member, peer, tiers)
            if link is None or link.paths is None:
                raise TransportUnavailable("the peer's mapped memory was let go")
            paths = link.paths
            link.users += 1
        try:
            yield paths
        finally:
            self._leave(link)

    def mapped(self, member: int, peer: WorkerHandle, tiers: Iterable[int]) -> bool:
        """Return whether these tiers of a peer are mapped now. Never waits for a peer."""
        with self._lock:
            return self._mapped(member, peer, tiers) is not None

    def worked(self, member: int, tiers: Iterable[Tier], nbytes: int, seconds: float) -> None:
        """Note a load that brought bytes from these tiers; the first one of a link is logged."""
        with self._lock:
            link = self._links.get(member)
            if link is None or link.paths is None or nbytes == 0:
                return
            first, link.measured = not link.measured, True
            names = {tier: link.paths[tier].transport for tier in tiers if tier in link.paths}
        for tier, name in names.items():
            self._connector.worked(member, tier, name)
        if first:
            logger.info(
                "Xavier member %d over %s: first load %.1f MB in %.1f ms, %.2f GB/s",
                member,
                "+".join(sorted(set(names.values()))),
                nbytes / 1e6,
                seconds * 1e3,
                nbytes / max(seconds, 1e-9) / 1e9,
            )

    def failed(self, connection: Connection, error: TransferFailed) -> None:
        """Close a connection's link once its users are done; the next load opens a new one.

        The new one may be of another transport (see ``faults``). Nothing happens when it was
        retired already, so a late report spares its successor.
        """
        with self._lock:
            found = [
                (link, tier)
                for link in self._links.values()
                for tier, path in (link.paths or {}).items()
                if path is connection
            ]
        for link, tier in found:
            self._connector.failed(link.member, tier, connection.transport, error)
            self._retire(link)

    def reap(self) -> None:
        """Retire the links to dead peers."""
        with self._lock:
            open_links = [(link, link.paths) for link in self._links.values() if link.paths]
        for link, paths in open_links:
            # Outside the lock: a transport may have to look at the peer.
            if not all(connection.alive() for connection in paths.values()):
                logger.info("Xavier member %d is gone: closing its connections", link.member)
                self._retire(link)

    def warm(self) -> bool:
        """Let one connection do a piece of preparation; return whether there is more of it."""
        with self._lock:
            link = next((k for k in self._links.values() if k.cold), None)
            if link is None:
                return False
            link.users += 1
            # A connection whose preparation fails is not asked again.
            connection = link.cold.pop()
        try:
            if connection.warm():
                link.cold.append(connection)
        finally:
            self._leave(link)
        return True

    def close(self) -> None:
        """Retire everything and open nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            self._retire(link)

    def _opened(self, link: _Link, deadline: float) -> Paths:
        if not link.opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another load was still connecting to the peer")
        try:
            if link.paths is None:
                paths = self._open(link, deadline)
                link.mapped = frozenset(tier for tier, path in paths.items() if path.view())
                link.cold = list(paths.values())
                link.paths = paths
            return link.paths
        except BaseException:
            self._retire(link)
            raise
        finally:
            link.opening.release()

    def _open(self, link: _Link, deadline: float) -> dict[Tier, Connection]:
        """Connect to all of a peer's tiers, or to none."""
        paths: dict[Tier, Connection] = {}
        try:
            for tier, arena in sorted(link.peer.arenas.items()):
                if arena.slots:
                    paths[tier] = self._connector.connect(
                        link.member, link.peer, tier, pools=self._pools, deadline=deadline
                    )
        except BaseException:
            _close(paths)
            raise
        return paths

    def _mapped(self, member: int, peer: WorkerHandle, tiers: Iterable[int]) -> _Link | None:
        """Return the open link to a peer if these tiers are mapped. Under the lock."""
        link = self._links.get(member)
        if link is None or link.paths is None or link.peer != peer:
            return None
        return link if link.mapped.issuperset(tiers) else None

    def _enter(self, member: int, peer: WorkerHandle) -> _Link:
        stale = None
        with self._lock:
            if self._closed:
                raise TransportUnavailable("connections are closed")
            link = self._links.get(member)
            if link is not None and link.peer != peer:
                stale, link = link, None
            if link is None:
                link = self._links[member] = _Link(member, peer)
            link.users += 1
        if stale is not None:
            self._retire(stale)
        return link

    def _leave(self, link: _Link) -> None:
        with self._lock:
            link.users -= 1
            paths = self._to_close(link)
        _close(paths)

    def _retire(self, link: _Link) -> None:
        with self._lock:
            link.retired = True
            if self._links.get(link.member) is link:
                del self._links[link.member]
            paths = self._to_close(link)
        _close(paths)

    @staticmethod
    def _to_close(link: _Link) -> Paths:
        """Return the connections whose close is due, once. Under the lock."""
        if not link.retired or link.users or link.paths is None:
            return {}
        paths, link.paths = link.paths, None
        return paths


def _close(paths: Paths) -> None:
    for connection in paths.values():
        connection.close()
