# SPDX-License-Identifier: Apache-2.0
"""Peers of the same host: their host memory is mapped read-only, and copied straight out of.

The kernel does the access control: opening ``/proc/<pid>/fd/<n>`` fails for another user or in
another container, and then the next transport is taken. A peer that dies, however, leaves its
pages readable until we unmap them, so a copy that is running never faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import torch

from xinference_xavier.store.arena import (
    PAGE,
    ArenaHandle,
    ArenaUnavailable,
    MappedArena,
    boot_id,
)
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
    """The mapped arena of one tier of a peer."""

    transport: ClassVar[str] = "shm"

    def __init__(self, arena: MappedArena) -> None:
        self._arena = arena
        # Made once: what a load thread holds keeps the mapping alive past close().
        self._view: SlotView | None = SlotView(arena.data, arena.meta)
        self._touched = 0

    def view(self) -> SlotView | None:
        """Return the mapping; None after close."""
        return self._view

    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        """Raise :class:`TransferFailed`: nothing is fetched from what is mapped."""
        raise TransferFailed("the peer's memory is unmapped")

    def warm(self) -> bool:
        """Map a further part of the peer's pages.

        The first access to a page costs a fault, which makes a first read of a slot about 1.5
        times as long as the next one.
        """
        view = self._view
        if view is None:
            return False
        flat = view.data.numpy().reshape(-1)
        if self._touched >= len(flat):
            return False
        flat[self._touched : self._touched + _WARM_BYTES : PAGE].max()
        self._touched += _WARM_BYTES
        return True

    def alive(self) -> bool:
        """Whether the peer runs and has not closed its arena."""
        return self._view is not None and self._arena.alive()

    def close(self) -> None:
        """Unmap, with the last user of the view."""
        self._view = None
        self._arena.close()


class ShmTransport(Transport):
    """Maps arenas in host memory of peers with the same host id."""

    name: ClassVar[str] = "shm"

    def serves(self, arena: ArenaHandle) -> bool:
        """Return whether the arena is host memory."""
        return arena.device is None

    def connect(
        self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf
    ) -> ShmConnection:
        """Map a tier of a peer. Takes no time worth a deadline."""
        if peer.host_id != host_id():
            raise TransportUnavailable("the peer is on another host")
        try:
            return ShmConnection(MappedArena.open(peer.arenas[tier]))
        except ArenaUnavailable as error:
            raise TransportUnavailable(str(error)) from error

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Nothing is held for the process; connections close with their users."""
        return True
