# SPDX-License-Identifier: Apache-2.0
"""The transports of a worker, and the choice among them per tier of a peer.

``auto`` tries them in order of speed and takes the first that connects and, where slots must be
fetched, delivers a first one; a forced choice has no fallback. A transport whose reads from a tier
fail comes last for that tier for a while. Every refusal is counted under its reason, so that
a slow path is never taken silently.

``cuda_ipc`` and ``shm`` are one pair: the first maps the tiers that peers keep on their GPU, the
second those in host memory. So a forced ``cuda_ipc`` includes ``shm``.

The xoscar pool stays published in ``auto``: peers without NIXL, or with only sockets between us,
have no other way, and whether there are any is not known at start. Idle it sleeps in its loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    CLOSE_S,
    Connection,
    Gpu,
    SlotView,
    TransferFailed,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.faults import DEMOTION_S, Faults, blames
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.shm import ShmTransport

logger = logging.getLogger(__name__)

AUTO: Final = "auto"

PREFERENCE: Final = ("cuda_ipc", "shm", "nixl", "xoscar")
"""Fastest first."""

PROBE_S: Final = 2.0
"""Longest wait for the first slot of a peer. Wiring up NIXL takes a second on a busy CPU."""

_MOST_REASONS: Final = 32
"""Different refusals told apart; reasons name addresses, and peers come and go for months."""

_OTHER: Final = "other reasons"


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
        self._faults = Faults()
        self._lock = threading.Lock()
        self._reasons: set[str] = set()
        self._refusals: Counter[str] = Counter()

    @classmethod
    def start(
        cls,
        *,
        choice: str,
        arenas: Mapping[Tier, SlotMemory],
        staging: Mapping[Tier, range],
        host: str | None,
        layout_digest: str,
        gpu: Gpu | None = None,
    ) -> Transports:
        """Start the transports of ``choice`` ("auto" or one name) over a worker's arenas.

        Call it on the main thread: NIXL loads libraries that a helper thread may not be able to.
        ``staging`` are the slots of each tier for fetching transports, ``host`` the address that
        peers can route to, ``gpu`` the KV cache's GPU, if it is on one. With "auto" a transport
        that does not start is left out and counted; a forced one raises
        :class:`TransportUnavailable`.
        """
        own = _Own(arenas, {tier: slots for tier, slots in staging.items() if slots}, host, gpu)
        transports: list[Transport] = []
        published = Published(nixl=None, xoscar=None)
        refusals: list[tuple[str, str]] = []
        try:
            for name in _names(choice, own):
                try:
                    transport, partial = _start(name, own, published)
                    transports.append(transport)
                    if partial is not None:
                        raise TransportUnavailable(partial)
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

    def connect(
        self,
        member: int,
        peer: WorkerHandle,
        tier: Tier,
        *,
        pools: Mapping[Tier, StagingPool],
        deadline: float,
    ) -> Connection:
        """Open the best path to a tier of a peer. May take seconds: load threads only.

        A path that fetches is accepted when one slot has arrived in a staging slot of ``pools``
        within :data:`PROBE_S`, and before ``deadline`` (monotonic). ``member`` is the peer's
        number, by which its faults are remembered.

        Raises :class:`TransportUnavailable` with every transport's reason when none works, or
        when the peer's blocks have another layout than ours; TimeoutError when no staging slot
        came free.
        """
        if peer.layout_digest != self._layout_digest:
            reason = f"the peer's KV layout {peer.layout_digest} is not ours {self._layout_digest}"
            self._count("any", reason)
            raise TransportUnavailable(reason)
        ways = [way for way in self._transports if way.serves(peer.arenas[tier])]
        demoted = [way for way in ways if self._faults.demoted(member, tier, way.name)]
        if len(demoted) < len(ways):
            for way in demoted:
                self._count(way.name, "demoted for a peer whose reads failed")
        reasons: list[str] = []
        # Last, not never: between hosts there may be no other, and networks recover.
        for transport in [*(way for way in ways if way not in demoted), *demoted]:
            try:
                return self._open(transport, member, peer, tier, pools, deadline)
            except TransportUnavailable as error:
                self._count(transport.name, str(error))
                reasons.append(f"{transport.name}: {error}")
        told = "; ".join(reasons) or "no transport for that kind of memory is running"
        raise TransportUnavailable(f"the peer's {tier.name} tier cannot be reached: {told}")

    def quarantined(self, tier: Tier) -> frozenset[int]:
        """Return the staging slots of a tier into which any timed-out transfer may still write."""
        return frozenset().union(*(way.quarantined(tier) for way in self._transports))

    def failed(self, member: int, tier: Tier, transport: str, error: TransferFailed) -> None:
        """Note that a read from a tier failed; may demote the transport for it."""
        if self._faults.add(member, tier, transport, error):
            self._count(transport, f"demoted for a peer for {DEMOTION_S:.0f} s: {error}")

    def worked(self, member: int, tier: Tier, transport: str) -> None:
        """Note that a load from a tier succeeded: failures before it no longer count."""
        self._faults.clear(member, tier, transport)

    def take_refusals(self) -> dict[str, int]:
        """Return how often each "transport: reason" made us take another path, or none.

        Each refusal is returned once. Never waits for a transport: any thread may call it.
        """
        with self._lock:
            taken, self._refusals = self._refusals, Counter()
        return dict(taken)

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Close every transport, all within some ``deadline_s`` seconds. Idempotent.

        Returns whether our arenas may go: not while a transfer may still write into them.
        """
        end = time.monotonic() + deadline_s
        ended = True
        for number, transport in enumerate(self._transports):
            left = max(0.0, end - time.monotonic())
            ended &= transport.close(left / (len(self._transports) - number))
        return ended

    def _open(
        self,
        transport: Transport,
        member: int,
        peer: WorkerHandle,
        tier: Tier,
        pools: Mapping[Tier, StagingPool],
        deadline: float,
    ) -> Connection:
        if time.monotonic() >= deadline:
            raise TransportUnavailable("the load's time was over before it was tried")
        connection = transport.connect(peer, tier, deadline=deadline)
        try:
            if connection.view() is None:
                self._probe(connection, member, tier, pools[connection.staging], deadline)
        except TransferFailed as error:
            connection.close()
            raise TransportUnavailable(f"the first slot did not arrive: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _probe(
        self,
        connection: Connection,
        member: int,
        tier: Tier,
        pool: StagingPool,
        deadline: float,
    ) -> None:
        """Fetch one slot; raises :class:`TransferFailed`.

        What the slot holds is unknown here and of no interest, a free one will do: that its meta
        row arrives behind it shows that the path carries bytes.
        """
        with pool.lend(1, deadline=deadline) as staging:
            started = time.monotonic()
            limit = min(deadline, started + PROBE_S)
            try:
                meta = connection.fetch([0], staging, deadline=limit)
                if tuple(meta.shape) != (1, 2) or int(meta[0, 0]) < 0:
                    raise TransferFailed(f"{meta.tolist()} is not the meta row of one slot")
            except TransferFailed as error:
                if blames(error, limit - started):
                    self._faults.add(member, tier, connection.transport, error)
                raise

    def _count(self, name: str, reason: str) -> None:
        line = f"{name}: {reason}"
        with self._lock:
            first = line not in self._reasons
            if first and len(self._reasons) < _MOST_REASONS:
                self._reasons.add(line)
            elif first:
                line = f"{name}: {_OTHER}"
            self._refusals[line] += 1
        if first:
            logger.info("Xavier transport %s is not used: %s", name, reason)


@dataclass(frozen=True, slots=True)
class _Own:
    """What this worker has: the arguments of :meth:`Transports.start`."""

    arenas: Mapping[Tier, SlotMemory]
    staging: Mapping[Tier, range]
    host: str | None
    gpu: Gpu | None

    @property
    def slot_bytes(self) -> int:
        return next(arena.slot_bytes for arena in self.arenas.values())

    def views(self) -> dict[Tier, SlotView]:
        return {tier: SlotView(arena.data, arena.meta) for tier, arena in self.arenas.items()}


def _names(choice: str, own: _Own) -> tuple[str, ...]:
    """Return the transports to start. Raises :class:`TransportUnavailable`, ValueError."""
    if choice == AUTO:
        return PREFERENCE if own.gpu else PREFERENCE[1:]
    if choice not in PREFERENCE:
        raise ValueError(
            f"transport {choice!r} does not exist: one of {AUTO}, {', '.join(PREFERENCE)}"
        )
    if choice == "cuda_ipc":
        if own.gpu is None:
            raise TransportUnavailable("xavier_transport=cuda_ipc: the KV cache is not on a GPU")
        return (choice, "shm")
    if choice == "shm" and any(arena.handle().device for arena in own.arenas.values()):
        raise TransportUnavailable(
            "xavier_transport=shm reaches host memory only, and the device tier is on a GPU: take "
            "cuda_ipc or auto, or xavier_gpu_cache_bytes=0"
        )
    return (choice,)


def _start(name: str, own: _Own, published: Published) -> tuple[Transport, str | None]:
    """Start one transport and add what it publishes; also return why a part of it does not work.

    CUDA, NIXL and xoscar are optional and slow to import: only a transport that is wanted does it.
    """
    if name == "cuda_ipc" and own.gpu is not None:
        from xinference_xavier.transport.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(own.gpu.api), None
    if name == "shm":
        return ShmTransport(), None
    if not own.staging:
        raise TransportUnavailable("there are no staging slots: the host tier is empty")
    if name == "nixl":
        from xinference_xavier.transport.nixl import NixlTransport

        nixl = NixlTransport(
            views=own.views(), slot_bytes=own.slot_bytes, staging=own.staging, agent_name="xavier"
        )
        published["nixl"] = nixl.metadata()
        return nixl, nixl.omitted
    if Tier.HOST not in own.staging:
        raise TransportUnavailable("there are no staging slots: the host tier is empty")
    if own.host is None:
        raise TransportUnavailable("no address to advertise is known")
    try:
        from xinference_xavier.transport.xoscar import XoscarTransport
    except ImportError as error:
        raise TransportUnavailable(f"xoscar is not installed: {error}") from error
    xoscar = XoscarTransport(
        views=own.views(),
        nonces={tier: arena.handle().nonce for tier, arena in own.arenas.items()},
        slot_bytes=own.slot_bytes,
        staging=own.staging[Tier.HOST],
        host=own.host,
        device=own.gpu.device if own.gpu else None,
    )
    published["xoscar"] = xoscar.address
    return xoscar, None
