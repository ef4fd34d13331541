# SPDX-License-Identifier: Apache-2.0
"""The command ``xinference-xavier``.

Everything heavy is imported by the subcommand that needs it, so that ``--help`` is instant and
works where neither vLLM nor Xinference is installed.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Final

import click

from xinference_xavier import __version__

LAZY: Final[Mapping[str, tuple[str, str]]] = {
    "demo": ("xinference_xavier.demo:command", "Show two replicas sharing their KV cache."),
    "bench": ("xinference_xavier.bench:command", "Measure what sharing brings, and what it costs."),
}
"""Subcommands of other modules: import path of the click command, and its one line of help."""

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

# Those of vllm.worker and vllm.parts, which need vLLM; a test compares them.
STAGING_SHARE: Final = 16
MOST_STAGING: Final = 256
SPARE_SHARE: Final = 4
LEAST_SLOTS: Final[Mapping[str, int]] = {"gpu": 1, "cpu": 3}

PIPE_COLUMNS: Final = 120
TABLE_COLUMNS: Final = 110
"""Narrower than this, a table with long texts is printed as paragraphs."""

LONG_TEXT: Final = 24
"""Characters of a text that is never wrapped in a table."""


class _LazyGroup(click.Group):
    """A group that imports the subcommands of :data:`LAZY` only when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*LAZY, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = LAZY[cmd_name][0].partition(":")
        command = getattr(_imported(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{LAZY[cmd_name][0]} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        local = {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        helps = {name: text for name, (_, text) in LAZY.items()} | local
        with formatter.section("Commands"):
            formatter.write_dl([(name, helps[name]) for name in self.list_commands(ctx)])


def _imported(module: str) -> ModuleType:
    """Import a module, or say which package it is that the environment lacks."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "xinference_xavier"):
            raise
        raise click.ClickException(
            f"this needs the package {missing}; install it with the vLLM build of your machine, "
            "for CPUs: pip install 'xinference-xavier[cpu]'"
        ) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xinference-xavier")
def main() -> None:
    """GPU-first KV cache sharing between the vLLM replicas of one model."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9990, show_default=True, help="0: any free."
)
def directory(host: str, port: int) -> None:
    """Run the directory of replicas without Xinference.

    Its address is what the engines get as xavier_directory. Whoever reaches the port can run code
    in this process: keep it inside a trusted network.
    """
    from xinference_xavier.options import OptionError, listen_host

    try:
        host = listen_host(host, option="--host")
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    runtime = _imported("xinference_xavier.control.runtime")
    try:
        runtime.run_directory(host, port, lambda at: click.echo(f"Directory ready at {at}"))
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host}:{port} ({error}); change --host or --port"
        ) from error


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def options(as_json: bool) -> None:
    """Print every option with its default and limits."""
    from xinference_xavier.options import Deployment, option_table

    tables = {"options": option_table(), "deployment": option_table(Deployment)}
    if as_json:
        click.echo(json.dumps(tables, indent=2))
        return
    for title, rows in tables.items():
        _print_table(title.capitalize(), rows)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def features(as_json: bool) -> None:
    """Print what is supported, bypassed or refused, and why."""
    from xinference_xavier.features import feature_table

    rows = feature_table()
    if as_json:
        click.echo(json.dumps({"features": rows}, indent=2))
    else:
        _print_table("Features", rows)


@main.command()
@click.option(
    "--layers",
    type=click.IntRange(1),
    required=True,
    help="Layers with a KV cache; config.json: num_hidden_layers.",
)
@click.option(
    "--kv-heads",
    type=click.IntRange(1),
    required=True,
    help="KV heads per layer; config.json: num_key_value_heads, without it num_attention_heads.",
)
@click.option(
    "--head-size",
    type=click.IntRange(1),
    required=True,
    help="Size of a head; config.json: head_dim, without it hidden_size / num_attention_heads.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    default="bfloat16",
    show_default=True,
    help="Type of the KV cache; config.json: torch_dtype or dtype.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Tokens of a block, vLLM's --block-size. vLLM's CPU build takes 128 unless it is given.",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Most tokens of a step, vLLM's --max-num-batched-tokens.",
)
@click.option(
    "--gpu-cache-bytes",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="xavier_gpu_cache_bytes, not in percent.",
)
@click.option(
    "--cpu-cache-bytes",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="xavier_cpu_cache_bytes, not in percent.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def plan(
    layers: int,
    kv_heads: int,
    head_size: int,
    dtype: str,
    block_tokens: int,
    step_tokens: int,
    gpu_cache_bytes: str,
    cpu_cache_bytes: str,
    as_json: bool,
) -> None:
    """Print how many KV blocks and tokens fit into the budgets.

    The numbers of a model are in its config.json, under the names given below. Some slots of the
    CPU tier are kept free for blocks on their way; they come out of its budget, are listed as
    reserved, and hold no blocks that stay.
    """
    from xinference_xavier.sizes import SizeError, format_size, parse_size, slot_size

    block_bytes = layers * 2 * kv_heads * head_size * DTYPE_BYTES[dtype] * block_tokens
    slot_bytes = slot_size(block_bytes)
    rows: list[dict[str, str | int]] = []
    problems = []
    totals: dict[str, int] = {}
    for tier, text in (("gpu", gpu_cache_bytes), ("cpu", cpu_cache_bytes)):
        option = f"--{tier}-cache-bytes"
        try:
            budget = parse_size(text, option=option, percent=False).resolve(0)
        except SizeError as error:
            raise click.UsageError(str(error)) from None
        slots = budget // slot_bytes
        reserved = _reserved(slots, -(-step_tokens // block_tokens)) if tier == "cpu" else 0
        least = LEAST_SLOTS[tier]
        if budget and slots < least:
            problems.append(
                f"{option}={text} is below {least} KV block{'s' if least > 1 else ''} "
                f"({slot_bytes * least} bytes); give at least that, or 0"
            )
        blocks = slots - reserved
        totals |= {f"{tier}_blocks": blocks, f"{tier}_tokens": blocks * block_tokens}
        rows.append(
            {
                "tier": tier,
                "budget_bytes": budget,
                "reserved": reserved,
                "blocks": blocks,
                "tokens": blocks * block_tokens,
                "unused_bytes": budget - slots * slot_bytes,
            }
        )
    if not problems and not totals["gpu_blocks"] and not totals["cpu_blocks"]:
        problems.append("no block fits into either tier; give at least one of them a size")
    if as_json:
        block = {"block_bytes": block_bytes, "slot_bytes": slot_bytes, "block_tokens": block_tokens}
        click.echo(json.dumps(block | totals | {"tiers": rows}, indent=2))
    else:
        title = f"One block: {block_tokens} tokens, {format_size(slot_bytes)}"
        _print_table(title, [{key: _grouped(value) for key, value in row.items()} for row in rows])
    for problem in problems:
        click.echo(f"Warning: a launch would be refused: {problem}", err=True)


def _reserved(slots: int, step_blocks: int) -> int:
    """Return how many of the CPU tier's slots the product keeps free: staging and spare ones."""
    staging = min(MOST_STAGING, slots // STAGING_SHARE) or min(1, slots)
    rest = slots - staging
    return staging + (min(step_blocks, rest // SPARE_SHARE) or min(1, rest))


def _grouped(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of equal keys as a table, or as a paragraph each where long texts lack room.

    The width is the variable COLUMNS, else the terminal's, else 120 columns.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    console = Console(width=PIPE_COLUMNS if piped else None)
    long = {key for key in rows[0] if max(len(row[key]) for row in rows) > LONG_TEXT}
    if long and console.width < TABLE_COLUMNS:
        click.echo(f"{title}\n")
        for row in rows:
            click.echo(_paragraph(row, console.width))
        return
    table = Table(title=title, title_justify="left", show_lines=True)
    for key in rows[0]:
        ratio = 1 if key in long else None
        table.add_column(key.replace("_", " "), ratio=ratio, no_wrap=key not in long)
    for row in rows:
        # Text, not str: square brackets in a value are no markup.
        table.add_row(*(Text(value) for value in row.values()))
    console.print(table)


def _paragraph(row: Mapping[str, str], width: int) -> str:
    """Return a row as its first value, and under it the other ones that are not empty."""
    (_, name), *others = row.items()
    lines = [name]
    for key, value in others:
        if value:
            text = f"{key.replace('_', ' ')}: {value}"
            # At least some room on a terminal of a few columns.
            lines += textwrap.wrap(
                text,
                max(width, 20),
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
