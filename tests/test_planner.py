# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic, and what it reads of models' configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.planner import (
    DTYPE_BYTES,
    KvShape,
    Memory,
    UnknownBlock,
    UnsupportedModel,
    make_plan,
    read_config,
    shape_of,
    with_request,
)
from xinference_xavier.schemas import Plan, PlannedModel, PlanRequest
from xinference_xavier.tiers import (
    LEAST_HOST_SLOTS,
    MOST_STAGING,
    reserved_slots,
    spare_slots,
    staging_slots,
)

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "torch_dtype": "bfloat16",
    "sliding_window": 32768,
    "use_sliding_window": False,
}
"""The part that counts of the configuration of Qwen2.5-0.5B."""


def plan_of(block_bytes: int | None = 196608, *, memory: Memory | None = None, **more: Any) -> Plan:
    return make_plan(
        PlanRequest(**more),
        model=PlannedModel(source="numbers"),
        block_bytes=block_bytes,
        block_tokens=16,
        memory=memory,
    )


# -- blocks ----------------------------------------------------------------------------------------


def test_a_block_is_keys_and_values_of_all_layers() -> None:
    assert KvShape(24, 2, 64, "bfloat16").block_bytes(16) == 196608
    assert KvShape(24, 2, 64, "fp8").block_bytes(32) == 196608


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (QWEN, (24, 2, 64, "bfloat16")),
        ({**QWEN, "head_dim": 128}, (24, 2, 128, "bfloat16")),
        # vLLM runs weights in float32 with 16 bits unless told otherwise.
        ({**QWEN, "torch_dtype": "float32"}, (24, 2, 64, "bfloat16")),
        ({**QWEN, "torch_dtype": None, "dtype": "float16"}, (24, 2, 64, "float16")),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64, "bfloat16")),
        ({"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}, (32, 1, 64)),
        (
            {"num_layers": 28, "multi_query_group_num": 2, "kv_channels": 128}
            | {"num_attention_heads": 32, "hidden_size": 4096},
            (28, 2, 128, "bfloat16"),
        ),
        ({"vision_config": {}, "text_config": QWEN}, (24, 2, 64, "bfloat16")),
        ({**QWEN, "layer_types": ["full_attention"] * 24}, (24, 2, 64, "bfloat16")),
        ({**QWEN, "attention_chunk_size": None, "head_dim": None}, (24, 2, 64, "bfloat16")),
    ],
)
def test_configurations_of_many_families_are_read(
    config: dict[str, Any], shape: tuple[Any, ...]
) -> None:
    found = shape_of(config)
    assert (found.layers, found.kv_heads, found.head_dim, found.dtype)[: len(shape)] == shape


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**QWEN, "kv_lora_rank": 512}, "latent attention"),
        ({**QWEN, "use_sliding_window": True}, "sliding window attention"),
        ({**QWEN, "full_attention_interval": 4}, "chunked, linear or state-space layers"),
        ({"text_config": {**QWEN, "attention_chunk_size": 8192}}, "chunked, linear or state-space"),
        (
            {**QWEN, "layer_types": ["full_attention", "linear_attention", "sliding_attention"]},
            "layers of linear_attention, sliding_attention",
        ),
    ],
)
def test_models_that_are_refused_are_told_as_such(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        shape_of(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "does not tell its layers and heads"),
        ({**QWEN, "num_hidden_layers": "many"}, "num_hidden_layers"),
        ({**QWEN, "num_attention_heads": 0}, "num_attention_heads"),
        ({**QWEN, "layer_types": 5}, "layer_types"),
    ],
)
def test_configurations_that_tell_too_little_are_unknown(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownBlock, match=said):
        shape_of(config)


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}},
        {"compression_config": {"kv_cache_scheme": FP8}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
        {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
    ],
)
def test_a_checkpoints_own_type_of_kv_cache_counts(quantization: dict[str, Any]) -> None:
    shape = shape_of({**QWEN, **quantization})
    assert with_request(shape, PlanRequest()) == KvShape(24, 2, 64, "fp8")
    # The type that the model runs in is another thing; that of the cache is the launch's to say.
    assert with_request(shape, PlanRequest(dtype="float16")).dtype == "fp8"
    assert with_request(shape, PlanRequest(kv_cache_dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize("scheme", [None, {}])
def test_quantized_weights_alone_leave_the_cache_as_it_is(scheme: Any) -> None:
    config = {"quantization_config": {"quant_method": "awq", "kv_cache_scheme": scheme}}
    assert shape_of({**QWEN, **config}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"kv_cache_scheme": {**FP8, "num_bits": 4}}, "float of 4 bits is not a type"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4 is not a type"),
    ],
)
def test_a_checkpoints_type_of_kv_cache_that_is_not_known_is_told(
    quantization: dict[str, Any], said: str
) -> None:
    shape = shape_of({**QWEN, "quantization_config": quantization})
    with pytest.raises(UnknownBlock, match=said):
        with_request(shape, PlanRequest(dtype="float16"))
    assert with_request(shape, PlanRequest(kv_cache_dtype="fp8")).dtype == "fp8"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no config.json"), ("{", "cannot be read"), ("[1]", "holds no object")],
)
def test_files_that_are_no_configuration_are_unknown(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnknownBlock, match=said):
        read_config(tmp_path)


def test_a_requests_numbers_win_over_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    shape = read_config(tmp_path)
    assert with_request(shape, PlanRequest()) == shape
    changed = with_request(shape, PlanRequest(layers=2, dtype="half", kv_cache_dtype="auto"))
    assert changed == KvShape(2, 2, 64, "float16")
    assert with_request(shape, PlanRequest(dtype="float", kv_cache_dtype="fp8_e5m2")).dtype == "fp8"
    with pytest.raises(UnknownBlock, match="int3 is not a type"):
        with_request(shape, PlanRequest(kv_cache_dtype="int3"))


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "blocks", "tokens"), [("256MiB", 1365, 21840), ("8MiB", 42, 672), (0, 0, 0)]
)
def test_reference_budgets(budget: Any, blocks: int, tokens: int) -> None:
    plan = plan_of(xavier_gpu_cache_bytes=budget, xavier_cpu_cache_bytes="4GiB")
    assert (plan.gpu_blocks, plan.gpu_tokens) == (blocks, tokens)
    assert plan.valid


def test_percentages_need_the_memory_that_they_are_a_share_of() -> None:
    plan = plan_of(xavier_gpu_cache_bytes="10%", xavier_cpu_cache_bytes="50%")
    assert plan.per_replica.gpu.budget_bytes is plan.cpu_blocks is None
    assert plan.valid
    known = plan_of(xavier_gpu_cache_bytes="10%", memory=Memory(gpu_total=10 * 196608))
    assert known.gpu_blocks == 1


def test_slots_are_what_is_counted() -> None:
    plan = plan_of(1000, xavier_gpu_cache_bytes=10_239, xavier_cpu_cache_bytes=0)
    assert (plan.block_bytes, plan.slot_bytes, plan.gpu_blocks) == (1000, 1024, 9)


@pytest.mark.parametrize(
    ("slots", "step", "reserved"), [(0, 8, 0), (3, 8, 2), (32, 128, 9), (32, 4, 6), (10**6, 8, 264)]
)
def test_reserved_slots_grow_with_the_tier_up_to_a_step(
    slots: int, step: int, reserved: int
) -> None:
    assert reserved_slots(slots, step) == reserved


@given(slots=st.integers(0, 100_000), step=st.integers(1, 1000))
def test_a_tier_keeps_some_slots_of_each_kind_and_room_for_blocks(slots: int, step: int) -> None:
    staging = staging_slots(slots)
    spare = spare_slots(slots - staging, step)
    assert staging + spare == reserved_slots(slots, step)
    assert staging <= MOST_STAGING
    assert spare <= step
    if slots >= LEAST_HOST_SLOTS:
        assert staging >= 1
        assert spare >= 1
        assert slots - staging - spare >= slots // 2


@given(
    layers=st.integers(1, 100),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    gpu=st.integers(0, 1 << 40),
    cpu=st.integers(0, 1 << 40),
    replicas=st.integers(1, 64),
)
def test_plans_account_for_every_byte(
    layers: int, kv_heads: int, head_dim: int, dtype: str, gpu: int, cpu: int, replicas: int
) -> None:
    block = KvShape(layers, kv_heads, head_dim, dtype).block_bytes(16)
    plan = plan_of(block, xavier_gpu_cache_bytes=gpu, xavier_cpu_cache_bytes=cpu, replica=replicas)
    assert plan.slot_bytes is not None
    assert block <= plan.slot_bytes < block + 64
    for tier, budget in ((plan.per_replica.gpu, gpu), (plan.per_replica.cpu, cpu)):
        assert tier.blocks is not None
        assert tier.reserved_blocks is not None
        assert tier.unused_bytes is not None
        assert 0 <= tier.unused_bytes < plan.slot_bytes
        slots = tier.blocks + tier.reserved_blocks
        assert slots * plan.slot_bytes + tier.unused_bytes == budget
        assert tier.tokens == tier.blocks * 16
    for name, tier in plan.per_replica:
        for key, value in tier.model_dump().items():
            assert getattr(getattr(plan.total, name), key) == value * replicas
    assert plan.valid is not bool(plan.errors)


def test_the_workers_floor_is_the_planners() -> None:
    least = LEAST_HOST_SLOTS * 196608
    assert plan_of(xavier_gpu_cache_bytes=0, xavier_cpu_cache_bytes=least).valid
    below = plan_of(xavier_gpu_cache_bytes=196607, xavier_cpu_cache_bytes=least - 1)
    assert [error.code for error in below.errors] == ["below_block", "below_block"]
    assert [error.field for error in below.errors] == [
        "xavier_gpu_cache_bytes",
        "xavier_cpu_cache_bytes",
    ]
