# SPDX-License-Identifier: Apache-2.0
"""The click group ``bench``. Each command imports what it measures with only when it runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from xinference_xavier.cli.output import STDOUT, json_option
from xinference_xavier.options import TRANSPORTS

if TYPE_CHECKING:
    from xinference_xavier.bench.models import Shape
    from xinference_xavier.bench.report import Report

Command = TypeVar("Command", bound=Callable[..., None])


class Numbers(click.ParamType):
    """Positive whole numbers, separated by commas."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read them."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} is no list of numbers from 1 on, like 1100,2200", param, ctx)
        return numbers


class Names(click.ParamType):
    """Some of a few names, separated by commas."""

    name = "names"

    def __init__(self, *valid: str) -> None:
        self.valid = valid

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Read them."""
        names = value if isinstance(value, tuple) else tuple(str(value).split(","))
        for name in names:
            if name not in self.valid:
                self.fail(f"{name!r} is not one of {', '.join(self.valid)}", param, ctx)
        return names


class Bytes(click.ParamType):
    """A size in bytes, or with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        from xinference_xavier.sizes import SizeError, parse_size

        try:
            size = parse_size(value, option=param.name or "size" if param else "size")
        except SizeError as error:
            self.fail(str(error), param, ctx)
        if not size.bytes:
            self.fail(f"{value!r} is no number of bytes above 0", param, ctx)
        return size.bytes


rounds_option = click.option(
    "--rounds", type=click.IntRange(2), default=12, show_default=True, help="Measured rounds."
)
arena_option = click.option(
    "--arena-bytes",
    type=Bytes(),
    default="256MiB",
    show_default=True,
    help="Size of each arena; far above the CPU's caches, or memory is not what is measured.",
)
_ENGINE_OPTIONS = (
    click.option("--tiny", is_flag=True, help="A tiny model: to try the command, not to measure."),
    click.option(
        "--core",
        type=click.IntRange(0),
        help="CPU that the model threads of all engines are bound to.  [default: the last one]",
    ),
    click.option(
        "--logs",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keep the engines' logs and the model in this folder.",
    ),
)


def engine_options(function: Command) -> Command:
    """Add what all commands that start engines take: ``tiny``, ``core`` and ``logs``.

    They are what :func:`engine_settings` takes.
    """
    for option in reversed(_ENGINE_OPTIONS):
        function = option(function)
    return function


resume_option = click.option(
    "--resume",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep finished arms in this file, and take those that it has from an earlier run.",
)
plots_option = click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw the results into this folder, as PNG files.",
)


@click.group()
def command() -> None:
    """Measure what sharing brings, and what it costs.

    Every comparison is a ratio between arms that alternate in one run, with its 95 % interval. A
    target is met, or missed, when the interval of at least 10 pairs lies on one side of it, and
    not resolved otherwise. Leave the machine alone meanwhile.
    """


@command.command()
@click.option(
    "--arms",
    type=Names("cold", "local", "xavier", "builtin", "lmcache", "nixl"),
    default="cold,local,xavier",
    show_default=True,
    help="cold: computed; local: the engine's own cache; the others: loaded from a replica by this "
    "package, the Xavier built into Xinference, LMCache, or handed over by NixlConnector.",
)
@click.option("--tokens", type=Numbers(), default="1100,4400", show_default=True)
@click.option("--pairs", type=click.IntRange(2), default=10, show_default=True)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
)
@engine_options
@resume_option
@plots_option
@json_option
def warm(
    arms: tuple[str, ...],
    tokens: tuple[int, ...],
    pairs: int,
    transport: str,
    tiny: bool,
    core: int | None,
    logs: Path | None,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Time to first token of a prefix: computed, local, or loaded from a replica."""
    from xinference_xavier.bench import warm as bench
    from xinference_xavier.bench import warm_result

    with engine_settings(tiny, core, logs) as given:
        settings = bench.Settings(
            given.folder,
            given.core,
            arms,
            tokens,
            pairs,
            transport,
            shape=given.shape,
        )
        run_and_show(
            "warm",
            lambda report: bench.run(settings, report, resume),
            warm_result.show,
            json_file,
            plots,
            warm_result.plot,
        )


@command.command()
@click.option("--tokens", type=click.IntRange(16), default=2200, show_default=True)
@click.option("--pairs", type=click.IntRange(2), default=12, show_default=True)
@engine_options
@json_option
def cold(
    tokens: int,
    pairs: int,
    tiny: bool,
    core: int | None,
    logs: Path | None,
    json_file: str | None,
) -> None:
    """Time to first token of prompts that nobody has seen, with Xavier and without."""
    from xinference_xavier.bench import cold as bench

    with engine_settings(tiny, core, logs) as given:
        settings = bench.Settings(
            given.folder,
            given.core,
            tokens,
            pairs,
            shape=given.shape,
        )
        run_and_show("cold", lambda report: bench.run(settings, report), bench.show, json_file)


@command.command()
@click.option(
    "--arms",
    type=Names("plain", "xavier", "builtin", "lmcache"),
    default="plain,xavier",
    show_default=True,
)
@click.option("--documents", type=click.IntRange(1), default=4, show_default=True)
@click.option("--questions", type=click.IntRange(1), default=40, show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=2048, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=3, show_default=True)
@engine_options
@resume_option
@plots_option
@json_option
def shared(
    arms: tuple[str, ...],
    documents: int,
    questions: int,
    tokens: int,
    rounds: int,
    tiny: bool,
    core: int | None,
    logs: Path | None,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Questions about a few documents, each at a replica drawn at random."""
    from xinference_xavier.bench import shared as bench

    with engine_settings(tiny, core, logs) as given:
        settings = bench.Settings(
            given.folder,
            given.core,
            arms,
            documents,
            questions,
            tokens,
            rounds,
            shape=given.shape,
        )
        run_and_show(
            "shared",
            lambda report: bench.run(settings, report, resume),
            bench.show,
            json_file,
            plots,
            bench.plot,
        )


@command.command()
@click.option(
    "--histories",
    type=Numbers(),
    default="1000,10000,100000,1000000",
    show_default=True,
    help="Numbers of blocks that the store holds.",
)
@click.option("--batch", type=click.IntRange(1), default=128, show_default=True)
@rounds_option
@arena_option
@resume_option
@plots_option
@json_option
def store(
    histories: tuple[int, ...],
    batch: int,
    rounds: int,
    arena_bytes: int,
    resume: Path | None,
    plots: Path | None,
    json_file: str | None,
) -> None:
    """Cost of admitting a block into a full store, by its size and leases."""
    from xinference_xavier.bench import store as bench

    settings = bench.Settings(histories, rounds, batch, arena_bytes)
    run_and_show(
        "store",
        lambda report: bench.run(settings, report, resume),
        bench.show,
        json_file,
        plots,
        bench.plot,
    )


@command.command()
@click.option(
    "--counts",
    type=Numbers(),
    default="1,4,16,64,256,1024",
    show_default=True,
    help="Numbers of blocks per transfer.",
)
@click.option(
    "--transports",
    type=Names("shm", "nixl", "xoscar"),
    default="shm,nixl,xoscar",
    show_default=True,
)
@rounds_option
@arena_option
@json_option
def transfer(
    counts: tuple[int, ...],
    transports: tuple[str, ...],
    rounds: int,
    arena_bytes: int,
    json_file: str | None,
) -> None:
    """Speed of each transport between two processes, against its floor."""
    from xinference_xavier.bench import transfer as bench

    settings = bench.Settings(counts, transports, rounds, arena_bytes)
    run_and_show("transfer", lambda report: bench.run(settings, report), bench.show, json_file)


class EngineSettings(NamedTuple):
    """What a benchmark with engines is run with, from :func:`engine_options`."""

    folder: Path
    core: int
    shape: Shape


@contextmanager
def engine_settings(tiny: bool, core: int | None, logs: Path | None) -> Iterator[EngineSettings]:
    """Give the settings; a folder for logs and model that is not kept goes at the end."""
    from xinference_xavier.bench.models import QWEN_KV, TINY
    from xinference_xavier.bench.sharing import default_core

    where = default_core() if core is None else core
    shape = TINY if tiny else QWEN_KV
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        yield EngineSettings(logs, where, shape)
        return
    with tempfile.TemporaryDirectory(prefix="xavier-bench-") as name:
        yield EngineSettings(Path(name), where, shape)


def run_and_show(
    name: str,
    measure: Callable[[Report], dict[str, Any]],
    show: Callable[[dict[str, Any], Report], None],
    json_file: str | None,
    plots: Path | None = None,
    plot: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Measure, print, write, draw."""
    from xinference_xavier.bench.arms import ArmUnavailable
    from xinference_xavier.bench.engines import EngineError
    from xinference_xavier.bench.plots import PlotsUnavailable, check
    from xinference_xavier.bench.record import RecordMismatch
    from xinference_xavier.bench.report import Report, machine, save

    report = Report()
    where = machine()
    try:
        if plots is not None:
            check()
        result = {"benchmark": name, "machine": where} | measure(report)
    except (ArmUnavailable, EngineError, PlotsUnavailable, RecordMismatch) as error:
        raise click.ClickException(str(error)) from error
    if plots is not None and plot is not None:
        plot(result, plots)
        report.say(f"drawn into {plots}")
    if json_file == STDOUT:
        click.echo(json.dumps(result, indent=2, allow_nan=False))
        return
    show(result, report)
    if where["disturbed"]:
        report.note(
            f"Other work kept this machine busy (load {where['load_before']:.1f} on "
            f"{where['cores']} cores at the start): do not believe these figures."
        )
    if json_file is not None:
        save(Path(json_file), result)
        report.say(f"written to {json_file}")
