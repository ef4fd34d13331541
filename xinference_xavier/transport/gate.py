# SPDX-License-Identifier: Apache-2.0
"""Who ends a load: the thread that runs it, or whoever finds that thread stuck.

A call into a library or a kernel may hang whatever deadline it was given. vLLM waits for the load,
and computes into its blocks as soon as it is reported failed, so a load may be given up exactly
when its thread does not write into KV blocks and never will again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Through which the thread of one load writes, until it is shut. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shut = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the gate open for the length of the block. Raises TimeoutError if it is shut."""
        with self._lock:
            if self._shut:
                raise TimeoutError("the load was given up")
            yield

    def shut(self) -> bool:
        """Let nothing be written from now on, and return whether this call did that.

        False while something is written, and when the gate was shut before. Never waits.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            first, self._shut = not self._shut, True
            return first
        finally:
            self._lock.release()
