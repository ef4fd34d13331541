# SPDX-License-Identifier: Apache-2.0
"""The index against a naive model with plain lists, over random histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from index_support import DEVICE, HOST, key, keys

from xinference_xavier.store import index as index_module
from xinference_xavier.store.index import SkipReason, SnapshotIndex, Totals
from xinference_xavier.store.jobs import Tier

names = st.lists(st.integers(0, 13), min_size=1, max_size=7)
picks = st.lists(st.integers(0, 1_000_000), min_size=1, max_size=6)
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
    stale: bool = False


@dataclass(eq=False)
class ModelPromotion:
    promotion_id: int
    lease: ModelLease
    blocks: list[Block]


class IndexMachine(RuleBasedStateMachine):
    pieces = (index_module.RELEASE_BLOCKS, index_module.TRIM_BLOCKS, index_module.TRIM_PAUSE_S)

    @initialize(
        device=st.sampled_from([0, 1, 2, 3, 4, 4]),
        capacity=st.sampled_from([0, 1, 2, 4, 5, 5]),
        spare=st.integers(0, 3),
        share=st.sampled_from([0.25, 0.5, 1.0]),
    )
    def start(self, device: int, capacity: int, spare: int, share: float) -> None:
        self.index = SnapshotIndex(
            device_slots=device, host_slots=capacity + spare, spare_slots=spare, reader_share=share
        )
        self.capacity = (device, capacity)
        self.limits = [device, capacity]
        self.reader_share = share
        self.untold: dict[bytes, None] = {}
        self.promotions: list[ModelPromotion] = []
        self.free = [device, capacity + spare]
        self.blocks: dict[int, Block] = {}
        self.recent: list[Block] = []
        self.zombies: set[Block] = set()
        self.jobs: list[ModelJob] = []
        self.leases: list[ModelLease] = []
        self.now = 0.0
        self.since_clear = 0
        # Runs are short here: what is more than two blocks is done in pieces.
        index_module.RELEASE_BLOCKS = index_module.TRIM_BLOCKS = 2
        index_module.TRIM_PAUSE_S = 0

    # The model's own parts.

    def ready(self, tier: Tier) -> list[Block]:
        return [b for b in self.blocks.values() if b.phase == "ready" and b.tier is tier]

    def evictable(self, tier: Tier) -> list[Block]:
        return [b for b in self.recent if b.phase == "ready" and b.tier is tier]

    def zombies_in(self, tier: Tier) -> int:
        return sum(block.tier is tier for block in self.zombies)

    @property
    def share(self) -> int:
        return max(1, int(sum(self.limits) * self.reader_share))

    def room(self, tier: Tier) -> int:
        if tier is DEVICE:
            return self.limits[DEVICE] - (self.capacity[DEVICE] - self.free[DEVICE])
        return self.limits[HOST] - len(self.ready(HOST)) - self.zombies_in(HOST)

    def trim(self) -> list[bytes]:
        """Evict what is above the limits."""
        gone = []
        for tier in Tier:
            while self.room(tier) < 0 and (victims := self.evictable(tier)):
                gone.append(key(victims[0].name))
                self.give_up(victims[0])
        return gone

    def told(self, removed: Collection[bytes] = ()) -> list[bytes]:
        """What a call tells that removed these keys itself."""
        told, self.untold = [*removed, *self.untold], {}
        return told

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
        room = self.room(HOST) - arrived
        if room > 0:
            return True
        victims = self.evictable(HOST)
        if room < 0 or not victims or victims[0].used_by is job:
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
        self.untold.update(dict.fromkeys(self.trim()))

    # Rules: the index and the model do the same.

    @rule(batch=names)
    def store(self, batch: list[int]) -> None:
        before = len(self.jobs)
        self.admit(batch)
        if len(self.jobs) > before:
            self.commit(before, set(), set(), False)

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
            host_takes = leased + self.zombies_in(HOST) < self.limits[HOST]
            after = -1
            if self.room(DEVICE) < 0:
                victims = []
            if self.room(DEVICE) > 0:
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
                if not self.limits[HOST]:
                    reason = SkipReason.DEVICE_BUSY if self.limits[0] else SkipReason.NO_TIER
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
        assert (plan.held, plan.skipped) == (held, skipped)
        assert plan.removed == self.told(removed)
        assert bool(plan.job_id) == bool(job.stored)
        if plan.job_id:
            job.job_id = plan.job_id
            self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(which=pick, bad_moves=rows, bad_stores=rows, abandon=st.booleans())
    def commit(self, which: int, bad_moves: set[int], bad_stores: set[int], abandon: bool) -> None:
        job = self.jobs.pop(which % len(self.jobs))
        # A row that is bad twice over is unsure.
        unsure = {row for row in range(len(job.moved)) if abandon or row in bad_moves & bad_stores}
        bad_moves = {row for row in bad_moves if row < len(job.moved)}
        bad_stores = {row for row in range(len(job.stored)) if abandon or row in bad_stores}
        changes = (
            self.index.abandon(job.job_id)
            if abandon
            else self.index.commit(
                job.job_id,
                failed_demotions=bad_moves,
                failed_stores=bad_stores,
                unsure_demotions=unsure,
            )
        )
        added: list[bytes] = []
        removed: list[bytes] = []
        if job.stale:
            for block in [*job.moved, *(block for block, _ in job.stored)]:
                self.free[block.tier] += 1
            assert (changes.added, changes.removed) == ([], self.told())
            return
        bad_moves -= unsure
        bad_stores |= {row for row, (_, after) in enumerate(job.stored) if after in unsure}
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
            if row not in unsure and self.make_host_room(job, 0, removed):
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
        removed += self.trim()
        while self.room(DEVICE) < 0 and any(block.tier is DEVICE for block in good):
            last = max(n for n, block in enumerate(good) if block.tier is DEVICE)
            self.give_up(good.pop(last))
        for block in reversed(good):
            block.phase = "ready"
            self.use(block)
        added = [key(block.name) for block in good]
        assert (changes.added, changes.removed) == (added, self.told(removed))

    @rule(which=picks, reader=readers, duration=st.floats(0.5, 20.0))
    def acquire_held(self, which: list[int], reader: str | None, duration: float) -> None:
        held = sorted(block.name for tier in Tier for block in self.ready(tier))
        if held:
            self.acquire([held[one % len(held)] for one in which], reader, duration)

    @rule(run=names, reader=readers, duration=st.floats(0.5, 20.0))
    def acquire(self, run: list[int], reader: str | None, duration: float) -> None:
        shared = {block for le in self.leases if le.reader == reader for block in le.blocks}
        granted: list[Block] = []
        for name in run:
            block = self.blocks.get(name)
            if block is None or block.phase != "ready":
                break
            if reader is not None and block not in shared and len(shared) >= self.share:
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

    @rule(device=pick | st.none(), host=pick | st.none())
    def set_limits(self, device: int | None, host: int | None) -> None:
        asked = [
            old if new is None else new % (most + 1)
            for old, new, most in zip(self.limits, (device, host), self.capacity, strict=True)
        ]
        self.limits = asked
        removed = self.trim()
        changes = self.index.set_limits(
            device_slots=None if device is None else asked[DEVICE],
            host_slots=None if host is None else asked[HOST],
        )
        assert (changes.added, changes.removed) == ([], removed)

    @rule()
    def lift_limits(self) -> None:
        self.set_limits(*self.capacity)

    @rule()
    def take_removed(self) -> None:
        assert self.index.take_removed() == self.told()

    @precondition(lambda self: self.room(DEVICE) > 0 and self.ready(HOST))
    @rule(which=picks, duration=st.floats(5.0, 20.0))
    def load(self, which: list[int], duration: float) -> None:
        """Lease host blocks and let as many of them as possible be promoted."""
        held = sorted(block.name for block in self.ready(HOST))
        self.acquire([held[one % len(held)] for one in which], None, duration)
        self.promote(len(self.leases) - 1, 0, len(which))

    @precondition(lambda self: self.leases)
    @rule(which=pick, first=st.sampled_from([0, 0, 1, 2]), count=st.integers(1, 7))
    def promote_any(self, which: int, first: int, count: int) -> None:
        self.promote(which % len(self.leases), first, count)

    def promote(self, which: int, first: int, count: int) -> None:
        lease = self.leases[which]
        moved = [
            block
            for block in lease.blocks[first : first + count]
            if block.tier is HOST and block.holds == 1
        ]
        del moved[max(0, self.room(DEVICE)) :]
        if lease.reader is not None or lease.stale:
            moved = []
        plan = self.index.promote(lease.lease_id, first, count)
        assert [self.at(HOST, source) for source, _, _ in plan.rows] == moved
        assert bool(plan.promotion_id) == bool(moved)
        self.free[DEVICE] -= len(moved)
        if moved:
            self.promotions.append(ModelPromotion(plan.promotion_id, lease, moved))

    def at(self, tier: Tier, slot: int) -> Block:
        table = self.index._table
        [block] = [
            block
            for block in self.blocks.values()
            if block.tier is tier and table.local(table.where[key(block.name)]) == slot
        ]
        return block

    @precondition(lambda self: self.promotions)
    @rule(which=pick, good=st.sets(st.integers(0, 6)))
    def finish_promotion(self, which: int, good: set[int]) -> None:
        promotion = self.promotions.pop(which % len(self.promotions))
        live = promotion.lease in self.leases and not promotion.lease.stale
        moved = 0
        for row, block in reversed(list(enumerate(promotion.blocks))):
            alone = block.tier is HOST and block.holds == 1
            if row in good and live and alone and self.room(DEVICE) >= 0:
                block.tier = DEVICE
                self.free[HOST] += 1
                moved += 1
            else:
                self.free[DEVICE] += 1
        assert self.index.finish_promotion(promotion.promotion_id, good) == moved
        with pytest.raises(ValueError, match="unknown"):
            self.index.finish_promotion(promotion.promotion_id)

    @precondition(lambda self: self.since_clear > 15)
    @rule()
    def clear(self) -> None:
        self.since_clear = 0
        self.zombies |= {block for block in self.blocks.values() if block.holds}
        for block in self.recent:
            if block.phase == "ready":
                self.free[block.tier] += 1
        self.blocks, self.recent = {}, []
        for old in [*self.jobs, *self.leases]:
            old.stale = True
        self.untold = {}
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
        self.since_clear += 1
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
        assert counters.promoting == sum(len(p.blocks) for p in self.promotions)
        assert counters.limits == tuple(self.limits)
        for tier in Tier:
            assert self.room(tier) >= 0 or not self.evictable(tier)
        table = self.index._table
        order = [table.keys[slot] for slot in table.recency.walk(0)]
        assert order == [key(block.name) for block in self.recent]

    def teardown(self) -> None:
        (
            index_module.RELEASE_BLOCKS,
            index_module.TRIM_BLOCKS,
            index_module.TRIM_PAUSE_S,
        ) = self.pieces
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


@pytest.mark.slow
class TestIndexAgainstModelForLong(IndexMachine.TestCase):
    settings = settings(IndexMachine.TestCase.settings, max_examples=3000, stateful_step_count=100)


class Driver:
    """Drives the model by weighted chances: hypothesis seldom goes deep into a full store."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.machine = machine = IndexMachine()
        machine.start(
            device=chance.randint(0, 4) if seed % 4 else 4,
            capacity=chance.randint(0, 5) if seed % 4 else 5,
            spare=chance.randint(0, 3),
            share=chance.choice([0.25, 0.5, 1.0]),
        )
        self.operations: list[tuple[float, Callable[[], None]]] = [
            (9, lambda: machine.store(self.names())),
            (5, lambda: machine.admit(self.names())),
            (5, self.commit),
            (4, lambda: machine.acquire_held(self.picks(), self.reader(), self.duration())),
            (1, lambda: machine.acquire(self.names(), self.reader(), self.duration())),
            (7, lambda: machine.leases and machine.release(self.pick())),
            (1, lambda: machine.leases and machine.renew(self.pick(), self.duration())),
            (2, lambda: machine.reap(chance.uniform(0, 10))),
            (3, lambda: machine.set_limits(self.maybe(), self.maybe())),
            (1, machine.lift_limits),
            (5, self.load),
            (
                3,
                lambda: (
                    machine.leases and machine.promote_any(self.pick(), chance.randint(0, 2), 4)
                ),
            ),
            (4, lambda: machine.promotions and machine.finish_promotion(self.pick(), self.rows(6))),
            (0.5, machine.take_removed),
            (0.5, lambda: machine.snapshot(chance.randint(1, 12))),
            (0.2, machine.clear),
        ]

    def run(self, steps: int) -> Counter[str]:
        weights = [weight for weight, _ in self.operations]
        actions = [action for _, action in self.operations]
        for action in self.chance.choices(actions, weights, k=steps):
            action()
            self.machine.agree()
        totals = Counter(asdict(self.machine.index.counters().totals))
        self.machine.teardown()
        return totals

    def names(self) -> list[int]:
        return [self.chance.randint(0, 13) for _ in range(self.chance.randint(1, 7))]

    def pick(self) -> int:
        return self.chance.randrange(1_000_000)

    def picks(self) -> list[int]:
        return [self.pick() for _ in range(self.chance.randint(1, 5))]

    def maybe(self) -> int | None:
        return self.chance.choice([None, self.pick()])

    def rows(self, end: int) -> set[int]:
        return {row for row in range(end) if self.chance.random() < 0.8}

    def reader(self) -> str | None:
        return self.chance.choice([None, "peer-a", "peer-b"])

    def duration(self) -> float:
        return self.chance.uniform(0.5, 20.0)

    def commit(self) -> None:
        if self.machine.jobs:
            every = set(range(7))
            good = (every - self.rows(7), every - self.rows(7))
            self.machine.commit(self.pick(), *good, self.chance.random() < 0.1)

    def load(self) -> None:
        if self.machine.room(DEVICE) <= 0:
            self.machine.set_limits(self.pick(), None)
            self.machine.lift_limits()
        if self.machine.room(DEVICE) > 0 and self.machine.ready(HOST):
            self.machine.load(self.picks(), self.duration())


@pytest.mark.parametrize(
    ("histories", "steps"), [(40, 600), pytest.param(100, 5000, marks=pytest.mark.slow)]
)
def test_long_histories_agree_with_the_model_and_everything_happens_in_them(
    histories: int, steps: int
):
    totals: Counter[str] = Counter()
    for seed in range(histories):
        totals += Driver(seed).run(steps)
    seldom = {name for name in asdict(Totals()) if totals[name] < 50}
    assert not seldom, totals
