# SPDX-License-Identifier: Apache-2.0
"""Slots in memory that peers on the same host can map.

An arena is one memfd: a 4096-byte header, one row of ``meta`` per slot, padding to a page, and
the slots. It is populated when it is made, so the budget is real from the first second, and
sealed, so that no reader can be cut off from its pages. It has no name: when the last process
that maps it is gone, however it ended, so is the memory.

``meta`` is int64 ``[slots, 2]``: generation and checksum. The generation protocol makes a torn or
reassigned slot visible: the writer sets the generation to 0 before the first byte of new content,
the checksum and then the generation after the last; a reader compares the generation with the one
that it was promised before *and* after its copy. x86-64 keeps stores, and loads, in program order,
which is all that the protocol needs; non-temporal stores have fences around them (``streaming``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from xinference_xavier.hostmemory import host_memory
from xinference_xavier.store.cuda import DeviceHandle

PAGE = 4096
MAGIC = b"XAVIERAR"
VERSION = 1
OPEN, CLOSED = 1, 2

NONCE_BYTES = 16
"""By its nonce a peer knows that it mapped the right memory from its start. In device memory it
lies behind the last slot."""

# magic, version, state, nonce, slots, slot_bytes
_HEADER = struct.Struct("<8sII16sQQ")
_STATE_OFFSET = 12

# Names that Python 3.11 does not have.
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10


class ArenaError(RuntimeError):
    """An arena of the asked size cannot be made."""


class ArenaUnavailable(RuntimeError):
    """A peer's arena cannot be mapped; ``str()`` is the reason."""


def boot_id() -> str:
    """Return what is equal on all processes of one running kernel, and on no other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if it is gone or a zombie.

    Together with the pid it names a process for ever, since pids are reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses and may hold anything.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What a peer needs to map an arena, and to be sure that it is the right one.

    With ``device`` the slots lie in a GPU's memory (``store.device_arena``) and the file holds
    their ``meta`` alone.
    """

    boot_id: str
    pid: int
    start_time: int
    fd: int
    inode: int
    nonce: bytes
    slots: int
    slot_bytes: int
    device: DeviceHandle | None = None

    @property
    def host_slots(self) -> int:
        """Slots whose bytes lie in the file."""
        return self.slots if self.device is None else 0

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return _data_offset(self.slots) + self.host_slots * self.slot_bytes


class SlotMemory(Protocol):
    """What the arenas of the host and of a GPU have in common. See :class:`Arena`.

    ``data`` is uint8 ``[slots, slot_bytes]``, ``meta`` int64 ``[slots, 2]``, always in host memory.
    """

    data: torch.Tensor
    meta: torch.Tensor

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""

    def handle(self) -> ArenaHandle:
        """Return what a peer on this host needs to map it."""


def _data_offset(slots: int) -> int:
    return PAGE + -(-slots * 16 // PAGE) * PAGE


def _tensors(mapping: mmap.mmap, handle: ArenaHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, meta) over a mapping. The tensors keep it alive; it is never closed by hand.

    ``torch.frombuffer`` does not export the buffer while the tensor lives, so that ``mmap.close``
    would succeed under a running copy. Dropping references instead unmaps after the last of them.
    """
    with warnings.catch_warnings():
        # A read-only buffer gives a tensor that must not be written; no code here does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        meta = torch.frombuffer(mapping, dtype=torch.int64, count=handle.slots * 2, offset=PAGE)
        data = torch.empty(0, dtype=torch.uint8)
        if handle.host_slots:
            data = torch.frombuffer(
                mapping,
                dtype=torch.uint8,
                count=handle.host_slots * handle.slot_bytes,
                offset=_data_offset(handle.slots),
            )
    return data.view(handle.host_slots, handle.slot_bytes), meta.view(handle.slots, 2)


class Arena:
    """``slots`` slots of ``slot_bytes`` bytes of host memory, owned by this process.

    ``data`` is uint8 ``[slots, slot_bytes]`` and ``meta`` int64 ``[slots, 2]``, zero at first.
    Writers are the worker's copy thread and its transports; there is one writer per slot.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, handle: ArenaHandle) -> None:
        """Use :meth:`create`."""
        self._fd: int | None = fd
        self._mapping: mmap.mmap | None = mapping
        self._handle = handle
        self.data, self.meta = _tensors(mapping, handle)

    @classmethod
    def create(
        cls, slots: int, slot_bytes: int, name: str, *, device: DeviceHandle | None = None
    ) -> Arena:
        """Make, populate and seal an arena. ``name`` is shown in ``/proc/<pid>/maps`` only.

        With ``device``, where the slots are, it has their ``meta`` only and ``data`` is empty.

        Raises :class:`ArenaError` when the memory is not there, :class:`ValueError` for sizes
        that are not positive or not aligned.
        """
        if slots < 1 or slot_bytes < 1 or slot_bytes % 64:
            raise ValueError(
                f"arena {name}: slots={slots}, slot_bytes={slot_bytes}: at least one slot of a "
                "multiple of 64 bytes is needed"
            )
        fd = os.memfd_create(f"xavier-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            nonce = os.urandom(NONCE_BYTES)
            handle = ArenaHandle(
                boot_id=boot_id(),
                pid=os.getpid(),
                start_time=process_start_time(os.getpid()) or 0,
                fd=fd,
                inode=os.fstat(fd).st_ino,
                nonce=nonce,
                slots=slots,
                slot_bytes=slot_bytes,
                device=device,
            )
            mapping = _populate(fd, handle.file_bytes, name)
            mapping[: _HEADER.size] = _HEADER.pack(MAGIC, VERSION, OPEN, nonce, slots, slot_bytes)
            _seal(fd)
            return cls(fd, mapping, handle)
        except BaseException:
            os.close(fd)
            raise

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._handle.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot."""
        return self._handle.slot_bytes

    def handle(self) -> ArenaHandle:
        """Return what a peer on this host needs to map the arena."""
        return self._handle

    def close(self) -> None:
        """Withdraw every slot, tell readers, and let the memory go. Idempotent.

        Pages are freed when the last local tensor and the last peer's mapping are gone; peers
        see the state and unmap within their reaper's period.
        """
        if self._fd is None or self._mapping is None:
            return
        self.meta[:, 0] = 0
        self._mapping[_STATE_OFFSET : _STATE_OFFSET + 4] = struct.pack("<I", CLOSED)
        self._mapping = None
        self.data = self.data.new_empty((0, self.slot_bytes))
        self.meta = self.meta.new_empty((0, 2))
        os.close(self._fd)
        self._fd = None


def _populate(fd: int, size: int, name: str) -> mmap.mmap:
    """Size the file, take its pages now, and map it writable."""
    available = host_memory().available
    if size > available.bytes:
        raise ArenaError(
            f"arena {name}: {size} bytes are needed and {available.bytes} are available on this "
            f"host (limit: {available.source}): lower xavier_cpu_cache_bytes or "
            "xavier_gpu_cache_bytes"
        )
    try:
        os.ftruncate(fd, size)
        # Allocates every page and reports a lack of memory as an error, where a first touch
        # through the mapping would be a SIGBUS.
        os.posix_fallocate(fd, 0, size)
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ArenaError(
            f"arena {name}: {size} bytes of shared memory are not available "
            f"({error.strerror}): lower xavier_cpu_cache_bytes or xavier_gpu_cache_bytes, or "
            "raise the memory limit of the host or its cgroup"
        ) from error
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        # Kernels before 5.14 do not know it: the pages exist, only their first use faults.
        if error.errno != errno.EINVAL:
            raise ArenaError(f"arena {name}: cannot map {size} bytes: {error.strerror}") from error
    return mapping


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


class MappedArena:
    """A peer's arena, mapped read-only.

    ``data`` and ``meta`` have the shapes of :class:`Arena` and must not be written.
    """

    def __init__(self, mapping: mmap.mmap, handle: ArenaHandle) -> None:
        """Use :meth:`open`."""
        self._mapping: mmap.mmap | None = mapping
        self._handle = handle
        self.data, self.meta = _tensors(mapping, handle)

    @classmethod
    def open(cls, handle: ArenaHandle) -> MappedArena:
        """Map the arena of a live process of this host.

        Raises :class:`ArenaUnavailable` when the process is gone or another one, its files may
        not be opened (other container or user), or the file is not the arena that was meant.
        """
        if handle.boot_id != boot_id():
            raise ArenaUnavailable("the arena is on another host")
        if process_start_time(handle.pid) != handle.start_time:
            raise ArenaUnavailable(f"process {handle.pid} is gone or not visible from here")
        size = handle.file_bytes
        with opened(f"/proc/{handle.pid}/fd/{handle.fd}") as fd:
            status = os.fstat(fd)
            if status.st_ino != handle.inode or status.st_size != size:
                raise ArenaUnavailable(f"file {handle.fd} of process {handle.pid} is another file")
            try:
                mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            except OSError as error:
                raise ArenaUnavailable(f"cannot map the arena: {error.strerror}") from error
        expected = _HEADER.pack(MAGIC, VERSION, OPEN, handle.nonce, handle.slots, handle.slot_bytes)
        if mapping[: _HEADER.size] != expected:
            raise ArenaUnavailable("the arena's header is not the one that was announced")
        return cls(mapping, handle)

    def alive(self) -> bool:
        """Whether the owner still runs and has not closed the arena."""
        if self._mapping is None:
            return False
        (state,) = struct.unpack_from("<I", self._mapping, _STATE_OFFSET)
        return state == OPEN and process_start_time(self._handle.pid) == self._handle.start_time

    def close(self) -> None:
        """Unmap, once the last tensor over the mapping is gone. Idempotent."""
        self._mapping = None
        self.data = self.data.new_empty((0, self._handle.slot_bytes))
        self.meta = self.meta.new_empty((0, 2))


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file of a peer read-only. Raises :class:`ArenaUnavailable`."""
    try:
        # By now that may be the number of a pipe, and opening one waits for who writes.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ArenaUnavailable(f"cannot open the arena's file: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)
