# SPDX-License-Identifier: Apache-2.0
"""GPUs as the driver tells them: memory, and which of them reach each other's memory directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xinference_xavier.doctor.finding import Finding, ok, warn
from xinference_xavier.sizes import format_size


def gpu_findings() -> Iterator[Finding]:
    """Judge the GPUs of this host; one finding that there is none where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield ok("GPU", "no library to ask NVIDIA's driver (pynvml): taken for a CPU-only host")
        return
    except pynvml.NVMLError as error:
        yield ok("GPU", f"no NVIDIA driver ({error}): both tiers are host memory")
        return
    try:
        yield from _findings(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _findings(nvml: Any) -> Iterator[Finding]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    count = "1 GPU" if len(handles) == 1 else f"{len(handles)} GPUs"
    yield ok("GPU driver", f"{nvml.nvmlSystemGetDriverVersion()}, {count}")
    for number, handle in enumerate(handles):
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            yield warn(f"GPU {number}", f"the driver does not tell: {error}", "see nvidia-smi")
            continue
        free, total = format_size(int(memory.free)), format_size(int(memory.total))
        yield ok(f"GPU {number}", f"{name}, {free} of {total} free")
    yield from _peer_access(nvml, handles)


def _peer_access(nvml: Any, handles: list[Any]) -> Iterator[Finding]:
    if len(handles) < 2:
        return
    refused = []
    for one, source in enumerate(handles):
        for other, reader in enumerate(handles):
            if one == other:
                continue
            try:
                status = nvml.nvmlDeviceGetP2PStatus(reader, source, nvml.NVML_P2P_CAPS_INDEX_READ)
            except nvml.NVMLError as error:
                yield warn(
                    "GPU peer access", f"the driver does not tell: {error}", "see nvidia-smi topo"
                )
                return
            if status != nvml.NVML_P2P_STATUS_OK:
                refused.append(f"{other} of {one}")
    pairs = len(handles) * (len(handles) - 1)
    if not refused:
        yield ok("GPU peer access", f"all {pairs} ordered pairs read each other directly")
        return
    yield warn(
        "GPU peer access",
        f"no direct read by GPU {', GPU '.join(refused)}: blocks go through host memory there",
        "see nvidia-smi topo -p2p r; put the replicas of a model on GPUs that reach each other",
    )
