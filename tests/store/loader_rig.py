# SPDX-License-Identifier: Apache-2.0
"""A reader with a load engine, and peers behind a transport that does what a test tells it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from kvcache import Rows, ScriptedDevice, plain_cache, table

from tests.deferring import placed
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import CopyEngine
from xinference_xavier.store.jobs import LoadJob, LoadResult, LoadSegment, StoreJob, Tier
from xinference_xavier.transport.base import (
    Connection,
    SlotView,
    Transport,
    WorkerHandle,
)
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports

D, H = int(Tier.DEVICE), int(Tier.HOST)
SLOTS = 16
STAGING = range(12, 16)
UNTOUCHED = 0x7E


class Source:
    """A peer's arenas, filled with its own random blocks: slot ``s`` has generation ``100 + s``."""

    def __init__(self, seed: int, *, verify: str = "checksum") -> None:
        self.cache = plain_cache(seed)
        self.arenas = {
            tier: Arena.create(SLOTS, self.cache.layout.slot_bytes, f"peer-{tier.name}")
            for tier in Tier
        }
        engine = CopyEngine(
            layout=self.cache.layout,
            arenas=self.arenas,
            device=self.cache.device,
            verify=verify,
        )
        blocks = range(self.cache.layout.num_blocks)
        stores = [(b, tier, b, 100 + b, -1) for tier in Tier for b in blocks]
        engine.submit(StoreJob(1, table([], 3), table(stores, 5)))
        engine.close(WAIT_S)
        (result,) = engine.poll()
        assert not result.failed_stores

    def handle(self, *, rank: int = 0) -> WorkerHandle:
        return WorkerHandle(
            rank=rank,
            host_id="host",
            layout_digest=self.cache.layout.digest(),
            arenas={tier: arena.handle() for tier, arena in self.arenas.items()},
        )

    def view(self, tier: Tier) -> SlotView:
        return SlotView(self.arenas[tier].data, self.arenas[tier].meta)

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()


class FaultyConnection(Connection):
    """Maps, or fetches into staging slots, and does what the test's script says."""

    transport: ClassVar[str] = "faulty"

    def __init__(self, owner: FaultyTransport, source: Source, tier: Tier) -> None:
        self._owner = owner
        self._source = source
        self._tier = tier
        self.closed = threading.Event()
        self.dead = False
        self._probed = False

    def view(self) -> SlotView | None:
        return self._source.view(self._tier) if self._owner.mapped else None

    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        assert not self.closed.is_set()
        view, ours = self._source.view(self._tier), self._owner.staging
        ours[list(staging)] = view.data[list(slots)]
        meta = view.meta[list(slots)]
        if not self._probed:
            self._probed = True  # the first fetch of a connection only tries it
            return self._owner.probe(list(staging), meta)
        self._owner.fetches.append((list(slots), list(staging)))
        return self._owner.fault(len(self._owner.fetches), list(staging), meta)

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


Fault = Callable[[int, list[int], torch.Tensor], torch.Tensor]


class FaultyTransport(Transport):
    """Connects handles to sources; ``fault(n, staging, meta)`` ends the n-th fetch.

    ``connections`` are those to host tiers: one per link, as most tests read no other tier.
    """

    name: ClassVar[str] = "faulty"

    def __init__(self, *, mapped: bool) -> None:
        self.mapped = mapped
        self.sources: dict[bytes, Source] = {}
        self.opened: list[FaultyConnection] = []
        self.connections: list[FaultyConnection] = []
        self.fetches: list[tuple[list[int], list[int]]] = []
        self.stuck: set[int] = set()
        self.fault: Fault = lambda _n, _staging, meta: meta
        self.probe: Callable[[list[int], torch.Tensor], torch.Tensor] = lambda _staging, meta: meta
        self.connecting: Callable[[], None] = lambda: None
        self.staging = torch.empty(0)

    def connect(
        self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf
    ) -> FaultyConnection:
        self.connecting()
        source = self.sources[peer.arenas[Tier.HOST].nonce]
        connection = FaultyConnection(self, source, tier)
        self.opened.append(connection)
        if tier is Tier.HOST:
            self.connections.append(connection)
        return connection

    def quarantined(self, tier: Tier) -> frozenset[int]:
        return frozenset(self.stuck if tier is Tier.HOST else ())

    def close(self, deadline_s: float = 0.0) -> bool:
        return True


class Rig:
    """A reader: its KV cache and arenas, two peers, and a load engine."""

    def __init__(
        self,
        *,
        kind: str,
        mapped: bool = True,
        verify: str = "off",
        threads: int = 3,
        reap_s: float = 60.0,
    ) -> None:
        self.cache = plain_cache(seed=5, num_blocks=40)
        for view in self.cache.views:
            view.fill_(UNTOUCHED)
        self.device = ScriptedDevice(self.cache)
        self.own = Source(seed=10)
        self.peers = {member: Source(seed=10 + member) for member in (1, 2)}
        self.transport = FaultyTransport(mapped=mapped)
        self.transport.sources = {
            source.arenas[Tier.HOST].handle().nonce: source for source in self.peers.values()
        }
        # Like NIXL, it writes our staging slots by itself.
        self.transport.staging = self.own.arenas[Tier.HOST].data if not mapped else torch.empty(0)
        self.handles = {member: source.handle() for member, source in self.peers.items()}
        self.transports = Transports([self.transport], layout_digest=self.cache.layout.digest())
        self.runs_on = placed(self.device, kind)
        self.engine = LoadEngine(
            layout=self.cache.layout,
            arenas=self.own.arenas,
            device=self.runs_on,
            verify=verify,
            staging={Tier.HOST: STAGING},
            transports=self.transports,
            threads=threads,
            reap_s=reap_s,
        )
        self._jobs = 0

    def submit(self, *segments: tuple[int, Rows], timeout_s: float = WAIT_S) -> int:
        self._jobs += 1
        parts = tuple(LoadSegment(member, table(rows, 4)) for member, rows in segments)
        job = LoadJob(self._jobs, f"request-{self._jobs}", parts, timeout_s)
        self.engine.submit(job, self.handles)
        return self._jobs

    def load(self, *segments: tuple[int, Rows], timeout_s: float = WAIT_S) -> LoadResult:
        self.submit(*segments, timeout_s=timeout_s)
        (result,) = drain(self.engine)
        return result

    def untouched(self, *blocks: int) -> bool:
        return all(set(self.cache.block(block)) == {UNTOUCHED} for block in blocks)

    def has(self, block: int, source: Source, slot: int) -> bool:
        return self.cache.block(block) == source.cache.block(slot)

    def close(self) -> None:
        self.engine.close(WAIT_S)
        for source in (self.own, *self.peers.values()):
            source.close()


def rows(*slots_and_blocks: tuple[int, int], tier: int = H) -> list[tuple[int, ...]]:
    """Return rows of a segment that promise what the slots of a :class:`Source` hold."""
    return [(tier, slot, 100 + slot, block) for slot, block in slots_and_blocks]
