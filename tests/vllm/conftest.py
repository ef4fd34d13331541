# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_harness import SCHEDULERS, Engine, Make


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """vLLM's resolved configuration for a tiny model; no weights are read here."""
    model: Path = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 257,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 8192,
                "torch_dtype": "float32",
            }
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        init_none_hash(sha256_cbor)
        yield EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=16,
            max_num_batched_tokens=256,
            max_num_seqs=8,
            prefix_caching_hash_algo="sha256_cbor",
        ).create_engine_config()


@pytest.fixture(params=SCHEDULERS, ids=lambda scheduler: scheduler.__name__)
def scheduler_class(request: pytest.FixtureRequest) -> type[Scheduler]:
    return request.param


@pytest.fixture
def make(vllm_config: VllmConfig, scheduler_class: type[Scheduler]) -> Iterator[Make]:
    """Make engines of the scheduler class under test; shut them down afterwards."""
    engines: list[Engine] = []

    def build(**arguments: Any) -> Engine:
        engines.append(Engine(vllm_config, scheduler_class, **arguments))
        return engines[-1]

    yield build
    for engine in engines:
        engine.scheduler.shutdown()
        engine.worker.close()


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()
