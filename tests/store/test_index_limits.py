# SPDX-License-Identifier: Apache-2.0
"""Logical limits below what was allocated: what goes, when, and who is told."""

from __future__ import annotations

import pytest
from index_support import (
    DEVICE,
    HOST,
    admit,
    commit,
    key,
    keys,
    lease,
    make,
    store,
    store_each,
    tiers,
    visible,
)

from xinference_xavier.store import index as index_module
from xinference_xavier.store.index import Changes, SkipReason, SnapshotIndex, StoreClosed


def room_of(index: SnapshotIndex) -> tuple[int, int]:
    counters = index.counters()
    return counters.device_blocks, counters.host_blocks


def limit_what_is_leased(index: SnapshotIndex, names: str, device_slots: int) -> None:
    """What is above the limit goes when the lease on it ends."""
    grant = lease(index, names)
    index.set_limits(device_slots=device_slots)
    index.release(grant.lease_id)
    index.check_invariants()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"device_slots": 5}, r"the device limit is 5 slots, must be in \[0, 4\]"),
        ({"host_slots": 7}, r"the host limit is 7 slots, must be in \[0, 6\]"),
        ({"device_slots": 1, "host_slots": -1}, r"the host limit is -1 slots"),
        ({"device_slots": -1, "host_slots": 1}, r"the device limit is -1 slots"),
    ],
)
def test_a_limit_outside_the_capacity_changes_nothing(limits, said):
    index = make(4, 6)
    store(index, "abcd")
    with pytest.raises(ValueError, match=said):
        index.set_limits(**limits)
    index.check_invariants()
    assert index.counters().limits == index.counters().capacity == (4, 6)
    assert visible(index, "abcd") == list("abcd")


def test_lowering_a_limit_evicts_the_least_recently_used_at_once_and_without_a_copy():
    index = make(4, 6)
    store_each(index, "abcdefgh")
    assert tiers(index, "abcdefgh") == [HOST] * 4 + [DEVICE] * 4
    changes = index.set_limits(device_slots=3, host_slots=2)
    index.check_invariants()
    assert (changes.added, changes.removed) == ([], keys("eab"))
    assert visible(index, "abcdefgh") == list("cdfgh")
    counters = index.counters()
    assert (counters.limits, counters.capacity) == ((3, 2), (4, 6))
    assert (counters.totals.limit_evictions, counters.totals.demotions) == (3, 4)


def test_a_limit_that_is_not_given_stays():
    index = make(4, 6)
    index.set_limits(device_slots=2)
    index.set_limits(host_slots=3)
    assert index.counters().limits == (2, 3)
    index.set_limits()
    assert index.counters().limits == (2, 3)


def test_new_blocks_keep_to_the_limits():
    index = make(4, 6)
    index.set_limits(device_slots=2, host_slots=3)
    store_each(index, range(9))
    assert room_of(index) == (2, 3)
    assert visible(index, range(9)) == [4, 5, 6, 7, 8]


def test_a_raised_limit_is_filled_again():
    index = make(4, 6)
    index.set_limits(device_slots=0, host_slots=0)
    plan = admit(index, "a")
    assert plan.skipped == {SkipReason.NO_TIER: 1}
    index.set_limits(device_slots=4, host_slots=6)
    store_each(index, range(12))
    assert room_of(index) == (4, 6)


def test_a_device_limit_of_zero_leaves_the_host_tier():
    index = make(4, 6)
    store_each(index, "ab")
    assert index.set_limits(device_slots=0).removed == keys("ab")
    store_each(index, "cd")
    assert tiers(index, "cd") == [HOST, HOST]


def test_leased_blocks_above_a_limit_go_when_their_leases_end_suffix_first():
    index = make(3, 0)
    store(index, "abc")
    grant = lease(index, "abc")
    assert index.set_limits(device_slots=1).removed == []
    index.check_invariants()
    assert visible(index, "abc") == list("abc")
    assert admit(index, "d").skipped == {SkipReason.DEVICE_BUSY: 1}
    index.release(grant.lease_id)
    index.check_invariants()
    assert visible(index, "abc") == ["a"]
    assert index.take_removed() == keys("cb")
    assert index.take_removed() == []


def test_a_reaped_lease_ends_like_a_released_one():
    index = make(0, 3)
    store(index, "abc")
    lease(index, "abc", reader="peer", duration=5.0)
    index.set_limits(host_slots=0)
    # A quarter of three blocks is one: the rest went at once.
    assert visible(index, "abc") == ["a"]
    assert index.reap(6.0) == 1
    index.check_invariants()
    assert visible(index, "abc") == []
    assert index.take_removed() == keys("a")


@pytest.mark.parametrize(
    "call",
    [
        lambda index, plan: index.admit([(key("d"), 0)]),
        lambda index, plan: index.commit(plan.job_id),
        lambda index, plan: index.abandon(plan.job_id),
    ],
    ids=["admit", "commit", "abandon"],
)
def test_what_went_with_a_lease_is_told_by_the_next_call_that_tells(call):
    index = make(2, 2)
    store(index, "ab")
    grant = lease(index, "ab")
    plan = admit(index, "c")
    index.set_limits(device_slots=1)
    index.release(grant.lease_id)
    index.check_invariants()
    assert call(index, plan).removed == keys("b")
    assert index.take_removed() == []
    index.check_invariants()


def test_a_loss_is_told_before_the_block_can_come_back():
    index = make(2, 0)
    store(index, "ab")
    limit_what_is_leased(index, "ab", 1)
    index.set_limits(device_slots=2)
    plan = admit(index, "b")
    assert plan.removed == keys("b")
    assert commit(index, plan) == Changes(keys("b"), [])


def test_a_job_in_flight_does_not_bring_back_what_was_lost_meanwhile():
    index = make(2, 0)
    store(index, "a")
    plan = admit(index, "b")
    limit_what_is_leased(index, "a", 0)
    assert commit(index, plan) == Changes([], keys("a"))


def test_a_clear_leaves_nothing_to_tell():
    index = make(2, 0)
    store(index, "ab")
    limit_what_is_leased(index, "ab", 0)
    index.clear()
    index.check_invariants()
    assert index.take_removed() == []
    assert index.counters().limits == (0, 0)


def test_blocks_in_flight_that_end_above_a_limit_are_dropped_from_the_end_of_the_prefix():
    index = make(4, 0)
    plan = admit(index, "abcd")
    index.set_limits(device_slots=2)
    assert commit(index, plan) == Changes(keys("ab"), [])
    assert visible(index, "abcd") == ["a", "b"]


def test_a_failed_store_makes_room_for_the_others_of_its_job():
    index = make(4, 0)
    plan = admit(index, "abcd")
    index.set_limits(device_slots=3)
    assert commit(index, plan, failed_stores={1}).added == keys("acd")


def test_a_failed_demotion_that_comes_back_above_a_limit_goes():
    index = make(2, 2)
    store_each(index, "ab")
    plan = admit(index, "cd")
    index.set_limits(device_slots=1)
    assert commit(index, plan, failed_demotions={0, 1}) == Changes([], keys("a"))
    assert tiers(index, "ab") == [None, DEVICE]


def test_an_arrival_above_the_host_limit_is_lost():
    index = make(1, 2)
    store_each(index, "ab")
    plan = admit(index, "c")
    lease(index, "a")
    index.set_limits(host_slots=1)
    assert commit(index, plan) == Changes(keys("c"), keys("b"))


def test_a_reader_gets_its_share_of_what_is_left():
    index = make(0, 8, reader_share=0.5)
    store(index, range(8))
    assert len(lease(index, range(8), reader="early").rows) == 4
    index.set_limits(host_slots=4)
    assert visible(index, range(8)) == [0, 1, 2, 3]
    assert len(lease(index, range(4), reader="early").rows) == 4, "leased already"
    assert len(lease(index, range(4), reader="late").rows) == 2


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_others_get_in_between_the_pieces_and_find_a_tier_that_takes_nothing(monkeypatch, tier):
    monkeypatch.setattr(index_module, "TRIM_BLOCKS", 2)
    index = make(5, 0) if tier is DEVICE else make(0, 5)
    store_each(index, range(5))
    left: list[int] = []

    def between(seconds: float) -> None:
        assert seconds == index_module.TRIM_PAUSE_S
        index.check_invariants()
        left.append(room_of(index)[tier])
        plan = admit(index, [f"new{len(left)}"])
        assert plan.demotions == []
        assert plan.removed == []
        if plan.job_id:
            assert commit(index, plan).added == []

    monkeypatch.setattr(index_module.time, "sleep", between)
    changes = index.set_limits(**{f"{tier.name.lower()}_slots": 2})
    index.check_invariants()
    assert left == [3]
    assert changes.removed == keys(range(3))


def test_a_store_that_is_closed_meanwhile_says_so(monkeypatch):
    monkeypatch.setattr(index_module, "TRIM_BLOCKS", 1)
    index = make(3, 0)
    store(index, "abc")
    monkeypatch.setattr(index_module.time, "sleep", lambda seconds: index.close())
    with pytest.raises(StoreClosed):
        index.set_limits(device_slots=0)
    assert index.close().keys == 0
