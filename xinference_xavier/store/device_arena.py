# SPDX-License-Identifier: Apache-2.0
"""Slots in the memory of a GPU, and their mapping by peers of the same host.

A device arena is one allocation of its own, so that its CUDA IPC handle exports exactly it,
whatever allocator the engine uses for its tensors. Each slot's generation and checksum stay in
host memory, in a memfd without slots (``store.arena``): they are compared without a copy, and a
peer that is gone shows there.

CUDA leaves it undefined what happens when memory is freed that another process has mapped. So
whoever maps an arena holds a shared lock on its memfd, which the kernel drops when that process
ends in any way, and the owner frees the memory only once nobody holds one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable
from typing import Final

import torch

from xinference_xavier.sizes import format_size
from xinference_xavier.store.arena import (
    NONCE_BYTES,
    Arena,
    ArenaError,
    ArenaHandle,
    ArenaUnavailable,
    MappedArena,
    opened,
)
from xinference_xavier.store.cuda import CudaApi, CudaError, DeviceHandle

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.01

_local: dict[bytes, DeviceArena] = {}
"""This process's open arenas by nonce: CUDA opens no handle in the process that made it."""


class DeviceArena:
    """``slots`` slots of ``slot_bytes`` bytes on a GPU; otherwise like :class:`Arena`.

    ``data`` is uint8 ``[slots, slot_bytes]`` on the device, not cleared, ``meta`` int64
    ``[slots, 2]`` in host memory and zero at first. Made and closed on the worker's main thread.
    """

    def __init__(self, memory: torch.Tensor, meta: Arena, api: CudaApi) -> None:
        """Use :meth:`create`."""
        handle = meta.handle()
        self._memory: torch.Tensor | None = memory
        self._arena = meta
        self._api = api
        self.data = memory[: handle.slots * handle.slot_bytes].view(-1, handle.slot_bytes)
        self.meta = meta.meta
        _local[handle.nonce] = self

    @classmethod
    def create(cls, slots: int, slot_bytes: int, name: str, api: CudaApi) -> DeviceArena:
        """Allocate an arena on the device of ``api``. ``name`` is that of the memfd.

        Raises :class:`ArenaError` when the memory is not there, :class:`ValueError` for sizes
        that are not positive or not aligned. Memory that cannot be shared by IPC is no error;
        the handle has the reason.
        """
        nbytes = slots * slot_bytes + NONCE_BYTES
        with contextlib.ExitStack() as undo:
            try:
                memory = api.allocate(nbytes)
            except CudaError as error:
                free, total = api.memory()
                raise ArenaError(
                    f"arena {name}: {format_size(nbytes)} of {api.device} are needed and "
                    f"{format_size(free)} of {format_size(total)} are free ({error}): lower "
                    "xavier_gpu_cache_bytes or gpu_memory_utilization"
                ) from error
            undo.callback(api.free, memory)
            handle = DeviceHandle(api.uuid(), nbytes, *_exported(api, memory))
            meta = Arena.create(slots, slot_bytes, name, device=handle)
            undo.callback(meta.close)
            nonce = torch.frombuffer(bytearray(meta.handle().nonce), dtype=torch.uint8)
            _copy_now(api, memory[-NONCE_BYTES:], nonce)
            undo.pop_all()
        return cls(memory, meta, api)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._arena.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        return self._arena.slot_bytes

    def handle(self) -> ArenaHandle:
        """Return what a peer on this host needs to map the arena; ``device`` is never None."""
        return self._arena.handle()

    def memory(self) -> torch.Tensor:
        """Return the bytes in use, uint8 ``[nbytes]``: what a peer maps by the handle."""
        if self._memory is None:
            raise ArenaUnavailable("the arena is closed")
        return self._memory

    def close(self, deadline_s: float = 0.0) -> None:
        """Withdraw every slot, tell readers, and free the memory once nobody maps it. Idempotent.

        Peers unmap within their reaper's period, and at once when they end. If one still has a
        mapping after ``deadline_s`` seconds, the memory is left to the end of this process.
        Raises :class:`CudaError` when freeing fails. No copy of ours may be running.
        """
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        # Not on the device: after an error of CUDA even that could fail.
        self.data = torch.empty((0, self.slot_bytes), dtype=torch.uint8)
        del _local[self.handle().nonce]
        fd = os.dup(self.handle().fd)
        try:
            self._arena.close()
            self.meta = self._arena.meta
            if not _locked_alone(fd, time.monotonic() + deadline_s):
                logger.warning(
                    "Xavier: a peer still maps %s of %s: they are freed when this process ends",
                    format_size(memory.nbytes),
                    self._api.device,
                )
                return
            self._api.free(memory)
        finally:
            os.close(fd)


class MappedDeviceArena:
    """A peer's device arena, mapped by CUDA IPC, or taken as it is within one process.

    ``data`` and ``meta`` have the shapes of :class:`DeviceArena` and must not be written.
    """

    def __init__(
        self, data: torch.Tensor, meta: MappedArena, unmap: Callable[[], object], lock: int
    ) -> None:
        """Use :meth:`open`."""
        self._arena = meta
        self._unmap = unmap
        self._lock: int | None = lock
        self.data, self.meta = data, meta.meta

    @classmethod
    def open(cls, handle: ArenaHandle, api: CudaApi) -> MappedDeviceArena:
        """Map the device arena of a live process of this host.

        Raises :class:`ArenaUnavailable` with the reason: the process is gone or out of sight, its
        memory cannot be shared, its GPU not be reached from this one, or CUDA maps something else.
        """
        device = handle.device
        if device is None:
            raise ArenaUnavailable("the arena is in host memory")
        if device.ipc is None:
            raise ArenaUnavailable(f"the peer's device memory cannot be shared: {device.reason}")
        with contextlib.ExitStack() as undo:
            meta = MappedArena.open(handle)
            undo.callback(meta.close)
            lock = _lock_shared(handle)
            undo.callback(os.close, lock)
            if not meta.alive():
                raise ArenaUnavailable("the arena was closed meanwhile")
            try:
                memory, unmap = _mapped(handle, device, device.ipc, api)
                undo.callback(unmap)
                found = torch.zeros(NONCE_BYTES, dtype=torch.uint8)
                _copy_now(api, found, memory[-NONCE_BYTES:])
            except CudaError as error:
                raise ArenaUnavailable(
                    f"the peer's GPU memory cannot be mapped: {error}"
                ) from error
            if found.numpy().tobytes() != handle.nonce:
                raise ArenaUnavailable("the mapped GPU memory is not the arena that was announced")
            undo.pop_all()
        data = memory[: handle.slots * handle.slot_bytes].view(-1, handle.slot_bytes)
        return cls(data, meta, unmap, lock)

    def alive(self) -> bool:
        """Whether the owner still runs and has not closed the arena."""
        return self._lock is not None and self._arena.alive()

    def close(self) -> None:
        """Unmap. No copy out of it may be running. Idempotent; raises :class:`CudaError`."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        self.data = torch.empty((0, self.data.shape[1]), dtype=torch.uint8)
        self._arena.close()
        self.meta = self._arena.meta
        try:
            self._unmap()
        finally:
            # Last: from here on the owner may free the memory.
            os.close(lock)


def _exported(api: CudaApi, memory: torch.Tensor) -> tuple[bytes | None, str | None]:
    try:
        return api.ipc_export(memory), None
    except CudaError as error:
        return None, str(error)


def _mapped(
    handle: ArenaHandle, device: DeviceHandle, ipc: bytes, api: CudaApi
) -> tuple[torch.Tensor, Callable[[], object]]:
    """Return the memory behind a handle, and what unmaps it."""
    if api.peer_access(device.uuid) is False:
        raise ArenaUnavailable(f"{api.device} cannot reach the memory of GPU {device.uuid}")
    local = _local.get(handle.nonce)
    if local is None:
        memory = api.ipc_open(ipc, device.nbytes)
        return memory, lambda: api.ipc_close(memory)
    if device.uuid != api.uuid():
        raise ArenaUnavailable("the arena is on another GPU of this process")
    return local.memory(), lambda: None


def _copy_now(api: CudaApi, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a few bytes and wait for it."""
    with contextlib.ExitStack() as undo:
        stream = api.stream_create()
        undo.callback(api.stream_destroy, stream)
        event = api.event_create()
        undo.callback(api.event_destroy, event)
        api.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes, stream)
        api.event_record(event, stream)
        api.event_synchronize(event)


def _lock_shared(handle: ArenaHandle) -> int:
    """Return a file descriptor that holds a shared lock on an arena's file."""
    with opened(f"/proc/{handle.pid}/fd/{handle.fd}") as found:
        fd = os.dup(found)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ArenaUnavailable(f"the arena's owner is closing it: {error.strerror}") from error
    return fd


def _locked_alone(fd: int, end: float) -> bool:
    """Return whether nobody else holds a lock on the file, before ``end`` (monotonic)."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        else:
            return True
