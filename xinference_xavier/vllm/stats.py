# SPDX-License-Identifier: Apache-2.0
"""Our metrics on their way to vLLM's own: from the scheduler side to the API server.

vLLM asks the connector for statistics at the end of each step, sends them to one of its API
servers, and has them logged and observed there. Counters travel as what was added since the last
time, so that API servers which share a Prometheus registry add up; gauges as they are.

Only the scheduler side sends any: a block that several ranks load is counted once. An engine that
does not step sends nothing, also while it serves peers; its numbers are then as of its last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from xinference_xavier.metrics.table import (
    LOAD_SECONDS,
    METRICS,
    Kind,
    Labels,
    Metric,
    Sample,
    Status,
    samples,
)
from xinference_xavier.vllm.counters import Durations

INTERVAL_S: Final = 0.5
"""A busy engine gathers statistics this often: it takes longer than the rest of our step."""

PREFIX: Final = "vllm:"

BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}


class XavierStats(KVConnectorStats):
    """Values by metric name, and for each a list of ``[labels, value]``.

    ``data`` is what crosses between processes, and plain: a counter's value is what was added, a
    gauge's the newest, a histogram's the list of what was observed.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take in statistics that came later."""
        for name, rows in other.data.items():
            merged = {tuple(labels): value for labels, value in self.data.get(name, ())}
            adds = BY_NAME[name].kind is not Kind.GAUGE
            for labels, value in rows:
                key = tuple(labels)
                merged[key] = merged[key] + value if adds and key in merged else value
            self.data[name] = [[list(labels), value] for labels, value in merged.items()]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log shows of an interval."""
        seconds = sum(sum(seen) for _, seen in self.data.get("xavier_load_seconds", ()))
        nbytes = self._sum("xavier_load_bytes_total")
        hits = {
            f"Xavier {'/'.join(labels)} tokens": value
            for labels, value in self.data.get("xavier_hit_tokens_total", ())
        }
        return {
            **hits,
            "Xavier loads": self._sum("xavier_loads_total"),
            "Xavier load MB/s": round(nbytes / seconds / 1e6, 1) if seconds else 0,
            "Xavier saved blocks": self._sum("xavier_saved_blocks_total"),
            "Xavier load failures": self._sum("xavier_load_failures_total"),
        }

    def _sum(self, name: str) -> int | float:
        return sum(value for _, value in self.data.get(name, ()))


class StatsSource:
    """Makes the statistics; the engine's thread.

    ``read`` returns the status to sample. ``durations`` are the load times by transport, from
    which the observations are taken.
    """

    def __init__(
        self,
        read: Callable[[], Status],
        durations: Mapping[str, Durations],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._durations = durations
        self._clock = clock
        self._next = 0.0
        self._last: dict[tuple[str, Labels], Any] = {}

    def take(self, *, idle: bool) -> XavierStats | None:
        """Return what changed since the last call, or None.

        Looks every :data:`INTERVAL_S` only, except in a step after which the engine is ``idle``.
        """
        now = self._clock()
        if now < self._next and not idle:
            return None
        self._next = now + INTERVAL_S
        data: dict[str, list[list[Any]]] = {}
        for sample in samples(self._read()):
            key = sample.metric.name, sample.labels
            before = self._last.get(key)
            if sample.value != before:
                self._last[key] = sample.value
                told = [list(sample.labels), self._told(sample, before)]
                data.setdefault(sample.metric.name, []).append(told)
        return XavierStats(data) if data else None

    def _told(self, sample: Sample, before: Any) -> Any:
        value: Any = sample.value
        if sample.metric.kind is Kind.HISTOGRAM:
            return self._durations[sample.labels[0]].take()
        return value - (before or 0) if sample.metric.kind is Kind.COUNTER else value


class XavierPromMetrics(KVConnectorPromMetrics):
    """The metrics in an API server's Prometheus registry, under vLLM's own labels and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._make(metric) for metric in METRICS}
        for metric in METRICS:
            for labels in metric.from_start:
                for values in per_engine_labelvalues.values():
                    self._metrics[metric.name].labels(*values, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine sent."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, rows in transfer_stats_data.items():
            kind, collector = BY_NAME[name].kind, self._metrics[name]
            for labels, value in rows:
                child = collector.labels(*engine, *labels)
                if kind is Kind.COUNTER:
                    child.inc(value)
                elif kind is Kind.GAUGE:
                    child.set(value)
                else:
                    for seconds in value:
                        child.observe(seconds)

    def _make(self, metric: Metric) -> Any:
        arguments: dict[str, Any] = {
            "name": PREFIX + metric.name,
            "documentation": metric.help,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind is Kind.COUNTER:
            return self._counter_cls(**arguments)
        if metric.kind is Kind.HISTOGRAM:
            return self._histogram_cls(**arguments, buckets=LOAD_SECONDS)
        return self._gauge_cls(**arguments, multiprocess_mode="mostrecent")
