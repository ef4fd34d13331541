# SPDX-License-Identifier: Apache-2.0
"""Pictures of measurements, as PNG files. Needs the extra ``bench`` (matplotlib)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class PlotsUnavailable(Exception):
    """There is no matplotlib; ``str()`` says how to get it."""


def check() -> None:
    """Raise :class:`PlotsUnavailable` before a long measurement rather than after it."""
    _pyplot()


def lines(
    file: Path,
    title: str,
    x: tuple[str, Sequence[float]],
    y: str,
    series: Mapping[str, Sequence[float | None]],
    *,
    limit: float | None = None,
) -> None:
    """Draw one line per series over a logarithmic axis ``x`` (its name and values).

    ``y`` names the other axis, which begins at 0. Points that are None are left out; ``limit``
    is drawn as a dashed line. The folder of ``file`` is made where there is none.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")
    try:
        for name, values in series.items():
            points = [(at, v) for at, v in zip(x[1], values, strict=True) if v is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        if limit is not None:
            axes.axhline(limit, linestyle="--", color="grey", label=f"target {limit:g}")
        axes.set(title=title, xlabel=x[0], ylabel=y, xscale="log")
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
        # Draws into files only: works without a display.
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotsUnavailable(
            f"--plots needs matplotlib ({error}): pip install 'xinference-xavier[bench]'"
        ) from error
