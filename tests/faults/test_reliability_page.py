# SPDX-License-Identifier: Apache-2.0
"""The page on reliability shows every cell of the fault table, as it was seen in a recorded run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults.table import CELLS, SKIPPED

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_the_page_is_what_the_recorded_run_gives() -> None:
    script = ROOT / "scripts" / "make_reliability.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_every_boundary_and_fault_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    shown = {(row[0].removeprefix("| "), fault) for row in rows for fault in row[1].split(", ")}
    told = {(cell.boundary.name, cell.fault) for cell in CELLS} | SKIPPED.keys()
    assert told <= shown
