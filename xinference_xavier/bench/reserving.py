# SPDX-License-Identifier: Apache-2.0
"""What leasing and reading a single block of another process costs, in round trips of xoscar.

The floor is a call that does nothing, from the loop of the control thread to an actor in the peer's
pool. Leasing is measured as the engine's thread sees it, from its call to the grant: the hand-over
to the control thread and back is in it, which is none of the floor. Reading is the load thread's
part of a load over shared memory. All take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import xoscar as xo

from xinference_xavier.bench.blocks import Cache, filled_arena
from xinference_xavier.bench.bookkeeping import numbered_keys
from xinference_xavier.bench.engines import running_directory, wait_until
from xinference_xavier.bench.reader import MEMBER, Reader
from xinference_xavier.bench.source import HOST, START_S, running
from xinference_xavier.bench.stats import at_most, percentile, ratio_interval
from xinference_xavier.control.actors import no_lock
from xinference_xavier.control.messages import DIGEST_BYTES
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime, Reservation, ReservationState
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.shm import host_id

MOST_RATIO: Final = 1.5
"""Target: at most so many empty round trips."""

SLOTS: Final = 1024
POLL_S: Final = 2e-5
_UID: Final = "xinference-xavier-bench"


class _Nothing(xo.Actor):  # type: ignore[misc]  # xoscar ships no types
    """Answers calls that ask for nothing."""

    @no_lock
    async def call(self) -> None:
        """Do nothing."""


def measure(rounds: int) -> dict[str, Any]:
    """Lease and read ``rounds`` blocks, one after the other; return times in us and the ratio."""
    cache = Cache.make(SLOTS)
    arena = filled_arena(64, "reader")
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xavier-bench-")))
        directory = stack.enter_context(running_directory(folder / "directory.log"))
        handle: WorkerHandle = stack.enter_context(
            running(_serve, directory, cache.layout.digest())
        )
        reader = stack.enter_context(contextlib.closing(Reader(handle, cache, arena, "shm")))
        mirror = Mirror()
        index = SnapshotIndex(device_slots=0, host_slots=2, spare_slots=1)
        runtime = _runtime("reader", directory, index, mirror, handle)
        stack.callback(runtime.close)
        keys = _keys()
        wait_until(
            lambda: mirror.longest(keys, 0, runtime.usable_mask()) == (MEMBER, SLOTS),
            "the reader knows the source and its blocks",
            START_S,
        )
        caller = stack.enter_context(contextlib.closing(_Caller(runtime)))
        empty, leasing, reading = [], [], []
        # The first rounds pay for what happens once, and do not count.
        for number in range(rounds + 10):
            spent = caller.seconds()
            lease_s, reservation = _lease(runtime, keys[number % SLOTS])
            read_s = reader.load_rows(reservation.rows)
            runtime.release(reservation)
            if number >= 10:
                empty.append(spent)
                leasing.append(lease_s)
                reading.append(read_s)
    ratio = ratio_interval([a + b for a, b in zip(leasing, reading, strict=True)], empty)
    return {
        "empty_us": percentile(empty, 0.5) * 1e6,
        "lease_us": percentile(leasing, 0.5) * 1e6,
        "read_us": percentile(reading, 0.5) * 1e6,
        "ratio": ratio.to_dict(),
        "verdict": at_most(ratio, MOST_RATIO),
    }


class _Caller:
    """Makes empty calls to the source, on a loop of its own on this thread."""

    def __init__(self, runtime: ControlRuntime) -> None:
        info = runtime.member_info(MEMBER)
        if info is None:
            raise RuntimeError("the source is gone")
        self._loop = asyncio.new_event_loop()
        actor = xo.create_actor(_Nothing, address=info.address, uid=_UID)
        self._ref = self._loop.run_until_complete(actor)

    def seconds(self) -> float:
        """Return how long one call took."""

        async def call() -> float:
            started = time.perf_counter()
            await self._ref.call()
            return time.perf_counter() - started

        return self._loop.run_until_complete(call())

    def close(self) -> None:
        """End the loop; the connection goes with the process."""
        self._loop.close()


def _lease(runtime: ControlRuntime, key: bytes) -> tuple[float, Reservation]:
    started = time.perf_counter()
    reservation = runtime.reserve(MEMBER, [key], "bench")
    while reservation.state is ReservationState.PENDING:
        time.sleep(POLL_S)
    seconds = time.perf_counter() - started
    if reservation.state is not ReservationState.GRANTED:
        raise RuntimeError(f"no lease: {reservation.reason}")
    return seconds, reservation


def _serve(pipe: Pipe, directory: str, layout_digest: str) -> None:
    """Be a replica without an engine that holds a block for each key, until the pipe is closed."""
    arena = filled_arena(SLOTS + 1, "source")
    keys = _keys()
    index = SnapshotIndex(device_slots=0, host_slots=SLOTS + 1, spare_slots=1)
    admission = index.admit([(key, number) for number, key in enumerate(keys)])
    added = index.commit(admission.job_id).added
    meta = arena.meta.numpy()
    for _, _, slot, generation, _ in admission.stores:
        meta[slot, 0] = generation
    handle = WorkerHandle(0, host_id(), layout_digest, {Tier.HOST: arena.handle()})
    runtime = _runtime("source", directory, index, Mirror(), handle)
    try:
        runtime.publish(added, [])
        wait_until(lambda: runtime.member_number == MEMBER, "the source is the first", START_S)
        pipe.send(handle)
        with contextlib.suppress(EOFError):
            pipe.recv()
    finally:
        runtime.close()
        arena.close()


def _keys() -> list[bytes]:
    return list(itertools.islice(numbered_keys(), SLOTS))


def _runtime(
    name: str, directory: str, index: SnapshotIndex, mirror: Mirror, worker: WorkerHandle
) -> ControlRuntime:
    """Start the control plane of a replica that has one worker."""
    runtime = ControlRuntime(
        index=index,
        mirror=mirror,
        name=name,
        host=HOST,
        directory=directory,
        key=GroupKey("bench", None),
        fingerprint=bytes(DIGEST_BYTES),
        workers=(worker,),
        status_hook=dict,
        audit_hook=dict,
        clear_hook=dict,
        close_hook=lambda deadline_s: {},
        limit_hook=lambda device, host: {},
        withdraw_hook=lambda: None,
    )
    runtime.start()
    return runtime
