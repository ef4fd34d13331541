# SPDX-License-Identifier: Apache-2.0
"""Our metrics on the worker's metrics endpoint, beside Xinference's own.

Each replica's process reports what its engine measured every few seconds (``vllm.reporting``), by
the call that Xinference's models report their own metrics with: ``WorkerActor.record_metrics``
looks a name up in ``xinference.core.metrics`` and calls a method of what it finds there. So
:func:`install` puts an object of ours there, in the worker's process. A scrape only reads what is
there already; a replica that stopped reporting, however it ended, vanishes by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aioprometheus.collectors import REGISTRY, Counter, Gauge, Histogram, Registry
from xinference.core import metrics as stock

from xinference_xavier.extension.names import METRICS_SINK
from xinference_xavier.metrics.table import (
    METRICS,
    Kind,
    Metric,
    Sample,
    Status,
    Value,
    cumulative,
    samples,
)

PREFIX: Final = "xinference:"

STALE_AFTER_S: Final = 15.0
"""A replica that reported nothing for this long is not shown any more: three reports."""

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class _Report:
    labels: dict[str, str]
    samples: tuple[Sample, ...]
    at: float


class ReplicaMetrics:
    """What the replicas of this worker reported last.

    Reports come on the worker's event loop, scrapes on the metrics server's thread.
    """

    def __init__(
        self, registry: Registry = REGISTRY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[tuple[str, ...], _Report] = {}
        self._registered = False

    def report(self, labels: Mapping[str, str], status: Status) -> None:
        """Take what the replica with these labels measured; the table says what it means.

        Raises ValueError, or what reading it raises, for a report that could not be shown.
        """
        # Here, and not at a scrape: what is wrong with one report must not hide everything.
        found = tuple(map(_checked, samples(status)))
        labels = {name: str(value).translate(_ESCAPES) for name, value in labels.items()}
        now = self._clock()
        with self._lock:
            self._reports[tuple(labels.values())] = _Report(labels, found, now)
            self._reports = {key: kept for key, kept in self._reports.items() if self._fresh(kept)}
            if self._registered:
                return
            self._registered = True
        for metric in METRICS:
            _SERIES[metric.kind](metric, self, self._registry)

    def values(self, metric: Metric) -> list[tuple[dict[str, str], Value]]:
        """Return a metric's labels and value, of each replica that still reports."""
        with self._lock:
            reports = [report for report in self._reports.values() if self._fresh(report)]
        return [
            (_labelled(report, sample), sample.value)
            for report in reports
            for sample in report.samples
            if sample.metric is metric
        ]

    def _fresh(self, report: _Report) -> bool:
        return self._clock() - report.at < STALE_AFTER_S


def install() -> None:
    """Let the replicas of this worker report to us. Idempotent."""
    if not hasattr(stock, METRICS_SINK):
        setattr(stock, METRICS_SINK, ReplicaMetrics())


class _Series:
    """Lets a collector of aioprometheus, of any type, ask for its values when it is scraped."""

    def __init__(self, metric: Metric, replicas: ReplicaMetrics, registry: Registry) -> None:
        self._metric = metric
        self._replicas = replicas
        super().__init__(PREFIX + metric.name, metric.help, registry=registry)  # type: ignore[call-arg]

    def get_all(self) -> list[tuple[dict[str, str], Any]]:
        """Return the labels and value of each series."""
        return self._replicas.values(self._metric)


class _Counter(_Series, Counter):
    pass


class _Gauge(_Series, Gauge):
    pass


class _Histogram(_Series, Histogram):
    def get_all(self) -> list[tuple[dict[str, str], Any]]:
        """Return each series with its buckets, as aioprometheus' text format wants them."""
        return [
            (labels, {**(buckets := cumulative(spread)), **_ends(spread, buckets)})
            for labels, spread in super().get_all()
        ]


_SERIES: Final[Mapping[Kind, Any]] = {
    Kind.COUNTER: _Counter,
    Kind.GAUGE: _Gauge,
    Kind.HISTOGRAM: _Histogram,
}


def _ends(spread: Any, buckets: Mapping[float, int]) -> dict[str, float]:
    return {"count": buckets[float("inf")], "sum": spread["sum"]}


def _checked(sample: Sample) -> Sample:
    """Return a sample that can be shown. Raises ValueError, TypeError or KeyError for another."""
    values: list[Any] = [sample.value]
    if sample.metric.kind is Kind.HISTOGRAM:
        spread: Any = sample.value
        values = [*cumulative(spread).values(), spread["sum"]]
    numbers = all(isinstance(value, int | float) for value in values)
    texts = all(isinstance(label, str) for label in sample.labels)
    if not numbers or not texts or len(sample.labels) != len(sample.metric.labels):
        raise ValueError(f"{sample.metric.name} cannot be {sample.value!r:.80}")
    return sample


def _labelled(report: _Report, sample: Sample) -> dict[str, str]:
    """Return a series' labels; aioprometheus writes them as they are, so they are escaped."""
    ours = (label.translate(_ESCAPES) for label in sample.labels)
    return {**report.labels, **dict(zip(sample.metric.labels, ours, strict=True))}
