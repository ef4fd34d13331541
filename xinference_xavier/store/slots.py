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

import secrets
from array import array
from collections.abc import Sequence
from itertools import repeat

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.order import Rings

FREE, STAGING, ARRIVING, READY, PROMOTED = range(5)

DEVICE, HOST = Tier
"""Names of their own: an enum's members are slow to get at."""

FREE_RING = (2, 3)
"""Ring of the free slots of each tier; the ring of its evictable blocks is the tier itself."""

UNPLACED = 0
"""``stamp`` of an arriving block that was used meanwhile: it will be the most recent one."""


class SlotTable:
    """Slots of both tiers with their keys, generations, leases counts and orders.

    About 230 bytes per slot in use, the key's own bytes and the dict's share included.
    """

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.device_slots = device_slots
        self.slots = device_slots + host_slots
        names = range(self.slots)
        shared = list(names)
        self.where: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * self.slots
        self.state = bytearray(self.slots)
        # A list, since it is read and written for every block that is leased: an ``array`` takes
        # half the memory and three times as long.
        self.holds = [0] * self.slots
        self.generation = array("q", repeat(0, self.slots))
        self.stamp = array("q", repeat(0, self.slots))
        self.order = Rings(shared, 4)
        self.recency = Rings(shared, 1)
        self.order.extend(FREE_RING[DEVICE], shared[:device_slots])
        self.order.extend(FREE_RING[HOST], shared[device_slots:])
        self.leased = [0, 0]
        self.zombies = [0, 0]
        self.staging = 0
        self.arriving = 0
        self.promoting = 0
        self.clock = 0
        # From anywhere, so that a reader that reaches the slots of another process or of another
        # life by mistake does not find the generation it was promised.
        self.last_generation = secrets.randbits(62)

    # What there is.

    def tier(self, slot: int) -> Tier:
        """The tier that ``slot`` is in."""
        return DEVICE if slot < self.device_slots else HOST

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

    def victims(self, tier: Tier, most: int, *, before: int | None = None) -> list[int]:
        """The ``most`` least recently used evictable blocks of ``tier``, the first one first.

        With ``before`` only those whose last use has a lower number than that.
        """
        found, stamp = self.order.first_of(tier, most), self.stamp
        while before is not None and found and stamp[found[-1]] >= before:
            found.pop()
        return found

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

    def take(self, tier: Tier, most: int = 1) -> list[int]:
        """Take free slots of ``tier``, at most ``most``; the caller gives them content at once."""
        return self.order.pop(FREE_RING[tier], most)

    def stage(self, slots: Sequence[int], keys: Sequence[bytes]) -> range:
        """Let each key be written into its slot, just taken; returns the new generations."""
        state, mine, generation = self.state, self.keys, self.generation
        numbers = self._next_generations(len(slots))
        for slot, key, number in zip(slots, keys, numbers, strict=True):
            state[slot] = STAGING
            mine[slot] = key
            generation[slot] = number
        self.where.update(zip(keys, slots, strict=True))
        self.staging += len(slots)
        return numbers

    def publish(self, slots: list[int]) -> None:
        """Staged blocks become ready; the last of ``slots`` is the most recently used."""
        state = self.state
        for slot in slots:
            state[slot] = READY
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
        self._release([slot])

    def evict(self, slots: list[int]) -> list[bytes]:
        """Evictable blocks of one tier go; returns their keys."""
        if not slots:
            return []
        gone = [self._forget(slot) for slot in slots]
        self.order.remove_all(self.tier(slots[0]), slots)
        self.recency.remove_all(0, slots)
        self._release(slots)
        return gone

    # Demotion: the block's place in the recency order waits in its target slot.

    def demote(self, sources: Sequence[int], targets: Sequence[int]) -> range:
        """Move evictable device blocks towards ``targets``, just taken.

        The sources leave every order and are the caller's. Returns the targets' generations.
        """
        state, stamp, keys, generation = self.state, self.stamp, self.keys, self.generation
        self.order.remove_all(DEVICE, sources)
        self.recency.replace_all(sources, targets)
        numbers = self._next_generations(len(targets))
        moved = [self._key(source) for source in sources]
        for source, target, key, number in zip(sources, targets, moved, numbers, strict=True):
            stamp[target] = stamp[source]
            state[target] = ARRIVING
            keys[target] = key
            generation[target] = number
        self.where.update(zip(moved, targets, strict=True))
        self.arriving += len(targets)
        return numbers

    def arrive(self, slots: Sequence[int]) -> None:
        """Arriving blocks become ready, at their old places; cheap where these are ascending."""
        order, state, stamp, following = self.order, self.state, self.stamp, self.order.following
        end = before = order.sentinel(HOST)
        self.arriving -= len(slots)
        for slot in slots:
            state[slot] = READY
            mine = stamp[slot]
            if mine == UNPLACED:
                self._append([slot])
                continue
            after = following[before]
            if before == end or stamp[before] > mine or (after != end and stamp[after] < mine):
                before = self._host_predecessor(slot)
            order.insert_after(HOST, before, slot)
            before = slot

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
        before = end = order.sentinel(DEVICE)
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
                order.insert_after(DEVICE, before, source)
                self.recency.replace_all([target], [source])
                before = source
            self.reclaim(target)

    # Promotion: the block stays where it is until its copy is good.

    def copy_to(self, slot: int) -> int:
        """Let a copy of a leased host block be written into a device slot, just taken.

        Returns the new generation.
        """
        self.state[slot] = PROMOTED
        self.promoting += 1
        [number] = self._next_generations(1)
        self.generation[slot] = number
        return number

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
        self.leased[HOST] -= 1
        self.leased[DEVICE] += 1
        self._release([source])

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
            before = holds[slot]
            if not before:
                fresh.append(slot)
            holds[slot] = before + 1
        self.recency.remove_all(0, fresh)
        for tier, part in self._by_tier(fresh):
            self.order.remove_all(tier, part)
            self.leased[tier] += len(part)

    def unhold(self, slots: Sequence[int], *, zombie: bool) -> None:
        """End leases; blocks without any are the most recently used, the last of ``slots`` most.

        ``zombie``: they were cleared since they were leased, so their slots become free.
        """
        holds = self.holds
        loose = []
        for slot in slots:
            left = holds[slot] = holds[slot] - 1
            if not left:
                loose.append(slot)
        counts = self.zombies if zombie else self.leased
        for tier, part in self._by_tier(loose):
            counts[tier] -= len(part)
        if zombie:
            self._release(loose)
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

    def _next_generations(self, count: int) -> range:
        first = self.last_generation + 1
        self.last_generation += count
        return range(first, first + count)

    def _by_tier(self, slots: list[int]) -> list[tuple[Tier, list[int]]]:
        """Split slots by tier, in their order; without tiers that have none of them."""
        border = self.device_slots
        if not slots:
            return []
        if max(slots) < border:
            return [(DEVICE, slots)]
        if min(slots) >= border:
            return [(HOST, slots)]
        return [
            (DEVICE, [slot for slot in slots if slot < border]),
            (HOST, [slot for slot in slots if slot >= border]),
        ]

    def _append(self, slots: list[int]) -> None:
        stamp = self.stamp
        for number, slot in enumerate(slots, self.clock + 1):
            stamp[slot] = number
        self.clock += len(slots)
        self.recency.extend(0, slots)
        for tier, part in self._by_tier(slots):
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

    def _release(self, slots: list[int]) -> None:
        state, keys = self.state, self.keys
        for slot in slots:
            state[slot] = FREE
            keys[slot] = None
        # At the front: the slots used last are those most likely to be in a cache.
        for tier, part in self._by_tier(slots):
            self.order.extend_front(FREE_RING[tier], part)

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
                return self.order.sentinel(HOST)
            if before >= border and state[before] == READY:
                return before
            if after == end:
                return self.order.preceding[self.order.sentinel(HOST)]
            if after >= border and state[after] == READY:
                return self.order.preceding[after]
            before, after = recency.preceding[before], recency.following[after]
