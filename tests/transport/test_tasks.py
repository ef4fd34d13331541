# SPDX-License-Identifier: Apache-2.0
"""Quick tasks have a thread that nothing else occupies."""

from __future__ import annotations

import threading
from queue import Empty

import pytest

from tests.waiting import WAIT_S
from xinference_xavier.transport.tasks import Tasks


def test_the_quick_lane_passes_over_what_may_wait_for_a_peer() -> None:
    tasks: Tasks[str] = Tasks()
    for name, quick in (("slow 1", False), ("quick 1", True), ("slow 2", False), ("quick 2", True)):
        tasks.put(name, quick=quick)
    assert tasks.get(only_quick=True, timeout=0) == ("quick 1", True)
    assert tasks.get(only_quick=False, timeout=0) == ("slow 1", False)
    assert tasks.get(only_quick=True, timeout=0) == ("quick 2", True)
    with pytest.raises(Empty):
        tasks.get(only_quick=True, timeout=0)
    assert not tasks.empty()
    assert tasks.get(only_quick=False, timeout=0) == ("slow 2", False)
    assert tasks.empty()


def test_a_waiting_thread_gets_the_task_that_comes() -> None:
    tasks: Tasks[str] = Tasks()
    got: list[object] = []
    waiting = threading.Thread(
        target=lambda: got.append(tasks.get(only_quick=True, timeout=WAIT_S))
    )
    waiting.start()
    tasks.put("slow", quick=False)
    tasks.put("quick", quick=True)
    waiting.join(WAIT_S)
    assert got == [("quick", True)]


def test_a_closed_queue_is_emptied_first() -> None:
    tasks: Tasks[str] = Tasks()
    tasks.put("slow", quick=False)
    tasks.close()
    assert tasks.get(only_quick=True, timeout=WAIT_S) is None
    assert tasks.get(only_quick=False, timeout=WAIT_S) == ("slow", False)
    assert tasks.get(only_quick=False, timeout=WAIT_S) is None
