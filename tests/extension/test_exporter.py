# SPDX-License-Identifier: Apache-2.0
"""What replicas report, as Xinference's worker endpoint shows it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import xoscar as xo
from aioprometheus import render
from aioprometheus.collectors import Registry
from prometheus_client.parser import text_string_to_metric_families
from xinference.core import metrics as stock

from tests.metrics_status import status
from xinference_xavier.extension import exporter
from xinference_xavier.extension.exporter import PREFIX, STALE_AFTER_S, ReplicaMetrics
from xinference_xavier.extension.names import METRICS_SINK, WORKER_UID
from xinference_xavier.extension.vllm import reporting
from xinference_xavier.metrics.table import LOAD_SECONDS, METRICS

FIRST = {"model_uid": "m", "replica_index": "0", "worker_address": "10.0.0.1:7"}
SECOND = {**FIRST, "replica_index": "1"}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Endpoint:
    """A worker's metrics endpoint whose clock a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = Registry()
        self.replicas = ReplicaMetrics(self.registry, lambda: self.now)

    def text(self) -> str:
        return render(self.registry, [])[0].decode()

    def series(self) -> Series:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def value(self, name: str, labels: dict[str, str]) -> float | None:
        return self.series().get((PREFIX + name, frozenset(labels.items())))


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


def test_an_endpoint_without_replicas_of_ours_shows_nothing(endpoint: Endpoint) -> None:
    assert endpoint.text() == ""


def test_everything_of_the_table_is_shown_for_each_replica(endpoint: Endpoint) -> None:
    endpoint.replicas.report(FIRST, json.loads(json.dumps(status(loads=1))))
    endpoint.replicas.report(SECOND, status(loads=2))
    text = endpoint.text()
    for metric in METRICS:
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text
        assert text.count(f"# HELP {PREFIX}{metric.name} ") == 1
    assert endpoint.value("xavier_loads_total", FIRST) == 1
    assert endpoint.value("xavier_loads_total", SECOND) == 2
    assert endpoint.value("xavier_hit_tokens_total", {**FIRST, "source": "peer_device"}) == 640
    names = {name for name, _ in endpoint.series()}
    assert names == {PREFIX + series for metric in METRICS for series in metric.series}


def test_a_histogram_adds_up(endpoint: Endpoint) -> None:
    endpoint.replicas.report(FIRST, status(seconds=[0.0001, 0.02, 0.02, 99.0]))
    name, labels = "xavier_load_seconds", {**FIRST, "transport": "shm"}
    found = [endpoint.value(f"{name}_bucket", {**labels, "le": str(end)}) for end in LOAD_SECONDS]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 3)
    assert endpoint.value(f"{name}_bucket", {**labels, "le": "+Inf"}) == 4
    assert endpoint.value(f"{name}_count", labels) == 4
    assert endpoint.value(f"{name}_sum", labels) == pytest.approx(99.0401)


def test_a_new_report_takes_the_place_of_the_old_one(endpoint: Endpoint) -> None:
    endpoint.replicas.report(FIRST, status(loads=5))
    endpoint.replicas.report(FIRST, status(loads=6))
    assert endpoint.value("xavier_loads_total", FIRST) == 6


def test_a_replica_that_reports_no_more_vanishes(endpoint: Endpoint) -> None:
    endpoint.replicas.report(FIRST, status())
    endpoint.now += STALE_AFTER_S - 1
    endpoint.replicas.report(SECOND, status())
    endpoint.now += 1
    assert endpoint.value("xavier_loads_total", FIRST) is None
    assert endpoint.value("xavier_loads_total", SECOND) is not None


@pytest.mark.parametrize("state", ["starting", "closed"])
def test_a_replica_that_serves_nobody_is_not_shown(endpoint: Endpoint, state: str) -> None:
    endpoint.replicas.report(FIRST, status())
    endpoint.replicas.report(FIRST, {"state": state})
    assert endpoint.series() == {}


def test_any_text_may_be_in_a_label(endpoint: Endpoint) -> None:
    odd = {**FIRST, "model_uid": 'a"b\\c\nd'}
    endpoint.replicas.report(odd, status(bypassed={'x"y': 3}))
    assert endpoint.value("xavier_bypassed_total", {**odd, "reason": 'x"y'}) == 3


def test_a_report_that_makes_no_sense_hides_nothing(endpoint: Endpoint) -> None:
    endpoint.replicas.report(FIRST, status())
    with pytest.raises(KeyError):
        endpoint.replicas.report(SECOND, {"state": "ready"})
    assert endpoint.value("xavier_loads_total", FIRST) is not None


def test_reports_come_by_the_call_that_xinferences_models_use(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    monkeypatch.setattr(stock, METRICS_SINK, None, raising=False)
    delattr(stock, METRICS_SINK)
    monkeypatch.setattr(exporter, "ReplicaMetrics", lambda: endpoint.replicas)
    arguments = {"labels": FIRST, "status": status(loads=3)}
    stock.record_metrics(METRICS_SINK, "report", arguments)
    assert endpoint.text() == ""
    exporter.install()
    exporter.install()
    stock.record_metrics(METRICS_SINK, "report", arguments)
    assert endpoint.value("xavier_loads_total", FIRST) == 3


class Worker(xo.Actor):  # type: ignore[misc]
    """The part of Xinference's worker that takes reports."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Any] = []

    def record_metrics(self, name: str, op: str, kwargs: dict[str, Any]) -> None:
        if kwargs["status"].get("refuse"):
            raise RuntimeError("refused")
        self.reports.append((name, op, kwargs))

    def taken(self) -> list[Any]:
        return self.reports


def test_a_replica_reports_until_it_is_stopped_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "INTERVAL_S", 0)
    answers: list[Any] = [OSError("nobody"), {"refuse": True}, {"state": "ready"}, TimeoutError()]

    async def run() -> list[Any]:
        enough = asyncio.Event()

        async def describe() -> dict[str, Any]:
            if not answers:
                enough.set()
                return {"state": "closed"}
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

        pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0)
        try:
            worker = await xo.create_actor(Worker, address=pool.external_address, uid=WORKER_UID)
            task = asyncio.create_task(
                reporting.report_for_ever(pool.external_address, FIRST, describe)
            )
            await enough.wait()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            return list(await worker.taken())
        finally:
            await pool.stop()

    reports = asyncio.run(run())
    expected = (METRICS_SINK, "report", {"labels": FIRST, "status": {"state": "ready"}})
    assert reports[0] == expected
    assert [report[2]["status"]["state"] for report in reports[1:]] in ([], ["closed"])
