# SPDX-License-Identifier: Apache-2.0
"""What people see of a soak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from xinference_xavier.bench.report import Report
from xinference_xavier.soak.judge import MIB

ROWS: Final = 12
"""Points in time that the table of the replicas shows."""


def show(result: Mapping[str, Any]) -> None:
    """Print what a soak found, and at the end what was not as it should be."""
    report = Report()
    samples = result["samples"]
    step = max(1, -(-len(samples) // ROWS))
    report.table("Replicas over time", [_stores(sample) for sample in samples[::step]])
    report.table(
        "What each process held, and how it developed in the second half",
        [_growth(item) for item in result["growth"]],
    )
    requests, control = result["requests"], result["control"]
    kills = ", ".join(f"{name} {len(roles)}" for name, roles in result["kills"].items())
    report.note(
        f"Requests: {requests['answered']:,} answered, {requests['left']:,} left by their clients, "
        f"{requests['lost']:,} lost with a killed replica, {requests['failed']:,} failed."
    )
    report.note(
        f"Answers unlike the control's: {requests['different']:,} of {requests['compared']:,}; the "
        f"control's own under load: {control['different']:,} of {control['compared']:,}."
    )
    report.note(f"Kills: {kills}.")
    if result["interrupted"]:
        report.note("It was interrupted: this is what there was so far.")
    for problem in result["problems"]:
        report.note(f"Not as it should be: {problem}")


def _stores(sample: Mapping[str, Any]) -> dict[str, object]:
    stores, processes = sample["stores"].values(), sample["processes"]
    prompt = sum(store["prompt_tokens"] for store in stores)
    hits = sum(store["hit_tokens"] for store in stores)
    return {
        "minute": round(sample["seconds"] / 60, 1),
        "replicas": len(stores),
        "leases": sum(store["leases"] for store in stores),
        "used_blocks": sum(store["used_blocks"] for store in stores),
        "free_blocks": sum(store["free_blocks"] for store in stores),
        "hits_%": round(100 * hits / prompt) if prompt else None,
        "RSS_MiB": round(sum(usage["rss_bytes"] for usage in processes) / MIB),
        "descriptors": sum(usage["descriptors"] for usage in processes),
        "threads": sum(usage["threads"] for usage in processes),
        "arenas": sum(usage["arenas"] for usage in processes),
    }


def _growth(item: Mapping[str, Any]) -> dict[str, object]:
    unit = MIB if item["what"].endswith("_bytes") else 1
    what = item["what"].removesuffix("_bytes") + (" MiB" if unit == MIB else "")
    return {
        "process": f"{item['process']} ({item['incarnation']})",
        "what": what,
        "at_first": round(item["first"] / unit, 1),
        "at_last": round(item["last"] / unit, 1),
        "growth": round(item["growth"] / unit, 1),
        "allowed": round(item["allowed"] / unit, 1),
        "grows": item["grows"],
    }
