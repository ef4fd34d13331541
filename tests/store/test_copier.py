# SPDX-License-Identifier: Apache-2.0
"""The copy engine: order, chains, generations, checksums, and failures that stay failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from kvcache import Rows, ScriptedDevice, array, plain_cache, table

from tests.deferring import placed
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.checksum import Checksummer
from xinference_xavier.store.copier import CopyEngine, EngineClosed
from xinference_xavier.store.jobs import StoreJob, StoreResult, Tier

D, H = int(Tier.DEVICE), int(Tier.HOST)


class Rig:
    """A KV cache, two arenas and a copy engine."""

    def __init__(
        self, kind: str, *, verify: str = "off", tiers: tuple[Tier, ...] = tuple(Tier)
    ) -> None:
        self.cache = plain_cache(seed=1)
        self.device = ScriptedDevice(self.cache)
        self.arenas = {
            tier: Arena.create(6, self.cache.layout.slot_bytes, f"{tier.name}") for tier in tiers
        }
        self.engine = CopyEngine(
            layout=self.cache.layout,
            arenas=self.arenas,
            device=placed(self.device, kind),
            verify=verify,
        )
        self._jobs = 0

    def submit(self, *, demotions: Rows = (), stores: Rows = ()) -> int:
        self._jobs += 1
        self.engine.submit(StoreJob(self._jobs, table(demotions, 3), table(stores, 5)))
        return self._jobs

    def run(self, **tables: Rows) -> StoreResult:
        self.submit(**tables)
        (result,) = self.drain()
        return result

    def drain(self) -> list[StoreResult]:
        return drain(self.engine)

    def slot(self, tier: int, slot: int) -> bytes:
        return self.arenas[Tier(tier)].data[slot].numpy().tobytes()

    def meta(self, tier: int, slot: int) -> list[int]:
        return self.arenas[Tier(tier)].meta[slot].tolist()

    def close(self) -> None:
        self.engine.close(WAIT_S)
        for arena in self.arenas.values():
            arena.close()


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    made = Rig(kind)
    yield made
    made.close()


@pytest.fixture
def verifying(kind: str) -> Iterator[Rig]:
    made = Rig(kind, verify="checksum")
    yield made
    made.close()


def boom() -> None:
    raise RuntimeError("boom")


def test_stored_blocks_are_in_their_slots_with_their_generations(rig: Rig) -> None:
    result = rig.run(stores=[(3, D, 0, 11, -1), (4, D, 1, 12, -1), (9, H, 5, 13, -1)])
    assert (result.failed_stores, result.failed_demotions, result.reason) == (set(), set(), None)
    assert result.nbytes == 3 * rig.cache.layout.slot_bytes
    for block, tier, slot, generation in [(3, D, 0, 11), (4, D, 1, 12), (9, H, 5, 13)]:
        assert rig.slot(tier, slot) == rig.cache.block(block)
        assert rig.meta(tier, slot) == [generation, 0]


def test_one_batch_is_one_copy_per_tier(rig: Rig) -> None:
    rig.run(stores=[(b, D, b, b + 1, -1) for b in range(4)])
    rig.run(
        demotions=[(0, 0, 20), (1, 1, 21)],
        stores=[(5, D, 0, 30, 0), (6, D, 1, 31, 1), (7, H, 4, 32, -1)],
    )
    copies = [call for call in rig.device.calls if call != "fence"]
    assert copies == ["gather", "move", "gather", "gather"]


def test_a_demoted_block_keeps_its_bytes_and_its_slot_takes_the_new_block(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1)])
    result = rig.run(demotions=[(4, 1, 8)], stores=[(3, D, 4, 9, 0)])
    assert not result.failed_demotions
    assert not result.failed_stores
    assert rig.slot(H, 1) == rig.cache.block(2)
    assert rig.meta(H, 1) == [8, 0]
    assert rig.slot(D, 4) == rig.cache.block(3)
    assert rig.meta(D, 4) == [9, 0]


def test_checksums_are_of_the_slot_and_move_along_with_a_demotion(verifying: Rig) -> None:
    rig = verifying
    rig.run(stores=[(2, D, 4, 7, -1)])
    expected = Checksummer(rig.cache.layout.block_bytes).of(rig.arenas[Tier.DEVICE].data, array(4))[
        0
    ]
    assert rig.meta(D, 4) == [7, expected]
    rig.run(demotions=[(4, 1, 8)])
    assert rig.meta(H, 1) == [8, expected]


def test_a_block_that_was_copied_wrongly_is_not_published(verifying: Rig) -> None:
    rig = verifying
    damaged: list[int] = []

    def damage() -> None:
        # The first copy is the one into the store; the next ones bring blocks to be compared.
        if not damaged:
            damaged.append(4)
            rig.arenas[Tier.DEVICE].data[4, 3] ^= 1

    rig.device.then["gather"] = damage
    result = rig.run(stores=[(2, D, 4, 7, -1), (3, D, 5, 8, -1)])
    assert (result.failed_stores, result.reason) == ({0}, "checksum")
    assert rig.meta(D, 4)[0] == 0
    assert rig.meta(D, 5)[0] == 8


def test_a_block_that_was_demoted_wrongly_stays_where_it_was(verifying: Rig) -> None:
    rig = verifying
    rig.run(stores=[(2, D, 4, 7, -1), (3, D, 5, 8, -1)])

    def damage() -> None:
        rig.arenas[Tier.HOST].data[1, 3] ^= 1

    rig.device.then["move"] = damage
    result = rig.run(demotions=[(4, 1, 9), (5, 2, 10)], stores=[(6, D, 4, 11, 0), (7, D, 5, 12, 1)])
    assert (result.failed_demotions, result.failed_stores) == ({0}, {0})
    assert result.reason == "checksum"
    assert (rig.meta(D, 4)[0], rig.meta(H, 1)[0]) == (7, 0)
    assert (rig.meta(D, 5)[0], rig.meta(H, 2)[0]) == (12, 10)


def test_a_block_that_was_damaged_in_its_slot_makes_room_for_others(verifying: Rig) -> None:
    rig = verifying
    rig.run(stores=[(2, D, 4, 7, -1)])
    generation, checksum = rig.meta(D, 4)
    rig.arenas[Tier.DEVICE].data[4, 3] ^= 1
    damaged = rig.slot(D, 4)
    result = rig.run(demotions=[(4, 1, 9)], stores=[(6, D, 4, 11, 0)])
    assert (result.failed_demotions, result.failed_stores) == (set(), set())
    # Its checksum is still the one of what it should be, which no reader will find.
    assert (rig.meta(H, 1), rig.slot(H, 1)) == ([9, checksum], damaged)
    assert (generation, rig.meta(D, 4)[0]) == (7, 11)


def test_readers_see_no_generation_while_a_slot_is_written(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1)])
    seen: list[int] = []
    rig.device.before["gather"] = lambda: seen.append(rig.meta(D, 4)[0])
    rig.device.then["gather"] = lambda: seen.append(rig.meta(D, 4)[0])
    rig.run(stores=[(3, D, 4, 8, -1)])
    assert seen == [0, 0]
    assert rig.meta(D, 4)[0] == 8


def test_readers_see_no_generation_while_a_demotion_target_is_written(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1), (5, H, 1, 6, -1)])
    seen: list[int] = []
    rig.device.then["move"] = lambda: seen.append(rig.meta(H, 1)[0])
    rig.run(demotions=[(4, 1, 8)])
    assert seen == [0]
    assert rig.meta(H, 1)[0] == 8


def test_a_store_whose_demotion_failed_is_not_run(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1)])
    rig.device.before["move"] = boom
    result = rig.run(demotions=[(4, 1, 8)], stores=[(3, D, 4, 9, 0), (5, D, 2, 10, -1)])
    assert result.failed_demotions == {0}
    assert result.failed_stores == {0}
    assert result.reason == "RuntimeError: boom"
    assert rig.slot(D, 4) == rig.cache.block(2)
    assert rig.meta(D, 4)[0] == 7
    assert rig.meta(H, 1)[0] == 0
    assert rig.meta(D, 2)[0] == 10


def test_a_failed_store_leaves_a_successful_demotion_alone(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1)])
    rig.device.before["gather"] = boom
    result = rig.run(demotions=[(4, 1, 8)], stores=[(3, D, 4, 9, 0)])
    assert result.failed_demotions == set()
    assert result.failed_stores == {0}
    assert rig.slot(H, 1) == rig.cache.block(2)
    assert rig.meta(H, 1)[0] == 8
    assert rig.meta(D, 4)[0] == 0


def test_a_failure_after_the_bytes_publishes_nothing(rig: Rig) -> None:
    rig.device.before["fence"] = boom
    result = rig.run(stores=[(3, D, 4, 9, -1)])
    assert result.failed_stores == {0}
    assert rig.meta(D, 4)[0] == 0


@pytest.mark.parametrize(
    "store",
    [
        (12, D, 0, 1, -1),
        (-1, D, 0, 1, -1),
        (1, D, 6, 1, -1),
        (1, D, -1, 1, -1),
        (1, 7, 0, 1, -1),
        (1, D, 0, 1, 3),
        (1, D, 0, 1, -2),
    ],
)
def test_rows_outside_cache_or_arenas_fail_alone(rig: Rig, store: tuple[int, ...]) -> None:
    result = rig.run(stores=[(0, D, 1, 5, -1), store, (2, D, 3, 6, -1)])
    assert result.failed_stores == {1}
    assert result.reason is not None
    assert rig.meta(D, 1)[0] == 5
    assert rig.meta(D, 3)[0] == 6


def test_demotions_outside_the_arenas_fail_alone(rig: Rig) -> None:
    rig.run(stores=[(2, D, 4, 7, -1)])
    result = rig.run(demotions=[(6, 0, 1), (4, 1, 8), (0, -1, 2)])
    assert result.failed_demotions == {0, 2}
    assert rig.meta(H, 1)[0] == 8


def test_without_a_device_tier_demotions_fail_and_host_stores_work(kind: str) -> None:
    rig = Rig(kind, tiers=(Tier.HOST,))
    result = rig.run(demotions=[(0, 1, 8)], stores=[(3, H, 2, 9, -1), (4, D, 0, 10, -1)])
    rig.close()
    assert result.failed_demotions == {0}
    assert result.failed_stores == {1}


def test_a_job_that_cannot_be_read_is_reported_and_the_next_one_runs(rig: Rig) -> None:
    rig.engine.submit(StoreJob(77, table([], 3), np.zeros((2, 1), dtype=np.int64)))
    (result,) = rig.drain()
    assert result.job_id == 77
    assert result.failed_stores == {0, 1}
    assert rig.run(stores=[(3, D, 4, 9, -1)]).failed_stores == set()


def test_an_empty_job_succeeds(rig: Rig) -> None:
    result = rig.run()
    assert (result.failed_demotions, result.failed_stores, result.nbytes) == (set(), set(), 0)


def test_jobs_run_in_order_and_submit_never_waits(rig: Rig) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.before["gather"] = hold
    first = rig.submit(stores=[(1, D, 0, 1, -1)])
    assert inside.wait(WAIT_S)
    second = rig.submit(stores=[(2, D, 0, 2, -1)])
    assert rig.engine.poll() == []
    assert rig.engine.pending == 2
    go.set()
    assert [result.job_id for result in rig.drain()] == [first, second]
    assert rig.slot(D, 0) == rig.cache.block(2)
    assert rig.meta(D, 0)[0] == 2


def test_closing_drains_and_then_refuses(rig: Rig) -> None:
    for generation in range(1, 4):
        rig.submit(stores=[(generation, D, generation, generation, -1)])
    assert rig.engine.close(WAIT_S)
    assert rig.engine.close(WAIT_S)
    assert [result.failed_stores for result in rig.engine.poll()] == [set()] * 3
    with pytest.raises(EngineClosed, match="closed"):
        rig.submit()
    assert rig.engine.pending == 0


def test_closing_past_the_deadline_fails_what_had_not_begun(rig: Rig) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.before["gather"] = hold
    rig.submit(stores=[(1, D, 0, 1, -1)])
    rig.submit(stores=[(2, D, 1, 2, -1)])
    assert inside.wait(WAIT_S)
    assert not rig.engine.close(0.0)
    go.set()
    assert rig.engine.close(WAIT_S)
    running, waiting = rig.engine.poll()
    assert running.failed_stores == set()
    assert (waiting.failed_stores, waiting.reason) == ({0}, "closed")
    assert rig.meta(D, 1)[0] == 0
