# SPDX-License-Identifier: Apache-2.0
"""What a load keeps in device slots: host blocks that it loaded itself, as readers expect them.

In which order that happens beside forwards and other copies is tested in ``test_fences``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvcache import Rows, plain_cache, table

from tests.deferring import placed
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import CHECKSUM, CopyEngine
from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    StoreJob,
    Tier,
)
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports

D, H = int(Tier.DEVICE), int(Tier.HOST)
SLOTS = 8
KEPT = 4
"""Blocks 0 to 3 are in the host slots 0 to 3, under generations 10 to 13."""


class Rig:
    def __init__(self, kind: str, tiers: tuple[Tier, ...] = tuple(Tier)) -> None:
        self.cache = plain_cache(seed=3)
        self.contents = self.cache.blocks()
        self.device = placed(self.cache.device, kind)
        self.arenas = {
            tier: Arena.create(SLOTS, self.cache.layout.slot_bytes, tier.name) for tier in tiers
        }
        means = {"layout": self.cache.layout, "arenas": self.arenas, "device": self.device}
        self.copies = CopyEngine(**means, verify=CHECKSUM)
        self.loads = LoadEngine(
            **means,
            verify=CHECKSUM,
            staging={},
            transports=Transports([], layout_digest=self.cache.layout.digest()),
        )
        stores = [(block, H, block, 10 + block, -1) for block in range(KEPT)]
        self.copies.submit(StoreJob(1, table([], 3), table(stores, 5)))
        drain(self.copies)

    def load(self, *segments: Rows, promotions: Rows) -> LoadResult:
        parts = tuple(LoadSegment(OWN_STORE, table(rows, 4)) for rows in segments)
        self.loads.submit(LoadJob(2, "r", parts, WAIT_S, table(promotions, 3)), {})
        (result,) = drain(self.loads)
        return result

    def device_generations(self) -> dict[int, int]:
        """Slots of the device tier that readers take for something."""
        generations = self.arenas[Tier.DEVICE].meta[:, 0].tolist()
        return {slot: number for slot, number in enumerate(generations) if number}

    def close(self) -> None:
        self.loads.close(WAIT_S)
        self.copies.close(WAIT_S)
        for arena in self.arenas.values():
            arena.close()


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(**arguments: object) -> Rig:
        rigs.append(Rig(kind, **arguments))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


def test_promoted_blocks_are_loaded_from_their_device_slots_next_time(make):
    rig = make()
    moves = [(1, 6, 100), (2, 3, 101), (3, 4, 102)]
    rows = [(H, 1, 11, 7), (H, 2, 12, 8), (H, 3, 13, 9)]
    result = rig.load(rows, promotions=moves)
    assert result.promoted == {0, 1, 2}
    assert rig.device_generations() == {6: 100, 3: 101, 4: 102}
    again = rig.load([(D, slot, number, 10) for _, slot, number in moves[:1]], promotions=[])
    assert (again.segments[0].failed_rows, again.segments[0].verified_blocks) == (set(), 1)
    assert again.promoted == set()
    assert rig.cache.block(10) == rig.contents[1]


def test_blocks_of_several_own_segments_are_promoted_together(make):
    rig = make()
    result = rig.load([(H, 0, 10, 7)], [(H, 2, 12, 8)], promotions=[(0, 1, 100), (2, 2, 101)])
    assert result.promoted == {0, 1}
    again = rig.load([(D, 1, 100, 10), (D, 2, 101, 11)], promotions=[])
    assert again.segments[0].failed_rows == set()
    assert [rig.cache.block(10), rig.cache.block(11)] == [rig.contents[0], rig.contents[2]]


def test_what_the_job_does_not_load_from_the_host_tier_is_not_promoted(make):
    rig = make()
    assert rig.load([(H, 0, 10, 7)], promotions=[(0, 5, 100)]).promoted == {0}
    # A host slot of another block, a device slot of that number, and a slot that does not exist.
    moves = [(1, 1, 101), (5, 2, 102), (0, SLOTS, 103), (0, -1, 104), (0, 3, 105)]
    result = rig.load([(H, 0, 10, 8), (D, 5, 100, 9)], promotions=moves)
    assert result.segments[0].failed_rows == set()
    assert result.promoted == {4}
    assert rig.device_generations() == {5: 100, 3: 105}


def test_a_load_with_a_failed_row_promotes_nothing(make):
    rig = make()
    result = rig.load([(H, 0, 10, 7), (H, 1, 99, 8)], promotions=[(0, 1, 100)])
    assert result.segments[0].failed_rows == {1}
    assert result.promoted == set()
    assert rig.device_generations() == {}


def test_a_worker_without_a_device_tier_promotes_nothing(make):
    rig = make(tiers=(Tier.HOST,))
    result = rig.load([(H, 0, 10, 7)], promotions=[(0, 1, 100)])
    assert (result.segments[0].failed_rows, result.promoted) == (set(), set())


def test_a_slot_that_held_something_is_taken_from_its_readers_first(make):
    rig = make()
    rig.load([(H, 0, 10, 7)], promotions=[(0, 1, 100)])
    rig.load([(H, 1, 11, 7)], promotions=[(1, 1, 101)])
    old = rig.load([(D, 1, 100, 8)], promotions=[])
    assert (old.segments[0].failed_rows, old.segments[0].reason) == ({0}, "generation")
    assert rig.device_generations() == {1: 101}
