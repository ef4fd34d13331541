# SPDX-License-Identifier: Apache-2.0
"""How every helper thread of the package starts."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

ALLOWED_CPUS = frozenset(os.sched_getaffinity(0))
"""CPUs this process had when the package was imported, before vLLM pinned its main thread."""


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread on all CPUs that the process was given.

    A thread inherits the mask of its creator, and vLLM's CPU worker pins the creator to one core.
    """

    def run() -> None:
        # Refused where the process's CPUs were taken away since: run on what is left.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, ALLOWED_CPUS)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
