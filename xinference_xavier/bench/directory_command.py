# SPDX-License-Identifier: Apache-2.0
"""The command ``bench directory``."""

from __future__ import annotations

from pathlib import Path

import click

from xinference_xavier.bench.commands import (
    Numbers,
    command,
    plots_option,
    resume_option,
    rounds_option,
    run_and_show,
)
from xinference_xavier.cli.output import json_option

__all__ = ["command"]


@command.command()
@click.option(
    "--blocks",
    type=Numbers(),
    default="100000,1000000",
    show_default=True,
    help="Numbers of blocks in the directory.",
)
@click.option(
    "--members",
    type=Numbers(),
    default="2,8,64",
    show_default=True,
    help="Numbers of replicas, from 2 on.",
)
@click.option(
    "--most",
    type=click.IntRange(10_000),
    default=10_000_000,
    show_default=True,
    help="Blocks in a mirror that is measured alone.",
)
@rounds_option
@resume_option
@plots_option
@json_option
def directory(
    blocks: tuple[int, ...],
    members: tuple[int, ...],
    most: int,
    rounds: int,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Rates and memory of directory and mirror, and a lookup's time on the engine's thread."""
    from xinference_xavier.bench import directory as bench

    if min(members) < 2:
        raise click.BadParameter("at least 2: one follows the others", param_hint="--members")
    if min(blocks) < bench.FEWEST_BLOCKS:
        raise click.BadParameter(f"at least {bench.FEWEST_BLOCKS}", param_hint="--blocks")
    settings = bench.Settings(blocks, members, most, rounds)
    run_and_show(
        "directory",
        lambda report: bench.run(settings, report, resume),
        bench.show,
        json_file,
        plots,
        bench.plot,
    )
