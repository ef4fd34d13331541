# SPDX-License-Identifier: Apache-2.0
"""Device tiers of peers on the same host: their GPU memory is mapped by CUDA IPC.

Copies go from the peer's slots straight into our KV blocks, from GPU to GPU or within one. What
decides whether that is possible (handle, GPUs, containers) is in ``store.device_arena``.
A peer's GPU that is not visible here, as when each replica sees only its own, is no obstacle: CUDA
maps the memory of such GPUs too, or says that it cannot.

An arena is mapped once however many connections use it, since a CUDA context may refuse to open
a handle a second time, and unmapped with the last of them. By then the copies out of it are
complete: whoever uses a view waits for their end before it lets go of the connection.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from xinference_xavier.store.arena import ArenaHandle, ArenaUnavailable
from xinference_xavier.store.cuda import CudaApi, CudaError
from xinference_xavier.store.device_arena import MappedDeviceArena
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
from xinference_xavier.transport.shm import host_id

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Mapping:
    """A peer's arena, and how many connections use it."""

    nonce: bytes
    arena: MappedDeviceArena
    users: int = 0


class CudaIpcConnection(Connection):
    """The mapped device arena of a peer."""

    transport: ClassVar[str] = "cuda_ipc"

    def __init__(self, owner: CudaIpcTransport, mapping: _Mapping) -> None:
        self._owner = owner
        self._mapping: _Mapping | None = mapping
        self._view: SlotView | None = SlotView(mapping.arena.data, mapping.arena.meta)

    def view(self) -> SlotView | None:
        """Return the mapping; None after close."""
        return self._view

    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        """Raise :class:`TransferFailed`: nothing is fetched from what is mapped."""
        raise TransferFailed("the peer's GPU memory is unmapped")

    def alive(self) -> bool:
        """Whether the peer runs and has not closed its arena."""
        mapping = self._mapping
        return mapping is not None and mapping.arena.alive()

    def close(self) -> None:
        """Let go of the mapping."""
        mapping, self._mapping, self._view = self._mapping, None, None
        if mapping is not None:
            self._owner._leave(mapping)


class CudaIpcTransport(Transport):
    """Maps device arenas of peers on the same host into the CUDA context of ``api``."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        # Held while an arena is mapped or unmapped, some milliseconds.
        self._lock = threading.Lock()
        self._mappings: dict[bytes, _Mapping] = {}
        self._closed = False

    def serves(self, arena: ArenaHandle) -> bool:
        """Return whether the arena is a GPU's memory."""
        return arena.device is not None

    def connect(
        self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf
    ) -> CudaIpcConnection:
        """Map a tier of a peer, if it is not mapped yet. Takes no time worth a deadline."""
        if peer.host_id != host_id():
            raise TransportUnavailable("the peer is on another host")
        handle = peer.arenas[tier]
        with self._lock:
            if self._closed:
                raise TransportUnavailable("the CUDA IPC transport is closed")
            mapping = self._mappings.get(handle.nonce)
            if mapping is None:
                mapping = _Mapping(handle.nonce, self._open(handle))
                self._mappings[handle.nonce] = mapping
            elif not mapping.arena.alive():
                raise TransportUnavailable("the peer is gone or has closed its arena")
            mapping.users += 1
        return CudaIpcConnection(self, mapping)

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Map nothing more. What a copy may still read is unmapped with its connection."""
        with self._lock:
            self._closed = True
        return True

    def _open(self, handle: ArenaHandle) -> MappedDeviceArena:
        try:
            return MappedDeviceArena.open(handle, self._api)
        except (ArenaUnavailable, CudaError) as error:
            raise TransportUnavailable(str(error)) from error

    def _leave(self, mapping: _Mapping) -> None:
        with self._lock:
            mapping.users -= 1
            if mapping.users:
                return
            del self._mappings[mapping.nonce]
            try:
                mapping.arena.close()
            except CudaError as error:
                logger.warning("Xavier: a peer's GPU memory was not unmapped: %s", error)
