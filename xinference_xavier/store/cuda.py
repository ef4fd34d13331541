# SPDX-License-Identifier: Apache-2.0
"""Every call of the CUDA API that the package makes, behind one Protocol.

:class:`Cuda` is the real one, over ``cuda.bindings`` (PyTorch's CUDA builds depend on it) and
``torch.cuda``; neither is imported before one is made, so that a host without CUDA needs nothing
of it. Tests use a fake of :class:`CudaApi` that records calls and checks that they balance.

Streams and events are raw handles, ``cudaStream_t`` and ``cudaEvent_t`` as int: whoever makes one
destroys it. Every method may be called from any thread and makes its device the current one
itself. A call that fails raises :class:`CudaError`; as CUDA has it, the error may be that of
earlier work of the same device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, NewType, Protocol

import torch

Stream = NewType("Stream", int)
Event = NewType("Event", int)

IPC_HANDLE_BYTES: Final = 64
"""Size of a ``cudaIpcMemHandle_t``."""

IPC_GRANULE: Final = 2 << 20
"""Allocations are rounded up to this: CUDA may carve smaller ones out of a common block, and an
IPC handle then exports the whole block, from its start."""


class CudaError(RuntimeError):
    """A CUDA call failed. ``call`` is its name and ``name`` the error's, as in CUDA's manual."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call = call
        self.name = name


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What a peer on the same host needs to map device memory.

    ``uuid`` names the GPU and ``nbytes`` counts the bytes in use from the allocation's start.
    ``ipc`` is the CUDA IPC handle; where the memory cannot be shared it is None, and ``reason``
    says why.
    """

    uuid: str
    nbytes: int
    ipc: bytes | None
    reason: str | None = None


class CudaApi(Protocol):
    """The CUDA API of one device, as far as the package uses it. See :class:`Cuda`."""

    @property
    def device(self) -> torch.device:
        """The device of the KV cache, which all calls are about."""

    def uuid(self) -> str:
        """Return the name of the GPU that is equal in all processes of the host."""

    def memory(self) -> tuple[int, int]:
        """Return the device's free and total bytes."""

    def reserved(self) -> int:
        """Return the bytes that torch's allocator of this process holds of the device."""

    def peer_access(self, uuid: str) -> bool | None:
        """Whether this device can read that GPU's memory; None where it is not visible here."""

    # --- memory ----------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return device memory, uint8 ``[nbytes]``, that no caching allocator knows."""

    def free(self, memory: torch.Tensor) -> None:
        """Give back what :meth:`allocate` returned. Waits for all work of the device."""

    def ipc_export(self, memory: torch.Tensor) -> bytes:
        """Return the handle with which another process maps what :meth:`allocate` returned."""

    def ipc_open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Map another process's memory, uint8 ``[nbytes]``, with peer access if need be.

        The tensor is of this device, whichever GPU the memory is on: use its address. Fails for a
        handle of the own process.
        """

    def ipc_close(self, memory: torch.Tensor) -> None:
        """Unmap what :meth:`ipc_open` returned. Waits for other work of the device, perhaps.

        No copy of that memory may be running.
        """

    def host_register(self, memory: torch.Tensor) -> None:
        """Pin host memory, so that kernels reach it at its own address."""

    def host_unregister(self, memory: torch.Tensor) -> None:
        """Unpin it."""

    def reachable(self, memory: torch.Tensor) -> bool:
        """Whether kernels of this device may use the tensor's address."""

    # --- order -----------------------------------------------------------------------------

    def compute_stream(self) -> Stream:
        """Return the calling thread's current stream: on a worker's main thread, the engine's."""

    def stream_create(self) -> Stream:
        """Return a new stream that does not wait for the default one."""

    def stream_destroy(self, stream: Stream) -> None:
        """Destroy a stream; work in it still ends."""

    def stream_wait(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream wait for what the event has recorded by now."""

    def event_create(self) -> Event:
        """Return a new event without timing, whose waiters sleep."""

    def event_destroy(self, event: Event) -> None:
        """Destroy an event; recorded waits stay in force."""

    def event_record(self, event: Event, stream: Stream) -> None:
        """Record the stream's work so far."""

    def event_synchronize(self, event: Event) -> None:
        """Wait, without the interpreter lock, until the recorded work is complete."""

    # --- work ------------------------------------------------------------------------------

    def memcpy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between two addresses, each of device or host memory."""

    def launch(
        self,
        kernel: Any,
        programs: int,
        args: tuple[Any, ...],
        constants: dict[str, Any],
        stream: Stream,
    ) -> None:
        """Queue ``programs`` programs of a Triton kernel; ``constants`` are its constexprs."""


class _Foreign:
    """Memory that torch does not own, in the form that torch takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Cuda:
    """The real :class:`CudaApi` of one device; raises :class:`CudaError` where CUDA is missing."""

    def __init__(self, device: torch.device) -> None:
        """Bind to a device; one without an index is the calling thread's current one."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise CudaError("import cuda.bindings", str(error)) from error
        if not torch.cuda.is_available():
            raise CudaError("torch.cuda", "no CUDA device, or a PyTorch without CUDA")
        self._cudart: Any = runtime
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)

    def _call(self, name: str, *args: object) -> tuple[Any, ...]:
        with torch.cuda.device(self._device):
            # The bindings have a CUDA runtime of their own, with a current device of its own.
            self._checked("cudaSetDevice", self._device.index)
            return self._checked(name, *args)

    def _checked(self, name: str, *args: object) -> tuple[Any, ...]:
        error, *results = getattr(self._cudart, name)(*args)
        if int(error):
            # Takes the error away: a later launch would report it a second time.
            self._cudart.cudaGetLastError()
            raise CudaError(name, error.name)
        return tuple(results)

    @property
    def device(self) -> torch.device:
        """See :class:`CudaApi`."""
        return self._device

    def uuid(self) -> str:
        """See :class:`CudaApi`."""
        return _uuid(self._device.index)

    def memory(self) -> tuple[int, int]:
        """See :class:`CudaApi`."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def reserved(self) -> int:
        """See :class:`CudaApi`."""
        return int(torch.cuda.memory_reserved(self._device))

    def peer_access(self, uuid: str) -> bool | None:
        """See :class:`CudaApi`."""
        for index in range(torch.cuda.device_count()):
            if _uuid(index) == uuid:
                if index == self._device.index:
                    return True
                return bool(self._call("cudaDeviceCanAccessPeer", self._device.index, index)[0])
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See :class:`CudaApi`."""
        size = -(-nbytes // IPC_GRANULE) * IPC_GRANULE
        (address,) = self._call("cudaMalloc", size)
        return self._tensor(int(address), nbytes, "cudaFree")

    def free(self, memory: torch.Tensor) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaFree", memory.data_ptr())

    def ipc_export(self, memory: torch.Tensor) -> bytes:
        """See :class:`CudaApi`."""
        (handle,) = self._call("cudaIpcGetMemHandle", memory.data_ptr())
        return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """See :class:`CudaApi`."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError("cudaIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        native = self._cudart.cudaIpcMemHandle_t()
        ctypes.memmove(int(native.getPtr()), handle, IPC_HANDLE_BYTES)
        (address,) = self._call(
            "cudaIpcOpenMemHandle", native, self._cudart.cudaIpcMemLazyEnablePeerAccess
        )
        return self._tensor(int(address), nbytes, "cudaIpcCloseMemHandle")

    def ipc_close(self, memory: torch.Tensor) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaIpcCloseMemHandle", memory.data_ptr())

    def host_register(self, memory: torch.Tensor) -> None:
        """See :class:`CudaApi`."""
        self._call(
            "cudaHostRegister",
            memory.data_ptr(),
            memory.nbytes,
            self._cudart.cudaHostRegisterPortable | self._cudart.cudaHostRegisterMapped,
        )

    def host_unregister(self, memory: torch.Tensor) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaHostUnregister", memory.data_ptr())

    def reachable(self, memory: torch.Tensor) -> bool:
        """See :class:`CudaApi`."""
        if memory.is_cuda:
            return True
        (found,) = self._call("cudaPointerGetAttributes", memory.data_ptr())
        # Where a device sees registered memory at another address, it counts as out of reach, and
        # so does memory that a GPU could page in by faults.
        registered = int(found.type) != int(self._cudart.cudaMemoryType.cudaMemoryTypeUnregistered)
        return registered and int(found.devicePointer or 0) == memory.data_ptr()

    def compute_stream(self) -> Stream:
        """See :class:`CudaApi`."""
        return Stream(torch.cuda.current_stream(self._device).cuda_stream)

    def stream_create(self) -> Stream:
        """See :class:`CudaApi`."""
        (stream,) = self._call("cudaStreamCreateWithFlags", self._cudart.cudaStreamNonBlocking)
        return Stream(int(stream))

    def stream_destroy(self, stream: Stream) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaStreamDestroy", stream)

    def stream_wait(self, stream: Stream, event: Event) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def event_create(self) -> Event:
        """See :class:`CudaApi`."""
        flags = self._cudart.cudaEventDisableTiming | self._cudart.cudaEventBlockingSync
        (event,) = self._call("cudaEventCreateWithFlags", flags)
        return Event(int(event))

    def event_destroy(self, event: Event) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaEventDestroy", event)

    def event_record(self, event: Event, stream: Stream) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaEventRecord", event, stream)

    def event_synchronize(self, event: Event) -> None:
        """See :class:`CudaApi`."""
        self._call("cudaEventSynchronize", event)

    def memcpy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """See :class:`CudaApi`."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def launch(
        self,
        kernel: Any,
        programs: int,
        args: tuple[Any, ...],
        constants: dict[str, Any],
        stream: Stream,
    ) -> None:
        """See :class:`CudaApi`."""
        side = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
        # Triton launches into torch's current stream, and raises all sorts of exceptions. Without
        # the device around it, leaving the stream would make a context on the thread's own one.
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            try:
                kernel[(programs,)](*args, **constants)
            except Exception as error:
                raise CudaError("kernel launch", f"{type(error).__name__}: {error}") from error

    def _tensor(self, address: int, nbytes: int, undo: str) -> torch.Tensor:
        """Return memory as torch sees it; where torch does not take it, ``undo`` gives it back."""
        try:
            # With its number torch takes the device for granted. Otherwise it takes the default
            # one, if such is set, or asks CUDA, which may not know that of a mapped GPU.
            tensor: torch.Tensor = torch.as_tensor(_Foreign(address, nbytes), device=self._device)
            if tensor.data_ptr() != address:
                raise RuntimeError("a copy was made")
        except Exception as error:
            self._call(undo, address)
            raise CudaError("torch.as_tensor", str(error)) from error
        return tensor


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
