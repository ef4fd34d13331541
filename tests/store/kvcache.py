# SPDX-License-Identifier: Apache-2.0
"""KV caches of the shapes that attention backends register, and helpers to look at their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from xinference_xavier.layout import BlockLayout, probe_layout
from xinference_xavier.store.device import CpuDevice, IntArray, Mark

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 7, 16, 2, 8, 3

KvCaches = dict[str, torch.Tensor]
Rows = Sequence[tuple[int, ...]]


def _layers(make: Callable[[int], torch.Tensor]) -> KvCaches:
    return {f"layers.{i}.attn": make(i) for i in range(LAYERS)}


def _physical(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of logical ``shape`` whose dimensions lie in memory in ``order``."""
    memory = torch.zeros([shape[d] for d in order], dtype=dtype)
    return memory.permute([order.index(d) for d in range(len(shape))])


def heads_first(dtype: torch.dtype = torch.float32) -> KvCaches:
    return _layers(lambda _: torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype))


def tokens_first() -> KvCaches:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return _layers(lambda _: _physical(shape, (0, 2, 1, 3), torch.bfloat16))


def kv_outermost() -> KvCaches:
    return _layers(lambda _: torch.zeros(2, BLOCKS, TOKENS, HEADS, DIM, dtype=torch.float16))


def kv_second() -> KvCaches:
    return _layers(lambda _: torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM, dtype=torch.float16))


def kv_outermost_logical_only() -> KvCaches:
    shape = (2, BLOCKS, TOKENS, HEADS, DIM)
    return _layers(lambda _: _physical(shape, (1, 0, 2, 3, 4), torch.float16))


def latent() -> KvCaches:
    return _layers(lambda _: torch.zeros(BLOCKS, TOKENS, 36, dtype=torch.bfloat16))


def heads_outside_blocks() -> KvCaches:
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return _layers(lambda _: _physical(shape, (1, 0, 2, 3), torch.float32))


def fused_blocks_outermost() -> KvCaches:
    storage = torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    return _layers(lambda i: storage[:, i])


def fused_layers_outermost() -> KvCaches:
    storage = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    return _layers(lambda i: storage[i])


def padded_pages() -> KvCaches:
    page = HEADS * TOKENS * 2 * DIM
    storage = torch.zeros(BLOCKS * (LAYERS * page + 40), dtype=torch.float32)
    strides = (LAYERS * page + 40, TOKENS * 2 * DIM, 2 * DIM, 1)
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return _layers(lambda i: storage.as_strided(shape, strides, i * page + 8))


def small_kernel_blocks() -> KvCaches:
    return _layers(lambda _: torch.zeros(BLOCKS * 4, HEADS, TOKENS // 4, DIM))


def small_kernel_blocks_kv_outermost() -> KvCaches:
    return _layers(lambda _: torch.zeros(2, BLOCKS * 2, TOKENS // 2, HEADS, DIM))


def small_kernel_blocks_fused() -> KvCaches:
    storage = torch.zeros(BLOCKS * 2, LAYERS, HEADS, TOKENS // 2, DIM)
    return _layers(lambda i: storage[:, i])


def mixed_dtypes() -> KvCaches:
    dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    return _layers(lambda i: torch.zeros(BLOCKS, HEADS, TOKENS, 5, dtype=dtypes[i]))


def shared_layers() -> KvCaches:
    first, second = torch.zeros(2, BLOCKS, HEADS, TOKENS, DIM).unbind()
    return {"a": first, "b": second, "shares a": first, "shares b": second.view(second.shape)}


SHAPES: dict[str, Callable[[], KvCaches]] = {
    make.__name__: make
    for make in (
        heads_first,
        tokens_first,
        kv_outermost,
        kv_second,
        kv_outermost_logical_only,
        latent,
        heads_outside_blocks,
        fused_blocks_outermost,
        fused_layers_outermost,
        padded_pages,
        small_kernel_blocks,
        small_kernel_blocks_kv_outermost,
        small_kernel_blocks_fused,
        mixed_dtypes,
        shared_layers,
    )
}


def probe(kv: KvCaches) -> tuple[BlockLayout, list[torch.Tensor]]:
    return probe_layout(kv, num_blocks=BLOCKS, block_tokens=TOKENS)


def logical_block(tensor: torch.Tensor, block: int, num_blocks: int = BLOCKS) -> torch.Tensor:
    """Return one block of a registered tensor by its meaning, not by its strides."""
    axis = 0 if tensor.shape[0] % num_blocks == 0 else 1
    ratio = tensor.shape[axis] // num_blocks
    return tensor.narrow(axis, block * ratio, ratio)


def assert_views_are_blocks(kv: KvCaches, num_blocks: int, views: list[torch.Tensor]) -> None:
    """Both ways: row k of the views is block k of the tensors, all of it and nothing else."""
    for block in range(num_blocks):
        for tensor in kv.values():
            logical_block(tensor, block, num_blocks).view(torch.uint8).fill_(block + 1)
    for block in range(num_blocks):
        assert all((view[block] == block + 1).all() for view in views)
    for view in views:
        view[num_blocks // 2] = 0
    for block in range(num_blocks):
        expected = 0 if block == num_blocks // 2 else block + 1
        for tensor in kv.values():
            values = logical_block(tensor, block, num_blocks).view(torch.uint8)
            assert (values == expected).all()


class Cache:
    """A KV cache with random bytes, its layout, and its device."""

    def __init__(self, kv: KvCaches, *, num_blocks: int = BLOCKS, tokens: int = TOKENS) -> None:
        self.kv = kv
        self.layout, self.views = probe_layout(kv, num_blocks=num_blocks, block_tokens=tokens)
        self.device = CpuDevice(self.layout, self.views)

    def randomize(self, seed: int) -> Cache:
        rng = np.random.default_rng(seed)
        for view in self.views:
            view.copy_(torch.from_numpy(rng.integers(0, 256, view.shape, dtype=np.uint8)))
        return self

    def block(self, block: int) -> bytes:
        """Return the packed bytes of a block, made without the device under test."""
        return b"".join(view[block].numpy().tobytes() for view in self.views)

    def blocks(self) -> list[bytes]:
        return [self.block(b) for b in range(self.layout.num_blocks)]


def plain_cache(seed: int, *, num_blocks: int = 12, layers: int = 3) -> Cache:
    """Return a cache like the CPU backend's, with blocks of ``layers * 2048`` bytes."""
    kv = {f"layers.{i}": torch.zeros(num_blocks, HEADS, TOKENS, 2 * DIM) for i in range(layers)}
    return Cache(kv, num_blocks=num_blocks).randomize(seed)


def array(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def table(rows: Rows, columns: int) -> IntArray:
    return np.array(list(itertools.chain(*rows)), dtype=np.int64).reshape(-1, columns)


@dataclass
class ScriptedDevice:
    """The real device, with something that happens before or after one kind of copy."""

    cache: Cache
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    then: dict[str, Callable[[], None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def _do(self, name: str, copy: Callable[[], None]) -> None:
        self.calls.append(name)
        self.before.get(name, lambda: None)()
        copy()
        self.then.get(name, lambda: None)()

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        self._do("gather", lambda: self.cache.device.gather(block_ids, data, slots))

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        self._do("scatter", lambda: self.cache.device.scatter(data, slots, block_ids))

    def move(
        self, source: torch.Tensor, source_slots: IntArray, target: torch.Tensor, slots: IntArray
    ) -> None:
        self._do("move", lambda: self.cache.device.move(source, source_slots, target, slots))

    def mark(self) -> Mark | None:
        return self.cache.device.mark()

    def after(self, mark: Mark | None) -> None:
        self.cache.device.after(mark)

    def fence(self) -> None:
        self._do("fence", self.cache.device.fence)

    def close(self) -> None:
        self.cache.device.close()
