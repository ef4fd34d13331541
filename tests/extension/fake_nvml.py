# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver's library, as far as we ask it, over GPUs that a test describes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest

GIB = 2**30


@dataclass
class Gpu:
    """A GPU or a partition; ``partitions`` None: it cannot be partitioned."""

    total: int = 24 * GIB
    free: int = 24 * GIB
    uuid: str = ""
    kind: str = "NVIDIA L4"
    partitions: list[Gpu | None] | None = None
    silent: bool = False
    index: int = 0
    parent: Gpu | None = None


@dataclass
class FakeNvml:
    """Stands for the driver; ``open`` counts its users."""

    gpus: list[Gpu]
    open: int = 0
    inits: int = 0
    error: int | None = field(default=None)

    def __post_init__(self) -> None:
        for index, gpu in enumerate(self.gpus):
            gpu.index = index
            for partition in filter(None, gpu.partitions or ()):
                partition.parent = gpu

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        for name, value in {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": self._by_index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.kind,
            "nvmlDeviceGetIndex": lambda gpu: gpu.index,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceIsMigDeviceHandle": lambda gpu: int(gpu.parent is not None),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda gpu: gpu.parent,
            "nvmlDeviceGetMigMode": self._mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: len(gpu.partitions),
            "nvmlDeviceGetMigDeviceHandleByIndex": self._partition,
        }.items():
            monkeypatch.setattr(pynvml, name, value)
        return self

    def _init(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        self.open += 1
        self.inits += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _by_index(self, index: int) -> Gpu:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[index]

    def _by_uuid(self, uuid: str) -> Gpu:
        for gpu in self._all():
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _all(self) -> Iterator[Gpu]:
        for gpu in self.gpus:
            yield gpu
            yield from filter(None, gpu.partitions or ())

    def _memory(self, gpu: Gpu) -> SimpleNamespace:
        if gpu.silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    def _mig_mode(self, gpu: Gpu) -> tuple[int, int]:
        if gpu.partitions is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return (int(bool(gpu.partitions)), 0)

    def _partition(self, gpu: Gpu, number: int) -> Gpu:
        found = (gpu.partitions or ())[number]
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found
