# SPDX-License-Identifier: Apache-2.0
"""Takes away each thing that keeps copies in order, and sees which test notices.

Copies run beside the engine, so what keeps them right is a set of short statements: a fence, a
mark, a wait for one, the generation that is withdrawn before a copy and published after it. A test
suite that passes without one of them proves nothing about it. So each is removed in turn, in a
copy of the package, and the tests that are about it must fail.

    python scripts/fence_mutations.py --json report.json

``fence_table.py`` names every such statement. One in the sources that is not in the table, and an
entry whose statement is gone, end the run at once: ``problems`` finds them, and a test of the
ordinary suite calls it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fence_table import EXEMPT, MUTATIONS, Mutation

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = "xinference_xavier"

STATEMENT: Final = re.compile(
    r"\.(?:fence|mark|after)\(|(?<![\w.])(?:withdraw|publish)\(|_mark\("
    r"|\.(?:stream_wait|event_record|event_synchronize)\("
)
"""What a statement that orders copies looks like."""

NO_STATEMENT: Final = re.compile(r"^\s*(?:async def |def |#|\"\"\")|``|:meth:")

PARALLEL: Final = 2
TEST_LIMIT_S: Final = 60
RUN_LIMIT_S: Final = 600


@dataclass
class Outcome:
    """What became of one mutation; ``caught_by`` is the first test that failed."""

    name: str
    file: str
    line: int
    caught_by: str | None
    seconds: float
    note: str = ""


def sources() -> dict[str, str]:
    """Return the product's Python files, by path below the package."""
    package = ROOT / PACKAGE
    return {
        path.relative_to(package).as_posix(): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def problems(texts: dict[str, str]) -> list[str]:
    """Return what the table and the sources disagree on; then a run would prove nothing."""
    found = []
    for mutation in MUTATIONS:
        count = texts.get(mutation.file, "").count(mutation.old)
        if count != 1:
            found.append(f"{mutation.name}: its statement is {count} times in {mutation.file}")
    for name, text in texts.items():
        if name in EXEMPT:
            continue
        covered = "\n".join(m.old for m in MUTATIONS if m.file == name)
        for number, line in enumerate(text.splitlines(), start=1):
            listed = line.strip() in covered
            if STATEMENT.search(line) and not NO_STATEMENT.search(line) and not listed:
                found.append(f"{name}:{number}: not in the table: {line.strip()}")
    return found


def prepare(place: Path, mutation: Mutation | None = None) -> None:
    """Copy what a test run needs, with one statement changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", place)
    if mutation is not None:
        path = place / PACKAGE / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))


def run(place: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests on the copy in ``place`` until the first one fails."""
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--timeout={TEST_LIMIT_S}", *tests],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )


def judge(mutation: Mutation) -> Outcome:
    """Run one mutation's tests without the statement that it removes."""
    start = time.monotonic()
    before = sources()[mutation.file].split(mutation.old)[0]
    outcome = Outcome(mutation.name, mutation.file, before.count("\n") + 1, None, 0.0)
    with tempfile.TemporaryDirectory(prefix="xavier-mutation-") as name:
        prepare(Path(name), mutation)
        try:
            done = run(Path(name), mutation.tests)
        except subprocess.TimeoutExpired:
            outcome.note = f"the tests did not end in {RUN_LIMIT_S} s"
        else:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode == 1 and failed:
                outcome.caught_by = failed[1]
            elif done.returncode:
                outcome.note = (done.stdout + done.stderr)[-800:]
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def check_baseline() -> str | None:
    """Run all tests of the table on an unchanged copy; return what went wrong, if anything."""
    tests = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
    with tempfile.TemporaryDirectory(prefix="xavier-mutation-") as name:
        place = Path(name)
        prepare(place)
        show = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        environment = {**os.environ, "PYTHONPATH": str(place)}
        found = subprocess.run(
            [sys.executable, "-c", show], cwd=place, env=environment, text=True, capture_output=True
        ).stdout.strip()
        if not found.startswith(str(place)):
            return f"the copy is not what would be tested, but {found}"
        done = run(place, tests)
        return None if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


def main() -> int:
    """Run everything; return 0 when each statement was missed by some test."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome to FILE")
    parser.add_argument("--only", metavar="TEXT", help="only mutations whose name has TEXT in it")
    arguments = parser.parse_args()
    wrong = problems(sources())
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    chosen = [m for m in MUTATIONS if arguments.only is None or arguments.only in m.name]
    if not chosen:
        parser.error(f"no mutation has {arguments.only!r} in its name")
    failure = check_baseline()
    if failure is not None:
        print(f"the tests fail without any mutation:\n{failure}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(PARALLEL) as pool:
        outcomes = []
        for outcome in pool.map(judge, chosen):
            outcomes.append(outcome)
            verdict = outcome.caught_by or f"SURVIVED {outcome.note}"
            print(f"{outcome.file}:{outcome.line}: {outcome.name}\n    {verdict}", flush=True)
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught")
    if arguments.json is not None:
        report = {
            "fences": len(outcomes),
            "caught": caught,
            "mutations": [asdict(outcome) for outcome in outcomes],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
