# SPDX-License-Identifier: Apache-2.0
"""The breaker of one peer."""

from __future__ import annotations

from xinference_xavier.control.breaker import FAILURES_TO_OPEN, Breaker, BreakerState


def opened(breaker: Breaker, now: float) -> Breaker:
    for _ in range(FAILURES_TO_OPEN):
        breaker.failure(now, "lost")
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(1.0, 30.0)
    for _ in range(5):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failure(0.0, "lost")
        breaker.success()
    assert breaker.usable
    opened(breaker, 10.0)
    assert not breaker.usable
    assert (breaker.retry_at, breaker.reason) == (11.0, "lost")


def test_a_good_probe_half_opens_and_one_success_closes_it() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.success()  # an answer to a request sent before it opened
    assert not breaker.usable
    breaker.probed(True, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.usable
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.reason is None
    assert opened(breaker, 5.0).retry_at == 6.0


def test_each_failure_after_a_probe_doubles_the_delay_up_to_its_limit() -> None:
    breaker = opened(Breaker(1.0, 4.0), 0.0)
    delays = [breaker.retry_at]
    for _ in range(3):
        breaker.probed(True, 0.0)
        breaker.failure(0.0, "lost")
        delays.append(breaker.retry_at)
    assert delays == [1.0, 2.0, 4.0, 4.0]


def test_a_bad_probe_keeps_it_open_for_longer() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.probed(False, 1.0)
    assert not breaker.usable
    assert breaker.retry_at == 3.0


def test_late_failures_do_not_prolong_an_open_breaker() -> None:
    breaker = opened(Breaker(1.0, 30.0), 0.0)
    breaker.failure(0.5, "lost")
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
