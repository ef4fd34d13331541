# SPDX-License-Identifier: Apache-2.0
"""Samples of a soak: what its processes hold, and what the replicas say of themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from xoscar.errors import XoscarError

from xinference_xavier.bench.engines import describe
from xinference_xavier.demo.leftovers import ARENA, files_of
from xinference_xavier.soak.replicas import Replica

DIRECTORY: Final = "directory"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds. ``private_bytes`` is its anonymous memory, without shared arenas.

    ``name`` is the replica's and its role, and ``incarnation`` tells its engines apart; ``arenas``
    counts the arenas that it maps or has open, its own and those of others.
    """

    name: str
    incarnation: int
    pid: int
    rss_bytes: int
    private_bytes: int
    descriptors: int
    threads: int
    arenas: int


@dataclass(frozen=True, slots=True)
class Store:
    """What one replica says of its store and its requests; tokens since its start."""

    leases: int
    pinned_blocks: int
    load_jobs: int
    quarantined: int
    used_blocks: int
    free_blocks: int
    moving_blocks: int
    total_blocks: int
    prompt_tokens: int
    hit_tokens: int
    peer_tokens: int

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Store:
        """Read a ready replica's status."""
        store, traffic = status["store"], status["traffic"]
        hits = traffic["hit_tokens"]
        return cls(
            leases=store["leases"],
            pinned_blocks=status["pinned_blocks"],
            load_jobs=status["load_jobs"],
            quarantined=status["quarantined"],
            used_blocks=store["device_blocks"] + store["host_blocks"],
            free_blocks=store["device_free"] + store["host_free"],
            moving_blocks=sum(
                store[name] for name in ("staging", "demoting", "promoting", "zombies")
            ),
            total_blocks=store["device_slots"] + store["host_slots"] + store["spare_slots"],
            prompt_tokens=traffic["prompt_tokens"],
            hit_tokens=sum(hits.values()),
            peer_tokens=hits.get("peer_device", 0) + hits.get("peer_host", 0),
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. ``stores`` is empty while a member of the directory does not answer."""

    seconds: float
    processes: tuple[Usage, ...]
    stores: dict[str, Store]
    errors: dict[str, int]
    """What the connectors had to catch so far, by replica."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def take(seconds: float, replicas: Sequence[Replica], directory: str) -> Sample:
    """Look at everything now, ``seconds`` after the start."""
    processes = [*_engines(replicas), *_directories()]
    stores: dict[str, Store] = {}
    errors: dict[str, int] = {}
    # A member that has just died is in the directory until its heartbeat runs out.
    with suppress(OSError, XoscarError):
        statuses = describe(directory)
        ready = {name: status for name, status in statuses.items() if status["state"] == "ready"}
        stores = {name: Store.of(status) for name, status in ready.items()}
        errors = {
            name: sum(status["hook_failures"].values()) + sum(status["traffic"]["errors"].values())
            for name, status in ready.items()
        }
    return Sample(seconds, tuple(processes), stores, errors)


def arenas(replicas: Iterable[Replica]) -> int:
    """Return how many different arenas the running engines map or have open together."""
    pids = [process.pid for replica in replicas for process in replica.processes()]
    return len({file.inode for file in files_of(pids, ARENA)})


def _engines(replicas: Iterable[Replica]) -> Iterable[Usage]:
    for replica in replicas:
        incarnation = replica.serving
        if incarnation is None:
            continue
        for role, process in incarnation.roles().items():
            with suppress(psutil.Error, OSError):
                yield _usage(f"{replica.name} {role}", incarnation.number, process)


def _directories() -> Iterable[Usage]:
    """The directory is a child of this process."""
    for child in psutil.Process(os.getpid()).children():
        with suppress(psutil.Error, OSError):
            if "xinference_xavier.cli" in child.cmdline():
                yield _usage(DIRECTORY, 1, child)


def _usage(name: str, incarnation: int, process: psutil.Process) -> Usage:
    with process.oneshot():
        return Usage(
            name,
            incarnation,
            process.pid,
            process.memory_info().rss,
            _private_bytes(process.pid),
            process.num_fds(),
            process.num_threads(),
            len(files_of([process.pid], ARENA)),
        )


def _private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
