# SPDX-License-Identifier: Apache-2.0
"""What make does before it demonstrates or tests anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that make takes for a fresh clone."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def planned(clone: Path, *args: str) -> list[str]:
    """The commands that make would run for Python's part; the web page's is left out."""
    make = ["make", "--dry-run", "--directory", str(clone), "--no-print-directory", "NPM=", *args]
    result = subprocess.run(make, capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.splitlines()


@pytest.mark.parametrize("goal", ["demo", "test"])
def test_either_goal_makes_the_environment_first(clone: Path, goal: str) -> None:
    lines = planned(clone, goal)
    made = next(i for i, line in enumerate(lines) if "-m venv .venv" in line)
    installed = next(i for i, line in enumerate(lines) if "--editable" in line)
    stamped = next(i for i, line in enumerate(lines) if line.startswith("touch .venv/"))
    assert made < installed < stamped < len(lines) - 1


@pytest.mark.parametrize(
    ("goal", "last"), [("demo", "xinference-xavier demo"), ("test", "-m pytest")]
)
def test_a_made_environment_is_not_made_again(clone: Path, goal: str, last: str) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".installed").touch()
    lines = planned(clone, goal)
    assert not [line for line in lines if "pip" in line or "venv .venv" in line]
    assert [line for line in lines if last in line]


def test_only_a_named_index_is_asked_for_torch(clone: Path) -> None:
    assert not [line for line in planned(clone, "env") if "index-url" in line]
    named = [line for line in planned(clone, "env", "TORCH_INDEX=the-index") if "torch==" in line]
    assert "--extra-index-url the-index" in named[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sys.version_info = (3, 9, 1)", "Python 3.11 to 3.13 is needed"),
        ("sys.version_info = (3, 14, 0)", "make PYTHON=python3.11"),
        ("platform.system = lambda: 'Darwin'", "runs on Linux only"),
    ],
)
def test_an_unsuitable_interpreter_is_told_why(change: str, message: str) -> None:
    script = ROOT / "scripts" / "check_python.py"
    code = f"import platform, sys; {change}; exec(open({str(script)!r}).read())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_this_interpreter_is_suitable() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "check_python.py")], check=True)


def test_a_broken_installation_is_told_with_what_to_do() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "check_install.py"), "json", "no_such_module"]
    result = subprocess.run(check, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no_such_module is not usable" in result.stderr
    assert "run make again" in result.stderr
