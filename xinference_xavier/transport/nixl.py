# SPDX-License-Identifier: Apache-2.0
"""One-sided NIXL READs from a peer's registered arenas into our staging slots.

Everything is prepared once: our arenas are registered when the worker starts, and a peer's slots
become one descriptor list per tier with the first load that needs them. A fetch is then two
READs: the payload, and, when that is complete, the 16-byte meta rows of the same slots.

A transfer cannot be cancelled (see ``nixl_agent``). One that is still running at its deadline goes
to a list of overdue transfers together with its staging slots; ``quarantined()`` polls the list.
The resources of a peer stay until its last connection, running fetch and overdue transfer are gone.

Threads: any thread; several fetches run at the same time on the one agent, and none of them holds
a lock while it waits. Loading and forgetting peers, in which NIXL may talk, is serialised by a lock
of its own (``_wiring``), so that fetches and ``quarantined()`` never wait for it.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
from xinference_xavier.transport.nixl_agent import Agent, NixlError, Region, State, Transfer
from xinference_xavier.transport.nixl_path import PathHints, PathProbe, obstacle
from xinference_xavier.transport.staging import peer_rows, require_staging, staging_rows

logger = logging.getLogger(__name__)

META_BYTES = 16
FORMAT = 1
"""Version of the document that :meth:`NixlTransport.metadata` makes."""

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


@dataclass(frozen=True, slots=True)
class _TierRegions:
    """A tier in registered memory: where its slots and its meta rows are."""

    data: Region
    meta: Region


@dataclass(frozen=True, slots=True)
class _Advert:
    """What a worker tells about itself, parsed."""

    agent: bytes
    slot_bytes: int
    tiers: dict[Tier, _TierRegions]
    path: PathHints


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A peer's tier as descriptor lists of the agent, and how many slots it has."""

    data: int
    meta: int
    slots: int


@dataclass(slots=True)
class _Peer:
    """One remote agent. ``users``: open connections, running fetches and overdue transfers."""

    key: bytes
    name: str
    tiers: dict[Tier, _Prepared] = field(default_factory=dict)
    lists: list[int] = field(default_factory=list)
    users: int = 0
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class _Overdue:
    """A transfer which outlived its deadline or whose end is unknown, and what it may write."""

    transfer: Transfer
    peer: _Peer
    staging: frozenset[int]


class NixlTransport(Transport):
    """Owns the NIXL agent of this worker.

    ``views`` are our own arenas, registered whole; ``staging`` is a range of slots of the host
    tier, the only memory that is ever written. ``agent_name`` is for logs: a random suffix makes
    it unique. Raises :class:`TransportUnavailable` when NIXL or UCX is missing or refuses the
    memory, ValueError for views that do not fit each other.

    Make it on the worker's main thread (late plug-in loading, see ``nixl_agent``).
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        views: Mapping[Tier, SlotView],
        slot_bytes: int,
        staging: range,
        agent_name: str,
    ) -> None:
        self._views = {tier: view for tier, view in views.items() if len(view.data)}
        require_staging(self._views, staging, slot_bytes)
        self._slot_bytes = slot_bytes
        self._staging = staging
        # Meta rows of a fetch land in the row of their staging slot, so whoever owns the slot owns
        # the row, also while an overdue transfer may still write it.
        self._meta_scratch = torch.zeros((len(staging), 2), dtype=torch.int64)
        self._lock = threading.Condition()
        # Taken before `_lock` where both are.
        self._wiring = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        self._overdue: list[_Overdue] = []
        self._active = 0
        self._closed = False
        self._probe = PathProbe()
        self._agent = Agent(f"{agent_name}-{uuid.uuid4().hex[:8]}")
        try:
            self._register(slot_bytes)
        except NixlError as exc:
            self._agent.close()
            raise TransportUnavailable(str(exc)) from exc

    def _register(self, slot_bytes: int) -> None:
        agent = self._agent
        tiers = {
            tier: _TierRegions(Region.of(view.data), Region.of(view.meta))
            for tier, view in self._views.items()
        }
        scratch = Region.of(self._meta_scratch)
        for regions in tiers.values():
            agent.register(regions.data)
            agent.register(regions.meta)
        agent.register(scratch)
        host = tiers[Tier.HOST].data
        area = Region(
            host.kind,
            host.device,
            host.address + self._staging.start * slot_bytes,
            len(self._staging) * slot_bytes,
        )
        self._local_data = agent.prepare(None, area, slot_bytes)
        self._local_meta = agent.prepare(None, scratch, META_BYTES)
        self._metadata = _encode(_Advert(agent.metadata(), slot_bytes, tiers, self._probe.hints))

    def metadata(self) -> bytes:
        """What goes into ``WorkerHandle.nixl``: JSON of a few KiB, constant for our lifetime."""
        return self._metadata

    def connect(self, peer: WorkerHandle, *, deadline: float = math.inf) -> NixlConnection:
        """Load the peer's metadata and prepare its slots. Local work only: nothing is sent yet."""
        if peer.nixl is None:
            raise TransportUnavailable("the peer has no NIXL")
        if peer.nixl == self._metadata:
            raise TransportUnavailable("the peer is this worker itself")
        advert = _decode(peer.nixl)
        if advert.slot_bytes != self._slot_bytes:
            raise TransportUnavailable(
                f"the peer's slots have {advert.slot_bytes} bytes, ours {self._slot_bytes}"
            )
        reason = obstacle(self._probe.hints, advert.path)
        if reason is not None:
            raise TransportUnavailable(reason)
        self._settle_overdue()
        if self._closed:  # the lock below may be held until the agent is gone
            raise TransportUnavailable("the NIXL transport is closed")
        left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._wiring.acquire(timeout=left):
            raise TransportUnavailable("NIXL was still busy with another peer")
        try:
            return NixlConnection(self, self._wire(advert))
        finally:
            self._wiring.release()

    def quarantined(self) -> frozenset[int]:
        """Poll the overdue transfers and return the staging slots of those that have not ended."""
        self._settle_overdue()
        with self._lock:
            return frozenset().union(*(item.staging for item in self._overdue))

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Stop running fetches (they fail), then destroy the agent: no write comes after that.

        NIXL sets no limit to the time it takes. What is not done after ``deadline_s`` seconds goes
        on in the daemon thread "xavier-nixl-close", which holds the memory until then.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        closing = start_thread(self._destroy, "xavier-nixl-close")
        closing.join(deadline_s)
        if closing.is_alive():
            logger.warning("NIXL was still closing after %.1f s", deadline_s)

    def _destroy(self) -> None:
        with self._lock:
            # A fetch looks at the flag between two short sleeps, so this wait is short.
            self._lock.wait_for(lambda: self._active == 0)
        # A connect that had begun ends first; none comes after it.
        with self._wiring:
            with self._lock:
                overdue, self._overdue = self._overdue, []
                peers, self._peers = list(self._peers.values()), {}
            running = [item.transfer for item in overdue]
            if running:
                logger.warning("closing NIXL with %d transfers that never ended", len(running))
            for known in peers:
                self._forget(known)
            try:
                self._agent.close(running)
            except NixlError as exc:
                logger.warning("closing the NIXL agent: %s", exc)
        self._views = {}

    # -- peers

    def _wire(self, advert: _Advert) -> _Peer:
        """Return the peer with one user more, prepared; ``_wiring`` is held."""
        self._forget_unused()
        with self._lock:
            if self._closed:
                raise TransportUnavailable("the NIXL transport is closed")
            known = self._peers.get(advert.agent)
            if known is not None:
                if known.broken is not None:
                    raise TransportUnavailable(f"the peer's agent failed: {known.broken}")
                known.users += 1
                return known
        known = self._prepare(advert)
        with self._lock:
            # Also after a close that came meanwhile: it forgets what it finds here.
            self._peers[advert.agent] = known
        return known

    def _forget_unused(self) -> None:
        """Let NIXL forget peers without users; ``_wiring`` is held."""
        with self._lock:
            unused = [known for known in self._peers.values() if known.users == 0]
            for known in unused:
                del self._peers[known.key]
        for known in unused:
            self._forget(known)

    def _tidy_peers(self) -> None:
        """Forget peers without users now, or leave it to whoever is wiring or comes next."""
        with self._lock:
            unused = any(known.users == 0 for known in self._peers.values())
        if unused and self._wiring.acquire(blocking=False):
            try:
                self._forget_unused()
            finally:
                self._wiring.release()

    def _prepare(self, advert: _Advert) -> _Peer:
        agent = self._agent
        try:
            known = _Peer(advert.agent, agent.add_peer(advert.agent), users=1)
            try:
                for tier, regions in advert.tiers.items():
                    for region, unit in (
                        (regions.data, self._slot_bytes),
                        (regions.meta, META_BYTES),
                    ):
                        known.lists.append(agent.prepare(known.name, region, unit))
                    slots = regions.data.nbytes // self._slot_bytes
                    known.tiers[tier] = _Prepared(known.lists[-2], known.lists[-1], slots)
            except NixlError:
                self._forget(known)
                raise
        except NixlError as exc:
            raise TransportUnavailable(str(exc)) from exc
        return known

    def _forget(self, known: _Peer) -> None:
        """Release what NIXL holds of a peer none of whose transfers is running."""
        steps = [partial(self._agent.release_prepared, prepared) for prepared in known.lists]
        steps.append(partial(self._agent.remove_peer, known.name))
        known.lists.clear()
        known.tiers.clear()
        for step in steps:
            try:
                step()
            except NixlError as exc:
                logger.warning("forgetting NIXL peer %s: %s", known.name, exc)

    # -- transfers

    def _begin(self, known: _Peer) -> None:
        with self._lock:
            if self._closed:
                raise TransferFailed("the NIXL transport is closed")
            if known.broken is not None:
                raise TransferFailed(known.broken)
            self._active += 1
            known.users += 1

    def _end(self, known: _Peer) -> None:
        with self._lock:
            self._active -= 1
            known.users -= 1
            self._lock.notify_all()
        self._tidy_peers()

    def _fetch(
        self,
        known: _Peer,
        tier: Tier,
        slots: Sequence[int],
        staging: Sequence[int],
        deadline: float,
    ) -> torch.Tensor:
        if not len(slots):
            return torch.empty((0, 2), dtype=torch.int64)
        ours = staging_rows(slots, staging, self._staging)
        self._begin(known)
        try:
            prepared = known.tiers.get(tier)
            if prepared is None:
                raise TransferFailed(f"the peer has no {tier.name} tier")
            theirs = peer_rows(slots, prepared.slots, tier)
            # NIXL merges descriptors that are neighbours on both sides.
            order = np.argsort(theirs, kind="stable")
            local, remote = ours[order], theirs[order]
            owned = frozenset(staging)
            # So that a read which brought nothing is no generation.
            self._meta_scratch[torch.from_numpy(ours).long()] = -1
            for pair in ((self._local_data, prepared.data), (self._local_meta, prepared.meta)):
                try:
                    transfer = self._agent.read(pair[0], local, pair[1], remote)
                except NixlError as exc:
                    raise TransferFailed(str(exc)) from exc
                self._run(transfer, known, owned, deadline)
            return self._meta_scratch[torch.from_numpy(ours).long()]
        finally:
            self._end(known)

    def _run(
        self, transfer: Transfer, known: _Peer, staging: frozenset[int], deadline: float
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
                self._leave(transfer, known, staging)
                if self._closed:
                    raise TransferFailed("the NIXL transport is closing")
                raise TransferTimeout(f"the read of {len(staging)} slots did not end in time")
            time.sleep(min(sleep, left))
            sleep = min(1.5 * sleep, _LONGEST_SLEEP_S)
            state = transfer.poll()
        if state is not State.DONE:
            with self._lock:
                known.broken = f"NIXL read failed: {transfer.error}"
            if state is State.UNKNOWN:
                self._leave(transfer, known, staging)
            raise TransferFailed(known.broken)

    def _leave(self, transfer: Transfer, known: _Peer, staging: frozenset[int]) -> None:
        with self._lock:
            known.users += 1
            self._overdue.append(_Overdue(transfer, known, staging))

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
                item.peer.users -= 1
            self._overdue = remaining
        self._tidy_peers()


class NixlConnection(Connection):
    """The path to one peer's agent; several connections to it share the prepared lists."""

    transport: ClassVar[str] = NixlTransport.name

    def __init__(self, owner: NixlTransport, peer: _Peer) -> None:
        self._owner = owner
        self._peer = peer
        self._open = True

    def view(self, tier: Tier) -> SlotView | None:
        return None

    def fetch(
        self, tier: Tier, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        if not self._open:
            raise TransferFailed("the connection is closed")
        return self._owner._fetch(self._peer, tier, slots, staging, deadline)

    def alive(self) -> bool:
        """False once a read has met the peer's end; NIXL tells nothing without a transfer."""
        return self._open and self._peer.broken is None and not self._owner._closed

    def close(self) -> None:
        with self._owner._lock:
            if self._open:
                self._open = False
                self._peer.users -= 1
        self._owner._tidy_peers()


# -- the document that peers exchange


def _encode(advert: _Advert) -> bytes:
    def region(item: Region) -> list[object]:
        return [item.kind, item.device, item.address, item.nbytes]

    document = {
        "format": FORMAT,
        "agent": base64.b64encode(advert.agent).decode(),
        "slot_bytes": advert.slot_bytes,
        "tiers": {
            str(int(tier)): [region(regions.data), region(regions.meta)]
            for tier, regions in advert.tiers.items()
        },
        "path": asdict(advert.path),
    }
    return json.dumps(document).encode()


def _decode(blob: bytes) -> _Advert:
    """Parse a peer's document. Raises :class:`TransportUnavailable` for anything unexpected."""
    try:
        document = json.loads(blob)
        if document["format"] != FORMAT:
            raise TransportUnavailable(
                f"the peer's NIXL metadata has format {document['format']}, ours {FORMAT}"
            )
        tiers = {
            Tier(int(key)): _TierRegions(_region(data), _region(meta))
            for key, (data, meta) in document["tiers"].items()
        }
        slot_bytes = int(document["slot_bytes"])
        agent = base64.b64decode(document["agent"], validate=True)
        advert = _Advert(agent, slot_bytes, tiers, _path(document["path"]))
        for tier, regions in tiers.items():
            if regions.meta.nbytes * slot_bytes != regions.data.nbytes * META_BYTES:
                raise ValueError(f"{tier.name} data and meta differ in their number of slots")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise TransportUnavailable(f"the peer's NIXL metadata is malformed: {exc!r}") from exc
    return advert


def _path(item: Mapping[str, object]) -> PathHints:
    token = str(item["token"])
    bytes.fromhex(token)
    return PathHints(_whole(item["pid"], 31), _whole(item["address"]), token, bool(item["rdma"]))


def _region(item: Sequence[object]) -> Region:
    kind, device, address, nbytes = item
    return Region(str(kind), _whole(device, 31), _whole(address), _whole(nbytes))


def _whole(value: object, bits: int = 63) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ValueError(f"{value!r} is not a number of {bits} bits")
    return value
