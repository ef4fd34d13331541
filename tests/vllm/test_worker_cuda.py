# SPDX-License-Identifier: Apache-2.0
"""The worker side of a KV cache on a GPU: what it makes on a fake CUDA, and that all of it goes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deferred_worker import make_side, register_on_cuda
from fake_worker import BLOCK
from test_worker import BLOCKS, D, H, Rig, load, store
from vllm.config import VllmConfig

from tests.store.fake_cuda import FakeCuda, host, on_device
from xinference_xavier.layout import probe_layout
from xinference_xavier.options import OptionError
from xinference_xavier.store.arena import ArenaError
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.jobs import Tier
from xinference_xavier.vllm.memory import Slots, WorkerMemory
from xinference_xavier.vllm.metadata import ConnectorMeta
from xinference_xavier.vllm.worker import WorkerSide


def kv_caches() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(BLOCKS, BLOCK, 1, dtype=torch.int64)}


class CudaRig(Rig):
    """A :class:`Rig` whose KV cache and device tier are a fake GPU's."""

    def __init__(self, config: VllmConfig, api: FakeCuda | None = None) -> None:
        self.side = make_side(config, BLOCKS, 4, 4, transport="cuda_ipc")
        kv = kv_caches()
        self.kv = kv["layer"]
        self.device = register_on_cuda(self.side, kv, api)
        self.finished, self.invalid = set(), set()

    def slot(self, tier: int, slot: int) -> set[int]:
        return set(host(self.arenas[Tier(tier)].data)[slot].view(torch.int64).tolist())


@pytest.fixture
def rig(vllm_config: VllmConfig) -> Iterator[CudaRig]:
    made = CudaRig(vllm_config)
    yield made
    made.side.shutdown()
    made.device.api.check_balanced()


def test_the_handshake_names_the_gpu_and_what_is_pinned(rig: CudaRig) -> None:
    handshake = rig.side.handshake()
    assert handshake is not None
    assert (handshake.device, handshake.device_slots, handshake.host_slots) == ("cuda", 4, 4)
    assert (handshake.host_pinned, handshake.unpinned_reason) == (True, None)
    device = handshake.worker.arenas[Tier.DEVICE].device
    assert device is not None
    assert device.uuid == rig.device.api.uuid()
    assert handshake.worker.arenas[Tier.HOST].device is None


def test_blocks_go_to_the_gpu_to_the_host_and_back(rig: CudaRig) -> None:
    rig.compute(3, 50)
    rig.compute(4, 60)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1), (4, H, 2, 1, -1))]))
    assert (rig.slot(D, 0), rig.slot(H, 2)) == ({50}, {60})
    rig.compute(8, 99)
    rig.loaded(ConnectorMeta(loads=[load(2, (D, 0, 1, 8), (H, 2, 1, 9))]))
    rig.until(lambda _: rig.finished == {"r2"})
    rig.device.finish()
    assert (rig.block(8), rig.block(9), rig.invalid) == ({50}, {60}, set())


def test_the_engines_thread_only_records_events(
    rig: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, main = rig.device.api, threading.get_ident()
    calls: list[str] = []
    real = api._call

    def noted(call: str, *args: Any) -> Any:
        if threading.get_ident() == main:
            calls.append(call)
        return real(call, *args)

    monkeypatch.setattr(api, "_call", noted)
    rig.compute(3, 50)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    rig.loaded(ConnectorMeta(loads=[load(2, (D, 0, 1, 8))]))
    assert set(calls) == {"event_create", "event_record"}


def test_memory_goes_when_nothing_of_ours_uses_it_any_more(
    vllm_config: VllmConfig,
) -> None:
    rig = CudaRig(vllm_config)
    api = rig.device.api
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    arena, pinned = rig.arenas[Tier.DEVICE].data.data_ptr(), rig.arenas[Tier.HOST].data.data_ptr()
    api.calls.clear()
    rig.side.shutdown()
    calls = [call for call in api.calls if call[0] in ("stream_destroy", "host_unregister", "free")]
    streams = [i for i, call in enumerate(calls) if call[0] == "stream_destroy"]
    assert max(streams) < calls.index(("host_unregister", pinned)) < calls.index(("free", arena))
    api.check_balanced()


def test_a_host_tier_that_cannot_be_pinned_works_and_says_why(vllm_config: VllmConfig) -> None:
    api = FakeCuda()
    api.fail("host_register", "cudaErrorMemoryAllocation")
    rig = CudaRig(vllm_config, api)
    handshake = rig.side.handshake()
    assert handshake is not None
    assert not handshake.host_pinned
    assert "cudaErrorMemoryAllocation" in str(handshake.unpinned_reason)
    rig.compute(3, 50)
    rig.stored(ConnectorMeta(stores=[store(1, (3, H, 0, 1, -1))]))
    rig.loaded(ConnectorMeta(loads=[load(2, (H, 0, 1, 8))]))
    rig.device.finish()
    assert (rig.slot(H, 0), rig.block(8)) == ({50}, {50})
    rig.side.shutdown()
    api.check_balanced()


def test_memory_that_cannot_be_shared_says_why(vllm_config: VllmConfig) -> None:
    api = FakeCuda()
    api.fail("ipc_export", "cudaErrorNotSupported")
    rig = CudaRig(vllm_config, api)
    device = rig.arenas[Tier.DEVICE].handle().device
    assert device is not None
    assert device.ipc is None
    assert "cudaErrorNotSupported" in str(device.reason)
    rig.side.shutdown()
    api.check_balanced()


def starts(config: VllmConfig) -> list[str]:
    """Return the CUDA calls of a start."""
    api = FakeCuda()
    side = make_side(config, BLOCKS, 4, 4, transport="cuda_ipc")
    register_on_cuda(side, kv_caches(), api)
    names = api.names()
    side.shutdown()
    return names


def test_whichever_call_of_a_start_fails_nothing_is_left(vllm_config: VllmConfig) -> None:
    calls = starts(vllm_config)
    assert {"allocate", "host_register", "launch", "stream_create"} <= set(calls)
    survived = set()
    for number, name in enumerate(calls):
        if name.endswith("_destroy"):
            continue  # what cannot be destroyed stays
        api = FakeCuda()
        api.fail(name, after=calls[:number].count(name))
        side = make_side(vllm_config, BLOCKS, 4, 4, transport="cuda_ipc")
        with contextlib.suppress(CudaError, ArenaError):
            register_on_cuda(side, kv_caches(), api)
            survived.add(name)
        side.shutdown()
        api.check_balanced()
    # What the store can do without: pinning and sharing.
    assert survived == {"host_register", "ipc_export"}


def given_back(api: FakeCuda) -> list[str]:
    """Return the calls so far that give something back, sorted."""
    calls = {"free", "host_unregister", "event_destroy", "stream_destroy"}
    return sorted(name for name in api.names() if name in calls)


def test_whichever_call_of_the_end_fails_the_others_are_made(vllm_config: VllmConfig) -> None:
    first = FakeCuda()
    rig = CudaRig(vllm_config, first)
    rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
    first.calls.clear()
    rig.side.shutdown()
    calls = first.names()
    for number, name in enumerate(calls):
        api = FakeCuda()
        rig = CudaRig(vllm_config, api)
        rig.stored(ConnectorMeta(stores=[store(1, (3, D, 0, 1, -1))]))
        api.calls.clear()
        api.fail(name, after=calls[:number].count(name))
        rig.side.shutdown()
        assert given_back(api) == given_back(first)


def test_a_gpu_without_room_is_refused_before_anything_is_made(vllm_config: VllmConfig) -> None:
    api = FakeCuda(total=1 << 20)
    side = make_side(vllm_config, BLOCKS, 4, 4, transport="cuda_ipc")
    with pytest.raises(OptionError, match="gpu_memory_utilization"):
        register_on_cuda(side, kv_caches(), api)
    assert "allocate" not in api.names()


def test_another_accelerator_is_refused(vllm_config: VllmConfig) -> None:
    side: WorkerSide = make_side(vllm_config, BLOCKS, 4, 4)
    with pytest.raises(OptionError, match="meta is not supported"):
        side.register({"layer": torch.zeros(BLOCKS, BLOCK, 1, device="meta")})


def test_staging_slots_of_the_gpu_come_on_top_and_are_no_ones(rig: CudaRig) -> None:
    memory: Any = rig.side._memory
    assert memory.staging[Tier.HOST] == range(4, 5)
    assert Tier.DEVICE not in memory.staging
    api = FakeCuda()
    kv = {name: on_device(tensor) for name, tensor in kv_caches().items()}
    layout, views = probe_layout(kv, num_blocks=BLOCKS, block_tokens=BLOCK)
    made = WorkerMemory(layout, views, Slots(device=4, host=5, device_staging=2), api)
    assert made.staging == {Tier.DEVICE: range(4, 6), Tier.HOST: range(4, 5)}
    assert made.arenas[Tier.DEVICE].slots == 6
    made.close()
    made.close()
    api.check_balanced()
