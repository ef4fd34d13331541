# SPDX-License-Identifier: Apache-2.0
"""What a transport is: a way to bring a peer's leased slots into this worker.

Each tier of a peer has a connection of its own, since a GPU's memory is reached in other ways than
a host's. Two kinds exist. A *mapped* one shows the tier as a local tensor, from which a local copy
goes straight into KV blocks: the copy cannot outlive its caller. A *fetching* one (NIXL, xoscar)
reads into staging slots of our own arenas, because a late write into KV blocks would corrupt what
vLLM recomputes there after a failure (docs/design.md, "A load"); the local copy follows when the
read is complete.

Transports are started and closed on the worker's main thread, and closing is bounded. Every other
call here happens on a load thread, never on the engine's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from xinference_xavier.store.arena import ArenaHandle
from xinference_xavier.store.cuda import CudaApi
from xinference_xavier.store.device import Device
from xinference_xavier.store.jobs import Tier

CLOSE_S: Final = 2.0
"""Time in which a transport closes when its owner names none."""


class TransportUnavailable(Exception):
    """This path cannot be used with that peer; ``str()`` is the reason, and it is counted."""


class TransferFailed(Exception):
    """A read ended, and its staging slots hold nothing usable."""


class TransferTimeout(TransferFailed):
    """A read did not end in time. Its staging slots are quarantined by the connection."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """What one worker (rank) publishes about itself, plain data of a few KiB.

    ``host_id`` is equal on workers that can try to map each other's memory. ``nixl`` is the
    NIXL agent's metadata with the registered arenas, ``xoscar`` the address of the worker's
    actor pool, over plain sockets; both are None where that transport is off.
    """

    rank: int
    host_id: str
    layout_digest: str
    arenas: dict[Tier, ArenaHandle]
    nixl: bytes | None = None
    xoscar: str | None = None


@dataclass(frozen=True, slots=True)
class SlotView:
    """A tier as memory that this process can address.

    ``data`` is uint8 ``[slots, slot_bytes]``, of a GPU or of the host. ``meta`` is int64
    ``[slots, 2]``, always in host memory: generation and checksum of each slot (see
    ``store.arena``).
    """

    data: torch.Tensor
    meta: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that the KV cache is on: its API, and what copies between it and slots."""

    api: CudaApi
    device: Device


class Connection(ABC):
    """An open path to one tier of one worker of a peer."""

    transport: ClassVar[str]

    staging: Tier = Tier.HOST
    """The tier of ours whose staging slots :meth:`fetch` takes."""

    @abstractmethod
    def view(self) -> SlotView | None:
        """Return the peer's tier as local memory, or None where slots must be fetched."""

    @abstractmethod
    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        """Read ``slots`` of the peer into our ``staging`` slots and wait for it.

        Returns the peer's ``meta`` rows, int64 ``[len(slots), 2]``, read *after* the payload was
        complete. ``deadline`` is a ``time.monotonic()`` instant. Raises :class:`TransferTimeout`
        when it passes; then the staging slots stay in ``quarantined()`` until the transfer is
        terminal. Raises :class:`TransferFailed` when the read ended in an error.
        """

    def warm(self) -> bool:
        """Do a piece of work of at most some 10 ms that makes later views cheaper.

        Load threads call it when they are idle, until it returns False: nothing is left to do.
        """
        return False

    @abstractmethod
    def alive(self) -> bool:
        """Whether the peer's memory can still be reached, as far as is known locally."""

    @abstractmethod
    def close(self) -> None:
        """Unmap or deregister everything of that tier. Idempotent.

        Whoever copied from :meth:`view` has waited for the end of the copy.
        """


class Transport(ABC):
    """One way to reach peers; owns the process-wide resource (NIXL agent, pool)."""

    name: ClassVar[str]

    def serves(self, arena: ArenaHandle) -> bool:
        """Return whether this is a way to that kind of memory at all.

        Where it is not, the transport is passed over and nothing is counted.
        """
        return True

    @abstractmethod
    def connect(self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf) -> Connection:
        """Open a path to a tier of a peer's worker of our rank, before ``deadline`` (monotonic).

        Raises :class:`TransportUnavailable`.
        """

    def quarantined(self, tier: Tier) -> frozenset[int]:
        """Staging slots of a tier of ours into which a timed-out transfer may still write."""
        return frozenset()

    @abstractmethod
    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Release everything, open connections included, within some ``deadline_s`` seconds.

        Returns whether our arenas may go. If not, a daemon thread is left that may write into them
        still; it keeps the host's memory, but cannot keep a GPU's. Idempotent: a later call tells
        anew.
        """
