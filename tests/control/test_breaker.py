# SPDX-License-Identifier: Apache-2.0
"""The breaker of one peer."""

from __future__ import annotations

import pytest

from xinference_xavier.control.breaker import FAILURES_TO_OPEN, Breaker, BreakerState, Plane


def opened(breaker: Breaker, now: float) -> Breaker:
    for _ in range(FAILURES_TO_OPEN):
        breaker.failure(Plane.CONTROL, now, "lost")
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(1.0, 30.0)
    for _ in range(5):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failure(Plane.CONTROL, 0.0, "lost")
        breaker.success(Plane.CONTROL)
    assert breaker.usable
    opened(breaker, 10.0)
    assert not breaker.usable
    assert (breaker.retry_at, breaker.reason) == (11.0, "lost")


def test_a_good_probe_half_opens_and_one_success_closes_it() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.success(Plane.CONTROL)  # an answer to a request sent before it opened
    assert not breaker.usable
    breaker.probed(True, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.usable
    breaker.success(Plane.CONTROL)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.reason is None
    assert opened(breaker, 5.0).retry_at == 6.0


def test_each_failure_after_a_probe_doubles_the_delay_up_to_its_limit() -> None:
    breaker = opened(Breaker(1.0, 4.0), 0.0)
    delays = [breaker.retry_at]
    for _ in range(3):
        breaker.probed(True, 0.0)
        breaker.failure(Plane.CONTROL, 0.0, "lost")
        delays.append(breaker.retry_at)
    assert delays == [1.0, 2.0, 4.0, 4.0]


def test_a_bad_probe_keeps_it_open_for_longer() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.probed(False, 1.0)
    assert not breaker.usable
    assert breaker.retry_at == 3.0


def test_late_failures_do_not_prolong_an_open_breaker() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.failure(Plane.CONTROL, 0.5, "lost")
    breaker.trip(0.5, "closed")
    assert breaker.retry_at == 1.0


def test_a_peer_that_says_no_trips_it_at_once() -> None:
    breaker = Breaker(1.0, 30.0)
    breaker.trip(0.0, "draining")
    assert not breaker.usable
    assert breaker.reason == "draining"


def test_a_probe_without_need_changes_nothing() -> None:
    breaker = Breaker(1.0, 30.0)
    breaker.probed(False, 0.0)
    assert breaker.state is BreakerState.CLOSED


# -- loads -----------------------------------------------------------------------------------------


def test_good_calls_do_not_hide_failing_loads() -> None:
    breaker = Breaker(1.0, 30.0)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.admit("load")
        breaker.success(Plane.CONTROL)
        breaker.failure(Plane.DATA, 0.0, "generation")
    assert breaker.state is BreakerState.OPEN
    assert (breaker.retry_at, breaker.reason) == (1.0, "generation")
    assert not breaker.admit("load")


def test_good_loads_do_not_hide_failing_calls() -> None:
    breaker = Breaker(1.0, 30.0)
    for _ in range(FAILURES_TO_OPEN):
        breaker.success(Plane.DATA)
        breaker.failure(Plane.CONTROL, 0.0, "lost")
    assert breaker.state is BreakerState.OPEN


def test_a_good_load_clears_the_failed_ones() -> None:
    breaker = Breaker(1.0, 30.0)
    for _ in range(2):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failure(Plane.DATA, 0.0, "generation")
        breaker.success(Plane.DATA)
    assert breaker.usable
    assert breaker.reason is None


def loads_failed(breaker: Breaker) -> Breaker:
    for _ in range(FAILURES_TO_OPEN):
        breaker.failure(Plane.DATA, 0.0, "generation")
    breaker.probed(True, 1.0)
    return breaker


def test_after_failed_loads_one_load_tries_and_only_a_good_one_closes() -> None:
    breaker = loads_failed(Breaker(1.0, 30.0))
    assert breaker.admit("first")
    assert not breaker.usable
    assert not breaker.admit("second")
    breaker.success(Plane.CONTROL)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.usable
    breaker.success(Plane.DATA)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit("second")
    assert breaker.admit("third")


def test_a_trial_that_ends_undecided_makes_room_for_the_next() -> None:
    breaker = loads_failed(Breaker(1.0, 30.0))
    assert breaker.admit("first")
    assert not breaker.end_trial("another")
    assert breaker.end_trial("first")
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit("second")


@pytest.mark.parametrize("plane", list(Plane))
def test_any_failure_on_trial_opens_it_for_longer_and_a_load_must_still_prove_it(
    plane: Plane,
) -> None:
    breaker = loads_failed(Breaker(1.0, 4.0))
    delays = []
    for _ in range(3):
        assert breaker.admit("load")
        breaker.failure(plane, 0.0, "lost")
        assert not breaker.usable
        delays.append(breaker.retry_at)
        breaker.probed(True, 0.0)
    assert delays == [2.0, 4.0, 4.0]
    breaker.success(Plane.CONTROL)
    assert breaker.state is BreakerState.HALF_OPEN


def test_after_failed_calls_loads_are_not_rationed() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.probed(True, 1.0)
    assert breaker.admit("first")
    assert breaker.admit("second")
    breaker.success(Plane.DATA)
    assert breaker.state is BreakerState.HALF_OPEN
