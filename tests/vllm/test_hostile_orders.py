# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers and block pool, the real worker side, and forwards and copies in bad orders.

With ``AsyncScheduler`` two steps are in flight: blocks are freed and given to a load while a step
of their last owner is still queued, and copies of one step compete with the forward of the next.
Answers and stored blocks must be right in each order that a device may choose. No per-layer hook
takes part, so it makes no difference whether forwards are replayed CUDA graphs.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from deferred_worker import CUDA
from test_fuzz import Fuzz
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm_harness import Engine, Make, prompt_of

from tests.deferring import ORDERS
from xinference_xavier.vllm.connector import XavierConnector

PROMPT = prompt_of(1, 100)


@pytest.fixture(params=[*ORDERS, CUDA])
def hostile(make: Make, request: pytest.FixtureRequest) -> Make:
    return functools.partial(make, order=request.param)


def test_saved_blocks_are_restored(hostile: Make) -> None:
    engine: Engine = hostile()
    engine.ask(PROMPT)
    engine.forget_local()
    engine.ask(PROMPT)
    assert engine.loaded_tokens == 96
    engine.check_all()


def test_a_small_device_tier_demotes_and_both_tiers_give_back(hostile: Make) -> None:
    engine: Engine = hostile(device_slots=3, host_slots=40)
    for seed in range(4):
        engine.ask(prompt_of(seed, 100))
    engine.forget_local()
    for seed in range(4):
        engine.ask(prompt_of(seed, 100))
    assert {"own_device", "own_host"} <= set(engine.traffic["loaded_tokens"])
    engine.check_all()


def test_restored_blocks_are_promoted_where_there_is_room(hostile: Make) -> None:
    engine: Engine = hostile(device_slots=6, host_slots=40)
    for seed in range(3):
        engine.ask(prompt_of(seed, 100))
    engine.index.set_limits(device_slots=0)
    engine.index.set_limits(device_slots=6)
    engine.forget_local()
    engine.ask(prompt_of(0, 100))
    assert engine.index.counters().totals.promotions > 0
    engine.check_all()
    engine.ask(prompt_of(0, 100))
    assert engine.traffic["loaded_tokens"]["own_device"] > 0
    engine.check_all()


def test_the_status_says_whether_the_host_tier_is_pinned(make: Make) -> None:
    store = make(order=CUDA).side.status()["store"]
    assert (store["host_pinned"], store["unpinned_reason"]) == (True, None)
    assert store["device_staging_slots"] == 0


def test_blocks_taken_from_a_step_in_flight_hold_what_was_loaded(hostile: Make) -> None:
    """Aborted with a step in flight, a request still writes into blocks that a load has now."""
    engine: Engine = hostile(blocks=16)
    engine.ask(PROMPT)
    for seed in range(2, 8):
        engine.forget_local()
        victim = engine.add(prompt_of(seed, 200), 40)
        engine.until(lambda victim=victim: len(engine.answers[victim]) > 3)
        engine.abort(victim)
        engine.ask(PROMPT)
    assert engine.loaded_tokens > 3 * 96
    engine.check_all()


def test_blocks_of_a_preempted_request_are_loaded_again(hostile: Make) -> None:
    engine: Engine = hostile(blocks=40)
    running = engine.add(PROMPT, 40)
    engine.until(lambda: len(engine.answers[running]) > 20)
    engine.preempt(running)
    others = [engine.add(prompt_of(seed, 100), 20) for seed in (2, 3)]
    engine.run()
    assert {running, *others} <= set(engine.reasons)
    engine.check_all()


@pytest.mark.parametrize("seed", range(2))
def test_random_lives(hostile: Make, seed: int) -> None:
    Fuzz(functools.partial(hostile, seed=seed), seed).run(250)


def test_the_random_lives_load_and_demote(make: Make, scheduler_class: type) -> None:
    """With two steps in flight, too; else they prove nothing."""
    loaded: set[str] = set()
    demotions = 0
    # How many lives that takes depends on when the threads come round to their copies.
    for seed in range(200, 220):
        fuzz = Fuzz(functools.partial(make, order="late", seed=seed), seed)
        fuzz.run(250)
        loaded |= set(fuzz.engine.traffic["loaded_tokens"])
        demotions += fuzz.engine.index.counters().totals.demotions
        if demotions and {"own_device", "own_host"} <= loaded:
            break
    assert demotions
    assert {"own_device", "own_host"} <= loaded
    assert fuzz.engine._depth == (2 if issubclass(scheduler_class, AsyncScheduler) else 1)


def test_no_per_layer_hook_is_used() -> None:
    """What a captured graph would not run again: vLLM need not split graphs at attention."""
    assert not XavierConnector.requires_piecewise_for_cudagraph({})
    nobody: Any = object()  # whatever a hook looked at would be missing
    XavierConnector.wait_for_layer_load(nobody, "layer")
    XavierConnector.save_kv_layer(nobody, "layer", torch.zeros(1), nobody)
