# SPDX-License-Identifier: Apache-2.0
"""A process that owns an arena full of blocks, for the measurements of transports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Final

from xinference_xavier.bench.blocks import filled_arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransportUnavailable, WorkerHandle
from xinference_xavier.transport.nixl_agent import Agent, Region
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import host_id

START_S: Final = 120.0
HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Raw:
    """What a plain NIXL agent needs to read the source's slots: the floor of that transport."""

    metadata: bytes
    region: Region


@dataclass(frozen=True, slots=True)
class Offer:
    """A running source: what its worker publishes; ``raw`` is None without NIXL."""

    handle: WorkerHandle
    raw: Raw | None


@contextmanager
def running_source(slots: int, layout_digest: str) -> Iterator[Offer]:
    """Run a source with that many slots in its host tier; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, slots, layout_digest), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise TimeoutError(f"the source process did not start within {START_S:g} s")
        offer: Offer = ours.recv()
        yield offer
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Pipe, slots: int, layout_digest: str) -> None:
    """Offer the slots until the other end closes the pipe."""
    arena = filled_arena(slots, "source")
    transports = Transports.start(
        choice="auto",
        arenas={Tier.HOST: arena},
        staging={Tier.HOST: range(slots - 1, slots)},
        host=HOST,
        layout_digest=layout_digest,
    )
    handle = WorkerHandle(
        rank=0,
        host_id=host_id(),
        layout_digest=layout_digest,
        arenas={Tier.HOST: arena.handle()},
        **transports.published(),
    )
    agent, raw = None, None
    try:
        agent = Agent("bench-source")
        region = Region.of(arena.data)
        agent.register(region)
        raw = Raw(agent.metadata(), region)
    except TransportUnavailable:
        pass  # The measurement then has no floor for NIXL, and no NIXL either.
    pipe.send(Offer(handle, raw))
    try:
        pipe.recv()
    except EOFError:
        pass
    finally:
        if agent is not None:
            agent.close()
        transports.close()
        arena.close()
