# SPDX-License-Identifier: Apache-2.0
"""What the store's bookkeeping costs in memory, measured in a process of its own."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
from collections.abc import Iterator

import psutil

from xinference_xavier.store.index import SnapshotIndex

_BATCH = 256


def numbered_keys() -> Iterator[bytes]:
    """Yield keys that are all different, the same ones each time."""
    number = 0
    while True:
        yield hashlib.sha256(number.to_bytes(8, "little")).digest()
        number += 1


def resident_bytes_per_block(blocks: int) -> float:
    """Return by how much a full index of ``blocks`` blocks makes a process larger, per block.

    A twentieth of them is in the device tier, and every block came in by a demotion of another
    one. The keys are included, and what the allocator has kept of what came and went.
    """
    # Not forked: pages that freed objects of this process have left would be filled first.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (blocks,)) / blocks


def _measure(blocks: int) -> int:
    process = psutil.Process()
    device = max(_BATCH, blocks // 20)
    gc.collect()
    before = int(process.memory_info().rss)
    index = SnapshotIndex(
        device_slots=device, host_slots=blocks - device + _BATCH, spare_slots=_BATCH
    )
    keys = numbered_keys()
    for start in range(0, blocks + 4 * _BATCH, _BATCH):
        plan = index.admit([(next(keys), start + number) for number in range(_BATCH)])
        index.commit(plan.job_id)
    gc.collect()
    held = index.counters()
    if held.device_blocks + held.host_blocks != blocks:
        raise RuntimeError(f"the index holds {held.device_blocks} + {held.host_blocks} blocks")
    return int(process.memory_info().rss) - before
