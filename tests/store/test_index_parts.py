# SPDX-License-Identifier: Apache-2.0
"""The linked lists, and that the invariant checker sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_support import admit, key, lease, make, store_each

from xinference_xavier.store.index import InvariantError, SnapshotIndex
from xinference_xavier.store.order import Rings
from xinference_xavier.store.slots import READY, STAGING

ops = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "extend",
                "front",
                "pop",
                "after",
                "remove",
                "remove_all",
                "replace",
                "splice",
                "reset",
            ]
        ),
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(0, 1),
    ),
    max_size=40,
)


@given(ops)
def test_rings_do_what_lists_do(steps):
    rings, lists = Rings(range(8), 2), [[], []]
    for op, one, other, ring in steps:
        mine = lists[ring]
        placed = {node for members in lists for node in members}
        loose = [node for node in (one, other) if node not in placed]
        if op == "extend":
            loose = list(dict.fromkeys(loose))
            rings.extend(ring, loose)
            mine.extend(loose)
        elif op == "front":
            loose = list(dict.fromkeys(loose))
            rings.extend_front(ring, loose)
            mine[:0] = loose
        elif op == "pop":
            assert rings.first_of(ring, one - 2) == mine[: max(0, one - 2)]
            assert rings.pop(ring, one - 2) == mine[: max(0, one - 2)]
            del mine[: max(0, one - 2)]
        elif op == "after" and other in loose and one in mine:
            rings.insert_after(ring, one, other)
            mine.insert(mine.index(one) + 1, other)
        elif op == "remove" and one in mine:
            rings.remove(ring, one)
            mine.remove(one)
        elif op == "remove_all":
            gone = [node for node in dict.fromkeys((one, other)) if node in mine]
            rings.remove_all(ring, gone)
            lists[ring] = [node for node in mine if node not in gone]
        elif op == "replace" and one in mine and other in loose:
            rings.replace_all([one], [other])
            mine[mine.index(one)] = other
        elif op == "splice":
            rings.splice(ring, 1 - ring)
            lists[1 - ring] += mine
            lists[ring] = []
        elif op == "reset":
            rings.reset(ring)
            lists[ring] = []
        assert [list(rings.walk(number)) for number in (0, 1)] == lists
        assert rings.sizes == [len(members) for members in lists]
        assert rings.first(ring) == next(iter(lists[ring]), None)


def swap_uses(index: SnapshotIndex) -> None:
    stamp = index._table.stamp
    first, second = list(index._table.recency.walk(0))[:2]
    stamp[first], stamp[second] = stamp[second], stamp[first]


def reorder_device(index: SnapshotIndex) -> None:
    order = index._table.order
    first = order.first(0)
    assert first is not None
    order.remove(0, first)
    order.extend(0, [first])


def cut_ring(index: SnapshotIndex) -> None:
    order = index._table.order
    order.following[order.sentinel(0)] = order.following[order.first(0) or 0]


def lose_free_slot(index: SnapshotIndex) -> None:
    index._table.take(1)


def free_a_block(index: SnapshotIndex) -> None:
    table = index._table
    slot = table.order.first(0)
    assert slot is not None
    table.order.remove(0, slot)
    table.order.extend(2, [slot])


def set_field(name: str, value: int) -> Callable[[SnapshotIndex], None]:
    return lambda index: setattr(index._table, name, value)


def of_leased(field: str, value: int) -> Callable[[SnapshotIndex], None]:
    def change(index: SnapshotIndex) -> None:
        slot = next(slot for slot, holds in enumerate(index._table.holds) if holds)
        getattr(index._table, field)[slot] = value

    return change


def forget_lease(index: SnapshotIndex) -> None:
    index._book._leases.popitem()


def wrong_share(index: SnapshotIndex) -> None:
    [slot] = index._book._shares["peer"]
    index._book._shares["peer"][slot] += 1


def share_of_nobody(index: SnapshotIndex) -> None:
    index._book._shares["gone"] = {}


def small_share(index: SnapshotIndex) -> None:
    index._book._most = 0


def forget_deadline(index: SnapshotIndex) -> None:
    index._book._deadlines.clear()


def forget_job(index: SnapshotIndex) -> None:
    index._placement.jobs.clear()


def forget_promotion(index: SnapshotIndex) -> None:
    index._promotions._pending.clear()


def unknown_key(index: SnapshotIndex) -> None:
    del index._table.where[key("a")]


def stray_key(index: SnapshotIndex) -> None:
    index._table.where[key("stray")] = 0


def same_generation(index: SnapshotIndex) -> None:
    generation = index._table.generation
    generation[0] = generation[1]


def shrunk_host(index: SnapshotIndex) -> None:
    index._capacity = (index._capacity[0], 1)


def missed_limit(tier: int) -> Callable[[SnapshotIndex], None]:
    def change(index: SnapshotIndex) -> None:
        limits = [5, 4]
        limits[tier] = 1
        index._placement.limits = (limits[0], limits[1])

    return change


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (swap_uses, "use numbers"),
        (reorder_device, "DEVICE order"),
        (cut_ring, "broken"),
        (lose_free_slot, "lost"),
        (free_a_block, "is free, and its key is known"),
        (set_field("staging", 0), "states are"),
        (set_field("arriving", 0), "states are"),
        (set_field("promoting", 0), "states are"),
        (set_field("last_generation", 1), "from the future"),
        (set_field("clock", 1), "after now"),
        (set_field("leased", [0, 0]), "counted"),
        (set_field("zombies", [1, 0]), "counted"),
        (of_leased("holds", 2), "counts 2 leases and has 1"),
        (of_leased("state", STAGING), f"in state {STAGING} instead of {READY}"),
        (of_leased("generation", 0), "has generation 0"),
        (forget_lease, "'peer' do not add up to its share"),
        (wrong_share, "'peer' do not add up to its share"),
        (share_of_nobody, "'gone' do not add up to its share"),
        (small_share, "leases 1, more than its share 0"),
        (forget_deadline, "have no deadline"),
        (forget_job, "lost"),
        (forget_promotion, "lost"),
        (unknown_key, "not known"),
        (stray_key, "more than slots"),
        (same_generation, "share a generation"),
        (shrunk_host, "whose capacity is 1"),
        (missed_limit(0), "blocks are in the DEVICE tier, whose limit is 1"),
        (missed_limit(1), "blocks are in the HOST tier, whose limit is 1"),
    ],
)
def test_the_checker_finds_damage(damage, found):
    index = make(5, 4)
    index.set_limits(device_slots=4)
    store_each(index, "abcdefg")
    index.set_limits(device_slots=5)
    assert index.promote(lease(index, "b").lease_id, 0, 1).promotion_id
    lease(index, "d", reader="peer")
    admit(index, "x")
    index.check_invariants()
    damage(index)
    with pytest.raises(InvariantError, match=found):
        index.check_invariants()
