# SPDX-License-Identifier: Apache-2.0
"""A fake model on the real worker side, on a device that runs everything in a hostile order.

That device is one of ``tests.deferring``, or the CUDA one on a fake CUDA, which is late with all.

The KV cache is a tensor, the arenas, engines and threads are the product's, and forwards are work
on the compute stream: a step's forward may still wait there while the scheduler plans the next
one, as with CUDA graphs and async scheduling. No per-layer hook is ever called.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from fake_worker import BLOCK, Content, FakeWorker, Registry, _Running
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.deferring import Deferring
from tests.store.fake_cuda import FakeCuda, host, on_device
from xinference_xavier.options import Deployment, XavierOptions
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device import CpuDevice
from xinference_xavier.store.jobs import Tier
from xinference_xavier.tiers import staging_slots
from xinference_xavier.vllm import memory as memory_module
from xinference_xavier.vllm import worker as worker_module
from xinference_xavier.vllm.metadata import ConnectorMeta, Handshake, WorkerMeta
from xinference_xavier.vllm.worker import WorkerSide

BLOCK_BYTES = BLOCK * 8

CUDA = "cuda"
"""The order of a fake CUDA."""


class _Row:
    """KV values of one block, as Python's integers."""

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._values = values

    def __getitem__(self, key: slice) -> list[int]:
        found: list[int] = self._values[key].tolist()
        return found

    def __setitem__(self, position: int, value: int) -> None:
        self._values[position] = value


class _Kv:
    """The KV cache, by block id."""

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._values = values

    def __getitem__(self, block: int) -> _Row:
        return _Row(self._values[block])


class _RealArenas:
    """The worker side's arenas, as the audit reads them."""

    def __init__(self, arenas: dict[Tier, Arena]) -> None:
        self._arenas = arenas

    def read(self, tier: int, slot: int) -> tuple[int, Content]:
        arena = self._arenas[Tier(tier)]
        values = host(arena.data)[slot].view(torch.int64)[:BLOCK]
        return int(arena.meta[slot, 0]), tuple(values.tolist())


class DeferredWorker(FakeWorker):
    """One rank with the real worker side. Peers are out of its reach."""

    def __init__(
        self,
        name: str,
        *,
        config: VllmConfig,
        blocks: int,
        device_slots: int,
        host_slots: int,
        registry: Registry,
        order: str,
        seed: int,
    ) -> None:
        super().__init__(
            name,
            blocks=blocks,
            device_slots=device_slots,
            host_slots=host_slots,
            ranks=1,
            registry=registry,
        )
        transport = "cuda_ipc" if order == CUDA else "shm"
        self.side = make_side(config, blocks, device_slots, host_slots, transport=transport)
        cache = torch.zeros(blocks, BLOCK, 1, dtype=torch.int64)
        cache[:] = -1 - torch.arange(blocks).view(-1, 1, 1)
        self.device = register(self.side, {"layer": cache}, order, seed)
        self.kv = _Kv(cache.view(blocks, BLOCK).numpy())
        self.arenas = _RealArenas(self.side._memory.arenas)
        self._forwards: deque[int] = deque()

    @property
    def handshakes(self) -> dict[tuple[int, int], Handshake]:
        # As if on a GPU: elsewhere nothing is promoted to the device tier.
        handshake = dataclasses.replace(self.side.handshake(), device="cuda")
        return {(0, 0): pickle.loads(pickle.dumps(handshake))}

    def execute(self, output: object) -> ModelRunnerOutput:
        result = super().execute(output)
        self._forwards.append(self.device.forwards)
        if not result.req_ids:
            # Nothing to compute: the engine steps on only because copies are under way.
            time.sleep(0.0005)
        return result

    def wait(self, result: ModelRunnerOutput) -> None:
        """Wait for the tokens of the oldest step, as vLLM does before it looks at them."""
        self.device.wait_forwards(self._forwards.popleft())

    def close(self) -> None:
        self.side.shutdown()
        if isinstance(self.device, OnFakeCuda):
            self.device.api.check_balanced()

    def _compute(self, request: _Running, computed: int, count: int) -> list[int]:
        """Give the forward to the compute stream; the list fills when it runs."""
        sampled: list[int] = []
        step = _Running(request.tokens, list(request.block_ids))
        compute = super()._compute
        self.device.forward(lambda: sampled.extend(compute(step, computed, count)))
        return sampled

    def run_loads(self, which: Sequence[int] | None = None) -> None:
        chosen = list(self.loads) if which is None else [self.loads[number] for number in which]
        meta = ConnectorMeta()
        for item in chosen:
            self.loads.remove(item)
            meta.loads.append(item[0])
            meta.peers.update(item[1])
        self.side.start_loads(meta)

    def run_stores(self) -> None:
        waiting, self.stores = self.stores, []
        self.side.start_stores(ConnectorMeta(stores=waiting))

    def _report(self, step: int) -> KVConnectorOutput:
        found = self.side.report() or WorkerMeta()
        self._stored.extend(found.stores)
        self._finished |= self.side.finished()
        self._invalid |= self.side.load_errors()
        later = self.side.report() or WorkerMeta()
        self._stored.extend(later.stores)
        self._loaded.extend([*found.loads, *later.loads])
        return super()._report(step)


def make_side(
    config: VllmConfig,
    blocks: int,
    device_slots: int,
    host_slots: int,
    *,
    transport: str = "shm",
) -> WorkerSide:
    """Return a worker side whose index may use that many slots per tier."""
    total = host_slots
    while total and total - staging_slots(total) < host_slots:
        total += 1
    spec = FullAttentionSpec(BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return WorkerSide(
        config,
        KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        XavierOptions.from_mapping(
            {
                "xavier_gpu_cache_bytes": device_slots * BLOCK_BYTES,
                "xavier_cpu_cache_bytes": total * BLOCK_BYTES,
                "xavier_transport": transport,
            }
        ),
        Deployment(xavier_host="127.0.0.1"),
    )


class OnFakeCuda:
    """The engine's half of a :class:`Deferring`, for a worker side on a fake CUDA."""

    def __init__(self, api: FakeCuda) -> None:
        self.api = api
        self.forwards = 0

    def forward(self, run: Callable[[], None]) -> None:
        """Give one forward to the compute stream."""
        self.forwards += 1
        self.api.compute(run)

    def wait_forwards(self, count: int | None = None) -> None:
        """Wait for the first ``count`` forwards, all by default."""
        self.api.run_compute(count)

    finish = wait_forwards


def register_on_cuda(
    side: WorkerSide, kv_caches: dict[str, torch.Tensor], api: FakeCuda | None = None
) -> OnFakeCuda:
    """Register KV caches as memory of a fake GPU; return the engine's half of that."""
    api = api or FakeCuda()
    with patch.object(worker_module, "Cuda", lambda _: api):
        side.register({name: on_device(tensor) for name, tensor in kv_caches.items()})
    return OnFakeCuda(api)


def register(
    side: WorkerSide, kv_caches: dict[str, torch.Tensor], order: str, seed: int = 0
) -> Deferring | OnFakeCuda:
    """Register KV caches and return the device on which everything then runs."""
    if order == CUDA:
        return register_on_cuda(side, kv_caches)
    made: list[Deferring] = []

    def deferring(*args: object) -> Deferring:
        made.append(Deferring(CpuDevice(*args), order, seed))
        return made[0]

    with patch.object(memory_module, "CpuDevice", deferring):
        side.register(kv_caches)
    return made[0]
