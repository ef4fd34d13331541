# SPDX-License-Identifier: Apache-2.0
"""A `cache_salt` is never crossed: not in a replica's own store, nor between two replicas."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_worker import Registry
from packaging.version import Version
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm_harness import Engine, Make, make_request, prompt_of

from tests.control.control_harness import cluster, eventually
from xinference_xavier.installed import vllm_version

PROMPT = prompt_of(1, 100)
BLOCKS = len(PROMPT) // 16
WITHIN_S = 60.0

SALTS = (None, "one", "two", "one ", "ONE", "adapter", "None", "0")


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with cluster() as group:
        yield group.directory().address


def keys_of_salted(salt: str | None) -> list[bytes]:
    return list(make_request("any", PROMPT, 1, salt=salt).block_hashes)


def hears_of(engine: Engine, salt: str | None) -> bool:
    found = engine.mirror.longest(keys_of_salted(salt)[:BLOCKS], 0, engine.runtime.usable_mask())
    return found is not None and found[1] == BLOCKS


def ask(engine: Engine, salt: str | None) -> int:
    """Return the hit tokens of the prompt under a salt."""
    before = engine.loaded_tokens
    request_id = engine.add(PROMPT, 2, salt=salt)

    def done() -> bool:
        engine.step()
        return request_id in engine.reasons

    eventually(done, WITHIN_S)
    engine.run()
    return engine.cached[request_id] + engine.loaded_tokens - before


@pytest.mark.usefixtures("vllm_config")
def test_every_salt_names_blocks_of_its_own() -> None:
    blocks = [key for salt in SALTS for key in keys_of_salted(salt)[:BLOCKS]]
    assert len(set(blocks)) == len(SALTS) * BLOCKS


@pytest.mark.parametrize("computed", [None, "one"], ids=["unsalted", "salted"])
def test_only_the_same_salt_hits_at_another_replica(
    make: Make, directory: str, computed: str | None
) -> None:
    registry: Registry = {}
    source, reader = (
        make(
            name=name, directory=directory, registry=registry, options={"xavier_lookup_timeout": 10}
        )
        for name in ("source", "reader")
    )
    eventually(lambda: source.runtime.connected and reader.runtime.connected, WITHIN_S)
    assert ask(source, computed) == 0
    eventually(lambda: hears_of(reader, computed), WITHIN_S)
    for salt in SALTS:
        if salt != computed:
            assert ask(reader, salt) == 0, salt
    assert ask(reader, computed) >= 16
    for engine in (source, reader):
        engine.check_answers()
        engine.index.check_invariants()


def test_only_the_same_salt_hits_in_the_own_store(make: Make) -> None:
    engine = make()
    for salt in SALTS:
        assert ask_own(engine, salt) == 0, salt
    for salt in SALTS:
        assert ask_own(engine, salt) == BLOCKS * 16, salt
    engine.check_all()


def ask_own(engine: Engine, salt: str | None) -> int:
    engine.forget_local()
    before = engine.loaded_tokens
    engine.ask(PROMPT, salt=salt)
    return engine.loaded_tokens - before


def test_a_salt_can_name_the_first_block_of_a_lora_which_is_why_none_is_served() -> None:
    """vLLM 0.27 tells a salt from an adapter's name by nothing; our features refuse engines with
    LoRA. 0.32 has them apart: once 0.27 is not let in any more, that reason to refuse is gone.
    """
    salted = make_request("salted", PROMPT, 1, salt="adapter")
    adapted = make_request("adapted", PROMPT, 1)
    adapted.lora_request = SimpleNamespace(lora_name="adapter", lora_path="somewhere")
    salted_keys, _ = generate_block_hash_extra_keys(salted, 0, 16, 0)
    adapted_keys, _ = generate_block_hash_extra_keys(adapted, 0, 16, 0)
    assert (salted_keys == adapted_keys) is (Version(vllm_version()) < Version("0.32"))
