# SPDX-License-Identifier: Apache-2.0
"""Do the budgets fit? The one answer to that question, asked at three points (R10).

The API asks for all replicas of a launch where it knows their host, the worker before it starts a
model's process, and the connector at the engine's start. All three get the same sizes and the
same message: need, have, which limit, which option to change.

Reads files below /proc and /sys and one resource limit; changes nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.sizes import format_size

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


@dataclass(frozen=True)
class DeviceMemory:
    """An accelerator's memory in bytes. ``engine_share`` (0 to 1) of it goes to vLLM itself."""

    name: str
    total: int
    available: int
    engine_share: float = 0.0


@dataclass(frozen=True)
class Budgets:
    """What one replica's two tiers may hold, in bytes, before rounding down to whole blocks."""

    device: int
    host: int


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


def check_budgets(
    options: XavierOptions,
    *,
    replicas_on_host: int = 1,
    device: DeviceMemory | None = None,
    reserved: int = 0,
    host: HostMemory | None = None,
) -> Budgets:
    """Return one replica's budgets in bytes, or raise :class:`OptionError` when they do not fit.

    ``replicas_on_host`` replicas are about to start here, each with a device of its own:
    ``device`` None means a CPU-only host, whose device tier is host memory too. ``reserved``
    bytes of the host's memory were promised to others that have not allocated them yet. ``host``
    is measured when not given.
    """
    host = host or host_memory()
    budgets = Budgets(
        device=options.xavier_gpu_cache_bytes.resolve(device.total if device else host.total.bytes),
        host=options.xavier_cpu_cache_bytes.resolve(host.total.bytes),
    )
    if device is not None:
        _check_device(options, budgets, device)
    _check_host(options, budgets, replicas_on_host, reserved, device is None, host)
    return budgets


def _check_device(options: XavierOptions, budgets: Budgets, device: DeviceMemory) -> None:
    engine = int(device.total * device.engine_share)
    have = max(0, device.available - engine)
    if budgets.device <= have:
        return
    taken = ""
    if engine:
        taken = f", and gpu_memory_utilization={device.engine_share:g} takes {format_size(engine)}"
    raise OptionError(
        f"xavier_gpu_cache_bytes={options.xavier_gpu_cache_bytes} needs "
        f"{format_size(budgets.device)} of {device.name}, which has {format_size(have)} for it: "
        f"{format_size(device.available)} of {format_size(device.total)} are free{taken}. "
        "Lower xavier_gpu_cache_bytes or gpu_memory_utilization"
    )


def _check_host(
    options: XavierOptions,
    budgets: Budgets,
    replicas: int,
    reserved: int,
    both_tiers: bool,
    host: HostMemory,
) -> None:
    each = budgets.host + (budgets.device if both_tiers else 0)
    named = f"xavier_cpu_cache_bytes={options.xavier_cpu_cache_bytes}"
    change = "xavier_cpu_cache_bytes"
    if both_tiers:
        named = (
            f"xavier_gpu_cache_bytes={options.xavier_gpu_cache_bytes} (host memory on a CPU-only "
            f"host) and {named}"
        )
        change = "xavier_gpu_cache_bytes, xavier_cpu_cache_bytes"
    if host.process is not None and each > host.process.bytes:
        raise OptionError(
            f"{named} need {format_size(each)} in one process, which may have "
            f"{format_size(host.process.bytes)} (limit: {host.process.source}). "
            f"Lower {change} or raise that limit"
        )
    need = replicas * each + reserved
    if need <= host.available.bytes:
        return
    waiting = f" and {format_size(reserved)} for launches in progress" if reserved else ""
    raise OptionError(
        f"{named} need {format_size(need)} on this host ({replicas} x {format_size(each)}"
        f"{waiting}), which has {format_size(host.available.bytes)} "
        f"(limit: {host.available.source}). Lower {change} or the number of replicas"
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
            cache = _table(group / "memory.stat").get(droppable, 0)
            where = "/" + "/".join(parts[:depth])
            yield f"{kind} of {where}", limit, max(0, used - cache)


def _number(path: Path) -> int | None:
    """Return the file's number; None where there is no file, or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """Return a file of ``name number`` lines; empty only for a cgroup's missing statistics."""
    if path.name == "memory.stat" and not path.exists():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
