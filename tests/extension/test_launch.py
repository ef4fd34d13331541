# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from xinference_xavier.extension.launch import (
    CARRIER,
    Launch,
    read_carrier,
    translate,
    with_default,
)
from xinference_xavier.options import OptionError

GPU_FIRST = {
    "model_name": "m",
    "model_engine": "vLLM",
    "replica": 2,
    "enable_xavier": True,
    "xavier_gpu_first": True,
}


def launch(**values: Any) -> Launch:
    translated = translate({**GPU_FIRST, **values})
    assert isinstance(translated, Launch)
    return translated


def refusal(**values: Any) -> str:
    with pytest.raises(OptionError) as refused:
        translate({**GPU_FIRST, **values})
    return str(refused.value)


@pytest.mark.parametrize(
    "payload",
    [
        {"model_name": "m", "model_engine": "vLLM", "max_model_len": 100},
        {"model_name": "m", "enable_xavier": True, "xavier_gpu_cache_bytes": 5},
        {"model_name": "m", "enable_xavier": True, "xavier_cache_backend": "lmcache"},
        {"model_name": "m", "xavier_something_new_in_stock": 1},
    ],
)
def test_a_launch_without_gpu_first_is_the_same_object(payload: dict[str, Any]) -> None:
    assert translate(payload) is payload


@pytest.mark.parametrize("off", [False, "false", "0", None])
def test_gpu_first_switched_off_leaves_a_stock_launch(off: Any) -> None:
    stock = {"model_name": "m", "enable_xavier": True, "xavier_gpu_cache_bytes": 5}
    ours = {"xavier_gpu_first": off, "xavier_transport": "shm", "xavier_cpu_cache_bytes": "1GiB"}
    assert translate({**stock, **ours}) == stock


@pytest.mark.parametrize("on", [True, "true", "True", 1, "1"])
def test_switches_may_be_words(on: Any) -> None:
    assert launch(xavier_gpu_first=on, enable_xavier=on).options.xavier_gpu_first


def test_stock_xinference_sees_nothing_of_xavier_but_the_carrier() -> None:
    translated = launch(
        xavier_gpu_cache_bytes="1MiB", xavier_min_load_tokens=64, max_model_len=1024
    )
    payload = dict(translated.payload)
    carried = payload.pop(CARRIER)
    assert payload == {
        "model_name": "m",
        "model_engine": "vLLM",
        "replica": 2,
        "max_model_len": 1024,
    }
    assert read_carrier(carried) == translated.options
    assert translated.options.xavier_gpu_cache_bytes.bytes == 2**20
    assert translated.replicas == 2


def test_the_carrier_survives_xinferences_views_and_stores() -> None:
    translated = launch(xavier_min_load_tokens=64)
    # A view blanks values of names with "token"; recovery stores JSON. Text passes both.
    assert isinstance(translated.payload[CARRIER], str)
    replayed = translate(json.loads(json.dumps(translated.payload)))
    assert isinstance(replayed, Launch)
    assert replayed == translated


def test_a_replayed_launch_may_be_changed() -> None:
    replayed = translate({**launch().payload, "xavier_transport": "shm", "replica": 3})
    assert isinstance(replayed, Launch)
    assert replayed.options.xavier_transport == "shm"
    assert replayed.replicas == 3


@pytest.mark.parametrize("carried", ["{", "[]", "******", 5, None])
def test_a_broken_carrier_is_refused(carried: Any) -> None:
    with pytest.raises(OptionError, match=CARRIER):
        translate({"model_name": "m", CARRIER: carried})


@pytest.mark.parametrize("value", [None, False, "false", "0"])
def test_gpu_first_needs_xinferences_own_switch(value: Any) -> None:
    assert "needs enable_xavier=true" in refusal(enable_xavier=value)


def test_a_switch_that_is_no_switch_is_refused() -> None:
    assert "enable_xavier='maybe' is not allowed" in refusal(enable_xavier="maybe")
    assert "xavier_gpu_first" in refusal(xavier_gpu_first="maybe")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xavier_gpu_cache_bytes", True),
        ("xavier_gpu_cache_bytes", -1),
        ("xavier_gpu_cache_bytes", float("nan")),
        ("xavier_gpu_cache_bytes", 1.5),
        ("xavier_gpu_cache_bytes", "5 parsecs"),
        ("xavier_cpu_cache_bytes", "101%"),
        ("xavier_transport", "pigeon"),
        ("xavier_load_timeout", 0),
        ("xavier_lookup_timeout", "soon"),
        ("xavier_min_load_tokens", -1),
        ("xavier_verify", "maybe"),
    ],
)
def test_a_bad_value_is_named_with_its_option(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message


def test_an_unknown_option_gets_the_nearest_name() -> None:
    assert "did you mean xavier_gpu_cache_bytes?" in refusal(xavier_gpu_cache_byte=1)


def test_a_misspelt_switch_is_not_taken_for_stock() -> None:
    with pytest.raises(OptionError, match=r"xavier_gpufirst: did you mean xavier_gpu_first\?"):
        translate({"model_name": "m", "enable_xavier": True, "xavier_gpufirst": True})


def test_our_options_without_the_switch_point_to_it() -> None:
    with pytest.raises(OptionError, match="xavier_transport: only for xavier_gpu_first=true"):
        translate({"model_name": "m", "enable_xavier": True, "xavier_transport": "shm"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_engine": "transformers"}, "model_engine='transformers'"),
        ({"model_type": "embedding"}, "model_type='embedding'"),
        ({"n_worker": 2}, "n_worker=2"),
        ({"n_gpu": 2}, "n_gpu=2"),
        ({"gpu_idx": [0, 1, 2, 3]}, "gpu_idx=[0, 1, 2, 3]"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"peft_model_config": {"lora_list": []}}, "LoRA"),
        ({"enable_lora": "true"}, "LoRA"),
        ({"speculative_config": {"method": "ngram"}}, "speculative"),
        ({"enable_mtp": True}, "enable_mtp"),
        ({"draft_model_path": "/somewhere"}, "draft_model_path"),
        (
            {"replica_config": [{"role": "prefill"}, {"role": "decode"}]},
            "replica_config[0].role=prefill",
        ),
        ({"kv_transfer_config": {"kv_connector": "X"}}, "kv_transfer_config"),
        ({"xavier_cache_backend": "lmcache"}, "xavier_cache_backend"),
        ({"vllm_transfer_backend_type": "nixl"}, "vllm_transfer_backend_type"),
        ({"transfer_backend_type": "nixl"}, "transfer_backend_type"),
        ({"xavier_cache_bytes": 5}, "use xavier_cpu_cache_bytes"),
        ({"enable_weight_cache": True}, "enable_weight_cache"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching"),
        ({"prefix_caching_hash_algo": "sha256"}, "prefix_caching_hash_algo=sha256"),
        ({"xavier_gpu_cache_bytes": 0, "xavier_cpu_cache_bytes": 0}, "no room"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    assert said in refusal(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"model_engine": "vllm", "model_type": "LLM"},
        {"n_worker": 1, "n_gpu": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": "1"},
        {"n_gpu": None},
        {"n_gpu": "auto"},
        {"gpu_idx": [0, 1]},
        {"gpu_idx": 1, "replica": 1},
        {"peft_model_config": None, "enable_lora": "false", "enable_mtp": "false"},
        {"speculative_config": {}},
        {"replica_config": [{"devices": [{"worker_ip": "a:1"}]}, {"role": "hybrid"}]},
        {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor"},
        {"kv_transfer_config": None, "xavier_cache_backend": None},
        {"replica": 1},
        {"replica": "2"},
        {"xavier_gpu_cache_bytes": 0},
    ],
)
def test_what_is_the_default_anyway_may_be_said(values: dict[str, Any]) -> None:
    assert launch(**values).options.xavier_gpu_first


def test_everything_wrong_is_told_at_once() -> None:
    message = refusal(model_engine="SGLang", n_worker=2, xavier_verify="maybe")
    assert message.count("; ") >= 2
    for said in ("model_engine='SGLang'", "n_worker=2", "xavier_verify='maybe'"):
        assert said in message


def test_a_default_never_overrides_a_choice() -> None:
    assert (
        with_default(launch(), "enable_virtual_env", False).payload["enable_virtual_env"] is False
    )
    chosen = launch(enable_virtual_env=True)
    assert with_default(chosen, "enable_virtual_env", False).payload["enable_virtual_env"] is True
