# SPDX-License-Identifier: Apache-2.0
"""The command ``xinference-xavier``.

Everything heavy is imported by the subcommand that needs it, so that ``--help`` is instant and
works where neither vLLM nor Xinference is installed.
"""

from __future__ import annotations

import json
import sys
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
@click.option("--layers", type=click.IntRange(1), required=True, help="Layers with a KV cache.")
@click.option("--kv-heads", type=click.IntRange(1), required=True, help="KV heads per layer.")
@click.option("--head-size", type=click.IntRange(1), required=True, help="Size of a head.")
@click.option(
    "--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True
)
@click.option(
    "--block-tokens", type=click.IntRange(1), default=16, show_default=True, help="vLLM block_size."
)
@click.option("--gpu-cache-bytes", default="256MiB", show_default=True, metavar="SIZE")
@click.option("--cpu-cache-bytes", default="4GiB", show_default=True, metavar="SIZE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def plan(
    layers: int,
    kv_heads: int,
    head_size: int,
    dtype: str,
    block_tokens: int,
    gpu_cache_bytes: str,
    cpu_cache_bytes: str,
    as_json: bool,
) -> None:
    """Print how many KV blocks and tokens fit into the budgets.

    The numbers of a model are in its config.json. Some slots of the CPU tier are kept free for
    blocks on their way; they come out of its budget.
    """
    from xinference_xavier.sizes import SizeError, format_size, parse_size, slot_size

    block_bytes = layers * 2 * kv_heads * head_size * DTYPE_BYTES[dtype] * block_tokens
    slot_bytes = slot_size(block_bytes)
    rows: list[dict[str, str | int]] = []
    for tier, text in (("gpu", gpu_cache_bytes), ("cpu", cpu_cache_bytes)):
        option = f"--{tier}-cache-bytes"
        try:
            size = parse_size(text, option=option)
        except SizeError as error:
            raise click.UsageError(str(error)) from None
        if size.bytes is None:
            raise click.UsageError(f"{option}={text}: a plan needs bytes, not a percentage")
        blocks = size.bytes // slot_bytes
        rows.append(
            {
                "tier": tier,
                "budget_bytes": size.bytes,
                "blocks": blocks,
                "tokens": blocks * block_tokens,
                "unused_bytes": size.bytes - blocks * slot_bytes,
            }
        )
    if as_json:
        block = {"block_bytes": block_bytes, "slot_bytes": slot_bytes, "block_tokens": block_tokens}
        click.echo(json.dumps(block | {"tiers": rows}, indent=2))
        return
    title = f"One block: {block_tokens} tokens, {format_size(slot_bytes)}"
    _print_table(title, [{key: _grouped(value) for key, value in row.items()} for row in rows])


def _grouped(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of equal keys as a table as wide as the terminal, or 120 columns into a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=True)
    for heading in rows[0]:
        long = max(len(row[heading]) for row in rows) > 24
        table.add_column(heading.replace("_", " "), ratio=1 if long else None, no_wrap=not long)
    for row in rows:
        # Text, not str: square brackets in a value are no markup.
        table.add_row(*(Text(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
