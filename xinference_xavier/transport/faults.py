# SPDX-License-Identifier: Apache-2.0
"""Which transports lately failed to read from which tier of which peer.

Refusing to connect is told at once and costs little. A path that connects and then does not
deliver costs every load its whole time, so it is not taken again for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransferFailed, TransferTimeout

DEMOTION_S: Final = 60.0
"""How long faults are remembered, and a transport stays demoted after the last of them."""

FAIR_S: Final = 0.5
"""A read that was given less time than this and timed out tells nothing about its path."""

_LIMIT: Final = 2
"""Failed reads that demote a transport. One that timed out does so alone."""


@dataclass(slots=True)
class _Fault:
    count: int
    at: float


def blames(error: TransferFailed, given_s: float) -> bool:
    """Return whether a failed read that had ``given_s`` seconds speaks against its path."""
    return given_s >= FAIR_S or not isinstance(error, TransferTimeout)


class Faults:
    """Failed reads by member number, tier and transport. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._faults: dict[tuple[int, Tier, str], _Fault] = {}

    def add(self, member: int, tier: Tier, transport: str, error: TransferFailed) -> bool:
        """Note a failed read; return whether the transport was demoted for that tier by it."""
        now = self._clock()
        with self._lock:
            for key in [k for k, fault in self._faults.items() if now - fault.at >= DEMOTION_S]:
                del self._faults[key]
            fault = self._faults.setdefault((member, tier, transport), _Fault(0, now))
            before = fault.count
            fault.count += _LIMIT if isinstance(error, TransferTimeout) else 1
            fault.at = now
            return before < _LIMIT <= fault.count

    def clear(self, member: int, tier: Tier, transport: str) -> None:
        """Forget the faults of a path that works."""
        with self._lock:
            self._faults.pop((member, tier, transport), None)

    def demoted(self, member: int, tier: Tier, transport: str) -> bool:
        """Return whether a transport is to be tried last for a tier of a peer."""
        with self._lock:
            fault = self._faults.get((member, tier, transport))
        return fault is not None and fault.count >= _LIMIT and self._clock() - fault.at < DEMOTION_S
