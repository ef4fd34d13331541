# SPDX-License-Identifier: Apache-2.0
"""Order between forwards, stores, demotions and loads, on a device that delays what it may.

The test's main thread is the engine's: it gives forwards, takes marks and never waits for a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvcache import Rows, ScriptedDevice, array, plain_cache, table

from tests.deferring import ORDERS, Deferring
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import CopyEngine, publish
from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    StoreJob,
    StoreResult,
    Tier,
)
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports

D, H = int(Tier.DEVICE), int(Tier.HOST)
SLOTS = 6
SEEDS = 3


class Rig:
    """One worker: KV cache, arenas, both engines, and a device that defers."""

    def __init__(self, order: str, seed: int = 0, verify: str = "off") -> None:
        self.cache = plain_cache(seed=1)
        self.scripted = ScriptedDevice(self.cache)
        self.device = Deferring(self.scripted, order, seed)
        self.arenas = {
            tier: Arena.create(SLOTS, self.cache.layout.slot_bytes, tier.name) for tier in Tier
        }
        means = {"layout": self.cache.layout, "arenas": self.arenas, "device": self.device}
        self.copies = CopyEngine(**means, verify=verify)
        self.loads = LoadEngine(
            **means,
            verify=verify,
            staging={Tier.HOST: range(SLOTS - 1, SLOTS)},
            transports=Transports([], layout_digest=self.cache.layout.digest()),
        )
        self._jobs = 0

    # --- as the engine does ----------------------------------------------------------------------

    def compute(self, block: int, value: int) -> None:
        """Give a forward that fills a block."""

        def fill() -> None:
            for view in self.cache.views:
                view[block].fill_(value)

        self.device.forward(fill)

    def store(self, *, demotions: Rows = (), stores: Rows = ()) -> StoreResult:
        self._jobs += 1
        job = StoreJob(self._jobs, table(demotions, 3), table(stores, 5))
        self.copies.submit(job, self.device.mark())
        (result,) = drain(self.copies)
        return result

    def load(self, *rows: tuple[int, ...], promotions: Rows = ()) -> LoadResult:
        self._jobs += 1
        segment = LoadSegment(OWN_STORE, table(rows, 4))
        job = LoadJob(self._jobs, "r", (segment,), WAIT_S, table(promotions, 3))
        self.loads.submit(job, {}, self.device.mark())
        (result,) = drain(self.loads)
        return result

    def elsewhere(self, work: Callable[[], Any]) -> None:
        """Do something on a thread of its own and wait for it."""
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()

    # --- looking ---------------------------------------------------------------------------------

    def block(self, block: int) -> set[int]:
        return set(self.cache.block(block))

    def slot(self, tier: int, slot: int) -> set[int]:
        return set(self.arenas[Tier(tier)].data[slot].numpy().tobytes())

    def generation(self, tier: int, slot: int) -> int:
        return int(self.arenas[Tier(tier)].meta[slot, 0])

    def close(self) -> None:
        self.loads.close(WAIT_S)
        self.copies.close(WAIT_S)
        self.device.close()
        for arena in self.arenas.values():
            arena.close()


Make = Callable[..., Rig]


@pytest.fixture(params=[(order, 0) for order in ORDERS] + [("mixed", s) for s in range(1, SEEDS)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    order, seed = request.param
    rigs: list[Rig] = []

    def made(**settings: Any) -> Rig:
        rigs.append(Rig(order, seed, **settings))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make: Make) -> Rig:
    return make()


# --- stores and demotions -----------------------------------------------------------------------


def test_a_store_copies_what_the_forward_before_it_computed(rig: Rig) -> None:
    rig.compute(3, 50)
    assert not rig.store(stores=[(3, D, 0, 1, -1)]).failed_stores
    assert rig.slot(D, 0) == {50}


def test_a_block_may_be_overwritten_once_its_store_is_reported(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1), (4, H, 0, 2, -1)])
    kept = rig.slot(H, 0)
    rig.compute(3, 60)
    rig.compute(4, 60)
    rig.device.finish()
    assert rig.slot(D, 0) == {50}
    assert rig.slot(H, 0) == kept


def test_a_published_slot_can_be_read_by_the_host(rig: Rig) -> None:
    for generation, value in enumerate((50, 60), start=1):
        rig.compute(3, value)
        rig.store(stores=[(3, H, 2, generation, -1)])
        assert (rig.generation(H, 2), rig.slot(H, 2)) == (generation, {value})


def test_a_slot_is_demoted_before_the_next_block_takes_it(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.compute(4, 60)
    result = rig.store(demotions=[(0, 1, 2)], stores=[(4, D, 0, 3, 0)])
    assert not result.failed_stores | result.failed_demotions
    rig.device.finish()
    assert (rig.slot(H, 1), rig.slot(D, 0)) == ({50}, {60})


def test_a_demoted_slot_can_be_read_by_the_host_and_reused_by_a_later_job(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.store(demotions=[(0, 1, 2)])
    assert (rig.generation(H, 1), rig.slot(H, 1)) == (2, {50})
    rig.compute(4, 60)
    rig.store(stores=[(4, D, 0, 3, -1)])
    assert (rig.slot(H, 1), rig.slot(D, 0)) == ({50}, {60})


def test_jobs_that_reuse_a_slot_run_in_their_order(rig: Rig) -> None:
    for generation, value in enumerate((50, 60, 70), start=1):
        rig.compute(3, value)
        # The block is pinned until its job is reported: the next forward waits for that.
        rig.store(stores=[(3, D, 0, generation, -1)])
    rig.store(demotions=[(0, 0, 9)])
    assert (rig.slot(H, 0), rig.slot(D, 0)) == ({70}, {70})


@pytest.mark.parametrize("copy", ["gather", "move"])
def test_nothing_of_a_failed_store_job_is_left_to_run(rig: Rig, copy: str) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1), (3, D, 1, 2, -1)])
    rig.device.tear = copy
    rows: dict[str, Rows] = {
        "gather": {"stores": [(4, H, 2, 3, -1), (5, H, 3, 4, -1)]},
        "move": {"demotions": [(0, 2, 3), (1, 3, 4)]},
    }[copy]
    result = rig.store(**rows)
    assert len(result.failed_stores | result.failed_demotions) == 2
    assert result.reason is not None
    assert rig.device.pending == 0
    # The slots are free again: another thread may fill them.
    rig.elsewhere(lambda: fill_slot(rig, 2))
    rig.device.finish()
    assert rig.slot(H, 2) == {50}
    assert rig.generation(H, 2) == 0


def fill_slot(rig: Rig, slot: int) -> None:
    rig.device.move(rig.arenas[Tier.DEVICE].data, array(0), rig.arenas[Tier.HOST].data, array(slot))
    rig.device.fence()


def test_a_mark_that_cannot_be_waited_for_fails_the_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(mark: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(rig.device, "after", lost)
        stored = rig.store(stores=[(3, D, 0, 1, -1)])
        (loaded,) = rig.load((D, 0, 1, 8)).segments
    assert (stored.failed_stores, stored.reason) == ({0}, "RuntimeError: the device is lost")
    assert (loaded.failed_rows, loaded.reason) == ({0}, "transfer")
    assert rig.scripted.calls == []


# --- loads ------------------------------------------------------------------------------------


def test_a_loaded_block_is_there_with_its_result(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1), (3, H, 1, 2, -1)])
    (part,) = rig.load((D, 0, 1, 8), (H, 1, 2, 9)).segments
    assert part.failed_rows == set()
    assert rig.block(8) == rig.block(9) == {50}


def test_a_forward_in_flight_does_not_write_over_a_loaded_block(rig: Rig) -> None:
    """With async scheduling a step of the block's last owner may still be under way."""
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.compute(8, 99)
    (part,) = rig.load((D, 0, 1, 8)).segments
    assert part.failed_rows == set()
    rig.device.finish()
    assert rig.block(8) == {50}


def test_a_forward_in_flight_reads_its_block_before_a_load_takes_it(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.compute(8, 99)
    read: list[set[int]] = []
    rig.device.forward(lambda: read.append(rig.block(8)))
    rig.load((D, 0, 1, 8))
    rig.device.finish()
    assert read == [{99}]


def test_a_later_forward_may_write_a_loaded_block_at_once(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.load((D, 0, 1, 8))
    rig.compute(8, 60)
    rig.device.finish()
    assert rig.block(8) == {60}


def test_a_slot_may_be_reused_once_the_load_from_it_is_reported(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1)])
    rig.load((D, 0, 1, 8))
    rig.compute(4, 60)
    rig.store(stores=[(4, D, 0, 2, -1)])
    rig.device.finish()
    assert rig.block(8) == {50}


@pytest.mark.parametrize("copy", ["scatter", "gather"])
def test_nothing_of_a_failed_load_is_left_to_run(make: Make, copy: str) -> None:
    """vLLM computes the blocks of a failed load again: a late write would corrupt them."""
    rig = make(verify="checksum")
    rig.compute(3, 50)
    rig.store(stores=[(3, D, 0, 1, -1), (3, D, 1, 2, -1)])
    rig.device.tear = copy
    (part,) = rig.load((D, 0, 1, 8), (D, 1, 2, 9)).segments
    assert (part.failed_rows, part.reason) == ({0, 1}, "transfer")
    assert rig.device.pending == 0
    rig.compute(8, 60)
    rig.compute(9, 60)
    rig.device.finish()
    assert rig.block(8) == rig.block(9) == {60}


def test_verification_looks_at_what_was_loaded(make: Make) -> None:
    rig = make(verify="checksum")
    rig.compute(3, 50)
    rig.compute(4, 60)
    rig.store(stores=[(3, D, 0, 1, -1), (4, D, 1, 2, -1)])
    for rows in ([(D, 0, 1, 8), (D, 1, 2, 9)], [(D, 1, 2, 8), (D, 0, 1, 9)]):
        (part,) = rig.load(*rows).segments
        assert (part.failed_rows, part.verified_blocks) == (set(), 2)


# --- promotions -----------------------------------------------------------------------------------


def test_a_promoted_slot_holds_what_was_loaded_before_it(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, H, 1, 1, -1)])
    result = rig.load((H, 1, 1, 8), promotions=[(1, 4, 7)])
    assert result.promoted == {0}
    assert (rig.generation(D, 4), rig.slot(D, 4)) == (7, {50})
    # The block belongs to the request again, and the slot to the index.
    rig.compute(8, 60)
    rig.device.finish()
    assert rig.slot(D, 4) == {50}


def test_readers_see_no_generation_while_a_slot_is_promoted(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, H, 1, 1, -1), (3, D, 4, 2, -1)])
    seen: list[int] = []
    for hooks in (rig.scripted.before, rig.scripted.then):
        hooks["gather"] = lambda: seen.append(rig.generation(D, 4))
    assert rig.load((H, 1, 1, 8), promotions=[(1, 4, 7)]).promoted == {0}
    assert seen == [0, 0]
    assert rig.generation(D, 4) == 7


def test_nothing_of_a_failed_promotion_is_left_to_run(rig: Rig) -> None:
    rig.compute(3, 50)
    rig.store(stores=[(3, H, 1, 1, -1), (3, H, 2, 2, -1)])
    rig.device.tear = "gather"
    result = rig.load((H, 1, 1, 8), (H, 2, 2, 9), promotions=[(1, 4, 7), (2, 3, 8)])
    assert result.segments[0].failed_rows == set()
    assert result.promoted == set()
    assert rig.device.pending == 0
    assert rig.generation(D, 4) == rig.generation(D, 3) == 0


# --- what a reader sees -------------------------------------------------------------------------


def test_the_generation_is_published_last() -> None:
    written: list[int] = []

    class Table(np.ndarray):
        def __setitem__(self, key: Any, item: Any) -> None:
            written.append(key[1])
            super().__setitem__(key, item)

    class Meta:
        array = np.zeros((3, 2), dtype=np.int64).view(Table)

        def numpy(self) -> Table:
            return self.array

    meta = Meta()
    publish(meta, array(1, 2), array(7, 8), array(70, 80))
    assert written == [1, 0]
    assert meta.array.tolist() == [[0, 0], [7, 70], [8, 80]]


def test_the_device_under_test_defers(make: Make) -> None:
    """Unfenced, bytes are where they were; fenced, they have moved. Else nothing is proven."""
    rig = make()
    target = torch.zeros((1, rig.cache.layout.slot_bytes), dtype=torch.uint8)
    seen: list[int] = []

    def copy() -> None:
        for _ in range(20):
            target.zero_()
            rig.device.gather(array(3), target, array(0))
            seen.append(int(target.any()))
            rig.device.fence()
            assert target.any()

    rig.elsewhere(copy)
    assert 0 in seen or rig.device.order == "late forwards"
