# SPDX-License-Identifier: Apache-2.0
"""How subcommands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

STDOUT: Final = "-"

PIPE_COLUMNS: Final = 120
TABLE_COLUMNS: Final = 110
"""On less than this, a table that is wider than the terminal is printed as paragraphs."""

LONG_TEXT: Final = 24
"""Characters of a text that is never wrapped in a table."""

json_option = click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE]",
    help="Write JSON to FILE as well; without FILE, or with -, print it instead of tables.",
)
"""Gives ``json_file``: None, a path, or :data:`STDOUT`. An argument goes before it."""

endpoint_option = click.option(
    "--endpoint",
    envvar="XINFERENCE_ENDPOINT",
    default="http://127.0.0.1:9997",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="Xinference's address.",
)
api_key_option = click.option(
    "--api-key",
    envvar="XINFERENCE_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="API key, or token of a login, where the server asks for one.",
)


def write_json(json_file: str | None, result: Mapping[str, Any]) -> bool:
    """Write ``result`` where :data:`json_option` says; return whether tables are to follow."""
    if json_file is None:
        return True
    text = json.dumps(result, indent=2, default=str)
    if json_file == STDOUT:
        click.echo(text)
        return False
    try:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write --json={json_file}: {error}") from None
    return True


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of equal keys as a table, or as a paragraph each where that lacks room.

    The width is the variable COLUMNS, else the terminal's, else 120 columns.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    console = Console(width=PIPE_COLUMNS if piped else None)
    long = {key for key in rows[0] if max(len(row[key]) for row in rows) > LONG_TEXT}
    if console.width < TABLE_COLUMNS and _width(rows) > console.width:
        click.echo(f"{title}\n")
        for row in rows:
            click.echo(_paragraph(row, console.width))
        return
    table = Table(title=title, title_justify="left", show_lines=True)
    for key in rows[0]:
        ratio = 1 if key in long else None
        # Folded, not cut: a word that is too long may be a value to type.
        table.add_column(
            key.replace("_", " "), ratio=ratio, no_wrap=key not in long, overflow="fold"
        )
    for row in rows:
        # Text, not str: square brackets in a value are no markup.
        table.add_row(*(Text(value) for value in row.values()))
    console.print(table)


def _width(rows: Sequence[Mapping[str, str]]) -> int:
    """Return the columns that a table takes in which nothing is wrapped."""
    return 1 + sum(3 + max(len(key), *(len(row[key]) for row in rows)) for key in rows[0])


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
