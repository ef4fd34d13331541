# SPDX-License-Identifier: Apache-2.0
"""Whether what a peer says about its workers has the form of handles.

Checked once, when it arrives: all that follows relies on the types. Whether a handle is true,
whoever opens it finds out.
"""

from __future__ import annotations

from typing import Final

from xinference_xavier.store.arena import NONCE_BYTES, ArenaHandle
from xinference_xavier.store.cuda import DeviceHandle
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import WorkerHandle

MOST_BYTES: Final = 1 << 20
"""Longest text or metadata in a handle; NIXL's is some KiB."""


def check_handles(answer: object) -> tuple[WorkerHandle, ...]:
    """Return a peer's answer as the handles of its workers. Raises ValueError if it has none."""
    if not isinstance(answer, tuple):
        raise ValueError(f"the peer's handles are of type {type(answer).__name__}")
    try:
        for handle in answer:
            _check_worker(handle)
    except (AttributeError, TypeError, KeyError) as error:
        # AttributeError: an object that was pickled by another version lacks a field.
        raise ValueError(f"the peer's handles are malformed: {error!r}") from error
    return answer


def _check_worker(handle: WorkerHandle) -> None:
    _require(isinstance(handle, WorkerHandle), "a worker")
    _count(handle.rank)
    _text(handle.host_id)
    _text(handle.layout_digest)
    if handle.nixl is not None:
        _require(isinstance(handle.nixl, bytes) and len(handle.nixl) <= MOST_BYTES, "NIXL's")
    if handle.xoscar is not None:
        _text(handle.xoscar)
    _require(isinstance(handle.arenas, dict), "the arenas")
    for tier, arena in handle.arenas.items():
        _require(isinstance(tier, Tier), "a tier")
        _check_arena(arena)


def _check_arena(arena: ArenaHandle) -> None:
    _require(isinstance(arena, ArenaHandle), "an arena")
    _text(arena.boot_id)
    _require(isinstance(arena.nonce, bytes) and len(arena.nonce) == NONCE_BYTES, "a nonce")
    for number in (arena.pid, arena.start_time, arena.fd, arena.inode, arena.slots):
        _count(number)
    _count(arena.slot_bytes)
    _require(arena.file_bytes < 1 << 63, "a size")
    device = arena.device
    if device is not None:
        _require(isinstance(device, DeviceHandle), "a device")
        _text(device.uuid)
        _count(device.nbytes)
        _require(device.ipc is None or isinstance(device.ipc, bytes), "a CUDA IPC handle")
        if device.reason is not None:
            _text(device.reason)


def _count(value: object) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    _require(good, "a number")


def _text(value: object) -> None:
    _require(isinstance(value, str) and len(value) <= MOST_BYTES, "a text")


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"the peer's handles are malformed: {what} is not what it should be")
