# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side counts. Only the engine's thread writes; anyone may read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from xinference_xavier.metrics.table import LOAD_SECONDS, SOURCES

MOST_RECENT: Final = 1024
"""Durations kept for who takes them; what comes while nobody does is only in the totals."""


@dataclass(slots=True)
class Durations:
    """How long something took, in the buckets that ``LOAD_SECONDS`` ends, and above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS) + 1))
    total: float = 0.0
    recent: list[float] = field(default_factory=list)
    """The newest ones, in seconds, until :meth:`take`."""

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LOAD_SECONDS, seconds)] += 1
        self.total += seconds
        if len(self.recent) < MOST_RECENT:
            self.recent.append(seconds)

    def take(self) -> list[float]:
        """Return what was added since the last call."""
        taken, self.recent = self.recent, []
        return taken

    def to_dict(self) -> dict[str, object]:
        """Return ``counts``, per bucket, and ``sum`` in seconds."""
        return {"counts": list(self.counts), "sum": self.total}


def _by_source() -> Counter[str]:
    """Return zeros: a series that begins with its first event hides it from Prometheus' rates."""
    return Counter(dict.fromkeys(SOURCES, 0))


@dataclass(slots=True)
class Counters:
    """Totals since start. Tokens are counted once, when their load has ended."""

    requests: int = 0
    """Requests that vLLM handed to us."""
    prompt_tokens: int = 0
    """Of the requests that were looked up, counted with their hits."""
    hits: Counter[str] = field(default_factory=_by_source)
    """Those requests that got tokens from a source of ``metrics.table.SOURCES``, by source."""
    hit_tokens: Counter[str] = field(default_factory=_by_source)
    """Their prompt tokens that were not computed, by source; the rest of them was."""
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    """What loads brought, by source; also for requests that start again or are aborted."""
    loads: int = 0
    load_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes read for loads, by transport, over all ranks."""
    load_seconds: dict[str, Durations] = field(default_factory=dict)
    """How long one source's part of a load took, by transport."""
    loads_failed: Counter[str] = field(default_factory=Counter)
    """Failed segments of loads, by reason."""
    failed_blocks: int = 0
    verified_blocks: int = 0
    lookups_missed: Counter[str] = field(default_factory=Counter)
    """Requests without a load, by reason: ``cold``, ``late``, ``refused``, ``busy``, ``short``,
    ``slow``."""
    bypassed: Counter[str] = field(default_factory=Counter)
    """Requests that are not looked up, by reason; they are no misses (R19)."""
    saved_blocks: int = 0
    saves_failed: Counter[str] = field(default_factory=Counter)
    saves_skipped: Counter[str] = field(default_factory=Counter)
    resets: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Exceptions that a fail-open boundary caught, by the hook they happened in."""

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        values: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "load_seconds":
                values[name] = {key: spent.to_dict() for key, spent in list(value.items())}
            else:
                values[name] = dict(value) if isinstance(value, Counter) else value
        return values
