# SPDX-License-Identifier: Apache-2.0
"""Launches on GPUs: what is summed, refused, and taken out of vLLM's share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xoscar as xo
from fake_nvml import GIB, FakeNvml, Gpu
from safetensors.torch import save_file
from xinference.model.llm.vllm.core import VLLMModel

from xinference_xavier.extension.launch import CARRIER, write_carrier
from xinference_xavier.extension.names import WORKER_UID
from xinference_xavier.extension.vllm import cpu, group, models
from xinference_xavier.extension.vllm.gpu import (
    Launching,
    engine_claim,
    launch_room,
    roomiest,
    still_promised,
)
from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.preflight import UNKNOWN_DEVICE, DeviceMemory, EngineClaim

HALF = EngineClaim(0.5)


def devices(*free: int, total: int = 24) -> list[DeviceMemory]:
    return [DeviceMemory(f"GPU {i}", total * GIB, f * GIB, i) for i, f in enumerate(free)]


# --- what a launch takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "claim"),
    [
        ({}, EngineClaim(0.9)),
        ({"gpu_memory_utilization": "0.5"}, EngineClaim(0.5)),
        ({"gpu_memory_utilization": None}, EngineClaim(0.9)),
        ({"kv_cache_memory_bytes": 5}, EngineClaim(0.9, 5)),
        ({"kv_cache_memory_bytes": "5000"}, EngineClaim(0.9, 5000)),
        ({"kv_cache_memory_bytes": 0}, EngineClaim(0.9)),
        ({"gpu_memory_utilization": "much"}, EngineClaim(0.9)),
        ({"gpu_memory_utilization": "nan"}, EngineClaim(0.9)),
    ],
)
def test_the_claim_is_what_the_launch_says(config: dict[str, Any], claim: EngineClaim) -> None:
    assert engine_claim(config) == claim


def test_weights_count_as_far_as_they_are_loaded_as_they_are(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(50, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    path = str(tmp_path)
    assert engine_claim({}, path).weights == 100
    for name in ("quantization", "load_format", "cpu_offload_gb"):
        assert engine_claim({name: "1"}, path).weights == 0


def test_without_launches_the_freest_device_is_taken() -> None:
    found = devices(10, 20, 15)
    assert roomiest(found, []) == (found[1], 0)
    assert roomiest([], [Launching(HALF)]) is None


def test_a_launch_takes_of_the_device_that_it_has() -> None:
    found = devices(24, 20)
    assert roomiest(found, [Launching(HALF, [0])]) == (found[1], 0)
    assert roomiest(found[:1], [Launching(HALF, [0])]) == (found[0], 12 * GIB)
    assert roomiest(found[:1], [Launching(HALF, [7])]) == (found[0], 0)


def test_launches_without_a_device_are_spread_as_xinference_does() -> None:
    found = devices(24, 20, 16)
    waiting = [Launching(HALF)] * 2
    # 24 -> 12 and 20 -> 8 leave the third one the roomiest.
    assert roomiest(found, waiting) == (found[2], 0)
    assert roomiest(found, [*waiting, Launching(HALF)]) == (found[0], 12 * GIB)


@pytest.mark.parametrize(("used", "promised"), [(0, 12), (5, 7), (12, 0), (15, 0)])
def test_what_a_launch_has_taken_is_not_promised_any_more(used: int, promised: int) -> None:
    [device] = devices(24 - used)
    launch = Launching(HALF, [0], used={0: 0})
    assert roomiest([device], [launch]) == (device, promised * GIB)


def test_what_was_in_use_before_is_not_the_launchs() -> None:
    [device] = devices(24 - 5)
    assert roomiest([device], [Launching(HALF, [0], {0: 5 * GIB})]) == (device, 12 * GIB)
    first, second = Launching(HALF, [0], {0: 5 * GIB}), Launching(EngineClaim(0.25), [0], {0: 0})
    assert roomiest([device], [first, second]) == (device, 13 * GIB)


@pytest.mark.parametrize(("used", "promised"), [(0, 12), (8, 4), (12, 0), (20, 0)])
def test_siblings_that_run_already_are_promised_nothing(used: int, promised: int) -> None:
    assert still_promised(devices(24 - used)[0], HALF, siblings=1) == promised * GIB


# --- a launch whose replicas are all on this host ----------------------------------------------


def test_replicas_of_a_launch_are_summed_over_the_hosts_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeNvml([Gpu(), Gpu(free=20 * GIB)]).install(monkeypatch)
    first, second = devices(24, 20)
    config = {"gpu_memory_utilization": 0.4}
    claim = EngineClaim(0.4)
    assert launch_room(config, 1) == (first, claim, 0)
    assert launch_room(config, 2) == (second, claim, 0)
    assert launch_room(config, 3) == (first, claim, claim.bytes(24 * GIB))
    chosen = {**config, "gpu_idx": [1]}
    assert launch_room(chosen, 2) == (second, claim, claim.bytes(24 * GIB))


def test_without_a_driver_no_device_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([]).install(monkeypatch)
    assert launch_room({}, 2) == (UNKNOWN_DEVICE, EngineClaim(0.9), 0)


# --- the worker's process ------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A host with vLLM's CUDA build, two GPUs of 24 GiB, and enough memory of its own."""
    memory = HostMemory(Bound(100 * GIB, "total"), Bound(100 * GIB, "available"))
    monkeypatch.setattr(cpu, "cpu_build_installed", lambda: False)
    monkeypatch.setattr("xinference_xavier.preflight.host_memory", lambda: memory)
    models.GpuFirstModel._launching.clear()
    return FakeNvml([Gpu(), Gpu()]).install(monkeypatch)


def model(uid: str = "m-rep0", size: str = "1GiB", **config: Any) -> Any:
    options = {"xavier_gpu_cache_bytes": size, "xavier_cpu_cache_bytes": "1GiB"}
    carrier = write_carrier(XavierOptions.from_mapping({"xavier_gpu_first": True, **options}))
    family = SimpleNamespace(
        model_specs=[SimpleNamespace(quantization="none", model_format="pytorch")],
        model_ability=["chat"],
        architectures=["LlamaForCausalLM"],
        address="127.0.0.1:9",
        has_architecture=lambda *names: False,
    )
    return models.GpuFirstVLLMChatModel(uid, family, "/models/m", {CARRIER: carrier, **config})


def test_replicas_that_launch_together_are_summed_per_device(driver: FakeNvml) -> None:
    first = model("m-rep0", gpu_memory_utilization=0.6)
    second = model("m-rep1", gpu_memory_utilization=0.6)
    with pytest.raises(OptionError, match="promised to other replicas"):
        model("m-rep2", gpu_memory_utilization=0.6)
    # Both turn out to be on one device, and the first has taken what it may.
    first.model_family.accelerators = second.model_family.accelerators = ["1"]
    driver.gpus[1].free = 9 * GIB
    third = model("m-rep2", gpu_memory_utilization=0.6)
    third.model_family.accelerators = ["0"]
    with pytest.raises(OptionError, match="Lower gpu_memory_utilization"):
        model("m-rep3", gpu_memory_utilization=0.6)


def test_a_failed_launch_promises_nothing(driver: FakeNvml) -> None:
    with pytest.raises(OptionError, match="The largest budget that fits"):
        model(size="23GiB")
    assert not models.GpuFirstModel._launching


def test_a_host_whose_gpus_are_not_known_launches(driver: FakeNvml) -> None:
    driver.gpus.clear()
    assert model()._budget_bytes == GIB


# --- the replica's process -----------------------------------------------------------------------


class Worker(xo.StatelessActor):
    """Stands for Xinference's worker: what it has assigned."""

    async def get_gpu_allocation_status(self) -> dict[str, Any]:
        return {
            "models": {0: ["m-rep0", "other-rep0"], 1: ["m-rep1"]},
            "user_specified": {0: [["m-rep2", "LLM"]]},
        }


class Loaded:
    """A loaded replica's engine arguments, for a worker with these replicas on each GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, beside: Sequence[int]) -> None:
        self.config: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)

        async def find_placement(*identity: str) -> group.Placement:
            return group.Placement("10.0.0.1:7", "10.0.0.2:8", 2)

        async def replicas_on_device(worker: str, model_uid: str, index: int) -> int:
            assert (worker, model_uid) == ("10.0.0.2:8", "m")
            return beside[index]

        def load(made: Any) -> None:
            made._device_count = 1
            self.config = made._sanitize_model_config(made._model_config)

        monkeypatch.setattr(VLLMModel, "load", load)
        monkeypatch.setattr(group, "find_placement", find_placement)
        monkeypatch.setattr(group, "replicas_on_device", replicas_on_device)

    def load(self, made: Any, device: str = "0") -> dict[str, Any]:
        made.model_family.accelerators = [device]
        made.set_loop(self.loop)
        made.load()
        made.stop()
        return self.config


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, driver: FakeNvml) -> Iterator[Loaded]:
    monkeypatch.setenv(models.NOTE_VARIABLE, "")
    loaded = Loaded(monkeypatch, [2, 1])
    loaded.thread.start()
    yield loaded
    loaded.loop.call_soon_threadsafe(loaded.loop.stop)
    loaded.thread.join()
    loaded.loop.close()


def test_the_store_is_taken_out_of_vllms_share(loaded: Loaded) -> None:
    config = loaded.load(model(), device="1")
    assert config["gpu_memory_utilization"] == pytest.approx(0.9 - (1 + 96 / 1024) / 24, abs=2e-6)
    assert "kv_cache_memory_bytes" not in config


def test_a_given_kv_cache_becomes_smaller_by_the_store(loaded: Loaded) -> None:
    made = model(kv_cache_memory_bytes=4 * GIB)
    config = loaded.load(made, device="1")
    assert config["kv_cache_memory_bytes"] == 3 * GIB - 96 * 2**20
    assert config["gpu_memory_utilization"] == 0.9
    # The claim itself stays: another load takes the store out of it once, not twice.
    assert loaded.load(made, device="1") == config


def test_replicas_that_share_a_device_must_fit_together(loaded: Loaded) -> None:
    assert loaded.load(model(gpu_memory_utilization=0.5))["gpu_memory_utilization"] < 0.5
    models.GpuFirstModel._launching.clear()
    made = model("m-rep1", gpu_memory_utilization=0.51)
    with pytest.raises(OptionError, match="promised to other replicas"):
        loaded.load(made)


def test_a_device_that_the_driver_does_not_know_is_left_to_the_connector(
    loaded: Loaded, driver: FakeNvml
) -> None:
    assert loaded.load(model(), device="7")["gpu_memory_utilization"] == 0.9


def test_the_worker_tells_how_many_replicas_a_device_has() -> None:
    async def ask() -> list[int]:
        pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
        async with pool:
            await xo.create_actor(Worker, address=pool.external_address, uid=WORKER_UID)
            return [
                await group.replicas_on_device(pool.external_address, "m", index)
                for index in range(3)
            ]

    assert asyncio.run(ask()) == [2, 1, 0]
