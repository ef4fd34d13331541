# SPDX-License-Identifier: Apache-2.0
"""The commands that print what the package knows of itself."""

from __future__ import annotations

import click

from xinference_xavier.cli.output import json_option, print_table, write_json
from xinference_xavier.features import feature_table
from xinference_xavier.options import Deployment, option_table


@click.command()
@json_option
def options(json_file: str | None) -> None:
    """Print every option with its default and limits."""
    tables = {"options": option_table(), "deployment": option_table(Deployment)}
    if write_json(json_file, tables):
        for title, rows in tables.items():
            print_table(title.capitalize(), rows)


@click.command()
@json_option
def features(json_file: str | None) -> None:
    """Print what is supported, bypassed or refused, and why."""
    rows = feature_table()
    if write_json(json_file, {"features": rows}):
        print_table("Features", rows)
