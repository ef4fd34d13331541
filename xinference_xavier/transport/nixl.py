# SPDX-License-Identifier: Apache-2.0
"""One-sided NIXL READs from a peer's registered arenas into our staging slots.

Everything is prepared once: our arenas are registered when the worker starts, and a peer's slots
become one descriptor list per tier with the first load that needs them. A fetch is then two
READs: the payload, and, when that is complete, the 16-byte meta rows of the same slots.

A tier in a GPU's memory (VRAM) is read into staging slots of our own device tier, from one GPU to
the other; its meta rows, like those of the host tier, from host memory to host memory. Where UCX
has no CUDA support, our device tier is neither read this way nor offered (see ``omitted``).

A transfer cannot be cancelled (see ``nixl_agent``). One that is still running at its deadline goes
to a list of overdue transfers together with its staging slots; ``quarantined()`` polls the list.
The resources of a peer stay until its last connection, running fetch and overdue transfer are gone.

Threads: any thread; several fetches run at the same time on the one agent, and none of them holds
a lock while it waits, or waits for a peer that is being loaded (see ``nixl_peers``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.threads import start_thread
from xinference_xavier.transport.base import (
    CLOSE_S,
    Connection,
    SlotView,
    TransferFailed,
    TransferTimeout,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.nixl_advert import META_BYTES, Advert, TierRegions, decode
from xinference_xavier.transport.nixl_agent import (
    VRAM,
    Agent,
    NixlError,
    Region,
    State,
    Transfer,
)
from xinference_xavier.transport.nixl_path import PathProbe, obstacle
from xinference_xavier.transport.nixl_peers import Peer, Peers
from xinference_xavier.transport.staging import peer_rows, require_staging, staging_rows

logger = logging.getLogger(__name__)

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


@dataclass(frozen=True, slots=True)
class _Landing:
    """Our staging slots of one tier: ``data`` and ``meta`` are lists of the agent.

    Meta rows land in ``scratch``, int64 ``[slots, 2]``, in the row of their staging slot: whoever
    owns the slot owns the row, also while an overdue transfer may still write it.
    """

    slots: range
    data: int
    meta: int
    scratch: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Overdue:
    """A transfer which outlived its deadline or whose end is unknown, and what it may write."""

    transfer: Transfer
    peer: Peer
    tier: Tier
    staging: frozenset[int]


class NixlTransport(Transport):
    """Owns the NIXL agent of this worker.

    ``views`` are our own arenas, registered whole; ``staging`` are ranges of slots of them, the
    only memory that is ever written. ``agent_name`` is for logs: a random suffix makes it unique.
    Raises :class:`TransportUnavailable` when NIXL or UCX is missing or refuses the memory,
    ValueError for views that do not fit each other.

    Make it on the worker's main thread (late plug-in loading, see ``nixl_agent``).
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        views: Mapping[Tier, SlotView],
        slot_bytes: int,
        staging: Mapping[Tier, range],
        agent_name: str,
    ) -> None:
        self._views = {tier: view for tier, view in views.items() if len(view.data)}
        require_staging(self._views, staging, slot_bytes)
        self._slot_bytes = slot_bytes
        self._landings: dict[Tier, _Landing] = {}
        self._lock = threading.Condition()
        self._overdue: list[_Overdue] = []
        self._active = 0
        self._closed = False
        self._closing: threading.Thread | None = None
        self._probe = PathProbe()
        self.omitted: str | None = None
        """Why our device tier is not read or offered, if it is not."""
        self._agent = Agent(f"{agent_name}-{uuid.uuid4().hex[:8]}")
        try:
            tiers = self._register()
            for tier, slots in staging.items():
                if tier in tiers:
                    self._landings[tier] = self._land(tiers[tier].data, slots)
            advert = Advert(self._agent.metadata(), slot_bytes, tiers, self._probe.hints)
        except NixlError as exc:
            self._agent.close()
            raise TransportUnavailable(str(exc)) from exc
        self._metadata = advert.encode()
        self._peers = Peers(self._agent, slot_bytes)

    def _register(self) -> dict[Tier, TierRegions]:
        """Register our arenas; raises NixlError when none of them can be."""
        tiers = {}
        for tier, view in sorted(self._views.items()):
            data, meta = Region.of(view.data), Region.of(view.meta)
            try:
                self._agent.register(data)
            except NixlError as exc:
                if data.kind != VRAM:
                    raise
                self.omitted = f"the {tier.name} tier is left out, UCX cannot reach it: {exc}"
                continue
            self._agent.register(meta)
            tiers[tier] = TierRegions(data, meta)
        if not tiers:
            raise NixlError(self.omitted or "there is no memory to register")
        return tiers

    def _land(self, arena: Region, slots: range) -> _Landing:
        scratch = torch.zeros((len(slots), 2), dtype=torch.int64)
        rows = Region.of(scratch)
        self._agent.register(rows)
        address, nbytes = slots.start * self._slot_bytes, len(slots) * self._slot_bytes
        area = Region(arena.kind, arena.device, arena.address + address, nbytes)
        return _Landing(
            slots,
            self._agent.prepare(None, area, self._slot_bytes),
            self._agent.prepare(None, rows, META_BYTES),
            scratch,
        )

    def metadata(self) -> bytes:
        """What goes into ``WorkerHandle.nixl``: JSON of a few KiB, constant for our lifetime."""
        return self._metadata

    def connect(
        self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf
    ) -> NixlConnection:
        """Load the peer's metadata and prepare its slots. Local work only: nothing is sent yet."""
        if peer.nixl is None:
            raise TransportUnavailable("the peer has no NIXL")
        if peer.nixl == self._metadata:
            raise TransportUnavailable("the peer is this worker itself")
        advert = decode(peer.nixl)
        if advert.slot_bytes != self._slot_bytes:
            raise TransportUnavailable(
                f"the peer's slots have {advert.slot_bytes} bytes, ours {self._slot_bytes}"
            )
        regions = advert.tiers.get(tier)
        if regions is None:
            raise TransportUnavailable(f"the peer does not offer its {tier.name} tier")
        staging = Tier.DEVICE if regions.data.kind == VRAM else Tier.HOST
        if staging not in self._landings:
            raise TransportUnavailable(
                f"we have no {staging.name} staging slots that NIXL can write"
            )
        reason = obstacle(self._probe.hints, advert.path)
        if reason is not None:
            raise TransportUnavailable(reason)
        self._settle_overdue()
        if self._closed:
            raise TransportUnavailable("the NIXL transport is closed")
        return NixlConnection(
            self, self._peers.enter(advert, tier, deadline=deadline), tier, staging
        )

    def quarantined(self, tier: Tier) -> frozenset[int]:
        """Poll the overdue transfers and return the staging slots of those that have not ended."""
        self._settle_overdue()
        with self._lock:
            return frozenset().union(*(item.staging for item in self._overdue if item.tier is tier))

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Stop running fetches (they fail), then destroy the agent: no write comes after that.

        NIXL sets no limit to the time it takes. What is not done after ``deadline_s`` seconds goes
        on in the daemon thread "xavier-nixl-close".
        """
        with self._lock:
            self._closed = True
            if self._closing is None:
                self._closing = start_thread(self._destroy, "xavier-nixl-close")
        self._closing.join(deadline_s)
        if self._closing.is_alive():
            logger.warning("NIXL was still closing after %.1f s", deadline_s)
            return False
        return True

    def _destroy(self) -> None:
        with self._lock:
            # A fetch looks at the flag between two short sleeps, so this wait is short.
            self._lock.wait_for(lambda: self._active == 0)
            overdue, self._overdue = self._overdue, []
        self._peers.close()
        running = [item.transfer for item in overdue]
        if running:
            logger.warning("closing NIXL with %d transfers that never ended", len(running))
        try:
            self._agent.close(running)
        except NixlError as exc:
            logger.warning("closing the NIXL agent: %s", exc)
        self._views = {}

    # -- transfers

    def _begin(self, peer: Peer) -> None:
        with self._lock:
            if self._closed:
                raise TransferFailed("the NIXL transport is closed")
            if peer.broken is not None:
                raise TransferFailed(peer.broken)
            self._active += 1
            self._peers.retain(peer)

    def _end(self, peer: Peer) -> None:
        with self._lock:
            self._active -= 1
            self._peers.leave(peer)
            self._lock.notify_all()
        self._peers.tidy()

    def _fetch(
        self,
        peer: Peer,
        tier: Tier,
        into: Tier,
        slots: Sequence[int],
        staging: Sequence[int],
        deadline: float,
    ) -> torch.Tensor:
        if not len(slots):
            return torch.empty((0, 2), dtype=torch.int64)
        landing = self._landings[into]
        ours = staging_rows(slots, staging, landing.slots)
        self._begin(peer)
        try:
            prepared = peer.tiers[tier]
            theirs = peer_rows(slots, prepared.slots, tier)
            # NIXL merges descriptors that are neighbours on both sides.
            order = np.argsort(theirs, kind="stable")
            local, remote = ours[order], theirs[order]
            rows = torch.from_numpy(ours).long()
            # So that a read which brought nothing is no generation.
            landing.scratch[rows] = -1
            for pair in ((landing.data, prepared.data), (landing.meta, prepared.meta)):
                try:
                    transfer = self._agent.read(pair[0], local, pair[1], remote)
                except NixlError as exc:
                    raise TransferFailed(str(exc)) from exc
                self._run(transfer, peer, into, frozenset(staging), deadline)
            return landing.scratch[rows]
        finally:
            self._end(peer)

    def _run(
        self,
        transfer: Transfer,
        peer: Peer,
        into: Tier,
        staging: frozenset[int],
        deadline: float,
    ) -> None:
        """Post a transfer and wait for it, or leave it to the overdue list and raise."""
        if time.monotonic() >= deadline:
            transfer.release()
            raise TransferTimeout("the deadline had passed before the read was posted")
        state = transfer.post()
        sleep = _FIRST_SLEEP_S
        while state is State.RUNNING:
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                self._leave(_Overdue(transfer, peer, into, staging))
                if self._closed:
                    raise TransferFailed("the NIXL transport is closing")
                raise TransferTimeout(f"the read of {len(staging)} slots did not end in time")
            time.sleep(min(sleep, left))
            sleep = min(1.5 * sleep, _LONGEST_SLEEP_S)
            state = transfer.poll()
        if state is not State.DONE:
            peer.broken = f"NIXL read failed: {transfer.error}"
            if state is State.UNKNOWN:
                self._leave(_Overdue(transfer, peer, into, staging))
            raise TransferFailed(peer.broken)

    def _leave(self, item: _Overdue) -> None:
        with self._lock:
            self._peers.retain(item.peer)
            self._overdue.append(item)

    def _settle_overdue(self) -> None:
        # Under the lock: a transfer is polled by one thread, and close() must not run meanwhile.
        # Polling never blocks.
        with self._lock:
            if self._closed:
                return
            remaining = []
            for item in self._overdue:
                state = item.transfer.poll()
                if state in (State.RUNNING, State.UNKNOWN):
                    remaining.append(item)
                    continue
                if state is State.DISCONNECTED:
                    item.peer.broken = f"NIXL read failed: {item.transfer.error}"
                self._peers.leave(item.peer)
            self._overdue = remaining
        self._peers.tidy()


class NixlConnection(Connection):
    """The path to one tier of a peer; several connections to it share the prepared lists."""

    transport: ClassVar[str] = NixlTransport.name

    def __init__(self, owner: NixlTransport, peer: Peer, tier: Tier, staging: Tier) -> None:
        self.staging = staging
        self._owner = owner
        self._peer = peer
        self._tier = tier
        self._open = True

    def view(self) -> SlotView | None:
        return None

    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        if not self._open:
            raise TransferFailed("the connection is closed")
        return self._owner._fetch(self._peer, self._tier, self.staging, slots, staging, deadline)

    def alive(self) -> bool:
        """False once a read has met the peer's end; NIXL tells nothing without a transfer."""
        return self._open and self._peer.broken is None and not self._owner._closed

    def close(self) -> None:
        with self._owner._lock:
            if self._open:
                self._open = False
                self._owner._peers.leave(self._peer)
        self._owner._peers.tidy()
