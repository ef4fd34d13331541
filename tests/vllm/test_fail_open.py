# SPDX-License-Identifier: Apache-2.0
"""Whatever raises on our side: the engine goes on, every request completes, every pin goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import Engine, Make, keys_of, prompt_of, share

from xinference_xavier.vllm.loads import Loads
from xinference_xavier.vllm.lookup import Lookups
from xinference_xavier.vllm.saves import Saves


class BrokenPart(Exception):
    """What the tests inject."""


def parts_of(engine: Engine) -> dict[str, Any]:
    parts = engine.side._parts
    return {
        "index": engine.index,
        "mirror": engine.mirror,
        "control": engine.control,
        "blocks": engine.side._blocks,
        "lookups": parts.lookups,
        "loads": parts.loads,
        "saves": parts.saves,
        "side": engine.side,
    }


def work(engine: Engine) -> None:
    """Cold prompts, own and peers' hits, failing loads, preemption and an abort, interleaved."""
    engine.worker.load_fault = lambda job, row: "broken" if row == 3 else None
    for seed in range(6):
        engine.add(prompt_of(seed, 120), 24)
    engine.steps(3)
    running = [request.request_id for request in engine.scheduler.running]
    if running:
        engine.preempt(running[-1])
    engine.steps(2)
    engine.abort(list(engine.requests)[-2])
    engine.run()
    engine.check_answers()
    engine.forget_local()


BOUNDARIES = [
    *(f"index.{name}" for name in ("acquire", "admit", "commit", "renew", "release")),
    "mirror.longest",
    *(
        f"control.{name}"
        for name in (
            "usable_mask", "reserve", "hold", "release", "member_info", "report_load",
        )
    ),
    *(f"blocks.{name}" for name in ("is_cached", "pin")),
    *(f"lookups.{name}" for name in ("begin", "matched", "settled")),
    *(f"loads.{name}" for name in ("room", "_segments", "_note")),
    *(f"saves.{name}" for name in ("admitted", "extended", "plan", "finished", "_publish")),
    *(f"side.{name}" for name in ("on_new_request", "matched_tokens", "finished")),
]  # fmt: skip


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_engine_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, boundary: str, every: int
) -> None:
    engine = make(blocks=64, device_slots=4, host_slots=40)
    for seed in range(3):
        engine.ask(prompt_of(seed, 50))
    engine.forget_local()
    for seed in range(4):
        share(engine, 1, prompt_of(seed, 120))
    part_name, method = boundary.split(".")
    part = parts_of(engine)[part_name]
    real: Callable[..., Any] = getattr(part, method)
    calls = 0

    def break_sometimes(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise BrokenPart(boundary)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(part, method, break_sometimes)
        work(engine)
    assert calls >= every, "nothing was broken"
    counted = engine.side.status()
    assert counted["hook_failures"] or counted["traffic"]["errors"]
    assert counted["pinned_blocks"] == counted["load_jobs"] == 0
    # What could not be given back runs out by itself.
    engine.index.reap(engine.clock() + 1000)
    engine.control.peers[1].index.reap(engine.clock() + 1000)
    assert engine.index.counters().leases == engine.control.peers[1].leases == 0
    # And once it is whole again, everything works.
    engine.worker.load_fault = lambda job, row: None
    before = engine.loaded_tokens
    fresh = prompt_of(77, 70)
    engine.ask(fresh)
    engine.forget_local()
    engine.ask(fresh)
    assert engine.loaded_tokens - before >= 64
    engine.check_store()


def test_a_missed_extension_never_names_a_wrong_block(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1, 20)
    request_id = engine.add(prompt, 100)
    engine.steps(4)
    real = Saves.extended
    missed: list[str] = []

    def miss_one(self: Saves, *args: Any) -> None:
        if not missed:
            missed.append("one")
            raise BrokenPart
        real(self, *args)

    monkeypatch.setattr(Saves, "extended", miss_one)
    engine.run()
    assert missed
    assert request_id in engine.reasons
    engine.check_store()
    # The block after the prompt's may have been saved before the table grew.
    tokens = list(engine.requests[request_id].all_token_ids)
    assert set(keys_of(prompt)) <= engine.control.published <= set(keys_of(tokens[:32]))


@pytest.mark.parametrize("part", [Lookups, Loads, Saves])
def test_the_injected_parts_are_the_ones_in_use(engine: Engine, part: type) -> None:
    assert any(type(found) is part for found in parts_of(engine).values())
