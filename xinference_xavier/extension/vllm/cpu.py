# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build needs that Xinference, made for GPUs, does not give it.

Applies to every replica on the CPU build, GPU-first or not: without it such a replica gets a
tensor parallel size of 0, nearly all of the host's memory, and the same core as its neighbour.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from xinference_xavier.hostmemory import HostMemory
from xinference_xavier.installed import installed_version

BINDING_VARIABLE: Final = "VLLM_CPU_OMP_THREADS_BIND"
KV_SPACE_VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"

KV_PERCENT: Final = 10
KV_MOST: Final = 4 * 2**30
"""A replica's own KV cache by default: 10 % of the memory limit, at most 4 GiB."""


@cache
def cpu_build_installed() -> bool:
    """Whether the vLLM that this interpreter would import is its CPU build."""
    if (found := installed_version("vllm")) is not None:
        return "+cpu" in found
    return installed_version("vllm-cpu") is not None


def engine_defaults(
    config: Mapping[str, Any], environment: Mapping[str, str], memory: HostMemory
) -> dict[str, Any]:
    """Return the engine arguments that the launch left open, as far as a CPU needs them."""
    defaults: dict[str, Any] = {}
    if config.get("tensor_parallel_size") is None:
        defaults["tensor_parallel_size"] = 1
    chosen = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    by_user = any(config.get(name) is not None for name in chosen)
    if not by_user and not environment.get(KV_SPACE_VARIABLE):
        defaults["kv_cache_memory_bytes"] = min(memory.total.bytes * KV_PERCENT // 100, KV_MOST)
    return defaults


def allowed_cores(root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return one logical CPU of each physical core that this process may use, sorted."""
    allowed = sorted(os.sched_getaffinity(0))
    taken: set[int] = set()
    cores = []
    for cpu in allowed:
        if cpu not in taken:
            cores.append(cpu)
            taken.update(_siblings(root / f"cpu{cpu}/topology/thread_siblings_list") or (cpu,))
    return cores


def cores_of(index: int, replicas: int, cores: Sequence[int]) -> tuple[list[int], bool]:
    """Return the cores of replica ``index`` of ``replicas``, and whether it shares them.

    Cores are dealt out in runs of equal length, give or take one. With more replicas than cores,
    or for a replica that was added later, the dealing starts over and cores are shared.
    """
    hands = min(replicas, len(cores))
    hand = index % hands
    mine = list(cores[hand * len(cores) // hands : (hand + 1) * len(cores) // hands])
    return mine, replicas > hands or index >= replicas


def binding(cores: Iterable[int]) -> str:
    """Return the value of :data:`BINDING_VARIABLE` for one rank."""
    return ",".join(map(str, cores))


def _siblings(path: Path) -> list[int]:
    """Return the logical CPUs of a list such as ``0-1,8``; none where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
