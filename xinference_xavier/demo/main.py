# SPDX-License-Identifier: Apache-2.0
"""The command ``xinference-xavier demo``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from xinference_xavier import smollm
from xinference_xavier.cli.output import STDOUT, json_option, write_json
from xinference_xavier.demo import report, story
from xinference_xavier.demo.judge import Part
from xinference_xavier.demo.server import DemoError, Server
from xinference_xavier.options import TRANSPORTS, OptionError, XavierOptions

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@json_option
@click.option(
    "--keep-logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep Xinference's logs in this folder.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="How blocks come from the other replica.",
)
@click.option(
    "--gpu-cache-bytes",
    default="320MiB",
    show_default=True,
    metavar="SIZE",
    help="Device tier of each replica: for more than four documents, for less than all.",
)
@click.option(
    "--cpu-cache-bytes",
    default="384MiB",
    show_default=True,
    metavar="SIZE",
    help="CPU tier of each replica.",
)
@click.option(
    "--model-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where SmolLM2 is kept once it is converted.  [default: in the user's cache]",
)
def command(
    json_file: str | None,
    keep_logs: Path | None,
    transport: str,
    gpu_cache_bytes: str,
    cpu_cache_bytes: str,
    model_dir: Path | None,
) -> None:
    """Show two replicas sharing their KV cache.

    Starts a real Xinference with two real vLLM replicas, takes a few minutes and about 12 GB of
    memory, and leaves nothing behind but SmolLM2 in the cache. Exits with status 1, and says
    which part it is, if something is not as it should be.
    """
    console = Console(width=None if sys.stdout.isatty() else 120, stderr=json_file == STDOUT)
    settings = story.Settings(
        model_dir or smollm.default_folder(), transport, gpu_cache_bytes, cpu_cache_bytes
    )
    _check(settings)
    try:
        parts, result = _run(settings, console, keep_logs)
    except (DemoError, smollm.ModelMissing) as error:
        write_json(json_file, report.broken(str(error)))
        raise click.ClickException(str(error)) from error
    report.show(console, parts)
    write_json(json_file, result)
    if not result["ok"]:
        advice = "" if keep_logs else "; --keep-logs DIR keeps the logs"
        raise click.ClickException(f"not as it should be: {', '.join(result['failed'])}{advice}")
    console.print(f"All five parts are so, in {result['seconds']:.0f} s.")


def _check(settings: story.Settings) -> None:
    """Refuse bad sizes before anything is started."""
    options = settings.options()
    try:
        XavierOptions.from_mapping({name: options[name] for name in options if "xavier_" in name})
    except OptionError as error:
        raise click.UsageError(str(error)) from error


def _run(
    settings: story.Settings, console: Console, keep_logs: Path | None
) -> tuple[list[Part], dict[str, Any]]:
    """Run the demo; whatever happens, the server and its files are gone afterwards."""
    started = time.monotonic()
    step = _steps(console)
    with _interruptible():
        if not (settings.model / "config.json").is_file():
            with step(f"SmolLM2 is converted, once, to {settings.model}"):
                smollm.prepare(settings.model)
        server = Server(keep_logs)
        try:
            parts, more = story.run(server, settings, step)
        except (RuntimeError, ValueError, OSError) as error:
            # Besides DemoError, what Xinference's client raises when the server refuses or dies.
            tail = server.tail()
            words = f"\n\nThe server's last words:\n{tail}" if tail else ""
            raise DemoError(f"{error}{words}") from error
        finally:
            with _uninterrupted():
                server.stop()
    more["seconds"] = time.monotonic() - started
    return parts, report.outcome(parts, more)


def _steps(console: Console) -> story.Step:
    """Return what shows a step: a spinner while it takes, then a line with its seconds."""

    @contextmanager
    def step(title: str) -> Iterator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        started = time.monotonic()
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            progress.add_task(title, total=None)
            yield
        console.print(Text(f"{time.monotonic() - started:6.1f} s  {title}"))

    return step


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does: through every ``finally``."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(end, SIGNALS[1:]):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Finish the clean-up, which is bounded, whoever is impatient."""
    with _handled(signal.SIG_IGN, SIGNALS):
        yield


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    signals: Sequence[signal.Signals],
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
