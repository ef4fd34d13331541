# SPDX-License-Identifier: Apache-2.0
"""Orders that make no sense: a row is right or reported, and the threads go on."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvcache import table
from loader_rig import SLOTS, STAGING, UNTOUCHED, Rig, Source

from tests.fuzz.lanes import in_both_lanes
from tests.waiting import WAIT_S, drain
from xinference_xavier.store.copier import CopyEngine
from xinference_xavier.store.jobs import LoadJob, LoadSegment, StoreJob, StoreResult

numbers = st.one_of(
    st.integers(-2, SLOTS + 2), st.sampled_from([-(2**63), 2**63 - 1, 2**31, 10**6])
)
tiers = st.one_of(st.integers(0, 1), st.integers(0, 1), st.integers(-1, 3))
slots = st.one_of(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), numbers)
members = st.sampled_from([0, 1, 2, 3, -1])


@st.composite
def load_rows(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Rows for KV blocks of their own; most promise what their slot holds."""
    made = []
    for block in draw(st.lists(st.integers(0, 39), unique=True, min_size=1, max_size=5)):
        slot = draw(slots)
        promised = draw(st.one_of(st.just(100 + slot), st.just(100 + slot), numbers))
        generation = min(max(promised, -(2**63)), 2**63 - 1)
        made.append((draw(tiers), slot, generation, block))
    return made


def sensible(row: tuple[int, int, int, int]) -> bool:
    tier, slot, generation, _ = row
    return tier in (0, 1) and 0 <= slot < SLOTS and generation == 100 + slot


@in_both_lanes(few=40, many=3_000)
@given(mapped=st.booleans(), orders=st.lists(st.tuples(members, load_rows()), max_size=4))
def test_a_loaded_row_is_right_or_reported(
    mapped: bool, orders: list[tuple[int, list[tuple[int, int, int, int]]]]
) -> None:
    rig = Rig(kind="cpu", mapped=mapped)
    try:
        sources = {0: rig.own, **rig.peers}
        for member, rows in orders:
            for view in rig.cache.views:
                view.fill_(UNTOUCHED)
            result = rig.load((member, rows))
            [segment] = result.segments
            for number, row in enumerate(rows):
                if number in segment.failed_rows:
                    continue
                assert sensible(row), row
                assert member in sources
                assert rig.has(row[3], sources[member], row[1])
            staged = member == 0 and any(row[0] == 1 and row[1] in STAGING for row in rows)
            if member in sources and all(map(sensible, rows)) and not staged:
                assert not segment.failed_rows
        assert not rig.load((1, [(1, 3, 103, 7)])).segments[0].failed_rows
    finally:
        rig.close()


@st.composite
def store_jobs(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    moves = draw(st.lists(st.tuples(slots, slots, numbers), max_size=3))
    stores = draw(st.lists(st.tuples(numbers, tiers, slots, numbers, numbers), max_size=4))
    return moves, stores


@in_both_lanes(few=40, many=3_000)
@given(orders=st.lists(store_jobs(), max_size=4))
def test_copies_that_make_no_sense_fail_and_the_next_one_is_made(
    orders: list[tuple[list[Any], list[Any]]],
) -> None:
    source = Source(seed=3)
    engine = CopyEngine(
        layout=source.cache.layout,
        arenas=source.arenas,
        device=source.cache.device,
        verify="checksum",
    )
    try:
        for number, (moves, stores) in enumerate(orders):
            engine.submit(StoreJob(number, table(moves, 3), table(stores, 5)))
        results: list[StoreResult] = drain(engine)
        assert [result.job_id for result in results] == list(range(len(orders)))
        for result, (moves, stores) in zip(results, orders, strict=True):
            outside = [not (0 <= d < SLOTS and 0 <= h < SLOTS) for d, h, _ in moves]
            assert {row for row, bad in enumerate(outside) if bad} <= result.failed_demotions
            for row, (block, tier, slot, _, _) in enumerate(stores):
                if tier not in (0, 1) or not 0 <= slot < SLOTS or not 0 <= block < SLOTS:
                    assert row in result.failed_stores
        engine.submit(StoreJob(99, table([], 3), table([(2, 1, 5, 777, -1)], 5)))
        [result] = drain(engine)
        assert not result.failed_stores
        assert int(source.arenas[1].meta[5, 0]) == 777
    finally:
        engine.close(WAIT_S)
        source.close()


@in_both_lanes(few=30, many=1_000)
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 6)), kind=st.sampled_from(["i8", "f8"]))
def test_a_table_of_another_shape_fails_its_job_alone(shape: tuple[int, int], kind: str) -> None:
    rig = Rig(kind="cpu")
    try:
        rows = np.ones(shape, dtype=kind)
        job = LoadJob(7, "odd", (LoadSegment(1, rows),), WAIT_S)
        try:
            rig.engine.submit(job, rig.handles)
        except Exception:  # the worker side reports the job as failed
            assert not rig.engine.pending
        else:
            [result] = drain(rig.engine)
            assert result.job_id == 7
        assert not rig.load((1, [(1, 3, 103, 7)])).segments[0].failed_rows
    finally:
        rig.close()
