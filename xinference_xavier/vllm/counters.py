# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side counts. Only the engine's thread writes; anyone may read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since start. Tokens are counted once, when their load has ended."""

    requests: int = 0
    """Requests that vLLM handed to us."""
    prompt_tokens: int = 0
    local_tokens: int = 0
    """Prompt tokens that vLLM found in its own prefix cache."""
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    """By source: ``own_device``, ``own_host``, ``peer_device``, ``peer_host``."""
    loads: int = 0
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
            values[name] = dict(value) if isinstance(value, Counter) else value
        return values
