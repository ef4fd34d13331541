# SPDX-License-Identifier: Apache-2.0
"""The command that lets replicas run for long, and looks for what grows."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from xinference_xavier.cli import imported
from xinference_xavier.cli.output import json_option, write_json

LINE_EVERY_S = 60.0
"""Into a file or a pipe, progress is printed this often."""


@click.command(
    epilog="Exit codes: 0 nothing grew and nothing was wrong; 1 something was, or the engines did "
    "not start; 2 a wrong option."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.1),
    default=10,
    show_default=True,
    metavar="NUMBER",
    help="Length of the traffic, 0.1 or more.",
)
@click.option(
    "--replicas",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    metavar="NUMBER",
    help="Replicas that share, 2 or more.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="NUMBER",
    help="Another one gives other traffic, 0 or more.",
)
@click.option(
    "--keep-logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the engines' logs and the model in this folder.",
)
@json_option
def command(
    minutes: float, replicas: int, seed: int, keep_logs: Path | None, json_file: str | None
) -> None:
    """Run replicas for long under random traffic, aborts and kills.

    Starts replicas of a tiny model that share blocks. Documents of three times what their stores
    hold are asked about at random, beside prompts of their own; one client in five leaves before
    the end; and every replica but the first is killed now and then. Memory, descriptors, threads,
    leases, blocks and hits are watched. At the end everything must be given back, nothing may have
    grown, and answers must be those of an engine without the connector. Ctrl-C ends the traffic
    early.
    """
    run = imported("xinference_xavier.soak.run")
    report = imported("xinference_xavier.soak.report")
    engines = imported("xinference_xavier.bench.engines")
    settings = run.Settings(minutes, replicas, seed)
    try:
        with _folder(keep_logs) as folder, _Progress() as progress:
            result = run.run(settings, folder, progress.show)
    except engines.EngineError as error:
        raise click.ClickException(str(error)) from error
    if write_json(json_file, result):
        report.show(result)
    if not result["ok"]:
        raise click.ClickException(f"not as it should be: {'; '.join(result['problems'])}")


class _Progress:
    """One line on stderr: replaced in a terminal, repeated now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            click.echo("", err=True)

    def show(self, text: str) -> None:
        """Show how far it is."""
        now = time.monotonic() - self._started
        if self._terminal:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        elif now >= self._next:
            self._next = now + LINE_EVERY_S
            click.echo(f"{now:6.0f} s  {text}", err=True)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="xavier-soak-") as name:
        yield Path(name)
