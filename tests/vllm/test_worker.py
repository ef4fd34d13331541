# SPDX-License-Identifier: Apache-2.0
"""The real worker side on a device that defers: marks, results, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from deferred_worker import make_side, register
from fake_worker import BLOCK
from vllm.config import VllmConfig

from tests.deferring import ORDERS, Deferring
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device import Mark
from xinference_xavier.store.jobs import OWN_STORE, LoadJob, LoadSegment, StoreJob, Tier
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.select import Transports
from xinference_xavier.vllm import worker as worker_module
from xinference_xavier.vllm.metadata import ConnectorMeta, WorkerMeta

D, H = int(Tier.DEVICE), int(Tier.HOST)
BLOCKS = 12
WAIT_S = 20.0


class Rig:
    """A worker side, its KV cache, and the engine's half of its life."""

    def __init__(self, config: VllmConfig, order: str) -> None:
        self.side = make_side(config, BLOCKS, 4, 4)
        self.kv = torch.zeros(BLOCKS, BLOCK, 1, dtype=torch.int64)
        self.device = register(self.side, {"layer": self.kv}, order)
        self.finished: set[str] = set()
        self.invalid: set[int] = set()

    @property
    def arenas(self) -> dict[Tier, Arena]:
        memory = self.side._memory
        assert memory is not None
        return memory.arenas

    def compute(self, block: int, value: int) -> None:
        self.device.forward(lambda: self.kv[block].fill_(value))

    def slot(self, tier: int, slot: int) -> set[int]:
        return set(self.arenas[Tier(tier)].data[slot].view(torch.int64).tolist())

    def block(self, block: int) -> set[int]:
        return set(self.kv[block].flatten().tolist())

    def until(self, condition: Callable[[WorkerMeta], Any]) -> None:
        """Step an engine that has nothing to compute until the worker's reports say it."""
        seen = WorkerMeta()
        end = time.monotonic() + WAIT_S
        while not condition(seen):
            assert time.monotonic() < end, "it did not happen"
            self.finished |= self.side.finished()
            self.invalid |= self.side.load_errors()
            report = self.side.report()
            if report is not None:
                seen = seen.aggregate(report)
            time.sleep(0.0005)

    def stored(self, meta: ConnectorMeta) -> WorkerMeta:
        self.side.start_stores(meta)
        reports: list[WorkerMeta] = []
        self.until(lambda seen: len(seen.stores) == len(meta.stores) and not reports.append(seen))
        return reports[-1]

    def loaded(self, meta: ConnectorMeta) -> WorkerMeta:
        self.side.start_loads(meta)
        reports: list[WorkerMeta] = []
        self.until(lambda seen: len(seen.loads) == len(meta.loads) and not reports.append(seen))
        return reports[-1]


def store(job_id: int, *rows: tuple[int, ...]) -> StoreJob:
    return StoreJob(job_id, np.empty((0, 3), np.int64), np.array(rows, np.int64))


def load(job_id: int, *rows: tuple[int, ...], member: int = OWN_STORE) -> LoadJob:
    return LoadJob(job_id, f"r{job_id}", (LoadSegment(member, np.array(rows, np.int64)),), WAIT_S)


@pytest.fixture(params=ORDERS)
def rig(vllm_config: VllmConfig, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(vllm_config, request.param)
    yield made
    made.side.shutdown()


# --- one step -------------------------------------------------------------------------------------


def test_stores_copy_what_this_steps_forward_computed(rig: Rig) -> None:
    meta = ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1)), store(2, (4, H, 0, 1, -1))])
    rig.side.start_loads(meta)
    rig.compute(3, 50)
    rig.compute(4, 60)
    (first, second) = rig.stored(meta).stores
    assert first.failed_stores == second.failed_stores == set()
    assert (rig.slot(D, 0), rig.slot(H, 0)) == ({50}, {60})


def test_a_step_that_loads_and_stores_marks_each_at_its_time(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    rig.compute(8, 99)
    meta = ConnectorMeta(stores=[store(2, (5, D, 1, 2, -1))], loads=[load(3, (D, 0, 1, 8))])
    rig.side.start_loads(meta)
    rig.compute(5, 70)
    rig.stored(meta)
    rig.until(lambda _: "r3" in rig.finished)
    rig.device.finish()
    assert (rig.slot(D, 1), rig.block(8)) == ({70}, {50})


def test_loads_come_after_the_forwards_in_flight(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    rig.compute(8, 99)
    rig.loaded(ConnectorMeta(loads=[load(2, (D, 0, 1, 8)), load(3, (D, 0, 1, 9))]))
    rig.until(lambda _: rig.finished == {"r2", "r3"})
    rig.device.finish()
    assert rig.block(8) == rig.block(9) == {50}
    assert rig.invalid == set()


def test_each_job_of_a_step_is_submitted_once_whichever_hooks_are_called(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    meta = ConnectorMeta(stores=[store(2, (3, D, 1, 2, -1))], loads=[load(3, (D, 0, 1, 8))])
    for _ in range(2):
        rig.side.start_loads(meta)
        rig.side.start_stores(meta)
    seen: list[WorkerMeta] = []
    rig.until(lambda report: report.stores and report.loads and not seen.append(report))
    assert [result.job_id for result in seen[-1].stores] == [2]
    assert [result.job_id for result in seen[-1].loads] == [3]


def test_a_step_without_jobs_takes_no_mark(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Mark:
        raise AssertionError("a mark was taken")

    with monkeypatch.context() as patch:
        patch.setattr(rig.device, "mark", never)
        rig.side.start_stores(ConnectorMeta())
    assert rig.side.report() is None


def test_a_member_that_is_not_there_ends_the_load_as_failed(rig: Rig) -> None:
    rig.loaded(ConnectorMeta(loads=[load(1, (D, 0, 1, 8), (D, 1, 1, 9), member=5)]))
    assert (rig.finished, rig.invalid) == ({"r1"}, {8, 9})


def test_jobs_of_a_step_that_gets_no_mark_end_as_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Mark:
        raise RuntimeError("no mark")

    monkeypatch.setattr(rig.device, "mark", broken)
    loaded = rig.loaded(ConnectorMeta(loads=[load(1, (D, 0, 1, 8), (D, 1, 1, 9))]))
    assert (rig.finished, rig.invalid) == ({"r1"}, {8, 9})
    assert [part.reason for part in loaded.loads[0].segments] == ["not started"]
    (stored,) = rig.stored(ConnectorMeta(stores=[store(2, (3, D, 0, 1, -1))])).stores
    assert (stored.job_id, stored.failed_stores, stored.reason) == (2, {0}, "not started")


# --- start and end --------------------------------------------------------------------------------


def test_the_handshake_says_what_was_built(rig: Rig) -> None:
    handshake = rig.side.handshake()
    assert handshake is not None
    assert (handshake.device, handshake.device_slots, handshake.host_slots) == ("cpu", 4, 4)
    assert handshake.staging_slots == 1
    assert handshake.worker.arenas[Tier.HOST].slots == 5
    assert (handshake.host_pinned, handshake.unpinned_reason) == (False, None)


class Ends:
    """Notes the order in which a worker's parts are closed, and what was left to copy then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.device: Deferring | None = None
        self.failing = ""
        for kind, name in ((Deferring, "device"), (Transports, "transports"), (Arena, "arena")):
            patch.setattr(kind, "close", self._noted(name, kind.close))

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def close(part: Any, *args: Any) -> Any:
            if self.device is not None and not getattr(part, "closed", False):
                self.events.append((name, self.device.pending))
                if name == self.failing:
                    raise RuntimeError(f"the {name} cannot be closed")
            return real(part, *args)

        return close


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


def test_memory_goes_when_nothing_can_touch_it_any_more(
    vllm_config: VllmConfig, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a fence failed and left a copy behind."""
    rig = Rig(vllm_config, "late")
    rig.compute(3, 50)
    with monkeypatch.context() as broken:
        broken.setattr(rig.device, "fence", lambda: None)
        rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    ends.device = rig.device
    rig.side.shutdown()
    rig.side.shutdown()
    assert ends.events[:4] == [("transports", 1), ("device", 1), ("arena", 0), ("arena", 0)]
    assert {name for name, _ in ends.events[4:]} <= {"transports"}


@pytest.mark.parametrize("part", ["device", "transports", "arena"])
def test_a_part_that_cannot_be_closed_keeps_no_other_open(
    vllm_config: VllmConfig, ends: Ends, part: str
) -> None:
    rig = Rig(vllm_config, "late")
    ends.device, ends.failing = rig.device, part
    rig.side.shutdown()
    assert {name for name, _ in ends.events} == {"device", "transports", "arena"}
    assert sum(name == "arena" for name, _ in ends.events) == 2


def test_memory_that_a_copy_still_uses_is_left_to_a_later_call(
    vllm_config: VllmConfig, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "DRAIN_S", 0.0)
    rig = Rig(vllm_config, "late")
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.forward(hang)
    rig.side.start_stores(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    assert inside.wait(WAIT_S)
    ends.device = rig.device
    rig.side.shutdown()
    assert {name for name, _ in ends.events} == {"transports"}
    go.set()
    monkeypatch.setattr(worker_module, "DRAIN_S", WAIT_S)
    rig.side.shutdown()
    assert [name for name, _ in ends.events if name != "transports"] == ["device", "arena", "arena"]


def test_memory_that_a_transfer_may_write_is_left_to_a_later_call(
    vllm_config: VllmConfig, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(vllm_config, "late")
    ends.device = rig.device
    with monkeypatch.context() as hung:
        hung.setattr(rig.side._transports, "close", lambda _: False)
        rig.side.shutdown()
    assert ends.events == []
    rig.side.shutdown()
    assert [name for name, _ in ends.events] == ["transports", "device", "arena", "arena"]


def test_a_start_that_fails_leaves_nothing(
    vllm_config: VllmConfig, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> Transports:
        raise TransportUnavailable("no transport today")

    monkeypatch.setattr(Transports, "start", refuse)
    side = make_side(vllm_config, BLOCKS, 4, 4)
    ends.device = Deferring(None, "late")  # only to be counted
    with pytest.raises(TransportUnavailable, match="today"):
        register(side, {"layer": torch.zeros(BLOCKS, BLOCK, 1, dtype=torch.int64)}, "late")
    assert sorted(name for name, _ in ends.events) == ["arena", "arena", "device"]
    assert side.handshake() is None
