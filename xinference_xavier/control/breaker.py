# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker for one peer: pure state, time is passed in."""

from __future__ import annotations

from enum import StrEnum

FAILURES_TO_OPEN = 3


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after three failures in a row, or at once when tripped.

    An open breaker asks for a probe at ``retry_at``. A good probe half-opens it: the peer is used
    again, the next success closes it, the next failure opens it for twice as long.
    """

    def __init__(self, min_delay_s: float, max_delay_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0
        self.reason: str | None = None
        self._min = min_delay_s
        self._max = max_delay_s
        self._delay = min_delay_s
        self._failures = 0

    @property
    def usable(self) -> bool:
        return self.state is not BreakerState.OPEN

    def success(self) -> None:
        if self.state is BreakerState.OPEN:
            return  # of a request that was sent before; only a probe ends the delay
        self.state = BreakerState.CLOSED
        self.reason = None
        self._failures = 0
        self._delay = self._min

    def failure(self, now: float, reason: str) -> None:
        if self.state is BreakerState.OPEN:
            return
        self.reason = reason
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= FAILURES_TO_OPEN:
            self._open(now)

    def trip(self, now: float, reason: str) -> None:
        """Open without counting: the peer said that it serves nobody."""
        if self.state is not BreakerState.OPEN:
            self.reason = reason
            self._open(now)

    def probed(self, ok: bool, now: float) -> None:
        """Tell the outcome of the probe that an open breaker asked for."""
        if self.state is not BreakerState.OPEN:
            return
        if ok:
            self.state = BreakerState.HALF_OPEN
        else:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self.retry_at = now + self._delay
        self._delay = min(self._delay * 2, self._max)
        self._failures = 0
