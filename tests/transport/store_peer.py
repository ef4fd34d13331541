# SPDX-License-Identifier: Apache-2.0
"""A second process that owns arenas: its side, and how a test starts and commands it."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.store.fake_cuda import FakeCuda, host
from xinference_xavier.layout import BlockLayout, probe_layout
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import publish, withdraw
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import Gpu, WorkerHandle
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import host_id

SLOTS, BLOCKS, TOKENS, DIM = 8, 6, 16, 256
UNMAP_S = 30.0
"""In which readers must have unmapped a device arena."""


def make_cache():
    """Return (tensor, layout, views) of a one-layer KV cache with blocks of 16 KiB."""
    import torch

    tensor = torch.zeros(BLOCKS, TOKENS, DIM)
    layout, views = probe_layout({"layer": tensor}, num_blocks=BLOCKS, block_tokens=TOKENS)
    return tensor, layout, views


def content(generation: int, layout: BlockLayout) -> np.ndarray:
    """Return the bytes that a slot of this generation has: every word tells the generation."""
    words = np.arange(layout.slot_bytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(generation)).view(np.uint8)


class Peer:
    """The other process, seen from the test."""

    def __init__(
        self,
        choice: str = "shm",
        place: str = "cpu",
        *,
        host: str = "127.0.0.1",
        entering: Sequence[str] = (),
    ) -> None:
        """Start it with the transports of ``choice``; with "gpu" on a fake one.

        ``host`` is the address that it tells, ``entering`` a command that runs it elsewhere.
        """
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [*entering, sys.executable, __file__, choice, place, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.handle: WorkerHandle = pickle.loads(base64.b64decode(self._line()))

    def ask(self, *command: object) -> None:
        """Send a command and wait until it was carried out."""
        print(*command, file=self.process.stdin, flush=True)
        assert self._line() == "done"

    def kill(self) -> None:
        """End it by SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def _line(self) -> str:
        line = self.process.stdout.readline().strip()
        assert line, "the peer process has ended"
        return line


def main() -> None:
    """Make both tiers, fill slot ``s`` with generation ``s + 1``, and obey commands."""
    choice, place, host_address = sys.argv[1:]
    _, layout, views = make_cache()
    arenas: dict[Tier, Arena | DeviceArena] = {
        tier: Arena.create(SLOTS, layout.slot_bytes, f"remote-{tier.name}") for tier in Tier
    }
    gpu = None
    if place == "gpu":
        arenas.pop(Tier.DEVICE).close()
        api = FakeCuda(uuid="gpu-of-the-peer")
        arenas[Tier.DEVICE] = DeviceArena.create(SLOTS, layout.slot_bytes, "remote-gpu", api)
        gpu = Gpu(api, CudaDevice(layout, views, api))

    def write(tier: Tier, slot: int, generation: int) -> None:
        slots = np.array([slot], dtype=np.int64)
        arena = arenas[tier]
        withdraw(arena.meta, slots)
        host(arena.data).numpy()[slot] = content(generation, layout)
        publish(arena.meta, slots, np.array([generation]), np.zeros(1, dtype=np.int64))

    stop = threading.Event()

    def churn() -> None:
        generation = 1000
        while not stop.is_set():
            generation += 1
            write(Tier.HOST, 0, generation)

    for tier in Tier:
        for slot in range(SLOTS):
            write(tier, slot, slot + 1)
    transports = Transports.start(
        choice=choice,
        arenas=arenas,
        staging={Tier.HOST: range(SLOTS - 1, SLOTS)},
        host=host_address,
        layout_digest=layout.digest(),
        gpu=gpu,
    )
    handle = WorkerHandle(
        rank=0,
        host_id=host_id(),
        layout_digest=layout.digest(),
        arenas={tier: arena.handle() for tier, arena in arenas.items()},
        **transports.published(),
    )
    print(base64.b64encode(pickle.dumps(handle)).decode(), flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "write":
            write(Tier(int(numbers[0])), int(numbers[1]), int(numbers[2]))
        elif command == "churn":
            stop.clear()
            churning = threading.Thread(target=churn)
            churning.start()
        elif command == "stop":
            stop.set()
            churning.join()
        elif command == "close":
            for arena in arenas.values():
                if isinstance(arena, DeviceArena):
                    arena.close(UNMAP_S)
                else:
                    arena.close()
        print("done", flush=True)
    transports.close()


if __name__ == "__main__":
    main()
