# SPDX-License-Identifier: Apache-2.0
"""What directory and mirror cost: rates, memory, and what they leave to the engine's thread.

Rates are those of one client that calls a directory in another process and waits for each answer,
so serialising and the way there are included. Blocks come in prefixes of 275, and every fourth
prefix is held by two members. Memory is measured in ``directory_memory``, lookups on the engine's
thread in ``lookups``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from xinference_xavier.bench import lookups, plots
from xinference_xavier.bench.directory_memory import (
    MOST_DIRECTORY_BYTES,
    MOST_MIRROR_BYTES,
    directory_memory,
    mirror_memory,
    reading_costs,
)
from xinference_xavier.bench.engines import running_directory
from xinference_xavier.bench.lookup_peers import PREFIX
from xinference_xavier.bench.members import RawMember, packed_keys, unpacked
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import mean_interval, percentile
from xinference_xavier.control.messages import MAX_KEYS
from xinference_xavier.control.mirror import ENTRY_BYTES, Mirror
from xinference_xavier.store.records import KEY_BYTES

SHARED: Final = 4
"""One of this many prefixes is held by two members."""

FEWEST_BLOCKS: Final = 20 * PREFIX

LOOKUPS: Final = 20
"""Per round: of the directory, and of a mirror."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``blocks`` are at least ``FEWEST_BLOCKS`` each, and ``members`` at least 2.

    ``most`` is the number of blocks of one mirror that is measured alone.
    """

    blocks: tuple[int, ...] = (100_000, 1_000_000)
    members: tuple[int, ...] = (2, 8, 64)
    most: int = 10_000_000
    rounds: int = 12


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``cells`` has one entry per number of blocks and members.

    With ``resume`` every finished part is kept there. Raises ``record.RecordMismatch``.
    """
    record = Record(resume, asdict(settings))
    with tempfile.TemporaryDirectory(prefix="xavier-bench-") as name:
        folder = Path(name)
        cells = []
        with report.steps("directories", len(settings.blocks) * len(settings.members)) as step:
            for blocks in settings.blocks:
                for members in settings.members:
                    measure: Callable[[], Any] = partial(
                        _cell, blocks, members, settings.rounds, folder
                    )
                    cells.append(record.arm(f"{blocks} blocks, {members} members", measure))
                    step.done()
        threads = [
            record.arm(
                f"engine's thread, {blocks} blocks",
                partial(lookups.measure, blocks, settings.rounds, folder, report),
            )
            for blocks in settings.blocks
        ]
    report.say("measuring memory")
    memory = [
        record.arm(
            f"directory's memory, {members} members",
            partial(directory_memory, max(settings.blocks), members),
        )
        for members in settings.members
    ]
    mirrors = [
        record.arm(f"mirror of {blocks} blocks", partial(mirror_memory, blocks))
        for blocks in (*settings.blocks, settings.most)
    ]
    bounded = record.arm("mirror, bounded", partial(mirror_memory, settings.most, bounded=True))
    reading = record.arm("reading", reading_costs)
    return _result(cells, threads, memory, mirrors, bounded, reading, max(settings.blocks))


def _cell(blocks: int, members: int, rounds: int, folder: Path) -> dict[str, Any]:
    with running_directory(folder / "directory.log") as address:
        return asyncio.run(_rates(address, blocks, members, rounds))


async def _rates(address: str, blocks: int, members: int, rounds: int) -> dict[str, Any]:
    others = [await RawMember.join(address, f"member {n}") for n in range(members - 1)]
    reader = await RawMember.join(address, "reader")
    mirror = Mirror(2 * blocks * ENTRY_BYTES)
    packed = packed_keys("rates", blocks)
    started = time.perf_counter()
    registered = await _register(others, packed)
    register_s = time.perf_counter() - started
    started = time.perf_counter()
    learnt = await reader.follow(mirror)
    snapshot_s = time.perf_counter() - started
    if len(mirror) != blocks:
        raise RuntimeError(f"the mirror has {len(mirror)} of {blocks} blocks")
    found: dict[str, list[float]] = {"deltas_per_s": [], "holders_us": [], "longest_us": []}
    random = np.random.default_rng(0)
    for number in range(rounds + 1):
        # Blocks of one member are replaced by new ones, as its store does when it is full.
        at = number * MAX_KEYS % blocks * KEY_BYTES
        old = packed[at : at + MAX_KEYS // 2 * KEY_BYTES]
        new = packed_keys(f"new {number}", len(old) // KEY_BYTES)
        for member in others:
            await member.publish(b"", old)
        await others[number % len(others)].publish(new)
        started = time.perf_counter()
        changes = await reader.follow(mirror)
        found["deltas_per_s"].append(changes / (time.perf_counter() - started))
        asked, local = [], []
        for _ in range(LOOKUPS):
            prefix = int(random.integers(blocks // PREFIX)) * PREFIX * KEY_BYTES
            keys = packed[prefix : prefix + PREFIX * KEY_BYTES]
            started = time.perf_counter()
            await reader.holders(keys)
            asked.append(time.perf_counter() - started)
            single = unpacked(keys)
            hash(tuple(single))
            started = time.perf_counter()
            mirror.longest(single, 0, -1)
            local.append(time.perf_counter() - started)
        found["holders_us"].append(percentile(asked, 0.5) * 1e6)
        found["longest_us"].append(percentile(local, 0.5) * 1e6)
    return {
        "blocks": blocks,
        "members": members,
        "registers_per_s": registered / register_s,
        "snapshot_keys_per_s": learnt / snapshot_s,
        **{name: mean_interval(values[1:]).to_dict() for name, values in found.items()},
    }


async def _register(members: Sequence[RawMember], packed: bytes) -> int:
    """Publish every prefix by one or two members, in turn; return the number of keys sent."""
    size = MAX_KEYS // PREFIX * PREFIX * KEY_BYTES
    sent = 0
    for number, at in enumerate(range(0, len(packed), size)):
        part = packed[at : at + size]
        await members[number % len(members)].publish(part)
        sent += len(part) // KEY_BYTES
        if number % SHARED == 0 and len(members) > 1:
            await members[(number + 1) % len(members)].publish(part)
            sent += len(part) // KEY_BYTES
    return sent


def _result(
    cells: list[dict[str, Any]],
    threads: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    mirrors: list[dict[str, Any]],
    bounded: dict[str, Any],
    reading: list[dict[str, Any]],
    most: int,
) -> dict[str, Any]:
    arms = [item[arm] for item in threads for arm in ("quiet", "streaming")]
    return {
        "hit_us": max(arm["hits"]["us"]["middle"] for arm in arms),
        "hit_verdict": _worst([arm["hits"]["verdict"] for arm in arms]),
        "miss_us": max(arm["misses"]["us"]["middle"] for arm in arms),
        "miss_verdict": _worst([arm["misses"]["verdict"] for arm in arms]),
        "directory_bytes_per_block": max(item["bytes_per_block"] for item in memory),
        "mirror_bytes_per_block": next(
            item["bytes_per_block"] for item in mirrors if item["blocks"] == most
        ),
        "mirror_bounded_mib": bounded["mib"],
        "limits": {
            "hit_us": lookups.MOST_HIT_US,
            "miss_us": lookups.MOST_MISS_US,
            "directory_bytes_per_block": MOST_DIRECTORY_BYTES,
            "mirror_bytes_per_block": MOST_MIRROR_BYTES,
        },
        "cells": cells,
        "engine_thread": threads,
        "directory_memory": memory,
        "mirrors": mirrors,
        "mirror_bounded": bounded,
        "reading": reading,
    }


def _worst(verdicts: Sequence[str]) -> str:
    for verdict in ("missed", "not resolved"):
        if verdict in verdicts:
            return verdict
    return "met"


def show(result: dict[str, Any], report: Report) -> None:
    """Print the tables."""
    report.table(
        "A directory in another process, 275 keys per lookup",
        [{name: _middle(value) for name, value in cell.items()} for cell in result["cells"]],
    )
    rows = []
    for item in result["engine_thread"]:
        for arm in ("quiet", "streaming"):
            for what in ("hits", "misses", "releases"):
                found = item[arm][what]
                interval = found["us"]
                rows.append(
                    {
                        "blocks": item["blocks"],
                        "deltas": arm,
                        "lookup": what,
                        "us": interval["middle"],
                        "95 %": f"{interval['low']:.3g} to {interval['high']:.3g}",
                        "p95 us": found["p95_us"],
                        "p99 us": found["p99_us"],
                        "worst us": found["worst_us"],
                        "verdict": found.get("verdict"),
                    }
                )
    report.table("On the engine's thread: 275 keys, split over own store and two peers", rows)
    rates = ", ".join(f"{t['streamed_keys_per_s']:,.0f}" for t in result["engine_thread"])
    report.note(
        f"A hit is the work of begin, matched and take, a miss that of begin and matched; targets "
        f"{lookups.MOST_HIT_US:g} and {lookups.MOST_MISS_US:g} us. Keys that came or went per "
        f"second while deltas streamed: {rates}."
    )
    report.table(
        "Memory of the directory, grown in a process of its own", result["directory_memory"]
    )
    report.table("Memory of a mirror, grown in a process of its own", result["mirrors"])
    bounded = result["mirror_bounded"]
    report.note(
        f"Bytes per block: directory {result['directory_bytes_per_block']:.0f} (target "
        f"{MOST_DIRECTORY_BYTES:g}), mirror {result['mirror_bytes_per_block']:.0f} (target "
        f"{MOST_MIRROR_BYTES:g}). With its default limit a mirror that was told of "
        f"{bounded['told']:,} blocks keeps {bounded['blocks']:,} of them in {bounded['mib']:.0f} "
        "MiB."
    )


def _middle(value: Any) -> Any:
    return value["middle"] if isinstance(value, dict) else value


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the rates over the members, and the lookups over the blocks."""
    cells = result["cells"]
    members = sorted({cell["members"] for cell in cells})
    blocks = sorted({cell["blocks"] for cell in cells})
    for name, title, unit in (
        ("registers_per_s", "Registering at the directory", "keys per second"),
        ("deltas_per_s", "Following the directory", "changes per second"),
    ):
        series = {
            f"{count:,} blocks": [
                _middle(cell[name])
                for number in members
                for cell in cells
                if (cell["blocks"], cell["members"]) == (count, number)
            ]
            for count in blocks
        }
        file = folder / f"directory-{name.split('_')[0]}.png"
        plots.lines(file, title, ("members", members), unit, series)
    threads = result["engine_thread"]
    plots.lines(
        folder / "directory-lookup.png",
        "Lookup of 275 keys on the engine's thread",
        ("blocks", [item["blocks"] for item in threads]),
        "us",
        {
            f"{what}, {arm}": [item[arm][what]["us"]["middle"] for item in threads]
            for what in ("hits", "misses")
            for arm in ("quiet", "streaming")
        },
        limit=lookups.MOST_HIT_US,
    )
