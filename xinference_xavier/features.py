# SPDX-License-Identifier: Apache-2.0
"""What works with GPU-first Xavier, what goes past it, and what is refused: one table (R2).

Rows of :data:`FEATURES` that can be recognised carry their own test, so the checks and the
documentation cannot disagree; the switch and the engine of a launch are tested by
``extension.launch``. The tests look at plain values (:class:`EngineFacts`,
:class:`RequestFacts`, a launch's options); nothing here imports vLLM or Xinference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from packaging.version import InvalidVersion, Version

VERSIONS: Final[Mapping[str, tuple[str, str]]] = {
    "vllm": ("0.27.0", "0.33.0"),
    "xinference": ("4.1.0", "5"),
    "xoscar": ("0.12.2", "0.13"),
}
"""Per distribution: the oldest version that works, and the first that nobody has tried."""

HASH_ALGORITHM: Final = "sha256_cbor"
"""The one hash algorithm of vLLM that names blocks alike in every process."""

_LaunchTest = Callable[[Mapping[str, object]], str | None]

DEVICES: Final = ("cpu", "cuda")
"""vLLM's names of the platforms whose memory the store can copy."""

MACHINE: Final = "x86_64"
"""The one architecture whose order of stores and loads the generations rely on."""

_KV_DTYPES: Final = frozenset(
    {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
)
_ROLES: Final = ("prefill", "decode")
_KV_GROUP_KINDS: Final = frozenset({"FullAttentionSpec"})


class Support(Enum):
    """How a feature and GPU-first Xavier get along."""

    SUPPORTED = "supported"
    BYPASSED = "bypassed"
    REFUSED = "refused"
    UNSEEN = "not detected"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's configuration in plain values, as vLLM resolved it.

    ``device`` is vLLM's name of the platform: a ROCm build says "rocm" here, where its torch
    devices say "cuda". ``machine`` is the host's architecture as ``uname -m`` writes it.
    ``kv_groups`` names the cache specs' classes of each KV cache group, joined by ``+`` where its
    layers have several.
    """

    device: str = "cpu"
    machine: str = MACHINE
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    prefix_caching: bool = True
    hash_algorithm: str = HASH_ALGORITHM
    kv_groups: tuple[str, ...] = ("FullAttentionSpec",)
    kv_dtype: str = "auto"
    dynamic_kv_scales: bool = False
    kv_role: str = "kv_both"
    lora: bool = False
    speculative: bool = False
    encoder_decoder: bool = False
    pooling: bool = False
    sleep_mode: bool = False
    weight_transfer: bool = False


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What of a request decides whether it may use shared blocks.

    ``skips_prefix_cache`` is vLLM's own word for it: the request must not read cached blocks.
    """

    prompt_logprobs: bool = False
    prompt_embeds: bool = False
    multimodal: bool = False
    pooling: bool = False
    skips_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    ``reason`` says why it is not supported, or what its support means; ``instead`` what to do.
    At most one of the three tests is set. Each returns the offending setting as people write it,
    such as ``"tensor_parallel_size=2"``, or None where the feature is not used.
    """

    name: str
    support: Support
    reason: str
    instead: str = ""
    in_engine: Callable[[EngineFacts], str | None] | None = None
    in_request: Callable[[RequestFacts], bool] | None = None
    in_launch: _LaunchTest | None = None


def _above_one(field: str) -> Callable[[EngineFacts], str | None]:
    def test(facts: EngineFacts) -> str | None:
        value = getattr(facts, field)
        return f"{field}={value}" if value > 1 else None

    return test


def _switched_on(field: str, setting: str) -> Callable[[EngineFacts], str | None]:
    return lambda facts: setting if getattr(facts, field) else None


def _differs(field: str, wanted: str, setting: str) -> Callable[[EngineFacts], str | None]:
    def test(facts: EngineFacts) -> str | None:
        value = getattr(facts, field)
        return f"{setting}={value}" if value != wanted else None

    return test


def _given(*names: str) -> _LaunchTest:
    """Return a test for launch options that are there and neither empty nor switched off."""

    def test(options: Mapping[str, object]) -> str | None:
        given = (name for name in names if options.get(name) and not _is_off(options[name]))
        return next((f"{name}={options[name]!r}" for name in given), None)

    return test


def _number_above_one(*names: str) -> _LaunchTest:
    """Return a test for launch options that are numbers above 1."""

    def test(options: Mapping[str, object]) -> str | None:
        for name in names:
            try:
                value = float(str(options.get(name)))
            except ValueError:
                # Not ours to judge: its own reader says what is wrong with it.
                continue
            if value > 1:
                return f"{name}={options[name]}"
        return None

    return test


def _set_off(name: str) -> _LaunchTest:
    """Return a test for a launch option that is given and says false."""
    return lambda options: f"{name}={options[name]}" if _is_off(options.get(name)) else None


def _given_other(name: str, wanted: str) -> _LaunchTest:
    """Return a test for a launch option that is given and says something else."""

    def test(options: Mapping[str, object]) -> str | None:
        value = options.get(name)
        return f"{name}={value}" if value and value != wanted else None

    return test


def _is_off(value: object) -> bool:
    return str(value).strip().lower() in ("false", "0")


def _roles(options: Mapping[str, object]) -> str | None:
    replicas = options.get("replica_config")
    # A command line may leave it as text.
    if isinstance(replicas, str) and any(role in replicas for role in _ROLES):
        return f"replica_config={replicas}"
    for number, replica in enumerate(replicas if isinstance(replicas, list) else []):
        role = replica.get("role") if isinstance(replica, Mapping) else None
        if role in _ROLES:
            return f"replica_config[{number}].role={role}"
    return None


def _other_device(facts: EngineFacts) -> str | None:
    return None if facts.device in DEVICES else f"device={facts.device}"


def _many_groups(facts: EngineFacts) -> str | None:
    count = len(facts.kv_groups)
    return None if count == 1 else f"{count} KV cache groups"


def _other_attention(facts: EngineFacts) -> str | None:
    kinds = {kind for group in facts.kv_groups for kind in group.split("+")}
    others = sorted(kinds - _KV_GROUP_KINDS)
    return f"KV cache of {', '.join(others)}" if others else None


def _other_kv_dtype(facts: EngineFacts) -> str | None:
    return None if facts.kv_dtype in _KV_DTYPES else f"kv_cache_dtype={facts.kv_dtype}"


_S, _B, _R, _U = Support.SUPPORTED, Support.BYPASSED, Support.REFUSED, Support.UNSEEN

FEATURES: Final[tuple[Feature, ...]] = (
    Feature("decoder-only text models", _S, "one KV cache group of full attention"),
    Feature("quantized weights", _S, "how they are quantized is part of a block's identity"),
    Feature(
        "FP8 KV cache, also in some layers only",
        _S,
        "bytes are copied as they are; each layer's type is part of the identity",
    ),
    Feature(
        "NVIDIA GPUs",
        _S,
        "the device tier lies in GPU memory; peers on the same host map it by CUDA IPC; what has "
        "run on which card is in [gpu.md](gpu.md)",
    ),
    Feature(
        "CUDA graphs and asynchronous scheduling",
        _S,
        "no per-layer hook is used: blocks are copied around forwards, by threads and streams of "
        "the store's own",
    ),
    Feature("chunked prefill, preemption", _S, "full, computed blocks only"),
    Feature("multi-turn chats", _S, "full blocks of outputs are stored as well as of prompts"),
    Feature("cache_salt", _S, "requests share blocks only under the same salt"),
    Feature(
        "PYTHONHASHSEED",
        _S,
        "replicas share only under the same one; the connector sets 0 where it is no number",
    ),
    Feature(
        "kv_load_failure_policy",
        _S,
        "the connector sets recompute: a failed load costs time, never the request",
    ),
    Feature(
        "resetting the prefix cache of a running engine",
        _S,
        "clears this replica's tiers too; vLLM refuses it while a block is in use, which a save "
        "in flight counts as: ask again, saves end in milliseconds",
    ),
    Feature(
        "pausing an engine",
        _S,
        "a pause that clears the cache clears this replica's tiers too; in the modes wait and keep "
        "it completes only when no request waits with loaded blocks: vLLM could not clear its "
        "cache and would end the engine",
    ),
    Feature("one replica", _S, "its evicted prefixes are restored from its own tiers"),
    Feature("replicas on different hosts", _S, "over NIXL or xoscar"),
    Feature(
        "prompt log probabilities",
        _B,
        "they need the prompt to be computed",
        in_request=lambda facts: facts.prompt_logprobs,
    ),
    Feature(
        "prompt embeddings",
        _B,
        "blocks without token ids are not shared",
        in_request=lambda facts: facts.prompt_embeds,
    ),
    Feature(
        "images, audio or video in a request",
        _B,
        "clients can choose the names under which vLLM caches media",
        in_request=lambda facts: facts.multimodal,
    ),
    Feature(
        "pooling requests",
        _B,
        "they need every token's hidden state",
        in_request=lambda facts: facts.pooling,
    ),
    Feature(
        "requests that skip the prefix cache",
        _B,
        "the request asked for it",
        in_request=lambda facts: facts.skips_prefix_cache,
    ),
    Feature(
        "GPU-first without enable_xavier",
        _R,
        "xavier_gpu_first is a way of sharing, and Xinference's own switch turns sharing on",
        "set enable_xavier=true as well, or leave xavier_gpu_first out",
    ),
    Feature(
        "another engine than vLLM",
        _R,
        "only vLLM has the connector interface through which blocks are stored and loaded",
        "set model_engine=vLLM, or launch without xavier_gpu_first",
    ),
    Feature(
        "other accelerators (ROCm, XPU, TPU)",
        _R,
        "the copies from and to their memory, and the order of these with the engine's own work, "
        "are built for CUDA only",
        "use an NVIDIA GPU or vLLM's CPU build, or launch without xavier_gpu_first",
        in_engine=_other_device,
    ),
    Feature(
        "hosts other than x86-64",
        _R,
        "a reader tells a slot that was overwritten under it by the order of the writer's stores, "
        "which other processors do not keep",
        "use an x86-64 host, or launch without xavier_gpu_first",
        in_engine=_differs("machine", MACHINE, "machine"),
    ),
    Feature(
        "tensor parallelism",
        _R,
        "the ranks of one replica are not yet tested together",
        "set tensor_parallel_size=1 and use more replicas",
        in_engine=_above_one("tensor_parallel_size"),
        in_launch=_number_above_one("tensor_parallel_size"),
    ),
    Feature(
        "pipeline parallelism",
        _R,
        "the ranks of one replica are not yet tested together",
        "set pipeline_parallel_size=1 and use more replicas",
        in_engine=_above_one("pipeline_parallel_size"),
        in_launch=_number_above_one("pipeline_parallel_size"),
    ),
    Feature(
        "data parallelism inside an engine",
        _R,
        "replicas do the same, each with a store of its own",
        "set data_parallel_size=1 and use more replicas",
        in_engine=_above_one("data_parallel_size"),
        in_launch=_number_above_one("data_parallel_size"),
    ),
    Feature(
        "context parallelism",
        _R,
        "a block's tokens are then spread over ranks",
        "set prefill_context_parallel_size and decode_context_parallel_size to 1",
        in_engine=_above_one("context_parallel_size"),
        in_launch=_number_above_one(
            "prefill_context_parallel_size", "decode_context_parallel_size"
        ),
    ),
    Feature(
        "a replica over several workers",
        _R,
        "a replica and its store live on one host",
        "set n_worker=1 and use more replicas",
        in_launch=_number_above_one("n_worker"),
    ),
    Feature(
        "prefix caching switched off",
        _R,
        "blocks are found by the hashes that prefix caching makes",
        "leave enable_prefix_caching on",
        in_engine=lambda facts: None if facts.prefix_caching else "enable_prefix_caching=False",
        in_launch=_set_off("enable_prefix_caching"),
    ),
    Feature(
        "other hash algorithms of the prefix cache",
        _R,
        "two processes must name the same block alike, and nobody must be able to forge a name",
        f"set prefix_caching_hash_algo={HASH_ALGORITHM}",
        in_engine=_differs("hash_algorithm", HASH_ALGORITHM, "prefix_caching_hash_algo"),
        in_launch=_given_other("prefix_caching_hash_algo", HASH_ALGORITHM),
    ),
    Feature(
        "hybrid models, and others with several KV cache groups",
        _R,
        "a block is then more than one piece, with rules of its own for each",
        "use a model whose layers all have full attention",
        in_engine=_many_groups,
    ),
    Feature(
        "sliding window, chunked, latent (MLA) or state-space layers",
        _R,
        "only the cache of full attention is proven to be copied whole",
        "use a model whose layers all have full attention",
        in_engine=_other_attention,
    ),
    Feature(
        "KV cache types with scales of their own in the cache",
        _R,
        "their layout is not yet proven",
        "set kv_cache_dtype to auto, float16, bfloat16 or fp8",
        in_engine=_other_kv_dtype,
    ),
    Feature(
        "KV cache scales measured at run time",
        _R,
        "each replica would read the same bytes as different numbers",
        "set calculate_kv_scales=False",
        in_engine=_switched_on("dynamic_kv_scales", "calculate_kv_scales=True"),
        in_launch=_given("calculate_kv_scales"),
    ),
    Feature(
        "encoder-decoder models",
        _R,
        "the cache of cross attention does not depend on the prompt's tokens alone",
        "use a decoder-only model",
        in_engine=_switched_on("encoder_decoder", "an encoder-decoder model"),
    ),
    Feature(
        "embedding, reranking and classification models",
        _R,
        "they keep no KV cache between requests",
        "launch them without xavier_gpu_first",
        in_engine=_switched_on("pooling", "a pooling model"),
    ),
    Feature(
        "LoRA",
        _R,
        "an adapter's name does not say which weights it has",
        "launch without LoRA adapters, or without xavier_gpu_first",
        in_engine=_switched_on("lora", "enable_lora=True"),
        in_launch=_given("peft_model_config", "enable_lora"),
    ),
    Feature(
        "speculative decoding",
        _R,
        "the draft's cache, and tokens that are taken back, are not yet tested",
        "launch without it",
        in_engine=_switched_on("speculative", "a speculative configuration"),
        in_launch=_given(
            "speculative_config", "spec_method", "spec_model", "enable_mtp", "draft_model_path"
        ),
    ),
    Feature(
        "sleep mode",
        _R,
        "it takes the KV cache's memory away under running copies",
        "leave enable_sleep_mode off",
        in_engine=_switched_on("sleep_mode", "enable_sleep_mode=True"),
        in_launch=_given("enable_sleep_mode"),
    ),
    Feature(
        "weight transfer from a trainer",
        _R,
        "each replica changes its weights at a time of its own, under blocks that are shared",
        "leave weight_transfer_config out, or launch without xavier_gpu_first",
        in_engine=_switched_on("weight_transfer", "a weight_transfer_config"),
        in_launch=_given("weight_transfer_config"),
    ),
    Feature(
        "Xinference's weight cache",
        _R,
        "it changes weights in a running engine, under blocks that are shared",
        "leave enable_weight_cache off",
        in_launch=_given("enable_weight_cache"),
    ),
    Feature(
        "prefill and decode roles",
        _R,
        "every replica both fills and uses the store",
        "launch without roles (in plain vLLM: kv_role kv_both)",
        in_engine=_differs("kv_role", "kv_both", "kv_role"),
        in_launch=_roles,
    ),
    Feature(
        "another KV connector or cache backend beside it",
        _R,
        "an engine has one connector",
        "leave it out, or leave out xavier_gpu_first",
        in_launch=_given(
            "kv_transfer_config",
            "kv_offloading_size",
            "xavier_cache_backend",
            "xavier_cache_backend_config",
            "vllm_transfer_backend_type",
            "transfer_backend_type",
            # How Xinference hands its own ones to a model's class.
            "_nixl_config",
            "_xavier_cache_config",
        ),
    ),
    Feature(
        "weights changed in a running engine behind Xinference's back",
        _U,
        "nothing tells the connector of vLLM's reload_weights, or of whatever else changes them; "
        "blocks of the old weights would be shared",
        "relaunch the model; or pause all replicas (mode abort, which clears their caches and "
        "tiers), change the weights of all, and only then resume them",
    ),
)
"""Every model, engine, launch or request feature that makes a difference."""


def check_engine(facts: EngineFacts) -> list[str]:
    """Return why this engine cannot have GPU-first Xavier, one message each; empty if it can."""
    return _refusals(
        (feature, feature.in_engine(facts)) for feature in FEATURES if feature.in_engine
    )


def check_launch(options: Mapping[str, object]) -> list[str]:
    """Return why a launch with these Xinference options is refused; empty if it is not.

    ``options`` are a launch's own, those for the engine among them, with or without ours.
    """
    return _refusals(
        (feature, feature.in_launch(options)) for feature in FEATURES if feature.in_launch
    )


def bypass_reason(facts: RequestFacts) -> str | None:
    """Return the feature for which this request goes past the store, or None."""
    for feature in _REQUEST_FEATURES:
        if feature.in_request is not None and feature.in_request(facts):
            return feature.name
    return None


def check_version(distribution: str, found: str) -> str | None:
    """Return why version ``found`` of a key of :data:`VERSIONS` does not do, or None (R1).

    Builds of a release, such as ``+cpu``, are that release. What comes before a release, a
    development build above all, is nobody's known code.
    """
    oldest, untried = VERSIONS[distribution]
    try:
        version = Version(found)
    except InvalidVersion:
        version = Version("0")
    if not version.is_prerelease and Version(oldest) <= version < Version(untried):
        return None
    return (
        f"{distribution} {found} is not supported: GPU-first Xavier needs a release of "
        f"{distribution} >= {oldest}, < {untried}"
    )


def feature_table() -> list[dict[str, str]]:
    """Return one row per feature, for docs and UI: ``name, support, reason, instead``."""
    return [
        {
            "name": feature.name,
            "support": feature.support.value,
            "reason": feature.reason,
            "instead": feature.instead,
        }
        for feature in FEATURES
    ]


_REQUEST_FEATURES: Final = tuple(feature for feature in FEATURES if feature.in_request)


def _refusals(found: Iterable[tuple[Feature, str | None]]) -> list[str]:
    return [
        f"{setting}: {feature.name} cannot be used with xavier_gpu_first, because "
        f"{feature.reason}; {feature.instead}"
        for feature, setting in found
        if setting is not None
    ]
