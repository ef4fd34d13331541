# SPDX-License-Identifier: Apache-2.0
"""Peers of the same host: their arenas are mapped read-only, and copies come straight out of them.

The kernel does the access control: opening ``/proc/<pid>/fd/<n>`` fails for another user or in
another container, and then the next transport is taken. A peer that dies, however, leaves its
pages readable until we unmap them, so a copy that is running never faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import torch

from xinference_xavier.store.arena import PAGE, ArenaUnavailable, MappedArena, boot_id
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    CLOSE_S,
    Connection,
    SlotView,
    TransferFailed,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)

_WARM_BYTES: Final = 64 << 20


def host_id() -> str:
    """Return the ``WorkerHandle.host_id`` of this process: equal where mapping is worth a try.

    Containers of one host share it. Whether memory can really be mapped shows in trying.
    """
    return boot_id()


class ShmConnection(Connection):
    """The mapped arenas of one peer."""

    transport: ClassVar[str] = "shm"

    def __init__(self, arenas: dict[Tier, MappedArena]) -> None:
        self._arenas = arenas
        # Made once: what a load thread holds keeps the mapping alive past close().
        self._views = {tier: SlotView(arena.data, arena.meta) for tier, arena in arenas.items()}
        self._touched: dict[Tier, int] = {}

    def view(self, tier: Tier) -> SlotView | None:
        """Return the mapping of a tier; None for a tier that the peer has not, or after close."""
        return self._views.get(tier)

    def fetch(
        self, tier: Tier, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        """Raise :class:`TransferFailed`: what is not mapped does not exist at the peer."""
        raise TransferFailed(f"the peer has no {tier.name} tier")

    def warm(self) -> bool:
        """Map a further part of the peer's pages.

        The first access to a page costs a fault, which makes a first read of a slot about 1.5
        times as long as the next one.
        """
        for tier, view in self._views.items():
            flat = view.data.numpy().reshape(-1)
            start = self._touched.get(tier, 0)
            if start < len(flat):
                flat[start : start + _WARM_BYTES : PAGE].max()
                self._touched[tier] = start + _WARM_BYTES
                return True
        return False

    def alive(self) -> bool:
        """Whether the peer runs and has not closed its arenas."""
        return bool(self._arenas) and all(arena.alive() for arena in self._arenas.values())

    def close(self) -> None:
        """Unmap everything."""
        self._views = {}
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}


class ShmTransport(Transport):
    """Maps the arenas of peers with the same host id."""

    name: ClassVar[str] = "shm"

    def connect(self, peer: WorkerHandle, *, deadline: float = math.inf) -> ShmConnection:
        """Map all tiers of a peer, or none. Takes no time worth a deadline."""
        if peer.host_id != host_id():
            raise TransportUnavailable("the peer is on another host")
        arenas: dict[Tier, MappedArena] = {}
        try:
            for tier, handle in peer.arenas.items():
                arenas[tier] = MappedArena.open(handle)
        except ArenaUnavailable as error:
            for arena in arenas.values():
                arena.close()
            raise TransportUnavailable(str(error)) from error
        return ShmConnection(arenas)

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Nothing is held for the process; connections close with their users."""
