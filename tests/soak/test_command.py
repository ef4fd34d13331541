# SPDX-License-Identifier: Apache-2.0
"""The command ``soak``: its options, what it prints, and one real run in the slow lane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xinference_xavier import cli
from xinference_xavier.bench.engines import EngineError
from xinference_xavier.soak import judge, run
from xinference_xavier.soak.watch import Sample, Store, Usage

RECORDED = [
    Sample(
        5.0 * number,
        (Usage("replica-0 engine", 1, 4711, 800 * judge.MIB, 500 * judge.MIB, 60, 40, 4),),
        {"replica-0": Store(1, 0, 0, 0, 90, 10, 0, 100, 1000, 300, 100)},
        {"replica-0": 0},
    )
    for number in range(60)
]


def result(*problems: str) -> dict[str, Any]:
    outcomes = {
        "answered": 900,
        "left": 200,
        "lost": 3,
        "failed": 0,
        "compared": 120,
        "different": 0,
        "failures": [],
        "differences": [],
    }
    return {
        "ok": not problems,
        "problems": list(problems),
        "interrupted": False,
        "requests": outcomes,
        "control": outcomes,
        "kills": {"replica-0": [], "replica-1": ["server", "worker"]},
        "growth": [item.to_dict() for item in judge.growths(RECORDED)],
        "samples": [sample.to_dict() for sample in RECORDED],
    }


def soak(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], *args: str) -> Result:
    asked: list[run.Settings] = []

    def recorded(settings: run.Settings, folder: Path, progress: run.Progress) -> dict[str, Any]:
        asked.append(settings)
        progress("so far, so good")
        return found

    monkeypatch.setattr(run, "run", recorded)
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(cli.main, ["soak", "--minutes", "7", "--seed", "3", *args])
    assert asked == [run.Settings(7, 2, 3)]
    return done


def test_a_good_run_shows_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    done = soak(monkeypatch, result())
    assert done.exit_code == 0, done.output
    assert "so far, so good" in done.output
    for text in ("900 answered, 200 left", "0 of 120", "replica-0 0, replica-1 2", "rss MiB"):
        assert text in done.output


def test_what_is_wrong_gives_an_exit_code_and_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "soak.json"
    done = soak(monkeypatch, result("a lease was left"), "--json", str(file))
    assert done.exit_code == 1
    assert "not as it should be: a lease was left" in done.output
    assert json.loads(file.read_text())["problems"] == ["a lease was left"]


def test_engines_that_do_not_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise EngineError("replica-1 did not start")

    monkeypatch.setattr(run, "run", broken)
    done = CliRunner().invoke(cli.main, ["soak"])
    assert done.exit_code == 1
    assert "replica-1 did not start" in done.output


@pytest.mark.parametrize(
    "wrong", [("--minutes", "0"), ("--replicas", "1"), ("--seed", "-1"), ("--hours", "1")]
)
def test_wrong_options_are_refused(wrong: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli.main, ["soak", *wrong]).exit_code == 2


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_traffic_and_kills_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    logs = tmp_path / "logs"
    done = CliRunner().invoke(
        cli.main, ["soak", "--minutes", "10", "--keep-logs", str(logs), "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert sum(len(kills) for kills in found["kills"].values()) > 0
    assert found["requests"]["answered"] > found["requests"]["left"] > 0
