# SPDX-License-Identifier: Apache-2.0
"""NIXL between GPUs: what is registered, and where what lands, with an agent that copies memory."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fetch_peer import TCP_ONLY, Reader, Source, Spec, soon
from store_peer import content, make_cache

from tests.store.fake_cuda import FakeCuda, host
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena, SlotMemory
from xinference_xavier.store.copier import publish
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import LoadJob, LoadSegment, Tier
from xinference_xavier.transport import nixl, nixl_agent
from xinference_xavier.transport.base import (
    Gpu,
    SlotView,
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.nixl_agent import DRAM, VRAM, NixlError, Region, State, Transfer
from xinference_xavier.transport.select import Transports

D, H = Tier.DEVICE, Tier.HOST
SLOTS, STAGING = 10, range(8, 10)


class MemoryAgent:
    """Registers, prepares and reads as NIXL does, but only in this process, and by memcpy."""

    def __init__(self, name: str) -> None:
        self.registered: list[Region] = []
        self.prepared: dict[int, tuple[str | None, Region, int]] = {}
        self.reads: list[tuple[Region, Region, int]] = []
        self.refuses: Callable[[str, Region], bool] = lambda _call, _region: False
        self.ends = State.DONE
        self.held: Counter[str] = Counter()

    def _check(self, call: str, region: Region) -> None:
        if self.refuses(call, region):
            raise NixlError(f"{call} of {region.kind} is refused")

    def register(self, region: Region) -> None:
        self._check("register", region)
        self.registered.append(region)

    def metadata(self) -> bytes:
        return b"agent of this process"

    def add_peer(self, metadata: bytes) -> str:
        self.held["peer"] += 1
        return "peer"

    def remove_peer(self, name: str) -> None:
        self.held["peer"] -= 1

    def prepare(self, peer: str | None, region: Region, unit: int) -> int:
        self._check("prepare" if peer is None else "prepare remote", region)
        self.prepared[len(self.prepared) + 1] = (peer, region, unit)
        self.held["list"] += peer is not None
        return len(self.prepared)

    def release_prepared(self, prepared: int) -> None:
        self.held["list"] -= 1

    def read(self, local: int, ours: Any, remote: int, theirs: Any) -> Transfer:
        (_, target, unit), (_, source, same) = self.prepared[local], self.prepared[remote]
        assert unit == same
        self.reads.append((target, source, len(ours)))
        for mine, other in zip(ours.tolist(), theirs.tolist(), strict=True):
            ctypes.memmove(target.address + mine * unit, source.address + other * unit, unit)
        return Transfer(self, 1)  # type: ignore[arg-type]

    def post(self, handle: int) -> tuple[State, str]:
        return self.ends, "as told"

    status = post

    def release(self, handle: int) -> None:
        pass

    def close(self, running: Any = ()) -> None:
        self.registered.clear()


class Worker:
    """A KV cache on a fake GPU, slots in both tiers, and a NIXL transport over them."""

    def __init__(self, *, tiers: tuple[Tier, ...] = (D, H)) -> None:
        self.tensor, self.layout, views = make_cache()
        self.cuda = FakeCuda()
        self.device = CudaDevice(self.layout, views, self.cuda)
        width = self.layout.slot_bytes
        self.arenas: dict[Tier, SlotMemory] = {}
        if D in tiers:
            self.arenas[D] = DeviceArena.create(SLOTS, width, "gpu", self.cuda)
        if H in tiers:
            self.arenas[H] = Arena.create(SLOTS, width, "host")
        self.staging = dict.fromkeys(self.arenas, STAGING)

    def start(self, choice: str = "nixl") -> Transports:
        return Transports.start(
            choice=choice,
            arenas=self.arenas,
            staging=self.staging,
            host=None,
            layout_digest=self.layout.digest(),
            gpu=Gpu(self.cuda, self.device),
        )

    def transport(self) -> nixl.NixlTransport:
        return nixl.NixlTransport(
            views={tier: SlotView(arena.data, arena.meta) for tier, arena in self.arenas.items()},
            slot_bytes=self.layout.slot_bytes,
            staging=self.staging,
            agent_name="test",
        )

    def handle(self, metadata: bytes | None) -> WorkerHandle:
        return WorkerHandle(
            rank=0,
            host_id="elsewhere",
            layout_digest=self.layout.digest(),
            arenas={tier: arena.handle() for tier, arena in self.arenas.items()},
            nixl=metadata,
        )

    def fill(self) -> None:
        """Give slot ``s`` of each tier the generation ``s + 1``, and the host's ``s + 101``."""
        for tier, arena in self.arenas.items():
            generations = np.arange(SLOTS) + (1 if tier is D else 101)
            for slot, generation in enumerate(generations.tolist()):
                host(arena.data).numpy()[slot] = content(generation, self.layout)
            publish(arena.meta, np.arange(SLOTS), generations, np.zeros(SLOTS, dtype=np.int64))

    def close(self) -> None:
        self.device.close()
        for arena in self.arenas.values():
            arena.close()  # type: ignore[attr-defined]
        self.cuda.check_balanced()


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[MemoryAgent]:
    made: list[MemoryAgent] = []

    def make(name: str) -> MemoryAgent:
        made.append(MemoryAgent(name))
        return made[-1]

    monkeypatch.setattr(nixl, "Agent", make)
    monkeypatch.setenv("UCX_TLS", "all")
    return made


@pytest.fixture
def worker(agents: list[MemoryAgent]) -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def source(agents: list[MemoryAgent]) -> Iterator[Worker]:
    made = Worker()
    made.fill()
    yield made
    made.close()


def no_cuda(call: str, region: Region) -> bool:
    return region.kind == VRAM


def test_each_arena_is_registered_once_and_whole(worker: Worker, agents: list[MemoryAgent]) -> None:
    worker.transport()
    data = [Region.of(worker.arenas[tier].data) for tier in (D, H)]
    assert (data[0].kind, data[0].device, data[1].kind) == (VRAM, 0, DRAM)
    assert data[0].nbytes == SLOTS * worker.layout.slot_bytes
    meta = [Region.of(worker.arenas[tier].meta) for tier in (D, H)]
    registered = agents[0].registered
    assert [registered.count(region) for region in data + meta] == [1, 1, 1, 1]
    assert [region.kind for region in registered].count(VRAM) == 1
    assert len(registered) == 6  # with the rooms for meta rows of the two tiers' staging slots


def test_only_staging_slots_are_prepared_to_be_written(
    worker: Worker, agents: list[MemoryAgent]
) -> None:
    worker.transport()
    width = worker.layout.slot_bytes
    slots = {
        (region.kind, region.address, region.nbytes)
        for _, region, unit in agents[0].prepared.values()
        if unit == width
    }
    assert slots == {
        (kind, worker.arenas[tier].data.data_ptr() + STAGING.start * width, len(STAGING) * width)
        for tier, kind in ((D, VRAM), (H, DRAM))
    }


@pytest.mark.parametrize(("tier", "kind", "first"), [(D, VRAM, 1), (H, DRAM, 101)])
def test_each_tier_lands_in_its_own_kind_of_memory_and_meta_rows_in_the_hosts(
    worker: Worker,
    source: Worker,
    agents: list[MemoryAgent],
    tier: Tier,
    kind: str,
    first: int,
) -> None:
    transport = worker.transport()
    connection = transport.connect(source.handle(source.transport().metadata()), tier)
    assert connection.staging is tier
    rows = connection.fetch([6, 2], [9, 8], deadline=soon())
    assert rows[:, 0].tolist() == [first + 6, first + 2]
    ours = host(worker.arenas[tier].data).numpy()
    assert np.array_equal(ours[9], content(first + 6, worker.layout))
    assert np.array_equal(ours[8], content(first + 2, worker.layout))
    kinds = [(target.kind, origin.kind) for target, origin, _ in agents[0].reads]
    assert kinds == [(kind, kind), (DRAM, DRAM)]
    connection.close()
    transport.close()


def test_staging_is_quarantined_in_the_tier_that_may_be_written(
    worker: Worker, source: Worker, agents: list[MemoryAgent]
) -> None:
    transport = worker.transport()
    connection = transport.connect(source.handle(source.transport().metadata()), D)
    agents[0].ends = State.RUNNING
    with pytest.raises(TransferTimeout):
        connection.fetch([1], [8], deadline=soon(0.5))
    assert transport.quarantined(D) == {8}
    assert transport.quarantined(H) == frozenset()
    agents[0].ends = State.DONE
    assert transport.quarantined(D) == frozenset()
    transport.close()


class TestWithoutCudaInUcx:
    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch, agents: list[MemoryAgent]) -> None:
        def make(name: str) -> MemoryAgent:
            agents.append(MemoryAgent(name))
            agents[-1].refuses = no_cuda
            return agents[-1]

        monkeypatch.setattr(nixl, "Agent", make)

    def test_the_device_tier_is_not_offered_and_the_reason_counted(self, worker: Worker) -> None:
        transports = worker.start("auto")
        offered = transports.published()["nixl"]
        assert offered is not None
        assert set(nixl.decode(offered).tiers) == {H}
        (line,) = (line for line in transports.take_refusals() if line.startswith("nixl"))
        assert line == (
            "nixl: the DEVICE tier is left out, UCX cannot reach it: register of VRAM is refused"
        )
        transports.close()

    def test_a_forced_nixl_fails_the_launch(self, worker: Worker) -> None:
        with pytest.raises(TransportUnavailable, match="the DEVICE tier is left out"):
            worker.start("nixl")

    def test_with_a_device_tier_alone_there_is_nothing_to_offer(
        self, agents: list[MemoryAgent]
    ) -> None:
        worker = Worker(tiers=(D,))
        with pytest.raises(TransportUnavailable, match="register of VRAM is refused"):
            worker.transport()
        worker.close()

    def test_a_peers_device_tier_is_refused_and_its_host_tier_read(
        self, worker: Worker, source: Worker, agents: list[MemoryAgent]
    ) -> None:
        transport = worker.transport()
        agents[0].refuses = no_cuda
        theirs = nixl.decode(transport.metadata())
        gpu = Region(VRAM, 0, 1 << 40, SLOTS * worker.layout.slot_bytes)
        both = {**theirs.tiers, D: replace(theirs.tiers[H], data=gpu)}
        peer = source.handle(replace(theirs, agent=b"other", tiers=both).encode())
        with pytest.raises(TransportUnavailable, match="no DEVICE staging slots"):
            transport.connect(peer, D)
        transport.connect(peer, H).close()
        assert +agents[0].held == Counter()
        transport.close()


def test_a_gpu_tier_that_cannot_be_prepared_leaves_the_host_tier_usable(
    worker: Worker, source: Worker, agents: list[MemoryAgent]
) -> None:
    transport = worker.transport()
    agents[0].refuses = lambda call, region: call == "prepare remote" and region.kind == VRAM
    peer = source.handle(source.transport().metadata())
    with pytest.raises(TransportUnavailable, match="prepare remote of VRAM is refused"):
        transport.connect(peer, D)
    assert +agents[0].held == Counter()
    held = transport.connect(peer, H)
    with pytest.raises(TransportUnavailable, match="prepare remote of VRAM is refused"):
        transport.connect(peer, D)
    held.fetch([1], [8], deadline=soon())
    held.close()
    assert +agents[0].held == Counter()
    transport.close()


def test_a_device_tier_in_host_memory_lands_in_host_staging(worker: Worker, source: Worker) -> None:
    """As a peer without a GPU has it."""
    transport = worker.transport()
    advert = nixl.decode(source.transport().metadata())
    advert = replace(advert, tiers={D: advert.tiers[H]})
    connection = transport.connect(source.handle(advert.encode()), D)
    assert connection.staging is H
    connection.close()
    transport.close()


def test_a_load_from_both_tiers_over_nixl_fills_its_blocks(worker: Worker, source: Worker) -> None:
    transports, offered = worker.start(), source.start()
    engine = LoadEngine(
        layout=worker.layout,
        arenas=worker.arenas,
        device=worker.device,
        verify="off",
        staging=worker.staging,
        transports=transports,
    )
    peers = {1: source.handle(offered.published()["nixl"])}
    generations = [4, 104, 1, 102, 8]
    rows = [(H, g - 101, g, i) if g > 100 else (D, g - 1, g, i) for i, g in enumerate(generations)]
    table = np.array(rows, dtype=np.int64)
    engine.submit(LoadJob(1, "r", (LoadSegment(1, table),), WAIT_S), peers)
    (result,) = drain(engine)
    engine.close(WAIT_S)
    transports.close()
    offered.close()
    (segment,) = result.segments
    assert (segment.failed_rows, segment.transport) == (set(), "nixl")
    for block, generation in enumerate(generations):
        expected = content(generation, worker.layout).tobytes()
        assert worker.tensor[block].numpy().tobytes() == expected


class TestRealNixl:
    """The real agent, as far as it goes without a GPU."""

    @pytest.fixture(autouse=True)
    def _needs_nixl(self) -> None:
        pytest.importorskip("nixl")

    def test_gpu_memory_that_ucx_does_not_know_is_left_out(self) -> None:
        worker = Worker()
        transport = worker.transport()
        assert transport.omitted is not None
        assert "UCX cannot reach it" in transport.omitted
        assert set(nixl.decode(transport.metadata()).tiers) == {H}
        transport.close()
        worker.close()

    def test_a_read_for_which_ucx_has_only_sockets_is_refused_by_ucx_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key, value in TCP_ONLY.items():
            monkeypatch.setenv(key, value)
        # As if nobody had chosen: so UCX is on sockets, and must not emulate.
        monkeypatch.setattr(nixl_agent, "operator_chose", lambda: False)
        source, reader = Source(Spec("nixl", env=TCP_ONLY)), Reader("nixl")
        try:
            connection = reader.transport.connect(source.handle, H)
            with pytest.raises(TransferFailed) as failure:
                connection.fetch([1], [reader.staging.start], deadline=soon())
            assert not isinstance(failure.value, TransferTimeout)
            assert reader.transport.quarantined(H) == frozenset()
            assert reader.changed() == set()
            assert source.process.is_alive()
        finally:
            reader.close()
            source.stop()


def test_a_worker_whose_tiers_have_no_staging_slots_reads_nothing(
    worker: Worker, agents: list[MemoryAgent]
) -> None:
    worker.staging = {}
    with pytest.raises(TransportUnavailable, match="no staging slots"):
        worker.start("nixl")
    assert agents == []


def test_torch_tells_what_is_device_memory() -> None:
    cuda = FakeCuda()
    memory = cuda.allocate(64)
    assert Region.of(memory).kind == VRAM
    assert Region.of(torch.zeros(64, dtype=torch.uint8)).kind == DRAM
    cuda.free(memory)
