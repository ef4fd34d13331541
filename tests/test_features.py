# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from xinference_xavier.features import (
    FEATURES,
    VERSIONS,
    EngineFacts,
    RequestFacts,
    Support,
    bypass_reason,
    check_engine,
    check_launch,
    check_version,
    feature_table,
)

GOOD = EngineFacts()


def test_a_plain_engine_is_accepted() -> None:
    assert check_engine(GOOD) == []
    assert check_engine(EngineFacts()) == []


ENGINES: list[tuple[dict[str, object], str, str]] = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2", "set tensor_parallel_size=1"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2", "set pipeline_parallel_size=1"),
    ({"data_parallel_size": 4}, "data_parallel_size=4", "set data_parallel_size=1"),
    ({"device": "rocm"}, "device=rocm", "NVIDIA GPU"),
    ({"device": "xpu"}, "device=xpu", "NVIDIA GPU"),
    ({"machine": "aarch64"}, "machine=aarch64", "x86-64 host"),
    ({"context_parallel_size": 2}, "context_parallel_size=2", "to 1"),
    ({"prefix_caching": False}, "enable_prefix_caching=False", "leave enable_prefix_caching on"),
    ({"hash_algorithm": "sha256"}, "prefix_caching_hash_algo=sha256", "sha256_cbor"),
    ({"kv_groups": ("FullAttentionSpec",) * 2}, "2 KV cache groups", "full attention"),
    ({"kv_groups": ("SlidingWindowSpec",)}, "KV cache of SlidingWindowSpec", "full attention"),
    ({"kv_groups": ()}, "0 KV cache groups", "full attention"),
    (
        {"kv_groups": ("FullAttentionSpec+MLAAttentionSpec",)},
        "KV cache of MLAAttentionSpec",
        "full attention",
    ),
    ({"kv_dtype": "nvfp4"}, "kv_cache_dtype=nvfp4", "set kv_cache_dtype"),
    ({"dynamic_kv_scales": True}, "calculate_kv_scales=True", "calculate_kv_scales=False"),
    ({"kv_role": "kv_producer"}, "kv_role=kv_producer", "kv_both"),
    ({"lora": True}, "enable_lora=True", "without LoRA"),
    ({"speculative": True}, "a speculative configuration", "without it"),
    ({"encoder_decoder": True}, "an encoder-decoder model", "decoder-only"),
    ({"pooling": True}, "a pooling model", "without xavier_gpu_first"),
    ({"sleep_mode": True}, "enable_sleep_mode=True", "leave enable_sleep_mode off"),
    ({"weight_transfer": True}, "a weight_transfer_config", "leave weight_transfer_config out"),
]


@pytest.mark.parametrize(("change", "setting", "instead"), ENGINES)
def test_an_engine_is_refused_for_each_unsupported_feature(
    change: dict[str, object], setting: str, instead: str
) -> None:
    refusals = check_engine(replace(GOOD, **change))  # type: ignore[arg-type]  # by name
    assert len(refusals) == 1
    assert refusals[0].startswith(f"{setting}: ")
    assert "because" in refusals[0]
    assert instead in refusals[0]


def test_every_engine_refusal_of_the_table_can_happen() -> None:
    names = {feature.name for feature in FEATURES if feature.in_engine}
    facts = [replace(GOOD, **change) for change, _, _ in ENGINES]  # type: ignore[arg-type]
    seen = {name for name in names for fact in facts for line in check_engine(fact) if name in line}
    assert seen == names


def test_all_reasons_against_an_engine_are_told_together() -> None:
    assert len(check_engine(replace(GOOD, lora=True, tensor_parallel_size=2))) == 2


def test_nvidia_gpus_are_supported() -> None:
    assert check_engine(replace(GOOD, device="cuda")) == []


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_plain_and_fp8_caches_are_supported(dtype: str) -> None:
    assert check_engine(replace(GOOD, kv_dtype=dtype)) == []


LAUNCHES: list[tuple[dict[str, object], str]] = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
    ({"tensor_parallel_size": "2"}, "tensor_parallel_size=2"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ({"data_parallel_size": 2}, "data_parallel_size=2"),
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
    ({"n_worker": 2}, "n_worker=2"),
    ({"enable_prefix_caching": "false"}, "enable_prefix_caching=false"),
    ({"calculate_kv_scales": True}, "calculate_kv_scales=True"),
    ({"peft_model_config": {"lora_list": ["a"]}}, "peft_model_config="),
    ({"enable_lora": "true"}, "enable_lora='true'"),
    ({"speculative_config": {"method": "ngram"}}, "speculative_config="),
    ({"enable_mtp": True}, "enable_mtp=True"),
    ({"draft_model_path": "/draft"}, "draft_model_path='/draft'"),
    ({"enable_sleep_mode": True}, "enable_sleep_mode=True"),
    ({"enable_weight_cache": True}, "enable_weight_cache=True"),
    ({"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config={"),
    ({"prefix_caching_hash_algo": "sha256"}, "prefix_caching_hash_algo=sha256"),
    (
        {"replica_config": [{"role": "prefill"}, {"role": "decode"}]},
        "replica_config[0].role=prefill",
    ),
    ({"replica_config": '[{"role": "prefill"}]'}, "replica_config=[{"),
    ({"kv_transfer_config": {"kv_connector": "X"}}, "kv_transfer_config="),
    ({"kv_offloading_size": 4}, "kv_offloading_size=4"),
    ({"xavier_cache_backend": "lmcache"}, "xavier_cache_backend='lmcache'"),
    ({"transfer_backend_type": "nixl"}, "transfer_backend_type='nixl'"),
    ({"_nixl_config": {"role": "decode"}}, "_nixl_config={"),
    ({"_xavier_cache_config": {"backend": "x"}}, "_xavier_cache_config={"),
]


@pytest.mark.parametrize(("options", "setting"), LAUNCHES)
def test_a_launch_is_refused_for_each_unsupported_option(
    options: dict[str, object], setting: str
) -> None:
    refusals = check_launch({"model_name": "m", "replica": 2, **options})
    assert len(refusals) == 1
    assert refusals[0].startswith(setting)
    assert "xavier_gpu_first" in refusals[0]


def test_every_launch_refusal_of_the_table_can_happen() -> None:
    names = {feature.name for feature in FEATURES if feature.in_launch}
    lines = [line for options, _ in LAUNCHES for line in check_launch(options)]
    assert {name for name in names if any(name in line for line in lines)} == names


def test_only_the_two_rows_that_the_launch_itself_checks_are_refused_without_a_test() -> None:
    untested = [
        feature.name
        for feature in FEATURES
        if feature.support is Support.REFUSED and not (feature.in_engine or feature.in_launch)
    ]
    assert untested == ["GPU-first without enable_xavier", "another engine than vLLM"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 1, "n_worker": "1", "pipeline_parallel_size": None},
        {"tensor_parallel_size": "auto"},
        {"enable_lora": "false", "speculative_config": None, "kv_offloading_size": 0},
        {"enable_prefix_caching": True, "peft_model_config": {}},
        {"prefix_caching_hash_algo": None, "enable_weight_cache": "false"},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"replica_config": [{"role": "hybrid"}, {}]},
        {"replica_config": "[]"},
    ],
)
def test_a_launch_that_says_nothing_unsupported_is_accepted(options: dict[str, object]) -> None:
    assert check_launch(options) == []


@pytest.mark.parametrize(
    ("facts", "feature"),
    [
        (RequestFacts(), None),
        (RequestFacts(prompt_logprobs=True), "prompt log probabilities"),
        (RequestFacts(prompt_embeds=True), "prompt embeddings"),
        (RequestFacts(multimodal=True), "images, audio or video in a request"),
        (RequestFacts(pooling=True), "pooling requests"),
        (RequestFacts(skips_prefix_cache=True), "requests that skip the prefix cache"),
    ],
)
def test_requests_that_cannot_share_are_bypassed_with_a_reason(
    facts: RequestFacts, feature: str | None
) -> None:
    assert bypass_reason(facts) == feature
    bypassed = {row.name for row in FEATURES if row.support is Support.BYPASSED}
    assert feature is None or feature in bypassed


def test_the_table_has_one_support_and_a_reason_for_every_feature() -> None:
    rows = feature_table()
    assert max(Counter(row["name"] for row in rows).values()) == 1
    for feature, row in zip(FEATURES, rows, strict=True):
        assert row["support"] == feature.support.value
        assert row["reason"]
        # Who is refused, or must look out alone, is told what to do.
        assert bool(row["instead"]) == (feature.support in (Support.REFUSED, Support.UNSEEN))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vllm", "0.27.1"),
        ("vllm", "0.27.1+cpu"),
        ("vllm", "0.32.5.post1"),
        ("xinference", "4.1.0"),
        ("xinference", "4.9"),
        ("xoscar", "0.12.2"),
    ],
)
def test_known_versions_are_accepted(name: str, found: str) -> None:
    assert check_version(name, found) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vllm", "0.26.9"),
        ("vllm", "0.33.0"),
        ("vllm", "0.33.0rc1"),
        ("vllm", "unknown"),
        ("xinference", "4.0.3"),
        ("xinference", "5.0"),
        ("xoscar", "0.12.1"),
    ],
)
def test_other_versions_are_refused_with_what_is_needed(name: str, found: str) -> None:
    message = check_version(name, found)
    assert message is not None
    assert f"{name} {found}" in message
    assert all(bound in message for bound in VERSIONS[name])
