# SPDX-License-Identifier: Apache-2.0
"""Real bytes from one process to another, over each transport that a worker would try.

The reader does what a worker's load thread does, in a process of its own: what crashes or hangs
there is a finding, and nothing of it stays. It reads slots that are leased from a running replica,
or those of a small source that is started for the purpose.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import torch

from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import publish
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import Connection, TransferFailed, WorkerHandle
from xinference_xavier.transport.base import TransportUnavailable as Unavailable
from xinference_xavier.transport.pool import StagingPool
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import host_id

TRANSPORTS: Final = ("shm", "nixl", "xoscar")
"""Those with which a process without a GPU can read."""

SLOT_BYTES: Final = 192 << 10
SLOTS: Final = 64
STAGING: Final = 16
ROUNDS: Final = 3
CONNECT_S: Final = 10.0
READ_S: Final = 10.0
LAYOUT: Final = "doctor"

Row = tuple[int, int]
"""Slot and generation; generation 0 is not compared."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What to read: ``rows`` of each tier of the worker behind ``handle``.

    ``host`` is the address under which the source could reach the reader.
    """

    handle: WorkerHandle
    rows: dict[Tier, list[Row]]
    host: str
    transports: tuple[str, ...] = TRANSPORTS


@dataclass(frozen=True, slots=True)
class Outcome:
    """How reading a tier over a transport went. ``digest`` is of all bytes, in the rows' order.

    ``lane`` is what UCX chose for NIXL's reads, where it told. ``seconds`` are those of the fastest
    round.
    """

    transport: str
    tier: str
    error: str | None = None
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    digest: str = ""
    lane: str | None = None

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


def read(errand: Errand, timeout_s: float) -> list[Outcome]:
    """Read in a process of its own, which ends within ``timeout_s`` seconds."""
    results: list[Outcome] = []
    with _child(_read_all, errand) as (pipe, process):
        end = time.monotonic() + timeout_s
        problem = f"no result within {timeout_s:g} s"
        try:
            while pipe.poll(max(0.0, end - time.monotonic())):
                result = pipe.recv()
                if result is None:
                    return results
                results += result
        except EOFError:
            process.join(1.0)
            problem = f"the reading process ended with status {process.exitcode}"
    tried = {result.transport for result in results}
    return results + [
        Outcome(name, tier.name.lower(), problem)
        for name in errand.transports
        if name not in tried
        for tier in errand.rows
    ]


@contextmanager
def source() -> Iterator[WorkerHandle]:
    """Keep a process with :data:`SLOTS` filled slots of host memory and every transport."""
    with _child(_serve) as (pipe, _):
        if not pipe.poll(60.0):
            raise TimeoutError("the source process did not start within 60 s")
        yield pipe.recv()


def filled_rows() -> list[Row]:
    """Return the rows of :func:`source`."""
    return [(slot, slot + 1) for slot in range(SLOTS)]


def read_lane(text: str) -> str | None:
    """Return what UCX's protocol table (``UCX_PROTO_INFO``) says of its last reads."""
    lane, reading = None, False
    for line in text.splitlines():
        if "remote memory read" in line:
            reading = True
        elif reading and (row := re.search(r"\| *\d+\.\.\S+ *\|[^|]+\| *([^|]+?) *\|", line)):
            lane = row[1]
        elif reading and lane is not None and "+--" in line:
            reading = False
    return lane


# -- in the children -------------------------------------------------------------------------------


def _serve(pipe: Pipe) -> None:
    arena = Arena.create(SLOTS + STAGING, SLOT_BYTES, "doctor-source")
    numbers = torch.arange(SLOTS + STAGING, dtype=torch.int64)
    arena.data.view(torch.int64).copy_(numbers[:, None] * 1_000_003 + torch.arange(SLOT_BYTES // 8))
    publish(arena.meta, numbers.numpy(), numbers.numpy() + 1, numbers.numpy() * 0)
    transports = Transports.start(
        choice="auto",
        arenas={Tier.HOST: arena},
        staging={Tier.HOST: range(SLOTS, SLOTS + STAGING)},
        host="127.0.0.1",
        layout_digest=LAYOUT,
    )
    handle = WorkerHandle(
        rank=0,
        host_id=host_id(),
        layout_digest=LAYOUT,
        arenas={Tier.HOST: arena.handle()},
        **transports.published(),
    )
    pipe.send(handle)
    pipe.poll(None)  # until the other end is closed
    transports.close()
    arena.close()


def _read_all(pipe: Pipe, errand: Errand) -> None:
    # A load copies on one thread as well.
    torch.set_num_threads(1)
    # UCX prints its protocols to standard output, which nothing else uses in this process.
    os.environ["UCX_PROTO_INFO"] = "y"
    with tempfile.TemporaryFile(buffering=0) as told:
        os.dup2(told.fileno(), 1)
        for name in errand.transports:
            start = os.fstat(told.fileno()).st_size
            outcomes = _read_over(name, errand)
            size = os.fstat(told.fileno()).st_size - start
            lane = read_lane(os.pread(told.fileno(), size, start).decode(errors="replace"))
            pipe.send([replace(each, lane=None if each.error else lane) for each in outcomes])
    pipe.send(None)


def _read_over(name: str, errand: Errand) -> list[Outcome]:
    arenas = errand.handle.arenas
    # Without a GPU there is one way to what another process keeps on one.
    tiers = [tier for tier in errand.rows if name == "xoscar" or arenas[tier].device is None]
    slot_bytes = next(iter(arenas.values())).slot_bytes
    arena = Arena.create(STAGING, slot_bytes, "doctor")
    pool = range(STAGING)
    try:
        try:
            transports = Transports.start(
                choice=name,
                arenas={Tier.HOST: arena},
                staging={Tier.HOST: pool},
                host=errand.host,
                layout_digest=errand.handle.layout_digest,
            )
        except Unavailable as error:
            return [Outcome(name, tier.name.lower(), str(error)) for tier in tiers]
        try:
            staging = StagingPool(pool, lambda: transports.quarantined(Tier.HOST))
            return [_read_tier(transports, name, errand, tier, arena, staging) for tier in tiers]
        finally:
            transports.close()
    finally:
        arena.close()


def _read_tier(
    transports: Transports,
    name: str,
    errand: Errand,
    tier: Tier,
    arena: Arena,
    staging: StagingPool,
) -> Outcome:
    result = Outcome(name, tier.name.lower())
    rows = errand.rows[tier]
    try:
        connection = transports.connect(
            0,
            errand.handle,
            tier,
            pools={Tier.HOST: staging},
            deadline=time.monotonic() + CONNECT_S,
        )
        try:
            best = float("inf")
            payload = torch.zeros((len(rows), arena.slot_bytes), dtype=torch.uint8)
            for _ in range(ROUNDS):
                started = time.monotonic()
                wrong = _read_rows(connection, rows, payload, arena, staging)
                best = min(best, time.monotonic() - started)
                if wrong:
                    return replace(result, error=f"{wrong} of {len(rows)} blocks were not intact")
        finally:
            connection.close()
    except (Unavailable, TransferFailed, TimeoutError) as error:
        return replace(result, error=str(error))
    return replace(
        result,
        blocks=len(rows),
        nbytes=payload.nbytes,
        seconds=best,
        digest=hashlib.sha256(payload.numpy().data).hexdigest(),
    )


def _read_rows(
    connection: Connection,
    rows: Sequence[Row],
    payload: torch.Tensor,
    arena: Arena,
    staging: StagingPool,
) -> int:
    """Read ``rows`` into ``payload``; return how many did not have their generation."""
    slots = torch.tensor([slot for slot, _ in rows])
    wanted = torch.tensor([generation for _, generation in rows])
    if (view := connection.view()) is not None:
        before = view.meta[slots, 0]
        torch.index_select(view.data, 0, slots, out=payload)
        return _wrong(wanted, before) + _wrong(wanted, view.meta[slots, 0])
    wrong = 0
    deadline = time.monotonic() + READ_S
    for start in range(0, len(rows), STAGING):
        piece = slots[start : start + STAGING].tolist()
        with staging.lend(len(piece), deadline=deadline) as lent:
            meta = connection.fetch(piece[: len(lent)], lent, deadline=deadline)
            if len(lent) < len(piece):
                raise TimeoutError("earlier reads still hold staging slots")
            payload[start : start + len(piece)] = arena.data[lent]
        wrong += _wrong(wanted[start : start + len(piece)], meta[:, 0])
    return wrong


def _wrong(wanted: torch.Tensor, found: torch.Tensor) -> int:
    return int(((wanted != found) & (wanted != 0)).sum())


@contextmanager
def _child(target: Any, *args: Any) -> Iterator[tuple[Pipe, Any]]:
    """Run ``target(pipe, *args)`` in a fresh process; it is killed in the end if it still runs."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.join(3.0)
        if process.is_alive():
            process.kill()
            process.join()
