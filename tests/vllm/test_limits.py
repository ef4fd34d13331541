# SPDX-License-Identifier: Apache-2.0
"""Logical limits on a running engine: what goes, what the directory hears, what comes back."""

from __future__ import annotations

import pytest
from vllm_harness import Engine, keys_of, prompt_of

PROMPT = prompt_of(1, 250)


def held(engine: Engine) -> set[bytes]:
    keys, cursor = engine.index.snapshot(0, 1000)
    assert cursor is None
    return set(keys)


def test_a_lower_limit_evicts_at_once_and_the_directory_hears_of_it(engine: Engine) -> None:
    engine.ask(PROMPT)
    assert engine.control.published == held(engine) >= set(keys_of(PROMPT))
    stored = len(held(engine))
    answer = engine.side.set_limits(4, 0)
    assert (answer["limited"], answer["evicted_blocks"]) == (True, stored - 4)
    assert answer["store"]["limits"] == (4, 0)
    assert answer["store"]["capacity"] == (24, answer["store"]["host_slots"])
    assert engine.control.published == held(engine) == set(keys_of(PROMPT)[:4])
    engine.check_all()


def test_a_limited_store_takes_no_more_than_its_limit_until_it_is_raised(engine: Engine) -> None:
    engine.side.set_limits(2, 0)
    engine.ask(PROMPT)
    assert len(held(engine)) == 2
    engine.side.set_limits(24, None)
    engine.forget_local()
    engine.ask(PROMPT)
    assert held(engine) >= set(keys_of(PROMPT))
    assert engine.control.published == held(engine)
    engine.check_all()


def test_leased_blocks_go_with_their_leases_and_an_idle_engine_withdraws_them(
    engine: Engine,
) -> None:
    engine.ask(PROMPT)
    grant = engine.index.acquire(
        keys_of(PROMPT)[:6], reader="b", request="r", now=0.0, duration=60.0
    )
    engine.side.set_limits(0, 0)
    assert engine.control.published == held(engine) == set(keys_of(PROMPT)[:6])
    engine.index.release(grant.lease_id)
    assert held(engine) == set()
    engine.side.withdraw()
    assert engine.control.published == set()
    engine.check_all()


def test_a_limit_while_saves_are_under_way_leaves_nothing_unaccounted(engine: Engine) -> None:
    engine.worker.hold_stores = True
    request_id = engine.add(PROMPT)
    engine.until(lambda: request_id in engine.reasons)
    engine.side.set_limits(1, 0)
    engine.worker.hold_stores = False
    engine.check_all()
    engine.side.withdraw()
    assert engine.control.published == held(engine)
    assert len(held(engine)) <= 1


def test_a_limit_beyond_the_capacity_changes_nothing(engine: Engine) -> None:
    engine.ask(PROMPT)
    before = held(engine)
    with pytest.raises(ValueError, match="device limit is 25"):
        engine.side.set_limits(25, 0)
    assert held(engine) == before
    engine.check_all()


def test_a_closed_store_has_no_limits(engine: Engine) -> None:
    engine.side.close(0.0)
    assert engine.side.set_limits(1, 1) == {"limited": False}
    engine.side.withdraw()
