# SPDX-License-Identifier: Apache-2.0
"""The command ``xinference-xavier``.

Every subcommand, and everything heavy, is imported when it is run, so that ``--help`` is instant
and works where neither vLLM nor Xinference is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Final

import click

from xinference_xavier import __version__

LAZY: Final[Mapping[str, tuple[str, str]]] = {
    "status": ("xinference_xavier.cli.status:command", "Show the GPU-first models of a server."),
    "plan": (
        "xinference_xavier.cli.plan:command",
        "Print how many KV blocks and tokens fit into the budgets.",
    ),
    "doctor": (
        "xinference_xavier.doctor:command",
        "Look for what would keep replicas from sharing.",
    ),
    "console": ("xinference_xavier.ui:command", "Serve the console for the browser."),
    "demo": ("xinference_xavier.demo.main:command", "Show two replicas sharing their KV cache."),
    "bench": ("xinference_xavier.bench:command", "Measure what sharing brings, and what it costs."),
    "soak": (
        "xinference_xavier.cli.soak:command",
        "Run replicas for long under random traffic, and look for what grows.",
    ),
    "directory": (
        "xinference_xavier.cli.directory:command",
        "Run the directory of replicas without Xinference.",
    ),
    "options": (
        "xinference_xavier.cli.about:options",
        "Print every option with its default and limits.",
    ),
    "features": (
        "xinference_xavier.cli.about:features",
        "Print what is supported, bypassed or refused, and why.",
    ),
}
"""Subcommands: import path of the click command, and its one line of help."""

EXTRAS: Final[Mapping[str, str]] = {"gradio": "ui", "gguf": "demo"}
"""Which extra brings a package; the others come with the build of vLLM."""


class _LazyGroup(click.Group):
    """A group that imports the subcommands of :data:`LAZY` only when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(LAZY)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return None
        module, _, attribute = LAZY[cmd_name][0].partition(":")
        command = getattr(imported(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{LAZY[cmd_name][0]} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in LAZY.items()])


def imported(module: str) -> ModuleType:
    """Import a module, or say which package it is that the environment lacks."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "xinference_xavier"):
            raise
        advice = "it with the vLLM build of your machine, for CPUs: pip install"
        if missing in EXTRAS:
            advice = "it: pip install"
        raise click.ClickException(
            f"this needs the package {missing}; install {advice} "
            f"'xinference-xavier[{EXTRAS.get(missing, 'cpu')}]'"
        ) from error


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 failed, or not as it should be; 2 a wrong option or value.",
)
@click.version_option(__version__, prog_name="xinference-xavier")
@click.pass_context
def main(context: click.Context) -> None:
    """GPU-first KV cache sharing between the vLLM replicas of one model."""
    if os.environ.get("NO_COLOR"):
        context.color = False
