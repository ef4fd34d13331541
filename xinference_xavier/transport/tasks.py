# SPDX-License-Identifier: Apache-2.0
"""The queue of the load threads, with a lane that no peer can block.

A load from our own store, or from memory that is mapped already, waits for nobody: it is *quick*.
Any other may wait for a peer as long as its timeout allows. One thread takes only quick tasks, so
hung peers, however many, never keep a restore from our own store waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


class Tasks(Generic[T]):
    """First in, first out, for each kind of thread. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[T, bool]] = deque()
        self._closed = False

    def put(self, task: T, *, quick: bool) -> None:
        """Add a task."""
        with self._changed:
            self._waiting.append((task, quick))
            # The threads differ in what they take, so the right one must be among the woken.
            self._changed.notify_all()

    def get(self, *, only_quick: bool, timeout: float) -> tuple[T, bool] | None:
        """Take the oldest task, or the oldest quick one, and tell whether it is quick.

        Returns None when the queue is closed and has no such task left. Raises
        :class:`queue.Empty` after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                for number, (task, quick) in enumerate(self._waiting):
                    if quick or not only_quick:
                        del self._waiting[number]
                        return task, quick
                if self._closed:
                    return None
                left = end - time.monotonic()
                if left <= 0:
                    raise Empty
                self._changed.wait(left)

    def empty(self) -> bool:
        """Return whether nothing waits."""
        return not self._waiting

    def close(self) -> None:
        """Let the threads end once nothing is left for them. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
