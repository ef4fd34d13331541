# SPDX-License-Identifier: Apache-2.0
"""How every helper thread of the package starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable


def _allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this process was given by whoever started it.

    vLLM's CPU worker pins its main thread to one core before it loads the connector, so its own
    mask says too little. The process that spawned it is not pinned.
    """
    allowed = os.sched_getaffinity(0)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        with contextlib.suppress(OSError):
            allowed |= os.sched_getaffinity(parent.pid)
    return frozenset(allowed)


ALLOWED_CPUS = _allowed_cpus()


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
