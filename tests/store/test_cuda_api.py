# SPDX-License-Identifier: Apache-2.0
"""The real CUDA API, as far as a host without a GPU shows it.

NVIDIA's bindings can be imported without a driver, where every call takes its arguments and then
fails: that proves names and argument types. Where the bindings are missing, only their absence is
tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch

from xinference_xavier.store.cuda import (
    IPC_GRANULE,
    IPC_HANDLE_BYTES,
    Cuda,
    CudaApi,
    CudaError,
    Event,
    Stream,
)

STREAM, EVENT = Stream(5), Event(6)
HOST = torch.zeros(4096, dtype=torch.uint8)
TENSOR = Cuda._tensor

CALLS: dict[str, Callable[[Cuda], object]] = {
    "cudaMemGetInfo": lambda cuda: cuda.memory(),
    "cudaMalloc": lambda cuda: cuda.allocate(100),
    "cudaFree": lambda cuda: cuda.free(HOST),
    "cudaIpcGetMemHandle": lambda cuda: cuda.ipc_export(HOST),
    "cudaIpcOpenMemHandle": lambda cuda: cuda.ipc_open(bytes(IPC_HANDLE_BYTES), 100),
    "cudaIpcCloseMemHandle": lambda cuda: cuda.ipc_close(HOST),
    "cudaHostRegister": lambda cuda: cuda.host_register(HOST),
    "cudaHostUnregister": lambda cuda: cuda.host_unregister(HOST),
    "cudaPointerGetAttributes": lambda cuda: cuda.reachable(HOST),
    "cudaStreamCreateWithFlags": lambda cuda: cuda.stream_create(),
    "cudaStreamDestroy": lambda cuda: cuda.stream_destroy(STREAM),
    "cudaStreamWaitEvent": lambda cuda: cuda.stream_wait(STREAM, EVENT),
    "cudaEventCreateWithFlags": lambda cuda: cuda.event_create(),
    "cudaEventDestroy": lambda cuda: cuda.event_destroy(EVENT),
    "cudaEventRecord": lambda cuda: cuda.event_record(EVENT, STREAM),
    "cudaEventSynchronize": lambda cuda: cuda.event_synchronize(EVENT),
    "cudaMemcpyAsync": lambda cuda: cuda.memcpy(8, 16, 4, STREAM),
}


def has_bindings() -> bool:
    return (
        importlib.util.find_spec("cuda") is not None
        and importlib.util.find_spec("cuda.bindings") is not None
    )


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that believes in a device 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    uuids = ["first", "second"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )


class Handle:
    """A ``cudaIpcMemHandle_t``."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(bytes(range(64)), 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class Recorder:
    """Bindings without CUDA: every call succeeds, with the results given here."""

    cudaIpcMemHandle_t = Handle
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaMemoryType = SimpleNamespace(cudaMemoryTypeUnregistered=0)
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming, cudaEventBlockingSync = 2, 1
    cudaHostRegisterPortable, cudaHostRegisterMapped = 1, 2

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.results: dict[str, tuple[object, ...]] = {
            "cudaMemGetInfo": (3, 4),
            "cudaMalloc": (4096,),
            "cudaIpcGetMemHandle": (Handle(),),
            "cudaIpcOpenMemHandle": (8192,),
            "cudaPointerGetAttributes": (SimpleNamespace(type=0, devicePointer=0),),
            "cudaStreamCreateWithFlags": (11,),
            "cudaEventCreateWithFlags": (12,),
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        def call(*args: object) -> tuple[object, ...]:
            self.calls.append((name, *args))
            return (0, *self.results.get(name, ()))

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, torch_cuda: None) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(Cuda, "_tensor", lambda _, address, nbytes, undo: (address, nbytes))
    bindings = SimpleNamespace(runtime=made)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return made


@pytest.mark.skipif(has_bindings(), reason="cuda.bindings is installed")
def test_without_the_bindings_it_says_what_is_missing() -> None:
    with pytest.raises(CudaError, match=r"import cuda\.bindings: No module named"):
        Cuda(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(not has_bindings(), reason="cuda.bindings is not installed")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(CudaError, match="no CUDA device"):
        Cuda(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(not has_bindings(), reason="cuda.bindings is not installed")
@pytest.mark.usefixtures("torch_cuda")
@pytest.mark.parametrize("name", CALLS)
def test_the_bindings_take_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import runtime

    class Device0:
        """The bindings, except that the device can be chosen."""

        def __getattr__(self, attribute: str) -> object:
            if attribute == "cudaSetDevice":
                return lambda _: (0,)
            return getattr(runtime, attribute)

    monkeypatch.setattr(sys.modules["cuda.bindings"], "runtime", Device0())
    cuda = Cuda(torch.device("cuda", 0))
    with pytest.raises(CudaError) as failed:
        CALLS[name](cuda)
    assert failed.value.call == name
    assert failed.value.name in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice")


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_made_on_the_devices_own_behalf(name: str, recorder: Recorder) -> None:
    cuda = Cuda(torch.device("cuda", 1))
    recorder.calls.clear()
    CALLS[name](cuda)
    assert recorder.calls[0] == ("cudaSetDevice", 1)
    assert recorder.calls[1][0] == name
    assert len(recorder.calls) == 2


def test_results_are_what_cuda_returned(recorder: Recorder) -> None:
    cuda = Cuda(torch.device("cuda", 0))
    assert cuda.memory() == (3, 4)
    assert cuda.allocate(100) == (4096, 100)
    assert cuda.ipc_export(HOST) == bytes(range(64))
    assert cuda.ipc_open(bytes(64), 100) == (8192, 100)
    assert cuda.stream_create() == 11
    assert cuda.event_create() == 12


def test_errors_name_the_call_and_are_taken_away(recorder: Recorder) -> None:
    cuda = Cuda(torch.device("cuda", 0))

    class Error(int):
        name = "cudaErrorInvalidValue"

    recorder.cudaFree = lambda address: (Error(1),)
    with pytest.raises(CudaError, match="cudaFree: cudaErrorInvalidValue"):
        cuda.free(HOST)
    assert recorder.calls[-1] == ("cudaGetLastError",)


def test_allocations_are_whole_granules(recorder: Recorder) -> None:
    cuda = Cuda(torch.device("cuda", 0))
    for asked, taken in ((1, 1), (IPC_GRANULE, 1), (IPC_GRANULE + 1, 2)):
        cuda.allocate(asked)
        assert recorder.calls[-1] == ("cudaMalloc", taken * IPC_GRANULE)


@pytest.mark.parametrize(
    ("make", "undo", "address"),
    [
        (lambda cuda: cuda.allocate(100), "cudaFree", 4096),
        (lambda cuda: cuda.ipc_open(bytes(64), 100), "cudaIpcCloseMemHandle", 8192),
    ],
)
@pytest.mark.parametrize("problem", ["refused", "a copy was made"])
def test_memory_that_torch_does_not_take_is_given_back(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Cuda], object],
    undo: str,
    address: int,
    problem: str,
) -> None:
    devices: list[torch.device] = []

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        devices.append(device)
        assert memory.__cuda_array_interface__["data"] == (address, False)
        if problem == "refused":
            raise RuntimeError(problem)
        return HOST

    monkeypatch.setattr(Cuda, "_tensor", TENSOR)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(CudaError, match=rf"torch\.as_tensor: {problem}"):
        make(Cuda(torch.device("cuda", 1)))
    assert recorder.calls[-1] == (undo, address)
    assert devices == [torch.device("cuda", 1)]


def test_a_launch_leaves_no_context_on_the_devices_of_its_threads_choice(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []

    @contextlib.contextmanager
    def entered(what: object) -> Iterator[None]:
        order.append(what)
        yield
        order.append(("left", what))

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))

    def kernel(*args: object, **constants: object) -> None:
        order.append((args, constants))

    device = torch.device("cuda", 1)
    cuda = Cuda(device)
    order.clear()
    cuda.launch({(3,): kernel}, 3, (8,), {"WORD": 1}, STREAM)
    side = (STREAM, device)
    # Torch goes back to the thread's own device with the stream: that must be this one by then.
    assert order == [device, side, ((8,), {"WORD": 1}), ("left", side), ("left", device)]


def test_side_streams_wait_for_no_default_one_and_events_let_their_waiters_sleep(
    recorder: Recorder,
) -> None:
    cuda = Cuda(torch.device("cuda", 0))
    cuda.stream_create()
    assert recorder.calls[-1] == ("cudaStreamCreateWithFlags", 1)
    cuda.event_create()
    assert recorder.calls[-1] == ("cudaEventCreateWithFlags", 3)


@pytest.mark.parametrize(
    ("uuid", "expected"), [("first", True), ("second", False), ("a third", None)]
)
def test_peer_access_tells_apart_what_is_unreachable_and_what_is_not_seen(
    recorder: Recorder, uuid: str, expected: bool | None
) -> None:
    recorder.results["cudaDeviceCanAccessPeer"] = (0,)
    assert Cuda(torch.device("cuda", 0)).peer_access(uuid) is expected


@pytest.mark.parametrize(
    ("kind", "pointer", "expected"),
    [
        (1, HOST.data_ptr(), True),
        (1, HOST.data_ptr() + 64, False),
        (0, 0, False),
        (0, HOST.data_ptr(), False),
    ],
    ids=["at-its-address", "elsewhere", "not-registered", "registered-otherwise"],
)
def test_host_memory_is_reachable_if_it_is_registered_and_at_its_own_address(
    recorder: Recorder, kind: int, pointer: int, expected: bool
) -> None:
    found = SimpleNamespace(type=kind, devicePointer=pointer)
    recorder.results["cudaPointerGetAttributes"] = (found,)
    assert Cuda(torch.device("cuda", 0)).reachable(HOST) is expected


def test_a_handle_of_another_size_is_refused_before_any_call(recorder: Recorder) -> None:
    cuda = Cuda(torch.device("cuda", 0))
    with pytest.raises(CudaError, match="a handle of 3 bytes"):
        cuda.ipc_open(b"abc", 100)


def test_real_and_fake_have_the_same_calls() -> None:
    protocol = {name for name in vars(CudaApi) if not name.startswith("_")}
    assert protocol <= set(vars(Cuda))
    assert protocol <= set(vars(fake_cuda.FakeCuda))


def test_a_host_without_cuda_imports_neither_triton_nor_the_bindings() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import xinference_xavier.store.cuda_device, xinference_xavier.store.device_arena\n"
        "import xinference_xavier.store.pinning\n"
        "assert not {'triton', 'cuda.bindings'} & (set(sys.modules) - before)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
