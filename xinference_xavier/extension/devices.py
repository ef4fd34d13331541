# SPDX-License-Identifier: Apache-2.0
"""The memory of this host's NVIDIA GPUs, without making a context on any of them.

The driver's library (NVML) lists GPUs by the order of the PCI bus, whatever the process may see of
them. A process sees those of ``CUDA_VISIBLE_DEVICES``, by number or UUID.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

from xinference_xavier.preflight import DeviceMemory

logger = logging.getLogger(__name__)

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BUS_ORDER: Final = "PCI_BUS_ID"


def device_memories(devices: Sequence[int | str] | None = None) -> list[DeviceMemory]:
    """Return the memory of these devices, numbers or UUIDs; None: of all that this process sees.

    Of a GPU that is partitioned (MIG) it is that of the first partition, which is the one that
    CUDA gives a process under the GPU's number. What the driver does not know, or does not tell,
    is left out; without a driver the list is empty.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError as error:
        logger.debug("no NVIDIA driver: %s", error)
        return []
    try:
        _warn_of_order(pynvml)
        found = [_memory(pynvml, handle) for handle in _handles(pynvml, devices)]
    finally:
        pynvml.nvmlShutdown()
    return [memory for memory in found if memory is not None]


def _handles(pynvml: Any, devices: Sequence[int | str] | None) -> Iterable[Any]:
    if devices is None and VISIBLE in os.environ:
        devices = [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
    if devices is None:
        devices = range(pynvml.nvmlDeviceGetCount())
    for device in map(str, devices):
        try:
            if device.isdecimal():
                yield pynvml.nvmlDeviceGetHandleByIndex(int(device))
            elif device.startswith(("GPU-", "MIG-")):
                yield pynvml.nvmlDeviceGetHandleByUUID(device)
            else:
                # As for CUDA: what is no device, such as -1, ends the list.
                return
        except pynvml.NVMLError as error:
            logger.warning("the NVIDIA driver does not know device %s: %s", device, error)


def _memory(pynvml: Any, handle: Any) -> DeviceMemory | None:
    """Return the memory of a GPU, of its first partition, or of the partition ``handle`` is."""
    try:
        partition = pynvml.nvmlDeviceIsMigDeviceHandle(handle)
        if partition:
            index = pynvml.nvmlDeviceGetIndex(
                pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            )
        else:
            index = pynvml.nvmlDeviceGetIndex(handle)
            if (first := _first_partition(pynvml, handle)) is not None:
                handle, partition = first, True
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        logger.warning("the NVIDIA driver does not tell the memory of a device: %s", error)
        return None
    name = f"the partition of GPU {index}" if partition else f"GPU {index}"
    return DeviceMemory(name, int(memory.total), int(memory.free), int(index))


def _first_partition(pynvml: Any, handle: Any) -> Any | None:
    """Return the handle of a GPU's first MIG partition; None where it has none."""
    try:
        enabled, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        # Most cards cannot be partitioned.
        return None
    if not enabled:
        return None
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError:
            continue
    return None


def _warn_of_order(pynvml: Any) -> None:
    """Tell where CUDA may number the GPUs otherwise than the driver: when they are not alike."""
    if os.environ.get(ORDER) == BUS_ORDER:
        return
    count = pynvml.nvmlDeviceGetCount()
    kinds = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}
    if len(kinds) > 1:
        logger.warning(
            "this host has different GPUs, which CUDA numbers by speed; set %s=%s, so that a "
            "number means the same one everywhere",
            ORDER,
            BUS_ORDER,
        )
