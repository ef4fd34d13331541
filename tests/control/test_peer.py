# SPDX-License-Identifier: Apache-2.0
"""The source's side of a lease, without a network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from control_harness import FINGERPRINT, SECRET, fill, key_of, keys

from xinference_xavier.control.messages import (
    Credential,
    LeaseGrant,
    Refused,
    Timing,
    pack_keys,
    unpack_rows,
)
from xinference_xavier.control.peer import LEASE_KEYS, PeerActor, PeerState
from xinference_xavier.store.index import SnapshotIndex

EPOCH = 5
OWN = key_of(SECRET).credential(FINGERPRINT, "a", EPOCH)
OTHER_EPOCH = key_of(SECRET).credential(FINGERPRINT, "a", EPOCH + 1)
OTHER_GROUP = key_of(SECRET).credential(b"x" * 32, "a", EPOCH)
TIMING = Timing(heartbeat_s=10.0, reap_s=0.001)


class Source:
    """A peer over a real index of 64 blocks, 20 of them ready."""

    def __init__(
        self,
        close_hook: Callable[[float], dict[str, Any]] | None = None,
        *,
        slots: int = 64,
        ready: int = 20,
    ) -> None:
        self.index = SnapshotIndex(device_slots=slots, host_slots=8, spare_slots=4)
        fill(self.index, keys(0, ready))
        self.state = PeerState(
            index=self.index,
            fingerprint=FINGERPRINT,
            workers=(),
            audit_hook=lambda: {"slots": self.index.counters().capacity[0]},
            status_hook=lambda: {"blocks": self.index.counters().device_blocks},
            clear_hook=lambda: None,
            close_hook=close_hook or self.close,
            limit_hook=self.set_limits,
            withdraw_hook=lambda: self.withdrawn.extend(self.index.take_removed()),
            timing=TIMING,
            credentials={EPOCH: OWN},
        )
        self.closes = 0
        self.withdrawn: list[bytes] = []
        self.actor = PeerActor(self.state)

    def close(self, deadline_s: float) -> dict[str, Any]:
        self.closes += 1
        self.index.close()
        return {"closes": self.closes}

    def set_limits(self, device_slots: int | None, host_slots: int | None) -> dict[str, Any]:
        changes = self.index.set_limits(device_slots=device_slots, host_slots=host_slots)
        return {"removed": len(changes.removed)}

    async def reserve(self, count: int, duration_s: float = 5.0, shown: Credential = OWN) -> Any:
        return await self.actor.reserve(shown, "b:1", "r", pack_keys(keys(0, count)), duration_s)

    def leases(self) -> int:
        return self.index.counters().leases


def source(test: Callable[[Source], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            made = Source()
            await test(made)
            if not made.closes:
                made.index.check_invariants()

        asyncio.run(asyncio.wait_for(main(), 30))

    run.__name__ = test.__name__
    return run


@source
async def test_a_reservation_leases_the_ready_prefix_within_the_readers_share(s: Source) -> None:
    grant = await s.reserve(10)
    assert isinstance(grant, LeaseGrant)
    assert [slot for _, slot, _ in unpack_rows(grant.rows)] == list(range(10))
    assert s.leases() == 1
    assert await s.actor.renew(OWN, [grant.lease_id, 999], 1.0) == [True, False]
    assert await s.actor.release(OWN, [grant.lease_id, grant.lease_id]) == 1
    assert s.leases() == 0
    assert await s.actor.renew(OWN, [grant.lease_id], 1.0) == [False]


@source
async def test_strangers_and_messages_for_a_former_life_are_refused(s: Source) -> None:
    assert await s.reserve(1, shown=OTHER_GROUP) is Refused.FINGERPRINT
    assert await s.reserve(1, shown=OTHER_EPOCH) is Refused.EPOCH
    assert await s.actor.introduce(OTHER_EPOCH) is Refused.EPOCH
    assert await s.actor.introduce(OWN) == ()
    grant = await s.reserve(1)
    assert await s.actor.renew(OTHER_EPOCH, [grant.lease_id], 1.0) == [False]
    assert await s.actor.release(OTHER_EPOCH, [grant.lease_id]) == 0
    assert s.leases() == 1


@source
async def test_an_older_epoch_of_the_same_process_is_served(s: Source) -> None:
    s.state.credentials[EPOCH + 1] = OTHER_EPOCH
    assert isinstance(await s.reserve(1), LeaseGrant)
    assert isinstance(await s.reserve(1, shown=OTHER_EPOCH), LeaseGrant)


@source
async def test_no_lease_outlives_the_heartbeat_limit(s: Source) -> None:
    grant = await s.reserve(1, duration_s=1e6)
    await s.actor.renew(OWN, [grant.lease_id], 1e6)
    assert s.index.reap(asyncio.get_running_loop().time() + TIMING.heartbeat_s) == 1


@source
async def test_the_reaper_ends_what_nobody_renews(s: Source) -> None:
    await s.actor.__post_create__()
    await s.reserve(5, duration_s=1e-6)
    while s.leases():
        await asyncio.sleep(0.001)
    await s.actor.__pre_destroy__()
    assert s.index.counters().totals.reaped == 1


@source
async def test_a_closed_index_answers_politely_even_if_nobody_closed_the_peer(s: Source) -> None:
    grant = await s.reserve(1)
    s.close(0.0)
    assert await s.reserve(1) is Refused.CLOSED
    assert await s.actor.renew(OWN, [grant.lease_id], 1.0) == [False]
    assert await s.actor.release(OWN, [grant.lease_id]) == 0


@source
async def test_hooks_answer(s: Source) -> None:
    assert await s.actor.describe(OWN) == {"blocks": 20}
    assert await s.actor.audit(OWN) == {"slots": 64}
    assert await s.actor.clear(OWN) == {}


def test_while_closing_nothing_is_granted_and_a_caller_that_goes_does_not_stop_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hook(deadline_s: float) -> dict[str, Any]:
        entered.set()
        leave.wait(30)
        return {"deadline_s": deadline_s}

    async def run() -> None:
        s = Source(hook)
        impatient = asyncio.create_task(s.actor.close(OWN, 3.0))
        await asyncio.to_thread(entered.wait, 30)
        assert await s.reserve(1) is Refused.DRAINING
        impatient.cancel()
        second = asyncio.create_task(s.actor.close(OWN, 9.0))
        leave.set()
        assert await second == {"deadline_s": 3.0}
        assert impatient.cancelled()
        assert await s.reserve(1) is Refused.CLOSED

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_close_that_failed_is_tried_again() -> None:
    outcomes: list[Any] = [RuntimeError("fence"), {"done": True}]

    def hook(deadline_s: float) -> dict[str, Any]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run() -> None:
        s = Source(hook)
        with pytest.raises(RuntimeError, match="fence"):
            await s.actor.close(OWN, 1.0)
        assert await s.reserve(1) is Refused.CLOSED
        assert await s.actor.close(OWN, 1.0) == {"done": True}

    asyncio.run(asyncio.wait_for(run(), 60))


# -- long reservations -----------------------------------------------------------------------------


def long_source(close_hook: Callable[[float], dict[str, Any]] | None = None) -> Source:
    return Source(close_hook, slots=16 * LEASE_KEYS, ready=3 * LEASE_KEYS)


def test_a_long_reservation_locks_the_index_for_few_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        s = long_source()
        acquire, at_once = s.index.acquire, []

        def watched(run: Any, **options: Any) -> Any:
            at_once.append(len(run))
            return acquire(run, **options)

        monkeypatch.setattr(s.index, "acquire", watched)
        count = 2 * LEASE_KEYS + 5
        grant = await s.reserve(count)
        assert at_once == [LEASE_KEYS, LEASE_KEYS, 5]
        assert [slot for _, slot, _ in unpack_rows(grant.rows)] == list(range(count))
        leases = [grant.lease_id, *grant.further]
        assert len(leases) == s.leases() == 3
        assert await s.actor.renew(OWN, leases, 1.0) == [True] * 3
        assert await s.actor.release(OWN, leases) == 3
        assert s.leases() == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_others_get_their_turn_within_a_long_reservation() -> None:
    async def run() -> None:
        s = long_source()
        long = asyncio.create_task(s.reserve(3 * LEASE_KEYS))
        await asyncio.sleep(0)
        assert s.leases() == 1
        assert isinstance(await s.reserve(1), LeaseGrant)
        assert len((await long).further) == 2

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_close_cuts_a_long_reservation_short() -> None:
    async def run() -> None:
        leave = threading.Event()
        s = long_source(lambda deadline_s: {"left": leave.wait(30)})
        long = asyncio.create_task(s.reserve(3 * LEASE_KEYS))
        closing = asyncio.create_task(s.actor.close(OWN, 1.0))
        grant = await long
        leave.set()
        await closing
        assert (len(grant.further), grant.missing) == (0, False)
        assert len(unpack_rows(grant.rows)) == LEASE_KEYS

    asyncio.run(asyncio.wait_for(run(), 30))


# -- samples ---------------------------------------------------------------------------------------


@source
async def test_a_sample_is_a_lease_on_some_blocks(s: Source) -> None:
    grant = await s.actor.sample(OWN, "doctor", 0, 3, 5.0)
    assert isinstance(grant, LeaseGrant)
    assert len(unpack_rows(grant.rows)) == 3
    assert s.index.counters().leased_blocks == 3
    assert await s.actor.release(OWN, [grant.lease_id]) == 1


@source
async def test_a_sample_of_a_tier_has_blocks_of_that_tier(s: Source) -> None:
    fill(s.index, keys(20, 66))
    grant = await s.actor.sample(OWN, "doctor", 1, 10, 5.0)
    assert [row[0] for row in unpack_rows(grant.rows)] == [1, 1]
    longest = await s.actor.sample(OWN, "other", 0, 10_000, 5.0)
    assert {row[0] for row in unpack_rows(longest.rows)} == {0}


@source
async def test_a_sample_of_an_empty_store_holds_nothing(s: Source) -> None:
    s.index.clear()
    assert await s.actor.sample(OWN, "doctor", 0, 3, 5.0) == LeaseGrant(0, b"")
    assert s.leases() == 0


@source
async def test_a_sample_of_an_empty_tier_leases_nothing_of_the_other(s: Source) -> None:
    fill(s.index, keys(20, 66))
    s.index.set_limits(device_slots=0)
    assert s.index.counters().host_blocks == 2
    assert await s.actor.sample(OWN, "doctor", 0, 3, 5.0) == LeaseGrant(0, b"")
    assert s.leases() == 0
    s.index.check_invariants()


@source
async def test_a_sample_needs_the_groups_fingerprint_and_an_open_store(s: Source) -> None:
    assert await s.actor.sample(OTHER_GROUP, "d", 0, 3, 5.0) is Refused.FINGERPRINT
    assert await s.actor.sample(OTHER_EPOCH, "d", 0, 3, 5.0) is Refused.EPOCH
    await s.actor.close(OWN, 0.0)
    assert await s.actor.sample(OWN, "d", 0, 3, 5.0) is Refused.CLOSED


# -- limits ----------------------------------------------------------------------------------------


@source
async def test_a_limit_evicts_at_once_what_nobody_has_leased(s: Source) -> None:
    grant = await s.reserve(4)
    assert (await s.actor.set_limits(OWN, 2, None)) == {"removed": 16}
    counters = s.index.counters()
    assert (counters.limits, counters.device_blocks) == ((2, 4), 4)
    assert await s.actor.release(OWN, [grant.lease_id]) == 1
    assert s.index.counters().device_blocks == 2


def test_blocks_that_went_with_their_leases_are_withdrawn_by_the_reaper() -> None:
    async def run() -> None:
        s = Source()
        await s.actor.__post_create__()
        grant = await s.reserve(4)
        await s.actor.set_limits(OWN, 2, None)
        await s.actor.release(OWN, [grant.lease_id])
        while not s.withdrawn:
            await asyncio.sleep(0)
        await s.actor.__pre_destroy__()
        assert sorted(s.withdrawn) == sorted(keys(2, 4))
        s.index.check_invariants()

    asyncio.run(asyncio.wait_for(run(), 30))


@source
async def test_a_limit_beyond_the_capacity_changes_nothing(s: Source) -> None:
    with pytest.raises(ValueError, match="device limit is 65"):
        await s.actor.set_limits(OWN, 65, 0)
    assert s.index.counters().limits == (64, 4)


# -- why a grant is short --------------------------------------------------------------------------


@source
async def test_a_block_that_is_not_here_is_told(s: Source) -> None:
    s.index = s.state.index = SnapshotIndex(
        device_slots=64, host_slots=0, spare_slots=0, reader_share=1.0
    )
    fill(s.index, keys(0, 20))
    assert not (await s.reserve(20)).missing
    assert (await s.reserve(21)).missing
    s.index.clear()
    miss = await s.reserve(1)
    assert (miss.lease_id, miss.rows, miss.missing) == (0, b"", True)


@source
async def test_a_reader_at_its_share_is_not_told_that_blocks_are_missing(s: Source) -> None:
    share = len(unpack_rows((await s.reserve(20)).rows))
    assert share < 20
    beyond = await s.actor.reserve(OWN, "b:1", "r", pack_keys(keys(19, 20)), 5.0)
    assert (beyond.lease_id, beyond.missing) == (0, False)
    assert s.leases() == 1


@source
async def test_a_block_on_its_way_between_the_tiers_is_not_missing(s: Source) -> None:
    fill(s.index, keys(20, 64))
    admission = s.index.admit([(keys(100, 101)[0], 0)])
    assert len(admission.demotions) == 1
    everywhere = [
        await s.actor.reserve(OWN, f"{n}:1", "r", k, 5.0) for n, k in enumerate(keys(0, 64))
    ]
    assert sum(not grant.lease_id for grant in everywhere) == 1
    assert not any(grant.missing for grant in everywhere)
    s.index.commit(admission.job_id)
