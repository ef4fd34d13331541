# SPDX-License-Identifier: Apache-2.0
"""Random requests from many threads, each to a replica that serves at that moment."""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from xinference_xavier.demo.answers import Answer, compare
from xinference_xavier.soak import client
from xinference_xavier.soak.replicas import Incarnation, Replica
from xinference_xavier.soak.workload import Question, Workload
from xinference_xavier.store.threads import start_thread

MOST_KEPT: Final = 20
"""Failures and differences whose text is kept."""

PAUSE_S: Final = 0.2
"""Pause of a thread that finds no replica."""

BROKEN: Final = (OSError, http.client.HTTPException)
"""What a connection to a killed replica raises."""


class Outcomes:
    """What became of the requests. Any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """answered, left, lost (their replica was killed), failed, compared, different."""
        self.failures: list[str] = []
        self.differences: list[str] = []
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        """Count one."""
        with self._lock:
            self.counts[name] += 1

    def fail(self, text: str) -> None:
        """Count a request that should not have failed."""
        with self._lock:
            self.counts["failed"] += 1
            if len(self.failures) < MOST_KEPT:
                self.failures.append(text)

    def judge(self, name: str, found: Answer, expected: Answer) -> None:
        """Compare an answer with the control's."""
        comparison = compare(found, expected)
        with self._lock:
            self.counts["compared"] += 1
            if not comparison.equal:
                self.counts["different"] += 1
                if len(self.differences) < MOST_KEPT:
                    self.differences.append(f"{name}: {comparison.difference}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        with self._lock:
            return {
                **dict.fromkeys(("answered", "left", "lost", "failed", "compared", "different"), 0),
                **self.counts,
                "failures": list(self.failures),
                "differences": list(self.differences),
            }


class Traffic:
    """``clients`` threads that ask until :meth:`stop`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        workload: Workload,
        expected: Sequence[Answer],
        outcomes: Outcomes,
        *,
        seed: int,
        clients: int,
    ) -> None:
        """``expected`` are the control's answers to the workload's sample."""
        self.outcomes = outcomes
        self._replicas = replicas
        self._workload = workload
        self._expected = expected
        self._stopping = threading.Event()
        self._threads = [
            start_thread(partial(self._run, f"{seed} {number}"), f"soak-client-{number}")
            for number in range(1, clients + 1)
        ]

    def stop(self, timeout_s: float) -> bool:
        """Ask nothing more, and wait for the answers; False if some are still out."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, seed: str) -> None:
        chance = random.Random(seed)
        while not self._stopping.is_set():
            serving = [(r.name, found) for r in self._replicas if (found := r.serving) is not None]
            if not serving:
                self._stopping.wait(PAUSE_S)
                continue
            name, incarnation = chance.choice(serving)
            question = self._workload.question(chance)
            try:
                self._ask(name, incarnation, question)
            except (client.Refused, *BROKEN) as error:
                self._failed(name, incarnation, error)

    def _ask(self, name: str, incarnation: Incarnation, question: Question) -> None:
        port, leaving = incarnation.engine.port, question.leaving
        if leaving is not None:
            client.leave(
                port, question.body, after_chunks=leaving.after_chunks, wait_s=leaving.wait_s
            )
            self.outcomes.count("left")
        elif question.sample is not None:
            found = client.answer(port, question.body)
            self.outcomes.count("answered")
            self.outcomes.judge(name, found, self._expected[question.sample])
        else:
            for _ in client.chunks(port, question.body):
                pass
            self.outcomes.count("answered")

    def _failed(self, name: str, incarnation: Incarnation, error: Exception) -> None:
        if incarnation.ending.is_set():
            self.outcomes.count("lost")
            self._stopping.wait(PAUSE_S)
        else:
            self.outcomes.fail(f"{name}, incarnation {incarnation.number}: {error!r}")
