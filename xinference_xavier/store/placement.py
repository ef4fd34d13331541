# SPDX-License-Identifier: Apache-2.0
"""Where new blocks go, what makes room for them, and what becomes of it. No lock, no leases.

The rules are those of the store's design: device first; then a demotion; then a drop; then the
host tier; else skipped. Nothing that readers can get is given up before its copy has succeeded,
except in a drop, which has no copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.records import Admission, Changes, SkipReason, Totals
from xinference_xavier.store.slots import SlotTable


@dataclass(slots=True)
class Job:
    """A store job in flight, in slot numbers of the table.

    ``held_stamps`` is the half-open range of use numbers that its held blocks got: as long as a
    block's number is in it, this batch is the last thing that used the block.
    """

    epoch: int
    held_stamps: tuple[int, int]
    demotions: list[tuple[int, int, int]] = field(default_factory=list)
    """Source, target, old generation of the source."""
    stores: list[tuple[int, int]] = field(default_factory=list)
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
        if tier is Tier.DEVICE:
            return self.limits[tier] - table.device_slots + table.free(tier)
        return self.limits[tier] - table.ready(tier) - table.zombies[tier]

    def trim(self, most: int) -> list[bytes]:
        """Evict what is above the limits, at most ``most`` blocks; returns their keys.

        The least recently used ones of each tier, without a copy.
        """
        table = self.table
        removed: list[bytes] = []
        if self.room(Tier.DEVICE) >= 0 and self.room(Tier.HOST) >= 0:
            return removed
        for tier in Tier:
            for _ in range(min(-self.room(tier), most - len(removed))):
                victim = table.victim(tier)
                if victim is None:
                    break
                removed.append(table.evict(victim))
        self.totals.limit_evictions += len(removed)
        return removed

    def plan(self, blocks: Sequence[tuple[bytes, int]], epoch: int) -> Admission:
        """See ``SnapshotIndex.admit``; the blocks are valid."""
        table, where, totals = self.table, self.table.where, self.totals
        first_use = table.clock + 1
        held = dict.fromkeys(where[key] for key, _ in blocks if key in where)
        table.touch(list(reversed(held)))
        job = Job(epoch, (first_use, table.clock + 1))
        plan = Admission(self._last_job + 1, [], [], [], [], {}, [])
        for position, (key, block_id) in enumerate(blocks):
            if key in where:
                plan.held.append(position)
                continue
            slot, after = self._make_place(job, plan)
            if slot is None:
                reason = self._why_skipped()
                plan.skipped[reason] = plan.skipped.get(reason, 0) + 1
                self.skips[reason] = self.skips.get(reason, 0) + 1
                continue
            generation = table.stage(slot, key)
            job.stores.append((slot, after))
            plan.stores.append((block_id, table.tier(slot), table.local(slot), generation, after))
            plan.keys.append(key)
        totals.held += len(plan.held)
        if not job.stores:
            return dataclasses.replace(plan, job_id=0)
        self._last_job = plan.job_id
        self.jobs[plan.job_id] = job
        return plan

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
        _check_rows(job_id, "demotion", failed_demotions | unsure_demotions, len(job.demotions))
        _check_rows(job_id, "store", failed_stores, len(job.stores))
        del self.jobs[job_id]
        if job.epoch != epoch:
            self._abort(job)
            return Changes([], [])
        removed: list[bytes] = []
        failed_demotions -= unsure_demotions
        unsure_stores = {n for n, (_, after) in enumerate(job.stores) if after in unsure_demotions}
        self._finish_demotions(job, failed_demotions, unsure_demotions, removed)
        added = self._finish_stores(job, failed_demotions, failed_stores | unsure_stores, removed)
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

    def _make_place(self, job: Job, plan: Admission) -> tuple[int | None, int]:
        """A slot for one new block, and the index of the demotion that has to empty it, or -1."""
        table = self.table
        room = self.room(Tier.DEVICE)
        if room > 0:
            return table.take(Tier.DEVICE), -1
        victim = table.victim(Tier.DEVICE) if room == 0 else None
        if victim is not None and table.stamp[victim] >= job.held_stamps[0]:
            # All evictable blocks are held for this batch: what was reported held must stay.
            victim = None
        target = table.take(Tier.HOST) if self._host_takes_blocks() else None
        if victim is None:
            return target, -1
        if target is None:
            plan.removed.append(table.evict(victim))
            self.totals.drops += 1
            return table.take(Tier.DEVICE), -1
        job.demotions.append((victim, target, table.generation[victim]))
        generation = table.demote(victim, target)
        plan.demotions.append((victim, table.local(target), generation))
        return victim, len(job.demotions) - 1

    def _host_takes_blocks(self) -> bool:
        """Whether a block that arrives in the host tier will find room, as far as one sees now."""
        table = self.table
        fixed = table.leased[Tier.HOST] + table.zombies[Tier.HOST]
        return fixed < self.limits[Tier.HOST]

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
        room = self.room(Tier.HOST) - arrived
        if room > 0:
            return True
        victim = table.victim(Tier.HOST) if room == 0 else None
        first, end = job.held_stamps
        if victim is None or first <= table.stamp[victim] < end:
            self.totals.arrival_drops += 1
            return False
        removed.append(table.evict(victim))
        self.totals.evictions += 1
        return True

    def _finish_demotions(
        self, job: Job, failed: Collection[int], unsure: Collection[int], removed: list[bytes]
    ) -> None:
        table, totals = self.table, self.totals
        table.restore([move for row, move in enumerate(job.demotions) if row in failed])
        totals.failed_demotions += len(failed) + len(unsure)
        for row, (_, target, _) in enumerate(job.demotions):
            if row in failed:
                continue
            if row in unsure:
                removed.append(table.lose(target))
            elif self._make_host_room(job, 0, removed):
                table.arrive(target)
                totals.demotions += 1
            else:
                removed.append(table.lose(target))

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
            elif table.tier(slot) is Tier.DEVICE:
                good.append(slot)
            elif self._make_host_room(job, arrived, removed):
                good.append(slot)
                arrived += 1
            else:
                table.abandon(slot)
        # Where a limit was lowered meanwhile: the blocks that came back, then the prefix's end.
        removed += self.trim(len(failed_demotions))
        above = -self.room(Tier.DEVICE)
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
