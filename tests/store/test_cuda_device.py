# SPDX-License-Identifier: Apache-2.0
"""The CUDA device on a fake CUDA that runs nothing before something waits for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import fake_cuda
import kvcache
import numpy as np
import pytest
import torch
from fake_cuda import COMPUTE, FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache import BLOCKS, Cache, array

from xinference_xavier.store import cuda_device
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.cuda_device import CudaDevice, device_bytes
from xinference_xavier.store.pinning import page_aligned

SLOTS = 9

orders = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, SLOTS - 1)),
    max_size=BLOCKS,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)


class Rig:
    """A KV cache on a fake GPU, and slots in all kinds of memory."""

    def __init__(self, cache: Cache) -> None:
        self.cuda = FakeCuda()
        self.cache = cache
        width = cache.layout.slot_bytes
        self._memory = self.cuda.allocate(SLOTS * width)
        self._pinned = page_aligned(SLOTS * width)
        self.cuda.host_register(self._pinned)
        self.slots = {
            "device": self._memory.view(SLOTS, width),
            "pinned": self._pinned.view(SLOTS, width),
            "pageable": page_aligned(SLOTS * width).view(SLOTS, width),
        }
        rng = np.random.default_rng(7)
        for data in self.slots.values():
            bytes_ = rng.integers(0, 256, (SLOTS, width), dtype=np.uint8)
            fake_cuda.host(data).copy_(torch.from_numpy(bytes_))
        self.device = CudaDevice(cache.layout, cache.views, self.cuda)
        self.cuda.calls.clear()

    def bytes(self, kind: str, slot: int) -> bytes:
        row = fake_cuda.host(self.slots[kind])[slot, : self.cache.layout.block_bytes]
        return row.numpy().tobytes()

    def count(self, call: str) -> int:
        return self.cuda.names().count(call)

    def close(self) -> None:
        self.device.close()
        self.cuda.host_unregister(self._pinned)
        self.cuda.free(self._memory)
        self.cuda.check_balanced()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(kvcache.plain_cache(1))
    yield made
    made.close()


KINDS = ["device", "pinned", "pageable"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["kv_outermost", "fused_blocks_outermost", "mixed_dtypes"])
@given(pairs=orders)
@settings(max_examples=6, deadline=None)
def test_blocks_go_to_their_slots_and_back(kind: str, shape: str, pairs: list) -> None:
    rig = Rig(Cache(kvcache.SHAPES[shape]()).randomize(2))
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    blocks, slots = table[:, 0], table[:, 1]
    data = rig.slots[kind]
    expected = [rig.bytes(kind, slot) for slot in range(SLOTS)]
    for block, slot in pairs:
        expected[slot] = rig.cache.block(block)
    rig.device.gather(blocks, data, slots)
    rig.device.fence()
    assert [rig.bytes(kind, slot) for slot in range(SLOTS)] == expected

    kept = rig.cache.blocks()
    after = list(kept)
    for block, slot in pairs:
        after[BLOCKS - 1 - block] = expected[slot]
    rig.device.scatter(data, slots, BLOCKS - 1 - blocks)
    rig.device.fence()
    assert rig.cache.blocks() == after
    rig.close()


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_a_batch_is_one_launch(rig: Rig, kind: str) -> None:
    rig.device.gather(array(1, 5, 3), rig.slots[kind], array(0, 8, 4))
    assert rig.cuda.names() == ["reachable", "memcpy", "launch"]


def test_nothing_waits_on_the_host_before_the_fence(rig: Rig) -> None:
    rig.device.after(rig.device.mark())
    rig.device.gather(array(1), rig.slots["device"], array(0))
    rig.device.move(rig.slots["device"], array(0), rig.slots["pinned"], array(1))
    assert rig.count("event_synchronize") == 0
    rig.device.fence()
    assert rig.count("event_synchronize") == 1
    assert rig.bytes("pinned", 1) == rig.cache.block(1)


def test_a_copy_sees_the_forward_that_it_is_marked_behind(rig: Rig) -> None:
    view = rig.cache.views[0]
    rig.cuda.compute(lambda: view[2].fill_(77))
    mark = rig.device.mark()
    rig.cuda.compute(lambda: view[2].fill_(88))
    rig.device.after(mark)
    rig.device.gather(array(2), rig.slots["device"], array(0))
    rig.device.fence()
    nbytes = view.shape[1]
    assert rig.bytes("device", 0)[:nbytes] == bytes([77]) * nbytes
    assert (view[2] == 77).all()


def test_the_compute_stream_never_waits_for_a_copy(rig: Rig) -> None:
    rig.device.after(rig.device.mark())
    rig.device.scatter(rig.slots["device"], array(0), array(1))
    rig.device.fence()
    waiting = [call[1] for call in rig.cuda.calls if call[0] == "stream_wait"]
    assert waiting
    assert COMPUTE not in waiting


def test_a_thread_that_starts_copying_allocates_and_pins_nothing(rig: Rig) -> None:
    thread = threading.Thread(
        target=lambda: rig.device.gather(array(1), rig.slots["device"], array(0))
    )
    thread.start()
    thread.join()
    assert rig.cuda.names() == ["reachable", "stream_create", "event_create", "memcpy", "launch"]


def test_threads_copy_and_wait_apart_from_each_other(rig: Rig) -> None:
    rig.device.gather(array(1), rig.slots["device"], array(0))
    before = rig.bytes("device", 0)

    def other() -> None:
        rig.device.gather(array(2), rig.slots["device"], array(1))
        rig.device.fence()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert rig.bytes("device", 1) == rig.cache.block(2)
    assert rig.bytes("device", 0) == before
    rig.device.fence()
    assert rig.bytes("device", 0) == rig.cache.block(1)
    streams = {call[-1] for call in rig.cuda.calls if call[0] == "launch"}
    assert len(streams) == 2


def test_room_for_indices_is_not_used_again_before_it_is_free(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = rig.device._lane()
    lane._indices = lane._indices[:8]
    for slot in range(SLOTS):
        rig.device.gather(array(slot), rig.slots["device"], array(slot))
    rig.device.fence()
    assert [rig.bytes("device", i) for i in range(SLOTS)] == rig.cache.blocks()[:SLOTS]


def test_a_batch_longer_than_the_ring_goes_in_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "INDEX_ROWS", 4)
    lane = rig.device._lane()
    lane._indices = lane._indices[:8]
    everyone = array(*range(SLOTS))
    rig.device.gather(everyone, rig.slots["device"], everyone)
    rig.device.fence()
    assert rig.count("launch") == 3
    assert [rig.bytes("device", i) for i in range(SLOTS)] == rig.cache.blocks()[:SLOTS]


def test_unpinned_slots_go_through_a_scratch_area_that_is_smaller_than_the_batch(rig: Rig) -> None:
    rig.device._scratch = rig.device._scratch[:2]
    order = array(4, 0, 7, 2, 8)
    rig.device.gather(order, rig.slots["pageable"], order)
    assert [rig.bytes("pageable", i) for i in order] == [rig.cache.block(i) for i in order]
    rig.device.scatter(rig.slots["pageable"], order, array(1, 3, 5, 9, 11))
    rig.device.fence()
    assert [rig.cache.block(i) for i in (1, 3, 5, 9, 11)] == [
        rig.bytes("pageable", i) for i in order
    ]


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_the_scratch_area_is_let_go_only_when_nothing_uses_it_any_more(rig: Rig, copy: str) -> None:
    if copy == "gather":
        rig.device.gather(array(3), rig.slots["pageable"], array(1))
    else:
        rig.device.scatter(rig.slots["pageable"], array(1), array(3))
    # Without a fence: another thread may take the area now.
    assert rig.bytes("pageable", 1) == rig.cache.block(3)


def test_slots_at_an_address_too_odd_for_the_kernel_go_through_the_scratch_area(rig: Rig) -> None:
    width = rig.cache.layout.slot_bytes
    odd = fake_cuda.host(rig._memory)[8 : 8 + width].view(1, width)
    rig.device.gather(array(3), odd, array(0))
    assert odd.numpy().tobytes() == rig.cache.block(3)


@pytest.mark.parametrize(
    ("source", "target", "copies"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7], 1),
        ([3, 2, 1, 0], [7, 6, 5, 4], 1),
        ([0, 1, 5, 6], [2, 3, 4, 5], 2),
        ([0, 2, 4], [0, 1, 2], 3),
        ([], [], 0),
    ],
)
def test_demotion_and_promotion_take_one_copy_per_run(
    rig: Rig, source: list[int], target: list[int], copies: int
) -> None:
    for a, b in (("device", "pinned"), ("pinned", "device"), ("device", "pageable")):
        expected = [rig.bytes(a, slot) for slot in source]
        rig.cuda.calls.clear()
        rig.device.move(rig.slots[a], array(*source), rig.slots[b], array(*target))
        assert rig.cuda.names() == ["memcpy"] * copies
        rig.device.fence()
        assert [rig.bytes(b, slot) for slot in target] == expected


def test_marks_that_are_gone_give_their_events_back(rig: Rig) -> None:
    for _ in range(5):
        rig.device.after(rig.device.mark())
    gc.collect()
    assert rig.count("event_create") == 0
    held = [rig.device.mark() for _ in range(3)]
    assert rig.count("event_create") == 2
    del held


def test_a_mark_may_outlive_the_device() -> None:
    rig = Rig(kvcache.plain_cache(1))
    mark = rig.device.mark()
    rig.device.close()
    rig.device.close()
    del mark
    gc.collect()
    rig.close()


@pytest.mark.parametrize("call", ["event_create", "event_record"])
def test_a_mark_never_raises_but_what_should_run_after_it_does(rig: Rig, call: str) -> None:
    held = rig.device.mark()
    rig.cuda.fail(call)
    mark = rig.device.mark()
    with pytest.raises(CudaError, match=call):
        rig.device.after(mark)
    del held, mark


CONSTRUCTION = [
    "allocate",
    "stream_create",
    "event_create",
    "memcpy",
    "event_record",
    "stream_wait",
    "reachable",
    "launch",
    "event_synchronize",
]


def test_a_device_has_run_its_kernels_behind_the_engines_work_when_it_is_there() -> None:
    cache = kvcache.plain_cache(1)
    cuda = FakeCuda()
    view = cache.views[0]
    cuda.compute(lambda: view[0].fill_(77))
    device = CudaDevice(cache.layout, cache.views, cuda)
    assert (view[0] == 77).all()
    assert cuda.names()[-1] == "event_synchronize"
    kept = cache.blocks()
    device.close()
    cuda.check_balanced()
    assert cache.blocks() == kept


@pytest.mark.parametrize("call", CONSTRUCTION)
def test_a_device_that_cannot_be_made_leaves_nothing(call: str) -> None:
    cache = kvcache.plain_cache(1)
    whole = FakeCuda()
    CudaDevice(cache.layout, cache.views, whole)
    for passed in range(whole.names().count(call)):
        cuda = FakeCuda()
        cuda.fail(call, after=passed)
        with pytest.raises(CudaError, match="cudaErrorUnknown"):
            CudaDevice(cache.layout, cache.views, cuda)
        gc.collect()
        cuda.check_balanced()


def test_a_driver_that_pins_nothing_copies_all_the_same() -> None:
    cache, cuda = kvcache.plain_cache(1), FakeCuda()
    cuda.host_room = 0
    device = CudaDevice(cache.layout, cache.views, cuda)
    slots = page_aligned(cache.layout.slot_bytes).view(1, -1)
    device.gather(array(3), slots, array(0))
    assert slots[0, : cache.layout.block_bytes].numpy().tobytes() == cache.block(3)
    device.close()
    cuda.check_balanced()


@pytest.mark.parametrize("call", ["stream_create", "event_create"])
def test_a_thread_that_could_not_start_copying_can_later(rig: Rig, call: str) -> None:
    failed: list[CudaError] = []

    def copy() -> None:
        for _ in range(cuda_device.LANES + 1):
            rig.cuda.fail(call)
            try:
                rig.device.gather(array(1), rig.slots["device"], array(0))
            except CudaError as error:
                failed.append(error)
        rig.device.gather(array(1), rig.slots["device"], array(0))
        rig.device.fence()

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert len(failed) == cuda_device.LANES + 1
    assert rig.bytes("device", 0) == rig.cache.block(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["reachable", "memcpy", "launch"])
def test_a_copy_that_failed_does_not_spoil_the_next(rig: Rig, kind: str, call: str) -> None:
    rig.cuda.fail(call)
    with pytest.raises(CudaError, match=call):
        rig.device.gather(array(1), rig.slots[kind], array(0))
    rig.device.fence()
    rig.device.gather(array(2), rig.slots[kind], array(0))
    rig.device.fence()
    assert rig.bytes(kind, 0) == rig.cache.block(2)


@pytest.mark.parametrize("call", ["host_unregister", "stream_destroy", "event_destroy"])
def test_closing_goes_on_behind_a_step_that_failed(call: str) -> None:
    cache = kvcache.plain_cache(1)
    cuda = FakeCuda()
    device = CudaDevice(cache.layout, cache.views, cuda)
    done = len(cuda.calls)
    cuda.fail(call)
    with pytest.raises(CudaError, match=call):
        device.close()
    closing = {name for name, *_ in cuda.calls[done:]}
    assert closing >= {"host_unregister", "event_destroy", "stream_destroy", "free"}
    device.close()


def test_more_threads_than_there_are_lanes_are_refused(rig: Rig) -> None:
    refused: list[RuntimeError] = []

    def copy() -> None:
        try:
            rig.device.gather(array(1), rig.slots["device"], array(0))
        except RuntimeError as error:
            refused.append(error)

    for _ in range(cuda_device.LANES):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    assert len(refused) == 1
    rig.device.fence()


@pytest.mark.parametrize("make", [kvcache.heads_first, kvcache.mixed_dtypes])
def test_its_own_memory_is_what_the_preflight_is_told(make: Callable[[], kvcache.KvCaches]) -> None:
    cache = Cache(make())
    cuda = FakeCuda()
    device = CudaDevice(cache.layout, cache.views, cuda)
    free, total = cuda.memory()
    assert total - free == device_bytes(cache.layout.slot_bytes, len(cache.layout.spans))
    device.close()
    cuda.check_balanced()
