# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC on a fake CUDA: right bytes between processes, mapped once, and unmapped in time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_peer import BLOCKS, Peer, content, make_cache

from tests.store.fake_cuda import MAPPING_CALLS, FakeCuda
from tests.waiting import WAIT_S, drain, wait_until
from xinference_xavier.store import device_arena
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.device import IntArray
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import LoadJob, LoadSegment, SegmentResult, Tier
from xinference_xavier.transport.base import (
    Gpu,
    TransferFailed,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.cuda_ipc import CudaIpcConnection, CudaIpcTransport
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import host_id

H, D = int(Tier.HOST), int(Tier.DEVICE)
SLOT_BYTES = 4096


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer("cuda_ipc", "gpu")
    yield made
    made.close()


@pytest.fixture
def mortal() -> Iterator[Peer]:
    made = Peer("cuda_ipc", "gpu")
    yield made
    made.close()


class PausingDevice(CudaDevice):
    """Calls ``pause`` between the start of a copy out of slots and the wait for it."""

    pause = staticmethod(lambda: None)

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        super().scatter(data, slots, block_ids)
        self.pause()


class Reader:
    """A worker with its KV cache on a fake GPU and a small host tier."""

    def __init__(
        self, peer: Peer, *, choice: str = "cuda_ipc", reap_s: float = 60.0, **gpu: object
    ) -> None:
        self.tensor, self.layout, views = make_cache()
        self.cuda = FakeCuda(**gpu)
        self.device = PausingDevice(self.layout, views, self.cuda)
        self.arena = Arena.create(2, self.layout.slot_bytes, "reader")
        staging = {Tier.HOST: range(2)}
        self.peers = {1: peer.handle}
        self.transports = Transports.start(
            choice=choice,
            arenas={Tier.HOST: self.arena},
            staging=staging,
            host="127.0.0.1",
            layout_digest=self.layout.digest(),
            gpu=Gpu(self.cuda, self.device),
        )
        self.engine = LoadEngine(
            layout=self.layout,
            arenas={Tier.HOST: self.arena},
            device=self.device,
            verify="off",
            staging=staging,
            transports=self.transports,
            reap_s=reap_s,
        )
        self.cuda.calls.clear()

    def load(self, *rows: tuple[int, int, int, int]) -> SegmentResult:
        table = np.array(rows, dtype=np.int64)
        self.engine.submit(LoadJob(1, "r", (LoadSegment(1, table),), WAIT_S), self.peers)
        (result,) = drain(self.engine)
        return result.segments[0]

    def count(self, call: str) -> int:
        return self.cuda.names().count(call)

    def close(self) -> None:
        self.engine.close(WAIT_S)
        self.transports.close()
        self.device.close()
        self.arena.close()
        self.cuda.check_balanced()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Reader]:
    def made(*args: object, **kwargs: object) -> Reader:
        reader = Reader(*args, **kwargs)
        request.addfinalizer(reader.close)
        return reader

    return made


# --- between two processes -----------------------------------------------------------------------


def test_blocks_of_both_tiers_arrive_byte_for_byte(peer: Peer, make: Callable[..., Reader]) -> None:
    reader = make(peer)
    slots = [5, 1, 2, 1, 7]
    result = reader.load(*[(H if i % 2 else D, s, s + 1, i) for i, s in enumerate(slots)])
    assert (result.failed_rows, result.reason) == (set(), None)
    assert result.transport == "cuda_ipc+shm"
    for block, slot in enumerate(slots):
        expected = content(slot + 1, reader.layout).tobytes()
        assert reader.tensor[block].numpy().tobytes() == expected
    assert not reader.tensor[BLOCKS - 1].any()
    assert reader.transports.take_refusals() == {}


def test_an_arena_is_mapped_with_the_first_load_and_once(
    peer: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(peer)
    assert reader.count("ipc_open") == 0
    for _ in range(3):
        assert reader.load((D, 2, 3, 0)).transport == "cuda_ipc"
    assert (reader.count("ipc_open"), reader.count("ipc_close")) == (1, 0)
    reader.engine.close(WAIT_S)
    assert (reader.count("ipc_open"), reader.count("ipc_close")) == (1, 1)


def test_a_load_from_a_mapped_peer_is_quick(peer: Peer, make: Callable[..., Reader]) -> None:
    reader = make(peer)
    reader.load((D, 2, 3, 0))
    assert reader.engine._links.mapped(1, peer.handle, [Tier.DEVICE, Tier.HOST])


def test_a_slot_that_was_reassigned_during_the_copy_delivers_nothing(
    peer: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(peer)
    reader.device.pause = lambda: peer.ask("write", D, 3, 77)
    result = reader.load((D, 2, 3, 0), (D, 3, 4, 1))
    reader.device.pause = lambda: None
    assert (result.failed_rows, result.reason) == ({1}, "generation")
    assert reader.load((D, 3, 77, 1)).failed_rows == set()
    assert reader.tensor[1].numpy().tobytes() == content(77, reader.layout).tobytes()
    peer.ask("write", D, 3, 4)


def test_a_killed_peer_is_unmapped_without_a_load(
    mortal: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(mortal, reap_s=0.01)
    assert reader.load((D, 2, 3, 0)).failed_rows == set()
    mortal.kill()
    wait_until(lambda: reader.count("ipc_close") == 1)
    result = reader.load((D, 2, 3, 1))
    assert (result.failed_rows, result.reason) == ({0}, "unavailable")


def test_a_peer_that_closes_is_unmapped_and_frees_its_memory_after_that(
    mortal: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(mortal, reap_s=0.01)
    assert reader.load((D, 2, 3, 0)).failed_rows == set()
    mortal.ask("close")  # waits for the reader, which is not asked
    assert reader.count("ipc_close") == 1


def test_unmapping_comes_after_the_wait_for_the_last_copy(
    mortal: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(mortal)
    reader.load((H, 2, 3, 0))

    def die_during_the_copy() -> None:
        mortal.kill()
        reader.engine._links.reap()
        assert reader.count("ipc_close") == 0

    reader.device.pause = die_during_the_copy
    reader.cuda.calls.clear()
    assert reader.load((D, 2, 3, 1)).failed_rows == set()
    wait_until(lambda: reader.count("ipc_close") == 1)
    names = reader.cuda.names()
    last = len(names) - 1 - names[::-1].index("event_synchronize")
    assert names.index("launch") < last < names.index("ipc_close")
    assert reader.tensor[1].numpy().tobytes() == content(3, reader.layout).tobytes()


def test_a_copy_that_cuda_refuses_fails_its_rows_and_the_path_is_opened_anew(
    peer: Peer, make: Callable[..., Reader]
) -> None:
    reader = make(peer)
    reader.load((D, 2, 3, 0))
    reader.cuda.fail("launch", "cudaErrorIllegalAddress")
    result = reader.load((D, 2, 3, 1))
    assert (result.failed_rows, result.reason) == ({0}, "transfer")
    # Another load thread may be about to prepare the link, and is its last user then.
    wait_until(lambda: reader.count("ipc_close") == 1)
    assert reader.load((D, 2, 3, 1)).failed_rows == set()


def test_a_path_that_cuda_refuses_again_and_again_is_left_for_the_next(
    make: Callable[..., Reader],
) -> None:
    peer = Peer("auto", "gpu")
    try:
        reader = make(peer, choice="auto")
        for _ in range(2):
            reader.cuda.fail("launch", "cudaErrorIllegalAddress")
            assert reader.load((D, 2, 3, 1)).failed_rows == {0}
        result = reader.load((D, 2, 3, 1), (H, 4, 5, 2))
        assert (result.failed_rows, result.transport) == (set(), "shm+xoscar")
        for block, generation in ((1, 3), (2, 5)):
            expected = content(generation, reader.layout).tobytes()
            assert reader.tensor[block].numpy().tobytes() == expected
        refusals = reader.transports.take_refusals()
    finally:
        peer.close()
    assert any(line.startswith("cuda_ipc: demoted") for line in refusals)
    assert any(line.startswith("nixl: the peer does not offer its DEVICE") for line in refusals)


# --- refusals ------------------------------------------------------------------------------------


class Foreign(dict):  # type: ignore[type-arg]
    """No arena is of this process: they are all mapped by IPC."""

    def get(self, key: object, default: object = None) -> None:
        return None


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test play both processes."""
    monkeypatch.setattr(device_arena, "_local", Foreign())


class Owner:
    """A device arena of another process."""

    def __init__(self, number: int = 1) -> None:
        self.cuda = FakeCuda(uuid=f"gpu-{number}", process=number)
        self.arena = DeviceArena.create(4, SLOT_BYTES, "owner", self.cuda)
        self.handle = WorkerHandle(
            0, host_id(), "same", {Tier.DEVICE: self.arena.handle()}, None, None
        )

    def seen(self, **changes: object) -> WorkerHandle:
        """Return the handle with another arena handle."""
        arena = self.handle.arenas[Tier.DEVICE]
        device = {k: v for k, v in changes.items() if k in {"uuid", "nbytes", "ipc", "reason"}}
        rest = {k: v for k, v in changes.items() if k not in device}
        assert arena.device is not None
        arena = dataclasses.replace(
            arena, device=dataclasses.replace(arena.device, **device), **rest
        )
        return dataclasses.replace(self.handle, arenas={Tier.DEVICE: arena})

    def close(self) -> None:
        self.arena.close(WAIT_S)
        self.cuda.check_balanced()


@pytest.fixture
def owner(apart: None) -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda(process=99)
    yield made
    made.check_balanced()


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "expandable or otherwise not exportable": (
        {"ipc": None, "reason": "cudaIpcGetMemHandle: cudaErrorInvalidValue"},
        "cannot be shared: cudaIpcGetMemHandle: cudaErrorInvalidValue",
    ),
    "a GPU without peer access": ({"uuid": "far"}, "cannot reach the memory of GPU far"),
    "another memory behind the handle": ({"nonce": bytes(16)}, "header is not the one"),
    "a process that is gone": ({"start_time": 1}, "gone or not visible"),
    "another container": ({"pid": 2**22 - 1}, "gone or not visible"),
    "a rebooted host": ({"boot_id": "other"}, "another host"),
    "more bytes than there are": ({"nbytes": 1 << 30}, "cannot be mapped: "),
    "a handle that is none": ({"ipc": bytes(64)}, "cannot be mapped: "),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_tells_its_reason_and_leaves_nothing(owner: Owner, case: str) -> None:
    changes, reason = REFUSALS[case]
    cuda = FakeCuda(process=99, peers={"far": False})
    with pytest.raises(TransportUnavailable, match=reason):
        CudaIpcTransport(cuda).connect(owner.seen(**changes), Tier.DEVICE)
    cuda.check_balanced()


def test_another_host_is_refused_before_anything_is_tried(owner: Owner, cuda: FakeCuda) -> None:
    elsewhere = dataclasses.replace(owner.handle, host_id="elsewhere")
    with pytest.raises(TransportUnavailable, match="another host"):
        CudaIpcTransport(cuda).connect(elsewhere, Tier.DEVICE)
    assert cuda.calls == []


@pytest.mark.parametrize("call", MAPPING_CALLS)
def test_whatever_call_of_cuda_fails_the_peer_is_unavailable_and_nothing_is_left(
    owner: Owner, cuda: FakeCuda, call: str
) -> None:
    transport = CudaIpcTransport(cuda)
    cuda.fail(call)
    with pytest.raises(TransportUnavailable, match="cudaErrorUnknown"):
        transport.connect(owner.handle, Tier.DEVICE)
    cuda.check_balanced()
    transport.connect(owner.handle, Tier.DEVICE).close()


@pytest.mark.parametrize("peers", [{"gpu-1": True}, {}])
def test_a_gpu_that_can_be_reached_or_is_not_visible_here_is_mapped(
    owner: Owner, peers: dict[str, bool]
) -> None:
    cuda = FakeCuda(process=99, peers=peers)
    connection = CudaIpcTransport(cuda).connect(owner.handle, Tier.DEVICE)
    view = connection.view()
    assert view is not None
    assert view.data.shape == (4, SLOT_BYTES)
    assert view.data.is_cuda
    assert not view.meta.is_cuda
    connection.close()
    cuda.check_balanced()


def test_only_device_memory_is_served(owner: Owner, cuda: FakeCuda) -> None:
    transport = CudaIpcTransport(cuda)
    host = Arena.create(1, SLOT_BYTES, "host")
    assert transport.serves(owner.arena.handle())
    assert not transport.serves(host.handle())
    host.close()


# --- lifecycle -----------------------------------------------------------------------------------


def test_connections_to_one_arena_share_its_mapping(owner: Owner, cuda: FakeCuda) -> None:
    transport = CudaIpcTransport(cuda)
    first, second = (transport.connect(owner.handle, Tier.DEVICE) for _ in range(2))
    assert cuda.names().count("ipc_open") == 1
    first.close()
    first.close()
    assert (first.view(), first.alive()) == (None, False)
    assert second.view() is not None
    assert second.alive()
    assert "ipc_close" not in cuda.names()
    second.close()
    assert cuda.names().count("ipc_close") == 1


def test_a_mapping_of_an_arena_that_was_closed_serves_no_new_connection(
    apart: None, cuda: FakeCuda
) -> None:
    owner = Owner()
    transport = CudaIpcTransport(cuda)
    held = transport.connect(owner.handle, Tier.DEVICE)
    owner.arena.close()  # leaves the memory to the end of the process, for it is mapped
    assert not held.alive()
    with pytest.raises(TransportUnavailable, match="closed its arena"):
        transport.connect(owner.handle, Tier.DEVICE)
    held.close()


def test_a_mapping_that_cuda_does_not_unmap_is_told_and_forgotten(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(process=99)
    transport = CudaIpcTransport(cuda)
    connection = transport.connect(owner.handle, Tier.DEVICE)
    cuda.fail("ipc_close", "cudaErrorIllegalAddress")
    connection.close()
    assert "not unmapped: ipc_close: cudaErrorIllegalAddress" in caplog.text
    assert transport._mappings == {}


def test_a_closed_transport_maps_nothing_and_leaves_what_is_used(
    owner: Owner, cuda: FakeCuda
) -> None:
    transport = CudaIpcTransport(cuda)
    used = transport.connect(owner.handle, Tier.DEVICE)
    transport.close()
    transport.close()
    assert used.alive()
    with pytest.raises(TransportUnavailable, match="closed"):
        transport.connect(owner.handle, Tier.DEVICE)
    with pytest.raises(TransferFailed):
        used.fetch([0], [0], deadline=time.monotonic() + 1)
    used.close()


class Sharing(RuleBasedStateMachine):
    """Any order of connecting, closing and failing, over some arenas."""

    @initialize()
    def start(self) -> None:
        self.before = device_arena._local
        device_arena._local = Foreign()
        self.cuda = FakeCuda(process=99)
        self.transport = CudaIpcTransport(self.cuda)
        self.owners = [Owner(number) for number in range(3)]
        self.open: list[tuple[int, CudaIpcConnection]] = []

    @rule(which=st.integers(0, 2), fails=st.sampled_from([None, None, "ipc_open", "memcpy"]))
    def connect(self, which: int, fails: str | None) -> None:
        mapped = which in {number for number, _ in self.open}
        if fails is not None and not mapped:
            self.cuda.fail(fails)
            with pytest.raises(TransportUnavailable):
                self.transport.connect(self.owners[which].handle, Tier.DEVICE)
            return
        connection = self.transport.connect(self.owners[which].handle, Tier.DEVICE)
        self.open.append((which, connection))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        self.open.pop(index)[1].close()

    @invariant()
    def what_is_used_is_mapped_once_and_nothing_else(self) -> None:
        used = {number for number, _ in self.open}
        assert len(self.cuda._opened) == len(used)
        for number, connection in self.open:
            view = connection.view()
            assert view is not None
            assert view.meta.data_ptr() != self.owners[number].arena.meta.data_ptr()
            assert connection.alive()

    def teardown(self) -> None:
        for _, connection in self.open:
            connection.close()
        self.cuda.check_balanced()
        for owner in self.owners:
            owner.close()
        device_arena._local = self.before


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


# --- hosts without CUDA --------------------------------------------------------------------------


def test_a_host_without_a_gpu_imports_nothing_of_ours_for_it() -> None:
    script = """
import sys
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.select import Transports

arena = Arena.create(2, 64, "test")
Transports.start(
    choice="auto",
    arenas={Tier.HOST: arena},
    staging={Tier.HOST: range(1, 2)},
    host="127.0.0.1",
    layout_digest="",
).close()
wanted = ("transport.cuda_ipc", "store.device_arena", "store.cuda_device", "store.kernels")
print([name for name in wanted if f"xinference_xavier.{name}" in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
