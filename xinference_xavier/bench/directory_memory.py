# SPDX-License-Identifier: Apache-2.0
"""Bytes per block of directory and mirror, as growth of a process, and what reading deltas costs.

Each measurement has a process of its own, that is not forked: pages that freed objects of this one
have left would be filled first. Costs of applying, publishing and reading are processor time.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psutil

from xinference_xavier.bench.lookup_peers import PREFIX
from xinference_xavier.bench.members import FINGERPRINT, HOST, packed_keys, unpacked
from xinference_xavier.control.directory import DirectoryCore
from xinference_xavier.control.messages import (
    DIGEST_BYTES,
    MAX_KEYS,
    MemberInfo,
    Publication,
    Ticket,
    Update,
)
from xinference_xavier.control.mirror import DEFAULT_LIMIT_BYTES, ENTRY_BYTES, Mirror
from xinference_xavier.store.records import KEY_BYTES

MOST_DIRECTORY_BYTES: Final = 300.0
MOST_MIRROR_BYTES: Final = 100.0
"""Targets."""

GROUP: Final = bytes(DIGEST_BYTES) + FINGERPRINT
PIECES: Final = 64
"""Lookups, or publications that are read, per measurement."""

READ: Final = (16, 256, MAX_KEYS)
"""Keys per publication that readers fetch: from one step of a replica to a full message."""

T = TypeVar("T")


def directory_memory(blocks: int, members: int) -> dict[str, Any]:
    """Let ``members`` publish ``blocks`` blocks, every second one by two of them."""
    return _apart(_directory, blocks, members)


def mirror_memory(blocks: int, *, bounded: bool = False) -> dict[str, Any]:
    """Tell a mirror of ``blocks`` blocks; ``bounded`` with its default limit, else none."""
    return _apart(_mirror, blocks, DEFAULT_LIMIT_BYTES if bounded else 2 * blocks * ENTRY_BYTES)


def reading_costs() -> list[dict[str, Any]]:
    """Return what the directory spends on, and sends to, one reader: per changed key."""
    return _apart(_reading)


def _apart(work: Callable[..., T], *args: int) -> T:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _joined(core: DirectoryCore, members: int) -> list[Ticket]:
    return [
        core.join(GROUP, MemberInfo(f"member {number}", 1, f"{HOST}:1", HOST, 0.0), 0.0).ticket
        for number in range(members)
    ]


def _directory(blocks: int, members: int) -> dict[str, Any]:
    core = DirectoryCore(incarnation=1, heartbeat_s=1e9)
    tickets = _joined(core, members)
    sequences = [0] * members
    before = _resident()
    for number, start in enumerate(range(0, blocks, MAX_KEYS)):
        packed = packed_keys(f"block {start}", min(MAX_KEYS, blocks - start))
        for holder in (number, number + 1) if number % 2 else (number,):
            at = holder % members
            sequences[at] += 1
            core.publish(tickets[at], Publication(sequences[at], packed))
    grown = _resident() - before
    if core.counts()["keys"] != blocks:
        raise RuntimeError(f"the directory has {core.counts()['keys']} of {blocks} blocks")
    return {"blocks": blocks, "members": members, "bytes_per_block": grown / blocks}


def _mirror(blocks: int, limit_bytes: int) -> dict[str, Any]:
    mirror = Mirror(limit_bytes)
    before = _resident()
    spent = 0.0
    for number, start in enumerate(range(0, blocks, MAX_KEYS)):
        packed = packed_keys(f"block {start}", min(MAX_KEYS, blocks - start))
        started = time.thread_time()
        mirror.apply(1 << 1 + number % 64, packed, b"")
        spent += time.thread_time() - started
    grown = _resident() - before
    times = []
    last = (blocks - 1) // MAX_KEYS
    for number in range(PIECES):
        # From what was told last on: a bounded mirror may have dropped the rest.
        packed = packed_keys(f"block {max(0, last - 1 - number) * MAX_KEYS}", MAX_KEYS)
        keys = unpacked(packed[: PREFIX * KEY_BYTES])
        hash(tuple(keys))
        started = time.perf_counter()
        mirror.longest(keys, 0, -1)
        times.append(time.perf_counter() - started)
    return {
        "told": blocks,
        "blocks": len(mirror),
        "mib": grown / (1 << 20),
        "bytes_per_block": grown / len(mirror),
        "apply_us_per_block": spent / blocks * 1e6,
        "longest_us": sorted(times)[len(times) // 2] * 1e6,
    }


def _reading() -> list[dict[str, Any]]:
    """Read publications the way one poll of another member does, and serialise the answer."""
    found = []
    for keys in READ:
        core = DirectoryCore(incarnation=1, heartbeat_s=1e9)
        writer, reader = _joined(core, 2)
        start = core.read(reader, None)
        if not isinstance(start, Update):
            raise RuntimeError(f"the directory answered {start}")
        published = 0.0
        for number in range(1, PIECES + 1):
            packed = packed_keys(f"piece {number}", keys)
            started = time.thread_time()
            core.publish(writer, Publication(number, packed))
            published += time.thread_time() - started
        cursor, spent, size = start.cursor, 0.0, 0
        while cursor.version < start.cursor.version + PIECES:
            started = time.thread_time()
            update = core.read(reader, cursor)
            sent = pickle.dumps(update, protocol=pickle.HIGHEST_PROTOCOL)
            spent += time.thread_time() - started
            if not isinstance(update, Update):
                raise RuntimeError(f"the directory answered {update}")
            cursor, size = update.cursor, size + len(sent)
        changes = keys * PIECES
        found.append(
            {
                "keys_per_publication": keys,
                "publish_us_per_change": published / changes * 1e6,
                "read_us_per_change": spent / changes * 1e6,
                "bytes_per_change": size / changes,
            }
        )
    return found
