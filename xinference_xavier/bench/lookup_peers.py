# SPDX-License-Identifier: Apache-2.0
"""The other replicas of ``lookups``: two peers that hold parts of prefixes, and one that publishes.

They live in one process of their own, which needs no vLLM.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Final

from xinference_xavier.bench.members import (
    FINGERPRINT,
    HOST,
    KEY,
    PATIENT,
    RawMember,
    packed_keys,
    unpacked,
)
from xinference_xavier.control.messages import MAX_KEYS
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.store.records import KEY_BYTES

SHARES: Final = (92, 92, 91)
"""Blocks of a prefix that the own store, the first and the second peer hold: 4400 tokens in all."""

PREFIX: Final = sum(SHARES)

STREAM_KEYS: Final = 512
STREAM_S: Final = 0.005
"""Every so many seconds, so many keys come and as many go."""

STREAMED: Final = 128
"""Publications after which the stream's keys repeat."""


def prefix(number: int) -> list[bytes]:
    """Return the keys of one of the prefixes that can be found."""
    return unpacked(packed_keys(f"prefix {number}", PREFIX))


def admit(index: SnapshotIndex, keys: Sequence[bytes]) -> list[bytes]:
    """Enter blocks as a job does that has succeeded; return their keys."""
    plan = index.admit([(key, number) for number, key in enumerate(keys)])
    return index.commit(plan.job_id).added


def runtime_of(name: str, directory: str, index: SnapshotIndex, mirror: Mirror) -> ControlRuntime:
    """Return a replica's control plane, not started; its hooks do nothing."""
    return ControlRuntime(
        index=index,
        mirror=mirror,
        name=name,
        host=HOST,
        directory=directory,
        key=KEY,
        fingerprint=FINGERPRINT,
        workers=(),
        status_hook=dict,
        audit_hook=dict,
        clear_hook=dict,
        close_hook=lambda deadline_s: {},
        limit_hook=lambda device, host: {},
        withdraw_hook=lambda: None,
        timing=PATIENT,
    )


@contextmanager
def running_peers(directory: str, prefixes: int) -> Iterator[Callable[[str, int], float]]:
    """Run the peers until the end of the block; gives what sends them an order.

    The orders: "fill" publishes that many more keys; "stream" begins with 1 to publish changes all
    the time, and ends with 0: the answer is how many there were.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, directory, prefixes), daemon=True)
    process.start()
    theirs.close()

    def ask(order: str, value: int) -> float:
        ours.send((order, value))
        answer: float = ours.recv()
        return answer

    try:
        yield ask
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Pipe, directory: str, prefixes: int) -> None:
    held = [prefix(number) for number in range(prefixes)]
    start = SHARES[0]
    runtimes = []
    for number, count in enumerate(SHARES[1:], 1):
        index = SnapshotIndex(
            # One reader may lease a quarter: the measured one never has that much.
            device_slots=max(prefixes, 4) * count + PREFIX,
            host_slots=0,
            spare_slots=0,
        )
        for keys in held:
            admit(index, keys[start : start + count])
        start += count
        runtime = runtime_of(f"peer {number}", directory, index, Mirror())
        runtime.start()
        runtimes.append(runtime)
    try:
        asyncio.run(_obey(pipe, directory))
    except EOFError:
        pass
    finally:
        for runtime in runtimes:
            runtime.close()


async def _obey(pipe: Pipe, directory: str) -> None:
    """Do what comes through the pipe, as a third member, until the other end is closed."""
    member = await RawMember.join(directory, "others")
    stream: asyncio.Task[int] | None = None
    stop = asyncio.Event()
    while True:
        order, value = await asyncio.to_thread(pipe.recv)
        answer = 0
        if order == "fill":
            packed = packed_keys("others", value)
            for at in range(0, len(packed), MAX_KEYS * KEY_BYTES):
                await member.publish(packed[at : at + MAX_KEYS * KEY_BYTES])
        elif value:
            stop.clear()
            stream = asyncio.create_task(_stream(member, stop))
        elif stream is not None:
            stop.set()
            answer = await stream
        pipe.send(answer)


async def _stream(member: RawMember, stop: asyncio.Event) -> int:
    """Publish until told to stop; return how many keys came and went."""
    size = STREAM_KEYS * KEY_BYTES
    packed = packed_keys("stream", STREAMED * STREAM_KEYS)
    parts = [packed[at : at + size] for at in range(0, len(packed), size)]
    changes = at = 0
    while not stop.is_set():
        await member.publish(parts[at], parts[at - STREAMED // 2])
        at = (at + 1) % STREAMED
        changes += 2 * STREAM_KEYS
        await asyncio.sleep(STREAM_S)
    return changes
