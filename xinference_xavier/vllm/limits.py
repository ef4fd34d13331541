# SPDX-License-Identifier: Apache-2.0
"""Logical limits of a running store, and what the directory hears of blocks that go for them.

Runs on hook threads and the control thread, never on the engine's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from xinference_xavier.store.index import StoreClosed
from xinference_xavier.vllm.parts import Parts

WITHDRAW_BLOCKS: Final = 256
"""The engine's thread waits for the withdrawal of at most so many blocks."""


def set_limits(parts: Parts, device_slots: int | None, host_slots: int | None) -> dict[str, Any]:
    """Let each tier hold at most so many blocks; None leaves a limit as it is.

    Returns whether it was ``limited`` (not once the store is closed), how many blocks went at
    once, and the ``store`` part of the status. Works for as long as it takes to evict. Raises
    ValueError for what is beyond the capacity.
    """
    index = parts.index
    try:
        before = index.counters().totals.limit_evictions
        changes = index.set_limits(device_slots=device_slots, host_slots=host_slots)
        _withdraw(parts, changes.removed)
        counters = asdict(index.counters())
    except StoreClosed:
        return {"limited": False}
    evicted = counters["totals"]["limit_evictions"] - before
    return {"limited": True, "evicted_blocks": evicted, "store": {**parts.shape, **counters}}


def withdraw(parts: Parts) -> None:
    """Tell the directory of blocks that went when the leases on them ended."""
    with contextlib.suppress(StoreClosed):
        _withdraw(parts, parts.index.take_removed())


def _withdraw(parts: Parts, removed: Sequence[bytes]) -> None:
    for start in range(0, len(removed), WITHDRAW_BLOCKS):
        piece = removed[start : start + WITHDRAW_BLOCKS]
        with parts.publishing:
            # What was stored again meanwhile is known to the directory as that.
            parts.control.publish((), [key for key in piece if not parts.index.holds(key)])
