# SPDX-License-Identifier: Apache-2.0
"""What budgets hold: KV blocks and tokens, per replica and in all.

The one arithmetic behind the command ``plan``, the route ``/v1/xavier/plan`` (and with it the
launch dialog) and the console. Reads at most one ``config.json``; knows nothing of devices or
hosts: who does, passes their memory in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from xinference_xavier import schemas
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.sizes import Size, slot_size
from xinference_xavier.tiers import LEAST_DEVICE_SLOTS, LEAST_HOST_SLOTS, reserved_slots

MODEL_DTYPES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_BYTES: Final[Mapping[str, int]] = {**MODEL_DTYPES, "fp8": 1}
"""Bytes of a number: of those types that a model runs in, and of all that a KV cache may have."""

SAME_DTYPE: Final[Mapping[str, str]] = {
    "float": "float32",
    "half": "float16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
}
"""Other names that vLLM takes."""

BLOCK_TOKENS: Final = 16
STEP_TOKENS: Final = 2048
"""What is assumed of an engine unless the launch says: tokens of a block, most of a step."""

FULL_ATTENTION: Final = "full_attention"

_BUDGETS: Final = ("xavier_gpu_cache_bytes", "xavier_cpu_cache_bytes")


class UnknownBlock(ValueError):
    """The size of the model's KV blocks cannot be told; the message says why, for people."""


class UnsupportedModel(UnknownBlock):
    """The model is one that GPU-first Xavier refuses."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of one token: ``layers`` x K and V x ``kv_heads`` x ``head_dim`` numbers."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def block_bytes(self, tokens: int) -> int:
        """Return the bytes of a block of ``tokens`` tokens."""
        numbers = self.layers * 2 * self.kv_heads * self.head_dim * tokens
        return numbers * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Memory:
    """What percentages are shares of, in bytes; None where it is not known."""

    gpu_total: int | None = None
    cpu_total: int | None = None


class _Config(BaseModel):
    """The part of a model's ``config.json`` that shapes its KV cache."""

    layers: int | None = Field(
        None, gt=0, validation_alias=AliasChoices("num_hidden_layers", "n_layer", "num_layers")
    )
    heads: int | None = Field(
        None, gt=0, validation_alias=AliasChoices("num_attention_heads", "n_head", "n_heads")
    )
    kv_heads: int | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices(
            "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"
        ),
    )
    head_dim: int | None = Field(
        None, gt=0, validation_alias=AliasChoices("head_dim", "kv_channels")
    )
    hidden: int | None = Field(
        None, gt=0, validation_alias=AliasChoices("hidden_size", "n_embd", "d_model")
    )
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    multi_query: bool = False
    kv_lora_rank: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = True
    layer_types: list[str] | None = None
    quantization: dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("quantization_config", "compression_config")
    )
    other_layers: Any = Field(
        None,
        validation_alias=AliasChoices(
            "attention_chunk_size",
            "attn_layer_indices",
            "attn_layer_period",
            "full_attention_interval",
            "hybrid_override_pattern",
            "layers_block_type",
            "mamba_d_ssm",
        ),
    )
    """How families without ``layer_types`` say that some layers are of another kind."""

    def unsupported(self) -> str | None:
        """Return which kind of attention other than the full one some layer has, or None."""
        if self.kv_lora_rank:
            return "latent attention (MLA)"
        if self.other_layers:
            return "chunked, linear or state-space layers"
        if others := set(self.layer_types or ()) - {FULL_ATTENTION}:
            return f"layers of {', '.join(sorted(others))}"
        if self.layer_types is None and self.sliding_window and self.use_sliding_window:
            return "sliding window attention"
        return None

    def kv_dtype(self) -> str:
        """Return the type that vLLM gives the KV cache when the launch says nothing.

        That of a quantized checkpoint's own scheme, also of one that is not known here.
        """
        given = self.quantization or {}
        nested = given.get("quantization")  # as ModelOpt writes it
        given = {**given, **nested} if isinstance(nested, dict) else given
        scheme = given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")
        if not scheme:
            return _auto_dtype(self.dtype)
        if isinstance(scheme, dict):
            kind, bits = scheme.get("type"), scheme.get("num_bits")
            return "fp8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits"
        return str(scheme).lower()


def read_config(path: Path) -> KvShape:
    """Return what the ``config.json`` in a model's directory says.

    Raises :class:`UnknownBlock` where there is none, :class:`UnsupportedModel` where not every
    layer has full attention.
    """
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownBlock("there is no config.json of the model here") from None
    except OSError as error:
        # Not the path: who may plan need not know where models lie.
        raise UnknownBlock(f"the model's config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UnknownBlock(f"the model's config.json cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UnknownBlock("the model's config.json holds no object")
    return shape_of(content)


def shape_of(content: Mapping[str, Any]) -> KvShape:
    """Return what a parsed ``config.json`` says; raises as :func:`read_config` does."""
    # Models that see or hear keep the language model's part apart.
    inner = content.get("text_config") or content.get("llm_config")
    if isinstance(inner, Mapping):
        content = {**content, **inner}
    try:
        config = _Config.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise UnknownBlock(f"the model's config.json has {name}: {first['msg']}") from None
    if kind := config.unsupported():
        raise UnsupportedModel(f"the model has {kind}; use one with full attention in every layer")
    kv_heads = config.kv_heads or (1 if config.multi_query else config.heads)
    head_dim = config.head_dim
    if head_dim is None and config.hidden and config.heads:
        head_dim = config.hidden // config.heads
    if not (config.layers and kv_heads and head_dim):
        raise UnknownBlock("the model's config.json does not tell its layers and heads")
    return KvShape(config.layers, kv_heads, head_dim, config.kv_dtype())


def with_request(shape: KvShape | None, request: schemas.PlanRequest) -> KvShape:
    """Return the shape with the numbers and types that the request gives instead.

    Raises :class:`UnknownBlock` when something is left open, or a type is not known.
    """
    layers = request.layers or (shape and shape.layers)
    kv_heads = request.kv_heads or (shape and shape.kv_heads)
    head_dim = request.head_dim or (shape and shape.head_dim)
    if not (layers and kv_heads and head_dim):
        raise UnknownBlock("layers, kv_heads and head_dim are needed")
    dtype = shape.dtype if shape is not None else "bfloat16"
    # What the model runs in is no matter to a cache whose type the checkpoint itself sets.
    model_dtype = request.dtype if dtype in MODEL_DTYPES else None
    for given in (model_dtype, request.kv_cache_dtype):
        if given and given != "auto":
            dtype = SAME_DTYPE.get(given, given)
    if dtype not in DTYPE_BYTES:
        raise UnknownBlock(f"{dtype} is not a type of KV caches known here")
    return KvShape(layers, kv_heads, head_dim, dtype)


def make_plan(
    request: schemas.PlanRequest,
    *,
    model: schemas.PlannedModel,
    block_bytes: int | None,
    block_tokens: int,
    memory: Memory | None = None,
) -> schemas.Plan:
    """Return what the request's budgets hold. Bad budgets are errors of the plan, never raised."""
    memory = memory or Memory()
    options, errors = read_options(request)
    warnings: list[schemas.PlanNote] = []
    slot_bytes = None if block_bytes is None else slot_size(block_bytes)
    step_blocks = -(-(request.max_num_batched_tokens or STEP_TOKENS) // block_tokens)
    tiers = {}
    for name, total, least in zip(
        _BUDGETS,
        (memory.gpu_total, memory.cpu_total),
        (LEAST_DEVICE_SLOTS, LEAST_HOST_SLOTS),
        strict=True,
    ):
        size = options.get(name)
        budget = None if size is None else _resolved(size, total)
        tier = _tier(budget, slot_bytes, block_tokens, step_blocks if least > 1 else 0)
        tiers[name] = tier
        if size is not None and budget and slot_bytes and budget < least * slot_bytes:
            errors.append(_below(name, size, least, slot_bytes))
        if budget == 0:
            warnings.append(_no_tier(name))
    gpu, cpu = (tiers[name] for name in _BUDGETS)
    if gpu.budget_bytes == 0 and cpu.budget_bytes == 0:
        errors.append(
            schemas.PlanNote(
                field=_BUDGETS[0],
                code="no_tier",
                message="no block fits into either tier; give at least one of them a size",
            )
        )
    replicas = request.replica or 1
    if replicas == 1:
        warnings.append(
            schemas.PlanNote(
                field="replica",
                code="offload_only",
                message="one replica has nobody to share with: its store only keeps what its own "
                "cache has no room for; launch two or more to share",
            )
        )
    if block_bytes is None:
        warnings.append(
            schemas.PlanNote(
                field=None,
                code="unknown_block",
                message=f"the size of a KV block is not known: {model.reason or 'no model given'}",
            )
        )
    return schemas.Plan(
        valid=not errors,
        errors=errors,
        warnings=warnings,
        model=model,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        replica=replicas,
        device=None,
        gpu_blocks=gpu.blocks,
        gpu_tokens=gpu.tokens,
        cpu_blocks=cpu.blocks,
        cpu_tokens=cpu.tokens,
        per_replica=schemas.PlanTiers(gpu=gpu, cpu=cpu),
        total=schemas.PlanTiers(gpu=_times(gpu, replicas), cpu=_times(cpu, replicas)),
        limits=schemas.PlanLimits(),
    )


def read_options(
    request: schemas.PlanRequest,
) -> tuple[dict[str, Any], list[schemas.PlanNote]]:
    """Return the request's options by name, without the unreadable ones, and what is wrong."""
    values: dict[str, Any] = {}
    errors = []
    for name in (*_BUDGETS, "xavier_transport"):
        try:
            options = XavierOptions.from_mapping({name: getattr(request, name)})
        except OptionError as error:
            errors.append(schemas.PlanNote(field=name, code="invalid", message=str(error)))
        else:
            values[name] = getattr(options, name)
    return values, errors


def _auto_dtype(name: str | None) -> str:
    """Return what vLLM makes of a configuration's type when the launch says nothing."""
    name = (name or "float32").removeprefix("torch.")
    # Weights in float32 are run in 16 bits; which ones makes no difference here.
    return "bfloat16" if name == "float32" else SAME_DTYPE.get(name, name)


def _resolved(size: Size, total: int | None) -> int | None:
    if size.bytes is None and total is None:
        return None
    return size.resolve(total or 0)


def _tier(
    budget: int | None, slot_bytes: int | None, block_tokens: int, step_blocks: int
) -> schemas.TierPlan:
    """Plan one tier; ``step_blocks`` is 0 for a tier that keeps no slots free."""
    if budget is None or slot_bytes is None:
        return schemas.TierPlan(
            budget_bytes=budget, blocks=None, tokens=None, reserved_blocks=None, unused_bytes=None
        )
    slots = budget // slot_bytes
    reserved = reserved_slots(slots, step_blocks) if step_blocks else 0
    return schemas.TierPlan(
        budget_bytes=budget,
        blocks=slots - reserved,
        tokens=(slots - reserved) * block_tokens,
        reserved_blocks=reserved,
        unused_bytes=budget - slots * slot_bytes,
    )


def _times(tier: schemas.TierPlan, replicas: int) -> schemas.TierPlan:
    values = tier.model_dump()
    return schemas.TierPlan(
        **{name: None if value is None else value * replicas for name, value in values.items()}
    )


def _below(name: str, size: Size, least: int, slot_bytes: int) -> schemas.PlanNote:
    blocks = "1 KV block" if least == 1 else f"{least} KV blocks"
    return schemas.PlanNote(
        field=name,
        code="below_block",
        message=f"{name}={size} is below {blocks} ({slot_bytes * least} bytes); give at least "
        "that, or 0",
    )


def _no_tier(name: str) -> schemas.PlanNote:
    if name == _BUDGETS[0]:
        return schemas.PlanNote(
            field=name, code="no_gpu_tier", message="blocks are kept in the CPU tier only"
        )
    return schemas.PlanNote(
        field=name,
        code="no_cpu_tier",
        message="there is no CPU tier: blocks that the GPU tier has no room for are dropped",
    )
