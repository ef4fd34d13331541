# SPDX-License-Identifier: Apache-2.0
"""The kernel, interpreted on the CPU and compiled for GPUs, over all layouts."""

from __future__ import annotations

import re
from pathlib import Path

import fake_cuda
import interpreted
import kvcache
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fake_cuda import FakeCuda
from kernel_shapes import SHAPES, odd_sizes
from kvcache import Cache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xinference_xavier.store import kernels
from xinference_xavier.store.cuda_device import CudaDevice

SLOTS = 5


@pytest.fixture(params=SHAPES)
def cache(request: pytest.FixtureRequest) -> Cache:
    return Cache(SHAPES[request.param]()).randomize(3)


def reference_gather(cache: Cache, blocks: list[int], data: torch.Tensor, slots: list[int]) -> None:
    """Pack by meaning: from the registered tensors' logical blocks, span after span."""
    for block, slot in zip(blocks, slots, strict=True):
        packed = torch.cat([view[block] for view in cache.views])
        data[slot, : len(packed)] = packed


def test_interpreted_it_packs_and_unpacks_like_torch(cache: Cache) -> None:
    cuda = FakeCuda(kernel=interpreted.copy_spans)
    memory = cuda.allocate(SLOTS * cache.layout.slot_bytes)
    data = memory.view(SLOTS, cache.layout.slot_bytes)
    rng = np.random.default_rng(1)
    fake_cuda.host(data).copy_(torch.from_numpy(rng.integers(0, 256, data.shape, dtype=np.uint8)))
    expected = fake_cuda.host(data).clone()
    device = CudaDevice(cache.layout, cache.views, cuda)
    try:
        device.gather(kvcache.array(6, 0), data, kvcache.array(1, 4))
        device.fence()
        reference_gather(cache, [6, 0], expected, [1, 4])
        assert torch.equal(fake_cuda.host(data), expected)

        blocks = cache.blocks()
        for block, slot in ((2, 3), (5, 1)):
            blocks[block] = expected[slot, : cache.layout.block_bytes].numpy().tobytes()
        device.scatter(data, kvcache.array(3, 1), kvcache.array(2, 5))
        device.fence()
        assert cache.blocks() == blocks
        assert torch.equal(fake_cuda.host(data), expected)
    finally:
        device.close()
        cuda.free(memory)
    cuda.check_balanced()


@pytest.mark.parametrize("programs", [1, 7])
def test_few_programs_copy_a_long_batch(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    cache = Cache(SHAPES["longer_than_a_program"]()).randomize(3)
    cuda = FakeCuda(kernel=interpreted.copy_spans)
    device = CudaDevice(cache.layout, cache.views, cuda)
    memory = cuda.allocate(SLOTS * cache.layout.slot_bytes)
    data = memory.view(SLOTS, cache.layout.slot_bytes)
    cuda.calls.clear()
    device.gather(kvcache.array(4, 3, 2, 1, 0), data, kvcache.array(0, 1, 2, 3, 4))
    device.fence()
    assert [call[1] for call in cuda.calls if call[0] == "launch"] == [programs]
    packed = fake_cuda.host(data)[:, : cache.layout.block_bytes].numpy()
    assert [row.tobytes() for row in packed] == cache.blocks()[4::-1]
    device.close()
    cuda.free(memory)
    cuda.check_balanced()


def test_a_batch_is_one_launch_whatever_the_number_of_layers() -> None:
    table = kernels.SpanTable.of(*_many_layers(40))
    assert len(table.rows) == 80
    assert table.programs(3) == 3 * 80 * table.chunks
    assert table.programs(275) == kernels.PROGRAMS


def _many_layers(layers: int) -> tuple:
    kv = {
        f"layers.{i}": torch.zeros(2, kvcache.BLOCKS, kvcache.TOKENS, 2, 64, dtype=torch.bfloat16)
        for i in range(layers)
    }
    return kvcache.probe(kv)


@pytest.mark.parametrize(
    ("make", "grain"),
    [
        (kvcache.kv_outermost, 16),
        (kvcache.latent, 16),
        (kvcache.mixed_dtypes, 16),
        (odd_sizes, 1),
    ],
)
def test_words_are_as_wide_as_every_address_and_size_allows(make, grain: int) -> None:
    layout, views = kvcache.probe(make())
    assert kernels.SpanTable.of(layout, views).grain == grain


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120])
@pytest.mark.parametrize("to_slots", [True, False])
def test_it_compiles_for_gpus_with_accesses_of_16_bytes(arch: int, to_slots: bool) -> None:
    constants = kernels.SpanTable.of(*_many_layers(2)).constants(to_slots=to_slots)
    ptx = _compiled(arch, constants)
    assert "ld.global.v2.b64" in ptx
    assert "st.global.v2.b64" in ptx


@pytest.mark.parametrize(("grain", "word"), [(8, "b64"), (4, "b32"), (2, "b16"), (1, "b8")])
def test_narrow_layouts_compile_to_accesses_of_their_word(grain: int, word: str) -> None:
    table = kernels.SpanTable(np.zeros((1, 4), dtype=np.int64), 64, 1, grain, 64)
    ptx = _compiled(90, table.constants(to_slots=True))
    assert set(re.findall(r"st\.global\.(\w+)", ptx)) == {word}


@pytest.fixture(autouse=True)
def compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Nothing floats here; unset, Triton 3.9 warns.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def _compiled(arch: int, constants: dict) -> str:
    arguments = dict.fromkeys(["table", "indices"], "*i64") | {
        "data": "i64",
        "slot_bytes": "i32",
        "rows": "i32",
        "spans": "i32",
        "chunks": "i32",
    }
    source = ASTSource(
        kernels.copy_spans, arguments | dict.fromkeys(constants, "constexpr"), constants, {}
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]


def test_the_interpreter_stays_out_of_the_product() -> None:
    assert isinstance(kernels.copy_spans, triton.JITFunction)
    assert not isinstance(interpreted.copy_spans, triton.JITFunction)
    assert isinstance(tl.sum, triton.JITFunction)
