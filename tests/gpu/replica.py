# SPDX-License-Identifier: Apache-2.0
"""One replica's worker: a KV cache on a device, both tiers beside it, and what copies."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from tests.gpu.platforms import PLATFORMS, Platform
from tests.store.kvcache import HEADS, TOKENS, KvCaches, table
from tests.waiting import WAIT_S, drain
from xinference_xavier.layout import probe_layout
from xinference_xavier.store.copier import CopyEngine
from xinference_xavier.store.jobs import LoadJob, LoadSegment, StoreJob, Tier
from xinference_xavier.tiers import staging_slots
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.cuda_ipc import CudaIpcTransport
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import ShmTransport, host_id
from xinference_xavier.vllm.memory import Slots, WorkerMemory

BLOCKS = 24
D, H = int(Tier.DEVICE), int(Tier.HOST)

Rows = Sequence[tuple[int, ...]]


def plain_kv(num_blocks: int = BLOCKS, layers: int = 3, dim: int = 16) -> KvCaches:
    """K and V outermost, as FLASH_ATTN had it: two spans of ``64 * dim`` bytes per layer."""
    return {
        f"layers.{i}": torch.zeros(2, num_blocks, TOKENS, HEADS, dim, dtype=torch.bfloat16)
        for i in range(layers)
    }


class Replica:
    """See the module. ``verify`` is on: every load is checked against its slot's checksum."""

    def __init__(
        self,
        platform: Platform,
        make: Callable[[], KvCaches] = plain_kv,
        *,
        blocks: int = BLOCKS,
        verify: str = "checksum",
    ) -> None:
        self.platform = platform
        self.kv = platform.kv(make)
        self.layout, self.views = probe_layout(self.kv, num_blocks=blocks, block_tokens=TOKENS)
        slots = Slots(blocks, blocks + staging_slots(2 * blocks))
        self.memory = WorkerMemory(self.layout, self.views, slots, platform.api)
        parts = {
            "layout": self.layout,
            "arenas": self.memory.arenas,
            "device": self.memory.device,
            "verify": verify,
        }
        self._transports = Transports(
            [CudaIpcTransport(platform.api), ShmTransport()], layout_digest=self.layout.digest()
        )
        self.copies = CopyEngine(**parts)
        self.loads = LoadEngine(**parts, staging=self.memory.staging, transports=self._transports)
        self._jobs = 0

    def randomize(self, seed: int) -> list[bytes]:
        """Fill the KV cache; return the packed bytes of every block."""
        rng = np.random.default_rng(seed)
        for view in self.views:
            shape = tuple(view.shape)
            source = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
            self.platform.fill(view, source)
        return self.blocks()

    def blocks(self) -> list[bytes]:
        columns = [self.platform.host(view).numpy() for view in self.views]
        return [b"".join(column[b].tobytes() for column in columns) for b in range(len(columns[0]))]

    def handle(self) -> WorkerHandle:
        return WorkerHandle(
            rank=0,
            host_id=host_id(),
            layout_digest=self.layout.digest(),
            arenas={tier: arena.handle() for tier, arena in self.memory.arenas.items()},
        )

    def store(self, stores: Rows, demotions: Rows = ()) -> float:
        """Run a store job behind what the compute stream has to do; return its seconds."""
        self._jobs += 1
        job = StoreJob(self._jobs, table(demotions, 3), table(stores, 5))
        self.copies.submit(job, self.memory.device.mark())
        (result,) = drain(self.copies)
        assert not result.failed_stores, result.reason
        assert not result.failed_demotions, result.reason
        return result.seconds

    def load(self, rows: Rows, peer: WorkerHandle | None = None) -> tuple[str, float]:
        """Run a load of ``tier, slot, generation, block`` rows; return transport and seconds."""
        self._jobs += 1
        segment = LoadSegment(0 if peer is None else 1, table(rows, 4))
        job = LoadJob(self._jobs, "request", (segment,), WAIT_S)
        peers = {} if peer is None else {1: peer}
        self.loads.submit(job, peers, self.memory.device.mark())
        (result,) = drain(self.loads)
        (part,) = result.segments
        assert not part.failed_rows, part.reason
        return part.transport, result.seconds

    def close(self) -> None:
        assert self.loads.close(WAIT_S)
        assert self.copies.close(WAIT_S)
        self._transports.close()
        gc.collect()
        self.memory.close()


@contextmanager
def peer_process(
    kind: str,
    *,
    index: int = 0,
    seed: int = 5,
    make: Callable[[], KvCaches] = plain_kv,
    blocks: int = BLOCKS,
) -> Iterator[tuple[WorkerHandle, list[bytes], PeerControl]]:
    """Run a replica in another process: block ``b`` in slot ``b`` of both tiers, generation
    ``100 + b``. Gives its handle, its blocks' bytes, and what ends it."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(
        target=_serve, args=(kind, index, seed, make, blocks, theirs), daemon=True
    )
    child.start()
    theirs.close()
    try:
        if not ours.poll(120):
            raise TimeoutError("the peer process did not start")
        handle, packed = ours.recv()
        yield handle, packed, PeerControl(child, ours)
    finally:
        child.kill()
        child.join(WAIT_S)


class PeerControl:
    """What a peer process does: it loads, closes everything, or dies."""

    def __init__(self, child: BaseProcess, pipe: Connection) -> None:
        self._child = child
        self._pipe = pipe

    def load(self, rows: Rows, source: WorkerHandle) -> tuple[str, list[bytes]]:
        """Let it load from a replica; return the transport and its blocks afterwards."""
        self._pipe.send((rows, source))
        assert self._pipe.poll(WAIT_S), "the peer did not load"
        transport, blocks = self._pipe.recv()
        return transport, blocks

    def kill(self) -> None:
        self._child.kill()
        self._child.join(WAIT_S)

    def stop(self) -> None:
        """Let it close everything, which takes until nobody maps its memory any more."""
        self._pipe.send("stop")

    def ended_well(self) -> bool:
        self._child.join(WAIT_S)
        return self._child.exitcode == 0


def _serve(
    kind: str,
    index: int,
    seed: int,
    make: Callable[[], KvCaches],
    blocks: int,
    pipe: Connection,
) -> None:
    platform = PLATFORMS[kind](index)
    replica = Replica(platform, make, blocks=blocks)
    packed = replica.randomize(seed)
    replica.store([(b, tier, b, 100 + b, -1) for tier in (D, H) for b in range(blocks)])
    pipe.send((replica.handle(), packed))
    while (asked := pipe.recv()) != "stop":
        transport, _ = replica.load(*asked)
        pipe.send((transport, replica.blocks()))
    device = replica.memory.arenas[Tier.DEVICE]
    # As a worker closes: with some time for peers to unmap.
    device.close(WAIT_S)
    replica.close()
    platform.close()


def foreign(handle: WorkerHandle, **changes: object) -> WorkerHandle:
    """Return the handle with another device handle."""
    arena = handle.arenas[Tier.DEVICE]
    changed = dataclasses.replace(arena, device=dataclasses.replace(arena.device, **changes))
    return dataclasses.replace(handle, arenas={**handle.arenas, Tier.DEVICE: changed})
