# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from xinference_xavier.extension.devices import ENGINE_SHARE, device_memory
from xinference_xavier.preflight import DeviceMemory


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three GPUs of 100 bytes with 10, 50 and 30 free; returns what became of the driver."""
    calls: list[str] = []
    free = [10, 50, 30]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(free))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetMemoryInfo",
        lambda handle: SimpleNamespace(total=100, free=free[handle]),
    )
    return calls


def test_the_roomiest_device_counts_before_one_is_allocated(driver: list[str]) -> None:
    assert device_memory() == DeviceMemory("GPU 1", 100, 50, ENGINE_SHARE)
    assert driver == ["init", "shutdown"]


def test_only_the_allocated_devices_count_afterwards(driver: list[str]) -> None:
    assert device_memory([0, 2], 0.5) == DeviceMemory("GPU 2", 100, 30, 0.5)
    assert device_memory([]) is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert device_memory() is None
