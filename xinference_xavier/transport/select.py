# SPDX-License-Identifier: Apache-2.0
"""The transports of a worker, and the choice among them per peer.

``auto`` tries them in order of speed and takes the first that connects; a forced choice has no
fallback. Every refusal is counted under its reason, so that a slow path is never taken silently.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    Connection,
    SlotView,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.shm import ShmTransport

logger = logging.getLogger(__name__)

AUTO: Final = "auto"

PREFERENCE: Final = ("shm", "nixl", "xoscar")
"""Fastest first."""


class Published(TypedDict):
    """The fields of :class:`WorkerHandle` that tell peers how to reach this worker."""

    nixl: bytes | None
    xoscar: str | None


class Transports:
    """The transports that work in this process. Thread-safe after construction."""

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        layout_digest: str,
        published: Published | None = None,
    ) -> None:
        """Take ownership of ``transports``, given in order of preference.

        Workers use :meth:`start`.
        """
        self._transports = tuple(transports)
        self._layout_digest = layout_digest
        self._published = published or Published(nixl=None, xoscar=None)
        self._lock = threading.Lock()
        self._refusals: Counter[tuple[str, str]] = Counter()

    @classmethod
    def start(
        cls,
        *,
        choice: str,
        arenas: Mapping[Tier, Arena],
        staging: range,
        host: str | None,
        layout_digest: str,
    ) -> Transports:
        """Start the transports of ``choice`` ("auto" or one name) over a worker's arenas.

        Call it on the main thread: NIXL loads libraries that a helper thread may not be able to.
        ``staging`` are the host slots for fetching transports, ``host`` the address that peers
        can route to. With "auto" a transport that does not start is left out and counted; a
        forced one raises :class:`TransportUnavailable`.
        """
        names = PREFERENCE if choice == AUTO else (choice,)
        transports: list[Transport] = []
        published = Published(nixl=None, xoscar=None)
        refusals: list[tuple[str, str]] = []
        try:
            for name in names:
                try:
                    transports.append(_start(name, arenas, staging, host, published))
                except TransportUnavailable as error:
                    if choice != AUTO:
                        raise
                    refusals.append((name, str(error)))
        except BaseException:
            for transport in transports:
                transport.close()
            raise
        started = cls(transports, layout_digest=layout_digest, published=published)
        for name, reason in refusals:
            started._count(name, reason)
        return started

    def published(self) -> Published:
        """Return what goes into this worker's :class:`WorkerHandle`."""
        return self._published

    def connect(self, peer: WorkerHandle) -> Connection:
        """Open the best path to a peer. May take seconds: load threads only.

        Raises :class:`TransportUnavailable` with every transport's reason when none works, or
        when the peer's blocks have another layout than ours.
        """
        if peer.layout_digest != self._layout_digest:
            reason = f"the peer's KV layout {peer.layout_digest} is not ours {self._layout_digest}"
            self._count("any", reason)
            raise TransportUnavailable(reason)
        reasons: list[str] = []
        for transport in self._transports:
            try:
                return transport.connect(peer)
            except TransportUnavailable as error:
                self._count(transport.name, str(error))
                reasons.append(f"{transport.name}: {error}")
        raise TransportUnavailable("; ".join(reasons) or "no transport is running")

    def quarantined(self) -> frozenset[int]:
        """Return the staging slots into which any timed-out transfer may still write."""
        return frozenset().union(*(transport.quarantined() for transport in self._transports))

    def refusals(self) -> dict[tuple[str, str], int]:
        """Return how often each (transport, reason) made us take another path, or none."""
        with self._lock:
            return dict(self._refusals)

    def close(self) -> None:
        """Close every transport. Idempotent."""
        for transport in self._transports:
            transport.close()

    def _count(self, name: str, reason: str) -> None:
        with self._lock:
            self._refusals[name, reason] += 1
            first = self._refusals[name, reason] == 1
        if first:
            logger.info("Xavier transport %s is not used: %s", name, reason)


def _start(
    name: str,
    arenas: Mapping[Tier, Arena],
    staging: range,
    host: str | None,
    published: Published,
) -> Transport:
    """Start one transport and add what it publishes.

    NIXL and xoscar are optional and slow to import: only a transport that is wanted does it.
    """
    if name == "shm":
        return ShmTransport()
    if not staging:
        raise TransportUnavailable("there are no staging slots: the host tier is empty")
    views = {tier: SlotView(arena.data, arena.meta) for tier, arena in arenas.items()}
    slot_bytes = arenas[Tier.HOST].slot_bytes
    if name == "nixl":
        from xinference_xavier.transport.nixl import NixlTransport

        nixl = NixlTransport(
            views=views, slot_bytes=slot_bytes, staging=staging, agent_name="xavier"
        )
        published["nixl"] = nixl.metadata()
        return nixl
    if name == "xoscar":
        if host is None:
            raise TransportUnavailable("no address to advertise is known")
        try:
            from xinference_xavier.transport.xoscar import XoscarTransport
        except ImportError as error:
            raise TransportUnavailable(f"xoscar is not installed: {error}") from error
        xoscar = XoscarTransport(views=views, slot_bytes=slot_bytes, staging=staging, host=host)
        published["xoscar"] = xoscar.address
        return xoscar
    raise ValueError(f"transport {name!r} does not exist: one of {AUTO}, {', '.join(PREFERENCE)}")
