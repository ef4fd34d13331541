# SPDX-License-Identifier: Apache-2.0
"""Where new blocks go, what makes room for them, and what becomes of it. No lock, no leases.

The rules are those of the store's design: device first; then a demotion; then a drop; then the
host tier; else skipped. Nothing that readers can get is given up before its copy has succeeded,
except in a drop, which has no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.records import Admission, Changes, SkipReason, Totals
from xinference_xavier.store.slots import DEVICE, HOST, UNPLACED, SlotTable


@dataclass(slots=True)
class Job:
    """A store job in flight, in slot numbers of the table.

    ``held_stamps`` is the half-open range of use numbers that its held blocks got: as long as a
    block's number is in it, this batch is the last thing that used the block.
    """

    epoch: int
    held_stamps: tuple[int, int]
    demotions: list[tuple[int, int, int]]
    """Source, target, old generation of the source."""
    stores: list[tuple[int, int]]
    """Slot, index of the demotion it depends on or -1."""


class Placement:
    """Plans jobs on a slot table and applies their outcomes.

    ``limits`` are the most blocks that each tier may hold; into the host slots beyond that,
    blocks arrive while the tier is full. What was leased or in flight when a limit was lowered
    may keep its tier above it; then no block of that tier is evictable, unless :meth:`trim` has
    yet to catch up.
    """

    def __init__(self, table: SlotTable, limits: tuple[int, int], totals: Totals) -> None:
        self.table = table
        self.limits = limits
        self.totals = totals
        self.skips: dict[SkipReason, int] = {}
        self.jobs: dict[int, Job] = {}
        self._last_job = 0

    def room(self, tier: Tier) -> int:
        """How many more blocks the tier may hold; negative while it is above its limit.

        Blocks on their way into the host tier are not counted: they are in spare slots.
        """
        table = self.table
        if tier is DEVICE:
            return self.limits[0] - table.device_slots + table.free(tier)
        return self.limits[1] - table.ready(tier) - table.zombies[1]

    def trim(self, most: int) -> list[bytes]:
        """Evict what is above the limits, at most ``most`` blocks; returns their keys.

        The least recently used ones of each tier, without a copy.
        """
        table = self.table
        removed: list[bytes] = []
        if self.room(DEVICE) >= 0 and self.room(HOST) >= 0:
            return removed
        for tier in Tier:
            above = min(-self.room(tier), most - len(removed))
            removed += table.evict(table.victims(tier, above))
        self.totals.limit_evictions += len(removed)
        return removed

    def plan(self, blocks: Sequence[tuple[bytes, int]], epoch: int) -> Admission:
        """See ``SnapshotIndex.admit``; the blocks are valid."""
        table, where = self.table, self.table.where
        held: list[int] = []
        again: list[int] = []
        new: dict[bytes, int] = {}
        for position, (key, block_id) in enumerate(blocks):
            if key in where:
                held.append(position)
            elif key in new:
                again.append(position)
            else:
                new[key] = block_id
        first_use = table.clock + 1
        if held:
            table.touch(list(dict.fromkeys(where[blocks[row][0]] for row in held))[::-1])
        held_stamps = (first_use, table.clock + 1)
        free, victims, targets = self._find_places(len(new), first_use)
        keys = list(new)
        skipped: dict[SkipReason, int] = {}
        placed = len(free) + max(len(victims), len(targets))
        if placed < len(keys):
            lost = set(keys[placed:])
            skipped = self._skip(len(lost) + sum(blocks[row][0] in lost for row in again))
            again = [row for row in again if blocks[row][0] not in lost]
            del keys[placed:]
        if again:
            held = sorted(held + again)
        self.totals.held += len(held)
        if not keys:
            return Admission(0, [], [], [], held, skipped, [])
        # Victims beyond the targets are dropped, targets beyond the victims filled from vLLM.
        moves = min(len(victims), len(targets))
        moved, filled = targets[:moves], targets[moves:]
        removed: list[bytes] = []
        if len(victims) > moves:
            removed = table.evict(victims[moves:])
            self.totals.drops += len(removed)
            victims[moves:] = table.take(DEVICE, len(removed))
        old = [table.generation[victim] for victim in victims[:moves]]
        arrivals = table.demote(victims[:moves], moved)
        slots = free + victims + filled
        generations = table.stage(slots, keys)
        afters = [-1] * len(slots)
        afters[len(free) : len(free) + moves] = range(moves)
        job_id = self._last_job = self._last_job + 1
        self.jobs[job_id] = Job(
            epoch,
            held_stamps,
            list(zip(victims, moved, old, strict=False)),
            list(zip(slots, afters, strict=True)),
        )
        border = table.device_slots
        tiers = [DEVICE] * (len(slots) - len(filled)) + [HOST] * len(filled)
        local = free + victims + [slot - border for slot in filled]
        return Admission(
            job_id,
            list(zip(victims, [slot - border for slot in moved], arrivals, strict=False)),
            list(zip(new.values(), tiers, local, generations, afters, strict=False)),
            keys,
            held,
            skipped,
            removed,
        )

    def finish(
        self,
        job_id: int,
        epoch: int,
        failed_demotions: frozenset[int],
        failed_stores: frozenset[int],
        unsure_demotions: frozenset[int],
    ) -> Changes:
        """See ``SnapshotIndex.commit``."""
        job = self.jobs.get(job_id)
        if job is None:
            raise ValueError(f"job {job_id} is unknown, or was committed already")
        _check_rows(job_id, "demotion", failed_demotions, len(job.demotions))
        _check_rows(job_id, "demotion", unsure_demotions, len(job.demotions))
        _check_rows(job_id, "store", failed_stores, len(job.stores))
        del self.jobs[job_id]
        if job.epoch != epoch:
            self._abort(job)
            return Changes([], [])
        removed: list[bytes] = []
        failed_demotions -= unsure_demotions
        if unsure_demotions:
            failed_stores |= {
                row for row, (_, after) in enumerate(job.stores) if after in unsure_demotions
            }
        self._finish_demotions(job, failed_demotions, unsure_demotions, removed)
        added = self._finish_stores(job, failed_demotions, failed_stores, removed)
        return Changes(added, removed)

    def give_up(self, job_id: int, epoch: int) -> Changes:
        """See ``SnapshotIndex.abandon``."""
        job = self.jobs.get(job_id)
        moves, stores = (len(job.demotions), len(job.stores)) if job is not None else (0, 0)
        return self.finish(
            job_id, epoch, frozenset(), frozenset(range(stores)), frozenset(range(moves))
        )

    def abort_all(self) -> None:
        """Give up every job in flight, after the table was cleared."""
        while self.jobs:
            self._abort(self.jobs.popitem()[1])

    # Inner parts.

    def _find_places(self, count: int, first_use: int) -> tuple[list[int], list[int], list[int]]:
        """Free device slots, device victims and host slots for ``count`` new blocks, or fewer.

        Each kind holds as many as are left over by the one before, the last two together: a
        victim goes to a host slot as long as there are both. Blocks used from ``first_use`` on
        are no victims: what was reported held must stay. Nor are any above the tier's limit.
        """
        table = self.table
        room = self.room(DEVICE)
        free = table.take(DEVICE, min(count, room)) if room > 0 else []
        left = count - len(free)
        if not left:
            return free, [], []
        victims = table.victims(DEVICE, left, before=first_use) if room >= 0 else []
        targets = table.take(HOST, left) if self._host_takes_blocks() else []
        return free, victims, targets

    def _skip(self, count: int) -> dict[SkipReason, int]:
        """Count new blocks that found no place."""
        reason = self._why_skipped()
        self.skips[reason] = self.skips.get(reason, 0) + count
        return {reason: count}

    def _host_takes_blocks(self) -> bool:
        """Whether a block that arrives in the host tier will find room, as far as one sees now."""
        table = self.table
        fixed = table.leased[HOST] + table.zombies[HOST]
        return fixed < self.limits[HOST]

    def _why_skipped(self) -> SkipReason:
        device, host = self.limits
        if not host:
            return SkipReason.DEVICE_BUSY if device else SkipReason.NO_TIER
        return SkipReason.HOST_BUSY if self._host_takes_blocks() else SkipReason.HOST_LEASED

    def _make_host_room(self, job: Job, arrived: int, removed: list[bytes]) -> bool:
        """Whether one more block may become ready in the host tier, after evicting one if needed.

        ``arrived`` blocks have been promised room but are not ready yet.
        """
        table = self.table
        room = self.room(HOST) - arrived
        if room > 0:
            return True
        victim = table.victim(HOST) if room == 0 else None
        first, end = job.held_stamps
        if victim is None or first <= table.stamp[victim] < end:
            self.totals.arrival_drops += 1
            return False
        removed += table.evict([victim])
        self.totals.evictions += 1
        return True

    def _finish_demotions(
        self, job: Job, failed: Collection[int], unsure: Collection[int], removed: list[bytes]
    ) -> None:
        table, totals = self.table, self.totals
        if failed:
            table.restore([move for row, move in enumerate(job.demotions) if row in failed])
        totals.failed_demotions += len(failed) + len(unsure)
        targets = [target for _, target, _ in job.demotions]
        if not failed and not unsure and self._arrive_together(targets, removed):
            return
        for row, target in enumerate(targets):
            if row in failed:
                continue
            if row in unsure:
                removed.append(table.lose(target))
            elif self._make_host_room(job, 0, removed):
                table.arrive([target])
                totals.demotions += 1
            else:
                removed.append(table.lose(target))

    def _arrive_together(self, targets: Sequence[int], removed: list[bytes]) -> bool:
        """Let blocks arrive that evict nothing but host blocks older than they all are.

        False, and nothing is done, where one of them might go for another, or find no room.
        """
        table = self.table
        oldest = min(map(table.stamp.__getitem__, targets), default=UNPLACED)
        room = self.room(HOST)
        if oldest == UNPLACED or room < 0:
            return False
        victims = table.victims(HOST, len(targets) - room, before=oldest)
        if len(victims) < len(targets) - room:
            return False
        removed += table.evict(victims)
        table.arrive(targets)
        self.totals.evictions += len(victims)
        self.totals.demotions += len(targets)
        return True

    def _finish_stores(
        self,
        job: Job,
        failed_demotions: Collection[int],
        failed: Collection[int],
        removed: list[bytes],
    ) -> list[bytes]:
        """Publish the stores that count; returns their keys."""
        table, totals = self.table, self.totals
        good: list[int] = []
        arrived = 0
        for row, (slot, after) in enumerate(job.stores):
            if after in failed_demotions:
                totals.failed_stores += 1  # ``restore`` gave its slot back to the old block.
            elif row in failed:
                totals.failed_stores += 1
                table.abandon(slot)
            elif slot < table.device_slots:
                good.append(slot)
            elif self._make_host_room(job, arrived, removed):
                good.append(slot)
                arrived += 1
            else:
                table.abandon(slot)
        # Where a limit was lowered meanwhile: the blocks that came back, then the prefix's end.
        if failed_demotions:
            removed += self.trim(len(failed_demotions))
        above = -self.room(DEVICE)
        if above > 0:
            late = set([slot for slot in good if slot < table.device_slots][-above:])
            for slot in late:
                table.abandon(slot)
            totals.limit_evictions += len(late)
            good = [slot for slot in good if slot not in late]
        table.publish(good[::-1])
        totals.admitted += len(good)
        return [key for slot in good if (key := table.keys[slot]) is not None]

    def _abort(self, job: Job) -> None:
        for slot, _ in job.stores:
            self.table.reclaim(slot)
        for _, target, _ in job.demotions:
            self.table.reclaim(target)
        self.totals.discarded += len(job.stores)


def _check_rows(job_id: int, name: str, rows: Collection[int], count: int) -> None:
    for row in rows:
        if not 0 <= row < count:
            raise ValueError(f"job {job_id} has no {name} {row}: it has {count}")
