# SPDX-License-Identifier: Apache-2.0
"""How fast prefill and loads have been, to decline loads that would cost more than they save."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

SMOOTHING: Final = 0.3
"""Weight of the newest measurement."""

SMALL_STEP: Final = 64
"""Steps of fewer tokens say little about prefill speed: decode and launch costs dominate."""

TRY_AGAIN: Final = 16
"""Every so many declined loads from a source one is let through, so that the estimate heals."""

MOST_SOURCES: Final = 256
"""Sources that are kept; the oldest are forgotten, since members come and go for months."""


class Pace:
    """Measured seconds per token: of prefill, and of loads by source (a member number)."""

    def __init__(self) -> None:
        self._prefill: float | None = None
        self._loads: dict[int, float] = {}
        self._declined: dict[int, int] = {}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note one step that computed ``tokens`` tokens in ``seconds``."""
        if tokens >= SMALL_STEP and seconds > 0:
            self._prefill = _smooth(self._prefill, seconds / tokens)

    def loaded(self, source: int, tokens: int, seconds: float) -> None:
        """Note one finished load of ``tokens`` tokens."""
        if tokens > 0 and seconds > 0:
            self._loads[source] = _smooth(self._loads.pop(source, None), seconds / tokens)
            if len(self._loads) > MOST_SOURCES:
                oldest = next(iter(self._loads))
                del self._loads[oldest]
                self._declined.pop(oldest, None)

    def worth_loading(self, source: int) -> bool:
        """Whether loading a token from ``source`` beats computing it; True while unmeasured."""
        load = self._loads.get(source)
        if load is None or self._prefill is None or load < self._prefill:
            return True
        declined = self._declined.get(source, 0) + 1
        self._declined[source] = declined % TRY_AGAIN
        return declined == TRY_AGAIN

    def to_dict(self) -> dict[str, object]:
        """Return tokens per second, for people."""
        return {
            "prefill_tokens_per_s": None if self._prefill is None else 1 / self._prefill,
            "load_tokens_per_s": {str(s): 1 / cost for s, cost in list(self._loads.items())},
        }


class Steps:
    """Tells a pace how long steps take that compute a prompt; the engine's thread.

    With two steps in flight, one has run only since the one before it ended.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = pace
        self._clock = clock
        self._number = 0
        self._in_flight: deque[tuple[int, int, float]] = deque()
        """Number, tokens and start of each."""
        self._last_end = 0.0

    def started(self, tokens: int) -> int:
        """Return the number under which a step is to be reported, 0 if it says nothing."""
        if tokens < SMALL_STEP:
            return 0
        self._number += 1
        self._in_flight.append((self._number, tokens, self._clock()))
        return self._number

    def ended(self, number: int) -> None:
        """Note the end of a step; those that began before it are not reported any more."""
        now = self._clock()
        while self._in_flight and self._in_flight[0][0] <= number:
            found, tokens, started = self._in_flight.popleft()
            if found == number:
                self._pace.prefilled(tokens, now - max(started, self._last_end))
        self._last_end = now


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
