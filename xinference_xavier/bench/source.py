# SPDX-License-Identifier: Apache-2.0
"""A process that owns an arena full of blocks, for the measurements of transports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

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
def running(serve: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run ``serve(pipe, *arguments)`` in a process of its own; yield what that sends first.

    With the block the other end of the pipe is closed, and the process has to end. Raises
    TimeoutError when nothing is sent in time, EOFError when the process ends before.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise TimeoutError(f"the source process did not start within {START_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def running_source(slots: int, layout_digest: str) -> Iterator[Offer]:
    """Run a source with that many slots in its host tier; it ends with the block."""
    with running(_serve, slots, layout_digest) as offer:
        yield offer


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
