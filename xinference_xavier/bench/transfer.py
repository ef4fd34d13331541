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

from xinference_xavier.bench.blocks import BLOCK_BYTES, Cache, filled_arena, seconds_of_run_copy
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.source import HOST, Offer, Raw, running_source
from xinference_xavier.bench.stats import at_least, percentile, ratio_interval
from xinference_xavier.store.arena import PAGE, Arena, MappedArena
from xinference_xavier.store.jobs import LoadJob, LoadSegment, Tier
from xinference_xavier.transport.base import Connection, TransportUnavailable
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.nixl_agent import Agent, Region, State
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.select import Transports

LEAST_RATIO: Final = 0.8
FROM_BLOCKS: Final = 64
"""Target: at least this share of the floor, from this many blocks on."""

MOST_STAGING: Final = 256
"""Staging slots of a worker."""

MEMBER: Final = 1
LIMIT_S: Final = 60.0
POLL_S: Final = 2e-4


@dataclass(frozen=True, slots=True)
class Settings:
    """``counts`` are numbers of blocks; ``arena_bytes`` the size of the source's arena."""

    counts: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    transports: tuple[str, ...] = ("shm", "nixl", "xoscar")
    rounds: int = 12
    arena_bytes: int = 256 << 20


class _Reader:
    """Our worker: KV cache, arena with staging slots at its end, and one transport."""

    def __init__(self, offer: Offer, cache: Cache, arena: Arena, transport: str) -> None:
        """Raises :class:`TransportUnavailable`."""
        self._offer = offer
        self._blocks = cache.layout.num_blocks
        self.staging = range(arena.slots - min(MOST_STAGING, arena.slots), arena.slots)
        self._transports = Transports.start(
            choice=transport,
            arenas={Tier.HOST: arena},
            staging={Tier.HOST: self.staging},
            host=HOST,
            layout_digest=cache.layout.digest(),
        )
        self._engine = LoadEngine(
            layout=cache.layout,
            arenas={Tier.HOST: arena},
            device=cache.device,
            verify="off",
            staging={Tier.HOST: self.staging},
            transports=self._transports,
        )
        self._connection: Connection | None = None
        self._random = np.random.default_rng(0)
        self._jobs = 0
        try:
            self._connection = self._transports.connect(
                MEMBER,
                offer.handle,
                Tier.HOST,
                pools={Tier.HOST: StagingPool(self.staging, frozenset)},
                deadline=time.monotonic() + LIMIT_S,
            )
            # Once through all of the source: the first access to a mapped page is a fault, which
            # a worker's load threads have behind them after some idle moments.
            self.load(0, offer.handle.arenas[Tier.HOST].slots)
        except BaseException:
            self.close()
            raise

    def load(self, first: int, count: int) -> float:
        """Load slots into scattered KV blocks as for a request.

        Returns the seconds on the load thread: the hand-over between threads is no part of a
        transport.
        """
        blocks = self._random.permutation(self._blocks)[:count]
        slots = np.arange(first, first + count)
        tiers = np.full(count, int(Tier.HOST))
        rows = np.stack([tiers, slots, slots + 1, blocks], axis=1).astype(np.int64)
        self._jobs += 1
        job = LoadJob(self._jobs, "bench", (LoadSegment(MEMBER, rows),), LIMIT_S)
        self._engine.submit(job, {MEMBER: self._offer.handle})
        while not (results := self._engine.poll()):
            time.sleep(POLL_S)
        segment = results[0].segments[0]
        if segment.failed_rows:
            raise RuntimeError(f"{len(segment.failed_rows)} of {count} blocks: {segment.reason}")
        return segment.seconds

    def fetch(self, first: int, count: int) -> float:
        """Read slots into staging slots, as many at once as there are; return the seconds."""
        if self._connection is None:
            raise RuntimeError("the reader is closed")
        started = time.perf_counter()
        for at in range(0, count, len(self.staging)):
            n = min(len(self.staging), count - at)
            slots = range(first + at, first + at + n)
            deadline = time.monotonic() + LIMIT_S
            self._connection.fetch(slots, self.staging[:n], deadline=deadline)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close connections and transport; the arena is the caller's."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.close(LIMIT_S)
        self._transports.close()


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
        """Read slots, in as many pieces as :meth:`_Reader.fetch`; return the seconds."""
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
    return {
        "rows": rows,
        "skipped": skipped,
        "limits": {"ratio": LEAST_RATIO, "from_blocks": FROM_BLOCKS},
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
        reader = stack.enter_context(contextlib.closing(_Reader(offer, cache, arena, name)))
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
    for name, reason in result["skipped"].items():
        report.note(f"{name} was skipped: {reason}")
    report.note(
        f"The ratio is to the floor; the target is {LEAST_RATIO} from {FROM_BLOCKS} blocks on, for "
        "shared memory and NIXL. xoscar is the reference path and fallback."
    )
