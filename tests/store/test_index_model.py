# SPDX-License-Identifier: Apache-2.0
"""The index against a naive model with plain lists, over random histories."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_support import DEVICE, HOST, key, keys

from xinference_xavier.store import index as index_module
from xinference_xavier.store.index import SkipReason, SnapshotIndex
from xinference_xavier.store.jobs import Tier

names = st.lists(st.integers(0, 13), min_size=1, max_size=7)
pick = st.integers(0, 1_000_000)
rows = st.sets(st.integers(0, 6), max_size=3)
readers = st.sampled_from([None, "peer-a", "peer-b"])


@dataclass(eq=False)
class Block:
    name: int
    tier: Tier
    phase: str = "staging"
    holds: int = 0
    used_by: object = None
    """The batch that used it last, as long as nothing else has."""


@dataclass(eq=False)
class ModelJob:
    job_id: int
    moved: list[Block] = field(default_factory=list)
    stored: list[tuple[Block, int]] = field(default_factory=list)
    stale: bool = False


@dataclass(eq=False)
class ModelLease:
    lease_id: int
    reader: str | None
    blocks: list[Block]
    expires: float


class IndexMachine(RuleBasedStateMachine):
    released_at_once = index_module.RELEASE_BLOCKS

    @initialize(
        device=st.integers(0, 4),
        capacity=st.integers(0, 5),
        spare=st.integers(0, 3),
        share=st.sampled_from([0.25, 0.5, 1.0]),
    )
    def start(self, device: int, capacity: int, spare: int, share: float) -> None:
        self.index = SnapshotIndex(
            device_slots=device, host_slots=capacity + spare, spare_slots=spare, reader_share=share
        )
        self.capacity = (device, capacity)
        self.share = max(1, int(sum(self.capacity) * share))
        self.free = [device, capacity + spare]
        self.blocks: dict[int, Block] = {}
        self.recent: list[Block] = []
        self.zombies: set[Block] = set()
        self.jobs: list[ModelJob] = []
        self.leases: list[ModelLease] = []
        self.now = 0.0
        # Runs are short here: a lease of more than two blocks ends in pieces.
        index_module.RELEASE_BLOCKS = 2

    # The model's own parts.

    def ready(self, tier: Tier) -> list[Block]:
        return [b for b in self.blocks.values() if b.phase == "ready" and b.tier is tier]

    def evictable(self, tier: Tier) -> list[Block]:
        return [b for b in self.recent if b.phase == "ready" and b.tier is tier]

    def zombies_in(self, tier: Tier) -> int:
        return sum(block.tier is tier for block in self.zombies)

    def use(self, block: Block, by: object = None) -> None:
        if block in self.recent:
            self.recent.remove(block)
        self.recent.append(block)
        block.used_by = by

    def give_up(self, block: Block) -> None:
        del self.blocks[block.name]
        if block in self.recent:
            self.recent.remove(block)
        self.free[block.tier] += 1

    def make_host_room(self, job: ModelJob, arrived: int, removed: list[bytes]) -> bool:
        if len(self.ready(HOST)) + self.zombies_in(HOST) + arrived < self.capacity[HOST]:
            return True
        victims = self.evictable(HOST)
        if not victims or victims[0].used_by is job:
            return False
        removed.append(key(victims[0].name))
        self.give_up(victims[0])
        return True

    def end(self, lease: ModelLease) -> None:
        self.leases.remove(lease)
        for block in reversed(lease.blocks):
            block.holds -= 1
            if block.holds:
                continue
            if block in self.zombies:
                self.zombies.remove(block)
                self.free[block.tier] += 1
            else:
                self.use(block)

    # Rules: the index and the model do the same.

    @rule(batch=names)
    def admit(self, batch: list[int]) -> None:
        job = ModelJob(0)
        for name in reversed(batch):
            block = self.blocks.get(name)
            if block and block.phase == "ready" and not block.holds:
                self.use(block, job)
            elif block and block.phase == "arriving" and block in self.recent:
                self.recent.remove(block)
        held, removed, skipped = [], [], Counter()
        for position, name in enumerate(batch):
            if name in self.blocks:
                held.append(position)
                continue
            victims = [b for b in self.evictable(DEVICE) if b.used_by is not job]
            leased = sum(block.holds > 0 for block in self.ready(HOST))
            host_takes = leased + self.zombies_in(HOST) < self.capacity[HOST]
            after = -1
            if self.free[DEVICE]:
                tier = DEVICE
            elif victims and host_takes and self.free[HOST]:
                tier, after = DEVICE, len(job.moved)
                job.moved.append(victims[0])
                victims[0].phase, victims[0].tier = "arriving", HOST
                self.free[DEVICE] += 1
                self.free[HOST] -= 1
            elif victims:
                tier = DEVICE
                removed.append(key(victims[0].name))
                self.give_up(victims[0])
            elif host_takes and self.free[HOST]:
                tier = HOST
            else:
                if not self.capacity[HOST]:
                    reason = SkipReason.DEVICE_BUSY if self.capacity[0] else SkipReason.NO_TIER
                else:
                    reason = SkipReason.HOST_BUSY if host_takes else SkipReason.HOST_LEASED
                skipped[reason] += 1
                continue
            self.free[tier] -= 1
            self.blocks[name] = Block(name, tier)
            job.stored.append((self.blocks[name], after))
        plan = self.index.admit([(key(name), name) for name in batch])
        assert plan.keys == [key(block.name) for block, _ in job.stored]
        assert [(block_id, tier, after) for block_id, tier, _, _, after in plan.stores] == [
            (block.name, block.tier, after) for block, after in job.stored
        ]
        assert len(plan.demotions) == len(job.moved)
        for _, tier, slot, _, after in plan.stores:
            assert after < 0 or (tier, slot) == (DEVICE, plan.demotions[after][0])
        assert (plan.held, plan.removed, plan.skipped) == (held, removed, skipped)
        assert bool(plan.job_id) == bool(job.stored)
        if plan.job_id:
            job.job_id = plan.job_id
            self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(which=pick, bad_moves=rows, bad_stores=rows)
    def commit(self, which: int, bad_moves: set[int], bad_stores: set[int]) -> None:
        job = self.jobs.pop(which % len(self.jobs))
        bad_moves = {row for row in bad_moves if row < len(job.moved)}
        bad_stores = {row for row in bad_stores if row < len(job.stored)}
        changes = self.index.commit(
            job.job_id, failed_demotions=bad_moves, failed_stores=bad_stores
        )
        added: list[bytes] = []
        removed: list[bytes] = []
        if job.stale:
            for block in [*job.moved, *(block for block, _ in job.stored)]:
                self.free[block.tier] += 1
            assert (changes.added, changes.removed) == ([], [])
            return
        for row in sorted(bad_moves):
            block = job.moved[row]
            block.phase, block.tier = "ready", DEVICE
            self.free[HOST] += 1
            self.free[DEVICE] -= 1
            if block not in self.recent:
                self.use(block)
        for block, after in job.stored:
            if after in bad_moves:
                self.give_up(block)
        for row, block in enumerate(job.moved):
            if row in bad_moves:
                continue
            if self.make_host_room(job, 0, removed):
                block.phase = "ready"
                if block not in self.recent:
                    self.use(block)
            else:
                removed.append(key(block.name))
                self.give_up(block)
        good: list[Block] = []
        for row, (block, after) in enumerate(job.stored):
            if after in bad_moves:
                continue
            arrived = sum(other.tier is HOST for other in good)
            if row in bad_stores:
                self.give_up(block)
            elif block.tier is DEVICE or self.make_host_room(job, arrived, removed):
                good.append(block)
            else:
                self.give_up(block)
        for block in reversed(good):
            block.phase = "ready"
            self.use(block)
        added = [key(block.name) for block in good]
        assert (changes.added, changes.removed) == (added, removed)

    @rule(run=names, reader=readers, duration=st.floats(0.5, 20.0))
    def acquire(self, run: list[int], reader: str | None, duration: float) -> None:
        shared = {block for le in self.leases if le.reader == reader for block in le.blocks}
        granted: list[Block] = []
        for name in run:
            block = self.blocks.get(name)
            if block is None or block.phase != "ready":
                break
            if reader is not None and block not in shared and len(shared) == self.share:
                break
            shared.add(block)
            granted.append(block)
        grant = self.index.acquire(
            keys(run), reader=reader, request="r", now=self.now, duration=duration
        )
        assert [row[0] for row in grant.rows] == [block.tier for block in granted]
        assert bool(grant.lease_id) == bool(granted)
        for block in granted:
            block.holds += 1
            if block in self.recent:
                self.recent.remove(block)
        if granted:
            expires = self.now + duration
            self.leases.append(ModelLease(grant.lease_id, reader, granted, expires))

    @precondition(lambda self: self.leases)
    @rule(which=pick)
    def release(self, which: int) -> None:
        lease = self.leases[which % len(self.leases)]
        self.end(lease)
        assert self.index.release(lease.lease_id) is True
        assert self.index.release(lease.lease_id) is False

    @precondition(lambda self: self.leases)
    @rule(which=pick, duration=st.floats(0.5, 20.0))
    def renew(self, which: int, duration: float) -> None:
        lease = self.leases[which % len(self.leases)]
        lease.expires = max(lease.expires, self.now + duration)
        assert self.index.renew(lease.lease_id, now=self.now, duration=duration)

    @rule(passed=st.floats(0.0, 15.0))
    def reap(self, passed: float) -> None:
        self.now += passed
        expired = [lease for lease in self.leases if lease.expires <= self.now]
        assert self.index.reap(self.now) == len(expired)
        for lease in sorted(expired, key=lambda one: (one.expires, one.lease_id)):
            self.end(lease)

    @rule()
    def clear(self) -> None:
        self.zombies |= {block for block in self.blocks.values() if block.holds}
        for block in self.recent:
            if block.phase == "ready":
                self.free[block.tier] += 1
        self.blocks, self.recent = {}, []
        for job in self.jobs:
            job.stale = True
        self.index.clear()

    @rule(limit=st.integers(1, 12))
    def snapshot(self, limit: int) -> None:
        found: list[bytes] = []
        cursor: int | None = 0
        while cursor is not None:
            page, cursor = self.index.snapshot(cursor, limit)
            found += page
        readable = [key(b.name) for tier in Tier for b in self.ready(tier)]
        assert sorted(found) == sorted(readable)

    @invariant()
    def agree(self) -> None:
        self.index.check_invariants()
        counters = self.index.counters()
        assert (counters.device_blocks, counters.host_blocks) == (
            len(self.ready(DEVICE)),
            len(self.ready(HOST)),
        )
        assert [counters.device_free, counters.host_free] == self.free
        assert counters.zombies == len(self.zombies)
        assert counters.leases == len(self.leases)
        assert counters.jobs == len(self.jobs)
        table = self.index._table
        order = [table.keys[slot] for slot in table.recency.walk(0)]
        assert order == [key(block.name) for block in self.recent]

    def teardown(self) -> None:
        index_module.RELEASE_BLOCKS = self.released_at_once
        if hasattr(self, "index"):
            final = asdict(self.index.close())
            del final["reached"]
            assert not any(final.values()), final


IndexMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestIndexAgainstModel = IndexMachine.TestCase
