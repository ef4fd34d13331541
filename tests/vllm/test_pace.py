# SPDX-License-Identifier: Apache-2.0
"""How the speed of prefill and of loads is measured, and what is forgotten of it."""

from __future__ import annotations

import pytest
from vllm_harness import Clock

from xinference_xavier.vllm.pace import MOST_SOURCES, SMALL_STEP, TRY_AGAIN, Pace, Steps


def speed(pace: Pace) -> object:
    return pace.to_dict()["prefill_tokens_per_s"]


def test_of_two_steps_in_flight_each_is_measured_from_the_end_of_the_one_before() -> None:
    pace, clock = Pace(), Clock()
    steps = Steps(pace, clock)
    first, second = steps.started(SMALL_STEP), steps.started(SMALL_STEP)
    clock.now += 2.0
    steps.ended(first)
    assert speed(pace) == SMALL_STEP / 2.0
    clock.now += 2.0
    steps.ended(second)
    assert speed(pace) == SMALL_STEP / 2.0


def test_a_small_step_has_no_number_and_only_ends() -> None:
    pace, clock = Pace(), Clock()
    steps = Steps(pace, clock)
    small, large = steps.started(SMALL_STEP - 1), steps.started(SMALL_STEP)
    assert (small, large) == (0, 1)
    clock.now += 5.0
    steps.ended(small)
    assert speed(pace) is None
    clock.now += 1.0
    steps.ended(large)
    assert speed(pace) == SMALL_STEP


def test_steps_that_nobody_reports_are_forgotten_and_not_measured() -> None:
    pace, clock = Pace(), Clock()
    steps = Steps(pace, clock)
    numbers = [steps.started(SMALL_STEP) for _ in range(5)]
    clock.now += 1.0
    steps.ended(numbers[-1])
    assert speed(pace) == SMALL_STEP
    assert not steps._in_flight
    clock.now += 1.0
    steps.ended(numbers[0])
    assert speed(pace) == SMALL_STEP


def test_sources_that_left_long_ago_are_forgotten() -> None:
    pace = Pace()
    pace.prefilled(SMALL_STEP, 1.0)
    for member in range(2 * MOST_SOURCES):
        pace.loaded(member, 1, 1000.0)
        assert not pace.worth_loading(member)
        pace.loaded(0, 1, 1000.0)
    kept = pace.to_dict()["load_tokens_per_s"]
    assert isinstance(kept, dict)
    assert set(kept) == {"0", *map(str, range(MOST_SOURCES + 1, 2 * MOST_SOURCES))}
    assert len(pace._declined) == MOST_SOURCES
    assert pace.worth_loading(MOST_SOURCES)


@pytest.mark.parametrize("source", [0, 7])
def test_a_slow_source_is_tried_again_now_and_then(source: int) -> None:
    pace = Pace()
    pace.prefilled(SMALL_STEP, 1.0)
    pace.loaded(source, 1, 1000.0)
    tries = [pace.worth_loading(source) for _ in range(2 * TRY_AGAIN)]
    assert tries == [*[False] * (TRY_AGAIN - 1), True] * 2
