# SPDX-License-Identifier: Apache-2.0
"""The layouts of vLLM's CUDA backends: each is proved block by block, on CPU tensors."""

from __future__ import annotations

import backend_shapes
import numpy as np
import pytest
import torch
from backend_shapes import BLOCKS, BUILDS, TOKENS, Build
from kvcache import assert_views_are_blocks

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
