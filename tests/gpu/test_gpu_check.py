# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ``scripts/gpu_check.sh`` measures what it says; its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from tests.gpu.platforms import OnFake

SMALL = gpu_check.Sizes(
    blocks=40, layers=2, dim=8, batch=12, repeats=1, histories=(50, 200), admitted=4, rounds=2
)


@pytest.fixture(scope="module")
def figures() -> dict:
    fake = OnFake()
    measured = gpu_check.measure(fake, "fake", SMALL)
    fake.close()
    return measured


def test_every_copy_and_load_is_measured_beside_its_floor(figures: dict) -> None:
    rows = {row["name"]: row for row in figures["rows"]}
    assert len(rows) == 14
    for row in rows.values():
        assert row["gb_per_s"] > 0
        assert (row["of"] is None) == row["name"].startswith("one ")
        assert row["of"] is None or row["share"] == pytest.approx(rows[row["of"]]["ms"] / row["ms"])
    assert "load from a peer's device tier (cuda_ipc)" in rows
    assert "load from a peer's host tier (shm)" in rows


def test_admissions_are_measured_for_every_history(figures: dict) -> None:
    assert [cell["history"] for cell in figures["admission"]] == [50, 200]
    for cell in figures["admission"]:
        assert cell["us_per_block"] == cell["bookkeeping_us"] + cell["copies_us"]


def test_a_block_has_the_bytes_of_the_reference_run() -> None:
    sizes = gpu_check.Sizes()
    assert sizes.layers * 2 * 16 * 2 * sizes.dim * 2 == 196_608


def test_the_table_has_one_line_for_every_figure(figures: dict) -> None:
    report = figures | {"machine": {"gpu": "a card"}, "tests": {"ok": True, "passed": 3}}
    text = gpu_check.table(report)
    assert text.startswith("gpu=a card\ntests: ok=True  passed=3\n")
    assert len(text.splitlines()) == 3 + 1 + 14 + 2
    json.dumps(report)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(gpu_check.__file__).with_suffix(".sh")
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [str(script), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_help_tells_what_is_needed_and_the_exit_statuses() -> None:
    ended = run("--help")
    assert ended.returncode == 0
    assert "--json FILE" in ended.stdout
    assert "Exit status" in ended.stdout


def test_wrong_arguments_are_told_apart_from_a_missing_gpu() -> None:
    assert run("--wrong").returncode == gpu_check.UNUSABLE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    ended = run()
    assert ended.returncode == gpu_check.NO_GPU
    assert "no CUDA device" in ended.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_check, "_has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package", "no.such.package"))
    assert gpu_check.main([]) == gpu_check.UNUSABLE
    assert "not installed: no_such_package, no.such.package" in capsys.readouterr().err
