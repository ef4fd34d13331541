# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import resource
from pathlib import Path

import pytest

from xinference_xavier.hostmemory import Bound, host_memory

GIB = 2**30
MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A /proc and /sys of 64 GiB, 48 of them available, without cgroups or resource limits."""
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * MIB} kB\nMemAvailable: {48 * MIB} kB\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_cgroups_the_host_itself_is_the_limit(machine: Path) -> None:
    memory = host_memory(machine)
    assert memory.total == Bound(64 * GIB, "MemTotal of the host")
    assert memory.available == Bound(48 * GIB, "MemAvailable of the host")
    assert memory.process is None


def test_a_v2_cgroup_below_free_memory_is_the_limit(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/one\n")
    write(machine, "sys/fs/cgroup/pod/one/memory.max", f"{10 * GIB}\n")
    write(machine, "sys/fs/cgroup/pod/one/memory.current", f"{4 * GIB}\n")
    memory = host_memory(machine)
    assert memory.total == Bound(10 * GIB, "cgroup v2 memory.max of /pod/one")
    assert memory.available == Bound(6 * GIB, "cgroup v2 memory.max of /pod/one")


def test_page_cache_that_would_be_dropped_counts_as_available(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod\n")
    write(machine, "sys/fs/cgroup/pod/memory.max", f"{10 * GIB}")
    write(machine, "sys/fs/cgroup/pod/memory.current", f"{9 * GIB}")
    write(machine, "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {3 * GIB}\n")
    assert host_memory(machine).available.bytes == 4 * GIB


def test_the_tightest_cgroup_on_the_way_up_wins(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/one\n")
    write(machine, "sys/fs/cgroup/pod/one/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/pod/one/memory.current", "0")
    write(machine, "sys/fs/cgroup/pod/memory.max", f"{8 * GIB}")
    write(machine, "sys/fs/cgroup/pod/memory.current", f"{7 * GIB}")
    assert host_memory(machine).available == Bound(1 * GIB, "cgroup v2 memory.max of /pod")


@pytest.mark.parametrize("known_here", [True, False])
def test_a_v1_cgroup_is_found_also_under_a_path_of_the_host(
    machine: Path, known_here: bool
) -> None:
    group = "sys/fs/cgroup/memory/box" if known_here else "sys/fs/cgroup/memory"
    write(machine, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    write(machine, f"{group}/memory.limit_in_bytes", f"{5 * GIB}")
    write(machine, f"{group}/memory.usage_in_bytes", f"{2 * GIB}")
    write(machine, f"{group}/memory.stat", f"total_inactive_file {GIB}\n")
    source = f"cgroup v1 memory.limit_in_bytes of /{'box' if known_here else ''}"
    assert host_memory(machine).available == Bound(4 * GIB, source)


def test_a_v1_cgroup_without_limit_is_no_limit(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1")
    assert host_memory(machine).total.source == "MemTotal of the host"


def test_a_limit_of_the_address_space_is_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, 4 * GIB))
    assert host_memory(machine).process == Bound(3 * GIB, "ulimit -v (RLIMIT_AS)")


def test_this_machine_has_a_limit() -> None:
    memory = host_memory()
    assert memory.available.bytes > 0
    assert memory.total.bytes > 0
