# SPDX-License-Identifier: Apache-2.0
"""How fast each transport brings blocks of another process, by their number.

Two figures per transport. The *transfer* is the transport's own part: for shared memory the copy
from the mapping into KV blocks with all of a load's checks, for NIXL and xoscar the read into
staging slots. The *load* is all that a worker does for a segment of a request, up to the bytes in
KV blocks. The floor is one plain memory copy of the same bytes, and for NIXL a bare READ of the
same slots; floor and transfer alternate. Every copy moves on through arenas far larger than the
CPU's caches, on both sides. Only staging slots are used again and again, as in a worker, by the
bare READ too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from xinference_xavier.bench import reserving
from xinference_xavier.bench.blocks import BLOCK_BYTES, Cache, filled_arena, seconds_of_run_copy
from xinference_xavier.bench.reader import Reader
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.source import Offer, Raw, running_source
from xinference_xavier.bench.stats import at_least, percentile, ratio_interval
from xinference_xavier.store.arena import PAGE, Arena, MappedArena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.nixl_agent import Agent, Region, State

LEAST_RATIO: Final = 0.8
FROM_BLOCKS: Final = 64
"""Target: at least this share of the floor, from this many blocks on."""

LEASES_PER_ROUND: Final = 25
"""How often a single block is leased and read: each time takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``counts`` are numbers of blocks; ``arena_bytes`` the size of the source's arena."""

    counts: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    transports: tuple[str, ...] = ("shm", "nixl", "xoscar")
    rounds: int = 12
    arena_bytes: int = 256 << 20


class _RawNixl:
    """A bare agent that reads the source's slots into our staging slots."""

    def __init__(self, raw: Raw, target: torch.Tensor, staging: range) -> None:
        self._agent = Agent("bench-reader")
        region = Region.of(target)
        self._agent.register(region)
        peer = self._agent.add_peer(raw.metadata)
        self._local = self._agent.prepare(None, region, BLOCK_BYTES)
        self._remote = self._agent.prepare(peer, raw.region, BLOCK_BYTES)
        self._staging = np.array(staging, dtype=np.int32)

    def read(self, first: int, count: int) -> float:
        """Read slots, in as many pieces as :meth:`Reader.fetch`; return the seconds."""
        started = time.perf_counter()
        for at in range(0, count, len(self._staging)):
            ours = self._staging[: count - at]
            theirs = np.arange(first + at, first + at + len(ours), dtype=np.int32)
            transfer = self._agent.read(self._local, ours, self._remote, theirs)
            state = transfer.post()
            while state is State.RUNNING:
                state = transfer.poll()
            if state is not State.DONE:
                raise RuntimeError(f"the raw READ failed: {transfer.error}")
        return time.perf_counter() - started

    def close(self) -> None:
        """Destroy the agent."""
        self._agent.close()


def run(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure; ``rows`` has one entry per transport and count, ``skipped`` a reason each."""
    slots = settings.arena_bytes // BLOCK_BYTES
    counts = tuple(count for count in settings.counts if count <= slots)
    if not counts:
        raise ValueError(f"arenas of {settings.arena_bytes} bytes hold only {slots} blocks")
    report.say("allocating")
    cache = Cache.make(slots)
    arena = filled_arena(slots, "reader")
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    try:
        with running_source(slots, cache.layout.digest()) as offer:
            for name in settings.transports:
                try:
                    rows += _transport(settings, counts, name, offer, cache, arena, report)
                except TransportUnavailable as error:
                    skipped[name] = str(error)
                    report.say(f"{name}: skipped, {error}")
    finally:
        arena.close()
    one_block = None
    if "shm" in settings.transports and "shm" not in skipped:
        one_block = reserving.measure(LEASES_PER_ROUND * settings.rounds)
        report.say("one block, with its lease")
    return {
        "rows": rows,
        "skipped": skipped,
        "one_block": one_block,
        "limits": {
            "ratio": LEAST_RATIO,
            "from_blocks": FROM_BLOCKS,
            "one_block": reserving.MOST_RATIO,
        },
    }


def _transport(
    settings: Settings,
    counts: Sequence[int],
    name: str,
    offer: Offer,
    cache: Cache,
    arena: Arena,
    report: Report,
) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(contextlib.closing(Reader(offer.handle, cache, arena, name)))
        # Once through all of the source: the first access to a mapped page is a fault, which a
        # worker's load threads have behind them after some idle moments.
        reader.load(0, offer.handle.arenas[Tier.HOST].slots)
        raw = None
        if name == "nixl" and offer.raw is not None:
            bare = _RawNixl(offer.raw, arena.data, reader.staging)
            raw = stack.enter_context(contextlib.closing(bare))
        handle = offer.handle.arenas[Tier.HOST]
        mapped = stack.enter_context(contextlib.closing(MappedArena.open(handle)))
        source, target = mapped.data.numpy(), arena.data.numpy()
        # The first access to a page of a mapping is a fault, which is no part of a memory copy.
        source.reshape(-1)[::PAGE].max()

        def memcpy(first: int, count: int) -> float:
            return seconds_of_run_copy(target, first, source, first, count)

        transfer = reader.load if name == "shm" else reader.fetch
        rows = []
        step = stack.enter_context(report.steps(name, len(counts)))
        for count in counts:
            rows.append(
                _row(settings, name, count, len(source), memcpy, raw, transfer, reader.load)
            )
            step.done()
        return rows


Move = Callable[[int, int], float]
"""Moves slots from a first one on; returns the seconds."""


def _row(
    settings: Settings,
    name: str,
    count: int,
    slots: int,
    memcpy: Move,
    raw: _RawNixl | None,
    transfer: Move,
    load: Move,
) -> dict[str, Any]:
    """Measure one count: in every round each way moves the next window of the source."""
    ways: dict[str, Move] = {"memcpy": memcpy, "transfer": transfer}
    if raw is not None:
        ways["raw"] = raw.read
    if name != "shm":
        ways["load"] = load
    times: dict[str, list[float]] = {way: [] for way in ways}
    windows = max(1, slots // count)
    window = 0
    # The first round pays for what happens once, and does not count.
    for number in range(settings.rounds + 1):
        for way, move in ways.items():
            seconds = move(window % windows * count, count)
            window += 1
            if number:
                times[way].append(seconds)
    floor = "raw" if raw is not None else "memcpy"
    ratio = ratio_interval(times[floor], times["transfer"])
    nbytes = count * BLOCK_BYTES
    rates = {way: nbytes / percentile(values, 0.5) / 1e9 for way, values in times.items()}
    judged = count >= FROM_BLOCKS and name != "xoscar"
    return {
        "transport": name,
        "blocks": count,
        "us": percentile(times["transfer"], 0.5) * 1e6,
        "gb_per_s": rates["transfer"],
        "load_gb_per_s": rates.get("load", rates["transfer"]),
        "memcpy_gb_per_s": rates["memcpy"],
        "raw_gb_per_s": rates.get("raw"),
        "floor": floor,
        "ratio": ratio.to_dict(),
        "verdict": at_least(ratio, LEAST_RATIO) if judged else None,
    }


def show(result: dict[str, Any], report: Report) -> None:
    """Print the table."""
    rows = [
        row | {"ratio": row["ratio"]["middle"], "low": row["ratio"]["low"]}
        for row in result["rows"]
    ]
    report.table("Bringing blocks of 192 KiB from another process", rows)
    if (one := result["one_block"]) is not None:
        ends = {name: one["ratio"][name] for name in ("low", "high")}
        row = one | {"ratio": one["ratio"]["middle"]} | ends
        report.table("Leasing and reading one block over shared memory", [row])
    for name, reason in result["skipped"].items():
        report.note(f"{name} was skipped: {reason}")
    report.note(
        f"The ratio is to the floor; the target is {LEAST_RATIO} from {FROM_BLOCKS} blocks on, for "
        "shared memory and NIXL. xoscar is the reference path and fallback. Leasing and reading a "
        f"block may take {reserving.MOST_RATIO} times as long as an empty call over xoscar."
    )
