# SPDX-License-Identifier: Apache-2.0
"""Record what of vLLM the connector plugs into: its hooks, who calls them, the names we use.

Everything is read from vLLM's sources; nothing of it is imported, so that a version can be looked
at that is not installed, as an unpacked wheel. A record is one text per name, and two of them are
compared by :func:`changes`, which names each difference.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from xinference_xavier.installed import vllm_version

RECORDS: Final = Path(__file__).resolve().parent.parent / "tests" / "compat"

Contract = dict[str, str]
"""By dotted name below vllm what is there: a signature, a field's type, hooks in their order."""

BASE: Final = "distributed.kv_transfer.kv_connector.v1.base"
HOOKS: Final = (f"{BASE}.KVConnectorBase_V1", f"{BASE}.SupportsHMA")

IMPLEMENTED: Final = (
    *HOOKS,
    f"{BASE}.KVConnectorMetadata",
    f"{BASE}.KVConnectorHandshakeMetadata",
    f"{BASE}.KVConnectorWorkerMetadata",
    "distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorStats",
    "distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorPromMetrics",
)
"""Classes that we implement, or know not to: all that they have is recorded."""

USED: Final[Mapping[str, tuple[str, ...]]] = {
    "config.attention.AttentionConfig": ("backend",),
    "config.cache.CacheConfig": (
        "block_size", "cache_dtype", "calculate_kv_scales", "enable_prefix_caching",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "prefix_caching_hash_algo",
    ),
    "config.kv_transfer.KVTransferConfig": (
        "kv_connector_extra_config", "kv_connector_module_path", "kv_load_failure_policy",
        "kv_role",
    ),
    "config.load.LoadConfig": ("download_dir", "load_format"),
    "config.model.ModelConfig": (
        "dtype", "enable_sleep_mode", "hf_config", "is_encoder_decoder", "max_model_len", "model",
        "quantization", "revision", "runner_type", "seed", "trust_remote_code",
    ),
    "config.parallel.ParallelConfig": (
        "data_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size",
        "prefill_context_parallel_size", "rank", "tensor_parallel_size", "world_size",
    ),
    "config.scheduler.SchedulerConfig": ("max_num_batched_tokens",),
    "config.vllm.VllmConfig": (
        "attention_config", "cache_config", "kv_transfer_config", "load_config", "lora_config",
        "model_config", "parallel_config", "scheduler_config", "speculative_config",
        "weight_transfer_config",
    ),
    "platforms.interface.Platform": ("device_name",),
    "v1.core.block_pool.BlockPool": (
        "blocks", "free_blocks", "get_cached_block", "get_num_free_blocks", "num_gpu_blocks",
        "touch",
    ),
    "v1.core.kv_cache_manager.KVCacheBlocks": ("get_block_ids",),
    "v1.core.sched.output.CachedRequestData": (
        "new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids",
    ),
    "v1.core.sched.output.NewRequestData": ("block_ids", "num_computed_tokens", "req_id"),
    "v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    ),
    "v1.kv_cache_interface.KVCacheConfig": ("kv_cache_groups", "num_blocks"),
    "v1.kv_cache_interface.KVCacheGroupSpec": ("kv_cache_spec",),
    "v1.kv_cache_interface.UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "v1.outputs.KVConnectorOutput": (
        "finished_recving", "invalid_block_ids", "kv_connector_worker_meta",
    ),
    "v1.request.Request": (
        "block_hashes", "mm_features", "num_computed_tokens", "num_preemptions",
        "num_prompt_tokens", "num_tokens", "pooling_params", "prompt_embeds", "request_id",
        "sampling_params", "skip_reading_prefix_cache",
    ),
}  # fmt: skip
"""Names that we use of classes of which we do not need the rest."""

CALLERS: Final = "v1"
"""The folder of vLLM whose code calls a connector's hooks."""


def sources() -> Path:
    """Return the folder of the installed vLLM, without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("vLLM is not installed here; name its folder with --sources")
    return Path(found.submodule_search_locations[0])


def contract(vllm: Path) -> Contract:
    """Return the record of the vLLM whose package lies at ``vllm``."""
    hooks = {name for owner in HOOKS for name in _members(vllm, owner)}
    record: Contract = {}
    for owner in IMPLEMENTED:
        record |= {f"{owner}.{name}": text for name, text in _members(vllm, owner).items()}
    for owner, names in USED.items():
        members = _members(vllm, owner)
        record |= {f"{owner}.{name}": members[name] for name in names if name in members}
    for file in (vllm / CALLERS).rglob("*.py"):
        module = ".".join(file.relative_to(vllm).with_suffix("").parts)
        record |= {f"calls in {module}.{at}": text for at, text in _calls(file, hooks)}
    return dict(sorted(record.items()))


def changes(before: Contract, after: Contract) -> list[str]:
    """Return one line per difference, which names it."""
    lines = [f"removed: {name}" for name in before.keys() - after.keys()]
    lines += [f"added: {name}: {after[name]}" for name in after.keys() - before.keys()]
    lines += [
        f"changed: {name}: {before[name]} -> {after[name]}"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    ]
    return sorted(lines)


def recorded() -> dict[str, Contract]:
    """Return all records by version."""
    return {
        path.stem.removeprefix("vllm-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RECORDS.glob("vllm-*.json"))
    }


def _members(vllm: Path, owner: str) -> dict[str, str]:
    """Return what a class has, by name; nothing if there is no such class."""
    module, _, name = owner.rpartition(".")
    file = vllm.joinpath(*module.split(".")).with_suffix(".py")
    if not file.exists():
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for statement in node.body:
                found = _member(statement) | found
    return found


def _member(statement: ast.stmt) -> dict[str, str]:
    """Return what a statement of a class's body gives it."""
    if isinstance(statement, ast.AnnAssign):
        return {ast.unparse(statement.target): _type(statement.annotation)}
    if isinstance(statement, ast.Assign):
        return {ast.unparse(target): "attribute" for target in statement.targets}
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    kinds = [ast.unparse(decorator).split(".")[-1] for decorator in statement.decorator_list]
    returns = _type(statement.returns) if statement.returns else ""
    signature = f"({_type(statement.args)})" + (f" -> {returns}" if returns else "")
    members = {statement.name: " ".join([*kinds, signature])}
    if statement.name in ("__init__", "__post_init__"):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                members[node.attr] = "attribute"
    return members


def _type(node: ast.AST) -> str:
    # Whether a type is quoted is of no meaning.
    return ast.unparse(node).replace("'", "")


def _calls(file: Path, hooks: set[str]) -> Iterator[tuple[str, str]]:
    """Yield, per function that uses hooks of a KV connector, them in their order."""
    text = file.read_text(encoding="utf-8")
    if "connector" not in text and "get_kv_transfer_group" not in text:
        return
    for scope, function in _functions(ast.parse(text), ""):
        used = [
            (node.lineno, node.col_offset, node.attr)
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and node.attr in hooks and _of_connector(node.value)
        ]
        if used:
            yield scope, ", ".join(hook for _, _, hook in sorted(used))


def _functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the outermost functions with their dotted names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{scope}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{scope}{child.name}", child
        else:
            yield from _functions(child, scope)


def _of_connector(receiver: ast.expr) -> bool:
    """Whether an expression is a KV connector; vLLM has connectors for other things, too."""
    name = ast.unparse(receiver).split(".")[-1]
    return name in ("connector", "kv_connector", "get_kv_transfer_group()")


def main() -> None:
    """Write the record of one version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="vLLM's package; else the installed one")
    parser.add_argument("--version", help="its version; else the installed one's")
    parser.add_argument("--show", action="store_true", help="show what changed, write nothing")
    chosen = parser.parse_args()
    version = (chosen.version or vllm_version() or "unknown").split("+")[0]
    record = contract(chosen.sources or sources())
    for name, other in recorded().items():
        print(f"{len(changes(other, record))} changes from {name} to {version}")
        if chosen.show:
            print("\n".join(changes(other, record)))
    if not chosen.show:
        text = json.dumps(record, indent=1) + "\n"
        (RECORDS / f"vllm-{version}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
