# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, and the dashboards, whose every query is parsed and held against it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from tests.metrics_status import status
from xinference_xavier.metrics.table import LOAD_SECONDS, METRICS, Kind, cumulative, samples
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.vllm.counters import Counters

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "grafana"
EXPORTERS = {
    "xinference-xavier.json": (
        "xinference:", {"model_uid", "replica_index", "worker_address", "job", "instance"}
    ),
    "vllm-xavier.json": ("vllm:", {"model_name", "engine", "job", "instance"}),
}  # fmt: skip


def test_names_and_labels_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"xavier_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help[0].isupper()
        assert "\n" not in metric.help
        assert not {"le", "quantile", "model_uid", "model_name", "engine"} & {*metric.labels}


def test_the_table_reads_the_status_of_a_replica() -> None:
    found = {(sample.metric.name, sample.labels): sample.value for sample in samples(status())}
    assert {name for name, _ in found} == {metric.name for metric in METRICS}
    for sample in samples(status()):
        assert len(sample.labels) == len(sample.metric.labels)
    # Bytes are those of both ranks.
    assert found["xavier_capacity_bytes", ("host",)] == 8 * 100 * 2
    assert found["xavier_limit_bytes", ("host",)] == 6 * 100 * 2
    assert found["xavier_leased_bytes", ("device",)] == 1 * 100 * 2
    # Reasons of refusals name addresses, which would never stop to be new.
    assert found["xavier_transport_refusals_total", ("nixl",)] == 3
    assert found["xavier_save_failures_total", ("CudaError",)] == 3
    assert found["xavier_errors_total", ("get_finished",)] == 1


def test_the_status_of_the_tests_has_what_the_real_one_has() -> None:
    index = SnapshotIndex(device_slots=1, host_slots=1, spare_slots=0)
    store = asdict(index.counters())
    made = status()
    assert set(made["store"]) - {"slot_bytes", "ranks"} <= set(store)
    assert set(made["store"]["totals"]) <= set(store["totals"])
    assert set(made["traffic"]) <= set(Counters().to_dict())


def test_buckets_are_cumulative() -> None:
    spread = status(seconds=[LOAD_SECONDS[0], LOAD_SECONDS[0], 1e9])["traffic"]["load_seconds"]
    found = cumulative(spread["shm"])
    assert list(found) == [*LOAD_SECONDS, float("inf")]
    assert (found[LOAD_SECONDS[0]], found[LOAD_SECONDS[-1]], found[float("inf")]) == (2, 2, 3)


# --- dashboards ---------------------------------------------------------------------------------


def test_the_dashboards_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_grafana.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in FOLDER.iterdir()} == set(EXPORTERS)


def queries(board: dict[str, Any]) -> list[str]:
    """Every query of a dashboard, with Grafana's variables filled in."""
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for variable in board["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        if asked is not None:
            found.append(f"count by ({asked[2]}) ({asked[1]})")
    filled = [re.sub(r"\$__rate_interval", "1m", query) for query in found]
    return [re.sub(r"\$\w+", "x", query) for query in filled]


def walk(node: Any) -> Iterator[Any]:
    """A parsed query's nodes."""
    yield node
    if isinstance(node, promql.Call):
        parts = list(node.args)
    else:
        names = ("expr", "param", "lhs", "rhs", "vector_selector")
        parts = [getattr(node, name) for name in names if hasattr(node, name)]
    for part in parts:
        if part is not None:
            yield from walk(part)


def unknown(query: str, prefix: str, common: set[str]) -> set[str]:
    """What a query names that no exporter shows: metrics, or labels of the metrics it reads."""
    labels = {f"{prefix}{s}": {*metric.labels} for metric in METRICS for s in metric.series}
    for name in labels:
        if name.endswith("_bucket"):
            labels[name].add("le")
    problems: set[str] = set()
    for node in walk(promql.parse(query)):
        if isinstance(node, promql.VectorSelector):
            if node.name not in labels:
                problems.add(node.name)
                continue
            used = {matcher.name for matcher in node.matchers.matchers}
            problems |= used - labels[node.name] - common
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            below = [
                labels.get(part.name, set())
                for part in walk(node.expr)
                if isinstance(part, promql.VectorSelector)
            ]
            problems |= set(node.modifier.labels) - set().union(*below) - common
    return problems


@pytest.mark.parametrize("name", EXPORTERS)
def test_every_query_names_metrics_and_labels_that_exist(name: str) -> None:
    prefix, common = EXPORTERS[name]
    board = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    asked = queries(board)
    assert len(asked) >= len(METRICS)
    for query in asked:
        assert unknown(query, prefix, common) == set(), query
    shown = {node.name for q in asked for node in walk(promql.parse(q)) if hasattr(node, "name")}
    missing = [m.name for m in METRICS if not shown & {f"{prefix}{s}" for s in m.series}]
    assert missing == [], "metrics that no panel shows"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("rate(vllm:xavier_loads[1m])", {"vllm:xavier_loads"}),
        ("xinference:xavier_loads_total", {"xinference:xavier_loads_total"}),
        ('vllm:xavier_used_bytes{teir="host"}', {"teir"}),
        ("sum by (reason) (vllm:xavier_loads_total)", {"reason"}),
        ("histogram_quantile(0.5, sum by (le) (rate(vllm:xavier_load_seconds_sum[1m])))", {"le"}),
        ("sum by (le, transport) (vllm:xavier_load_seconds_bucket)", set()),
        ("vllm:xavier_leases / on () group_left () sum(nothing)", {"nothing"}),
    ],
)
def test_a_query_that_is_wrong_is_found(query: str, named: set[str]) -> None:
    assert unknown(query, *EXPORTERS["vllm-xavier.json"]) == named


@pytest.mark.parametrize("name", EXPORTERS)
def test_panels_do_not_overlap_and_are_numbered(name: str) -> None:
    board = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
    (repeated,) = (panel for panel in board["panels"] if "repeat" in panel)
    assert repeated["repeat"] in {item["name"] for item in board["templating"]["list"]}
