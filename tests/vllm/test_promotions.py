# SPDX-License-Identifier: Apache-2.0
"""Loaded blocks of the host tier go back to the device tier where that is a device with room."""

from __future__ import annotations

import pytest
from vllm_harness import Engine, Make, keys_of, prompt_of, share

from xinference_xavier.store.jobs import LoadJob, Tier

PROMPT = prompt_of(1, 100)
BLOCKS = 6


def in_host_tier(make: Make, **arguments: object) -> Engine:
    """Return an engine whose host tier holds the prompt and whose device tier is empty."""
    engine = make(device="cuda", **arguments)
    engine.index.set_limits(device_slots=0)
    engine.ask(PROMPT)
    engine.index.set_limits(device_slots=engine.index.counters().capacity[Tier.DEVICE])
    engine.forget_local()
    return engine


def tiers(engine: Engine) -> list[Tier]:
    grant = engine.index.acquire(
        keys_of(PROMPT), reader=None, request="look", now=engine.clock(), duration=1.0
    )
    engine.index.release(grant.lease_id)
    return [tier for tier, _, _ in grant.rows]


def moved(engine: Engine) -> tuple[int, int]:
    totals = engine.index.counters().totals
    return totals.promotions, totals.failed_promotions


def last_load(engine: Engine) -> LoadJob:
    return engine.worker.loads_seen[-1]


def test_a_hit_brings_its_blocks_back_to_the_device_tier(make: Make) -> None:
    engine = in_host_tier(make)
    assert tiers(engine) == [Tier.HOST] * BLOCKS
    engine.ask(PROMPT)
    assert last_load(engine).promotions.shape == (BLOCKS, 3)
    assert tiers(engine) == [Tier.DEVICE] * BLOCKS
    assert moved(engine) == (BLOCKS, 0)
    # The next hit is served from there, and moves nothing.
    engine.forget_local()
    engine.ask(PROMPT)
    assert len(last_load(engine).promotions) == 0
    assert engine.traffic["loaded_tokens"] == {"own_host": 96, "own_device": 96}
    engine.check_all()


def test_a_device_tier_in_host_memory_gets_nothing_back(make: Make) -> None:
    engine = in_host_tier(make)
    engine.side._parts.loads._promotes = False
    engine.ask(PROMPT)
    assert len(last_load(engine).promotions) == 0
    plain = make(name="plain")
    assert plain.side._parts.loads._promotes is False
    engine.check_all()


def test_only_free_device_slots_are_used(make: Make) -> None:
    engine = in_host_tier(make, device_slots=2)
    engine.ask(PROMPT)
    assert tiers(engine) == [Tier.DEVICE] * 2 + [Tier.HOST] * 4
    engine.check_all()


def test_blocks_that_vllm_still_has_are_not_promoted(make: Make) -> None:
    engine = in_host_tier(make)
    engine.ask(PROMPT[:32])
    before = moved(engine)
    engine.ask(PROMPT)
    rows = last_load(engine).segments[0].rows
    assert last_load(engine).promotions[:, 0].tolist() == rows[:, 1].tolist()
    assert moved(engine)[0] - before[0] == len(rows) < BLOCKS
    engine.check_all()


def test_a_copy_that_failed_leaves_its_block_in_the_host_tier(make: Make) -> None:
    engine = in_host_tier(make)
    engine.worker.failed_promotions = {1, 3}
    engine.ask(PROMPT)
    assert moved(engine) == (4, 2)
    assert [row for row, tier in enumerate(tiers(engine)) if tier is Tier.HOST] == [1, 3]
    engine.check_all()


def test_a_copy_counts_when_every_rank_has_it(make: Make) -> None:
    engine = in_host_tier(make, ranks=2)
    engine.worker.second_rank_fails_promotions = {0}
    engine.ask(PROMPT)
    assert moved(engine) == (5, 1)
    assert tiers(engine)[0] is Tier.HOST
    engine.check_all()


def test_a_failed_load_promotes_nothing(make: Make) -> None:
    engine = in_host_tier(make)
    engine.worker.load_fault = lambda job, row: "broken" if row == 5 else None
    engine.ask(PROMPT)
    assert moved(engine) == (0, BLOCKS)
    engine.check_all()


def test_a_block_that_a_peer_reads_meanwhile_stays(make: Make) -> None:
    engine = in_host_tier(make)
    engine.worker.hold_loads = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    assert engine.index.counters().promoting == BLOCKS
    peer = engine.index.acquire(
        keys_of(PROMPT)[:2], reader="peer", request="r", now=engine.clock(), duration=60.0
    )
    engine.worker.hold_loads = False
    engine.run()
    assert request_id in engine.reasons
    assert moved(engine) == (4, 2)
    engine.index.release(peer.lease_id)
    engine.check_all()


@pytest.mark.parametrize("event", ["reset", "abort", "expiry", "limit"])
def test_what_happens_during_the_load_costs_no_slot(make: Make, event: str) -> None:
    engine = in_host_tier(make)
    engine.worker.hold_loads = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    if event == "reset":
        engine.scheduler.reset_connector_cache()
    elif event == "abort":
        engine.abort(request_id)
    elif event == "expiry":
        engine.index.reap(engine.clock() + 1000)
    else:
        engine.index.set_limits(device_slots=0)
    assert engine.index.counters().promoting == BLOCKS
    engine.worker.hold_loads = False
    engine.run()
    engine.index.check_invariants()
    expected = {"reset": (0, 6), "abort": (6, 0), "expiry": (0, 6), "limit": (0, 6)}
    assert moved(engine) == expected[event]
    counters = engine.index.counters()
    assert counters.promoting == counters.leases == 0
    engine.check_store()


def test_a_store_that_closes_during_the_load_ends_clean(make: Make) -> None:
    engine = in_host_tier(make)
    engine.worker.hold_loads = True
    engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    assert engine.index.close().promoting == 0
    engine.worker.hold_loads = False
    engine.run()
    engine.check_answers()
    assert not engine.traffic["errors"]


def test_own_and_peers_blocks_in_one_load_promote_the_own_ones(make: Make) -> None:
    engine = make(device="cuda")
    engine.index.set_limits(device_slots=0)
    engine.ask(PROMPT[:50])
    engine.index.set_limits(device_slots=24)
    engine.forget_local()
    share(engine, 1, PROMPT)
    engine.ask(PROMPT)
    assert len(last_load(engine).segments) == 2
    assert moved(engine) == (3, 0)
    engine.check_all()


@pytest.mark.parametrize("method", ["promote", "finish_promotion"])
def test_a_broken_promotion_does_not_break_the_load(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = in_host_tier(make)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(method)

    monkeypatch.setattr(engine.index, method, broken)
    engine.ask(PROMPT)
    assert engine.loaded_tokens == 96
    assert engine.traffic["errors"] == {"promote": 1}
    assert engine.index.counters().leases == 0
