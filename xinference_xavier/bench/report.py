# SPDX-License-Identifier: Apache-2.0
"""What people and files get of a measurement: progress, tables, JSON, and facts of the machine.

Progress goes to stderr, tables to stdout.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from xinference_xavier import __version__
from xinference_xavier.installed import DISTRIBUTIONS, installed_version

PACKAGES: Final = (*DISTRIBUTIONS, "numpy")

BUSY: Final = 0.5
"""Running processes per core before a measurement, above which its figures are called disturbed."""


class Report:
    """Where a measurement tells how far it is, and what it found."""

    def __init__(self) -> None:
        self._err = Console(stderr=True)
        # Into a pipe: wide enough for every table here.
        self._out = Console(width=None if sys.stdout.isatty() else 160)
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line of progress."""
        self._err.print(f"[dim]{time.monotonic() - self._started:6.0f} s[/dim]  {text}")

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Step]:
        """Show a bar for ``total`` steps; gives the object to advance it with."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._err, transient=True) as progress:
            yield Step(progress, progress.add_task(title, total=total))
        self.say(title)

    def table(self, title: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Print rows of equal keys; does nothing without rows."""
        if not rows:
            return
        table = Table(title=title, title_justify="left")
        for name, value in rows[0].items():
            right = isinstance(value, int | float) and not isinstance(value, bool)
            table.add_column(name.replace("_", " "), justify="right" if right else "left")
        for row in rows:
            table.add_row(*(Text(shown(value)) for value in row.values()))
        self._out.print(table)

    def note(self, text: str) -> None:
        """Print a sentence below a table."""
        self._out.print(Text(text))

    def failures(self, arms: Mapping[str, str]) -> None:
        """Print which arms the tables do not have, and why."""
        for name, reason in arms.items():
            self.note(f"NOT MEASURED: {name}. {reason}")


class Step:
    """Advances a bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress = progress
        self._task = task

    def done(self, count: int = 1) -> None:
        """Note that ``count`` steps are done."""
        self._progress.advance(self._task, count)


def shown(value: object) -> str:
    """Return a value as people read it: three significant digits, thousands grouped."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def machine() -> dict[str, object]:
    """Return what figures depend on: CPU, cores, memory, versions, and what else runs now."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": cores,
        "memory_kib": int((_first_field("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {"xinference-xavier": __version__} | _versions(),
        "load_before": load,
        "disturbed": load > BUSY * cores,
    }


def save(path: Path, values: Mapping[str, object]) -> None:
    """Write JSON; a reader never sees half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    part.replace(path)


def _first_field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return None


def _versions() -> dict[str, str]:
    return {name: found for name in PACKAGES if (found := installed_version(name))}
