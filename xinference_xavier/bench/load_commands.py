# SPDX-License-Identifier: Apache-2.0
"""The commands of the group ``bench`` that measure engines under load."""

from __future__ import annotations

from pathlib import Path

import click

from xinference_xavier.bench.commands import (
    Names,
    Numbers,
    command,
    engine_options,
    engine_settings,
    plots_option,
    resume_option,
    rounds_option,
    run_and_show,
)
from xinference_xavier.cli.output import json_option


@command.command()
@click.option(
    "--arms",
    type=Names("plain", "xavier", "builtin", "lmcache"),
    default="plain,xavier",
    show_default=True,
    help="Each runs beside plain vLLM; plain beside itself shows the noise.",
)
@click.option(
    "--streams",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Answers that are being written meanwhile.",
)
@click.option(
    "--prompts",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Prompts per round, all different, one after another.",
)
@click.option("--tokens", type=click.IntRange(16), default=512, show_default=True)
@rounds_option
@engine_options
@resume_option
@plots_option
@json_option
def interleaved(
    arms: tuple[str, ...],
    streams: int,
    prompts: int,
    tokens: int,
    rounds: int,
    tiny: bool,
    core: int | None,
    logs: Path | None,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """New prompts that arrive while other answers are written."""
    from xinference_xavier.bench import interleaved as bench

    with engine_settings(tiny, core, logs) as given:
        settings = bench.Settings(
            given.folder,
            given.core,
            arms,
            streams,
            prompts,
            tokens,
            rounds,
            shape=given.shape,
        )
        run_and_show(
            "interleaved",
            lambda report: bench.run(settings, report, resume),
            bench.show,
            json_file,
            plots,
            bench.plot,
        )


@command.command()
@click.option(
    "--arms",
    type=Names("plain", "xavier", "xavier-cpu", "builtin", "lmcache"),
    default="plain,xavier,xavier-cpu",
    show_default=True,
    help="Each runs beside plain vLLM; plain beside itself shows the noise. xavier-cpu has a "
    "device tier of 42 blocks, so that blocks come from the host tier.",
)
@click.option("--concurrency", type=Numbers(), default="16,32", show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(16),
    default=512,
    show_default=True,
    help="Length of each of the 12 prefixes of a round.",
)
@click.option(
    "--rounds", type=click.IntRange(2), default=10, show_default=True, help="Measured rounds."
)
@engine_options
@resume_option
@plots_option
@json_option
def concurrent(
    arms: tuple[str, ...],
    concurrency: tuple[int, ...],
    tokens: int,
    rounds: int,
    tiny: bool,
    core: int | None,
    logs: Path | None,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Many requests at once whose prefixes another replica holds."""
    from xinference_xavier.bench import concurrent as bench

    with engine_settings(tiny, core, logs) as given:
        settings = bench.Settings(
            given.folder,
            given.core,
            arms,
            concurrency,
            tokens,
            rounds,
            shape=given.shape,
        )
        run_and_show(
            "concurrent",
            lambda report: bench.run(settings, report, resume),
            bench.show,
            json_file,
            plots,
            bench.plot,
        )
