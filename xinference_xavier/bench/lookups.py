# SPDX-License-Identifier: Apache-2.0
"""What looking up a prefix costs the engine's thread while changes of other replicas stream in.

What a request's lookup runs through is the product's own: ``Lookups`` over vLLM's block pool and an
index and a mirror of full size, and a ``ControlRuntime`` whose thread follows a directory in
another process and asks two peers in a third one for leases. This process's main thread takes the
part of the engine's. Not in here: vLLM, and the look at the request's features before the lookup.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.block_pool import BlockPool

from xinference_xavier.bench.engines import running_directory, wait_until
from xinference_xavier.bench.lookup_peers import (
    PREFIX,
    SHARES,
    STREAM_KEYS,
    STREAMED,
    admit,
    prefix,
    running_peers,
    runtime_of,
)
from xinference_xavier.bench.members import START_S, packed_keys, unpacked
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import at_most, mean_interval, percentile
from xinference_xavier.control.mirror import ENTRY_BYTES, Mirror
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.vllm.compat import Blocks
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.lookup import Lookups
from xinference_xavier.vllm.pace import Pace

BLOCK_TOKENS: Final = 16
MOST_PREFIXES: Final = 256
REQUESTS: Final = 40
"""Full hits, and as many misses, in one round."""

MOST_HIT_US: Final = 100.0
MOST_MISS_US: Final = 5.0
"""Targets."""

POLL_S: Final = 2e-4


@dataclass(slots=True)
class _Request:
    """What a lookup reads of vLLM's request."""

    request_id: str
    block_hashes: Sequence[bytes]


def measure(blocks: int, rounds: int, folder: Path, report: Report) -> dict[str, Any]:
    """Measure with ``blocks`` blocks in the own index, and as many of others in the mirror."""
    prefixes = min(MOST_PREFIXES, blocks // (2 * PREFIX))
    if not prefixes:
        raise ValueError(f"{blocks} blocks are too few: at least {2 * PREFIX} are needed")
    with (
        running_directory(folder / "lookup-directory.log") as directory,
        running_peers(directory, prefixes) as ask,
        _Replica(directory, blocks, prefixes) as replica,
    ):
        ask("fill", blocks - sum(SHARES[1:]) * prefixes)
        wait_until(lambda: replica.ready(blocks), "the mirror to be filled", 10 * START_S)
        found: list[tuple[_Round, _Round]] = []
        streamed = seconds = 0.0
        # What the garbage collector does to a lookup now and then shows in the percentiles.
        gc.collect()
        with report.steps(f"lookups among {blocks} blocks", rounds + 1) as step:
            for _ in range(rounds + 1):
                quiet = replica.round()
                ask("stream", 1)
                started = time.perf_counter()
                busy = replica.round()
                seconds += time.perf_counter() - started
                streamed += ask("stream", 0)
                found.append((quiet, busy))
                step.done()
        replica.check()
        arms = {"quiet": [a for a, _ in found[1:]], "streaming": [b for _, b in found[1:]]}
        return {
            "blocks": blocks,
            "keys": PREFIX,
            "streamed_keys_per_s": streamed / seconds,
            **{name: _summary(arm) for name, arm in arms.items()},
        }


@dataclass(slots=True)
class _Round:
    """Seconds of each lookup of one round."""

    hits: list[float]
    misses: list[float]
    releases: list[float]


def _summary(arm: Sequence[_Round]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    limits = {"hits": MOST_HIT_US, "misses": MOST_MISS_US, "releases": None}
    for name, limit in limits.items():
        times: list[list[float]] = [getattr(item, name) for item in arm]
        everything = [value * 1e6 for values in times for value in values]
        # A round's median is one measurement: what interrupts single lookups is in p95 and p99.
        interval = mean_interval([percentile(values, 0.5) * 1e6 for values in times])
        found[name] = {
            "us": interval.to_dict(),
            "p95_us": percentile(everything, 0.95),
            "p99_us": percentile(everything, 0.99),
            "worst_us": max(everything),
        }
        if limit is not None:
            found[name]["verdict"] = at_most(interval, limit)
    return found


class _Replica:
    """The side of the engine: its index, mirror, control thread and lookups."""

    def __init__(self, directory: str, blocks: int, prefixes: int) -> None:
        self._prefixes = [prefix(number) for number in range(prefixes)]
        self._misses = unpacked(packed_keys("misses", PREFIX * MOST_PREFIXES))
        self._others = sum(SHARES[1:]) * prefixes
        self._index = _index(blocks, [keys[: SHARES[0]] for keys in self._prefixes])
        # The default limit is below a million blocks: here nothing is to be forgotten.
        self._mirror = Mirror((2 * blocks + STREAMED * STREAM_KEYS) * ENTRY_BYTES)
        self._control = runtime_of("self", directory, self._index, self._mirror)
        self._lookups = Lookups(
            index=self._index,
            control=self._control,
            mirror=self._mirror,
            blocks=Blocks(BlockPool(1024, enable_caching=True, hash_block_size=BLOCK_TOKENS)),
            block_tokens=BLOCK_TOKENS,
            lookup_timeout_s=START_S,
            min_load_tokens=None,
            pace=Pace(),
            counters=Counters(),
        )
        self._asked = 0

    def __enter__(self) -> _Replica:
        self._control.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lookups.drop_all()
        self._control.close()

    def ready(self, blocks: int) -> bool:
        """Whether both peers can be asked, and all that others hold is known."""
        return self._control.usable_mask().bit_count() == 2 and len(self._mirror) >= blocks

    def check(self) -> None:
        """Raise if the measurement has left something behind, or confused the index."""
        self._index.check_invariants()
        if leases := self._index.counters().leases:
            raise RuntimeError(f"{leases} leases were not given back")

    def round(self) -> _Round:
        """Look up known and unknown prefixes by turns."""
        found = _Round([], [], [])
        for _ in range(REQUESTS):
            self._asked += 1
            # A new request has new key objects, whose hashes vLLM has used.
            keys = [bytes(bytearray(k)) for k in self._prefixes[self._asked % len(self._prefixes)]]
            hash(tuple(keys))
            seconds, released = self._hit(_Request(f"hit {self._asked}", keys))
            found.hits.append(seconds)
            found.releases.append(released)
            start = self._asked % MOST_PREFIXES * PREFIX
            unknown = self._misses[start : start + PREFIX]
            found.misses.append(self._miss(_Request(f"miss {self._asked}", unknown)))
        return found

    def _hit(self, request: _Request) -> tuple[float, float]:
        """Return the seconds of the calls of a lookup, and of giving back what it found."""
        lookups = self._lookups
        started = time.perf_counter()
        lookups.begin(request)
        spent = time.perf_counter() - started
        while any(run.waiting for run in lookups.promises[request.request_id].runs):
            time.sleep(POLL_S)  # the engine does something else
        started = time.perf_counter()
        count = lookups.matched(request, 0, room=PREFIX)
        promise = lookups.take(request.request_id)
        spent += time.perf_counter() - started
        if promise is None or count != PREFIX:
            raise RuntimeError(f"{count} of {PREFIX} blocks were found")
        started = time.perf_counter()
        for run in promise.runs:
            lookups.release(run)
        return spent, time.perf_counter() - started

    def _miss(self, request: _Request) -> float:
        lookups = self._lookups
        started = time.perf_counter()
        lookups.begin(request)
        count = lookups.matched(request, 0, room=PREFIX)
        spent = time.perf_counter() - started
        lookups.settled(request.request_id)
        if count != 0:
            raise RuntimeError(f"{count} blocks were found of a prefix that nobody has")
        return spent


def _index(blocks: int, runs: Sequence[Sequence[bytes]]) -> SnapshotIndex:
    """Return an index that holds ``blocks`` blocks, the given ones scattered among others."""
    device = blocks // 20
    index = SnapshotIndex(
        device_slots=device, host_slots=blocks - device + PREFIX, spare_slots=PREFIX
    )
    held = sum(map(len, runs))
    others = iter(unpacked(packed_keys("own", blocks - held)))
    between = (blocks - held) // len(runs)
    for run in runs:
        left = between
        while left:
            count = min(left, PREFIX)
            admit(index, [next(others) for _ in range(count)])
            left -= count
        admit(index, run)
    return index
