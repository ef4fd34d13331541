# SPDX-License-Identifier: Apache-2.0
"""Ends an engine whose parent is gone.

vLLM's engine process does not notice when the API server, or Xinference's replica, that started
it is killed. Nobody can send it a request any more, but it would keep its memory and go on as a
member of the group, beside the replica that takes its place.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
from typing import Final

import psutil

END_AFTER_S: Final = 10.0
"""How long an engine that lost its parent may take to end by itself, in seconds."""

logger = logging.getLogger(__name__)


def end_with_parent() -> threading.Thread | None:
    """End this process soon after its parent, however that one ends; also if it ended before now.

    Returns the watching thread, or None if this process was not started through
    ``multiprocessing``: then it is nobody's engine, and nothing is watched. Any thread. For the
    engine's process; its own children end with it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return None
    try:
        process: int | None = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        process = None
    except OSError as error:
        logger.warning("cannot watch the parent, process %d: %s", parent.pid, error)
        return None
    if process is not None and not _is_older(parent.pid):
        os.close(process)
        process = None
    watcher = threading.Thread(
        target=_end_after, args=(parent.pid, process), name="xavier-parent", daemon=True
    )
    watcher.start()
    return watcher


def _is_older(parent: int) -> bool:
    """Whether the process of that number is the parent, not one that got the number later.

    ``getppid`` does not tell: under a fork server it is the server's.
    """
    try:
        return psutil.Process(parent).create_time() <= psutil.Process().create_time()
    except psutil.NoSuchProcess:
        return False


def _end_after(parent: int, process: int | None) -> None:
    """Wait for the end of ``parent``, whose pidfd is ``process``: None if it has ended."""
    if process is not None:
        end = select.poll()
        end.register(process, select.POLLIN)
        end.poll()
    logger.warning("The parent, process %d, has ended; so does this engine", parent)
    # By the kernel, since no thread of Python runs in an interpreter that goes down, which takes
    # long in vLLM's. A process that handles the alarm is left to this thread.
    signal.setitimer(signal.ITIMER_REAL, END_AFTER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)
