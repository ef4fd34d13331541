# SPDX-License-Identifier: Apache-2.0
"""Stores, demotions and loads end to end, in one process and between two, by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.platforms import Platform, needs_two_gpus
from tests.gpu.replica import BLOCKS, D, H, Replica, foreign, peer_process
from tests.waiting import wait_until
from xinference_xavier.store.arena import ArenaUnavailable
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.device_arena import MappedDeviceArena
from xinference_xavier.store.jobs import Tier


@pytest.fixture
def replica(platform: Platform) -> Iterator[Replica]:
    made = Replica(platform)
    yield made
    made.close()


def test_what_was_stored_is_loaded_from_both_tiers(replica: Replica) -> None:
    blocks = replica.randomize(1)
    half = BLOCKS // 2
    replica.store([(b, D if b < half else H, b, 50 + b, -1) for b in range(BLOCKS)])
    replica.randomize(2)
    order = [(D if b < half else H, b, 50 + b, BLOCKS - 1 - b) for b in range(BLOCKS)]
    assert replica.load(order)[0] == "local"
    assert replica.blocks() == blocks[::-1]


def test_a_demoted_block_is_loaded_and_its_device_slot_used_again(replica: Replica) -> None:
    blocks = replica.randomize(1)
    replica.store([(4, D, 0, 7, -1)])
    replica.store([(9, D, 0, 8, 0)], demotions=[(0, 3, 9)])
    replica.randomize(2)
    replica.load([(H, 3, 9, 0), (D, 0, 8, 1)])
    assert replica.blocks()[:2] == [blocks[4], blocks[9]]


def test_a_store_takes_what_the_forward_before_it_wrote(replica: Replica) -> None:
    replica.randomize(1)
    for view in replica.views:
        replica.platform.forward(view[6], 33)
    replica.store([(6, D, 1, 5, -1)])
    replica.load([(D, 1, 5, 0)])
    assert set(replica.blocks()[0]) == {33}


def test_the_host_tier_is_pinned(replica: Replica) -> None:
    assert replica.memory.pinned, replica.memory.unpinned
    assert replica.platform.api.reachable(replica.memory.arenas[Tier.HOST].data)


def rows(tier: int) -> list[tuple[int, ...]]:
    return [(tier, b, 100 + b, BLOCKS - 1 - b) for b in range(BLOCKS)]


def test_both_tiers_of_a_peer_are_loaded_from_another_process(kind: str, replica: Replica) -> None:
    with peer_process(kind) as (handle, blocks, _):
        for tier, transport in ((D, "cuda_ipc"), (H, "shm")):
            replica.randomize(3)
            assert replica.load(rows(tier), handle)[0] == transport
            assert replica.blocks() == blocks[::-1]

        broken = foreign(handle, ipc=bytes(64)).arenas[Tier.DEVICE]
        with pytest.raises(ArenaUnavailable, match="cudaError"):
            MappedDeviceArena.open(broken, replica.platform.api)


def test_a_peer_that_is_killed_is_survived(kind: str, replica: Replica) -> None:
    with peer_process(kind) as (handle, blocks, peer):
        replica.load(rows(D), handle)
        peer.kill()
    # What is mapped stays readable until it is unmapped.
    assert replica.blocks() == blocks[::-1]


def test_a_peer_that_closes_waits_until_its_memory_is_unmapped(
    kind: str, platform: Platform
) -> None:
    with peer_process(kind) as (handle, blocks, peer):
        mapped = MappedDeviceArena.open(handle.arenas[Tier.DEVICE], platform.api)
        peer.stop()
        wait_until(lambda: not mapped.alive())
        assert platform.host(mapped.data)[3].numpy().tobytes()[: len(blocks[3])] == blocks[3]
        mapped.close()
        assert peer.ended_well()


def test_cuda_opens_no_handle_of_the_own_process(replica: Replica) -> None:
    handle = replica.handle().arenas[Tier.DEVICE]
    assert handle.device is not None
    assert handle.device.ipc is not None, handle.device.reason
    with pytest.raises(CudaError):
        replica.platform.api.ipc_open(handle.device.ipc, handle.device.nbytes)
    mapped = MappedDeviceArena.open(handle, replica.platform.api)
    assert mapped.data.data_ptr() == replica.memory.arenas[Tier.DEVICE].data.data_ptr()
    mapped.close()


def test_expandable_segments_of_the_engines_allocator_change_nothing(
    kind: str, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    ours = replica.randomize(9)
    replica.store([(b, D, b, 100 + b, -1) for b in range(BLOCKS)])
    with peer_process(kind) as (handle, theirs, peer):
        assert replica.load(rows(D), handle)[0] == "cuda_ipc"
        assert replica.blocks() == theirs[::-1]
        assert peer.load(rows(D), replica.handle()) == ("cuda_ipc", ours[::-1])


@needs_two_gpus
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
@pytest.mark.parametrize("visible", [True, False])
def test_a_peer_on_another_gpu_is_read_or_refused_with_the_reason(
    kind: str, replica: Replica, visible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = replica.randomize(9)
    replica.store([(b, D, b, 100 + b, -1) for b in range(BLOCKS)])
    if not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("these GPUs cannot reach each other's memory")
    if not visible:
        # The reader's only GPU; ours is out of its sight.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with peer_process(kind, index=1 if visible else 0) as (_, _, peer):
        assert peer.load(rows(D), replica.handle()) == ("cuda_ipc", ours[::-1])


def test_device_memory_is_given_back(platform: Platform) -> None:
    # The first one makes contexts and modules that stay.
    Replica(platform).close()
    torch.cuda.empty_cache()
    before, _ = platform.api.memory()
    for _ in range(3):
        Replica(platform).close()
    torch.cuda.empty_cache()
    after, _ = platform.api.memory()
    assert before - after < 4 << 20
