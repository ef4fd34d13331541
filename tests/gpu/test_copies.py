# SPDX-License-Identifier: Apache-2.0
"""Kernels and copies, over all layouts and kinds of memory, in the order that marks give them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.gpu.platforms import Platform, needs_gpu
from tests.gpu.replica import BLOCKS, plain_kv
from tests.store import kvcache
from tests.store.kernel_shapes import SHAPES
from tests.store.kvcache import array
from xinference_xavier.layout import probe_layout
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.pinning import page_aligned

SLOTS = 6
KINDS = ("device", "pinned", "pageable")


class Rig:
    """A KV cache with random bytes, its device, and slots in each kind of memory."""

    def __init__(self, platform: Platform, kv: kvcache.KvCaches, blocks: int) -> None:
        self.platform = platform
        self.layout, self.views = probe_layout(kv, num_blocks=blocks, block_tokens=kvcache.TOKENS)
        self._kv = kv
        rng = np.random.default_rng(1)
        for view in self.views:
            source = rng.integers(0, 256, tuple(view.shape), dtype=np.uint8)
            platform.fill(view, torch.from_numpy(source))
        width = self.layout.slot_bytes
        api = platform.api
        self._memory = api.allocate(SLOTS * width)
        self._pinned = page_aligned(SLOTS * width)
        api.host_register(self._pinned)
        self.slots = {
            "device": self._memory.view(SLOTS, width),
            "pinned": self._pinned.view(SLOTS, width),
            "pageable": page_aligned(SLOTS * width).view(SLOTS, width),
        }
        for data in self.slots.values():
            bytes_ = rng.integers(0, 256, (SLOTS, width), dtype=np.uint8)
            platform.fill(data, torch.from_numpy(bytes_))
        self.device = CudaDevice(self.layout, self.views, api)

    def block(self, block: int) -> torch.Tensor:
        """Return a block's packed bytes, put together by torch."""
        return torch.cat([self.platform.host(view[block]) for view in self.views])

    def bytes(self, kind: str) -> torch.Tensor:
        return self.platform.host(self.slots[kind])

    def close(self) -> None:
        self.device.close()
        self.platform.api.host_unregister(self._pinned)
        self.slots.clear()
        self.platform.api.free(self._memory)


@pytest.fixture
def make(platform: Platform) -> Iterator[Callable[[str], Rig]]:
    rigs: list[Rig] = []

    def build(shape: str) -> Rig:
        kv, blocks = (
            (platform.kv(plain_kv), BLOCKS)
            if shape == "plain"
            else (platform.kv(SHAPES[shape]), kvcache.BLOCKS)
        )
        rigs.append(Rig(platform, kv, blocks))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_is_packed_and_unpacked_like_torch_does(
    make: Callable[[str], Rig], shape: str
) -> None:
    rig = make(shape)
    for kind in KINDS:
        expected, count = rig.bytes(kind), rig.layout.block_bytes
        for block, slot in ((6, 1), (0, 4), (3, 0)):
            expected[slot, :count] = rig.block(block)
        rig.device.gather(array(6, 0, 3), rig.slots[kind], array(1, 4, 0))
        rig.device.fence()
        # Behind the block's last byte a slot has padding, of which nobody reads anything.
        assert torch.equal(rig.bytes(kind)[:, :count], expected[:, :count])

        blocks = [rig.block(block) for block in range(kvcache.BLOCKS)]
        for block, slot in ((2, 4), (5, 5)):
            blocks[block] = expected[slot, :count]
        rig.device.scatter(rig.slots[kind], array(4, 5), array(2, 5))
        rig.device.fence()
        assert all(torch.equal(rig.block(b), blocks[b]) for b in range(kvcache.BLOCKS))
        assert torch.equal(rig.bytes(kind)[:, :count], expected[:, :count])


@pytest.mark.parametrize(
    ("source", "target"), [("device", "pinned"), ("pinned", "device"), ("device", "pageable")]
)
def test_slots_are_demoted_and_promoted(
    make: Callable[[str], Rig], source: str, target: str
) -> None:
    rig = make("plain")
    expected, given = rig.bytes(target), rig.bytes(source)
    for a, b in ((5, 0), (4, 3), (0, 1)):
        expected[b] = given[a]
    rig.device.move(rig.slots[source], array(5, 4, 0), rig.slots[target], array(0, 3, 1))
    rig.device.fence()
    assert torch.equal(rig.bytes(target), expected)


def test_a_copy_runs_after_the_forward_that_it_is_marked_behind(
    make: Callable[[str], Rig],
) -> None:
    rig = make("plain")
    for view in rig.views:
        rig.platform.forward(view[2], 77)
    rig.device.after(rig.device.mark())
    rig.device.gather(array(2), rig.slots["device"], array(0))
    rig.device.fence()
    count = rig.layout.block_bytes
    assert (rig.bytes("device")[0, :count] == 77).all()


@needs_gpu
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_queueing_waits_for_nothing_and_holds_up_nobody(make: Callable[[str], Rig]) -> None:
    rig = make("plain")
    compute = torch.cuda.current_stream()
    rig.platform.forward(rig.views[0][2], 77)
    rig.device.after(rig.device.mark())
    rig.device.gather(array(2), rig.slots["device"], array(0))
    assert not compute.query(), "queueing waited for the forward"

    def unmarked() -> None:
        rig.device.gather(array(1), rig.slots["pinned"], array(1))
        rig.device.fence()

    thread = threading.Thread(target=unmarked)
    thread.start()
    thread.join()
    assert not compute.query(), "a copy on another thread waited for the forward"
    assert torch.equal(rig.bytes("pinned")[1, : rig.layout.block_bytes], rig.block(1))
    rig.device.fence()


@needs_gpu
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_a_copy_sees_what_a_cuda_graph_wrote(make: Callable[[str], Rig]) -> None:
    rig = make("plain")
    value = torch.zeros((), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for view in rig.views:
            view[3].copy_(value.expand_as(view[3]))
    for step in (11, 12):
        value.fill_(step)
        graph.replay()
        rig.device.after(rig.device.mark())
        rig.device.gather(array(3), rig.slots["device"], array(step - 11))
    rig.device.fence()
    count = rig.layout.block_bytes
    assert (rig.bytes("device")[1, :count] == 12).all()


@needs_gpu
@pytest.mark.parametrize("kind", ["cuda"], indirect=True)
def test_all_bytes_of_a_large_cache_are_addressed(platform: Platform) -> None:
    """More than 4 GiB in one tensor: offsets that do not fit into 32 bits."""
    blocks = 80_000
    kv = platform.kv(
        lambda: {"big": torch.zeros(blocks, kvcache.TOKENS, 2048, dtype=torch.bfloat16)}
    )
    layout, views = probe_layout(kv, num_blocks=blocks, block_tokens=kvcache.TOKENS)
    device = CudaDevice(layout, views, platform.api)
    memory = platform.api.allocate(2 * layout.slot_bytes)
    data = memory.view(2, -1)
    views[0][blocks - 1].fill_(9)
    device.after(device.mark())
    device.gather(array(blocks - 1), data, array(1))
    device.fence()
    assert (platform.host(data)[1] == 9).all()
    device.close()
    platform.api.free(memory)
