# SPDX-License-Identifier: Apache-2.0
"""What a commit makes of failed, late and unknown work; clear and close."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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

from xinference_xavier.store.index import Changes, FinalCounters, SnapshotIndex, StoreClosed


def test_a_failed_store_frees_its_slot_and_drops_its_block():
    index = make(2, 0)
    plan = admit(index, "ab")
    assert commit(index, plan, failed_stores={0}) == Changes(keys("b"), [])
    assert visible(index, "ab") == ["b"]
    assert index.counters().device_free == 1


def test_a_failed_demotion_leaves_both_tiers_as_they_were():
    index = make(1, 1)
    store_each(index, "ab")
    before = index.counters()
    looked = lease(index, "ab")
    index.release(looked.lease_id)
    plan = admit(index, "c")
    assert commit(index, plan, failed_demotions={0}) == Changes([], [])
    assert lease(index, "ab").rows == looked.rows
    assert visible(index, "c") == []
    after = index.counters()
    assert (after.device_free, after.host_free) == (before.device_free, before.host_free)
    assert (after.totals.failed_demotions, after.totals.failed_stores) == (1, 1)


def test_where_a_demotion_is_unsure_both_blocks_are_gone():
    index = make(2, 2)
    store_each(index, "ab")
    plan = admit(index, "cd")
    changes = commit(index, plan, failed_demotions={0}, unsure_demotions={0})
    # Which block the device slot of "a" holds depends on the rank.
    assert changes == Changes(keys("d"), keys("a"))
    assert tiers(index, "abcd") == [None, HOST, None, DEVICE]
    assert index.counters().device_free == 1
    totals = index.counters().totals
    assert (totals.failed_demotions, totals.failed_stores) == (1, 1)


def test_abandoning_a_job_gives_up_what_it_stored_and_what_it_moved():
    index = make(1, 2)
    store_each(index, "ab")
    plan = admit(index, "c")
    changes = index.abandon(plan.job_id)
    index.check_invariants()
    assert (changes.added, changes.removed) == ([], keys("b"))
    assert tiers(index, "abc") == [HOST, None, None]
    with pytest.raises(ValueError, match="unknown, or was committed already"):
        index.abandon(plan.job_id)


def test_an_abandoned_job_from_before_a_clear_only_frees_its_slots():
    index = make(1, 2)
    store(index, "a")
    plan = admit(index, "b")
    index.clear()
    changes = index.abandon(plan.job_id)
    index.check_invariants()
    assert (changes.added, changes.removed) == ([], [])
    assert (index.counters().device_free, index.counters().host_free) == (1, 4)


def test_a_failed_demotion_puts_the_block_back_to_its_old_place():
    index = make(3, 4)
    store_each(index, "abc")
    plan = admit(index, "de")
    commit(index, plan, failed_demotions={0, 1})
    store(index, "f")
    assert tiers(index, "abcf") == [HOST, DEVICE, DEVICE, DEVICE]


def test_demotions_that_fail_out_of_order_keep_the_order_of_use():
    index = make(4, 8, spare=4)
    store_each(index, "abcd")
    first, second = admit(index, "ef"), admit(index, "gh")
    commit(index, second, failed_demotions={0, 1})
    commit(index, first, failed_demotions={0, 1})
    for name, victim in zip("ijkl", "abcd", strict=True):
        store(index, name)
        assert tiers(index, victim) == [HOST]


def test_a_block_used_while_its_demotion_failed_is_the_most_recent():
    index = make(2, 2)
    store_each(index, "ab")
    plan = admit(index, "c")
    admit(index, "a")
    commit(index, plan, failed_demotions={0})
    store(index, "d")
    assert tiers(index, "abd") == [DEVICE, HOST, DEVICE]


def test_demotions_that_arrive_out_of_order_keep_the_order_of_use():
    index = make(3, 3, spare=3)
    store_each(index, "abc")
    plans = [admit(index, name) for name in "def"]
    for plan in (plans[1], plans[2], plans[0]):
        index.commit(plan.job_id)
        index.check_invariants()
    assert [store(index, name).removed for name in "ghi"] == [keys("a"), keys("b"), keys("c")]


def test_a_failed_store_after_a_good_demotion_leaves_a_free_device_slot():
    index = make(1, 1)
    store(index, "a")
    plan = admit(index, "b")
    assert commit(index, plan, failed_stores={0}) == Changes([], [])
    assert tiers(index, "ab") == [HOST, None]
    assert index.counters().device_free == 1


def test_an_arrival_that_finds_every_host_block_leased_is_dropped():
    index = make(1, 1)
    store_each(index, "ab")
    plan = admit(index, "c")
    lease(index, "a")
    assert commit(index, plan) == Changes(keys("c"), keys("b"))
    assert visible(index, "abc") == ["a", "c"]
    assert index.counters().totals.arrival_drops == 1


def test_a_direct_host_store_that_finds_every_host_block_leased_is_dropped():
    index = make(0, 1)
    store(index, "a")
    plan = admit(index, "b")
    lease(index, "a")
    assert commit(index, plan) == Changes([], [])
    assert index.counters().host_free == 2


def test_a_job_is_committed_exactly_once():
    index = make(1, 1)
    plan = admit(index, "a")
    index.commit(plan.job_id)
    with pytest.raises(ValueError, match=f"job {plan.job_id} is unknown"):
        index.commit(plan.job_id)
    with pytest.raises(ValueError, match="job 99 is unknown"):
        index.commit(99)


@pytest.mark.parametrize("failed", [{"failed_demotions": {1}}, {"failed_stores": {-1}}])
def test_a_failure_of_an_entry_that_the_job_lacks_changes_nothing(failed):
    index = make(1, 1)
    store(index, "a")
    plan = admit(index, "b")
    with pytest.raises(ValueError, match=f"job {plan.job_id} has no"):
        index.commit(plan.job_id, **failed)
    assert commit(index, plan).added == keys("b")


def test_clear_takes_every_block_from_readers_and_frees_what_nobody_reads():
    index = make(2, 2)
    store_each(index, "abcd")
    assert index.clear() == 1
    index.check_invariants()
    assert visible(index, "abcd") == []
    assert index.snapshot() == ([], None)
    counters = index.counters()
    assert (counters.device_free, counters.host_free, counters.epoch) == (2, 4, 1)
    assert store(index, "abcd").added == keys("abcd")


def test_slots_that_are_read_during_a_clear_are_free_when_their_leases_end():
    index = make(2, 2)
    store_each(index, "abc")
    first, second = lease(index, "abc"), lease(index, "a")
    index.clear()
    index.check_invariants()
    counters = index.counters()
    assert (counters.zombies, counters.leased_blocks, counters.leases) == (3, 0, 2)
    assert (counters.device_free, counters.host_free) == (0, 3)
    assert store(index, "a").added == keys("a")
    assert index.renew(first.lease_id, now=5.0, duration=10.0)
    assert index.release(first.lease_id)
    index.check_invariants()
    assert index.counters().zombies == 1
    assert index.release(second.lease_id)
    index.check_invariants()
    counters = index.counters()
    assert (counters.zombies, counters.device_free, counters.host_free) == (0, 2, 3)
    assert visible(index, "abc") == ["a"]


def test_cleared_blocks_that_are_read_still_take_room_in_the_host_tier():
    index = make(0, 2)
    store_each(index, "ab")
    lease(index, "ab")
    index.clear()
    plan = admit(index, "c")
    assert (plan.stores, list(plan.skipped.values())) == ([], [1])


def test_a_job_from_before_a_clear_frees_its_slots_and_publishes_nothing():
    index = make(1, 2)
    store(index, "a")
    plan = admit(index, "b")
    index.clear()
    index.check_invariants()
    again = admit(index, "ab")
    assert commit(index, plan, failed_demotions={0}) == Changes([], [])
    assert commit(index, again).added == keys("ab")
    assert visible(index, "ab") == ["a", "b"]
    assert index.counters().totals.discarded == 1


def test_snapshots_tell_exactly_the_readable_keys_page_by_page():
    index = make(3, 5)
    store_each(index, range(7))
    admit(index, ["new"])
    found: list[bytes] = []
    cursor: int | None = 0
    while cursor is not None:
        page, cursor = index.snapshot(cursor, limit=2)
        assert len(page) <= 2
        found += page
    assert sorted(found) == sorted(keys(visible(index, range(7))))
    assert len(found) == 6


@pytest.mark.parametrize("arguments", [(-1, 1), (0, 0)])
def test_a_snapshot_of_nothing_sensible_is_refused(arguments):
    with pytest.raises(ValueError, match="cursor is"):
        make(1, 1).snapshot(*arguments)


def left(final: FinalCounters) -> dict[str, int]:
    """What is not zero after a close."""
    counts = dataclasses.asdict(final)
    del counts["reached"]
    return {name: count for name, count in counts.items() if count}


def test_close_clears_everything_and_tells_what_was_reached():
    index = make(2, 4)
    store_each(index, "abc")
    lease(index, "a")
    index.clear()
    store_each(index, "abcd")
    lease(index, "d", reader="peer")
    lease(index, "d", reader="other")
    admit(index, "ef")
    final = index.close()
    assert left(final) == {}
    reached = final.reached
    assert (reached.totals.admitted, reached.totals.demotions) == (7, 3)
    assert (reached.leases, reached.jobs, reached.staging) == (3, 1, 2)
    assert (reached.demoting, reached.zombies, reached.leased_blocks) == (1, 1, 1)
    assert index.close() is final


def lose_slot(index: SnapshotIndex) -> None:
    index._table.take(HOST)


def count_one_more(name: str) -> Callable[[SnapshotIndex], None]:
    return lambda index: setattr(index._table, name, getattr(index._table, name) + 1)


def lease_no_book_knows(index: SnapshotIndex) -> None:
    index._table.hold([index._table.where[key("b")]])


def share_of_nobody(index: SnapshotIndex) -> None:
    index._book._shares["gone"] = {0: 1}


def forget_job(index: SnapshotIndex) -> None:
    index._placement.jobs.clear()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lose_slot, {"used_slots": 1}),
        (count_one_more("staging"), {"staging": 1}),
        (count_one_more("arriving"), {"demoting": 1}),
        (lease_no_book_knows, {"zombies": 1, "used_slots": 1}),
        (share_of_nobody, {"readers": 1}),
        (forget_job, {"staging": 1, "demoting": 1, "used_slots": 2}),
    ],
)
def test_the_final_counters_show_what_clearing_does_not_get_rid_of(damage, found):
    index = make(2, 3)
    store_each(index, "abc")
    lease(index, "c", reader="peer")
    admit(index, "d")
    damage(index)
    assert left(index.close()) == found


@pytest.mark.parametrize(
    "call",
    [
        lambda index, job: index.admit([(key("x"), 0)]),
        lambda index, job: index.commit(job),
        lambda index, job: lease(index, "a"),
        lambda index, job: index.admit([(key("x"), 0)], wait=False),
        lambda index, job: index.renew(1, now=0.0, duration=1.0),
        lambda index, job: index.release(1),
        lambda index, job: index.reap(0.0),
        lambda index, job: index.snapshot(),
        lambda index, job: index.clear(),
        lambda index, job: index.counters(),
        lambda index, job: index.check_invariants(),
    ],
)
def test_a_closed_index_stays_closed(call):
    index = make(1, 1)
    store(index, "a")
    job = admit(index, "b").job_id
    index.close()
    with pytest.raises(StoreClosed, match="closed"):
        call(index, job)


@pytest.mark.parametrize(
    "look",
    [
        lambda index: index.admit([(key("b"), 0)], wait=False),
        lambda index: index.acquire(
            [key("a")], reader=None, request="r", now=0.0, duration=1.0, wait=False
        ),
    ],
)
def test_a_busy_index_answers_ask_again_to_who_does_not_wait(look):
    index: SnapshotIndex = make(1, 1)
    store(index, "a")
    before = index.counters()
    with index._lock:
        assert look(index) is None
    assert index.counters() == before
    assert look(index) is not None


def test_a_block_is_held_from_its_plan_to_its_end_also_while_it_moves():
    index = make(1, 1)
    assert not index.holds(key("a"))
    plan = admit(index, "a")
    assert index.holds(key("a"))
    index.commit(plan.job_id)
    moving = admit(index, "b")
    assert visible(index, "a") == []
    assert index.holds(key("a"))
    index.commit(moving.job_id)
    index.clear()
    assert not index.holds(key("a"))
