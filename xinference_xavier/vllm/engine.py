# SPDX-License-Identifier: Apache-2.0
"""Reading vLLM's resolved configuration into plain facts, and refusing what cannot work (R2)."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from xinference_xavier.features import EngineFacts, RequestFacts, check_engine
from xinference_xavier.options import OptionError
from xinference_xavier.preflight import EngineClaim
from xinference_xavier.vllm.compat import measures_kv_scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request


def check_engine_config(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise OptionError with every reason why this engine cannot have GPU-first Xavier."""
    refusals = check_engine(engine_facts(config, kv_cache_config))
    if refusals:
        raise OptionError("; ".join(refusals))


def engine_facts(config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Return what the feature table looks at."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    transfer = config.kv_transfer_config
    return EngineFacts(
        device=str(current_platform.device_name),
        machine=platform.machine(),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        context_parallel_size=max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ),
        prefix_caching=bool(cache.enable_prefix_caching),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        kv_groups=tuple(
            _spec_kinds(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups
        ),
        kv_dtype=str(cache.cache_dtype),
        dynamic_kv_scales=measures_kv_scales(cache),
        kv_role=str(transfer.kv_role) if transfer is not None else "kv_both",
        lora=config.lora_config is not None,
        speculative=config.speculative_config is not None,
        encoder_decoder=bool(model.is_encoder_decoder),
        pooling=model.runner_type == "pooling",
        sleep_mode=bool(model.enable_sleep_mode),
        weight_transfer=config.weight_transfer_config is not None,
    )


def _spec_kinds(spec: KVCacheSpec) -> str:
    """Return the class names of a group's specs: several where layers differ in size or type."""
    layers = getattr(spec, "kv_cache_specs", {"": spec})
    return "+".join(sorted({type(layer).__name__ for layer in layers.values()}))


def device_claim(config: VllmConfig) -> EngineClaim:
    """Return what vLLM may take of its device."""
    cache = config.cache_config
    return EngineClaim(cache.gpu_memory_utilization, cache.kv_cache_memory_bytes)


def request_facts(request: Request) -> RequestFacts:
    """Return what the feature table looks at in a request."""
    sampling = request.sampling_params
    return RequestFacts(
        prompt_logprobs=sampling is not None and sampling.prompt_logprobs is not None,
        prompt_embeds=request.prompt_embeds is not None,
        multimodal=bool(request.mm_features),
        pooling=request.pooling_params is not None,
        skips_prefix_cache=request.skip_reading_prefix_cache,
    )
