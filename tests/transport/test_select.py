# SPDX-License-Identifier: Apache-2.0
"""The choice of a transport: the fastest that connects, and every refusal counted."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.store.fake_cuda import FakeCuda
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport import select
from xinference_xavier.transport.base import (
    Connection,
    Gpu,
    TransferFailed,
    TransferTimeout,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.faults import FAIR_S
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.select import PREFERENCE, PROBE_S, Transports

D, H = Tier.DEVICE, Tier.HOST
ARENA = SimpleNamespace(slots=8, device=None)
PEER = WorkerHandle(rank=0, host_id="host", layout_digest="same", arenas={D: ARENA, H: ARENA})


class Mapped(Connection):
    """Shows some memory."""

    def __init__(self, name: str) -> None:
        self.transport = name  # type: ignore[misc]  # one class stands for several transports

    def view(self):
        return "memory"

    def fetch(self, slots, staging, *, deadline):
        raise AssertionError

    def alive(self):
        return True

    def close(self):
        pass


class Named(Transport):
    """Connects to mapped memory, or refuses."""

    def __init__(self, name: str, refusal: str | None = None, stuck: tuple[int, ...] = ()) -> None:
        self.name = name  # type: ignore[misc]  # one class stands for several transports
        self.refusal = refusal
        self.stuck = frozenset(stuck)
        self.closes: list[float] = []
        self.ends = True

    def connect(self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf) -> Connection:
        if self.refusal is not None:
            raise TransportUnavailable(self.refusal)
        return Mapped(self.name)

    def quarantined(self, tier: Tier) -> frozenset[int]:
        return self.stuck if tier is H else frozenset()

    def close(self, deadline_s: float = 1.0) -> bool:
        self.closes.append(deadline_s)
        return self.ends


def pools_of(transports: Transports) -> dict[Tier, StagingPool]:
    return {H: StagingPool(range(4), partial(transports.quarantined, H))}


def connect(
    transports: Transports,
    tier: Tier = H,
    *,
    member: int = 1,
    pools: dict[Tier, StagingPool] | None = None,
    given_s: float = 60.0,
) -> Connection:
    pools = pools or pools_of(transports)
    deadline = time.monotonic() + given_s
    return transports.connect(member, PEER, tier, pools=pools, deadline=deadline)


def test_the_first_that_connects_is_taken() -> None:
    transports = Transports([Named("a"), Named("b")], layout_digest="same")
    assert connect(transports).transport == "a"
    assert transports.take_refusals() == {}


def test_a_refusal_falls_back_and_is_counted_under_its_reason() -> None:
    transports = Transports([Named("a", "no way"), Named("b")], layout_digest="same")
    assert connect(transports).transport == "b"
    assert connect(transports).transport == "b"
    assert transports.take_refusals() == {"a: no way": 2}
    assert transports.take_refusals() == {}
    connect(transports)
    assert transports.take_refusals() == {"a: no way": 1}


def test_reasons_without_end_are_told_apart_up_to_a_limit() -> None:
    part = Named("a")
    transports = Transports([part], layout_digest="same")
    for number in range(100):
        part.refusal = f"no answer from {number}"
        with pytest.raises(TransportUnavailable):
            connect(transports)
    counts = transports.take_refusals()
    assert len(counts) == 33
    assert counts["a: other reasons"] == 68


def test_when_none_connects_every_reason_is_told() -> None:
    transports = Transports([Named("a", "no way"), Named("b", "no road")], layout_digest="same")
    with pytest.raises(TransportUnavailable, match=r"HOST tier cannot .*: a: no way; b: no road"):
        connect(transports)


def test_without_transports_no_peer_is_reached() -> None:
    with pytest.raises(TransportUnavailable, match="no transport"):
        connect(Transports([], layout_digest="same"))


def test_a_peer_with_another_layout_is_never_connected() -> None:
    transports = Transports([Named("a")], layout_digest="other")
    with pytest.raises(TransportUnavailable, match="same is not ours other"):
        connect(transports)
    assert sum(transports.take_refusals().values()) == 1


class Fetching(Connection):
    """Delivers a meta row, or fails as told."""

    def __init__(self, owner: Faulty) -> None:
        self.transport = owner.name
        self.owner = owner
        self.closes = 0

    def view(self):
        return None

    def fetch(self, slots, staging, *, deadline):
        self.owner.fetches.append((slots, staging, deadline - time.monotonic()))
        if isinstance(self.owner.outcome, Exception):
            if isinstance(self.owner.outcome, TransferTimeout):
                self.owner.stuck |= set(staging)
            raise self.owner.outcome
        return torch.tensor(self.owner.outcome)

    def alive(self):
        return True

    def close(self):
        self.closes += 1


class Faulty(Named):
    """Connects, and then delivers or not."""

    def __init__(self, name: str, outcome: object) -> None:
        super().__init__(name)
        self.outcome = outcome
        self.fetches: list[tuple[object, ...]] = []
        self.opened: list[Fetching] = []

    def connect(self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf) -> Connection:
        self.opened.append(Fetching(self))
        return self.opened[-1]


FREE_SLOT = [[0, 0]]


def test_a_fetching_path_is_accepted_once_a_slot_has_arrived() -> None:
    part = Faulty("a", FREE_SLOT)
    assert connect(Transports([part], layout_digest="same")) is part.opened[0]
    ((slots, staging, given),) = part.fetches
    assert (slots, staging) == ([0], [0])
    assert given <= PROBE_S
    assert part.opened[0].closes == 0


def test_the_probe_never_outlasts_the_load() -> None:
    part = Faulty("a", FREE_SLOT)
    connect(Transports([part], layout_digest="same"), given_s=0.3)
    assert part.fetches[0][2] <= 0.3


@pytest.mark.parametrize(
    "outcome",
    [
        TransferFailed("no"),
        TransferTimeout("late"),
        [[-1, -1]],
        [[1]],
        [[1, 1], [2, 2]],
    ],
)
def test_a_path_over_which_no_slot_arrives_is_refused_and_the_next_taken(outcome: object) -> None:
    part, other = Faulty("a", outcome), Faulty("b", FREE_SLOT)
    transports = Transports([part, other], layout_digest="same")
    assert connect(transports) is other.opened[0]
    assert part.opened[0].closes == 1
    ((line, count),) = transports.take_refusals().items()
    assert line.startswith("a: the first slot did not arrive")
    assert count == 1


def test_the_staging_slot_of_a_probe_that_timed_out_is_quarantined() -> None:
    part, other = Faulty("a", TransferTimeout("late")), Faulty("b", FREE_SLOT)
    transports = Transports([part, other], layout_digest="same")
    pools = pools_of(transports)
    connect(transports, pools=pools)
    assert part.fetches[0][1] == [0]
    assert other.fetches[0][1] == [1]
    with pools[H].lend(4, deadline=time.monotonic()) as slots:
        assert slots == [1, 2, 3]


def test_after_a_timeout_the_next_transport_is_taken_for_that_tier_of_that_peer_only() -> None:
    part, other = Faulty("a", FREE_SLOT), Faulty("b", FREE_SLOT)
    transports = Transports([part, other], layout_digest="same")
    assert connect(transports).transport == "a"
    transports.failed(1, H, "a", TransferTimeout("late"))
    assert connect(transports).transport == "b"
    assert connect(transports, D).transport == "a"
    counts = transports.take_refusals()
    assert len(counts) == 2
    assert all(line.startswith("a: demoted") for line in counts)
    assert connect(transports, member=2).transport == "a"
    transports.worked(1, H, "a")
    assert connect(transports).transport == "a"


def test_a_peer_whose_probe_timed_out_is_not_probed_that_way_again() -> None:
    part, other = Faulty("a", TransferTimeout("late")), Faulty("b", FREE_SLOT)
    transports = Transports([part, other], layout_digest="same")
    connect(transports)
    connect(transports)
    assert len(part.fetches) == 1


def test_a_probe_that_had_no_time_demotes_nothing() -> None:
    part = Faulty("a", TransferTimeout("late"))
    transports = Transports([part, Named("b", "no way")], layout_digest="same")
    for _ in range(2):
        with pytest.raises(TransportUnavailable):
            connect(transports, given_s=FAIR_S / 2)
    assert len(part.fetches) == 2


def test_a_forced_transport_is_tried_again_whatever_it_did() -> None:
    part = Faulty("a", FREE_SLOT)
    transports = Transports([part], layout_digest="same")
    transports.failed(1, H, "a", TransferTimeout("late"))
    assert connect(transports) is part.opened[0]


def test_a_demoted_transport_is_tried_when_nothing_else_reaches_the_peer() -> None:
    part = Faulty("a", FREE_SLOT)
    transports = Transports([part, Named("b", "no way")], layout_digest="same")
    transports.failed(1, H, "a", TransferTimeout("late"))
    assert connect(transports) is part.opened[0]


def test_nothing_is_tried_when_the_time_of_the_load_is_over() -> None:
    part = Faulty("a", FREE_SLOT)
    with pytest.raises(TransportUnavailable, match="time was over"):
        connect(Transports([part], layout_digest="same"), given_s=0.0)
    assert part.opened == []


def test_quarantine_is_the_union_over_transports() -> None:
    transports = Transports([Named("a", stuck=(1, 2)), Named("b", stuck=(2, 5))], layout_digest="")
    assert transports.quarantined(H) == {1, 2, 5}
    assert transports.quarantined(D) == frozenset()
    assert Transports([], layout_digest="").quarantined(H) == frozenset()


def test_closing_closes_every_transport_within_one_limit() -> None:
    parts = [Named("a"), Named("b")]
    Transports(parts, layout_digest="").close(3.0)
    assert [len(part.closes) for part in parts] == [1, 1]
    assert parts[0].closes[0] <= 1.5
    assert parts[1].closes[0] <= 3.0
    Transports(parts, layout_digest="").close(-1.0)
    assert [part.closes[1] for part in parts] == [0.0, 0.0]


@pytest.mark.parametrize("stuck", [0, 1])
def test_memory_may_go_when_every_transport_has_ended(stuck: int) -> None:
    parts = [Named("a"), Named("b")]
    transports = Transports(parts, layout_digest="")
    assert transports.close()
    parts[stuck].ends = False
    assert not transports.close()


@pytest.fixture
def arenas():
    made = {tier: Arena.create(4, 4096, "select") for tier in Tier}
    yield made
    for arena in made.values():
        arena.close()


def start(arenas: dict[Tier, Arena], **changes: object) -> Transports:
    settings = {
        "choice": "auto",
        "arenas": arenas,
        "staging": {H: range(2, 4)},
        "host": None,
        "layout_digest": "same",
    }
    return Transports.start(**(settings | changes))


def test_a_forced_transport_is_the_only_one(arenas: dict[Tier, Arena]) -> None:
    transports = start(arenas, choice="shm")
    with pytest.raises(TransportUnavailable, match=r": shm: the peer is on another host$"):
        connect(transports)
    assert transports.published() == {"nixl": None, "xoscar": None}


def test_a_forced_transport_that_does_not_start_fails_the_launch(
    arenas: dict[Tier, Arena],
) -> None:
    with pytest.raises(TransportUnavailable, match="address"):
        start(arenas, choice="xoscar", host=None)


def test_auto_leaves_out_what_does_not_start_and_counts_it(
    arenas: dict[Tier, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise TransportUnavailable("no plug-in")

    monkeypatch.setattr("xinference_xavier.transport.nixl.NixlTransport", refuse)
    monkeypatch.setitem(sys.modules, "xinference_xavier.transport.xoscar", None)
    transports = start(arenas, host="127.0.0.1")
    reasons = transports.take_refusals()
    transports.close()
    assert reasons.pop("nixl: no plug-in") == 1
    assert [line.partition(":")[0] for line in reasons] == ["xoscar"]
    assert transports.published() == {"nixl": None, "xoscar": None}


def test_a_start_that_breaks_off_closes_what_it_had_started(
    arenas: dict[Tier, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Named("shm")
    monkeypatch.setattr(select, "ShmTransport", lambda: started)
    with pytest.raises(ValueError, match="staging"):
        start(arenas, staging={H: range(3, 9)})
    assert len(started.closes) == 1


@pytest.mark.parametrize("choice", ["nixl", "xoscar"])
def test_without_staging_slots_nothing_can_be_fetched(
    arenas: dict[Tier, Arena], choice: str
) -> None:
    with pytest.raises(TransportUnavailable, match="staging"):
        start(arenas, choice=choice, staging={H: range(4, 4)})


def test_an_unknown_choice_names_the_known_ones(arenas: dict[Tier, Arena]) -> None:
    with pytest.raises(ValueError, match=", ".join(PREFERENCE)):
        start(arenas, choice="carrier pigeon")


class OnlyHost(Named):
    """Serves host memory alone."""

    def serves(self, arena: object) -> bool:
        return arena is not GPU_ARENA


GPU_ARENA = SimpleNamespace(slots=8, device="some GPU")


def test_a_transport_that_is_not_for_that_memory_is_passed_over_without_a_count() -> None:
    transports = Transports([OnlyHost("a"), Named("b")], layout_digest="same")
    peer = dataclasses.replace(PEER, arenas={D: GPU_ARENA, H: ARENA})
    ways = [
        transports.connect(1, peer, tier, pools=pools_of(transports), deadline=math.inf).transport
        for tier in (D, H)
    ]
    assert ways == ["b", "a"]
    assert transports.take_refusals() == {}


def test_memory_for_which_no_transport_runs_is_out_of_reach() -> None:
    transports = Transports([OnlyHost("a")], layout_digest="same")
    peer = dataclasses.replace(PEER, arenas={D: GPU_ARENA})
    with pytest.raises(TransportUnavailable, match="DEVICE tier cannot be reached: no transport"):
        transports.connect(1, peer, D, pools={}, deadline=math.inf)


def test_the_only_way_to_a_memory_is_tried_again_whatever_it_did() -> None:
    transports = Transports([OnlyHost("a"), Named("b")], layout_digest="same")
    peer = dataclasses.replace(PEER, arenas={D: GPU_ARENA})
    transports.failed(1, D, "b", TransferTimeout("late"))
    connection = transports.connect(1, peer, D, pools={}, deadline=math.inf)
    assert connection.transport == "b"


class TestOnAGpu:
    @pytest.fixture
    def cuda(self) -> Iterator[FakeCuda]:
        made = FakeCuda()
        yield made
        made.check_balanced()

    @pytest.fixture
    def arenas(self, cuda: FakeCuda) -> Iterator[dict[Tier, object]]:
        made = {D: DeviceArena.create(4, 4096, "gpu", cuda), H: Arena.create(4, 4096, "host")}
        yield made
        for arena in made.values():
            arena.close()

    def start(self, arenas: dict[Tier, object], cuda: FakeCuda, choice: str) -> list[str]:
        started = start(arenas, choice=choice, gpu=Gpu(cuda, device=None))
        names = [way.name for way in started._transports]
        started.close()
        return names

    def test_mapping_gpu_memory_is_the_first_choice(
        self, arenas: dict[Tier, object], cuda: FakeCuda
    ) -> None:
        assert self.start(arenas, cuda, "auto")[:2] == ["cuda_ipc", "shm"]

    def test_a_forced_cuda_ipc_reads_the_host_tier_from_shared_memory(
        self, arenas: dict[Tier, object], cuda: FakeCuda
    ) -> None:
        assert self.start(arenas, cuda, "cuda_ipc") == ["cuda_ipc", "shm"]

    def test_a_forced_shm_is_refused_for_it_reaches_no_gpu(
        self, arenas: dict[Tier, object], cuda: FakeCuda
    ) -> None:
        with pytest.raises(TransportUnavailable, match="xavier_gpu_cache_bytes=0"):
            self.start(arenas, cuda, "shm")
        assert self.start({H: arenas[H]}, cuda, "shm") == ["shm"]

    def test_a_forced_cuda_ipc_needs_a_gpu(self, arenas: dict[Tier, object]) -> None:
        with pytest.raises(TransportUnavailable, match="not on a GPU"):
            start({H: arenas[H]}, choice="cuda_ipc")
