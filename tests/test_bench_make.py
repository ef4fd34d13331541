# SPDX-License-Identifier: Apache-2.0
"""``make bench`` and ``make bench-full`` run commands that exist, each into a file of its own."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from xinference_xavier.bench import command

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")


def measurements(target: str, results: Path) -> dict[str, click.Context]:
    """Return what would be run now, read as the command line is, by the name of its result."""
    printed = subprocess.run(
        ["make", "--dry-run", target, f"BENCH_DIR={results}"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    found = {}
    for line in printed.splitlines():
        _, called, args = line.partition("/xinference-xavier bench ")
        if called:
            name, *options = shlex.split(args)
            context = command.commands[name].make_context(name, options)
            found[Path(context.params["json_file"]).stem] = context
    return found


def test_the_short_measurements_are_those_of_this_package_alone(tmp_path: Path) -> None:
    found = measurements("bench", tmp_path)
    assert list(found) == ["store", "transfer", "directory", "warm-1100"]
    warm = found["warm-1100"].params
    assert warm["tokens"] == (1100,)
    assert warm["arms"] == ("cold", "local", "xavier")


def test_the_whole_has_every_command_and_every_arm(tmp_path: Path) -> None:
    found = measurements("bench-full", tmp_path)
    assert set(found) == set(command.commands)
    for context in found.values():
        for option in context.command.params:
            if option.name == "arms":
                assert set(context.params["arms"]) == set(option.type.valid), context.info_name


def test_every_long_measurement_goes_on_after_an_interruption(tmp_path: Path) -> None:
    found = measurements("bench-full", tmp_path) | measurements("bench", tmp_path)
    kept = []
    for context in found.values():
        for name in ("resume", "plots"):
            if name in (option.name for option in context.command.params):
                kept.append(context.params[name])
                assert context.params[name].parent == tmp_path
    assert len(set(kept)) == len(kept)


def test_what_has_a_result_is_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{}")
    assert "store" not in measurements("bench", tmp_path)
