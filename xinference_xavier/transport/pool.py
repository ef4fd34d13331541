# SPDX-License-Identifier: Apache-2.0
"""The staging slots into which fetching transports read.

They are the last slots of our own arenas, unknown to the index; each tier has its pool. A slot
whose transfer timed out may still be written, so it does not return to the pool before its
transport says that the transfer is terminal.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_POLL_S = 0.05
"""How often a waiter asks the transports whether quarantined slots came free."""


class StagingPool:
    """Lends the staging slots of one tier to load threads. Thread-safe."""

    def __init__(self, slots: range, quarantined: Callable[[], frozenset[int]]) -> None:
        """``quarantined`` returns the slots into which a timed-out transfer may still write."""
        self._quarantined = quarantined
        self._changed = threading.Condition()
        # Popped from the end: low slots first, so that neighbours stay neighbours.
        self._free = sorted(slots, reverse=True)
        self._parked: set[int] = set()

    @contextlib.contextmanager
    def lend(self, most: int, *, deadline: float) -> Iterator[list[int]]:
        """Lend between one and ``most`` slots; waits while all are lent.

        Raises :class:`TimeoutError` when ``deadline`` (``time.monotonic()``) passes first.
        """
        slots = self._take(most, deadline)
        try:
            yield slots
        finally:
            self._give_back(slots)

    def _take(self, most: int, deadline: float) -> list[int]:
        with self._changed:
            while True:
                self._unpark()
                if self._free:
                    count = min(most, len(self._free))
                    return sorted(self._free.pop() for _ in range(count))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no staging slot came free in time")
                self._changed.wait(min(left, _POLL_S))

    def _give_back(self, slots: list[int]) -> None:
        with self._changed:
            self._parked.update(slots)
            self._unpark()
            self._changed.notify_all()

    def _unpark(self) -> None:
        if not self._parked:
            return
        busy = self._quarantined()
        free = self._parked - busy
        if free:
            self._parked &= busy
            self._free = sorted([*self._free, *free], reverse=True)
