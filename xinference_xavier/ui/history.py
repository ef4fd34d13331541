# SPDX-License-Identifier: Apache-2.0
"""What the replicas' totals did lately: a short history, from which the plots are drawn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from xinference_xavier.schemas import Model, Replica

LENGTH: Final = 180
"""Samples kept per replica, at one per refresh: several minutes."""

LEAST_GAP_S: Final = 1.0
"""Several visitors refresh independently; samples closer than this are left out."""

FORGET_S: Final = 3600.0
"""A replica that was not seen for so long is forgotten."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What a replica did between two samples; ``begin`` and ``end`` are seconds before the last.

    ``rate`` is in bytes per second of copying, None without a load; ``failures`` are failed loads.
    """

    begin: float
    end: float
    rate: float | None
    failures: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Totals of one replica at one time (``at``: seconds of the caller's monotonic clock)."""

    at: float
    nbytes: int
    seconds: float
    failures: int


class History:
    """Samples of all replicas that any visitor was shown. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[tuple[str, str], deque[_Sample]] = {}

    def add(self, models: Iterable[Model], now: float) -> None:
        """Take in what the server said at ``now``."""
        with self._lock:
            for model in models:
                for replica in model.replicas:
                    if replica.state == "ready":
                        self._append((model.model_uid, replica.replica), replica, now)
            old = [key for key, kept in self._samples.items() if now - kept[-1].at > FORGET_S]
            for key in old:
                del self._samples[key]

    def of(self, model_uid: str, replica: str) -> list[Interval]:
        """Return what a replica did between the samples kept of it, oldest first."""
        with self._lock:
            kept = list(self._samples.get((model_uid, replica), ()))
        return [
            Interval(
                begin=kept[-1].at - earlier.at,
                end=kept[-1].at - later.at,
                rate=(later.nbytes - earlier.nbytes) / (later.seconds - earlier.seconds)
                if later.seconds > earlier.seconds
                else None,
                failures=later.failures - earlier.failures,
            )
            for earlier, later in pairwise(kept)
        ]

    def _append(self, key: tuple[str, str], replica: Replica, now: float) -> None:
        kept = self._samples.setdefault(key, deque(maxlen=LENGTH))
        sample = _Sample(
            at=now,
            nbytes=sum(link.bytes for link in replica.links),
            seconds=sum(link.seconds for link in replica.links),
            failures=sum(replica.load_failures.values()),
        )
        if kept:
            last = kept[-1]
            if now - last.at < LEAST_GAP_S:
                return
            if (
                sample.nbytes < last.nbytes
                or sample.seconds < last.seconds
                or sample.failures < last.failures
            ):
                # It, or one that it read from, was started again: totals began anew.
                kept.clear()
        kept.append(sample)
