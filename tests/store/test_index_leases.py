# SPDX-License-Identifier: Apache-2.0
"""Leases: what they protect, who may have how many, how they end."""

from __future__ import annotations

import pytest
from index_support import DEVICE, HOST, admit, key, keys, lease, make, store, store_each, visible

from xinference_xavier.store import index as index_module
from xinference_xavier.store.leases import LeaseBook


def test_a_match_counts_consecutive_readable_keys_from_the_start_asked_for():
    index = make(4, 0)
    store(index, "abd")
    assert index.match(keys("abcd")) == 2
    assert index.match(keys("abcd"), 1) == 1
    assert index.match(keys("abcd"), 2) == 0
    assert index.match(keys("abcd"), 3) == 1
    assert index.match(keys("abcd"), 9) == 0
    assert index.match([]) == 0


def test_a_match_is_no_use():
    index = make(2, 0, spare=0)
    store_each(index, "ab")
    index.match(keys("a"))
    assert store(index, "c").added == keys("c")
    assert visible(index, "abc") == ["b", "c"]


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


@pytest.mark.parametrize("duration", [0.0, -1.0])
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
    assert index.match([b"", key("x")]) == 0
