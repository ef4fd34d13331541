# SPDX-License-Identifier: Apache-2.0
"""Whether the index's bookkeeping is consistent: every slot, order, count and lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.leases import LeaseBook
from xinference_xavier.store.order import Rings
from xinference_xavier.store.placement import Job, Placement
from xinference_xavier.store.promotions import Promotions
from xinference_xavier.store.slots import (
    ARRIVING,
    FREE_RING,
    PROMOTED,
    READY,
    STAGING,
    UNPLACED,
    SlotTable,
)


def contradiction(
    placement: Placement,
    promotions: Promotions,
    book: LeaseBook,
    *,
    capacity: tuple[int, int],
    epoch: int,
    trimming: bool,
) -> str | None:
    """The first thing found wrong, or None. Reads everything and changes nothing.

    ``trimming``: a tier is being brought below a lowered limit.
    """
    table = placement.table
    return (
        _rings(table)
        or book.contradiction()
        or _slots(table, book, epoch, placement.jobs.values(), promotions.targets())
        or _orders(table)
        or _counts(table)
        or _room(placement, capacity, trimming)
    )


def _rings(table: SlotTable) -> str | None:
    """Links lead both ways, sizes are right, no slot is in two rings or in a foreign tier's."""
    for name, rings in (("tier", table.order), ("recency", table.recency)):
        seen: set[int] = set()
        for ring, size in enumerate(rings.sizes):
            members = _members(rings, ring)
            if members is None:
                return f"{name} ring {ring} is broken"
            if len(members) != size:
                return f"{name} ring {ring} counts {size} slots and has {len(members)}"
            if not seen.isdisjoint(members):
                return f"{name} ring {ring} shares a slot with another ring"
            seen.update(members)
    for tier in Tier:
        for ring in (tier, FREE_RING[tier]):
            for slot in table.order.walk(ring):
                if table.tier(slot) is not tier:
                    return f"slot {slot} is in ring {ring} of the {tier.name} tier"
    return None


def _members(rings: Rings, ring: int) -> list[int] | None:
    """The ids of a ring, or None when its links do not lead around and back."""
    sentinel = rings.sentinel(ring)
    members: list[int] = []
    node = sentinel
    while True:
        after = rings.following[node]
        if rings.preceding[after] != node or len(members) > rings.ids:
            return None
        if after == sentinel:
            return members
        if after >= rings.ids:
            return None
        members.append(after)
        node = after


def _slots(
    table: SlotTable, book: LeaseBook, epoch: int, jobs: Collection[Job], promoted: list[int]
) -> str | None:
    """Every slot is in exactly one condition, and jobs, leases and keys agree with it."""
    free = {slot for tier in Tier for slot in table.order.walk(FREE_RING[tier])}
    evictable = {slot for tier in Tier for slot in table.order.walk(tier)}
    staged = [slot for job in jobs for slot, _ in job.stores]
    targets = [target for job in jobs for _, target, _ in job.demotions]
    writing = {*staged, *targets, *promoted}
    if len(writing) != len(staged) + len(targets) + len(promoted):
        return "two entries of jobs or promotions write the same slot"
    now = [job for job in jobs if job.epoch == epoch]
    current = {slot for job in now for slot, _ in job.stores}
    current |= {target for job in now for _, target, _ in job.demotions}
    holds = Counter(slot for lease in book.live() for slot in lease.slots)
    zombies = {slot for lease in book.live() if lease.epoch != epoch for slot in lease.slots}
    leased = {slot for lease in book.live() if lease.epoch == epoch for slot in lease.slots}
    for slot in range(table.slots):
        conditions = [
            name
            for name, members in (
                ("free", free),
                ("evictable", evictable),
                ("being written", writing),
                ("leased", leased),
                ("zombie", zombies),
            )
            if slot in members
        ]
        if len(conditions) != 1:
            return f"slot {slot} is {conditions or 'lost'}"
        if table.holds[slot] != holds[slot]:
            return f"slot {slot} counts {table.holds[slot]} leases and has {holds[slot]}"
        if slot not in free and table.generation[slot] <= 0:
            return f"slot {slot} is {conditions[0]} and has generation {table.generation[slot]}"
        key = table.keys[slot]
        known = key is not None and table.where.get(key) == slot
        if known != (slot in evictable or slot in leased or slot in current):
            return f"slot {slot} is {conditions[0]}, and its key is {'' if known else 'not '}known"
    if len(table.where) != len(evictable) + len(leased) + len(current):
        return f"{len(table.where)} keys are known, more than slots that have one"
    states = (staged, STAGING), (targets, ARRIVING), (promoted, PROMOTED), (zombies, READY)
    for slots, state in (*states, (evictable | leased, READY)):
        for slot in slots:
            if table.state[slot] != state:
                return f"slot {slot} is in state {table.state[slot]} instead of {state}"
    used = [table.generation[slot] for slot in range(table.slots) if slot not in free]
    if len(set(used)) != len(used) or max(used, default=0) > table.last_generation:
        return "two slots share a generation, or one is from the future"
    placed = {slot for slot in current & set(targets) if table.stamp[slot] != UNPLACED}
    if set(table.recency.walk(0)) != evictable | placed:
        return "the recency order is not the evictable blocks and the arriving ones"
    return None


def _orders(table: SlotTable) -> str | None:
    """Each tier's order is that tier's part of the recency order, which follows the use numbers."""
    recency = list(table.recency.walk(0))
    for tier in Tier:
        part = [s for s in recency if table.tier(s) is tier and table.state[s] == READY]
        if part != list(table.order.walk(tier)):
            return f"the {tier.name} order is not its part of the recency order"
    stamps = [table.stamp[slot] for slot in recency]
    if any(a >= b for a, b in pairwise(stamps)):
        return "the recency order does not follow the use numbers"
    if stamps and stamps[-1] > table.clock:
        return f"a block was used at {stamps[-1]}, after now ({table.clock})"
    return None


def _counts(table: SlotTable) -> str | None:
    """The running counts are those of the slots."""
    of_kind = {"leased": [0, 0], "zombie": [0, 0]}
    for slot in range(table.slots):
        if table.holds[slot]:
            of_kind["leased" if table.is_visible(slot) else "zombie"][table.tier(slot)] += 1
    if of_kind["leased"] != table.leased or of_kind["zombie"] != table.zombies:
        return f"counted {of_kind}, the table has {table.leased} and {table.zombies}"
    free = {slot for tier in Tier for slot in table.order.walk(FREE_RING[tier])}
    states = Counter(table.state[slot] for slot in range(table.slots) if slot not in free)
    counts = (table.staging, table.arriving, table.promoting)
    if (states[STAGING], states[ARRIVING], states[PROMOTED]) != counts:
        return f"states are {dict(states)}, counts {counts}"
    return None


def _room(placement: Placement, capacity: tuple[int, int], trimming: bool) -> str | None:
    """The host tier keeps its spares, and above a limit nothing is left that may go."""
    table, limits = placement.table, placement.limits
    device = table.device_slots - table.free(Tier.DEVICE)
    host = table.ready(Tier.HOST) + table.zombies[Tier.HOST]
    if host > capacity[Tier.HOST]:
        return f"{host} blocks are in the host tier, whose capacity is {capacity[Tier.HOST]}"
    for tier, blocks in zip(Tier, (device, host), strict=True):
        if blocks > limits[tier] and table.order.sizes[tier] and not trimming:
            return f"{blocks} blocks are in the {tier.name} tier, whose limit is {limits[tier]}"
    return None
