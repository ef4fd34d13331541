# SPDX-License-Identifier: Apache-2.0
"""Replicas that differ in anything that shapes KV bytes or names blocks are strangers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models import make_tiny_llama
from xinference_xavier.control.messages import MAX_TRAITS, TRAIT_CHARACTERS, WEIGHTS_TRAIT
from xinference_xavier.identity import fingerprint, traits
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.vllm import identity
from xinference_xavier.vllm.identity import SEED_VARIABLE, fix_hash_seed, group_fields
from xinference_xavier.vllm.metadata import Handshake

Change = Callable[[Any], None]


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "0")


def config_of(model: Path | str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            hf_config=HfConfig(rope_theta=10000.0, hidden_size=64),
            max_model_len=4096,
            dtype="torch.float32",
            quantization=None,
            seed=0,
            trust_remote_code=False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor", block_size=16
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        attention_config=SimpleNamespace(backend=None),
    )


def ranks(**changes: Any) -> list[Handshake]:
    worker = WorkerHandle(0, "host", changes.pop("layout", "layout"), {})
    handshake = Handshake(
        worker=worker,
        device="cpu",
        device_slots=8,
        host_slots=8,
        staging_slots=1,
        block_bytes=64,
        slot_bytes=64,
        block_tokens=16,
    )
    return [replace(handshake, **changes)]


def fields_of(
    config: Any, handshakes: list[Handshake] | None = None, **options: Any
) -> dict[str, Any]:
    return group_fields(config, handshakes or ranks(), XavierOptions.from_mapping(options))


def of(config: Any, handshakes: list[Handshake] | None = None, **options: Any) -> bytes:
    return fingerprint(fields_of(config, handshakes, **options))


def test_the_traits_name_exactly_what_differs(model: Path) -> None:
    other = config_of(model)
    other.model_config.dtype = "torch.bfloat16"
    ours, theirs = (
        dict(traits(fields))
        for fields in (fields_of(config_of(model)), fields_of(other, ranks(device="cuda")))
    )
    assert {name for name in ours if ours[name] != theirs[name]} == {"dtype", "device", "isa"}
    assert ours[WEIGHTS_TRAIT] == theirs[WEIGHTS_TRAIT]
    assert len(ours) <= MAX_TRAITS
    assert all(len(text) <= TRAIT_CHARACTERS for trait in ours.items() for text in trait)


def test_two_replicas_of_one_model_are_one_group(model: Path) -> None:
    assert of(config_of(model)) == of(config_of(model))


CHANGES: list[Change] = [
    lambda c: setattr(c.model_config, "revision", "v2"),
    lambda c: setattr(c.model_config, "hf_config", HfConfig(rope_theta=5e5, hidden_size=64)),
    lambda c: setattr(c.model_config, "max_model_len", 131072),
    lambda c: setattr(c.model_config, "dtype", "torch.bfloat16"),
    lambda c: setattr(c.model_config, "quantization", "fp8"),
    lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
    lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash_cbor"),
    lambda c: setattr(c.attention_config, "backend", "FLASHINFER"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_one_setting_makes_strangers(model: Path, number: int) -> None:
    other = copy.deepcopy(config_of(model))
    CHANGES[number](other)
    assert of(other) != of(config_of(model))


@pytest.mark.parametrize(
    "changes", [{"layout": "other"}, {"block_tokens": 32}, {"device": "cuda"}], ids=str
)
def test_what_the_workers_built_makes_strangers(model: Path, changes: dict[str, Any]) -> None:
    assert of(config_of(model), ranks(**changes)) != of(config_of(model))


def test_the_number_of_ranks_makes_strangers(model: Path) -> None:
    assert of(config_of(model), ranks() * 2) != of(config_of(model))


def test_a_hash_seed_makes_strangers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(config_of(model))
    monkeypatch.setenv(SEED_VARIABLE, "1")
    assert of(config_of(model)) != before


def test_a_replica_that_publishes_no_checksums_is_a_stranger_to_one_that_needs_them(
    model: Path,
) -> None:
    assert of(config_of(model), xavier_verify="checksum") != of(config_of(model))


def test_other_weights_make_strangers_and_an_identity_overrides_them(
    model: Path, tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=1)
    same_name = config_of(other)
    same_name.model_config.model = str(other)
    assert of(same_name, xavier_identity="mine") != of(same_name)
    assert identity._weights(same_name) != identity._weights(config_of(model))


def test_a_host_may_keep_the_files_elsewhere_where_an_identity_is_given(
    model: Path, tmp_path: Path
) -> None:
    here, there = config_of(model), config_of(make_tiny_llama(tmp_path / "elsewhere"))
    for config in (here, there):
        config.model_config.hf_config.values["_name_or_path"] = config.model_config.model
    assert of(here) != of(there)
    assert of(here, xavier_identity="mine") == of(there, xavier_identity="mine")


def test_dummy_weights_are_told_apart_by_their_seed(model: Path) -> None:
    one, other = config_of(model), config_of(model)
    for config in (one, other):
        config.load_config.load_format = "dummy"
    other.model_config.seed = 1
    assert of(one) != of(other)


def test_remote_code_counts_when_it_is_run(model: Path, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    config = config_of(folder)
    config.model_config.trust_remote_code = True
    before = of(config)
    (folder / "modeling_own.py").write_text("# another attention")
    assert of(config) != before


def test_a_hub_s_name_is_resolved_to_the_files_in_its_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **how: Any) -> str:
        asked.update(how, name=name)
        return str(model)

    monkeypatch.setattr(identity, "snapshot_download", snapshot)
    assert len(of(config_of("Org/Model"))) == 32
    assert asked["name"] == "Org/Model"
    assert asked["local_files_only"] is True


def test_a_model_without_files_is_refused_with_the_option_to_set(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="set xavier_identity"):
        of(config_of("no-such-org/no-such-model"))
    assert len(of(config_of("no-such-org/no-such-model"), xavier_identity="mine")) == 32


@pytest.mark.parametrize(("given", "kept"), [("7", "7"), ("random", "0"), (None, "0")])
def test_the_hash_seed_is_a_number_in_every_replica(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    if given is None:
        monkeypatch.delenv(SEED_VARIABLE)
    else:
        monkeypatch.setenv(SEED_VARIABLE, given)
    fix_hash_seed()
    assert identity.os.environ[SEED_VARIABLE] == kept
