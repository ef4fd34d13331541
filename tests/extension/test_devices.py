# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pynvml
import pytest
from fake_nvml import GIB, FakeNvml, Gpu

from xinference_xavier.extension.devices import device_memories
from xinference_xavier.preflight import DeviceMemory

FIRST = DeviceMemory("GPU 0", 24 * GIB, 10 * GIB, 0)
SECOND = DeviceMemory("GPU 1", 24 * GIB, 20 * GIB, 1)
THIRD = DeviceMemory("GPU 2", 24 * GIB, 15 * GIB, 2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    gpus = [Gpu(free=free * GIB, uuid=f"GPU-{free}") for free in (10, 20, 15)]
    return FakeNvml(gpus).install(monkeypatch)


def test_all_devices_are_told_and_the_driver_is_left_as_it_was(driver: FakeNvml) -> None:
    assert device_memories() == [FIRST, SECOND, THIRD]
    assert (driver.inits, driver.open) == (1, 0)


def test_devices_are_named_by_number_or_uuid(driver: FakeNvml) -> None:
    assert device_memories([2, 0]) == [THIRD, FIRST]
    assert device_memories(["1", "GPU-10"]) == [SECOND, FIRST]
    assert device_memories([]) == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [THIRD, FIRST]),
        ("GPU-15", [THIRD]),
        ("1, -1, 0", [SECOND]),
        ("-1", []),
        ("", []),
    ],
)
def test_only_what_the_process_sees_counts(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[DeviceMemory]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_memories() == expected
    assert device_memories([0]) == [FIRST]


def test_devices_that_are_not_there_are_left_out(driver: FakeNvml) -> None:
    assert device_memories([7, 1, "GPU-unknown"]) == [SECOND]


def test_a_device_that_does_not_tell_its_memory_is_left_out(driver: FakeNvml) -> None:
    driver.gpus[0].silent = True
    assert device_memories() == [SECOND, THIRD]
    assert driver.open == 0


def test_a_partitioned_gpu_counts_as_its_first_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [None, Gpu(10 * GIB, 9 * GIB, "MIG-a"), Gpu(20 * GIB, 20 * GIB, "MIG-b")]
    FakeNvml([Gpu(partitions=[]), Gpu(80 * GIB, 40 * GIB, partitions=parts)]).install(monkeypatch)
    first = DeviceMemory("the partition of GPU 1", 10 * GIB, 9 * GIB, 1)
    assert device_memories([1]) == [first]
    assert device_memories(["MIG-a"]) == [first]
    assert device_memories(["MIG-b"]) == [
        DeviceMemory("the partition of GPU 1", 20 * GIB, 20 * GIB, 1)
    ]
    assert device_memories([0]) == [DeviceMemory("GPU 0", 24 * GIB, 24 * GIB, 0)]


@pytest.mark.parametrize(("order", "told"), [("", True), ("PCI_BUS_ID", False)])
def test_numbers_that_may_mean_another_gpu_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, order: str, told: bool
) -> None:
    FakeNvml([Gpu(), Gpu(kind="NVIDIA H100")]).install(monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    device_memories()
    assert ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text) is told


def test_without_a_driver_nothing_is_known(driver: FakeNvml) -> None:
    driver.error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert device_memories() == []


def test_without_the_drivers_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_memories() == []
