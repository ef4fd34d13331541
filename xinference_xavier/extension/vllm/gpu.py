# SPDX-License-Identifier: Apache-2.0
"""What launches take of a host's GPUs, before any of them has taken it.

Xinference assigns a GPU to a replica only after the worker has made its model object, and replicas
that launch at the same time see the same free memory. So launches in progress are summed: on the
GPU that they have, or where none is assigned yet, on the roomiest one, as Xinference places them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xinference_xavier.extension.devices import device_memories
from xinference_xavier.preflight import UNKNOWN_DEVICE, DeviceMemory, EngineClaim
from xinference_xavier.weights import least_weight_bytes

ENGINE_SHARE: Final = 0.9
"""What Xinference passes to vLLM as ``gpu_memory_utilization`` when the launch says nothing."""

_LOADS_OTHERWISE: Final = ("quantization", "load_format", "cpu_offload_gb", "offload_backend")
"""Engine arguments with which weights in GPU memory are not those of the files."""


@dataclass(frozen=True)
class Launching:
    """A launch in progress. ``indices`` are its GPUs, None before Xinference has assigned them.

    ``used`` is what was in use of each GPU when it was admitted, in bytes by number.
    """

    claim: EngineClaim
    indices: Sequence[int] | None = None
    used: Mapping[int, int] = field(default_factory=dict)


def engine_claim(config: Mapping[str, Any], model_path: str | None = None) -> EngineClaim:
    """Return what a launch with these engine arguments lets vLLM take of its GPU.

    Values that are no numbers are for vLLM to refuse and count as not given.
    """
    weights = 0
    if model_path and not any(config.get(name) for name in _LOADS_OTHERWISE):
        weights = least_weight_bytes(model_path)
    kv_bytes = _number(config.get("kv_cache_memory_bytes"))
    return EngineClaim(
        utilization=_number(config.get("gpu_memory_utilization")) or ENGINE_SHARE,
        kv_bytes=int(kv_bytes) if kv_bytes else None,
        weights=weights,
    )


def roomiest(
    devices: Sequence[DeviceMemory], launches: Iterable[Launching]
) -> tuple[DeviceMemory, int] | None:
    """Return the GPU with the most memory that is neither used nor promised, and what is promised.

    The second value counts bytes that ``launches`` will still take of that GPU's free memory.
    None without devices.
    """
    if not devices:
        return None
    known = {device.index: device for device in devices}
    there: dict[int, list[Launching]] = {index: [] for index in known}
    launches = list(launches)
    for launch in launches:
        for index in launch.indices or ():
            if index in there:
                there[index].append(launch)
    for launch in launches:
        if launch.indices is None:
            there[_freest(known, there)].append(launch)
    index = _freest(known, there)
    return known[index], _promised(known[index], there[index])


def launch_room(config: Mapping[str, Any], replicas: int) -> tuple[DeviceMemory, EngineClaim, int]:
    """Return the GPU of the last of ``replicas`` that are about to launch on this host.

    ``config`` are the launch's arguments. With the GPU, or :data:`UNKNOWN_DEVICE`, come what the
    launch lets vLLM take of it and what is promised there: arguments of ``check_budgets``.
    """
    claim = engine_claim(config, config.get("model_path"))
    chosen: Any = config.get("gpu_idx")
    if chosen is not None and not isinstance(chosen, list):
        chosen = [chosen]
    devices = device_memories(chosen)
    device, promised = roomiest(devices, [Launching(claim)] * (replicas - 1)) or (UNKNOWN_DEVICE, 0)
    return device, claim, promised


def still_promised(device: DeviceMemory, claim: EngineClaim, siblings: int) -> int:
    """Return what other replicas of one launch on a GPU may still take of its free memory.

    Some of them may run already: what is in use counts as theirs.
    """
    return max(0, siblings * claim.bytes(device.total) - (device.total - device.available))


def _freest(devices: Mapping[int, DeviceMemory], there: Mapping[int, Sequence[Launching]]) -> int:
    return max(devices, key=lambda i: devices[i].available - _promised(devices[i], there[i]))


def _promised(device: DeviceMemory, launches: Sequence[Launching]) -> int:
    """Return what launches on a GPU will still take: all they may, less what they have taken.

    What has come into use since the first of them was admitted counts as theirs.
    """
    if not launches:
        return 0
    used = device.total - device.available
    before = min(launch.used.get(device.index, used) for launch in launches)
    claims = sum(launch.claim.bytes(device.total) for launch in launches)
    return max(0, before + claims - used)


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
