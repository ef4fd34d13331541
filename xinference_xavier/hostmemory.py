# SPDX-License-Identifier: Apache-2.0
"""What this process may have of the host's memory.

Reads files below /proc and /sys and one resource limit; changes nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUP_UNLIMITED: Final = 2**60
"""From here on a cgroup v1 limit means none (the kernel reports a page-rounded 2**63)."""


@dataclass(frozen=True)
class Bound:
    """A number of bytes, and for people where it comes from."""

    bytes: int
    source: str


@dataclass(frozen=True)
class HostMemory:
    """The tightest bounds on this process's host memory.

    ``total`` does not change while the host runs and is what a percentage is a share of;
    ``available`` is what could be allocated now. They may come from different sources.
    ``process`` is the limit of one process's address space, where one is set.
    """

    total: Bound
    available: Bound
    process: Bound | None = None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the bounds on this process: physical memory, its cgroups (v1 or v2), ``ulimit -v``.

    ``root`` is where /proc and /sys are found. Raises OSError when /proc/meminfo cannot be read.
    """
    info = _table(root / "proc/meminfo")
    totals = [Bound(info["MemTotal:"] * 1024, "MemTotal of the host")]
    available = [Bound(info["MemAvailable:"] * 1024, "MemAvailable of the host")]
    for source, limit, used in _cgroups(root):
        totals.append(Bound(limit, source))
        available.append(Bound(max(0, limit - used), source))
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return HostMemory(
        total=min(totals, key=_bytes),
        available=min(available, key=_bytes),
        process=None if soft == resource.RLIM_INFINITY else Bound(soft, "ulimit -v (RLIMIT_AS)"),
    )


def _bytes(bound: Bound) -> int:
    return bound.bytes


def _cgroups(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield source, limit and use (bytes) of each limited memory cgroup of this process.

    Page cache that the kernel would drop first does not count as used. In a container the path
    in /proc/self/cgroup may be the host's: directories that do not exist here are passed over,
    and the mount's own root is always looked at.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("cgroup v2 memory.max", "memory.max", "memory.current", "inactive_file")
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = (
                "cgroup v1 memory.limit_in_bytes",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        kind, limit_file, used_file, droppable = names
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit = _number(group / limit_file)
            used = _number(group / used_file)
            if limit is None or used is None or limit >= CGROUP_UNLIMITED:
                continue
            statistics = group / "memory.stat"
            cache = _table(statistics).get(droppable, 0) if statistics.exists() else 0
            where = "/" + "/".join(parts[:depth])
            yield f"{kind} of {where}", limit, max(0, used - cache)


def _number(path: Path) -> int | None:
    """Return the file's number; None where there is no file, or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """Return a file of ``name number`` lines."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
