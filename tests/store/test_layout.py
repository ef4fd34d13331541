# SPDX-License-Identifier: Apache-2.0
"""A layout is proved from strides, or refused; what it exports is one block and nothing else."""

from __future__ import annotations

import math

import kvcache
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache import BLOCKS, DIM, HEADS, TOKENS, KvCaches, assert_views_are_blocks, probe

from xinference_xavier.layout import ALIGNMENT, MAX_PARTS, LayoutError, probe_layout

MiB = 1 << 20


@pytest.mark.parametrize("shape", kvcache.SHAPES)
def test_row_k_of_the_views_is_block_k_and_nothing_else(shape: str) -> None:
    kv = kvcache.SHAPES[shape]()
    layout, views = probe(kv)
    assert_views_are_blocks(kv, BLOCKS, views)
    assert len(views) == len(layout.spans)


@pytest.mark.parametrize("shape", kvcache.SHAPES)
def test_spans_tile_the_slot_in_order(shape: str) -> None:
    layout, views = probe(kvcache.SHAPES[shape]())
    end = 0
    for span, view in zip(layout.spans, views, strict=True):
        assert span.offset == end
        assert view.shape == (BLOCKS, span.nbytes)
        assert view.dtype == torch.uint8
        end += span.nbytes
    assert layout.block_bytes == end
    assert layout.slot_bytes % ALIGNMENT == 0
    assert 0 <= layout.slot_bytes - layout.block_bytes < ALIGNMENT


@given(st.permutations(range(4)), st.integers(3, 6), st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_any_memory_order_is_proved_or_refused(
    order: list[int], num_blocks: int, ratio: int
) -> None:
    shape = (num_blocks * ratio, 3, 8 // ratio, 5)
    memory = torch.zeros([shape[d] for d in order], dtype=torch.uint8)
    kv = {"layer": memory.permute([order.index(d) for d in range(4)])}
    pieces = math.prod(shape[d] for d in order[: order.index(0)])
    if pieces > MAX_PARTS:
        with pytest.raises(LayoutError, match="separate pieces"):
            probe_layout(kv, num_blocks=num_blocks, block_tokens=8)
    else:
        _, views = probe_layout(kv, num_blocks=num_blocks, block_tokens=8)
        assert_views_are_blocks(kv, num_blocks, views)


def test_reference_model_fills_the_reference_budgets() -> None:
    kv = {f"layers.{i}": torch.zeros(3, 2, 16, 128, dtype=torch.bfloat16) for i in range(24)}
    layout, _ = probe_layout(kv, num_blocks=3, block_tokens=16)
    assert layout.block_bytes == layout.slot_bytes == 196608
    assert layout.slots(256 * MiB) == 1365
    assert layout.slots(8 * MiB) == 42
    assert layout.slots(196607) == 0


def test_layers_that_alias_one_region_are_stored_once() -> None:
    layout, _ = probe(kvcache.shared_layers())
    assert [span.layer for span in layout.spans] == ["a", "b"]


def test_layers_of_one_storage_are_all_stored() -> None:
    layout, _ = probe(kvcache.fused_blocks_outermost())
    assert len({span.layer for span in layout.spans}) == kvcache.LAYERS


def test_k_and_v_that_lie_apart_are_two_parts() -> None:
    layout, _ = probe(kvcache.kv_outermost())
    assert [span.part for span in layout.spans] == [0, 1] * kvcache.LAYERS


def test_digest_ignores_the_number_of_blocks() -> None:
    few = {"layer": torch.zeros(3, HEADS, TOKENS, DIM)}
    many = {"layer": torch.zeros(9, HEADS, TOKENS, DIM)}
    a, _ = probe_layout(few, num_blocks=3, block_tokens=TOKENS)
    b, _ = probe_layout(many, num_blocks=9, block_tokens=TOKENS)
    assert a.digest() == b.digest()


def test_digest_tells_layouts_apart() -> None:
    square = torch.zeros(5, 16, 16, DIM)
    caches: list[KvCaches] = [
        {"layer": torch.zeros(5, HEADS, 16, DIM)},
        {"layer": torch.zeros(5, HEADS, 16, DIM, dtype=torch.int32)},
        {"other": torch.zeros(5, HEADS, 16, DIM)},
        {"layer": torch.zeros(5, 16, HEADS, DIM)},
        {"layer": torch.zeros(5, HEADS * DIM, 16)},
        {"layer": square},
        {"layer": square.permute(0, 2, 1, 3)},
        {"layer": torch.zeros(2, 5, HEADS, 16, DIM // 2)},
        {"layer": torch.zeros(5, HEADS, 16, DIM), "more": torch.zeros(5, HEADS, 16, DIM)},
    ]
    digests = [probe_layout(kv, num_blocks=5, block_tokens=16)[0].digest() for kv in caches]
    assert len(set(digests)) == len(caches)


def overlapping_windows() -> KvCaches:
    return {"layer": torch.zeros(4096).as_strided((BLOCKS, TOKENS, DIM), (64, DIM, 1))}


def partly_shared() -> KvCaches:
    page = TOKENS * DIM
    storage = torch.zeros(BLOCKS * page + 8)
    return {
        "one": storage[:-8].view(BLOCKS, TOKENS, DIM),
        "two": storage[8:].view(BLOCKS, TOKENS, DIM),
    }


def interleaved_with_two_strides() -> KvCaches:
    storage = torch.zeros(64 * 1024)
    return {
        "one": storage.as_strided((BLOCKS, TOKENS, DIM), (256, DIM, 1)),
        "two": storage.as_strided((BLOCKS, TOKENS, DIM), (384, DIM, 1), 128),
    }


def wrapped_around_the_page() -> KvCaches:
    # The second layer's rows reach over the end of each page into the first layer's next one.
    storage = torch.zeros(64 * 1024)
    return {
        "one": storage.as_strided((BLOCKS, TOKENS, DIM), (200, DIM, 1)),
        "two": storage.as_strided((BLOCKS, TOKENS, DIM), (200, DIM, 1), 128),
    }


REFUSED: dict[str, tuple[KvCaches, str]] = {
    "no layers": ({}, "no layers"),
    "other number of blocks": ({"layer": torch.zeros(BLOCKS + 1, TOKENS, DIM)}, "no dimension"),
    "no token dimension": ({"layer": torch.zeros(BLOCKS, TOKENS + 1, DIM)}, "no dimension"),
    "blocks in a late dimension": ({"layer": torch.zeros(3, BLOCKS, TOKENS, DIM)}, "no dimension"),
    "expanded": ({"layer": torch.zeros(BLOCKS, 1, DIM).expand(-1, TOKENS, -1)}, "overlap"),
    "overlapping windows": (overlapping_windows(), "overlap"),
    "partly shared": (partly_shared(), "share bytes"),
    "two strides": (interleaved_with_two_strides(), "interleaved"),
    "wrapped": (wrapped_around_the_page(), "share bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_proved_is_refused(case: str) -> None:
    kv, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        probe(kv)


def test_blocks_scattered_element_by_element_are_refused() -> None:
    memory = torch.zeros(TOKENS, DIM, BLOCKS)
    with pytest.raises(LayoutError, match="128 separate pieces"):
        probe({"layer": memory.permute(2, 0, 1)})


def test_two_blocks_behind_a_pair_are_ambiguous() -> None:
    with pytest.raises(LayoutError, match="two dimensions"):
        probe_layout({"layer": torch.zeros(2, 2, TOKENS, DIM)}, num_blocks=2, block_tokens=TOKENS)


def test_state_space_layers_are_refused() -> None:
    states = [torch.zeros(BLOCKS, 4), torch.zeros(BLOCKS, 8)]
    with pytest.raises(LayoutError, match="layer mamba"):
        probe({"mamba": states})  # type: ignore[dict-item]  # what vLLM really registers


@pytest.mark.parametrize(("num_blocks", "tokens"), [(0, 16), (4, 0), (-1, 16)])
def test_sizes_below_one_are_refused(num_blocks: int, tokens: int) -> None:
    with pytest.raises(LayoutError, match="below 1"):
        probe_layout({"layer": torch.zeros(4, 16, 2)}, num_blocks=num_blocks, block_tokens=tokens)
