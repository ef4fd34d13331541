# SPDX-License-Identifier: Apache-2.0
"""Helper threads are not confined to the core that vLLM pins its main thread to."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from xinference_xavier.store import threads


def affinity_of_a_thread() -> set[int]:
    seen: list[set[int]] = []
    threads.start_thread(lambda: seen.append(os.sched_getaffinity(0)), "xavier-test").join()
    return seen[0]


def test_a_thread_runs_on_all_cpus_although_its_creator_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert affinity_of_a_thread() == set(threads.ALLOWED_CPUS)
    finally:
        os.sched_setaffinity(0, before)


def test_a_thread_runs_although_its_cpus_were_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "ALLOWED_CPUS", frozenset({4095}))
    assert affinity_of_a_thread() == os.sched_getaffinity(0)


def test_a_thread_is_named_and_does_not_keep_the_process_alive() -> None:
    go = threading.Event()
    thread = threads.start_thread(go.wait, "xavier-named")
    assert (thread.name, thread.daemon) == ("xavier-named", True)
    go.set()
    thread.join()


def _allowed_in_a_pinned_child() -> frozenset[int]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    importlib.reload(threads)
    return threads.ALLOWED_CPUS


def test_a_worker_that_was_pinned_before_the_import_takes_back_its_parent_s_cpus() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        assert child.submit(_allowed_in_a_pinned_child).result() == os.sched_getaffinity(0)
