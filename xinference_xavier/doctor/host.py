# SPDX-License-Identifier: Apache-2.0
"""What this host's kernel lets a replica have: memory, locked memory, other processes' memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from xinference_xavier.doctor.finding import Finding, ok, warn
from xinference_xavier.hostmemory import HostMemory
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.preflight import check_budgets
from xinference_xavier.sizes import format_size


def memory_finding(memory: HostMemory) -> Finding:
    """Judge whether one replica with default budgets fits, on a host whose device is the host."""
    seen = (
        f"{format_size(memory.available.bytes)} available ({memory.available.source}) of "
        f"{format_size(memory.total.bytes)} ({memory.total.source})"
    )
    if memory.process is not None:
        seen += f", {format_size(memory.process.bytes)} per process ({memory.process.source})"
    try:
        check_budgets(XavierOptions(), host=memory)
    except OptionError as error:
        return warn(
            "memory",
            f"{seen}; default budgets do not fit: {error}",
            "free memory, raise the limit that is named, or launch with smaller budgets",
        )
    return ok("memory", seen)


def memlock_finding(limit: int, rdma: bool, gpu: bool) -> Finding:
    """Judge ``RLIMIT_MEMLOCK`` (bytes, or RLIM_INFINITY): who pins memory here needs it."""
    name = "locked memory"
    if limit == resource.RLIM_INFINITY:
        return ok(name, "unlimited (ulimit -l)")
    seen = f"{format_size(limit)} (ulimit -l)"
    if rdma:
        return warn(
            name,
            f"{seen}: RDMA registers whole tiers, which count as locked",
            "ulimit -l unlimited; for a container --ulimit memlock=-1; for a service "
            "LimitMEMLOCK=infinity",
        )
    user = "NVIDIA's driver pins without charging it" if gpu else "nothing here pins memory"
    return ok(name, f"{seen}; {user}")


def rdma_devices(root: Path = Path("/")) -> list[str]:
    """Return the names of this host's RDMA devices."""
    folder = root / "sys/class/infiniband"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def process_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Judge settings that hide processes from each other, which mapping their memory needs."""
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    name = "reading other processes"
    if scope in (None, "0"):
        yield ok(name, "not restricted by Yama")
    else:
        yield warn(
            name,
            f"kernel.yama.ptrace_scope={scope}: UCX cannot read a neighbour's memory, so NIXL is "
            "not used between replicas of one host (shared memory is)",
            "sysctl kernel.yama.ptrace_scope=0, if NIXL is wanted there",
        )
    hidden = _hidepid(root)
    name = "seeing other processes"
    if hidden in (None, "0", "off"):
        yield ok(name, "/proc shows them")
    else:
        yield warn(
            name,
            f"/proc has hidepid={hidden}: only processes of the same user can be mapped",
            "run all replicas of a host as one user",
        )


def _hidepid(root: Path) -> str | None:
    for line in (_read(root / "proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1] == "/proc":
            options = dict(option.partition("=")[::2] for option in fields[3].split(","))
            return options.get("hidepid")
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
