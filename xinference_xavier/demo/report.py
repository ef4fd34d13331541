# SPDX-License-Identifier: Apache-2.0
"""The demo's outcome: as a table, as JSON, as an exit status."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from xinference_xavier import __version__
from xinference_xavier.demo.answers import COMPARED
from xinference_xavier.demo.judge import Part
from xinference_xavier.installed import installed_versions


def outcome(parts: Sequence[Part], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a demo that ran to its end. ``parts`` are the five, in order."""
    sharing, answers, overflow, restore, shutdown = parts
    remote = sharing.facts["remote_hit"]
    comparisons = [part.facts["comparison"] for part in (answers, overflow, restore)]
    block_tokens = more["engine"]["block_size"]
    return {
        "ok": all(part.ok for part in parts),
        "failed": [f"{n}: {part.title}" for n, part in enumerate(parts, 1) if not part.ok],
        "cold_ttft_s": sharing.facts["cold"]["ttft_s"],
        "remote_hit_ttft_s": remote["ttft_s"],
        "local_hit_ttft_s": sharing.facts["local_hit"]["ttft_s"],
        "loaded_tokens": sum(remote["loaded_tokens"].values()),
        "loaded_from": {"replica": sharing.facts["source"], "tokens": remote["loaded_tokens"]},
        "transport": sharing.facts["transport"],
        "load_mb_per_s": sharing.facts["load_mb_per_s"],
        "outputs_identical": all(comparison["equal"] for comparison in comparisons),
        "compared": COMPARED,
        "demotions": overflow.facts["demotions"],
        "cpu_tier_hits": overflow.facts["cpu_tier_tokens"] // block_tokens,
        "restored_tokens": sum(restore.facts["hit"]["loaded_tokens"].values()),
        "clean_shutdown": shutdown.ok,
        "parts": [
            {
                "number": number,
                "title": part.title,
                "ok": part.ok,
                "problems": list(part.problems),
                **part.facts,
            }
            for number, part in enumerate(parts, 1)
        ],
        **surroundings(),
        **more,
    }


def broken(reason: str) -> dict[str, Any]:
    """Return the JSON object of a demo that could not go on."""
    return {"ok": False, "failed": [reason], **surroundings()}


def surroundings() -> dict[str, Any]:
    """Return versions and facts about this host, as plain values for JSON."""
    versions = {"xinference-xavier": __version__, "python": platform.python_version()}
    versions |= {name: found for name, found in installed_versions().items() if found}
    return {
        "versions": versions,
        "host": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average_1min": os.getloadavg()[0],
        },
    }


def show(console: Console, parts: Sequence[Part]) -> None:
    """Print the final table and, for people, the counters that the replicas closed with."""
    table = Table(title="Two replicas, one KV cache", title_justify="left", show_lines=True)
    table.add_column("", no_wrap=True)
    table.add_column("part", ratio=1)
    table.add_column("seen", ratio=3)
    for number, part in enumerate(parts, 1):
        mark = Text("yes", "green") if part.ok else Text("NO", "bold red")
        seen = Text(part.shown)
        for problem in part.problems:
            seen.append(f"\n{problem}", "red")
        table.add_row(mark, Text(f"{number}. {part.title}"), seen)
    console.print(Group(counters_table(parts[-1].facts["final_counters"]), table))


def counters_table(final: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the counters that closed stores returned: one column per replica."""
    table = Table(title="Final counters, after close", title_justify="left")
    table.add_column("counter")
    for name in final:
        table.add_column(name, justify="right")
    plain = {
        counter: None
        for counters in final.values()
        for counter, value in counters.items()
        if isinstance(value, int | str)
    }
    for counter in plain:
        row = [str(counters.get(counter, "missing")) for counters in final.values()]
        table.add_row(counter, *row)
    return table
