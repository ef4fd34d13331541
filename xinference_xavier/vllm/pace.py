# SPDX-License-Identifier: Apache-2.0
"""How fast prefill and loads have been, to decline loads that would cost more than they save."""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.3
"""Weight of the newest measurement."""

SMALL_STEP: Final = 64
"""Steps of fewer tokens say little about prefill speed: decode and launch costs dominate."""

TRY_AGAIN: Final = 16
"""Every so many declined loads from a source one is let through, so that the estimate heals."""


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
            self._loads[source] = _smooth(self._loads.get(source), seconds / tokens)

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


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
