# SPDX-License-Identifier: Apache-2.0
"""KV caches as vLLM's CUDA backends register them, by vLLM's version.

Shapes and memory orders are facts read from vLLM's sources, named at each table; those of the
installed version are compared with vLLM's own functions in ``test_layout_backends``. FLASHINFER,
which cannot be imported without its library, has the same ones as TRITON_ATTN in every version
here. ``B`` counts kernel blocks, ``N`` tokens of one, ``H`` KV heads and ``D`` a head's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from kvcache import KvCaches

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 7, 32, 4, 8, 3


@dataclass(frozen=True)
class Shape:
    """The logical shape of one layer's tensor and the order of its dimensions in memory."""

    shape: tuple[str, ...]
    order: tuple[int, ...]


# vllm/v1/attention/backends/{flash_attn,triton_attn,flashinfer}.py of 0.21.0: get_kv_cache_shape
# and get_kv_cache_stride_order, without and with a dimension for the layers in front.
KV_FIRST = ("2", "B", "N", "H", "D")
BLOCK_FIRST = ("B", "2", "N", "H", "D")
PACKED = ("B", "H", "N", "2D")

V21: dict[str, Shape] = {
    "FLASH_ATTN NHD": Shape(KV_FIRST, (0, 1, 2, 3, 4)),
    "FLASH_ATTN HND": Shape(KV_FIRST, (0, 1, 3, 2, 4)),
    "TRITON_ATTN NHD": Shape(BLOCK_FIRST, (0, 1, 2, 3, 4)),
    "TRITON_ATTN HND": Shape(BLOCK_FIRST, (0, 1, 3, 2, 4)),
}
V21_FUSED: dict[str, Shape] = {
    "FLASH_ATTN NHD": Shape(("L", *KV_FIRST), (2, 0, 1, 3, 4, 5)),
    "FLASH_ATTN HND": Shape(("L", *KV_FIRST), (2, 4, 0, 1, 3, 5)),
    "TRITON_ATTN NHD": Shape(("L", *BLOCK_FIRST), (1, 0, 2, 3, 4, 5)),
    "TRITON_ATTN HND": Shape(("L", *BLOCK_FIRST), (1, 2, 4, 0, 3, 5)),
}

# The same files of 0.27.1. There all three backends are alike.
V27: dict[str, Shape] = {
    "NHD": Shape(PACKED, (0, 2, 1, 3)),
    "HND": Shape(PACKED, (0, 1, 2, 3)),
}
V27_FUSED: dict[str, Shape] = {
    "NHD": Shape(("L", *PACKED), (1, 0, 3, 2, 4)),
    "HND": Shape(("L", *PACKED), (1, 2, 0, 3, 4)),
}

# vllm/v1/kv_cache_layout.py of 0.32.0: KVCacheLayout. All layers share one allocation; the backends
# differ only in which of these they support.
V32: dict[str, Shape] = {
    "LBHNC": Shape(("L", *PACKED), (0, 1, 2, 3, 4)),
    "LBNHC": Shape(("L", *PACKED), (0, 1, 3, 2, 4)),
    "LHBNC": Shape(("L", *PACKED), (0, 2, 1, 3, 4)),
    "BLHNC": Shape(("L", *PACKED), (1, 0, 2, 3, 4)),
    "BLNHC": Shape(("L", *PACKED), (1, 0, 3, 2, 4)),
    "BHLNC": Shape(("L", *PACKED), (1, 2, 0, 3, 4)),
}


@dataclass(frozen=True)
class Build:
    """How a cache of some shape is allocated.

    ``ratio`` kernel blocks make one of vLLM's blocks. ``padding`` bytes follow each layer's page
    (0.21, 0.27) or what is the innermost page in memory (0.32). ``dtypes`` go round the layers.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    ratio: int = 1
    padding: int = 0

    def dtype(self, layer: int) -> torch.dtype:
        return self.dtypes[layer % len(self.dtypes)]


def sizes_of(shape: Shape, ratio: int) -> tuple[int, ...]:
    """Return a shape's sizes in numbers."""
    sizes = {"L": LAYERS, "B": BLOCKS * ratio, "N": TOKENS // ratio, "H": HEADS, "D": DIM}
    return tuple({**sizes, "2": 2, "2D": 2 * DIM}[name] for name in shape.shape)


def byte_strides(
    sizes: Sequence[int], order: Sequence[int], width: int, padded: int | None, page: int
) -> list[int]:
    """Return the bytes between neighbours in each dimension, densely packed in memory order.

    With ``padded`` the memory below the dimension ``page`` takes so many bytes.
    """
    strides, stride = [0] * len(sizes), width
    for dim in reversed(order):
        if dim == page and padded is not None:
            stride = max(stride, padded)
        strides[dim] = stride
        stride *= sizes[dim]
    return strides


def view(
    raw: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], start: int
) -> torch.Tensor:
    """Return a tensor of ``dtype`` over an int8 allocation; strides and start are bytes."""
    assert all(s % dtype.itemsize == 0 for s in (*strides, start))
    typed = raw.view(dtype)
    return typed.as_strided(
        tuple(sizes), [s // dtype.itemsize for s in strides], start // dtype.itemsize
    )


def separate(shape: Shape, build: Build) -> KvCaches:
    """Return layers with an allocation each (``_reshape_kv_cache`` of 0.21 and 0.27)."""
    sizes, kv = sizes_of(shape, build.ratio), {}
    blocks = shape.shape.index("B")
    for layer in range(LAYERS):
        dtype = build.dtype(layer)
        page = math.prod(sizes) // sizes[blocks] * dtype.itemsize
        padded = page + build.padding if build.padding else None
        strides = byte_strides(sizes, shape.order, dtype.itemsize, padded, blocks)
        raw = torch.zeros((page + build.padding) * sizes[blocks], dtype=torch.int8)
        kv[f"layers.{layer}"] = view(raw, dtype, sizes, strides, 0)
    return kv


def fused(shape: Shape, build: Build) -> KvCaches:
    """Return layers that are slices of one tensor (0.21 and 0.27 with cross-layer blocks)."""
    [dtype] = build.dtypes
    sizes = sizes_of(shape, build.ratio)
    memory = torch.zeros([sizes[d] for d in shape.order], dtype=dtype)
    whole = memory.permute([shape.order.index(d) for d in range(len(sizes))])
    return {f"layers.{layer}": whole[layer] for layer in range(LAYERS)}


def slab(shape: Shape, build: Build) -> KvCaches:
    """Return layers whose pages follow each other in a block's stride (packed, 0.27)."""
    sizes = sizes_of(shape, build.ratio)
    pages = [math.prod(sizes[1:]) * build.dtype(layer).itemsize for layer in range(LAYERS)]
    stride = sum(pages) + build.padding
    raw, kv, start = torch.zeros(sizes[0] * stride, dtype=torch.int8), {}, 0
    for layer in range(LAYERS):
        dtype = build.dtype(layer)
        strides = byte_strides(sizes, shape.order, dtype.itemsize, stride, page=0)
        kv[f"layers.{layer}"] = view(raw, dtype, sizes, strides, start)
        start += pages[layer]
    return kv


def backing(shape: Shape, build: Build) -> KvCaches:
    """Return layers in one allocation, equal ones together (``create_kv_cache_views`` of 0.32)."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for layer in range(LAYERS):
        by_dtype.setdefault(build.dtype(layer), []).append(layer)
    sizes = sizes_of(shape, build.ratio)
    page = {dtype: math.prod(sizes[2:]) * build.ratio * dtype.itemsize for dtype in by_dtype}
    page = {dtype: nbytes + build.padding for dtype, nbytes in page.items()}
    block = sum(page[dtype] * len(layers) for dtype, layers in by_dtype.items())
    outermost = shape.order[0] == 1
    raw, kv, start = torch.zeros(block * BLOCKS, dtype=torch.int8), {}, 0
    for dtype, layers in by_dtype.items():
        group = (len(layers), *sizes[1:])
        # Blocks of all layers follow each other, or all blocks of one layer.
        innermost = max(shape.order.index(0), shape.order.index(1))
        padded = page[dtype] if build.padding else None
        strides = byte_strides(group, shape.order, dtype.itemsize, padded, shape.order[innermost])
        if outermost:
            strides[1] = block // build.ratio
        for place, layer in enumerate(layers):
            kv[f"layers.{layer}"] = view(
                raw, dtype, group[1:], strides[1:], start + place * strides[0]
            )
        start += len(layers) * (page[dtype] if outermost else strides[0])
    return {f"layers.{layer}": kv[f"layers.{layer}"] for layer in range(LAYERS)}


Allocate = Callable[[Shape, Build], KvCaches]

TABLES: dict[str, tuple[dict[str, Shape], Allocate]] = {
    "0.21": (V21, separate),
    "0.21 fused": (V21_FUSED, fused),
    "0.27": (V27, separate),
    "0.27 fused": (V27_FUSED, fused),
    "0.27 packed": (V27, slab),
    "0.32": (V32, backing),
}

FP8 = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
BUILDS: dict[str, Build] = {
    "bfloat16": Build(),
    "float32": Build((torch.float32,)),
    **{str(dtype).removeprefix("torch."): Build((dtype,)) for dtype in FP8},
    # kv_cache_dtype_skip_layers: some layers stay as the model has them.
    "mixed dtypes": Build((torch.bfloat16, torch.float8_e4m3fn)),
    "kernel blocks of half the tokens": Build(ratio=2),
    "padded pages": Build(padding=64),
}


def cases() -> Iterator[tuple[str, Callable[[], KvCaches]]]:
    """Return what can be allocated: a name, and what makes the cache."""
    for version, (table, allocate) in TABLES.items():
        for (name, shape), (kind, build) in itertools.product(table.items(), BUILDS.items()):
            if possible(allocate, shape, build):
                yield f"{version} {name}, {kind}", lambda a=allocate, s=shape, b=build: a(s, b)


def possible(allocate: Allocate, shape: Shape, build: Build) -> bool:
    """Whether vLLM allocates a cache of this shape in this way."""
    blocks_first = shape.shape.index("B") == 0
    if allocate is separate:
        return blocks_first or not build.padding
    if allocate is fused:
        return len(build.dtypes) == 1 and not build.padding
    if allocate is slab:
        return build.ratio == 1
    compact = set(shape.order[:2]) == {0, 1}
    if build.padding:
        return compact
    return build.ratio == 1 or (compact and shape.order[0] == 0)
