# SPDX-License-Identifier: Apache-2.0
"""A transport is demoted for one tier of one peer, for a while, by reads that fail."""

from __future__ import annotations

import pytest

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransferFailed, TransferTimeout
from xinference_xavier.transport.faults import DEMOTION_S, FAIR_S, Faults, blames

D, H = Tier.DEVICE, Tier.HOST
BROKEN, LATE = TransferFailed("broken"), TransferTimeout("late")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock: Clock) -> Faults:
    return Faults(clock)


def test_one_timeout_or_two_failures_demote(faults: Faults) -> None:
    assert faults.add(1, H, "nixl", LATE)
    assert not faults.add(2, H, "nixl", BROKEN)
    assert not faults.demoted(2, H, "nixl")
    assert faults.add(2, H, "nixl", BROKEN)
    assert faults.demoted(1, H, "nixl")
    assert faults.demoted(2, H, "nixl")


def test_a_demotion_is_told_once(faults: Faults) -> None:
    assert [faults.add(1, H, "nixl", LATE) for _ in range(3)] == [True, False, False]


def test_other_peers_tiers_and_transports_are_spared(faults: Faults) -> None:
    faults.add(1, H, "nixl", LATE)
    assert not faults.demoted(1, D, "nixl")
    assert not faults.demoted(2, H, "nixl")
    assert not faults.demoted(1, H, "xoscar")


def test_a_demotion_ends(faults: Faults, clock: Clock) -> None:
    faults.add(1, H, "nixl", LATE)
    clock.now += DEMOTION_S - 0.1
    assert faults.demoted(1, H, "nixl")
    clock.now += 0.1
    assert not faults.demoted(1, H, "nixl")
    assert not faults.add(1, H, "nixl", BROKEN)
    assert not faults.demoted(1, H, "nixl")


def test_a_load_that_worked_wipes_the_slate(faults: Faults) -> None:
    faults.add(1, H, "nixl", BROKEN)
    faults.clear(1, H, "nixl")
    faults.add(1, H, "nixl", BROKEN)
    assert not faults.demoted(1, H, "nixl")


def test_only_a_timeout_of_a_read_with_too_little_time_is_excused() -> None:
    assert blames(LATE, FAIR_S)
    assert not blames(LATE, FAIR_S / 2)
    assert blames(BROKEN, 0.0)
