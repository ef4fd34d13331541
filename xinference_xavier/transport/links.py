# SPDX-License-Identifier: Apache-2.0
"""The open connections of a worker, one per peer, shared by its load threads.

A connection is opened by the first load that needs it and kept. It is retired when the peer shows
another handle (a restart), when a transfer over it failed, or when the peer is dead; a retired
connection closes with its last user, so that nobody loses memory from under a running copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from xinference_xavier.transport.base import Connection, TransportUnavailable, WorkerHandle

logger = logging.getLogger(__name__)


class LinkStatus(TypedDict):
    """What observers see of one peer; ``bytes_per_s`` is over all loads since it was opened."""

    transport: str
    bytes: int
    seconds: float
    bytes_per_s: float


class Connector(Protocol):
    """What opens connections: :class:`~xinference_xavier.transport.select.Transports`."""

    def connect(self, peer: WorkerHandle) -> Connection:
        """Open a path to a peer or raise :class:`TransportUnavailable`."""


@dataclass(slots=True)
class _Link:
    member: int
    peer: WorkerHandle
    opening: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    users: int = 0
    retired: bool = False
    cold: bool = True
    nbytes: int = 0
    seconds: float = 0.0


class PeerLinks:
    """Connections by directory member number. Every method may be called from any thread."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False

    @contextlib.contextmanager
    def use(self, member: int, peer: WorkerHandle) -> Iterator[Connection]:
        """Give the connection to a peer for the length of the block, opening it if need be.

        Raises :class:`TransportUnavailable` when no transport reaches the peer.
        """
        link = self._enter(member, peer)
        try:
            with link.opening:
                if link.connection is None:
                    try:
                        link.connection = self._connector.connect(peer)
                    except BaseException:
                        self._retire(link)
                        raise
            yield link.connection
        finally:
            self._leave(link)

    def account(self, member: int, nbytes: int, seconds: float) -> None:
        """Add a measured load to a peer's bandwidth; the first one is logged."""
        with self._lock:
            link = self._links.get(member)
            if link is None or link.connection is None or nbytes == 0:
                return
            first = link.nbytes == 0
            link.nbytes += nbytes
            link.seconds += seconds
            transport = link.connection.transport
        if first:
            logger.info(
                "Xavier member %d over %s: first load %.1f MB in %.1f ms, %.2f GB/s",
                member,
                transport,
                nbytes / 1e6,
                seconds * 1e3,
                nbytes / max(seconds, 1e-9) / 1e9,
            )

    def retire(self, connection: Connection) -> None:
        """Close a connection once its users are done; the next load opens a new one.

        Nothing happens when it was retired already, so a late report spares its successor.
        """
        with self._lock:
            links = [link for link in self._links.values() if link.connection is connection]
        for link in links:
            self._retire(link)

    def reap(self) -> None:
        """Retire the connections of dead peers."""
        with self._lock:
            open_links = [link for link in self._links.values() if link.connection is not None]
        for link in open_links:
            # Outside the lock: a transport may have to look at the peer.
            connection = link.connection
            if connection is not None and not connection.alive():
                logger.info("Xavier member %d is gone: closing its connection", link.member)
                self._retire(link)

    def warm(self) -> bool:
        """Let one connection do a piece of preparation; return whether there is more of it."""
        with self._lock:
            link = next((k for k in self._links.values() if k.connection and k.cold), None)
            if link is None:
                return False
            link.users += 1
            # A connection whose preparation fails is not asked again.
            link.cold = False
            connection = link.connection
        try:
            link.cold = connection is not None and connection.warm()
        finally:
            self._leave(link)
        return True

    def status(self) -> dict[int, LinkStatus]:
        """Return the transport in use per member, with its measured bandwidth."""
        with self._lock:
            return {
                member: LinkStatus(
                    transport=link.connection.transport,
                    bytes=link.nbytes,
                    seconds=link.seconds,
                    bytes_per_s=link.nbytes / link.seconds if link.seconds else 0.0,
                )
                for member, link in self._links.items()
                if link.connection is not None
            }

    def close(self) -> None:
        """Retire everything and open nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            self._retire(link)

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
            connection = self._to_close(link)
        if connection is not None:
            connection.close()

    def _retire(self, link: _Link) -> None:
        with self._lock:
            link.retired = True
            if self._links.get(link.member) is link:
                del self._links[link.member]
            connection = self._to_close(link)
        if connection is not None:
            connection.close()

    @staticmethod
    def _to_close(link: _Link) -> Connection | None:
        """Return the connection whose close is due, once. Under the lock."""
        if not link.retired or link.users:
            return None
        connection, link.connection = link.connection, None
        return connection
