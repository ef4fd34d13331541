# SPDX-License-Identifier: Apache-2.0
"""The table of slots: what each holds, and the orders they stand in. No policy, no lock.

Inside the index, device slots are numbered ``0 .. D-1`` and host slots ``D .. D+H-1``. Each slot
is in exactly one of these conditions:

========  ===========  ==================  ================================================
state     ``holds``    ring                meaning
========  ===========  ==================  ================================================
any       0            free ring           free (after ``clear()`` the old state stays behind)
STAGING   0            none                new content is being written
ARRIVING  0            recency, unless     a demotion is being written; stands for its block
                       touched meanwhile   in the recency order, so that the block keeps its place
PROMOTED  0            none                a copy of a leased host block is being written; has no
                                           key, and readers get the block from its host slot
READY     0            tier ring, recency  evictable; readers can get it
READY     above 0      none                leased: readers can get it, nothing can move it
READY     above 0      none                zombie: cleared, but readers still copy it; ``where``
                                           does not lead to it
========  ===========  ==================  ================================================

``stamp`` numbers the uses of blocks: each order is sorted by it. Publishing, touching and the end
of the last lease give the next number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.order import Rings

FREE, STAGING, ARRIVING, READY, PROMOTED = range(5)

FREE_RING = (2, 3)
"""Ring of the free slots of each tier; the ring of its evictable blocks is the tier itself."""

UNPLACED = 0
"""``stamp`` of an arriving block that was used meanwhile: it will be the most recent one."""


class SlotTable:
    """Slots of both tiers with their keys, generations, leases counts and orders.

    About 190 bytes per slot in use, the key's own bytes and the dict's share included.
    """

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.device_slots = device_slots
        self.slots = device_slots + host_slots
        names = range(self.slots)
        shared = list(names)
        self.where: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * self.slots
        self.state = bytearray(self.slots)
        self.holds = array("i", repeat(0, self.slots))
        self.generation = array("q", repeat(0, self.slots))
        self.stamp = array("q", repeat(0, self.slots))
        self.order = Rings(shared, 4)
        self.recency = Rings(shared, 1)
        self.order.extend(FREE_RING[Tier.DEVICE], shared[:device_slots])
        self.order.extend(FREE_RING[Tier.HOST], shared[device_slots:])
        self.leased = [0, 0]
        self.zombies = [0, 0]
        self.staging = 0
        self.arriving = 0
        self.promoting = 0
        self.clock = 0
        self.last_generation = 0

    # What there is.

    def tier(self, slot: int) -> Tier:
        """The tier that ``slot`` is in."""
        return Tier.DEVICE if slot < self.device_slots else Tier.HOST

    def local(self, slot: int) -> int:
        """The slot's number within its tier."""
        return slot if slot < self.device_slots else slot - self.device_slots

    def ready(self, tier: Tier) -> int:
        """Number of blocks of ``tier`` that readers can get."""
        return self.order.sizes[tier] + self.leased[tier]

    def free(self, tier: Tier) -> int:
        """Number of free slots of ``tier``."""
        return self.order.sizes[FREE_RING[tier]]

    def victim(self, tier: Tier) -> int | None:
        """The least recently used evictable block of ``tier``."""
        return self.order.first(tier)

    def is_visible(self, slot: int) -> bool:
        """Whether readers can get the block in ``slot``."""
        key = self.keys[slot]
        return self.state[slot] == READY and key is not None and self.where.get(key) == slot

    def visible(self, start: int, end: int) -> list[bytes]:
        """The keys that readers can get in the slots from ``start`` to before ``end``."""
        keys = self.keys
        return [
            key
            for slot in range(start, end)
            if self.is_visible(slot) and (key := keys[slot]) is not None
        ]

    # New content.

    def take(self, tier: Tier) -> int | None:
        """Take a free slot of ``tier`` off its ring; the caller gives it content at once."""
        slot = self.order.first(FREE_RING[tier])
        if slot is not None:
            self.order.remove(FREE_RING[tier], slot)
        return slot

    def stage(self, slot: int, key: bytes) -> int:
        """Let ``key`` be written into ``slot``, just taken; returns the new generation."""
        self.state[slot] = STAGING
        self.staging += 1
        self.keys[slot] = key
        self.where[key] = slot
        return self._next_generation(slot)

    def publish(self, slots: Sequence[int]) -> None:
        """Staged blocks become ready; the last of ``slots`` is the most recently used."""
        for slot in slots:
            self.state[slot] = READY
        self.staging -= len(slots)
        self._append(slots)

    def abandon(self, slot: int) -> None:
        """The block staged in ``slot`` is given up, its slot free."""
        self._forget(slot)
        self.reclaim(slot)

    def reclaim(self, slot: int) -> None:
        """Free a slot being written whose key is none of this table's business any more."""
        state = self.state[slot]
        if state == STAGING:
            self.staging -= 1
        elif state == ARRIVING:
            self.arriving -= 1
        else:
            self.promoting -= 1
        self._release_slot(slot)

    def evict(self, slot: int) -> bytes:
        """An evictable block goes; returns its key."""
        key = self._forget(slot)
        self._remove_one(slot)
        self._release_slot(slot)
        return key

    # Demotion: the block's place in the recency order waits in its target slot.

    def demote(self, source: int, target: int) -> int:
        """Move the evictable block of ``source`` towards ``target``, just taken.

        ``source`` leaves every order and is the caller's. Returns the generation of ``target``.
        """
        self.order.remove(Tier.DEVICE, source)
        self.recency.replace(source, target)
        self.stamp[target] = self.stamp[source]
        self.state[target] = ARRIVING
        self.arriving += 1
        key = self._key(source)
        self.keys[target] = key
        self.where[key] = target
        return self._next_generation(target)

    def arrive(self, slot: int) -> None:
        """An arriving block becomes ready, at its old place."""
        self.arriving -= 1
        self.state[slot] = READY
        if self.stamp[slot] == UNPLACED:
            self._append([slot])
        else:
            self.order.insert_after(Tier.HOST, self._host_predecessor(slot), slot)

    def lose(self, slot: int) -> bytes:
        """An arriving block is given up, its slot free; returns its key."""
        key = self._forget(slot)
        if self.stamp[slot] != UNPLACED:
            self.recency.remove(0, slot)
        self.reclaim(slot)
        return key

    def restore(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Demotions that failed: the blocks are ready on the device again, at their old places.

        ``moves`` are (source, target, old generation of the source) in the order they were made;
        into the sources the dependent new blocks are staged, which are given up.
        """
        order, stamp = self.order, self.stamp
        # Oldest first: the search goes on where it stopped, and passes over nothing but blocks
        # that came back from earlier failures, since all others were used later.
        before = end = order.sentinel(Tier.DEVICE)
        for source, target, generation in moves:
            self._forget(source)
            key = self._key(target)
            self.keys[source] = key
            self.where[key] = source
            self.state[source] = READY
            self.staging -= 1
            self.generation[source] = generation
            if stamp[target] == UNPLACED:
                self._append([source])
            else:
                mine = stamp[source] = stamp[target]
                while (after := order.following[before]) != end and stamp[after] < mine:
                    before = after
                order.insert_after(Tier.DEVICE, before, source)
                self.recency.replace(target, source)
                before = source
            self.reclaim(target)

    # Promotion: the block stays where it is until its copy is good.

    def copy_to(self, slot: int) -> int:
        """Let a copy of a leased host block be written into a device slot, just taken.

        Returns the new generation.
        """
        self.state[slot] = PROMOTED
        self.promoting += 1
        return self._next_generation(slot)

    def promote(self, source: int, target: int) -> None:
        """The leased block of ``source`` is in ``target`` now, leases and all; ``source`` is free.

        The owner makes the leases name ``target``.
        """
        key = self._key(source)
        self.keys[target] = key
        self.where[key] = target
        self.state[target] = READY
        self.promoting -= 1
        self.holds[target], self.holds[source] = self.holds[source], 0
        self.leased[Tier.HOST] -= 1
        self.leased[Tier.DEVICE] += 1
        self._release_slot(source)

    # Use.

    def touch(self, slots: Sequence[int]) -> None:
        """These blocks (all different) are used; the last of ``slots`` is the most recent one.

        Leased blocks get their new place when the last lease ends, staged ones when published,
        arriving ones when they arrive.
        """
        evictable = []
        for slot in slots:
            if self.state[slot] == READY:
                if not self.holds[slot]:
                    self._remove_one(slot)
                    evictable.append(slot)
            elif self.state[slot] == ARRIVING and self.stamp[slot] != UNPLACED:
                self.recency.remove(0, slot)
                self.stamp[slot] = UNPLACED
        self._append(evictable)

    def hold(self, slots: Sequence[int]) -> None:
        """Lease ready blocks once for each time they are named."""
        holds = self.holds
        fresh = []
        for slot in slots:
            if not holds[slot]:
                fresh.append(slot)
            holds[slot] += 1
        self.recency.remove_all(0, fresh)
        for tier, part in zip(Tier, self._by_tier(fresh), strict=True):
            self.order.remove_all(tier, part)
            self.leased[tier] += len(part)

    def unhold(self, slots: Sequence[int], *, zombie: bool) -> None:
        """End leases; blocks without any are the most recently used, the last of ``slots`` most.

        ``zombie``: they were cleared since they were leased, so their slots become free.
        """
        holds = self.holds
        loose = []
        for slot in slots:
            holds[slot] -= 1
            if not holds[slot]:
                loose.append(slot)
        counts = self.zombies if zombie else self.leased
        for tier, part in zip(Tier, self._by_tier(loose), strict=True):
            counts[tier] -= len(part)
        if zombie:
            for slot in loose:
                self._release_slot(slot)
        else:
            self._append(loose)

    def clear(self) -> dict[bytes, int]:
        """Forget all keys at once, in O(1).

        Evictable slots are free, leased ones zombies, and slots being written stay with their
        jobs. Returns the old ``where``, for the caller to destroy outside the lock.
        """
        old, self.where = self.where, {}
        self.recency.reset(0)
        for tier in Tier:
            self.order.splice(tier, FREE_RING[tier])
            self.zombies[tier] += self.leased[tier]
            self.leased[tier] = 0
        return old

    # Inner parts.

    def _next_generation(self, slot: int) -> int:
        self.last_generation += 1
        self.generation[slot] = self.last_generation
        return self.last_generation

    def _by_tier(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        border = self.device_slots
        return [slot for slot in slots if slot < border], [slot for slot in slots if slot >= border]

    def _append(self, slots: Sequence[int]) -> None:
        stamp, clock = self.stamp, self.clock
        for slot in slots:
            clock += 1
            stamp[slot] = clock
        self.clock = clock
        self.recency.extend(0, slots)
        for tier, part in zip(Tier, self._by_tier(slots), strict=True):
            self.order.extend(tier, part)

    def _remove_one(self, slot: int) -> None:
        self.order.remove(self.tier(slot), slot)
        self.recency.remove(0, slot)

    def _key(self, slot: int) -> bytes:
        key = self.keys[slot]
        if key is None:
            raise KeyError(f"slot {slot} holds no key")
        return key

    def _forget(self, slot: int) -> bytes:
        key = self._key(slot)
        del self.where[key]
        return key

    def _release_slot(self, slot: int) -> None:
        ring = FREE_RING[self.tier(slot)]
        self.state[slot] = FREE
        self.keys[slot] = None
        # At the front: the slot used last is the one most likely to be in a cache.
        self.order.insert_after(ring, self.order.sentinel(ring), slot)

    def _host_predecessor(self, slot: int) -> int:
        """The node of the host ring behind which the arriving ``slot`` belongs.

        When it was chosen it was the least recently used of all device blocks, so what stands
        before it in the recency order is host blocks, other arrivals and failed demotions. The
        search goes both ways at once, hence its cost is the smaller part into which ``slot``
        splits a run of arrivals: one step when they arrive in order or in the reverse order, and
        log(n) steps on average in the worst order of n arrivals.
        """
        recency, state, border = self.recency, self.state, self.device_slots
        end = recency.sentinel(0)
        before, after = recency.preceding[slot], recency.following[slot]
        while True:
            if before == end:
                return self.order.sentinel(Tier.HOST)
            if before >= border and state[before] == READY:
                return before
            if after == end:
                return self.order.preceding[self.order.sentinel(Tier.HOST)]
            if after >= border and state[after] == READY:
                return self.order.preceding[after]
            before, after = recency.preceding[before], recency.following[after]
