# SPDX-License-Identifier: Apache-2.0
"""What may be concluded from repeated measurements. Pure functions of lists of numbers."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

MIN_PAIRS: Final = 10
"""Fewer pairs resolve nothing, whatever their interval says."""

CONFIDENCE: Final = 0.95


class Verdict(StrEnum):
    """Whether a target is met."""

    MET = "met"
    NOT_RESOLVED = "not resolved"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval; infinite ends where one value says nothing."""

    low: float
    middle: float
    high: float
    pairs: int

    def to_dict(self) -> dict[str, float | int | None]:
        """Return plain values for JSON, which has no infinity."""
        ends = {"low": self.low, "middle": self.middle, "high": self.high}
        return {name: v if math.isfinite(v) else None for name, v in ends.items()} | {
            "pairs": self.pairs
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of them lie, interpolated linearly."""
    if not values:
        raise ValueError("a percentile of no values does not exist")
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its interval after Student."""
    if not values:
        raise ValueError("a mean of no values does not exist")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(-math.inf, mean, math.inf, 1)
    error = statistics.stdev(values) / math.sqrt(len(values))
    margin = student_quantile(len(values) - 1, CONFIDENCE) * error
    return Interval(mean - margin, mean, mean + margin, len(values))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the geometric mean of the paired ratios ``ours / theirs`` with its interval.

    Ratios of times multiply, so their logarithms are what is averaged. Raises ValueError for lists
    of different lengths and for values that are not positive.
    """
    if min([*ours, *theirs], default=1.0) <= 0:
        raise ValueError("ratios need positive values")
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    found = mean_interval(logs)
    high = math.exp(found.high) if math.isfinite(found.high) else math.inf
    return Interval(math.exp(found.low), math.exp(found.middle), high, found.pairs)


def ratio_of_means(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the ratio of two means of independent values, of any sign, with Fieller's interval.

    Its ends are infinite where the second mean cannot be told from zero, or has too few values.
    Raises ValueError without values.
    """
    if not ours or not theirs:
        raise ValueError("a mean of no values does not exist")
    pairs = min(len(ours), len(theirs))
    a, b = statistics.fmean(ours), statistics.fmean(theirs)
    middle = a / b if b else math.inf
    if pairs == 1:
        return Interval(-math.inf, middle, math.inf, 1)
    # The ratios r for which a - r * b is not significantly other than zero.
    squared = student_quantile(pairs - 1, CONFIDENCE) ** 2
    var_a, var_b = (statistics.variance(v) / len(v) for v in (ours, theirs))
    lead, last = b * b - squared * var_b, a * a - squared * var_a
    if lead <= 0:
        return Interval(-math.inf, middle, math.inf, pairs)
    root = math.sqrt(max(a * a * b * b - lead * last, 0.0))
    return Interval((a * b - root) / lead, middle, (a * b + root) / lead, pairs)


def at_most(interval: Interval, limit: float) -> Verdict:
    """Judge a target of the form "at most ``limit``"."""
    if interval.pairs < MIN_PAIRS:
        return Verdict.NOT_RESOLVED
    if interval.high <= limit:
        return Verdict.MET
    return Verdict.MISSED if interval.low > limit else Verdict.NOT_RESOLVED


def at_least(interval: Interval, limit: float) -> Verdict:
    """Judge a target of the form "at least ``limit``"."""
    if interval.pairs < MIN_PAIRS:
        return Verdict.NOT_RESOLVED
    if interval.low >= limit:
        return Verdict.MET
    return Verdict.MISSED if interval.high < limit else Verdict.NOT_RESOLVED


@functools.cache
def student_quantile(freedom: int, within: float) -> float:
    """Return the t within whose two-sided range a share ``within`` of Student's t lies.

    With t = sqrt(freedom) * tan(angle) the density becomes cos(angle) ** (freedom - 1), which is
    smooth on a finite range and can be summed.
    """
    if freedom < 1 or not 0 < within < 1:
        raise ValueError(f"freedom is {freedom} and within {within}: need >= 1 and in (0, 1)")
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(within, area / area[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)
