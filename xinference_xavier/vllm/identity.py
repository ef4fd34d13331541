# SPDX-License-Identifier: Apache-2.0
"""Which replicas may read each other's blocks: the group fingerprint (R3)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub import snapshot_download

from xinference_xavier import __version__
from xinference_xavier.identity import weights_identity
from xinference_xavier.installed import vllm_version
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.vllm.metadata import Handshake

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SEED_VARIABLE: Final = "PYTHONHASHSEED"
DEFAULT_SEED: Final = "0"

_PATH_KEY: Final = "_name_or_path"
"""Where transformers keeps the path that a configuration was read from."""


def fix_hash_seed() -> None:
    """Make vLLM's first block hash the same in every replica.

    vLLM reads the variable after the scheduler side exists and before the first request; without
    it (or with ``random``) each engine draws its own seed and nothing is ever shared.
    """
    if not os.environ.get(SEED_VARIABLE, "").isdecimal():
        os.environ[SEED_VARIABLE] = DEFAULT_SEED


def group_fields(
    config: VllmConfig, ranks: Sequence[Handshake], options: XavierOptions
) -> dict[str, str | int | None]:
    """Return what is equal on replicas whose KV blocks are interchangeable.

    The block hashes do not cover these facts; vLLM's version is among them since hashes differ
    between versions. Raises OptionError when the model's files are not found.
    """
    model, cache = config.model_config, config.cache_config
    seed = os.environ.get(SEED_VARIABLE, "")
    return {
        # The user's word stands for all of it: a host may keep the files elsewhere.
        "model": None if options.xavier_identity else model.model,
        "revision": model.revision,
        "weights": options.xavier_identity or _weights(config),
        # As vLLM resolved it: overrides and another config path are in it.
        "config": json.dumps(_settings(model), sort_keys=True, default=str),
        # Some rotary embeddings choose their factors by it.
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "block_tokens": ranks[0].block_tokens,
        "layout": ranks[0].worker.layout_digest,
        "attention": str(config.attention_config.backend),
        "device": ranks[0].device,
        "isa": torch.backends.cpu.get_cpu_capability() if ranks[0].device == "cpu" else None,
        "ranks": len(ranks),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": hashlib.sha256(seed.encode()).hexdigest(),
        "vllm": vllm_version(),
        # Two versions of this package may not understand each other's messages.
        "xavier": __version__,
        # A reader that compares checksums needs sources that publish them.
        "verify": options.xavier_verify,
    }


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Return what the model is configured to be, whatever the path of its files."""
    return {key: value for key, value in model.hf_config.to_dict().items() if key != _PATH_KEY}


def _weights(config: VllmConfig) -> str:
    """Return the identity of the weights, and of the code that comes with them if it is run."""
    model = config.model_config
    path = _local_path(config)
    weights = weights_identity(
        path, load_format=str(config.load_config.load_format), seed=model.seed
    )
    if not model.trust_remote_code or not path.is_dir():
        return weights
    code = hashlib.sha256(weights.encode())
    for file in sorted(path.glob("*.py")):
        code.update(hashlib.sha256(file.name.encode() + b"\0" + file.read_bytes()).digest())
    return code.hexdigest()


def _local_path(config: VllmConfig) -> Path:
    """Return where the model's files are: vLLM was given a path, or a hub's name for them."""
    model = config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    except Exception as error:
        # Other hubs, caches of other shapes: whatever it is, the user can name the weights.
        raise OptionError(
            f"the files of model {model.model!r} are not found on this host ({error}): set "
            "xavier_identity to a text that is equal on replicas with the same weights"
        ) from error
    return Path(found)
