# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker for one peer: pure state, time is passed in."""

from __future__ import annotations

from enum import StrEnum

FAILURES_TO_OPEN = 3


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Plane(StrEnum):
    """What succeeded or failed: a call to the peer, or a load of its blocks."""

    CONTROL = "control"
    DATA = "data"


class Breaker:
    """Opens after three failures of one plane in a row, or at once when tripped.

    The planes are counted apart: each load follows a good call, which says nothing of loads.

    An open breaker asks for a probe at ``retry_at``. A good probe half-opens it. Then, if calls had
    failed, the peer is used again; if loads had failed, one load at a time is let through. The
    next success of the plane that failed closes it, any failure opens it for twice as long.
    """

    def __init__(self, min_delay_s: float, max_delay_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0
        self.reason: str | None = None
        self._min = min_delay_s
        self._max = max_delay_s
        self._delay = min_delay_s
        self._failures = dict.fromkeys(Plane, 0)
        self._cause = Plane.CONTROL
        self._trial: object | None = None

    @property
    def usable(self) -> bool:
        """Whether another load may be begun now."""
        if self.state is BreakerState.HALF_OPEN:
            return self._trial is None
        return self.state is BreakerState.CLOSED

    def admit(self, load: object) -> bool:
        """Begin ``load``; False if none may be begun.

        One that is admitted on trial keeps all others out until a success or failure is told, or
        :meth:`end_trial`.
        """
        if not self.usable:
            return False
        if self.state is BreakerState.HALF_OPEN and self._cause is Plane.DATA:
            self._trial = load
        return True

    def on_trial(self, load: object) -> bool:
        return self._trial is load

    def end_trial(self, load: object) -> bool:
        """Let the next load try, for this one ended undecided; False if it is not on trial."""
        if self._trial is not load:
            return False
        self._trial = None
        return True

    def success(self, plane: Plane) -> None:
        if self.state is BreakerState.OPEN:
            return  # of a request that was sent before; only a probe ends the delay
        self._failures[plane] = 0
        if self.state is BreakerState.HALF_OPEN:
            if plane is not self._cause:
                return
            self.state = BreakerState.CLOSED
            self._delay = self._min
            self._trial = None
        if not any(self._failures.values()):
            self.reason = None

    def failure(self, plane: Plane, now: float, reason: str) -> None:
        if self.state is BreakerState.OPEN:
            return
        self.reason = reason
        self._failures[plane] += 1
        if self.state is BreakerState.HALF_OPEN or self._failures[plane] >= FAILURES_TO_OPEN:
            self._open(plane, now)

    def trip(self, now: float, reason: str) -> None:
        """Open without counting: the peer said that it serves nobody."""
        if self.state is not BreakerState.OPEN:
            self.reason = reason
            self._open(Plane.CONTROL, now)

    def probed(self, ok: bool, now: float) -> None:
        """Tell the outcome of the probe, a call, that an open breaker asked for."""
        if self.state is not BreakerState.OPEN:
            return
        if ok:
            self.state = BreakerState.HALF_OPEN
            self._failures[Plane.CONTROL] = 0
        else:
            self._delay_again(now)

    def _open(self, plane: Plane, now: float) -> None:
        if self.state is BreakerState.CLOSED or plane is Plane.DATA:
            self._cause = plane  # else loads that failed before are still unproven
        self.state = BreakerState.OPEN
        self._trial = None
        self._delay_again(now)

    def _delay_again(self, now: float) -> None:
        self.retry_at = now + self._delay
        self._delay = min(self._delay * 2, self._max)
