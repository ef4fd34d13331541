# SPDX-License-Identifier: Apache-2.0
"""Where a request's prompt tokens came from: told with its answer, and counted once."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import BLOCK
from hypothesis import given
from hypothesis import strategies as st
from vllm_harness import Engine, Make, prompt_of, share

from xinference_xavier.metrics.table import SOURCES
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.usage import Usages

PROMPT = prompt_of(1, 100)


def usage(**tokens: int) -> dict[str, int]:
    return {**dict.fromkeys(SOURCES, 0), **tokens}


def computed_tokens(engine: Engine, request_id: str) -> int:
    """Prompt tokens that the worker really computed for a request that was never preempted."""
    return engine.requests[request_id].num_prompt_tokens - engine.worker.starts[request_id]


def test_a_cold_request_has_no_source(engine: Engine) -> None:
    request_id = engine.ask(PROMPT)
    assert engine.usages[request_id] == usage()
    assert engine.traffic["hits"] == engine.traffic["hit_tokens"] == usage()
    assert engine.traffic["prompt_tokens"] == 100


def test_each_source_is_told(make: Make) -> None:
    engine = make(device_slots=2, host_slots=12)
    engine.ask(PROMPT[:70])
    engine.forget_local()
    engine.ask(PROMPT[:17])
    share(engine, 1, PROMPT)
    request_id = engine.ask(PROMPT)
    told = engine.usages[request_id]
    assert told["local"] == 16
    assert told["own_device"] + told["own_host"] == 48
    assert told["own_device"]
    assert told["own_host"]
    assert told["peer_device"] == 32
    assert engine.cached[request_id] == sum(told.values()) == 96
    assert 100 - sum(told.values()) == computed_tokens(engine, request_id)


def test_the_last_token_of_a_full_hit_counts_as_computed(engine: Engine) -> None:
    share(engine, 1, PROMPT[:64])
    request_id = engine.ask(PROMPT[:64])
    assert engine.usages[request_id] == usage(peer_device=63)
    assert engine.cached[request_id] == 64
    assert computed_tokens(engine, request_id) == 1


@pytest.mark.parametrize("row", range(6))
def test_what_a_load_did_not_bring_was_computed(engine: Engine, row: int) -> None:
    engine.ask(PROMPT[:50])
    engine.forget_local()
    share(engine, 1, PROMPT)
    engine.worker.load_fault = lambda job, number: "broken" if number == row else None
    request_id = engine.ask(PROMPT)
    own, peer = min(row, 3) * BLOCK, max(0, row - 3) * BLOCK
    assert engine.usages[request_id] == usage(own_device=own, peer_device=peer)
    assert computed_tokens(engine, request_id) == 100 - own - peer


def test_a_load_that_brought_nothing_is_no_hit(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.worker.load_fault = lambda job, number: "broken"
    engine.ask(PROMPT)
    assert engine.traffic["hits"] == usage()
    engine.check_all()


def test_a_request_that_starts_again_is_counted_once(make: Make) -> None:
    engine = make(device_slots=24)
    engine.ask(PROMPT)
    engine.forget_local()
    request_id = engine.add(PROMPT, 20)
    engine.until(lambda: len(engine.answers[request_id]) >= 3)
    engine.preempt(request_id)
    engine.run()
    engine.check_answers()
    assert engine.usages[request_id] == usage(own_device=96)
    assert engine.traffic["hits"] == usage(own_device=1)
    assert engine.traffic["hit_tokens"] == usage(own_device=96)
    assert engine.traffic["prompt_tokens"] == 200


def test_an_aborted_request_leaves_nothing(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    waiting = engine.add(PROMPT)
    engine.abort(waiting)
    running = engine.add(PROMPT, 50)
    engine.until(lambda: engine.answers[running])
    engine.abort(running)
    engine.check_all()
    assert engine.usages == {}
    assert engine.traffic["hits"] == usage(peer_device=1)


def test_a_bypassed_request_is_told_but_is_neither_hit_nor_miss(engine: Engine) -> None:
    engine.ask(PROMPT)
    before = engine.traffic
    request_id = engine.ask(PROMPT, prompt_logprobs=1)
    assert engine.usages[request_id] == usage()
    after = engine.traffic
    for name in ("prompt_tokens", "hits", "hit_tokens", "lookups_missed"):
        assert after[name] == before[name]
    assert sum(after["bypassed"].values()) == 1


def test_what_was_loaded_before_a_clear_was_loaded(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    engine.side.reset()
    engine.worker.hold_loads = False
    engine.worker.run_loads()
    engine.run()
    assert engine.usages[request_id] == usage(peer_device=96)


@given(
    local=st.integers(0, 5),
    loaded=st.lists(st.tuples(st.sampled_from(SOURCES[1:]), st.integers(1, 4)), max_size=6),
    tail=st.integers(0, BLOCK),
    lost=st.integers(0, 3),
)
def test_the_sources_add_up_to_what_was_not_computed(
    local: int, loaded: list[tuple[str, int]], tail: int, lost: int
) -> None:
    counters = Counters()
    usages = Usages(counters)
    blocks = local + sum(count for _, count in loaded)
    prompt = blocks * BLOCK + tail
    ready = min(blocks * BLOCK, max(0, prompt - 1)) if loaded else local * BLOCK
    ready = max(0, ready - lost * BLOCK)
    arguments: dict[str, Any] = {
        "prompt_tokens": prompt,
        "local_tokens": local * BLOCK,
        "ready_tokens": ready,
        "loaded": [(source, count * BLOCK) for source, count in loaded],
        "looked_up": True,
    }
    usages.started("r", **arguments)
    usages.started("r", **arguments)
    told = usages.finished("r")
    assert told is not None
    assert sum(told.values()) == ready
    assert min(told.values()) >= 0
    assert counters.hit_tokens == told
    assert counters.prompt_tokens == prompt
    assert usages.finished("r") is None
    assert not len(usages)
