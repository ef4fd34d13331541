# SPDX-License-Identifier: Apache-2.0
"""The memory of this host's accelerators, without making a context on any of them."""

from __future__ import annotations

from collections.abc import Sequence

from xinference_xavier.preflight import DeviceMemory

ENGINE_SHARE = 0.9
"""What Xinference passes to vLLM as ``gpu_memory_utilization`` when the launch says nothing."""


def device_memory(
    indices: Sequence[int] | None = None, engine_share: float = ENGINE_SHARE
) -> DeviceMemory | None:
    """Return the device with the most free memory among ``indices`` (None: of all), or None.

    None also where there is no NVIDIA driver: then nothing is known about devices here.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            if indices is None or index in indices:
                memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
                found.append(
                    DeviceMemory(f"GPU {index}", int(memory.total), int(memory.free), engine_share)
                )
    finally:
        pynvml.nvmlShutdown()
    return max(found, key=lambda device: device.available, default=None)
