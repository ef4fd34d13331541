# SPDX-License-Identifier: Apache-2.0
"""Write the fault table of docs/reliability.md from what a run of its tests saw.

scripts/make_reliability.py          write the page from the recorded run
scripts/make_reliability.py --run    run every cell on real engines first, and record it
scripts/make_reliability.py --check  fail if the page is not what the record gives
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.table import BOUNDARIES, CELLS, FAULTS, SKIPPED, Cell  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "tests" / "faults" / "seen.json"
TEST = "tests/faults/test_fault_table.py"

BEGIN = "<!-- Fault table: made by scripts/make_reliability.py, do not edit. -->\n"
END = "<!-- End of the fault table. -->\n"


def record() -> None:
    """Run every cell, and keep what was seen; a run with a failed cell ends this program."""
    found = RECORD.with_suffix(".new")
    command = [sys.executable, "-m", "pytest", "-m", "", TEST]
    environment = {**os.environ, "XAVIER_TEST_RECORD": str(found)}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        found.replace(RECORD)
    finally:
        found.unlink(missing_ok=True)


def row(cell: Cell, seen: dict[str, Any] | None) -> str:
    if seen is None:
        return f"| {cell.boundary.name} | {cell.fault} | not recorded yet | | | | |"
    counted = "; ".join(f"`{name}`" for name in seen["counted"]) or "no failure"
    fields = (
        cell.boundary.name,
        cell.fault,
        seen["answers"],
        seen["tokens"],
        seen["time"],
        counted,
        seen["breaker"],
    )
    return f"| {' | '.join(fields)} |"


def tables(seen: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of both tables."""
    yield "| Boundary | Fault | Answers | Prompt | Time | Counted at | Breaker |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for cell in CELLS:
        yield row(cell, seen.get(cell.id))
    yield ""
    yield "These make no sense together:"
    yield ""
    yield "| Boundary | Fault | Why not |"
    yield "| --- | --- | --- |"
    for boundary in BOUNDARIES:
        reasons: dict[str, list[str]] = {}
        for fault in FAULTS:
            if (boundary, fault) in SKIPPED:
                reasons.setdefault(SKIPPED[boundary, fault], []).append(fault)
        for reason, faults in reasons.items():
            yield f"| {boundary} | {', '.join(faults)} | {reason} |"


def page() -> str:
    """Return the page with the tables that the record gives."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(tables(json.loads(RECORD.read_text(encoding="utf-8"))))
    return f"{before}{BEGIN}\n{lines}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run every cell on real engines first")
    parser.add_argument("--check", action="store_true", help="only compare; 1 if it differs")
    arguments = parser.parse_args()
    if arguments.run:
        record()
    made = page()
    if not arguments.check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != PAGE.read_text(encoding="utf-8"):
        print(f"{PAGE.name} is not what {RECORD.name} gives; run {sys.argv[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
