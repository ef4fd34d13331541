# SPDX-License-Identifier: Apache-2.0
"""The open connections of a worker, one per peer, shared by its load threads.

A connection is opened by the first load that needs it and kept. It is retired when the peer shows
another handle (a restart), when a transfer over it failed or timed out, or when the peer is dead; a
retired connection closes with its last user, so that nobody loses memory from under a running copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from xinference_xavier.transport.base import (
    Connection,
    TransferFailed,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.pool import StagingPool

logger = logging.getLogger(__name__)


class Connector(Protocol):
    """What opens connections: :class:`~xinference_xavier.transport.select.Transports`."""

    def connect(
        self, member: int, peer: WorkerHandle, *, pool: StagingPool, deadline: float
    ) -> Connection:
        """Open a path to a peer or raise :class:`TransportUnavailable`."""

    def failed(self, member: int, transport: str, error: TransferFailed) -> None:
        """Note that a read from a peer failed."""

    def worked(self, member: int, transport: str) -> None:
        """Note that a load from a peer succeeded."""


@dataclass(slots=True)
class _Link:
    member: int
    peer: WorkerHandle
    opening: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    users: int = 0
    retired: bool = False
    cold: bool = True
    mapped: bool = False
    measured: bool = False


class PeerLinks:
    """Connections by directory member number. Every method may be called from any thread."""

    def __init__(self, connector: Connector, pool: StagingPool) -> None:
        """``pool`` lends the staging slots with which a new path is probed."""
        self._connector = connector
        self._pool = pool
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False

    @contextlib.contextmanager
    def use(self, member: int, peer: WorkerHandle, *, deadline: float) -> Iterator[Connection]:
        """Give the connection to a peer for the length of the block, opening it if need be.

        Raises :class:`TransportUnavailable` when no transport reaches the peer, TimeoutError when
        another load was still opening the connection at ``deadline`` (monotonic).
        """
        link = self._enter(member, peer)
        try:
            yield self._opened(link, deadline)
        finally:
            self._leave(link)

    @contextlib.contextmanager
    def use_mapped(self, member: int, peer: WorkerHandle) -> Iterator[Connection]:
        """Give the connection of a peer whose memory is mapped; never opens one, never waits.

        Raises :class:`TransportUnavailable` when there is none (any more).
        """
        with self._lock:
            link = self._mapped(member, peer)
            connection = None if link is None else link.connection
            if link is None or connection is None:
                raise TransportUnavailable("the peer's mapped memory was let go")
            link.users += 1
        try:
            yield connection
        finally:
            self._leave(link)

    def mapped(self, member: int, peer: WorkerHandle) -> bool:
        """Return whether a peer's memory is mapped now. Never waits for a peer."""
        with self._lock:
            return self._mapped(member, peer) is not None

    def worked(self, member: int, nbytes: int, seconds: float) -> None:
        """Note a load that brought bytes; the first one of a connection is logged."""
        with self._lock:
            link = self._links.get(member)
            if link is None or link.connection is None or nbytes == 0:
                return
            first, link.measured = not link.measured, True
            transport = link.connection.transport
        self._connector.worked(member, transport)
        if first:
            logger.info(
                "Xavier member %d over %s: first load %.1f MB in %.1f ms, %.2f GB/s",
                member,
                transport,
                nbytes / 1e6,
                seconds * 1e3,
                nbytes / max(seconds, 1e-9) / 1e9,
            )

    def failed(self, connection: Connection, error: TransferFailed) -> None:
        """Close a connection once its users are done; the next load opens a new one.

        The new one may be of another transport (see ``faults``). Nothing happens when it was
        retired already, so a late report spares its successor.
        """
        with self._lock:
            links = [link for link in self._links.values() if link.connection is connection]
        for link in links:
            self._connector.failed(link.member, connection.transport, error)
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

    def close(self) -> None:
        """Retire everything and open nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            self._retire(link)

    def _opened(self, link: _Link, deadline: float) -> Connection:
        if not link.opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another load was still connecting to the peer")
        try:
            if link.connection is None:
                connection = self._connector.connect(
                    link.member, link.peer, pool=self._pool, deadline=deadline
                )
                link.mapped = any(
                    connection.view(tier) is not None for tier in sorted(link.peer.arenas)
                )
                link.connection = connection
            return link.connection
        except BaseException:
            self._retire(link)
            raise
        finally:
            link.opening.release()

    def _mapped(self, member: int, peer: WorkerHandle) -> _Link | None:
        """Return the open link to a peer whose memory is mapped. Under the lock."""
        link = self._links.get(member)
        if link is None or link.connection is None or not link.mapped or link.peer != peer:
            return None
        return link

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
