# SPDX-License-Identifier: Apache-2.0
"""The dependency audit: what it says of what the services say, and of those that say nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import audit

CANARY = {
    "dependencies": [
        {
            "name": "jinja2",
            "version": "3.1.2",
            "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3.1.3"]}],
        }
    ]
}
SKIPPED = {"dependencies": [{"name": "jinja2", "skip_reason": "Dependency not found on PyPI"}]}
CLEAN = {"dependencies": [{"name": "x", "version": "1", "vulns": []}]}
NPM_CLEAN: dict[str, Any] = {"auditReportVersion": 2, "vulnerabilities": {}}
NPM_REFUSED = {"message": "405 Method Not Allowed", "statusCode": 405}
NPM_FOUND = {
    "auditReportVersion": 2,
    "vulnerabilities": {
        "vite": {"via": [{"url": "https://github.com/advisories/GHSA-2"}]},
        "vitest": {"via": ["vite"]},
    },
}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "known.toml"
    path.write_text("")
    monkeypatch.setattr(audit, "KNOWN", path)
    monkeypatch.setattr(audit.shutil, "which", lambda name: f"/bin/{name}")
    return path


def service(canary: Any, installed: Any, npm: Any) -> audit.Run:
    def run(command: Sequence[str]) -> str:
        if command[0] == "npm":
            return json.dumps(npm)
        return json.dumps(canary if "-r" in command else installed)

    return run


def test_nothing_found_is_fine(known: Path) -> None:
    assert audit.audit(service(CANARY, CLEAN, NPM_CLEAN)) == 0


def test_a_new_finding_fails(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.audit(service(CANARY, CANARY, NPM_FOUND)) == 1
    out = capsys.readouterr().out
    assert "NEW: jinja2 3.1.2: PYSEC-1, CVE-1 (fixed in: 3.1.3)" in out
    assert "NEW: vite: GHSA-2" in out


def test_known_ones_are_told_by_any_of_their_names(
    known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known.write_text(
        '[[known]]\nid = "CVE-1"\nreason = "pinned"\n[[known]]\nid = "GHSA-2"\nreason = "pinned"\n'
    )
    assert audit.audit(service(CANARY, CANARY, NPM_FOUND)) == 0
    assert "2 known findings, none new" in capsys.readouterr().out


def test_one_that_is_gone_must_go_from_the_list(
    known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known.write_text('[[known]]\nid = "CVE-9"\nreason = "pinned"\n')
    assert audit.audit(service(CANARY, CLEAN, NPM_CLEAN)) == 1
    assert "STALE: CVE-9" in capsys.readouterr().out
    # What was not looked for may well be there.
    assert audit.audit(service(CANARY, CLEAN, NPM_REFUSED)) == 2


@pytest.mark.parametrize(
    ("canary", "npm", "told"),
    [
        (SKIPPED, NPM_CLEAN, "NOT AUDITED: Python: the service tells nothing of jinja2==3.1.2"),
        (None, NPM_CLEAN, "NOT AUDITED: Python: pip-audit gave no report"),
        (CANARY, NPM_REFUSED, "NOT AUDITED: npm: 405 Method Not Allowed"),
        (CANARY, "", "NOT AUDITED: npm: npm audit gave no report"),
    ],
)
def test_a_service_that_says_nothing_is_no_clean_bill(
    known: Path, capsys: pytest.CaptureFixture[str], canary: Any, npm: Any, told: str
) -> None:
    assert audit.audit(service(canary, CLEAN, npm)) == 2
    out = capsys.readouterr().out
    assert told in out
    assert "none new" not in out


def test_a_new_finding_fails_though_another_service_says_nothing(known: Path) -> None:
    assert audit.audit(service(CANARY, CANARY, NPM_REFUSED)) == 1


def test_every_known_one_has_a_reason() -> None:
    assert all(reason.strip() for reason in audit.known_ids(audit.KNOWN).values())
