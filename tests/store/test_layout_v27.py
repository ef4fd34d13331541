# SPDX-License-Identifier: Apache-2.0
"""The table of KV cache layouts says what the installed vLLM does: here those of its V27 rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import backend_shapes
import pytest
import torch
from backend_shapes import BLOCKS, BUILDS, DIM, HEADS, LAYERS, TOKENS, V27, Build, Shape, sizes_of
from kvcache import KvCaches
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from xinference_xavier.layout import probe_layout

try:
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache
except ImportError:
    pytest.skip("this vLLM lays out its cache in another way", allow_module_level=True)


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
