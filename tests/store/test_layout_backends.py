# SPDX-License-Identifier: Apache-2.0
"""The layouts of vLLM's CUDA backends: each is proved block by block, on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import backend_shapes
import numpy as np
import pytest
import torch
from backend_shapes import BLOCKS, BUILDS, DIM, HEADS, LAYERS, TOKENS, V27, Build, Shape, sizes_of
from kvcache import KvCaches, assert_views_are_blocks
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import set_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

from xinference_xavier.layout import MAX_PARTS, LayoutError, probe_layout
from xinference_xavier.store.device import CpuDevice

CASES = dict(backend_shapes.cases())


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_its_own_bytes_and_no_others(case: str) -> None:
    kv = CASES[case]()
    layout, views = probe_layout(kv, num_blocks=BLOCKS, block_tokens=TOKENS)
    assert_views_are_blocks(kv, BLOCKS, views)
    content = sum(tensor.numel() * tensor.element_size() for tensor in kv.values())
    assert layout.block_bytes * BLOCKS == content


@pytest.mark.parametrize("case", CASES)
def test_an_exported_block_has_only_its_own_values(case: str) -> None:
    kv = CASES[case]()
    layout, views = probe_layout(kv, num_blocks=BLOCKS, block_tokens=TOKENS)
    for block in range(BLOCKS):
        for view in views:
            view[block] = block + 1
    slots = torch.zeros(BLOCKS, layout.slot_bytes, dtype=torch.uint8)
    everything = np.arange(BLOCKS)
    CpuDevice(layout, views).gather(everything, slots, everything)
    for block in range(BLOCKS):
        assert (slots[block, : layout.block_bytes] == block + 1).all()


def test_the_table_has_every_version_backend_and_kind() -> None:
    assert len(CASES) > 80
    for kind in BUILDS:
        assert {case.split()[0] for case in CASES if case.endswith(f", {kind}")} == {
            "0.21",
            "0.27",
            "0.32",
        }


def test_replicas_exchange_blocks_where_only_the_order_of_blocks_and_layers_differs() -> None:
    digests: dict[str, set[str]] = {}
    for name, shape in backend_shapes.V32.items():
        kv = backend_shapes.backing(shape, Build())
        layout, _ = probe_layout(kv, num_blocks=BLOCKS, block_tokens=TOKENS)
        digests.setdefault(layout.digest(), set()).add(name)
    assert sorted(map(sorted, digests.values())) == [
        ["BHLNC", "LHBNC"],
        ["BLHNC", "LBHNC"],
        ["BLNHC", "LBNHC"],
    ]


# --- the installed version's own functions -----------------------------------------------------


@pytest.fixture(params=["NHD", "HND"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    set_kv_cache_layout(request.param)
    yield request.param
    set_kv_cache_layout(None)


@pytest.mark.parametrize("backend", [FlashAttentionBackend, TritonAttentionBackend])
def test_the_table_says_what_the_installed_backends_say(backend: type, order: str) -> None:
    fused = backend_shapes.V27_FUSED[order]
    assert backend.get_kv_cache_shape(BLOCKS, TOKENS, HEADS, DIM) == sizes_of(V27[order], 1)
    assert backend.get_kv_cache_stride_order() == V27[order].order
    assert backend.get_kv_cache_stride_order(include_num_layers_dimension=True) == fused.order


def installed(shape: Shape, build: Build, *, packed: bool) -> KvCaches:
    """Return the cache as the installed version's model runner makes it."""
    kv: KvCaches = {}
    sizes = sizes_of(shape, build.ratio)
    pages = [math.prod(sizes[1:]) * build.ratio * build.dtype(i).itemsize for i in range(LAYERS)]
    slab = sum(pages) + build.padding
    whole, start = torch.zeros(BLOCKS * slab, dtype=torch.int8), 0
    for layer, page in enumerate(pages):
        spec = FullAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=HEADS,
            head_size=DIM,
            dtype=build.dtype(layer),
            page_size_padded=page + build.padding if build.padding and not packed else None,
        )
        raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        kv[f"layers.{layer}"] = _reshape_attention_kv_cache(
            whole if packed else raw,
            spec,
            sizes,
            shape.order,
            BLOCKS * build.ratio,
            (start, slab) if packed else None,
        )
        start += page
    return kv


ALLOCATED = [
    (name, kind, allocate)
    for name in V27
    for kind in BUILDS
    for allocate in (backend_shapes.separate, backend_shapes.slab)
    if backend_shapes.possible(allocate, V27[name], BUILDS[kind])
]


@pytest.mark.parametrize(("name", "kind", "allocate"), ALLOCATED)
def test_the_table_allocates_as_the_installed_model_runner_does(
    name: str, kind: str, allocate: Callable[[Shape, Build], KvCaches]
) -> None:
    build, shape = BUILDS[kind], V27[name]
    packed = allocate is backend_shapes.slab
    ours, theirs = allocate(shape, build), installed(shape, build, packed=packed)
    for layer, tensor in theirs.items():
        assert ours[layer].shape == tensor.shape
        assert ours[layer].stride() == tensor.stride()
        assert ours[layer].dtype == tensor.dtype
        assert ours[layer].storage_offset() == tensor.storage_offset()
    probe_layout(theirs, num_blocks=BLOCKS, block_tokens=TOKENS)


# --- refused -------------------------------------------------------------------------------------


def test_more_heads_outside_the_blocks_than_parts_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_shapes, "HEADS", MAX_PARTS + 1)
    kv = backend_shapes.backing(backend_shapes.V32["LHBNC"], Build())
    with pytest.raises(LayoutError, match=f"{MAX_PARTS + 1} separate pieces"):
        probe_layout(kv, num_blocks=BLOCKS, block_tokens=TOKENS)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_cache_of_so_few_blocks_that_k_and_v_look_alike_is_refused(
    monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(backend_shapes, "BLOCKS", blocks)
    monkeypatch.setattr(backend_shapes, "HEADS", TOKENS // 2)
    kv = backend_shapes.separate(backend_shapes.V21["FLASH_ATTN NHD"], Build())
    with pytest.raises(LayoutError, match="two dimensions"):
        probe_layout(kv, num_blocks=blocks, block_tokens=TOKENS)
