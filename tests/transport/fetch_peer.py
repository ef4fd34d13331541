# SPDX-License-Identifier: Apache-2.0
"""A source of slots in a process of its own, for the tests of the fetching transports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from tests.waiting import wait_until
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import SlotView, WorkerHandle

SLOT_BYTES = 4096
SLOTS = {Tier.DEVICE: 24, Tier.HOST: 48}
LIMIT_S = 60.0
"""For what must happen, however slow the machine is."""

TCP_ONLY = {"UCX_TLS": "tcp,self"}
"""Makes UCX move bytes over sockets, as between hosts: a stopped peer then stops its readers."""


@dataclass(frozen=True)
class Spec:
    """What a source offers: ``kind`` is "nixl", "tcp" or "xoscar-nixl" (xoscar by scheme)."""

    kind: str
    seed: int = 1
    slot_bytes: int = SLOT_BYTES
    slots: dict[Tier, int] = field(default_factory=lambda: dict(SLOTS))
    env: dict[str, str] = field(default_factory=dict)


def contents(spec: Spec) -> dict[Tier, tuple[torch.Tensor, torch.Tensor]]:
    """The random data and meta of a source: known to both processes, equal in both."""
    random = torch.Generator().manual_seed(spec.seed)
    return {
        tier: (
            torch.randint(0, 256, (n, spec.slot_bytes), dtype=torch.uint8, generator=random),
            torch.randint(1, 2**62, (n, 2), dtype=torch.int64, generator=random),
        )
        for tier, n in spec.slots.items()
    }


def make_arenas(slots: dict[Tier, int], slot_bytes: int) -> dict[Tier, Arena]:
    return {tier: Arena.create(n, slot_bytes, tier.name) for tier, n in slots.items()}


def views_of(arenas: dict[Tier, Arena]) -> dict[Tier, SlotView]:
    return {tier: SlotView(arena.data, arena.meta) for tier, arena in arenas.items()}


def make_transport(kind: str, arenas: dict[Tier, Arena], staging: range) -> Any:
    slot_bytes = arenas[Tier.HOST].slot_bytes
    views = views_of(arenas)
    if kind == "nixl":
        from xinference_xavier.transport.nixl import NixlTransport

        return NixlTransport(
            views=views,
            slot_bytes=slot_bytes,
            staging={Tier.HOST: staging},
            agent_name="test",
        )
    from xinference_xavier.transport.xoscar import XoscarTransport

    return XoscarTransport(
        views=views,
        nonces={tier: arena.handle().nonce for tier, arena in arenas.items()},
        slot_bytes=slot_bytes,
        staging=staging,
        host="127.0.0.1",
        scheme="nixl" if kind == "xoscar-nixl" else "tcp",
    )


def handle_of(transport: Any, arenas: dict[Tier, Arena]) -> WorkerHandle:
    return WorkerHandle(
        rank=0,
        host_id="test",
        layout_digest="test",
        arenas={tier: arena.handle() for tier, arena in arenas.items()},
        nixl=transport.metadata() if transport.name == "nixl" else None,
        xoscar=transport.address if transport.name == "xoscar" else None,
    )


def _serve(pipe: Pipe, spec: Spec) -> None:
    os.environ.update(spec.env)
    arenas = make_arenas(spec.slots, spec.slot_bytes)
    for tier, (data, meta) in contents(spec).items():
        arenas[tier].data.copy_(data)
        arenas[tier].meta.copy_(meta)
    transport = make_transport(spec.kind, arenas, range(spec.slots[Tier.HOST]))
    pipe.send(handle_of(transport, arenas))
    while (order := pipe.recv()) != "end":
        if order == "touch":
            arenas[Tier.HOST].data.bitwise_not_()
            arenas[Tier.HOST].meta.add_(1)
        pipe.send(order)
    transport.close()
    pipe.send("closed")


class Source:
    """A running source; ``handle`` is what it publishes."""

    def __init__(self, spec: Spec) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "nixl", "xoscar", "fetch_peer"])
        self.spec = spec
        self.pipe, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, spec), daemon=True
        )
        self.process.start()
        theirs.close()
        if not self.pipe.poll(LIMIT_S):
            raise TimeoutError("the source did not start")
        self.handle: WorkerHandle = self.pipe.recv()
        self.contents = contents(spec)

    def order(self, order: str) -> None:
        """Let the source do something, and wait until it has."""
        self.pipe.send(order)
        if not self.pipe.poll(LIMIT_S):
            raise TimeoutError(f"no answer to {order!r}")
        self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: _state(self.process.pid) in "Tt")
        if number == signal.SIGKILL:
            self.process.join(LIMIT_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self.pipe.close()


def _state(pid: int | None) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]


class Reader:
    """Our side: arenas with a pattern in every byte, staging at the end of the host tier."""

    def __init__(
        self, kind: str, *, staging: int = 32, host: int = 40, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.arenas = make_arenas({Tier.DEVICE: 4, Tier.HOST: host}, slot_bytes)
        self.staging = range(host - staging, host)
        self.host = self.arenas[Tier.HOST].data
        for arena in self.arenas.values():
            arena.data.fill_(0xA5)
        self.transport = make_transport(kind, self.arenas, self.staging)

    def changed(self) -> set[int]:
        """Host slots that no longer hold the pattern."""
        return set((self.host != 0xA5).any(1).nonzero().flatten().tolist())

    def close(self) -> None:
        self.transport.close()
        for arena in self.arenas.values():
            arena.close()


def soon(seconds: float = LIMIT_S) -> float:
    """A deadline for a call."""
    return time.monotonic() + seconds
