# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import resource
from pathlib import Path

import pytest

from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.preflight import (
    Bound,
    Budgets,
    DeviceMemory,
    HostMemory,
    check_budgets,
    host_memory,
)

GIB = 2**30
MIB = 2**20


def options(**values: object) -> XavierOptions:
    return XavierOptions.from_mapping({"xavier_gpu_first": True, **values})


def host(total: int = 100 * GIB, available: int | None = None, process: int | None = None):
    return HostMemory(
        total=Bound(total, "the total"),
        available=Bound(total if available is None else available, "the limit hit"),
        process=None if process is None else Bound(process, "ulimit -v (RLIMIT_AS)"),
    )


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


def test_on_a_cpu_host_both_tiers_are_host_memory_and_default_to_a_share_of_it() -> None:
    assert check_budgets(options(), host=host(100 * GIB)) == Budgets(256 * MIB, 10 * GIB)


def test_percentages_are_shares_of_the_device_and_of_the_host() -> None:
    chosen = options(xavier_gpu_cache_bytes="5%", xavier_cpu_cache_bytes="20%")
    device = DeviceMemory("GPU 0", 40 * GIB, 39 * GIB, engine_share=0.9)
    assert check_budgets(chosen, device=device, host=host(100 * GIB)) == Budgets(2 * GIB, 20 * GIB)


@pytest.mark.parametrize(("replicas", "fits"), [(4, True), (5, False)])
def test_replicas_of_one_host_are_summed_over_both_tiers(replicas: int, fits: bool) -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="1GiB")
    memory = host(64 * GIB, available=8 * GIB)
    if fits:
        check_budgets(chosen, replicas_on_host=replicas, host=memory)
        return
    with pytest.raises(OptionError) as refused:
        check_budgets(chosen, replicas_on_host=replicas, host=memory)
    message = str(refused.value)
    assert "need 10 GiB on this host (5 x 2 GiB)" in message
    assert "has 8 GiB (limit: the limit hit)" in message
    assert "Lower xavier_gpu_cache_bytes, xavier_cpu_cache_bytes" in message


def test_with_a_device_only_the_cpu_tier_is_host_memory() -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="2GiB")
    device = DeviceMemory("GPU 0", 80 * GIB, 80 * GIB, engine_share=0.9)
    check_budgets(chosen, replicas_on_host=2, device=device, host=host(available=4 * GIB))
    with pytest.raises(OptionError, match="Lower xavier_cpu_cache_bytes or the number"):
        check_budgets(chosen, replicas_on_host=2, device=device, host=host(available=4 * GIB - 1))


def test_memory_promised_to_launches_in_progress_is_not_given_twice() -> None:
    chosen = options(xavier_gpu_cache_bytes=0, xavier_cpu_cache_bytes="2GiB")
    memory = host(available=4 * GIB)
    check_budgets(chosen, reserved=2 * GIB, host=memory)
    with pytest.raises(OptionError, match="and 3 GiB for launches in progress"):
        check_budgets(chosen, reserved=3 * GIB, host=memory)


def test_the_device_keeps_what_vllm_takes_of_it() -> None:
    device = DeviceMemory("GPU 3", 24 * GIB, 23 * GIB, engine_share=0.9)
    check_budgets(options(xavier_gpu_cache_bytes="1GiB"), device=device, host=host())
    with pytest.raises(OptionError) as refused:
        check_budgets(options(xavier_gpu_cache_bytes="2GiB"), device=device, host=host())
    message = str(refused.value)
    assert "needs 2 GiB of GPU 3, which has 1.40 GiB for it" in message
    assert "gpu_memory_utilization=0.9 takes 21.60 GiB" in message
    assert "Lower xavier_gpu_cache_bytes" in message


def test_one_process_may_be_limited_where_the_host_is_not() -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="1GiB")
    check_budgets(chosen, replicas_on_host=9, host=host(process=2 * GIB))
    with pytest.raises(OptionError, match=r"one process, which may have 1\.9.*RLIMIT_AS"):
        check_budgets(chosen, host=host(process=2 * GIB - 64 * MIB))
