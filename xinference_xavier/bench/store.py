# SPDX-License-Identifier: Apache-2.0
"""What it costs to admit a block into a full store: one demotion, one store, one eviction.

Index and copies are the product's own: the plan of ``SnapshotIndex``, run by a ``CopyEngine``, and
committed. The time of a block is that of the index calls and job tables on the calling thread plus
that of the copies on the copy thread. It is measured for histories of up to a million held blocks,
with none, half and nearly all of them leased, and compared in alternating rounds with the floor,
two memory copies of a slot whose source and target are in no CPU cache, and with the store that is
built into Xinference.

A million blocks of 192 KiB do not fit into any machine that this runs on. So the index has all of
its slots, and the arenas have fewer, which slots share (their number modulo the arena's): the same
bytes move as in a real store of that size, to memory just as cold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from xinference_xavier.bench import plots
from xinference_xavier.bench.blocks import (
    BLOCK_BYTES,
    Cache,
    Ints,
    filled_arena,
    seconds_of_row_copies,
)
from xinference_xavier.bench.bookkeeping import numbered_keys, resident_bytes_per_block
from xinference_xavier.bench.builtin import BuiltinStore, BuiltinUnavailable
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import at_least, at_most, percentile, ratio_interval
from xinference_xavier.store.copier import CopyEngine
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.store.jobs import StoreJob, StoreResult, Tier

LEASED: Final = ("none", "half", "nearly all")

DEVICE_SHARE: Final = 20
"""One of this many blocks of a history is in the device tier, as in the reference run."""

LEASE_BLOCKS: Final = 64
FOREVER_S: Final = 1e9
POLL_S: Final = 2e-4

MOST_RATIO: Final = 1.5
LEAST_SPEEDUP: Final = 10.0
MOST_FLATNESS: Final = 1.2
"""Targets: against the floor, against the built-in store, and every cell against the first one."""

MOST_RESIDENT: Final = 300.0
"""Target: bytes of bookkeeping per block."""

REPLAY_BLOCKS: Final = 27_817
REPLAY_DEVICE: Final = {"256 MiB": 1365, "8 MiB": 42}
"""The reference run: blocks staged, and device slots of the two budgets it had."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``arena_bytes`` is the size of each arena and of the KV cache, to be far above any cache."""

    histories: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    rounds: int = 12
    batch: int = 128
    arena_bytes: int = 256 << 20


class _Bench:
    """The memory that all cells of the table share."""

    def __init__(self, settings: Settings) -> None:
        self.blocks = settings.arena_bytes // BLOCK_BYTES
        if settings.batch > self.blocks // 2:
            raise ValueError(
                f"a batch of {settings.batch} blocks needs arenas of twice as many, and "
                f"{settings.arena_bytes} bytes hold {self.blocks}"
            )
        self.batch = settings.batch
        self.cache = Cache.make(self.blocks)
        self.arenas = {tier: filled_arena(self.blocks, tier.name.lower()) for tier in Tier}
        self.engine = CopyEngine(
            layout=self.cache.layout, arenas=self.arenas, device=self.cache.device, verify="off"
        )
        self._random = np.random.default_rng(0)
        self._keys = numbered_keys()

    def close(self) -> None:
        """End the copy thread and free the arenas."""
        self.engine.close(10.0)
        for arena in self.arenas.values():
            arena.close()

    def new_blocks(self, count: int) -> list[tuple[bytes, int]]:
        """Return new keys with block ids scattered over the KV cache, as vLLM's pool has them."""
        ids = self._random.permutation(self.blocks)[: min(count, self.blocks)].tolist()
        return [(next(self._keys), ids[number % len(ids)]) for number in range(count)]

    def floor_seconds(self) -> float:
        """Return the time of two cold copies for each block of a batch."""
        device, host = (self.arenas[tier].data.numpy() for tier in Tier)
        places = self._random.permutation(self.blocks)
        first, second = places[: self.batch], places[-self.batch :]
        return seconds_of_row_copies(host, first, device, second) + seconds_of_row_copies(
            device, first, host, second
        )

    def admit(self, index: SnapshotIndex) -> tuple[float, float]:
        """Admit a batch; return the seconds of the bookkeeping and of the copies."""
        blocks = self.new_blocks(self.batch)
        started = time.perf_counter()
        plan = index.admit(blocks)
        demotions = np.array(plan.demotions, dtype=np.int64).reshape(-1, 3)
        stores = np.array(plan.stores, dtype=np.int64).reshape(-1, 5)
        planned = time.perf_counter()
        if len(demotions) != self.batch or len(stores) != self.batch:
            raise RuntimeError(
                f"{len(stores)} blocks were admitted with {len(demotions)} demotions, "
                f"not {self.batch} with one each"
            )
        result = self._copy(plan.job_id, demotions, stores)
        copied = time.perf_counter()
        index.commit(plan.job_id)
        return time.perf_counter() - copied + planned - started, result.seconds

    def _copy(self, job_id: int, demotions: Ints, stores: Ints) -> StoreResult:
        demotions[:, :2] %= self.blocks
        stores[:, 2] %= self.blocks
        self.engine.submit(StoreJob(job_id, demotions, stores))
        while not (results := self.engine.poll()):
            # The copy thread needs the interpreter now and then; it measures its own time.
            time.sleep(POLL_S)
        if results[0].failed_demotions or results[0].failed_stores:
            raise RuntimeError(f"copies failed: {results[0].reason}")
        return results[0]


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds per block of one round."""

    floor: float
    bookkeeping: float
    copies: float
    builtin: float | None
    builtin_one_thread: float | None

    @property
    def ours(self) -> float:
        """Return what one block costs in all."""
        return self.bookkeeping + self.copies


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``cells`` has one entry per history and share of leases.

    With ``resume`` every finished history is kept there. Raises ``record.RecordMismatch``.
    """
    record = Record(resume, asdict(settings))
    report.say("allocating")
    bench = _Bench(settings)
    try:
        builtin, reason = _builtin(bench)
        cells: list[dict[str, Any]] = []
        with report.steps("histories", len(settings.histories) * len(LEASED)) as step:
            for history in settings.histories:
                measure = partial(_cells, bench, settings, history, builtin)
                cells += record.arm(f"history {history}", measure)
                step.done(len(LEASED))
        report.say("replaying the reference history")
        replays = [
            record.arm(f"replay {name}", partial(_replay, bench, name)) for name in REPLAY_DEVICE
        ]
        report.say("measuring memory")
        most = max(settings.histories)
        resident = record.arm("resident", lambda: resident_bytes_per_block(most))
        return _result(cells, replays, resident, reason)
    finally:
        bench.close()


def _cells(
    bench: _Bench, settings: Settings, history: int, builtin: BuiltinStore | None
) -> list[dict[str, Any]]:
    index, keys = _history(bench, history)
    cells = []
    for leased in LEASED:
        _lease(index, keys, leased, bench.batch)
        rounds = [_round(bench, index, builtin) for _ in range(settings.rounds + 1)]
        cells.append(_cell(history, leased, rounds[1:]))
    return cells


def _builtin(bench: _Bench) -> tuple[BuiltinStore | None, str | None]:
    try:
        return BuiltinStore(bench.cache.layers, BLOCK_BYTES, bench.blocks), None
    except BuiltinUnavailable as error:
        return None, str(error)


def _history(bench: _Bench, blocks: int) -> tuple[SnapshotIndex, list[bytes]]:
    """Return a full index that holds ``blocks`` blocks, and their keys from old to new."""
    device = max(4 * bench.batch, blocks // DEVICE_SHARE)
    index = SnapshotIndex(
        device_slots=device,
        host_slots=max(4 * bench.batch, blocks - device) + bench.batch,
        spare_slots=bench.batch,
    )
    keys: list[bytes] = []
    while len(keys) < device + max(4 * bench.batch, blocks - device):
        batch = bench.new_blocks(bench.batch)
        plan = index.admit(batch)
        index.commit(plan.job_id)
        # Within a batch the first key is the most recently used one.
        keys += [key for key, _ in reversed(batch)]
    return index, keys


def _lease(index: SnapshotIndex, keys: Sequence[bytes], leased: str, batch: int) -> None:
    """Lease that share of the blocks; called with growing shares of one index."""
    if leased == "none":
        return
    device = index.counters().device_blocks
    # What stays free in either tier is what the rounds need to have something to demote and evict.
    tiers = (keys[:-device][2 * batch :], keys[-device:][2 * batch :])
    for tier in tiers:
        chunks = [tier[at : at + LEASE_BLOCKS] for at in range(0, len(tier), LEASE_BLOCKS)]
        for chunk in chunks[::2] if leased == "half" else chunks[1::2]:
            index.acquire(chunk, reader=None, request="bench", now=0.0, duration=FOREVER_S)


def _round(bench: _Bench, index: SnapshotIndex, builtin: BuiltinStore | None) -> _Round:
    n = bench.batch
    floor = bench.floor_seconds()
    bookkeeping, copies = bench.admit(index)
    theirs: list[float | None] = [None, None]
    if builtin is not None:
        ids = [block for _, block in bench.new_blocks(n)]
        theirs = [builtin.admit(ids, threads=t) / n for t in (torch.get_num_threads(), 1)]
    return _Round(floor / n, bookkeeping / n, copies / n, *theirs)


def _cell(history: int, leased: str, rounds: Sequence[_Round]) -> dict[str, Any]:
    ours = [item.ours for item in rounds]
    ratio = ratio_interval(ours, [item.floor for item in rounds])
    cell: dict[str, Any] = {
        "history": history,
        "leased": leased,
        "us_per_block": _us(ours),
        "bookkeeping_us": _us([item.bookkeeping for item in rounds]),
        "copy_us": _us([item.copies for item in rounds]),
        "floor_us": _us([item.floor for item in rounds]),
        "ratio_to_floor": ratio.to_dict(),
        "verdict": at_most(ratio, MOST_RATIO),
        # Cells are measured one after the other: what the machine did meanwhile cancels out.
        "floors": [item.ours / item.floor for item in rounds],
    }
    theirs = {
        "builtin": [item.builtin for item in rounds],
        "builtin_one_thread": [item.builtin_one_thread for item in rounds],
    }
    for name, values in theirs.items():
        times = [value for value in values if value is not None]
        speedup = ratio_interval(times, ours) if times else None
        cell[f"{name}_us"] = _us(times) if times else None
        cell[f"speedup_vs_{name}"] = speedup.to_dict() if speedup else None
        cell[f"speedup_vs_{name}_verdict"] = at_least(speedup, LEAST_SPEEDUP) if speedup else None
    return cell


def _us(seconds: Sequence[float]) -> float:
    return percentile(seconds, 0.5) * 1e6


def _replay(bench: _Bench, budget: str) -> dict[str, Any]:
    """Stage the reference run's blocks into a store of that budget, with all copies."""
    device, blocks = REPLAY_DEVICE[budget], REPLAY_BLOCKS
    # The reference run batched by request; no batch may be larger than the smaller device tier.
    batch = min(bench.batch, device)
    index = SnapshotIndex(device_slots=device, host_slots=blocks + batch, spare_slots=batch)
    spent = 0.0
    for start in range(0, blocks, batch):
        new = bench.new_blocks(min(batch, blocks - start))
        started = time.perf_counter()
        plan = index.admit(new)
        demotions = np.array(plan.demotions, dtype=np.int64).reshape(-1, 3)
        stores = np.array(plan.stores, dtype=np.int64).reshape(-1, 5)
        spent += time.perf_counter() - started
        spent += bench._copy(plan.job_id, demotions, stores).seconds
        started = time.perf_counter()
        index.commit(plan.job_id)
        spent += time.perf_counter() - started
    found = index.counters()
    return {
        "budget": budget,
        "blocks": blocks,
        "device_blocks": found.device_blocks,
        "host_blocks": found.host_blocks,
        "demotions": found.totals.demotions,
        "us_per_block": spent / blocks * 1e6,
    }


def _result(
    cells: list[dict[str, Any]],
    replays: list[dict[str, Any]],
    resident: float,
    reason: str | None,
) -> dict[str, Any]:
    worst = max(cells, key=lambda cell: float(cell["ratio_to_floor"]["middle"]))
    flatness = max(
        (ratio_interval(cell["floors"], cells[0]["floors"]) for cell in cells),
        key=lambda found: found.middle,
    )
    return {
        "us_per_block": percentile([cell["us_per_block"] for cell in cells], 0.5),
        "floor_us": percentile([cell["floor_us"] for cell in cells], 0.5),
        "ratio_to_floor": worst["ratio_to_floor"]["middle"],
        "verdict": worst["verdict"],
        "speedup_vs_builtin": _least(cells, "speedup_vs_builtin"),
        "speedup_vs_builtin_one_thread": _least(cells, "speedup_vs_builtin_one_thread"),
        "builtin_skipped": reason,
        "flatness": flatness.middle,
        "flatness_interval": flatness.to_dict(),
        "flatness_verdict": at_most(flatness, MOST_FLATNESS),
        "resident_bytes_per_block": resident,
        "limits": {
            "ratio_to_floor": MOST_RATIO,
            "speedup_vs_builtin": LEAST_SPEEDUP,
            "flatness": MOST_FLATNESS,
            "resident_bytes_per_block": MOST_RESIDENT,
        },
        "cells": cells,
        "replay": replays,
    }


def _least(cells: Sequence[dict[str, Any]], name: str) -> float | None:
    return min((cell[name]["middle"] for cell in cells if cell[name]), default=None)


def show(result: dict[str, Any], report: Report) -> None:
    """Print the tables."""
    names = ("history", "leased", "us_per_block", "bookkeeping_us", "copy_us", "floor_us")
    rows = [
        {name: cell[name] for name in names}
        | {"ratio": cell["ratio_to_floor"]["middle"], "at_most_1.5": cell["verdict"]}
        | {name: cell[name] for name in ("builtin_us", "builtin_one_thread_us")}
        for cell in result["cells"]
    ]
    report.table("Admitting one 192 KiB block with a demotion", rows)
    if not result["builtin_skipped"]:
        report.note(
            f"{result['speedup_vs_builtin']:.1f} times faster than the built-in store as it runs, "
            f"and {result['speedup_vs_builtin_one_thread']:.1f} times with one thread for torch, "
            f"both in the smallest cell (target {LEAST_SPEEDUP:g})."
        )
    resident = result["resident_bytes_per_block"]
    report.note(
        f"Worst cell / first cell, each against its floor: {result['flatness']:.2f}, target "
        f"{MOST_FLATNESS} {result['flatness_verdict']}. Bookkeeping: {resident:.0f} bytes per "
        f"block in the largest history (target {MOST_RESIDENT:g}). "
        + (
            result["builtin_skipped"]
            or "The built-in store runs with the CPU as its device, without its CUDA streams."
        )
    )
    report.table("The reference history replayed", result["replay"])


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the costs and the ratios over the histories, one line per share of leases."""
    cells = result["cells"]
    histories = sorted({cell["history"] for cell in cells})

    def series(value: str) -> dict[str, list[float | None]]:
        return {f"{share} leased": _over(cells, histories, share, value) for share in LEASED}

    x = ("blocks held", histories)
    costs = series("us_per_block") | {"floor": _over(cells, histories, LEASED[0], "floor_us")}
    plots.lines(folder / "store-cost.png", "Admission with a demotion", x, "us per block", costs)
    plots.lines(
        folder / "store-ratio.png",
        "Admission with a demotion / two cold copies",
        x,
        "ratio",
        series("ratio_to_floor"),
        limit=MOST_RATIO,
    )


def _over(
    cells: Sequence[dict[str, Any]], histories: Sequence[int], share: str, value: str
) -> list[float | None]:
    found = {cell["history"]: cell[value] for cell in cells if cell["leased"] == share}
    values = [found[history] for history in histories]
    return [item["middle"] if isinstance(item, dict) else item for item in values]
