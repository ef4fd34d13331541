# SPDX-License-Identifier: Apache-2.0
"""Ask the vulnerability services about everything that is installed, for Python and for npm.

Findings that cannot be fixed, since a version is pinned, are in ``known_vulnerabilities.toml`` with
the reason; any other fails, and so does an entry that is not found any more.

A package index without a vulnerability service is the trap here: pip-audit then skips every package
and finds nothing. So it is first asked about a version that is known to be vulnerable.

Exit codes: 0 nothing new; 1 something new, or a stale entry; 2 something could not be audited.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
KNOWN: Final = ROOT / "scripts" / "known_vulnerabilities.toml"
FRONTEND: Final = ROOT / "frontend"

CANARY: Final = "jinja2==3.1.2"
"""Has had findings since January 2024 (CVE-2024-22195 is the first)."""

TIMEOUT_S: Final = 1800

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its standard output, whatever its exit status."""


class Unreachable(Exception):
    """A service told nothing; ``str()`` says which and why."""


@dataclass(frozen=True, order=True)
class Finding:
    """A vulnerability of an installed package, under all names that it goes by."""

    package: str
    names: tuple[str, ...]
    fixed_in: str

    def __str__(self) -> str:
        return f"{self.package}: {', '.join(self.names)} (fixed in: {self.fixed_in or 'nothing'})"


def python_findings(run: Run) -> list[Finding]:
    """Return the findings of this environment. Raises :class:`Unreachable`."""
    audit = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as canary:
        canary.write(CANARY + "\n")
        canary.flush()
        if not _of_pip(run([*audit, "--disable-pip", "--no-deps", "-r", canary.name])):
            raise Unreachable(
                f"Python: the service tells nothing of {CANARY}, which has known vulnerabilities"
            )
    return _of_pip(run([*audit, "--local", "--skip-editable"]))


def _of_pip(output: str) -> list[Finding]:
    report = _json(output, "Python: pip-audit")
    return [
        Finding(
            f"{found['name']} {found['version']}",
            (each["id"], *each.get("aliases", ())),
            ", ".join(each.get("fix_versions", ())),
        )
        for found in report.get("dependencies", ())
        for each in found.get("vulns", ())
    ]


def npm_findings(run: Run) -> list[Finding]:
    """Return the findings of the web page's build. Raises :class:`Unreachable`."""
    if shutil.which("npm") is None:
        raise Unreachable("npm: it is not installed")
    report = _json(run(["npm", "--prefix", str(FRONTEND), "audit", "--json"]), "npm: npm audit")
    if "auditReportVersion" not in report:
        raise Unreachable(f"npm: {report.get('message') or report.get('error') or 'no report'}")
    advisories = {
        (name, via["url"].rpartition("/")[2])
        for name, each in report.get("vulnerabilities", {}).items()
        for via in each["via"]
        if isinstance(via, Mapping)  # else the name of the package that brings it
    }
    return [Finding(name, (advisory,), "see npm audit") for name, advisory in sorted(advisories)]


def _json(output: str, whose: str) -> dict[str, Any]:
    try:
        report = json.loads(output)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise Unreachable(f"{whose} gave no report")
    return report


def known_ids(path: Path) -> dict[str, str]:
    """Return the reason for each known vulnerability by its name."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("known", [])
    return {entry["id"]: entry["reason"] for entry in entries}


def judged(
    findings: Iterable[Finding], known: Mapping[str, str], *, complete: bool
) -> tuple[list[str], int]:
    """Return what to tell, and how much of it is wrong.

    ``complete`` says that everything was audited, so that a known one that is missing is gone.
    """
    lines, wrong, seen = [], 0, set[str]()
    for finding in sorted(findings):
        names = known.keys() & set(finding.names)
        seen |= names
        wrong += not names
        lines.append(f"{'known' if names else 'NEW'}: {finding}")
    if complete:
        stale = sorted(known.keys() - seen)
        lines += [f"STALE: {name} is not found any more; take it out of {KNOWN}" for name in stale]
        wrong += len(stale)
    return lines, wrong


def audit(run: Run) -> int:
    """Audit everything, print what was found, and return the exit code."""
    findings, unreachable = [], []
    for each in (python_findings, npm_findings):
        try:
            findings += each(run)
        except Unreachable as error:
            unreachable.append(str(error))
    lines, wrong = judged(findings, known_ids(KNOWN), complete=not unreachable)
    for line in lines:
        print(line)
    for reason in unreachable:
        print(f"NOT AUDITED: {reason}")
    if wrong:
        return 1
    if unreachable:
        return 2
    print(f"{len(findings)} known findings, none new")
    return 0


def _run(command: Sequence[str]) -> str:
    # pip-audit says there that nothing was found where nothing was looked up.
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    ).stdout


if __name__ == "__main__":
    sys.exit(audit(_run))
