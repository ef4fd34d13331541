# SPDX-License-Identifier: Apache-2.0
"""What the connector reads out of vLLM's configuration before anything is allocated."""

from __future__ import annotations

import platform
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from xinference_xavier.features import HASH_ALGORITHM, EngineFacts
from xinference_xavier.options import OptionError
from xinference_xavier.preflight import EngineClaim
from xinference_xavier.vllm import engine

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
FP8 = replace(FULL, dtype=torch.uint8)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


def config(**cache: Any) -> Any:
    one = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    contexts = {f"{kind}_context_parallel_size": 1 for kind in ("decode", "prefill")}
    plain = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": HASH_ALGORITHM,
        "cache_dtype": "auto",
        "calculate_kv_scales": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**one, **contexts),
        cache_config=SimpleNamespace(**{**plain, **cache}),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, runner_type="generate", enable_sleep_mode=False
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        lora_config=None,
        speculative_config=None,
        weight_transfer_config=None,
    )


def kv_cache(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def together(**layers: KVCacheSpec) -> KVCacheSpec:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)


def test_a_plain_engine_on_this_host_has_nothing_to_refuse() -> None:
    facts = engine.engine_facts(config(), kv_cache(FULL))
    assert facts == EngineFacts(device="cpu", machine=platform.machine())
    engine.check_engine_config(config(), kv_cache(FULL))


def test_layers_that_differ_in_type_alone_are_one_group_of_full_attention() -> None:
    engine.check_engine_config(config(), kv_cache(together(a=FULL, b=FP8)))


def test_one_layer_of_another_kind_in_a_group_is_refused() -> None:
    with pytest.raises(OptionError, match="KV cache of MLAAttentionSpec"):
        engine.check_engine_config(config(), kv_cache(together(a=FULL, b=LATENT)))


@pytest.mark.parametrize("name", ["rocm", "xpu", "tpu"])
def test_other_accelerators_are_refused_also_where_torch_calls_them_cuda(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = SimpleNamespace(device_name=name, device_type="cuda")
    monkeypatch.setattr(engine, "current_platform", found)
    with pytest.raises(OptionError, match=f"device={name}: other accelerators"):
        engine.check_engine_config(config(), kv_cache(FULL))


def test_hosts_whose_processors_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="machine=aarch64: hosts other than x86-64"):
        engine.check_engine_config(config(), kv_cache(FULL))


@pytest.mark.parametrize("kv_bytes", [None, 5000])
def test_the_claim_on_a_device_is_vllms_own_configuration(kv_bytes: int | None) -> None:
    asked = config(gpu_memory_utilization=0.7, kv_cache_memory_bytes=kv_bytes)
    assert engine.device_claim(asked) == EngineClaim(0.7, kv_bytes)
