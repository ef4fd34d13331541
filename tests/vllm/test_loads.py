# SPDX-License-Identifier: Apache-2.0
"""Loads that fail, come late or never end, and requests that are aborted meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from fake_worker import BLOCK, SLOT_BYTES
from vllm.v1.request import RequestStatus
from vllm_harness import Engine, Make, keys_of, prompt_of, share

from xinference_xavier.control.runtime import ReservationState
from xinference_xavier.store.jobs import OWN_STORE, LoadJob, LoadResult, StoreResult
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.metadata import WorkerMeta
from xinference_xavier.vllm.pace import MOST_SOURCES, Pace
from xinference_xavier.vllm.sources import Part, Sources

PROMPT = prompt_of(1, 100)
BLOCKS = 6


def half_own_half_peers(engine: Engine) -> None:
    """Let the own store hold the prompt's first three blocks, and a peer all six."""
    engine.ask(PROMPT[:50])
    engine.forget_local()
    share(engine, 1, PROMPT)


def fail_rows(*rows: int) -> Callable[[LoadJob, int], str | None]:
    return lambda job, row: "broken" if row in rows else None


def block_ids(job: LoadJob) -> list[int]:
    return [row[3] for segment in job.segments for row in segment.rows.tolist()]


def loading(engine: Engine) -> str:
    """Add the request and step until its load is held by the worker."""
    engine.worker.hold_loads = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    assert engine.status_of(request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request_id


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (3,), (4,), (5,), (1, 4), (0, 5), range(6)])
def test_failed_blocks_are_reported_and_computed(engine: Engine, rows: tuple[int, ...]) -> None:
    half_own_half_peers(engine)
    engine.worker.load_fault = fail_rows(*rows)
    before = engine.traffic["saved_blocks"]
    engine.ask(PROMPT, 20)
    # One load, also where nothing of it was good and vLLM looked the request up again.
    (load,) = engine.worker.loads_seen
    assert engine.worker.invalid_reported == [{block_ids(load)[row] for row in rows}]
    assert engine.loaded_tokens == 16 * min(rows)
    assert engine.traffic["failed_blocks"] == len(rows)
    assert set(engine.traffic["loads_failed"]) == {"broken"}
    # What was computed instead is stored, unless the own store held it all the time.
    recomputed = BLOCKS - max(3, min(rows))
    assert engine.traffic["saved_blocks"] - before == recomputed + 1
    engine.check_all()


def test_a_failed_load_tells_the_peers_breaker(engine: Engine) -> None:
    half_own_half_peers(engine)
    engine.worker.load_fault = fail_rows(4)
    engine.ask(PROMPT)
    assert engine.control.reports == [(1, False, "broken")]


def test_a_load_counts_once_however_many_ranks_report_it(make: Make) -> None:
    engine = make(ranks=2)
    half_own_half_peers(engine)
    engine.worker.load_fault = fail_rows(4)
    engine.ask(PROMPT)
    assert engine.control.reports == [(1, False, "broken")]
    assert engine.traffic["loads_failed"] == {"broken": 1}
    sources = engine.side.status()["sources"]
    # The peer's blocks up to the failed one; bytes are those of both ranks.
    assert [(s["loads"], s["blocks"], s["failures"]) for s in sources.values()] == [
        (1, 3, 0),
        (1, 2, 1),
    ]
    assert [s["nbytes"] for s in sources.values()] == [6 * SLOT_BYTES, 4 * SLOT_BYTES]


def test_members_that_left_long_ago_are_forgotten() -> None:
    sources = Sources(
        control=Mock(),
        info=lambda member: None,
        pace=Pace(),
        counters=Counters(),
        block_tokens=BLOCK,
    )
    for member in (OWN_STORE, *range(1, MOST_SOURCES + 10)):
        sources.judge([Part(member, rows=1, nbytes=5, seconds=1.0), Part(member, 1, reason="late")])
    kept = sources.to_dict()
    assert len(kept) == MOST_SOURCES
    assert next(iter(kept)) == "own"
    assert f"member {MOST_SOURCES + 9}" in kept
    # What brought nothing says nothing of the speed.
    assert kept["own"]["mb_per_s"] == 5 / 1e6


def test_a_peer_is_not_blamed_for_what_was_not_read(engine: Engine) -> None:
    half_own_half_peers(engine)
    engine.worker.load_fault = lambda job, row: "skipped" if row >= 3 else None
    engine.ask(PROMPT)
    assert engine.control.reports == []
    assert engine.traffic["loads_failed"] == {"skipped": 1}
    engine.check_all()


def test_the_next_request_may_load_again(engine: Engine) -> None:
    half_own_half_peers(engine)
    engine.worker.load_fault = fail_rows(3)
    engine.ask(PROMPT)
    engine.forget_local()
    engine.worker.load_fault = fail_rows()
    engine.ask(PROMPT)
    assert engine.loaded_tokens == 16 * (3 + BLOCKS)
    engine.check_all()


def test_a_block_whose_slot_was_rewritten_is_not_taken(engine: Engine) -> None:
    engine.ask(PROMPT)
    engine.forget_local()
    slots = engine.worker.arenas.slots
    victim = sorted(slots)[2]
    slots[victim] = (slots[victim][0] + 1000, slots[victim][1])
    engine.ask(PROMPT)
    assert engine.traffic["loads_failed"] == {"stale": 1}
    assert engine.loaded_tokens == 32


def test_a_peer_that_vanished_is_a_failed_load(engine: Engine) -> None:
    half_own_half_peers(engine)
    request_id = engine.add(PROMPT)
    peer = engine.control.peers.pop(1)
    engine.control.release = lambda reservation: None
    engine.until(lambda: request_id in engine.reasons)
    engine.run()
    engine.check_answers()
    assert engine.loaded_tokens == 48
    assert peer.leases == 1, "the source's reaper ends it"


def test_a_load_that_does_not_fit_beside_a_loaded_request_lets_that_one_run(make: Make) -> None:
    """vLLM keeps blocks for the loaded one and would never get to it behind the other."""
    engine = make(blocks=24)
    early, late = prompt_of(1, 150), prompt_of(2, 231)
    share(engine, 1, early)
    share(engine, 1, late, 0, 10)
    engine.control.answers_at_once = False
    ids = [engine.add(early), engine.add(late)]
    (asked, keys) = engine.control.unanswered.pop(1)
    engine.control._answer(asked, keys)
    engine.until(lambda: engine.side._parts.loaded)
    engine.control.answer_all()
    engine.run()
    assert set(ids) == set(engine.reasons)
    engine.check_all()


# --- grants ------------------------------------------------------------------------------------


def test_a_grant_in_time_is_waited_for(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.control.answers_at_once = False
    request_id = engine.add(PROMPT)
    engine.steps(5)
    assert engine.status_of(request_id) is RequestStatus.WAITING
    engine.control.answer_all()
    engine.run()
    assert engine.loaded_tokens == 96
    engine.check_all()


def test_a_grant_that_comes_too_late_is_given_back(engine: Engine) -> None:
    peer = share(engine, 1, PROMPT)
    engine.control.answers_at_once = False
    engine.add(PROMPT)
    engine.steps(3)
    engine.clock.now += 0.021
    engine.run()
    assert engine.traffic["lookups_missed"] == {"late": 1}
    engine.control.answer_all()
    assert peer.leases == 0
    engine.check_all()


def test_what_is_granted_by_then_is_used(engine: Engine) -> None:
    half_own_half_peers(engine)
    engine.control.answers_at_once = False
    engine.add(PROMPT)
    engine.steps(3)
    engine.clock.now += 0.021
    engine.run()
    assert engine.traffic["loaded_tokens"] == {"own_device": 48}
    engine.control.answer_all()
    engine.check_all()


def test_a_promise_that_ran_out_in_the_queue_is_made_again(engine: Engine) -> None:
    peer = share(engine, 1, PROMPT)
    engine.add(PROMPT)
    engine.clock.now += 1.6
    assert peer.leases == 1
    engine.run()
    assert [r.state for r in engine.control.reserved] == [ReservationState.RELEASED] * 2
    assert engine.loaded_tokens == 96
    engine.check_all()


def test_a_plan_is_made_again_when_vllm_evicted_what_it_builds_on(engine: Engine) -> None:
    engine.ask(PROMPT)
    longer = PROMPT[:96] + prompt_of(2, 40)
    share(engine, 1, longer)
    engine.add(longer)
    assert [len(r.rows) for r in engine.control.reserved] == [2], "after six local blocks"
    engine.forget_local()
    engine.run()
    assert engine.traffic["loaded_tokens"] == {"own_device": 96, "peer_device": 32}
    assert engine.traffic["failed_blocks"] == 0
    engine.check_all()


def test_requests_that_find_no_free_blocks_keep_no_lease_for_ever(make: Make) -> None:
    engine = make(blocks=16)
    peer = share(engine, 1, PROMPT)
    first = engine.add(prompt_of(2, 150), 60)
    engine.steps(2)
    second = engine.add(PROMPT)
    while first not in engine.reasons:
        engine.clock.now += 0.5
        engine.step()
        assert peer.leases <= 1
    engine.run()
    assert second in engine.reasons
    engine.check_all()


# --- ends --------------------------------------------------------------------------------------


def test_loads_may_end_in_any_order(engine: Engine) -> None:
    engine.worker.hold_loads = True
    prompts = [prompt_of(seed, 70) for seed in range(3)]
    for prompt in prompts:
        share(engine, 1, prompt)
        engine.add(prompt)
    engine.until(lambda: len(engine.worker.loads) == 3)
    engine.worker.run_loads([2, 0])
    engine.steps(6)
    assert len(engine.reasons) < 3
    engine.worker.run_loads()
    engine.run()
    assert engine.loaded_tokens == 3 * 64
    engine.check_all()


def test_a_load_that_does_not_end_keeps_its_blocks_until_it_does(engine: Engine) -> None:
    half_own_half_peers(engine)
    request_id = loading(engine)
    engine.abort(request_id)
    others = [engine.add(prompt_of(seed, 200), 8) for seed in range(2, 6)]
    engine.until(lambda: all(other in engine.reasons for other in others))
    engine.steps(5)
    assert engine.connector.has_pending_push_work()
    assert not set(block_ids(engine.worker.loads[0][0])) & {
        block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()
    }
    engine.worker.hold_loads = False
    engine.check_all()


@pytest.mark.parametrize("failing", [False, True])
def test_aborted_while_loading(engine: Engine, failing: bool) -> None:
    half_own_half_peers(engine)
    request_id = loading(engine)
    engine.abort(request_id)
    engine.steps(2)
    if failing:
        engine.worker.load_fault = fail_rows(2)
    engine.worker.run_loads()
    engine.worker.hold_loads = False
    engine.check_all()


def test_aborted_after_its_load_ended(engine: Engine) -> None:
    half_own_half_peers(engine)
    request_id = loading(engine)
    engine.worker.run_loads()
    engine.until(lambda: engine.worker.reported[request_id])
    engine.abort(request_id)
    engine.worker.hold_loads = False
    engine.check_all()


def test_aborted_with_a_reservation_under_way(engine: Engine) -> None:
    peer = share(engine, 1, PROMPT)
    engine.control.answers_at_once = False
    request_id = engine.add(PROMPT)
    engine.steps(2)
    engine.abort(request_id)
    engine.run()
    engine.control.answer_all()
    assert peer.leases == 0
    engine.check_all()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_aborted_at_any_step(make: Make, steps: int) -> None:
    engine = make(max_tokens_per_step=32)
    half_own_half_peers(engine)
    request_id = engine.add(PROMPT + prompt_of(3, 60), 30)
    engine.steps(steps)
    assert request_id not in engine.reasons
    engine.abort(request_id)
    engine.check_all()


def test_aborted_while_resuming_with_a_load(engine: Engine) -> None:
    """The request's blocks from before the preemption belong to others by now."""
    engine.worker.hold_stores = True
    engine.add(prompt_of(2, 450), 60)
    engine.until(lambda: len(engine.worker.stores) > 1)
    pinned = engine.side.status()["pinned_blocks"]
    request_id = engine.add(PROMPT, 40)
    engine.until(lambda: len(engine.answers[request_id]) > 2)
    assert engine.side.status()["pinned_blocks"] == pinned, "nothing of this one is saved yet"
    table = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
    engine.preempt(request_id)
    engine.pool.evict_blocks(set(table))
    share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    engine.until(lambda: engine.worker.loads)
    other = engine.add(prompt_of(3, 430))
    engine.until(lambda: other in engine.reasons)
    engine.worker.hold_stores = False
    engine.until(lambda: not engine.side.status()["pinned_blocks"])
    engine.abort(request_id)
    engine.worker.hold_loads = False
    engine.check_all()


# --- reports ------------------------------------------------------------------------------------


def test_unknown_and_double_results_are_counted_and_ignored(engine: Engine) -> None:
    half_own_half_peers(engine)
    engine.ask(PROMPT)
    (load,) = engine.worker.loads_seen
    store = engine.worker.stores_seen[0]
    again = WorkerMeta(
        [StoreResult(store.job_id), StoreResult(10**6)],
        [LoadResult(load.job_id, load.request_id), LoadResult(10**6, "nobody")],
    )
    engine.worker.extra_results = again
    engine.ask(prompt_of(5, 40))
    errors = engine.traffic["errors"]
    assert errors == {"unknown store job": 2, "unknown load job": 2}
    engine.run()
    engine.check_empty(errors=True)
    engine.check_store()


def test_a_load_reported_twice_at_once_ends_once(engine: Engine) -> None:
    half_own_half_peers(engine)
    request_id = loading(engine)
    (job, _) = engine.worker.loads[0]
    engine.worker.run_loads()
    engine.worker.extra_results = WorkerMeta([], [LoadResult(job.job_id, request_id)])
    engine.worker.hold_loads = False
    engine.run()
    engine.check_answers()
    engine.check_empty(errors=True)
    assert engine.traffic["loads"] == 1


def test_a_report_without_segments_is_a_failed_load(engine: Engine) -> None:
    half_own_half_peers(engine)
    request_id = loading(engine)
    (job, _) = engine.worker.loads.pop()
    engine.worker._finished.add(request_id)
    engine.worker._invalid.update(block_ids(job))
    engine.worker.extra_results = WorkerMeta([], [LoadResult(job.job_id, request_id)])
    engine.worker.hold_loads = False
    engine.run()
    assert engine.loaded_tokens == 0
    assert engine.traffic["failed_blocks"] == BLOCKS
    engine.check_all()
    assert keys_of(PROMPT)[-1] in engine.control.published
