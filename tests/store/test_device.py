# SPDX-License-Identifier: Apache-2.0
"""Batched copies move exactly the blocks they were given, whatever the order and the shape."""

from __future__ import annotations

import kvcache
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache import BLOCKS, Cache

from xinference_xavier.store.device import runs

SLOTS = 9

orders = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, SLOTS - 1)),
    max_size=BLOCKS,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)


def random_slots(cache: Cache, seed: int) -> torch.Tensor:
    shape = (SLOTS, cache.layout.slot_bytes)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def odd_row_bytes() -> kvcache.KvCaches:
    return {
        f"l{i}": torch.zeros(BLOCKS, kvcache.TOKENS, 3, dtype=torch.uint8) for i in range(2)
    } | {
        "odd": torch.zeros(BLOCKS * kvcache.TOKENS * 3 + 1, dtype=torch.uint8)[1:].view(
            BLOCKS, kvcache.TOKENS, 3
        )
    }


SHAPES = kvcache.SHAPES | {"odd_row_bytes": odd_row_bytes}


@pytest.mark.parametrize("shape", SHAPES)
@given(pairs=orders, seed=st.integers(0, 9))
@settings(max_examples=8, deadline=None)
def test_gather_packs_the_given_blocks_and_touches_no_other_slot(
    shape: str, pairs: list[tuple[int, int]], seed: int
) -> None:
    cache = Cache(SHAPES[shape]()).randomize(seed)
    data = random_slots(cache, seed + 100)
    expected = data.clone()
    for block, slot in pairs:
        packed = np.frombuffer(cache.block(block), dtype=np.uint8)
        expected[slot, : cache.layout.block_bytes] = torch.from_numpy(packed.copy())
    before = cache.blocks()
    blocks, slots = columns(pairs)
    cache.device.gather(blocks, data, slots)
    assert torch.equal(data, expected)
    assert cache.blocks() == before


@pytest.mark.parametrize("shape", SHAPES)
@given(pairs=orders, seed=st.integers(0, 9))
@settings(max_examples=8, deadline=None)
def test_scatter_fills_the_given_blocks_and_touches_no_other_block(
    shape: str, pairs: list[tuple[int, int]], seed: int
) -> None:
    cache = Cache(SHAPES[shape]()).randomize(seed)
    data = random_slots(cache, seed + 100)
    before = data.clone()
    expected = cache.blocks()
    for block, slot in pairs:
        expected[block] = data[slot, : cache.layout.block_bytes].numpy().tobytes()
    blocks, slots = columns(pairs)
    cache.device.scatter(data, slots, blocks)
    assert cache.blocks() == expected
    assert torch.equal(data, before)


@given(pairs=orders)
@settings(max_examples=30, deadline=None)
def test_move_copies_whole_slots(pairs: list[tuple[int, int]]) -> None:
    cache = Cache(kvcache.heads_first())
    source, target = random_slots(cache, 1), random_slots(cache, 2)
    expected = target.clone()
    for a, b in pairs:
        expected[b] = source[a]
    from_slots, to_slots = columns(pairs)
    cache.device.move(source, from_slots, target, to_slots)
    assert torch.equal(target, expected)


def test_scatter_may_read_one_slot_twice() -> None:
    cache = Cache(kvcache.heads_first()).randomize(3)
    data = random_slots(cache, 4)
    cache.device.scatter(data, kvcache.array(2, 2), kvcache.array(5, 1))
    assert cache.block(5) == cache.block(1) == data[2].numpy().tobytes()


def test_layers_of_one_allocation_are_copied_as_one_array() -> None:
    cache = Cache(kvcache.fused_layers_outermost())
    assert len(cache.device._bands) == 1


def test_every_bfloat16_pattern_survives() -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    kv = {"layer": patterns.clone().view(torch.bfloat16).view(8, 16, 512)}
    cache = Cache(kv, num_blocks=8)
    data = torch.zeros((8, cache.layout.slot_bytes), dtype=torch.uint8)
    ids = kvcache.array(*range(8))
    cache.device.gather(ids, data, ids)
    kv["layer"].view(torch.int16).zero_()
    cache.device.scatter(data, ids, ids)
    assert torch.equal(kv["layer"].view(torch.int16).flatten(), patterns)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], []),
        ([4], [2], [(4, 2, 1)]),
        ([4, 5, 6], [0, 1, 2], [(4, 0, 3)]),
        ([4, 5, 6], [0, 1, 3], [(4, 0, 2), (6, 3, 1)]),
        ([4, 6, 7], [0, 1, 2], [(4, 0, 1), (6, 1, 2)]),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
    ],
)
def test_runs_count_up_on_both_sides(a: list[int], b: list[int], expected: list) -> None:
    assert list(runs(kvcache.array(*a), kvcache.array(*b))) == expected


def test_many_blocks_in_any_order_are_copied_each_to_its_place() -> None:
    count = 100
    cache = kvcache.plain_cache(5, num_blocks=count)
    random = np.random.default_rng(5)
    blocks, slots = random.permutation(count), random.permutation(count)
    data = torch.zeros((count, cache.layout.slot_bytes), dtype=torch.uint8)
    cache.device.gather(blocks, data, slots)
    before = cache.blocks()
    packed = data.numpy()[:, : cache.layout.block_bytes]
    assert [packed[s].tobytes() for s in slots] == [before[b] for b in blocks]
    again = blocks[::-1]
    cache.device.scatter(data, slots, again)
    assert [cache.block(b) for b in again] == [before[b] for b in blocks]
