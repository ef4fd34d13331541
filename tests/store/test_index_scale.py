# SPDX-License-Identifier: Apache-2.0
"""Long histories: the reference numbers, the cost of a victim, memory, and many threads."""

from __future__ import annotations

import random
import sys
import threading
import tracemalloc
from typing import Any

import pytest
from index_support import key, keys, make

from xinference_xavier.store.index import SnapshotIndex

HISTORY = 27817
"""Blocks of the reference workload; one block is 196608 bytes."""


def fill(index: SnapshotIndex, first: int, count: int, batch: int = 275) -> None:
    for start in range(first, first + count, batch):
        names = range(start, min(start + batch, first + count))
        plan = index.admit([(key(name), name) for name in names])
        index.commit(plan.job_id)


@pytest.mark.parametrize(
    ("budget", "device", "host"), [(256 << 20, 1365, 26452), (8 << 20, 42, 27775)]
)
def test_the_reference_history_ends_with_the_reference_counts(budget, device, host):
    index = make(budget // 196608, 28000, spare=512)
    fill(index, 0, HISTORY)
    index.check_invariants()
    counters = index.counters()
    assert (counters.device_blocks, counters.host_blocks) == (device, host)
    assert counters.totals.admitted == HISTORY
    if device == 1365:
        assert counters.totals.demotions == 26452
    final = index.close()
    assert (final.device_lru, final.global_lru, final.reached.host_blocks) == (0, 0, host)


class CountingList(list[int]):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        CountingList.reads += 1
        return super().__getitem__(index)


def count_link_reads(index: SnapshotIndex) -> None:
    for rings in (index._table.order, index._table.recency):
        rings.following = CountingList(rings.following)
        rings.preceding = CountingList(rings.preceding)
    CountingList.reads = 0


def links_read(index: SnapshotIndex, names: list[int | str]) -> int:
    CountingList.reads = 0
    plan = index.admit([(key(name), 0) for name in names])
    index.commit(plan.job_id)
    return CountingList.reads


@pytest.mark.parametrize("leased", ["none", "half", "all but three"])
def test_a_victim_costs_the_same_whatever_the_history_and_the_leases(leased):
    costs = []
    for blocks in (16, 160, 1600):
        index = make(blocks, blocks, spare=2)
        fill(index, 0, 2 * blocks, batch=2)
        leases = {"none": [], "half": range(0, 2 * blocks, 2), "all but three": range(blocks - 3)}
        for name in leases[leased]:
            for tier_start in (0, blocks) if leased == "all but three" else (0,):
                run = [key(tier_start + name)]
                index.acquire(run, reader=None, request="r", now=0.0, duration=1.0)
        count_link_reads(index)
        costs.append([links_read(index, [f"new{number}"]) for number in range(3)])
        index.check_invariants()
        assert index.counters().totals.demotions == blocks + 3
    assert costs[0] == costs[1] == costs[2]


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
@pytest.mark.parametrize("hot_host", [False, True])
def test_arrivals_find_their_place_cheaply_in_any_order_of_commits(order, hot_host):
    count = 512
    index = make(count, 2 * count, spare=2 * count)
    fill(index, 0, 2 * count, batch=8)
    if hot_host:  # All host blocks are used after the device blocks that will join them.
        grant = index.acquire(keys(range(count)), reader=None, request="r", now=0.0, duration=1.0)
        index.release(grant.lease_id)
    jobs = [index.admit([(key(f"new{name}"), 0)]).job_id for name in range(count)]
    if order == "backward":
        jobs.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(jobs)
    count_link_reads(index)
    for job in jobs:
        index.commit(job)
    reads = CountingList.reads
    index.check_invariants()
    assert index.counters().totals.demotions == 2 * count
    assert reads <= 16 * count


def test_failed_demotions_find_their_places_cheaply():
    count = 512
    index = make(count, count, spare=2 * count)
    fill(index, 0, 2 * count, batch=8)
    plans = [
        index.admit([(key(f"new{part}.{name}"), 0) for name in range(count // 4)])
        for part in range(4)
    ]
    count_link_reads(index)
    for plan in plans:
        index.commit(plan.job_id, failed_demotions=range(len(plan.demotions)))
    reads = CountingList.reads
    index.check_invariants()
    assert index.counters().totals.failed_demotions == count
    assert reads <= 16 * count


def test_a_clear_does_not_walk_over_the_blocks():
    index = make(100, 1000)
    fill(index, 0, 1000)
    count_link_reads(index)
    index.clear()
    assert CountingList.reads < 50
    index.check_invariants()
    assert index.counters().host_free == 1002


def test_a_block_costs_less_than_300_bytes_of_memory():
    blocks = 20_000
    tracemalloc.start()
    try:
        index = SnapshotIndex(
            device_slots=blocks // 10, host_slots=blocks, spare_slots=blocks // 10
        )
        for start in range(0, blocks, 500):
            plan = index.admit([(key(name), name) for name in range(start, start + 500)])
            index.commit(plan.job_id)
        del plan
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.counters().device_blocks + index.counters().host_blocks == blocks
    assert used / blocks < 300


def test_many_threads_leave_a_consistent_index():
    index = make(24, 40, spare=8)
    errors: list[BaseException] = []
    start = threading.Barrier(5)

    def guarded(work: Any, seed: int) -> None:
        try:
            start.wait(timeout=30)
            work(random.Random(seed))
        except BaseException as error:  # Reported by the test's own thread below.
            errors.append(error)

    def write(rng: random.Random) -> None:
        for _ in range(150):
            first = rng.randrange(120)
            plan = index.admit([(key(first + n), n) for n in range(rng.randrange(1, 12))])
            if plan.job_id:
                failed = {row for row in range(len(plan.stores)) if rng.random() < 0.1}
                moves = {row for row in range(len(plan.demotions)) if rng.random() < 0.1}
                index.commit(plan.job_id, failed_stores=failed, failed_demotions=moves)

    def read(rng: random.Random) -> None:
        for now in range(300):
            run = keys(range(first := rng.randrange(120), first + 8))
            grant = index.acquire(
                run, reader=f"peer{now % 3}", request="r", now=float(now), duration=5.0, wait=False
            )
            if grant is None or rng.random() < 0.3:
                continue  # Busy, or left to the reaper.
            assert len({generation for _, _, generation in grant.rows}) == len(grant.rows)
            index.renew(grant.lease_id, now=float(now), duration=6.0)
            index.release(grant.lease_id)

    def tidy(rng: random.Random) -> None:
        for now in range(200):
            index.reap(float(now))
            index.snapshot(rng.randrange(70), 16)
            index.check_invariants()
            if now % 50 == 49:
                index.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        works = [write, write, read, read, tidy]
        threads = [
            threading.Thread(target=guarded, args=(work, seed)) for seed, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    index.check_invariants()
    while index.reap(1e9):
        pass
    index.check_invariants()
    counters = index.counters()
    assert (counters.leases, counters.jobs, counters.staging, counters.demoting) == (0, 0, 0, 0)
    assert counters.zombies == 0
    assert counters.totals.admitted > 0
