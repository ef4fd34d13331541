# SPDX-License-Identifier: Apache-2.0
"""The command that plans budgets, without a server."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic import ValidationError

from xinference_xavier.cli.output import json_option, print_table, write_json
from xinference_xavier.planner import (
    BLOCK_TOKENS,
    DTYPE_BYTES,
    STEP_TOKENS,
    KvShape,
    UnknownBlock,
    make_plan,
    read_config,
    with_request,
)
from xinference_xavier.schemas import Plan, PlannedModel, PlanRequest, TierPlan
from xinference_xavier.sizes import SizeError, format_size, parse_size


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model's directory: its config.json tells the numbers that are not given.",
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="Layers with a KV cache; config.json: num_hidden_layers.",
)
@click.option(
    "--kv-heads",
    type=click.IntRange(1),
    help="KV heads per layer; config.json: num_key_value_heads, without it num_attention_heads.",
)
@click.option(
    "--head-dim",
    "--head-size",
    type=click.IntRange(1),
    help="Size of a head; config.json: head_dim, without it hidden_size / num_attention_heads.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    help="Type of the KV cache; config.json: kv_cache_scheme, without it torch_dtype or dtype.  "
    "[default: bfloat16]",
)
@click.option(
    "--block-size",
    "--block-tokens",
    type=click.IntRange(1),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens of a block, vLLM's --block-size. Without Xinference, vLLM's CPU build takes 128 "
    "unless it is given.",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(1),
    default=STEP_TOKENS,
    show_default=True,
    help="Most tokens of a step, vLLM's --max-num-batched-tokens.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Number of replicas, for what they hold in all.",
)
@click.option(
    "--gpu",
    "--gpu-cache-bytes",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="xavier_gpu_cache_bytes of a replica, not in percent.",
)
@click.option(
    "--cpu",
    "--cpu-cache-bytes",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="xavier_cpu_cache_bytes of a replica, not in percent.",
)
@json_option
def command(
    model: Path | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype: str | None,
    block_size: int,
    step_tokens: int,
    replicas: int | None,
    gpu: str,
    cpu: str,
    json_file: str | None,
) -> None:
    """Print how many KV blocks and tokens fit into the budgets.

    Give --model, or the numbers that are in its config.json under the names given below. Some
    slots of the CPU tier are kept free for blocks on their way: staging for reads over the
    network, and spare ones for blocks that leave the GPU tier. They come out of its budget, are
    listed as reserved, and hold no blocks that stay.

    Warns, on stderr, of budgets that a launch would refuse.
    """
    budgets = {"--gpu": gpu, "--cpu": cpu}
    for option, text in budgets.items():
        try:
            parse_size(text, option=option, percent=False)
        except SizeError as error:
            raise click.UsageError(str(error)) from None
    try:
        request = PlanRequest(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kv_cache_dtype=dtype,
            block_size=block_size,
            max_num_batched_tokens=step_tokens,
            replica=replicas,
            xavier_gpu_cache_bytes=gpu,
            xavier_cpu_cache_bytes=cpu,
        )
    except ValidationError as error:
        # The options have the lower limits, the request the upper ones.
        first = error.errors(include_url=False)[0]
        raise click.UsageError(f"{first['loc'][0]}={first['input']}: {first['msg']}") from None
    shape = _shape(model, request)
    plan = make_plan(
        request,
        model=PlannedModel(
            source="numbers" if model is None else "config",
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        ),
        block_bytes=shape.block_bytes(block_size),
        block_tokens=block_size,
    )
    if write_json(json_file, plan.model_dump(exclude={"device", "limits"})):
        _show(plan, replicas)
    for problem in plan.errors:
        click.echo(f"Warning: a launch would be refused: {problem.message}", err=True)


def _shape(model: Path | None, request: PlanRequest) -> KvShape:
    try:
        return with_request(None if model is None else read_config(model), request)
    except UnknownBlock as error:
        hint = "--model, or --layers, --kv-heads and --head-dim"
        raise click.UsageError(f"{error}; give {hint}") from None


def _show(plan: Plan, replicas: int | None) -> None:
    rows = [_row(name, tier) for name, tier in plan.per_replica]
    if replicas is not None:
        rows += [_row(f"{name}, all {replicas}", tier) for name, tier in plan.total]
    size = format_size(plan.slot_bytes or 0)
    print_table(f"One block: {plan.block_tokens} tokens, {size}", rows)


def _row(name: str, tier: TierPlan) -> dict[str, str]:
    return {
        "tier": name,
        "budget_bytes": f"{tier.budget_bytes:,}",
        "reserved": f"{tier.reserved_blocks:,}",
        "blocks": f"{tier.blocks:,}",
        "tokens": f"{tier.tokens:,}",
        "unused_bytes": f"{tier.unused_bytes:,}",
    }
