# SPDX-License-Identifier: Apache-2.0
"""A CUDA API whose device memory is host memory, and which is as late as CUDA may be.

Queued work (copies, launches) runs only when something waits for it, in the order of its stream
and behind the events that the stream waits for. Every call is recorded in ``calls``; any of them
can be made to fail; ``check_balanced()`` at the end of a test says what was never given back.

Device memory is a memfd, which an IPC handle names, so that IPC works between real processes. Its
tensors refuse ``numpy()`` as CUDA tensors do; :func:`host` looks into them all the same, once the
work that writes them was waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from xinference_xavier.store.cuda import IPC_HANDLE_BYTES, CudaError, Event, Stream

COMPUTE = Stream(7)
"""The compute stream of every fake."""

DEVICE = torch.device("cuda", 0)

MAPPING_CALLS = (
    "peer_access",
    "ipc_open",
    "stream_create",
    "event_create",
    "memcpy",
    "event_record",
    "event_synchronize",
)
"""Everything that mapping a peer's arena asks of CUDA, in this order."""

_HANDLE = struct.Struct("<8sQiiQQ")
_MAGIC = b"FAKECUDA"

_FREED = 0xDD


class FakeDeviceTensor(torch.Tensor):
    """Host memory that must not be touched as such."""

    device: ClassVar[torch.device] = DEVICE
    is_cuda: ClassVar[bool] = True
    is_cpu: ClassVar[bool] = False

    def numpy(self, *args: object, **kwargs: object) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"fake device {host(self)!r}"


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as device memory: the KV cache of a test."""
    return tensor.as_subclass(FakeDeviceTensor)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as host memory, to look at it in a test."""
    return tensor.as_subclass(torch.Tensor)


@dataclass(frozen=True)
class _Wait:
    """A stream's wait for another's first ``count`` pieces of work."""

    stream: _Queue
    count: int


@dataclass(eq=False)
class _Queue:
    """One stream's work: ``done`` pieces ran, ``work`` is left."""

    work: list[Callable[[], object] | _Wait] = field(default_factory=list)
    done: int = 0

    @property
    def issued(self) -> int:
        return self.done + len(self.work)

    def run(self, count: int) -> None:
        while self.done < min(count, self.issued):
            piece = self.work[0]
            if isinstance(piece, _Wait):
                piece.stream.run(piece.count)
            del self.work[0]
            self.done += 1
            if not isinstance(piece, _Wait):
                piece()


@dataclass(eq=False)
class _Memory:
    fd: int
    mapping: mmap.mmap
    nbytes: int


class FakeCuda:
    """A :class:`~xinference_xavier.store.cuda.CudaApi`; see the module."""

    def __init__(
        self,
        *,
        uuid: str = "fake-gpu-0",
        total: int = 1 << 30,
        peers: Mapping[str, bool] | None = None,
        process: int | None = None,
        kernel: Any = None,
    ) -> None:
        """``peers`` are the other visible GPUs, and whether this one can read their memory.

        ``process`` stands for the process that this device's handles come from: two fakes of one
        process with different numbers can open each other's. ``kernel`` runs in place of the
        launched one (an interpreted copy of it); without it a numpy equivalent does.
        """
        self.calls: list[tuple[Any, ...]] = []
        self.total = total
        self.host_room: int | None = None
        """Bytes that can be registered; None is any number."""
        self._uuid = uuid
        self._peers = {uuid: True, **(peers or {})}
        self._process = os.getpid() if process is None else process
        self._kernel = kernel
        self._lock = threading.RLock()
        self._failures: dict[str, list[tuple[int, str]]] = {}
        self._allocated: dict[int, _Memory] = {}
        self._opened: dict[int, _Memory] = {}
        self._registered: dict[int, int] = {}
        self._streams: dict[Stream, _Queue] = {COMPUTE: _Queue()}
        self._destroyed: list[_Queue] = []
        self._events: dict[Event, _Wait | None] = {}
        self._next = 100

    # --- what tests use ----------------------------------------------------------------------

    def fail(self, call: str, name: str = "cudaErrorUnknown", *, after: int = 0) -> None:
        """Let one call of a method fail, once ``after`` more calls of it have passed."""
        self._failures.setdefault(call, []).append((after, name))

    def compute(self, work: Callable[[], object]) -> None:
        """Queue a piece of the engine's own work on the compute stream."""
        with self._lock:
            self._streams[COMPUTE].work.append(work)

    def run_compute(self, count: int | None = None) -> None:
        """Run the first ``count`` pieces of the engine's work, as its wait for tokens would."""
        with self._lock:
            queue = self._streams[COMPUTE]
            queue.run(queue.issued if count is None else count)

    def names(self) -> list[str]:
        """Return the names of the calls so far, in order."""
        return [call[0] for call in self.calls]

    def check_balanced(self) -> None:
        """Check that whatever was made, mapped, pinned or queued is gone."""
        with self._lock:
            left = {
                "allocated": [memory.nbytes for memory in self._allocated.values()],
                "mapped by IPC": [memory.nbytes for memory in self._opened.values()],
                "registered": list(self._registered.values()),
                "streams": [stream for stream in self._streams if stream != COMPUTE],
                "events": list(self._events),
            }
        assert not {what: which for what, which in left.items() if which}

    # --- the API: device ---------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return DEVICE

    def uuid(self) -> str:
        return self._uuid

    def reserved(self) -> int:
        with self._call("reserved"):
            return 0

    def memory(self) -> tuple[int, int]:
        with self._call("memory"):
            used = sum(memory.nbytes for memory in self._allocated.values())
            return self.total - used, self.total

    def peer_access(self, uuid: str) -> bool | None:
        with self._call("peer_access", uuid):
            return self._peers.get(uuid)

    # --- the API: memory ---------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self._call("allocate", nbytes):
            used = sum(memory.nbytes for memory in self._allocated.values())
            if used + nbytes > self.total:
                raise CudaError("cudaMalloc", "cudaErrorMemoryAllocation")
            fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            return self._map(fd, nbytes, self._allocated)

    def free(self, memory: torch.Tensor) -> None:
        with self._call("free", memory.data_ptr()):
            held = self._allocated.pop(memory.data_ptr(), None)
            if held is None:
                raise CudaError("cudaFree", "cudaErrorInvalidValue")
            self._run_all()
            # Whoever reads it still, here or through IPC, shall notice.
            held.mapping[:] = bytes([_FREED]) * held.nbytes
            os.close(held.fd)

    def ipc_export(self, memory: torch.Tensor) -> bytes:
        with self._call("ipc_export", memory.data_ptr()):
            held = self._allocated.get(memory.data_ptr())
            if held is None:
                raise CudaError("cudaIpcGetMemHandle", "cudaErrorInvalidValue")
            inode = os.fstat(held.fd).st_ino
            packed = _HANDLE.pack(_MAGIC, self._process, os.getpid(), held.fd, inode, held.nbytes)
            return packed.ljust(IPC_HANDLE_BYTES, b"\0")

    def ipc_open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        with self._call("ipc_open", nbytes):
            magic, process, pid, number, inode, size = _HANDLE.unpack_from(handle)
            if magic != _MAGIC or process == self._process:
                raise CudaError("cudaIpcOpenMemHandle", "cudaErrorDeviceUninitialized")
            try:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise CudaError("cudaIpcOpenMemHandle", "cudaErrorInvalidValue") from error
            status = os.fstat(fd)
            if status.st_ino != inode or nbytes > size:
                os.close(fd)
                raise CudaError("cudaIpcOpenMemHandle", "cudaErrorMapBufferObjectFailed")
            if any(os.fstat(memory.fd).st_ino == inode for memory in self._opened.values()):
                os.close(fd)
                raise CudaError("cudaIpcOpenMemHandle", "cudaErrorAlreadyMapped")
            return self._map(fd, nbytes, self._opened)

    def ipc_close(self, memory: torch.Tensor) -> None:
        with self._call("ipc_close", memory.data_ptr()):
            held = self._opened.pop(memory.data_ptr(), None)
            if held is None:
                raise CudaError("cudaIpcCloseMemHandle", "cudaErrorInvalidValue")
            os.close(held.fd)

    def host_register(self, memory: torch.Tensor) -> None:
        with self._call("host_register", memory.nbytes):
            room = self.host_room
            if room is not None and sum(self._registered.values()) + memory.nbytes > room:
                raise CudaError("cudaHostRegister", "cudaErrorMemoryAllocation")
            if memory.data_ptr() in self._registered:
                raise CudaError("cudaHostRegister", "cudaErrorHostMemoryAlreadyRegistered")
            self._registered[memory.data_ptr()] = memory.nbytes

    def host_unregister(self, memory: torch.Tensor) -> None:
        with self._call("host_unregister", memory.data_ptr()):
            if self._registered.pop(memory.data_ptr(), None) is None:
                raise CudaError("cudaHostUnregister", "cudaErrorHostMemoryNotRegistered")

    def reachable(self, memory: torch.Tensor) -> bool:
        with self._call("reachable"):
            return self._reachable(memory.data_ptr(), memory.nbytes)

    # --- the API: order ----------------------------------------------------------------------

    def compute_stream(self) -> Stream:
        return COMPUTE

    def stream_create(self) -> Stream:
        with self._call("stream_create"):
            self._next += 1
            stream = Stream(self._next)
            self._streams[stream] = _Queue()
            return stream

    def stream_destroy(self, stream: Stream) -> None:
        with self._call("stream_destroy", stream):
            # As with CUDA: its work still runs some time, and nobody waits for that here.
            self._destroyed.append(self._queue(stream, "cudaStreamDestroy"))
            del self._streams[stream]

    def stream_wait(self, stream: Stream, event: Event) -> None:
        with self._call("stream_wait", stream, event):
            queue = self._queue(stream, "cudaStreamWaitEvent")
            recorded = self._event(event, "cudaStreamWaitEvent")
            if recorded is not None:
                queue.work.append(recorded)

    def event_create(self) -> Event:
        with self._call("event_create"):
            self._next += 1
            event = Event(self._next)
            self._events[event] = None
            return event

    def event_destroy(self, event: Event) -> None:
        with self._call("event_destroy", event):
            self._event(event, "cudaEventDestroy")
            del self._events[event]

    def event_record(self, event: Event, stream: Stream) -> None:
        with self._call("event_record", event, stream):
            self._event(event, "cudaEventRecord")
            queue = self._queue(stream, "cudaEventRecord")
            self._events[event] = _Wait(queue, queue.issued)

    def event_synchronize(self, event: Event) -> None:
        with self._call("event_synchronize", event):
            recorded = self._event(event, "cudaEventSynchronize")
            if recorded is not None:
                recorded.stream.run(recorded.count)

    # --- the API: work -----------------------------------------------------------------------

    def memcpy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        with self._call("memcpy", target, source, nbytes, stream):
            queue = self._queue(stream, "cudaMemcpyAsync")
            self._check_range(target, nbytes)
            self._check_range(source, nbytes)
            queue.work.append(lambda: _copy(target, source, nbytes))

    def launch(
        self,
        kernel: Any,
        programs: int,
        args: tuple[Any, ...],
        constants: dict[str, Any],
        stream: Stream,
    ) -> None:
        with self._call("launch", programs, stream):
            queue = self._queue(stream, "cuLaunchKernel")

            def work() -> None:
                table, indices, data, slot_bytes, rows, *_ = args
                slots = host(indices)[rows : 2 * rows]
                extent = (int(slots.max()) + 1) * slot_bytes
                if not self._reachable(data, extent):
                    raise CudaError("cuLaunchKernel", "cudaErrorIllegalAddress")
                if self._kernel is not None:
                    self._kernel[(programs,)](host(table), host(indices), *args[2:], **constants)
                else:
                    copy_spans(*args, **constants)

            queue.work.append(work)

    # --- inside ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, call: str, *args: Any) -> Iterator[None]:
        with self._lock:
            self.calls.append((call, *args))
            waiting = self._failures.get(call, [])
            for i, (after, name) in enumerate(waiting):
                if after == 0:
                    del waiting[i]
                    raise CudaError(call, name)
                waiting[i] = (after - 1, name)
            yield

    def _map(self, fd: int, nbytes: int, kept: dict[int, _Memory]) -> torch.Tensor:
        mapping = mmap.mmap(fd, nbytes)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        kept[tensor.data_ptr()] = _Memory(fd, mapping, nbytes)
        return on_device(tensor)

    def _run_all(self) -> None:
        for queue in [*self._streams.values(), *self._destroyed]:
            queue.run(queue.issued)

    def _queue(self, stream: Stream, call: str) -> _Queue:
        if stream not in self._streams:
            raise CudaError(call, "cudaErrorInvalidResourceHandle")
        return self._streams[stream]

    def _event(self, event: Event, call: str) -> _Wait | None:
        if event not in self._events:
            raise CudaError(call, "cudaErrorInvalidResourceHandle")
        return self._events[event]

    def _device_ranges(self) -> Iterator[tuple[int, int]]:
        for kept in (self._allocated, self._opened):
            for start, memory in kept.items():
                yield start, memory.nbytes

    def _reachable(self, address: int, nbytes: int) -> bool:
        ranges = [*self._device_ranges(), *self._registered.items()]
        return any(start <= address and address + nbytes <= start + n for start, n in ranges)

    def _check_range(self, address: int, nbytes: int) -> None:
        for start, size in self._device_ranges():
            if start <= address < start + size and address + nbytes > start + size:
                raise CudaError("cudaMemcpyAsync", "cudaErrorInvalidValue")


def _copy(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def copy_spans(
    table: torch.Tensor,
    indices: torch.Tensor,
    data: int,
    slot_bytes: int,
    rows: int,
    *_: object,
    TO_SLOTS: bool,
    **__: object,
) -> None:
    """What the kernel of that name does, span by span."""
    spans = host(table).reshape(-1, 4).tolist()
    blocks, slots = np.asarray(host(indices)[: 2 * rows].tolist()).reshape(2, rows).tolist()
    for block, slot in zip(blocks, slots, strict=True):
        for base, stride, nbytes, offset in spans:
            span, packed = base + block * stride, data + slot * slot_bytes + offset
            _copy(*((packed, span) if TO_SLOTS else (span, packed)), nbytes)
