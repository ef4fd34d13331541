# SPDX-License-Identifier: Apache-2.0
"""Where new blocks go, and what makes room for them."""

from __future__ import annotations

import pytest
from index_support import DEVICE, HOST, admit, key, keys, lease, make, store, store_each, visible

from xinference_xavier.store.index import SkipReason, SnapshotIndex


def test_a_free_device_slot_comes_first():
    index = make(2, 2)
    plan = admit(index, "ab")
    assert plan.demotions == []
    assert [(block, tier, after) for block, tier, _, _, after in plan.stores] == [
        (0, DEVICE, -1),
        (1, DEVICE, -1),
    ]
    assert sorted(slot for _, _, slot, _, _ in plan.stores) == [0, 1]
    assert plan.keys == keys("ab")


def test_blocks_are_invisible_until_their_commit():
    index = make(2, 2)
    plan = admit(index, "ab")
    assert visible(index, "ab") == []
    assert index.commit(plan.job_id).added == keys("ab")
    assert visible(index, "ab") == ["a", "b"]


def test_a_full_device_demotes_its_least_recently_used_block():
    index = make(2, 2)
    store_each(index, "ab")
    plan = admit(index, "c")
    [(device_slot, host_slot, generation)] = plan.demotions
    [(_, tier, slot, store_generation, after)] = plan.stores
    assert (tier, slot, after) == (DEVICE, device_slot, 0)
    assert 0 <= host_slot < 4
    assert generation != store_generation
    assert visible(index, "abc") == ["b"]
    changes = index.commit(plan.job_id)
    assert (changes.added, changes.removed) == (keys("c"), [])
    rows = lease(index, "abc").rows
    assert rows == [
        (HOST, host_slot, generation),
        (DEVICE, 1 - slot, rows[1][2]),
        (DEVICE, slot, store_generation),
    ]


def test_overflow_evicts_the_least_recently_used_host_block_and_keeps_the_capacity():
    index = make(1, 2)
    store_each(index, "abc")
    changes = store(index, "d")
    assert (changes.added, changes.removed) == (keys("d"), keys("a"))
    assert visible(index, "abcd") == ["b", "c", "d"]
    counters = index.counters()
    assert (counters.device_blocks, counters.host_blocks, counters.host_free) == (1, 2, 2)
    assert counters.totals.evictions == 1


def test_the_host_victim_stays_until_the_commit():
    index = make(1, 1)
    store_each(index, "ab")
    plan = admit(index, "c")
    assert visible(index, "abc") == ["a"]
    assert index.commit(plan.job_id).removed == keys("a")


def test_a_used_device_block_is_not_the_victim():
    index = make(2, 2)
    store_each(index, "ab")
    index.release(lease(index, "a").lease_id)
    plan = admit(index, "c")
    index.commit(plan.job_id)
    assert [row[0] for row in lease(index, "abc").rows] == [DEVICE, HOST, DEVICE]


def test_a_demoted_block_keeps_its_place_among_the_host_blocks():
    """The hit on "a" makes it more recently used than "b", which arrives in its tier later."""
    index = make(1, 2)
    store_each(index, "ab")
    index.release(lease(index, "a").lease_id)
    store(index, "c")
    changes = store(index, "d")
    assert changes.removed == keys("b")
    assert visible(index, "abcd") == ["a", "c", "d"]


def test_a_prefix_outlives_its_suffix():
    index = make(3, 1)
    store(index, "abc")
    assert store(index, "d").removed == []
    assert store(index, "e").removed == keys("c")
    assert visible(index, "abcde") == ["a", "b", "d", "e"]


def test_a_prefix_that_was_read_outlives_its_suffix():
    index = make(3, 0, spare=0)
    store_each(index, "cab")
    index.release(lease(index, "abc").lease_id)
    store(index, "d")
    assert visible(index, "abcd") == ["a", "b", "d"]


def test_a_host_tier_full_of_leased_blocks_costs_the_device_victim():
    index = make(1, 1)
    store_each(index, "ab")
    lease(index, "a")
    plan = admit(index, "c")
    assert (plan.demotions, plan.removed) == ([], keys("b"))
    assert index.commit(plan.job_id).added == keys("c")
    assert visible(index, "abc") == ["a", "c"]
    assert index.counters().totals.drops == 1


def test_without_a_free_spare_the_device_victim_is_dropped():
    index = make(3, 3, spare=0)
    store_each(index, "abcdef")
    plan = admit(index, "g")
    assert (plan.demotions, plan.removed) == ([], keys("d"))


def test_without_a_host_tier_the_device_victim_is_dropped():
    index = make(2, 0, spare=0)
    store_each(index, "abc")
    assert visible(index, "abc") == ["b", "c"]
    counters = index.counters()
    assert (counters.totals.drops, counters.totals.demotions) == (1, 0)


def test_when_every_device_block_is_leased_the_new_block_goes_to_the_host_tier():
    index = make(1, 2)
    store(index, "a")
    lease(index, "a")
    plan = admit(index, "b")
    assert plan.demotions == []
    assert [(tier, after) for _, tier, _, _, after in plan.stores] == [(HOST, -1)]
    assert index.commit(plan.job_id).added == keys("b")


def test_without_a_device_tier_blocks_go_to_the_host_tier():
    index = make(0, 2)
    assert store(index, "abc").added == keys("ab")
    assert store(index, "d").removed == keys("b")
    assert visible(index, "abcd") == ["a", "d"]


@pytest.mark.parametrize(
    ("device", "host", "spare", "leased", "reason"),
    [
        (0, 0, 0, "", SkipReason.NO_TIER),
        (0, 0, 2, "", SkipReason.NO_TIER),
        (1, 0, 0, "a", SkipReason.DEVICE_BUSY),
        (1, 1, 1, "ab", SkipReason.HOST_LEASED),
        (1, 1, 0, "b", SkipReason.HOST_BUSY),
    ],
)
def test_a_block_without_a_place_is_skipped_and_counted(device, host, spare, leased, reason):
    index = make(device, host, spare)
    store_each(index, "ab"[: device + host])
    for name in leased:
        lease(index, name)
    plan = admit(index, "x")
    assert (plan.job_id, plan.stores, plan.skipped) == (0, [], {reason: 1})
    admit(index, "y")
    assert index.counters().skips == {reason: 2}


def test_a_batch_larger_than_the_device_fills_the_host_tier_too():
    index = make(2, 4, spare=4)
    plan = admit(index, "abcd")
    assert [tier for _, tier, _, _, _ in plan.stores] == [DEVICE, DEVICE, HOST, HOST]
    index.commit(plan.job_id)
    assert [row[0] for row in lease(index, "abcd").rows] == [DEVICE, DEVICE, HOST, HOST]


def test_a_held_block_is_not_copied_again_but_is_used():
    index = make(2, 2)
    store_each(index, "ab")
    plan = admit(index, "ac")
    assert (plan.held, plan.keys) == ([0], keys("c"))
    index.commit(plan.job_id)
    assert [row[0] for row in lease(index, "abc").rows] == [DEVICE, HOST, DEVICE]


def test_a_block_twice_in_one_batch_is_stored_once():
    index = make(4, 0)
    plan = admit(index, "aba")
    assert (plan.keys, plan.held) == (keys("ab"), [2])


def test_a_block_being_written_counts_as_held():
    index = make(4, 0)
    first = admit(index, "a")
    assert admit(index, "a").held == [0]
    index.commit(first.job_id, failed_stores={0})
    assert admit(index, "a").keys == keys("a")


def test_a_block_being_demoted_counts_as_held_and_is_used():
    index = make(1, 2)
    store_each(index, "ab")
    moving = admit(index, "c")
    assert admit(index, "b").held == [0]
    index.commit(moving.job_id)
    assert visible(index, "abc") == ["a", "b", "c"]
    store(index, "d")
    assert visible(index, "abcd") == ["b", "c", "d"]
    store(index, "e")
    assert visible(index, "abcde") == ["c", "d", "e"]


def test_blocks_of_a_batch_do_not_push_out_what_the_batch_reported_held():
    index = make(2, 0, spare=0)
    store_each(index, "ab")
    plan = admit(index, "xyab")
    assert plan.held == [2, 3]
    assert plan.skipped == {SkipReason.DEVICE_BUSY: 2}
    assert visible(index, "ab") == ["a", "b"]


def test_a_held_host_block_survives_the_commit_of_its_batch():
    index = make(0, 1)
    store(index, "a")
    plan = admit(index, "xa")
    assert plan.held == [1]
    assert index.commit(plan.job_id).added == []
    assert visible(index, "xa") == ["a"]
    assert index.counters().totals.arrival_drops == 1


def test_a_block_of_an_earlier_batch_that_had_to_go_is_copied_again():
    index = make(2, 0, spare=0)
    store_each(index, "ab")
    assert admit(index, "cab").held == [1, 2]
    store_each(index, "de")
    plan = admit(index, "a")
    assert (plan.held, plan.keys) == ([], keys("a"))


@pytest.mark.parametrize("bad", [b"", b"short", b"x" * 33])
def test_an_odd_key_anywhere_in_the_batch_changes_nothing(bad):
    index = make(1, 1)
    store(index, "a")
    before = index.counters()
    with pytest.raises(ValueError, match=f"{len(bad)} bytes, not 32"):
        index.admit([(key("b"), 0), (bad, 1)])
    assert index.counters() == before
    assert visible(index, "ab") == ["a"]


def test_a_negative_block_id_changes_nothing():
    index = make(1, 1)
    with pytest.raises(ValueError, match="-1"):
        index.admit([(key("b"), 0), (key("c"), -1)])
    assert index.counters().staging == 0


def test_an_empty_batch_is_no_job():
    assert admit(make(1, 1), "").job_id == 0


def test_generations_are_never_used_twice():
    index = make(2, 2)
    seen: list[int] = []
    for name in range(20):
        plan = admit(index, [name])
        seen += [generation for _, _, generation in plan.demotions]
        seen += [generation for _, _, _, generation, _ in plan.stores]
        index.commit(plan.job_id)
    assert len(set(seen)) == len(seen) == 38
    assert min(seen) > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device_slots": -1, "host_slots": 0, "spare_slots": 0}, "-1"),
        ({"device_slots": 0, "host_slots": 2, "spare_slots": 3}, "spare_slots is 3"),
        (
            {"device_slots": 0, "host_slots": 2, "spare_slots": 1, "reader_share": 0.0},
            "reader_share is 0.0",
        ),
    ],
)
def test_impossible_sizes_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        SnapshotIndex(**arguments)
