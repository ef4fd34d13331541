# SPDX-License-Identifier: Apache-2.0
"""Write the Grafana dashboards of docs/grafana/, or check that they are current.

One for Xinference's worker endpoints and one for plain vLLM: the same panels, with the names that
each exporter uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinference_xavier.metrics.table import TIERS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "grafana"

WIDTH, HEIGHT = 24, 8
"""Of a row of panels, in Grafana's units."""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Exporter:
    """One way to the metrics: how it names them, the model, and a replica."""

    uid: str
    title: str
    prefix: str
    model: str
    replica: str

    def fill(self, query: str) -> str:
        """Return a query: ``m:`` begins a metric's name, ``ALL`` and ``ONE`` are selectors."""
        everything = f'{self.model}="$model"'
        return (
            query.replace("m:", f"{self.prefix}xavier_")
            .replace("ALL", everything)
            .replace("ONE", f'{everything}, {self.replica}=~"$replica"')
        )


EXPORTERS = (
    Exporter(
        "xinference-xavier", "Xavier, GPU-first: Xinference", "xinference:", "model_uid",
        "replica_index",
    ),
    Exporter("vllm-xavier", "Xavier, GPU-first: plain vLLM", "vllm:", "model_name", "instance"),
)  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A plot; ``queries`` are legends and expressions."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def each(label: str, name: str, where: str) -> tuple[str, str]:
    """Return a query for how fast a counter grows, one line per value of a label."""
    return f"{{{{{label}}}}}", f"sum by ({label}) (rate(m:{name}{{{where}}}[$__rate_interval]))"


def rate(legend: str, name: str, where: str) -> tuple[str, str]:
    """Return a query for how fast a counter grows."""
    return legend, f"sum(rate(m:{name}{{{where}}}[$__rate_interval]))"


def hit_rate(where: str) -> Panel:
    legend, tokens = each("source", "hit_tokens_total", where)
    _, prompts = rate("", "prompt_tokens_total", where)
    share = (legend, f"{tokens} / on () group_left () {prompts}")
    return Panel("Prompt tokens that were not computed, by source", "percentunit", (share,), True)


def speed(where: str) -> Panel:
    _, nbytes = each("transport", "load_bytes_total", where)
    _, seconds = each("transport", "load_seconds_sum", where)
    return Panel("Load speed", "Bps", (("{{transport}}", f"{nbytes} / {seconds}"),))


def latency(where: str) -> Panel:
    buckets = f"sum by (le, transport) (rate(m:load_seconds_bucket{{{where}}}[$__rate_interval]))"
    queries = (
        (f"{{{{transport}}}} p{percent}", f"histogram_quantile({percent / 100}, {buckets})")
        for percent in (50, 95)
    )
    return Panel("Load time", "s", tuple(queries))


def failures(where: str) -> Panel:
    return Panel(
        "Load failures",
        "ops",
        (
            each("reason", "load_failures_total", where),
            rate("blocks computed instead", "recomputed_blocks_total", where),
        ),
    )


def tier(name: str) -> Panel:
    queries = (
        (what, f'sum(m:{what}_bytes{{ONE, tier="{name}"}})')
        for what in ("used", "leased", "limit", "capacity")
    )
    return Panel(f"{name.capitalize()} tier", "bytes", tuple(queries))


MODEL = (
    hit_rate("ALL"),
    Panel(
        "Requests",
        "reqps",
        (
            rate("all", "requests_total", "ALL"),
            ("hit: {{source}}", each("source", "hits_total", "ALL")[1]),
            ("not loaded: {{reason}}", each("reason", "not_loaded_total", "ALL")[1]),
            ("bypassed: {{reason}}", each("reason", "bypassed_total", "ALL")[1]),
        ),
    ),
    Panel("Bytes loaded", "Bps", (each("transport", "load_bytes_total", "ALL"),), True),
    speed("ALL"),
    latency("ALL"),
    failures("ALL"),
)

REPLICA = (
    *(tier(name) for name in TIERS),
    hit_rate("ONE"),
    speed("ONE"),
    latency("ONE"),
    failures("ONE"),
    Panel(
        "Blocks of the store",
        "ops",
        (
            rate("saved", "saved_blocks_total", "ONE"),
            rate("demoted", "demotions_total", "ONE"),
            rate("promoted", "promotions_total", "ONE"),
            each("reason", "evictions_total", "ONE"),
        ),
    ),
    Panel(
        "Blocks that were not saved",
        "ops",
        (
            ("skipped: {{reason}}", each("reason", "save_skips_total", "ONE")[1]),
            ("failed: {{reason}}", each("reason", "save_failures_total", "ONE")[1]),
        ),
    ),
    Panel(
        "Leases",
        "short",
        (
            ("held", "sum(m:leases{ONE})"),
            rate("blocks leased per second", "leased_blocks_total", "ONE"),
            rate("reaped per second", "lease_reaps_total", "ONE"),
        ),
    ),
    Panel(
        "Faults",
        "ops",
        (
            ("refused: {{transport}}", each("transport", "transport_refusals_total", "ONE")[1]),
            ("error: {{where}}", each("where", "errors_total", "ONE")[1]),
            rate("loads", "loads_total", "ONE"),
            rate("clears", "clears_total", "ONE"),
        ),
    ),
)


def dashboard(exporter: Exporter) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON: one model as a whole, then a row per replica."""
    panels: list[dict[str, Any]] = []
    below = add_row(panels, exporter, "Model $model", MODEL, 0)
    add_row(panels, exporter, "Replica $replica", REPLICA, below, repeat="replica")
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": exporter.uid,
        "title": exporter.title,
        "tags": ["xinference-xavier"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable(exporter, "model", exporter.model, "m:requests_total"),
                {
                    **variable(exporter, "replica", exporter.replica, "m:requests_total{ALL}"),
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": panels,
    }


def variable(exporter: Exporter, name: str, label: str, metric: str) -> dict[str, Any]:
    """Return a drop-down list of a label's values."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": exporter.fill(f"label_values({metric}, {label})"),
        "refresh": 2,
        "sort": 3,
    }


def add_row(
    panels: list[dict[str, Any]],
    exporter: Exporter,
    title: str,
    row: tuple[Panel, ...],
    top: int,
    repeat: str | None = None,
) -> int:
    """Add a row, two panels beside each other, below ``top``; return what is below it."""
    heading: dict[str, Any] = {
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
        "panels": [],
    }
    panels.append({**heading, "repeat": repeat} if repeat else heading)
    for number, panel in enumerate(row):
        place = {
            "x": number % 2 * WIDTH // 2,
            "y": top + 1 + number // 2 * HEIGHT,
            "w": WIDTH // 2,
            "h": HEIGHT,
        }
        panels.append(plot(exporter, panel, place))
    return top + 1 + (len(row) + 1) // 2 * HEIGHT


def plot(exporter: Exporter, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    """Return a panel in Grafana's JSON."""
    custom: dict[str, Any] = {"fillOpacity": 10}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": exporter.fill(expression),
                "legendFormat": legend,
            }
            for number, (legend, expression) in enumerate(panel.queries)
        ],
    }


def files() -> dict[str, str]:
    """Return the text of each dashboard by its file name."""
    return {
        f"{exporter.uid}.json": json.dumps(dashboard(exporter), indent=2) + "\n"
        for exporter in EXPORTERS
    }


def main() -> None:
    """Write the dashboards; with ``--check`` only exit with the names of those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name, text in files().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
