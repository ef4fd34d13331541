# SPDX-License-Identifier: Apache-2.0
"""Leases: what they protect, who may have how many, how they end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
from index_support import DEVICE, HOST, admit, key, keys, lease, make, store, store_each, visible

from xinference_xavier.store import index as index_module
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.store.leases import LeaseBook


def test_a_grant_is_the_longest_readable_prefix_with_tiers_and_generations():
    index = make(1, 1)
    plan = admit(index, "a")
    index.commit(plan.job_id)
    moved = admit(index, "b")
    index.commit(moved.job_id)
    grant = lease(index, "abx", now=3.0, duration=2.0)
    assert grant.rows == [
        (HOST, moved.demotions[0][1], moved.demotions[0][2]),
        (DEVICE, 0, moved.stores[0][3]),
    ]
    assert grant.expires == 5.0
    assert grant.lease_id > 0


def test_nothing_readable_is_no_lease():
    index = make(1, 1)
    grant = lease(index, "ab")
    assert (grant.lease_id, grant.rows) == (0, [])
    assert index.counters().leases == 0
    assert index.release(0) is False
    assert index.counters().totals.double_releases == 0


def test_leased_blocks_neither_move_nor_go():
    index = make(1, 1)
    store_each(index, "ab")
    rows = lease(index, "ab").rows
    for name in "cde":
        assert admit(index, name).stores == []
    assert lease(index, "ab").rows == rows


def test_a_leased_host_block_does_not_keep_device_slots_from_reuse():
    index = make(1, 2)
    store_each(index, "ab")
    lease(index, "a")
    assert store(index, "c").added == keys("c")
    assert store(index, "d").removed == keys("b")
    assert visible(index, "abcd") == ["a", "c", "d"]


def test_a_block_stays_leased_until_its_last_lease_ends():
    index = make(1, 0, spare=0)
    store(index, "a")
    first, second = lease(index, "a"), lease(index, "a")
    index.release(first.lease_id)
    index.check_invariants()
    assert admit(index, "b").stores == []
    index.release(second.lease_id)
    index.check_invariants()
    assert store(index, "b").added == keys("b")


def test_a_key_twice_in_one_run_is_leased_twice_and_released_once():
    index = make(1, 0)
    store(index, "a")
    grant = lease(index, "aa")
    assert len(grant.rows) == 2
    assert index.counters().leased_blocks == 1
    index.release(grant.lease_id)
    index.check_invariants()
    assert index.counters().leased_blocks == 0


def test_a_second_release_is_counted_and_ignored():
    index = make(1, 0)
    store(index, "a")
    kept, ended = lease(index, "a"), lease(index, "a")
    assert index.release(ended.lease_id) is True
    assert index.release(ended.lease_id) is False
    index.check_invariants()
    assert index.counters().totals.double_releases == 1
    assert index.counters().leased_blocks == 1
    assert index.release(kept.lease_id) is True


def test_released_blocks_are_the_most_recently_used():
    index = make(3, 0, spare=0)
    store_each(index, "abc")
    grant = lease(index, "a")
    index.release(grant.lease_id)
    store(index, "d")
    assert visible(index, "abcd") == ["a", "c", "d"]


def test_the_reaper_ends_what_has_run_out_and_nothing_else():
    index = make(3, 0)
    store_each(index, "abc")
    early, renewed, late = (
        lease(index, name, duration=duration)
        for name, duration in zip("abc", (1, 1, 9), strict=True)
    )
    assert index.renew(renewed.lease_id, now=0.5, duration=5.0)
    assert index.reap(0.9) == 0
    assert index.reap(1.0) == 1
    index.check_invariants()
    assert index.renew(early.lease_id, now=1.0, duration=1.0) is False
    assert index.release(early.lease_id) is False
    assert index.reap(5.5) == 1
    assert index.release(late.lease_id) is True
    assert index.counters().totals.reaped == 2
    index.check_invariants()


def test_a_renewal_never_shortens_a_lease():
    index = make(1, 0)
    store(index, "a")
    grant = lease(index, "a", duration=1.0)
    assert index.renew(grant.lease_id, now=0.0, duration=10.0)
    assert index.renew(grant.lease_id, now=0.0, duration=2.0)
    assert index.reap(9.0) == 0
    assert index.reap(10.0) == 1


def test_one_reap_is_bounded_and_the_next_goes_on(monkeypatch):
    monkeypatch.setattr(index_module, "REAP_BLOCKS", 3)
    index = make(4, 0)
    store(index, "abcd")
    for _ in range(4):
        lease(index, "ab", duration=1.0)
    assert [index.reap(2.0) for _ in range(3)] == [2, 2, 0]
    index.check_invariants()


@pytest.mark.parametrize("duration", [0.0, -1.0, math.nan, math.inf])
def test_a_lease_needs_a_duration(duration):
    index = make(1, 0)
    store(index, "a")
    with pytest.raises(ValueError, match="duration"):
        lease(index, "a", duration=duration)
    grant = lease(index, "a")
    with pytest.raises(ValueError, match="duration"):
        index.renew(grant.lease_id, now=0.0, duration=duration)


def test_one_reader_gets_at_most_its_share_of_the_store():
    index = make(8, 2, spare=2, reader_share=0.25)
    store(index, "abcdefgh")
    assert len(lease(index, "abcd", reader="peer").rows) == 2
    assert lease(index, "cd", reader="peer").rows == []
    assert len(lease(index, "abcd", reader="other").rows) == 2
    assert len(lease(index, "abcdefgh").rows) == 8
    assert index.counters().totals.share_cuts == 3


def test_a_small_device_tier_does_not_cut_a_prefix_that_the_store_can_lease():
    index = make(4, 12, spare=0, reader_share=0.25)
    store(index, "abcd")
    assert [row[0] for row in lease(index, "abcd", reader="peer").rows] == [DEVICE] * 4


def test_a_reader_gets_one_block_of_the_smallest_tier():
    index = make(1, 0, reader_share=0.25)
    store(index, "a")
    assert len(lease(index, "a", reader="peer").rows) == 1


def test_an_ended_lease_gives_its_share_back():
    index = make(4, 0, reader_share=0.25)
    store(index, "ab")
    first = lease(index, "a", reader="peer", duration=1.0)
    index.release(first.lease_id)
    second = lease(index, "b", reader="peer", duration=1.0)
    assert len(second.rows) == 1
    index.reap(1.0)
    assert len(lease(index, "a", reader="peer").rows) == 1


def test_requests_of_one_reader_share_a_prefix_within_one_share():
    index = make(400, 800, reader_share=0.25)
    store(index, range(275))
    grants = [lease(index, range(275), reader="peer") for _ in range(4)]
    assert [len(grant.rows) for grant in grants] == [275] * 4
    assert index.counters().totals.share_cuts == 0
    assert index._book.allowance("peer", range(275, 400)) == 25


def test_only_what_a_reader_does_not_lease_yet_counts_for_its_share():
    index = make(8, 0, reader_share=0.25)
    store(index, "abcdefgh")
    first = lease(index, "ab", reader="peer")
    assert len(lease(index, "bac", reader="peer").rows) == 2
    assert lease(index, "ca", reader="peer").rows == []
    assert len(lease(index, "cd", reader="other").rows) == 2
    index.release(first.lease_id)
    index.check_invariants()
    assert lease(index, "c", reader="peer").rows == []


def test_a_key_twice_in_one_run_counts_once_for_the_share():
    index = make(4, 4, spare=0, reader_share=0.25)
    store(index, "abc")
    grant = lease(index, "aabac", reader="peer")
    assert len(grant.rows) == 4
    index.release(grant.lease_id)
    index.check_invariants()
    assert len(lease(index, "cb", reader="peer").rows) == 2


def test_a_cleared_block_and_its_successor_both_count_for_the_share():
    index = make(2, 2, spare=0, reader_share=0.5)
    store(index, "a")
    old = lease(index, "a", reader="peer")
    index.clear()
    store(index, "abc")
    assert len(lease(index, "ab", reader="peer").rows) == 1
    index.release(old.lease_id)
    index.check_invariants()
    assert len(lease(index, "b", reader="peer").rows) == 1


def test_shares_take_memory_for_live_leases_only():
    book = LeaseBook(2000, 0.5)
    for number in range(100):
        opened = [
            book.open([number, slot], reader=f"peer{number}", request="r", expires=1.0, epoch=0)
            for slot in (0, 1)
        ]
        book.end(opened[0].lease_id)
        assert len(book._shares[f"peer{number}"]) == len(set(opened[1].slots))
        book.end(opened[1].lease_id)
    assert book.readers() == 0


class HookedLock:
    """A lock that calls ``before`` each time before it is taken."""

    def __init__(self, lock: threading.Lock, before: Callable[[], object]) -> None:
        self._lock = lock
        self._before = before
        self.release = lock.release

    def acquire(self, blocking: bool) -> bool:
        self._before()
        return self._lock.acquire(blocking)


def release_and(index: SnapshotIndex, lease_id: int, *between: Callable[[], object]) -> bool:
    """Release a lease, and before each time that this takes the lock do the next of ``between``."""
    steps = iter(between)
    plain = index._lock

    def step() -> None:
        index._lock = plain
        next(steps)()
        index._lock = hooked

    index._lock = hooked = HookedLock(plain, step)
    try:
        return index.release(lease_id)
    finally:
        index._lock = plain
        assert next(steps, None) is None


def nothing() -> None:
    pass


def test_a_long_lease_ends_in_pieces_that_let_others_in(monkeypatch):
    monkeypatch.setattr(index_module, "RELEASE_BLOCKS", 2)
    index = make(5, 0, spare=0, reader_share=1.0)
    store(index, "abcde")
    grant = lease(index, "abcde", reader="peer")
    leased = []

    def look() -> None:
        index.check_invariants()
        leased.append(index.counters().leased_blocks)

    assert release_and(index, grant.lease_id, look, look, look) is True
    assert leased == [5, 3, 1]
    assert index.counters().leases == 0
    assert index.release(grant.lease_id) is False
    assert index.counters().totals.double_releases == 1
    assert [store(index, name).added for name in "xyz"] == [keys("x"), keys("y"), keys("z")]
    assert visible(index, "abcde") == ["a", "b"]


def test_a_lease_that_is_cleared_while_it_ends_frees_its_slots(monkeypatch):
    monkeypatch.setattr(index_module, "RELEASE_BLOCKS", 2)
    index = make(5, 0, spare=0, reader_share=1.0)
    store(index, "abcde")
    grant = lease(index, "abcde", reader="peer")
    assert release_and(index, grant.lease_id, nothing, index.clear, nothing) is True
    index.check_invariants()
    assert index.counters().device_free == 5


def test_a_lease_that_is_reaped_while_it_ends_is_no_double_release(monkeypatch):
    monkeypatch.setattr(index_module, "RELEASE_BLOCKS", 2)
    index = make(5, 0, spare=0, reader_share=1.0)
    store(index, "abcde")
    grant = lease(index, "abcde", reader="peer", duration=1.0)
    assert release_and(index, grant.lease_id, nothing, lambda: index.reap(2.0)) is True
    index.check_invariants()
    counters = index.counters()
    assert (counters.leased_blocks, counters.totals.double_releases) == (0, 0)


def test_deadlines_of_ended_leases_do_not_pile_up():
    book = LeaseBook(20, 1.0)
    for number in range(10_000):
        opened = book.open([0], reader=None, request="r", expires=1e9, epoch=0)
        if number % 100:
            book.end(opened.lease_id)
    assert len(book) == 100
    assert len(book._deadlines) <= 2 * 100 + 65
    assert book.contradiction() is None


def test_a_demoting_block_cannot_be_leased():
    index = make(1, 1)
    store(index, "a")
    plan = admit(index, "b")
    assert lease(index, "a").rows == []
    index.commit(plan.job_id)
    assert len(lease(index, "a").rows) == 1


def test_unknown_keys_of_any_kind_are_misses():
    index = make(1, 1)
    store(index, "a")
    for run in ([b"", key("a")], [key("x"), key("a")], []):
        grant = index.acquire(run, reader=None, request="r", now=0.0, duration=1.0)
        assert (grant.lease_id, grant.rows) == (0, [])
