# SPDX-License-Identifier: Apache-2.0
"""Host blocks on their way back to the device tier: when they move, and when they stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from index_support import DEVICE, HOST, admit, lease, make, store, store_each, tiers

from xinference_xavier.store.index import Grant, Promotion, SnapshotIndex, StoreClosed


def half_empty(free: int = 2, host: int = 4) -> SnapshotIndex:
    """An index with "abcd" in the host tier and ``free`` free device slots beside "x"."""
    index = make(free + 1, host)
    index.set_limits(device_slots=0)
    store(index, "abcd")
    index.set_limits(device_slots=free + 1)
    store(index, "x")
    return index


def promote(index: SnapshotIndex, grant: Grant, first: int = 0, count: int = 99) -> Promotion:
    plan = index.promote(grant.lease_id, first, count)
    assert plan is not None
    index.check_invariants()
    return plan


def finish(index: SnapshotIndex, plan: Promotion, good: set[int] | None = None) -> int:
    every = set(range(len(plan.rows)))
    moved = index.finish_promotion(plan.promotion_id, every if good is None else good)
    index.check_invariants()
    return moved


def test_loaded_host_blocks_move_into_the_free_device_slots_prefix_first():
    index = half_empty(free=2)
    grant = lease(index, "abcd")
    plan = promote(index, grant)
    assert [source for source, _, _ in plan.rows] == [slot for _, slot, _ in grant.rows[:2]]
    assert index.counters().promoting == 2
    assert finish(index, plan) == 2
    assert index.release(grant.lease_id)
    index.check_invariants()
    assert tiers(index, "abcdx") == [DEVICE, DEVICE, HOST, HOST, DEVICE]
    found = lease(index, "ab").rows
    assert found == [(DEVICE, slot, generation) for _, slot, generation in plan.rows]
    counters = index.counters()
    assert (counters.device_free, counters.host_free, counters.promoting) == (0, 4, 0)
    assert (counters.totals.promotions, counters.totals.failed_promotions) == (2, 0)


def test_only_the_blocks_that_are_loaded_are_promoted():
    index = half_empty(free=3)
    grant = lease(index, "xabcd")
    plan = promote(index, grant, first=2, count=2)
    assert [source for source, _, _ in plan.rows] == [grant.rows[2][1], grant.rows[3][1]]
    finish(index, plan)
    index.release(grant.lease_id)
    assert tiers(index, "abcd") == [HOST, DEVICE, DEVICE, HOST]


def test_until_its_copy_is_good_a_block_is_read_from_the_host_tier():
    index = half_empty()
    grant = lease(index, "ab")
    promote(index, grant)
    assert [row[0] for row in lease(index, "ab").rows] == [HOST, HOST]
    assert admit(index, "a").held == [0]


def test_a_promoted_block_takes_its_place_in_both_orders():
    index = half_empty(free=1, host=4)
    grant = lease(index, "a")
    finish(index, promote(index, grant))
    index.release(grant.lease_id)
    index.check_invariants()
    store_each(index, "y")
    # "x" is older than "a", which was used last.
    assert tiers(index, "axy") == [DEVICE, HOST, DEVICE]


def test_nothing_is_given_up_for_a_promotion():
    index = make(1, 2)
    store_each(index, "ab")
    grant = lease(index, "a")
    assert promote(index, grant) == Promotion(0, [])
    assert tiers(index, "b") == [DEVICE]


def test_promotions_keep_to_the_limit_of_the_device_tier():
    index = half_empty(free=3)
    index.set_limits(device_slots=2)
    assert len(promote(index, lease(index, "abcd")).rows) == 1


def of_a_peer(index: SnapshotIndex) -> Grant:
    return lease(index, "a", reader="peer")


def of_nobody_any_more(index: SnapshotIndex) -> Grant:
    grant = lease(index, "a")
    index.release(grant.lease_id)
    return grant


def from_before_a_clear(index: SnapshotIndex) -> Grant:
    grant = lease(index, "a")
    index.clear()
    return grant


def shared(index: SnapshotIndex) -> Grant:
    lease(index, "a", reader="peer")
    return lease(index, "a")


def without_rows(index: SnapshotIndex) -> Grant:
    return lease(index, ["nothing"])


def on_the_device(index: SnapshotIndex) -> Grant:
    return lease(index, "x")


@pytest.mark.parametrize(
    "of",
    [of_a_peer, of_nobody_any_more, from_before_a_clear, shared, without_rows, on_the_device],
)
def test_a_lease_that_is(of: Callable[[SnapshotIndex], Grant]):
    """...has nothing to promote."""
    index = half_empty()
    assert promote(index, of(index)) == Promotion(0, [])


def shared_meanwhile(index: SnapshotIndex, grant: Grant) -> None:
    lease(index, "a", reader="peer")


def released_meanwhile(index: SnapshotIndex, grant: Grant) -> None:
    index.release(grant.lease_id)


def leased_by_others_since(index: SnapshotIndex, grant: Grant) -> None:
    index.release(grant.lease_id)
    lease(index, "a")


def run_out_meanwhile(index: SnapshotIndex, grant: Grant) -> None:
    assert index.reap(1e9) == 1


def cleared_meanwhile(index: SnapshotIndex, grant: Grant) -> None:
    index.clear()


def limited_meanwhile(index: SnapshotIndex, grant: Grant) -> None:
    index.set_limits(device_slots=0)


def evicted_and_stored_again(index: SnapshotIndex, grant: Grant) -> None:
    index.release(grant.lease_id)
    index.set_limits(device_slots=0, host_slots=0)
    index.set_limits(host_slots=4)
    store(index, "a")
    assert tiers(index, "a") == [HOST]
    lease(index, "a")


@pytest.mark.parametrize(
    "event",
    [
        shared_meanwhile,
        released_meanwhile,
        leased_by_others_since,
        run_out_meanwhile,
        cleared_meanwhile,
        limited_meanwhile,
        evicted_and_stored_again,
    ],
)
def test_a_block_stays_in_the_host_tier_when(event: Callable[[SnapshotIndex, Grant], None]):
    index = half_empty()
    grant = lease(index, "a")
    plan = promote(index, grant)
    event(index, grant)
    index.check_invariants()
    assert finish(index, plan) == 0
    index.release(grant.lease_id)
    index.check_invariants()
    assert tiers(index, "a") in ([HOST], [None])
    counters = index.counters()
    assert counters.promoting == counters.zombies == 0
    assert counters.totals.failed_promotions == 1


def test_a_slot_that_is_written_is_not_free_before_its_writer_is_done():
    index = half_empty(free=1, host=4)
    grant = lease(index, "a")
    plan = promote(index, grant)
    index.clear()
    index.release(grant.lease_id)
    index.check_invariants()
    taken = {slot for _, slot, _ in plan.rows}
    stores = admit(index, "mno").stores
    assert not taken & {slot for _, tier, slot, _, _ in stores if tier is DEVICE}
    finish(index, plan)
    assert index.counters().device_free == 1


def test_copies_that_failed_free_their_slots():
    index = half_empty(free=3)
    grant = lease(index, "abc")
    assert finish(index, promote(index, grant), {1}) == 1
    index.release(grant.lease_id)
    assert tiers(index, "abc") == [HOST, DEVICE, HOST]
    assert index.counters().device_free == 2


def test_rows_that_a_promotion_does_not_have_are_not_counted():
    index = half_empty()
    grant = lease(index, "a")
    assert finish(index, promote(index, grant), {-1, 0, 5}) == 1


def test_a_lowered_limit_leaves_the_end_of_the_prefix_in_the_host_tier():
    index = half_empty(free=3)
    grant = lease(index, "abc")
    plan = promote(index, grant)
    index.set_limits(device_slots=2)
    assert finish(index, plan) == 2
    index.release(grant.lease_id)
    index.check_invariants()
    assert tiers(index, "abcx") == [DEVICE, DEVICE, HOST, None]


def test_one_block_is_moved_by_one_of_two_promotions():
    index = half_empty(free=2)
    grant = lease(index, "a")
    first, second = promote(index, grant), promote(index, grant)
    assert len({slot for plan in (first, second) for _, slot, _ in plan.rows}) == 2
    assert finish(index, first) == 1
    # Its host slot is another block's by now, which somebody has leased.
    lease(index, "x")
    store(index, "z")
    other = lease(index, "z")
    assert other.rows[0][:2] == (HOST, first.rows[0][0])
    assert finish(index, second) == 0
    assert lease(index, "z").rows == other.rows


def test_a_promotion_is_finished_once():
    index = half_empty()
    plan = promote(index, lease(index, "a"))
    finish(index, plan)
    with pytest.raises(ValueError, match="promotion 1 is unknown, or was finished already"):
        index.finish_promotion(plan.promotion_id)
    index.check_invariants()


def test_a_busy_index_promotes_nothing():
    index = half_empty()
    grant = lease(index, "a")
    with index._lock:
        assert index.promote(grant.lease_id, 0, 1, wait=False) is None
    index.check_invariants()


def test_a_close_ends_promotions():
    index = half_empty()
    plan = promote(index, lease(index, "a"))
    final = index.close()
    assert (final.promoting, final.used_slots, final.reached.promoting) == (0, 0, 1)
    for call in (
        lambda: index.finish_promotion(plan.promotion_id),
        lambda: index.promote(1, 0, 1),
        lambda: index.set_limits(),
        lambda: index.take_removed(),
        lambda: index.abandon(1),
    ):
        with pytest.raises(StoreClosed):
            call()


def test_a_promoted_block_can_be_demoted_again():
    index = half_empty(free=1, host=4)
    grant = lease(index, "a")
    finish(index, promote(index, grant))
    index.release(grant.lease_id)
    store_each(index, "yz")
    index.check_invariants()
    assert tiers(index, "axyz") == [HOST, HOST, DEVICE, DEVICE]
