# SPDX-License-Identifier: Apache-2.0
"""Which replicas may read each other's blocks: the group fingerprint (DESIGN R3)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from xinference_xavier.identity import fingerprint, weights_identity
from xinference_xavier.options import XavierOptions
from xinference_xavier.vllm.compat import vllm_version
from xinference_xavier.vllm.metadata import Handshake

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEED_VARIABLE: Final = "PYTHONHASHSEED"
DEFAULT_SEED: Final = "0"


def fix_hash_seed() -> None:
    """Make vLLM's first block hash the same in every replica.

    vLLM reads the variable after the scheduler side exists and before the first request; without
    it (or with ``random``) each engine draws its own seed and nothing is ever shared.
    """
    if not os.environ.get(SEED_VARIABLE, "").isdecimal():
        os.environ[SEED_VARIABLE] = DEFAULT_SEED


def group_fingerprint(
    config: VllmConfig, ranks: Sequence[Handshake], options: XavierOptions
) -> bytes:
    """Return the 32 bytes that are equal on replicas whose KV blocks are interchangeable.

    The block hashes do not cover these facts; vLLM's version is among them since hashes differ
    between versions.
    """
    model, cache = config.model_config, config.cache_config
    weights = options.xavier_identity or weights_identity(
        model.model, load_format=str(config.load_config.load_format), seed=model.seed
    )
    seed = os.environ.get(SEED_VARIABLE, "")
    return fingerprint(
        {
            "model": model.model,
            "revision": model.revision,
            "weights": weights,
            "overrides": json.dumps(model.hf_overrides, sort_keys=True, default=str),
            "dtype": str(model.dtype),
            "kv_dtype": cache.cache_dtype,
            "quantization": str(model.quantization),
            "block_tokens": ranks[0].block_tokens,
            "layout": ranks[0].worker.layout_digest,
            "attention": str(config.attention_config.backend),
            "device": ranks[0].device,
            "isa": torch.backends.cpu.get_cpu_capability() if ranks[0].device == "cpu" else None,
            "ranks": len(ranks),
            "hash_algorithm": cache.prefix_caching_hash_algo,
            "hash_seed": hashlib.sha256(seed.encode()).hexdigest(),
            "vllm": vllm_version(),
        }
    )
