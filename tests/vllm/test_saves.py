# SPDX-License-Identifier: Apache-2.0
"""Copies into the store: what is pinned, what becomes visible, and what never does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_worker import no_store_fault
from vllm_harness import Engine, Make, keys_of, prompt_of, share

from xinference_xavier.store.jobs import StoreJob
from xinference_xavier.vllm import saves

PROMPT = prompt_of(1, 100)


def finish_with_saves_pending(engine: Engine) -> str:
    engine.worker.hold_stores = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: request_id in engine.reasons)
    assert engine.side.status()["pinned_blocks"] == 6
    return request_id


# --- pins ----------------------------------------------------------------------------------------


def test_a_pinned_block_keeps_its_content_until_it_is_copied(engine: Engine) -> None:
    finish_with_saves_pending(engine)
    for seed in range(2, 8):
        engine.add(prompt_of(seed, 250), 20)
    engine.until(lambda: len(engine.reasons) == 7)
    assert engine.connector.has_pending_push_work()
    assert not engine.control.published
    engine.worker.hold_stores = False
    engine.run()
    assert set(keys_of(PROMPT)) <= engine.control.published
    engine.check_all()


def test_an_idle_engine_steps_until_its_saves_are_done(engine: Engine) -> None:
    finish_with_saves_pending(engine)
    engine.steps(10)
    assert engine.busy()
    engine.worker.hold_stores = False
    engine.check_all()
    assert not engine.busy()


def test_aborting_a_finished_request_changes_nothing(engine: Engine) -> None:
    request_id = finish_with_saves_pending(engine)
    engine.abort(request_id)
    engine.worker.hold_stores = False
    engine.check_all()
    assert engine.control.published == set(keys_of(PROMPT))


def test_pins_stay_below_an_eighth_of_the_pool_or_half_of_what_is_free(make: Make) -> None:
    engine = make(blocks=32, max_tokens_per_step=512)
    engine.worker.hold_stores = True
    for seed in range(3):
        engine.add(prompt_of(seed, 100))
    while len(engine.reasons) < 3:
        engine.step()
        pinned = engine.side.status()["pinned_blocks"]
        assert pinned <= max(32 // 8, engine.pool.get_num_free_blocks() // 2)
    skipped = engine.traffic["saves_skipped"]["pins"]
    assert 0 < skipped < 3 * 6
    engine.worker.hold_stores = False
    engine.check_all()
    assert engine.traffic["saved_blocks"] == 3 * 6 - skipped


def test_what_the_pin_limit_left_is_saved_while_the_request_runs(engine: Engine) -> None:
    engine.ask(prompt_of(1, 250), 12)
    assert engine.traffic["saved_blocks"] == 16
    assert engine.traffic["saves_skipped"] == {}
    engine.check_all()


@pytest.mark.parametrize("late_forward", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_preemption_with_saves_in_flight(make: Make, late_forward: bool, hold: bool) -> None:
    engine = make(blocks=24, late_forward=late_forward)
    engine.worker.hold_stores = hold
    for seed in range(6):
        engine.add(prompt_of(seed, 60), 60)
    for step in range(400):
        if hold and step % 23 == 0:
            engine.worker.run_stores()
        engine.step()
    engine.worker.hold_stores = False
    engine.check_all()
    assert any(request.num_preemptions for request in engine.requests.values())
    assert engine.traffic["saved_blocks"]


def test_a_preempted_request_resumes_from_the_store(engine: Engine) -> None:
    request_id = engine.add(PROMPT, 40)
    engine.until(lambda: len(engine.answers[request_id]) > 30)
    table = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
    engine.preempt(request_id)
    engine.pool.evict_blocks(set(table))
    engine.check_all()
    assert engine.loaded_tokens >= 112


# --- results --------------------------------------------------------------------------------------


def test_a_failed_store_is_never_visible(engine: Engine) -> None:
    def fail_second(job: StoreJob) -> tuple[set[int], set[int]]:
        engine.worker.store_fault = no_store_fault
        return set(), {1}

    engine.worker.store_fault = fail_second
    engine.ask(PROMPT)
    keys = keys_of(PROMPT)
    assert engine.control.published == {keys[0], *keys[2:]}
    assert engine.traffic["saves_failed"] == {"broken": 1}
    engine.forget_local()
    engine.ask(PROMPT)
    assert engine.loaded_tokens == 16
    engine.check_all()


def test_reasons_that_are_ever_new_are_counted_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "MOST_REASONS", 2)
    engine.worker.store_fault = lambda job: (set(), {0})
    for number, reason in enumerate(["one", "two", "three", "four", "two"]):
        engine.worker.store_reason = reason
        engine.ask(prompt_of(number, 100))
    assert engine.traffic["saves_failed"] == {"one": 1, "two": 2, "other": 2}
    engine.check_all()


def test_a_failed_demotion_keeps_the_old_block(make: Make) -> None:
    engine = make(device_slots=2, host_slots=8)

    engine.ask(prompt_of(1, 40))
    engine.worker.store_fault = lambda job: (set(range(len(job.demotions))), set())
    engine.ask(prompt_of(2, 40))
    assert engine.control.published == set(keys_of(prompt_of(1, 40)))
    engine.check_all()


def test_saves_of_a_request_whose_prefix_is_invalid_are_dropped(engine: Engine) -> None:
    engine.worker.hold_stores = True
    request_id = engine.add(PROMPT, 40)
    engine.until(lambda: len(engine.answers[request_id]) > 2)
    ((first, *_),) = engine.scheduler.kv_cache_manager.get_block_ids(request_id)
    engine.side._parts.saves.invalidated({first})
    engine.worker.hold_stores = False
    engine.run()
    assert not set(keys_of(PROMPT)) & engine.control.published
    engine.check_all()


def test_a_block_counts_when_every_rank_has_it(make: Make) -> None:
    engine = make(ranks=2)
    request_id = engine.add(PROMPT)
    engine.until(lambda: engine.worker._second_rank)
    assert not engine.control.published
    engine.run()
    assert request_id in engine.reasons
    assert engine.control.published == set(keys_of(PROMPT))
    engine.forget_local()
    engine.ask(PROMPT)
    assert engine.traffic["loads"] == 1
    assert engine.loaded_tokens == 96
    engine.check_all()


def test_a_block_that_one_rank_failed_to_copy_is_dropped(make: Make) -> None:
    engine = make(ranks=2)
    engine.worker.second_rank_fails = {0}
    engine.add(PROMPT, 1)
    engine.run()
    assert engine.control.published == set(keys_of(PROMPT)[1:])
    engine.check_all()


def test_where_one_rank_failed_to_demote_both_blocks_are_gone(make: Make) -> None:
    """On the other rank the new block has overwritten the one that was to move."""
    engine = make(ranks=2, device_slots=2)
    engine.ask(PROMPT[:40], 1)
    engine.worker.second_rank_fails_demotions = engine.worker.second_rank_fails = {0}
    other = prompt_of(2, 40)
    engine.ask(other, 1)
    totals = engine.index.counters().totals
    assert (totals.demotions, totals.failed_demotions, totals.failed_stores) == (1, 1, 1)
    # The end of the old prefix is what was to move first; the start of the new one took its slot.
    assert engine.control.published == {keys_of(PROMPT)[0], keys_of(other)[1]}
    engine.check_all()


@pytest.mark.parametrize("rows", [({7}, set()), (set(), {99}), ({-1}, {0})])
def test_a_report_that_makes_no_sense_costs_no_slot(
    engine: Engine, rows: tuple[set[int], set[int]]
) -> None:
    engine.worker.store_fault = lambda job: rows
    engine.ask(PROMPT)
    counters = engine.index.counters()
    assert engine.traffic["errors"] == {"commit": 1}
    assert (counters.jobs, counters.staging, counters.device_free) == (0, 0, 24)
    engine.worker.store_fault = lambda job: (set(), set())
    engine.forget_local()
    engine.ask(PROMPT)
    assert engine.control.published == set(keys_of(PROMPT))
    engine.check_empty(errors=True)
    engine.check_store()


# --- reset ----------------------------------------------------------------------------------------


def test_reset_with_saves_in_flight_publishes_none_of_them(engine: Engine) -> None:
    finish_with_saves_pending(engine)
    assert engine.scheduler.reset_connector_cache()
    engine.worker.hold_stores = False
    engine.run()
    assert engine.control.published == set()
    assert engine.index.snapshot()[0] == []
    engine.check_all()


@pytest.mark.parametrize("by_operator", [False, True])
def test_nothing_computed_before_a_reset_is_saved_after_it(
    engine: Engine, by_operator: bool
) -> None:
    engine.worker.hold_stores = True
    finished = engine.add(PROMPT, 1)
    running = engine.add(prompt_of(2, 100), 60)
    engine.until(lambda: finished in engine.reasons and len(engine.answers[running]) > 4)
    if by_operator:
        engine.side.clear()
    else:
        engine.scheduler.reset_connector_cache()
    engine.worker.hold_stores = False
    engine.run()
    # The running request goes on with KV from before, and so does all that it computes.
    assert engine.control.published == set()
    engine.check_all()
    engine.ask(prompt_of(2, 100))
    assert engine.control.published == set(keys_of(prompt_of(2, 100)))


@pytest.mark.parametrize("own", [False, True])
def test_a_load_from_before_a_reset_is_not_saved_after_it(engine: Engine, own: bool) -> None:
    if own:
        engine.ask(PROMPT)
        engine.forget_local()
    else:
        share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    loading = engine.add(PROMPT, 40)
    engine.until(lambda: engine.worker.loads)
    engine.scheduler.reset_connector_cache()
    engine.worker.hold_loads = False
    engine.run()
    assert loading in engine.reasons
    assert engine.control.published == set()
    engine.check_all()


def test_reset_gives_back_what_waiting_requests_were_promised(engine: Engine) -> None:
    engine.ask(PROMPT)
    engine.forget_local()
    peer = share(engine, 1, PROMPT + prompt_of(3, 40))
    engine.add(PROMPT + prompt_of(3, 40))
    assert engine.index.counters().leases == peer.leases == 1
    engine.scheduler.reset_connector_cache()
    assert engine.index.counters().leases == peer.leases == 0
    engine.run()
    engine.check_all()


# --- close ----------------------------------------------------------------------------------------


def check_closed(engine: Engine) -> None:
    """The engine goes on without the store, and nothing of it is left."""
    engine.worker.hold_stores = engine.worker.hold_loads = False
    engine.run()
    request_id = engine.add(PROMPT)
    engine.run()
    assert request_id in engine.reasons
    engine.check_answers()
    assert not engine.busy()
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    status = engine.side.status()
    assert status["state"] == "closed"
    assert engine.control.left
    assert (status["pinned_blocks"], status["store_jobs"], status["load_jobs"]) == (0, 0, 0)
    assert not status["hook_failures"]
    assert not status["traffic"]["errors"]
    assert not any(engine._leftovers().values())
    assert all(peer.leases == 0 for peer in engine.control.peers.values())


def test_close_drains_what_is_in_flight(engine: Engine) -> None:
    finish_with_saves_pending(engine)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.side.close, 60.0)
        while not engine.side._closing.is_set():
            threading.Event().wait(0.001)
        engine.worker.hold_stores = False
        engine.run()
        final = closing.result()
    assert final["drained"]
    assert final["keys"] == 0
    check_closed(engine)


def test_close_gives_up_at_its_deadline(engine: Engine) -> None:
    half = prompt_of(2, 100)
    share(engine, 1, half)
    finish_with_saves_pending(engine)
    engine.worker.hold_loads = True
    engine.add(half)
    engine.until(lambda: engine.worker.loads)
    final = engine.side.close(0.0)
    assert not final["drained"]
    assert (final["pinned_blocks"], final["load_jobs"]) == (6, 1)
    assert engine.side.close(60.0) is final
    check_closed(engine)


def test_close_lets_go_of_blocks_that_no_job_has_yet(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.index, "admit", lambda *args, **kwargs: None)
        request_id = engine.add(PROMPT)
        engine.until(lambda: request_id in engine.reasons)
        engine.side.close(0.0)
    check_closed(engine)


def test_close_with_a_promise_and_a_reservation_under_way(engine: Engine) -> None:
    engine.ask(PROMPT[:50])
    engine.forget_local()
    share(engine, 1, PROMPT)
    engine.control.answers_at_once = False
    engine.add(PROMPT)
    engine.step()
    engine.side.close(0.0)
    engine.run()
    engine.control.answer_all()
    check_closed(engine)


def test_shutdown_with_everything_in_flight(engine: Engine) -> None:
    share(engine, 1, prompt_of(2, 100))
    finish_with_saves_pending(engine)
    engine.worker.hold_loads = True
    engine.add(prompt_of(2, 100))
    engine.until(lambda: engine.worker.loads)
    engine.scheduler.shutdown()
    assert engine.control.closed
    assert not engine.connector.failures
