# SPDX-License-Identifier: Apache-2.0
"""How a replica ends: its requests first, or with its engine."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from xinference_xavier.extension.vllm import ending
from xinference_xavier.extension.vllm.ending import drain, end_with_engine


class Engine:
    """Has as many requests as the script says, one number per look; time passes at each."""

    def __init__(self, script: list[int], dead_after: int | None = None) -> None:
        self.output_processor = self
        self.looks = 0
        self._script = script
        self._dead_after = dead_after

    @property
    def errored(self) -> bool:
        return self._dead_after is not None and self.looks >= self._dead_after

    def get_num_unfinished_requests(self) -> int:
        self.looks += 1
        return self._script[min(self.looks, len(self._script)) - 1]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only in ``sleep``."""
    now = [100.0]
    monkeypatch.setattr(ending.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_replica_without_requests_ends_after_a_quiet_moment(clock: list[float]) -> None:
    drain(Engine([0]), "m-rep0")
    assert clock[0] - 100 == pytest.approx(ending.QUIET_S, abs=ending.QUIET_S / 5)


def test_requests_run_to_their_end_and_late_ones_too(clock: list[float]) -> None:
    engine = Engine([2] * 40 + [0] * 5 + [1] * 10 + [0])
    drain(engine, "m-rep0")
    assert engine.looks >= 65
    assert clock[0] - 100 < ending.DRAIN_TIMEOUT_S


def test_requests_that_do_not_end_are_told_and_ended(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        drain(Engine([3]), "m-rep0")
    assert clock[0] - 100 == pytest.approx(ending.DRAIN_TIMEOUT_S, abs=ending.QUIET_S)
    assert "m-rep0 has 3 requests left" in caplog.text


def test_nobody_waits_for_the_requests_of_a_dead_engine(clock: list[float]) -> None:
    drain(Engine([3], dead_after=4), "m-rep0")
    assert clock[0] - 100 < ending.QUIET_S


def test_a_replica_ends_with_its_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)

    async def check(interval: int) -> None:
        raise EngineDeadError

    asyncio.run(end_with_engine("m-rep0", check, lambda: False))
    assert ends == [1]
    assert "The engine of m-rep0 died" in caplog.text


def test_a_check_that_ends_by_itself_or_is_cancelled_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)

    async def stopped(interval: int) -> None:
        pass

    async def cancelled(interval: int) -> None:
        raise asyncio.CancelledError

    asyncio.run(end_with_engine("m-rep0", stopped, lambda: False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(end_with_engine("m-rep0", cancelled, lambda: False))
    assert ends == []


def test_a_replica_that_ends_its_engine_goes_on_to_end_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)

    async def check(interval: int) -> None:
        # An engine that was shut down looks dead before the check on it is cancelled.
        raise EngineDeadError

    asyncio.run(end_with_engine("m-rep0", check, lambda: True))
    assert ends == []
