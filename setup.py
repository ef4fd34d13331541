# SPDX-License-Identifier: Apache-2.0
"""Builds the web page's script into the package; all else is declared in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
FRONTEND = ROOT / "frontend"
SCRIPT = ROOT / "xinference_xavier" / "extension" / "web" / "launch.js"


def build_script() -> None:
    """Build the script, unless it is newer than its sources. Without it the package works, too."""
    sources = [*FRONTEND.glob("src/*"), *FRONTEND.glob("*.ts"), *FRONTEND.glob("package*.json")]
    newest = max((path.stat().st_mtime for path in sources), default=0.0)
    if SCRIPT.is_file() and SCRIPT.stat().st_mtime >= newest:
        return
    npm = shutil.which("npm")
    if npm is None:
        problem = "npm is not there"
    else:
        try:
            for arguments in (["ci"], ["run", "build"]):
                subprocess.run([npm, *arguments], cwd=FRONTEND, check=True)
            return
        except subprocess.CalledProcessError as error:
            problem = str(error)
    # What installs a package shows this on failure or when asked; the server's log says it again.
    print(f"warning: no card in the launch dialog: {problem}", file=sys.stderr)


class BuildWithScript(build_py):
    """Builds the script before the package's data files are looked for."""

    def run(self) -> None:
        build_script()
        super().run()


class SdistWithScript(sdist):
    """A source distribution holds the script, so that its users need no npm."""

    def run(self) -> None:
        build_script()
        super().run()


setup(cmdclass={"build_py": BuildWithScript, "sdist": SdistWithScript})
