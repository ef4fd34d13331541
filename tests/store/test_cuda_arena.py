# SPDX-License-Identifier: Apache-2.0
"""Device arenas: made, mapped by peers, and freed only when nobody maps them any more."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import fake_cuda
import pytest
import torch
from fake_cuda import MAPPING_CALLS, FakeCuda

from xinference_xavier.store import device_arena
from xinference_xavier.store.arena import Arena, ArenaError, ArenaHandle, ArenaUnavailable
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.device_arena import DeviceArena, MappedDeviceArena

SLOTS, SLOT_BYTES = 5, 8192

_children = multiprocessing.get_context("spawn")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda(process=1)
    yield made
    gc.collect()
    made.check_balanced()


@pytest.fixture
def peer() -> Iterator[FakeCuda]:
    """The same GPU, seen by another process."""
    made = FakeCuda(process=2)
    yield made
    made.check_balanced()


@pytest.fixture
def arena(cuda: FakeCuda) -> Iterator[DeviceArena]:
    made = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    yield made
    made.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings of this process's own arenas are made as by another process."""

    class Nobodys(dict[bytes, DeviceArena]):
        def get(self, *_: object) -> None:
            return None

    monkeypatch.setattr(device_arena, "_local", Nobodys())


def test_a_new_arena_has_the_asked_shape_and_nothing_in_it(arena: DeviceArena) -> None:
    assert (arena.slots, arena.slot_bytes) == (SLOTS, SLOT_BYTES)
    assert arena.data.shape == (SLOTS, SLOT_BYTES)
    assert arena.data.is_cuda
    assert arena.meta.shape == (SLOTS, 2)
    assert not arena.meta.numpy().any()


def test_the_slots_take_no_host_memory(arena: DeviceArena) -> None:
    taken = os.fstat(arena.handle().fd).st_size
    assert taken < SLOT_BYTES + 4096


@pytest.mark.usefixtures("elsewhere")
def test_a_mapping_sees_what_the_owner_writes_later(arena: DeviceArena, peer: FakeCuda) -> None:
    mapped = MappedDeviceArena.open(arena.handle(), peer)
    fake_cuda.host(arena.data)[3] = 7
    arena.meta[3, 0] = 41
    assert (fake_cuda.host(mapped.data)[3] == 7).all()
    assert mapped.meta[3].tolist() == [41, 0]
    assert mapped.data.shape == (SLOTS, SLOT_BYTES)
    assert mapped.alive()
    mapped.close()
    mapped.close()
    assert not mapped.alive()
    assert peer.names().count("ipc_open") == peer.names().count("ipc_close") == 1


def test_within_a_process_the_memory_is_taken_as_it_is(arena: DeviceArena, cuda: FakeCuda) -> None:
    mapped = MappedDeviceArena.open(arena.handle(), cuda)
    assert mapped.data.data_ptr() == arena.data.data_ptr()
    assert "ipc_open" not in cuda.names()
    mapped.close()


def test_another_gpu_of_the_same_process_is_refused(arena: DeviceArena) -> None:
    other = FakeCuda(uuid="fake-gpu-1", peers={"fake-gpu-0": True})
    with pytest.raises(ArenaUnavailable, match="another GPU of this process"):
        MappedDeviceArena.open(arena.handle(), other)
    other.check_balanced()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("peers", [{"fake-gpu-0": True}, {}])
def test_a_gpu_that_can_be_reached_or_is_not_visible_is_tried(
    arena: DeviceArena, peers: dict[str, bool]
) -> None:
    other = FakeCuda(uuid="fake-gpu-1", peers=peers, process=2)
    MappedDeviceArena.open(arena.handle(), other).close()
    assert "ipc_open" in other.names()
    other.check_balanced()


@pytest.mark.usefixtures("elsewhere")
def test_a_gpu_that_cannot_be_reached_is_refused(arena: DeviceArena) -> None:
    other = FakeCuda(uuid="fake-gpu-1", peers={"fake-gpu-0": False}, process=2)
    with pytest.raises(ArenaUnavailable, match="cannot reach"):
        MappedDeviceArena.open(arena.handle(), other)
    assert "ipc_open" not in other.names()
    other.check_balanced()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"start_time": 1}, "gone"),
        ({"fd": 10**6}, "cannot open"),
        ({"inode": 1}, "another file"),
        ({"slots": SLOTS * 1000}, "another file"),
        ({"nonce": bytes(16)}, "header"),
        ({"device": None}, "host memory"),
    ],
)
def test_a_handle_that_is_wrong_in_one_field_maps_nothing(
    arena: DeviceArena, peer: FakeCuda, change: dict[str, object], reason: str
) -> None:
    handle = dataclasses.replace(arena.handle(), **change)
    with pytest.raises(ArenaUnavailable, match=reason):
        MappedDeviceArena.open(handle, peer)


@pytest.mark.usefixtures("elsewhere")
def test_memory_that_is_not_the_announced_arena_is_unmapped_again(
    arena: DeviceArena, cuda: FakeCuda, peer: FakeCuda
) -> None:
    other = cuda.allocate(SLOTS * SLOT_BYTES + 16)
    device = dataclasses.replace(arena.handle().device, ipc=cuda.ipc_export(other))
    with pytest.raises(ArenaUnavailable, match="not the arena"):
        MappedDeviceArena.open(dataclasses.replace(arena.handle(), device=device), peer)
    cuda.free(other)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("call", MAPPING_CALLS)
def test_a_mapping_that_fails_leaves_nothing(arena: DeviceArena, peer: FakeCuda, call: str) -> None:
    files = len(os.listdir("/proc/self/fd"))
    peer.fail(call)
    with pytest.raises(ArenaUnavailable, match=f"{call}: cudaErrorUnknown"):
        MappedDeviceArena.open(arena.handle(), peer)
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_that_cannot_be_shared_says_so_to_peers(cuda: FakeCuda, peer: FakeCuda) -> None:
    cuda.fail("ipc_export", "cudaErrorNotSupported")
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    with pytest.raises(ArenaUnavailable, match=r"cannot be shared: ipc_export.*NotSupported"):
        MappedDeviceArena.open(arena.handle(), peer)
    arena.close()


def test_more_memory_than_the_gpu_has_is_refused_with_both_numbers() -> None:
    cuda = FakeCuda(total=1 << 20)
    with pytest.raises(ArenaError, match=r"8.00 MiB.* needed.* 1 MiB of 1 MiB are free") as refused:
        DeviceArena.create(1024, SLOT_BYTES, "device", cuda)
    assert "xavier_gpu_cache_bytes" in str(refused.value)
    cuda.check_balanced()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (1, 100)])
def test_sizes_that_make_no_arena_are_refused(cuda: FakeCuda, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        DeviceArena.create(slots, slot_bytes, "bad", cuda)


@pytest.mark.parametrize(
    "call",
    ["stream_create", "event_create", "memcpy", "event_record", "event_synchronize"],
)
def test_an_arena_that_cannot_be_made_leaves_nothing(cuda: FakeCuda, call: str) -> None:
    files = len(os.listdir("/proc/self/fd"))
    cuda.fail(call)
    with pytest.raises(CudaError, match=call):
        DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_withdraws_the_slots_and_frees_once(cuda: FakeCuda) -> None:
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    arena.meta[1, 0] = 9
    for _ in range(2):
        arena.close()
    assert arena.data.shape == (0, SLOT_BYTES)
    assert len(arena.meta) == 0
    assert cuda.names().count("free") == 1


@pytest.mark.usefixtures("elsewhere")
def test_memory_that_a_peer_still_maps_is_never_freed(
    cuda: FakeCuda, peer: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    memory = arena.memory()
    mapped = MappedDeviceArena.open(arena.handle(), peer)
    arena.close()
    assert not mapped.alive()
    assert "free" not in cuda.names()
    assert "a peer still maps" in caplog.text
    mapped.close()
    cuda.free(memory)


@pytest.mark.usefixtures("elsewhere")
def test_closing_waits_for_a_peer_that_unmaps(
    cuda: FakeCuda, peer: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    mapped = MappedDeviceArena.open(arena.handle(), peer)
    # The peer's reaper comes by while the owner waits.
    monkeypatch.setattr(device_arena.time, "sleep", lambda _: mapped.close())
    arena.close(deadline_s=60.0)
    assert cuda.names()[-1] == "free"


@pytest.mark.usefixtures("elsewhere")
def test_an_arena_that_is_being_closed_cannot_be_mapped(
    cuda: FakeCuda, peer: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    handle = arena.handle()
    real, refused = cuda.free, []

    def free(memory: torch.Tensor) -> None:
        with pytest.raises(ArenaUnavailable) as error:
            MappedDeviceArena.open(handle, peer)
        refused.append(str(error.value))
        real(memory)

    monkeypatch.setattr(cuda, "free", free)
    arena.close()
    assert refused


def _child(handle: ArenaHandle, pipe: Connection) -> None:
    cuda = FakeCuda()
    mapped = MappedDeviceArena.open(handle, cuda)
    pipe.send(fake_cuda.host(mapped.data)[2, :4].tolist())
    pipe.recv()
    mapped.close()
    cuda.check_balanced()
    pipe.send("unmapped")


@pytest.mark.parametrize("how", ["unmaps", "is killed"])
def test_another_process_maps_the_memory_until_it_unmaps_or_dies(how: str) -> None:
    cuda = FakeCuda()
    arena = DeviceArena.create(SLOTS, SLOT_BYTES, "device", cuda)
    fake_cuda.host(arena.data)[2] = 9
    ours, theirs = _children.Pipe()
    child = _children.Process(target=_child, args=(arena.handle(), theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == [9] * 4
    memory = arena.memory()
    if how == "unmaps":
        ours.send("go")
        assert ours.poll(60)
        assert ours.recv() == "unmapped"
    else:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
    arena.close(deadline_s=60.0)
    assert cuda.names()[-1] == "free"
    child.join(60)
    cuda.check_balanced()
    del memory


def test_a_host_arena_is_no_device_arena(peer: FakeCuda) -> None:
    arena = Arena.create(SLOTS, SLOT_BYTES, "host")
    with pytest.raises(ArenaUnavailable, match="host memory"):
        MappedDeviceArena.open(arena.handle(), peer)
    arena.close()


@pytest.mark.usefixtures("elsewhere")
def test_every_call_of_a_mapping_comes_in_order(arena: DeviceArena, peer: FakeCuda) -> None:
    MappedDeviceArena.open(arena.handle(), peer).close()
    kept = ["peer_access", "ipc_open", "memcpy", "event_synchronize", "ipc_close"]
    assert [name for name in peer.names() if name in kept] == kept
