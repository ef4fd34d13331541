# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of one KV block lie, proved from the registered tensors' strides.

A replica's KV cache is a set of tensors, one per layer, whose shapes differ between attention
backends: block-first, K/V outermost, fused over layers, heads or tokens first, kernel blocks
smaller than vLLM's blocks. :func:`probe_layout` turns them into spans: runs of bytes that are
contiguous in memory and belong to exactly one block. Concatenated in order, the spans of a block
are its *packed* form, which fills one slot of an arena.

Nothing is assumed about a backend. A tensor whose block dimension, or whose disjointness from the
others, does not follow from shapes and strides is refused with :class:`LayoutError`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGNMENT = 64
"""Slots start at multiples of this many bytes: a cache line, and any element type."""

MAX_PARTS = 64
"""More contiguous pieces than this per layer and block is no layout to copy block by block."""


class LayoutError(ValueError):
    """The KV cache has a layout that cannot be proved safe to copy block by block."""


@dataclass(frozen=True, slots=True)
class Span:
    """Contiguous bytes of one block inside its slot.

    ``layer`` names the layer and ``part`` counts its pieces (K and V are two where they lie apart).
    ``offset`` and ``nbytes`` place it in the slot. ``shape`` and ``axes`` give its elements in
    memory order, with the tensor dimension that each comes from; ``dtype`` is their torch type.
    """

    layer: str
    part: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BlockLayout:
    """One block of ``block_tokens`` tokens over all layers, as spans of a packed slot."""

    spans: tuple[Span, ...]
    block_tokens: int
    num_blocks: int

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that a block really has."""
        return sum(span.nbytes for span in self.spans)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that a block costs in an arena: ``block_bytes`` rounded up to the alignment."""
        return -(-self.block_bytes // ALIGNMENT) * ALIGNMENT

    def slots(self, budget_bytes: int) -> int:
        """Return how many slots fit into a budget."""
        return budget_bytes // self.slot_bytes

    def digest(self) -> str:
        """Return 32 hex digits that are equal on replicas which can exchange slots as bytes.

        The number of blocks is not part of it: replicas may have KV caches of different sizes.
        """
        spans = [
            [s.layer, s.part, s.offset, s.nbytes, list(s.shape), list(s.axes), s.dtype]
            for s in self.spans
        ]
        text = json.dumps([ALIGNMENT, self.block_tokens, spans], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def probe_layout(
    kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int, block_tokens: int
) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Derive the layout of a KV cache and, for each span, a view of all its blocks.

    ``kv_caches`` maps layer names to tensors as vLLM registers them, ``num_blocks`` and
    ``block_tokens`` are the scheduler's. ``views[i]`` is uint8 ``[num_blocks, spans[i].nbytes]``:
    row ``b`` is that span of block ``b``, contiguous within the row. Layers that alias one region
    are stored once. Raises :class:`LayoutError` for what it cannot prove.
    """
    if not kv_caches:
        raise LayoutError("the KV cache has no layers")
    if num_blocks < 1 or block_tokens < 1:
        raise LayoutError(f"num_blocks={num_blocks}, block_tokens={block_tokens}: below 1")
    spans: list[Span] = []
    views: list[torch.Tensor] = []
    seen: set[tuple[int, int, int]] = set()
    offset = 0
    for layer, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"layer {layer}: {type(tensor).__name__} instead of one tensor "
                "(state-space layers are not supported)"
            )
        part = 0
        for view, shape, axes in _rows(layer, tensor, num_blocks, block_tokens):
            region = (view.data_ptr(), view.stride(0), view.shape[1])
            if region in seen:
                continue
            seen.add(region)
            nbytes = view.shape[1]
            dtype = str(tensor.dtype).removeprefix("torch.")
            spans.append(Span(layer, part, offset, nbytes, shape, axes, dtype))
            views.append(view)
            part += 1
            offset += nbytes
    _check_disjoint(spans, views)
    return BlockLayout(tuple(spans), block_tokens, num_blocks), views


def _rows(
    layer: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Yield (uint8 rows per block, shape, axes in memory order) of each piece of a layer."""
    axis, ratio = _block_axis(layer, tensor, num_blocks, block_tokens)
    sizes, strides = tensor.shape, tensor.stride()
    # Size-1 dimensions have arbitrary strides and address nothing.
    others = [d for d in range(tensor.dim()) if d != axis and sizes[d] > 1]
    others.sort(key=lambda d: strides[d])
    _check_injective(layer, tensor, [*others, axis])

    run = 1
    inner: list[int] = []
    for dim in others:
        if strides[dim] != run:
            break
        run *= sizes[dim]
        inner.insert(0, dim)
    outer = sorted(others[len(inner) :])
    shape, axes = tuple(sizes[d] for d in inner), tuple(inner)

    # Kernel blocks of one vLLM block are neighbours; where they also touch they are one piece.
    step = strides[axis]
    if ratio > 1 and step == run:
        kernel_blocks, run = range(1), run * ratio
        shape, axes = (ratio, *shape), (axis, *axes)
    else:
        kernel_blocks = range(ratio)
    pieces = len(kernel_blocks)
    for dim in outer:
        pieces *= sizes[dim]
    if pieces > MAX_PARTS:
        raise LayoutError(
            f"layer {layer}: a block lies in {pieces} separate pieces, at most {MAX_PARTS} are "
            f"supported (shape {tuple(sizes)}, strides {strides})"
        )
    for index in itertools.product(*(range(sizes[d]) for d in outer), kernel_blocks):
        start = tensor.storage_offset() + index[-1] * step
        start += sum(i * strides[d] for i, d in zip(index, outer, strict=False))
        rows = tensor.as_strided((num_blocks, run), (step * ratio, 1), start)
        yield rows.view(torch.uint8), shape, axes


def _block_axis(
    layer: str, tensor: torch.Tensor, num_blocks: int, block_tokens: int
) -> tuple[int, int]:
    """Return the dimension that counts blocks, and the kernel blocks per vLLM block.

    A candidate is dimension 0, or 1 behind a K/V dimension of two. It must count ``num_blocks``
    whole blocks, and another dimension must be the tokens of one kernel block.
    """
    sizes = tuple(tensor.shape)
    found: list[tuple[int, int]] = []
    for axis in (0, 1):
        if axis == 1 and sizes[0] != 2:
            continue
        if len(sizes) < axis + 2 or sizes[axis] % num_blocks:
            continue
        ratio = sizes[axis] // num_blocks
        if ratio < 1 or block_tokens % ratio:
            continue
        if block_tokens // ratio in sizes[axis + 1 :]:
            found.append((axis, ratio))
    if len(found) != 1:
        which = "two dimensions" if found else "no dimension"
        raise LayoutError(
            f"layer {layer}: {which} can count {num_blocks} blocks of {block_tokens} tokens "
            f"in shape {sizes}"
        )
    return found[0]


def _check_injective(layer: str, tensor: torch.Tensor, dims: list[int]) -> None:
    """Refuse a tensor in which two indices may share a byte (expanded, overlapping windows)."""
    reach = 0
    for dim in sorted(dims, key=lambda d: (tensor.stride(d), tensor.shape[d])):
        if tensor.shape[dim] > 1 and tensor.stride(dim) <= reach:
            raise LayoutError(
                f"layer {layer}: elements may overlap: shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}"
            )
        reach += (tensor.shape[dim] - 1) * tensor.stride(dim)


def _check_disjoint(spans: list[Span], views: list[torch.Tensor]) -> None:
    """Refuse regions that share bytes without being the same region.

    Rows of regions whose address ranges interleave can only be compared when they repeat with
    one stride: then they are disjoint exactly when they are disjoint modulo that stride.
    """
    order = sorted(range(len(views)), key=lambda i: views[i].data_ptr())
    cluster: list[int] = []
    end = -1
    for i in order:
        view = views[i]
        if cluster and view.data_ptr() >= end:
            _check_cluster(spans, views, cluster)
            cluster, end = [], -1
        cluster.append(i)
        extent = (view.shape[0] - 1) * view.stride(0) + view.shape[1]
        end = max(end, view.data_ptr() + extent)
    _check_cluster(spans, views, cluster)


def _check_cluster(spans: list[Span], views: list[torch.Tensor], cluster: list[int]) -> None:
    if len(cluster) < 2:
        return
    strides = {views[i].stride(0) for i in cluster if views[i].shape[0] > 1}
    if len(strides) > 1:
        names = ", ".join(sorted({spans[i].layer for i in cluster}))
        raise LayoutError(f"layers {names}: interleaved in memory with strides {sorted(strides)}")
    # A single block has no stride: its regions are compared as plain address ranges.
    period = strides.pop() if strides else 0
    start = {i: views[i].data_ptr() % period if period else views[i].data_ptr() for i in cluster}
    ordered = sorted(cluster, key=lambda i: start[i])
    for a, b in itertools.pairwise(ordered):
        if start[a] + views[a].shape[1] > start[b]:
            raise LayoutError(f"layers {spans[a].layer} and {spans[b].layer} share bytes")
    first, last = ordered[0], ordered[-1]
    if period and start[last] + views[last].shape[1] > start[first] + period:
        raise LayoutError(f"layers {spans[last].layer} and {spans[first].layer} share bytes")
