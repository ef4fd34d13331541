# SPDX-License-Identifier: Apache-2.0
"""Staging slots are lent once at a time and come back only when nothing can write them."""

from __future__ import annotations

import threading
import time

import pytest

from tests.waiting import WAIT_S
from xinference_xavier.transport.pool import StagingPool


def soon() -> float:
    return time.monotonic() + WAIT_S


def free(pool: StagingPool) -> int:
    """Return how many slots could be lent now."""
    try:
        with pool.lend(99, deadline=time.monotonic()) as slots:
            return len(slots)
    except TimeoutError:
        return 0


def test_slots_are_lent_lowest_first_up_to_what_is_asked() -> None:
    pool = StagingPool(range(10, 16), frozenset)
    with pool.lend(4, deadline=soon()) as first, pool.lend(4, deadline=soon()) as second:
        assert (first, second) == ([10, 11, 12, 13], [14, 15])
        assert free(pool) == 0
    assert free(pool) == 6


def test_slots_come_back_after_an_error() -> None:
    pool = StagingPool(range(2), frozenset)
    with pytest.raises(RuntimeError), pool.lend(2, deadline=soon()):
        raise RuntimeError
    assert free(pool) == 2


def test_a_lender_out_of_slots_waits_for_the_next_return() -> None:
    pool = StagingPool(range(1), frozenset)
    got: list[int] = []

    def take() -> None:
        with pool.lend(1, deadline=soon()) as slots:
            got.extend(slots)

    with pool.lend(1, deadline=soon()):
        thread = threading.Thread(target=take)
        thread.start()
        assert got == []
    thread.join(WAIT_S)
    assert got == [0]


def test_waiting_ends_at_the_deadline() -> None:
    pool = StagingPool(range(0), frozenset)
    with pytest.raises(TimeoutError), pool.lend(1, deadline=time.monotonic()):
        pass


def test_quarantined_slots_return_when_their_transfer_is_over() -> None:
    stuck: set[int] = set()
    pool = StagingPool(range(4), lambda: frozenset(stuck))
    with pool.lend(3, deadline=soon()):
        stuck.update({0, 2})
    assert free(pool) == 2
    with pool.lend(4, deadline=soon()) as slots:
        assert slots == [1, 3]
    stuck.clear()
    assert free(pool) == 4


def test_a_waiter_notices_that_a_quarantine_ended() -> None:
    stuck = {0}
    pool = StagingPool(range(1), lambda: frozenset(stuck))
    with pool.lend(1, deadline=soon()):
        pass
    assert free(pool) == 0
    release = threading.Timer(0.01, stuck.clear)
    release.start()
    with pool.lend(1, deadline=soon()) as slots:
        assert slots == [0]
