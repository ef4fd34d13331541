# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math

import numpy as np
import pytest

from xinference_xavier.bench.stats import (
    MIN_PAIRS,
    Interval,
    Verdict,
    at_least,
    at_most,
    mean_interval,
    percentile,
    ratio_interval,
    ratio_of_means,
    student_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (9, 2.26216), (11, 2.20099), (99, 1.98422)],
)
def test_student_s_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(freedom, 0.95) == pytest.approx(expected, rel=1e-4)


def test_a_percentile_is_interpolated() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0.5) == 2.5
    assert percentile(values, 0.95) == pytest.approx(3.85)
    assert percentile([7.0], 0.95) == 7.0


def test_an_interval_is_that_of_the_textbook() -> None:
    found = mean_interval([10.0, 12.0, 9.0, 11.0, 13.0])
    margin = 2.77645 * math.sqrt(2.5 / 5)
    assert found.middle == 11.0
    assert found.low == pytest.approx(11.0 - margin, rel=1e-4)
    assert found.high == pytest.approx(11.0 + margin, rel=1e-4)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    runs = 2000
    found = (mean_interval(random.normal(5.0, 2.0, 10).tolist()) for _ in range(runs))
    held = sum(interval.low <= 5.0 <= interval.high for interval in found)
    assert 0.93 < held / runs < 0.97


def test_pairing_removes_what_both_arms_share() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0, 1.5, 7.0, 2.5, 4.0, 6.0]
    noise = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    theirs = [value * factor for value, factor in zip(drift, noise, strict=True)]
    found = ratio_interval([2.0 * value for value in drift], theirs)
    assert found.low < 2.0 < found.high
    assert found.high - found.low < 0.1


def test_a_ratio_and_its_inverse_agree() -> None:
    ours, theirs = [1.0, 2.0, 3.0], [2.0, 2.5, 2.0]
    one, other = ratio_interval(ours, theirs), ratio_interval(theirs, ours)
    assert one.middle == pytest.approx(1 / other.middle)
    assert one.low == pytest.approx(1 / other.high)


@pytest.mark.parametrize(
    ("low", "high", "most", "least"),
    [
        (0.9, 1.0, Verdict.MET, Verdict.MISSED),
        (0.9, 1.02, Verdict.MET, Verdict.NOT_RESOLVED),
        (0.9, 1.1, Verdict.NOT_RESOLVED, Verdict.NOT_RESOLVED),
        (1.02, 1.1, Verdict.NOT_RESOLVED, Verdict.MET),
        (1.03, 1.1, Verdict.MISSED, Verdict.MET),
    ],
)
def test_a_target_is_judged_by_the_side_on_which_the_interval_lies(
    low: float, high: float, most: Verdict, least: Verdict
) -> None:
    interval = Interval(low, (low + high) / 2, high, MIN_PAIRS)
    assert at_most(interval, 1.02) is most
    assert at_least(interval, 1.02) is least


def test_few_pairs_resolve_nothing() -> None:
    interval = Interval(0.5, 0.5, 0.5, MIN_PAIRS - 1)
    assert at_most(interval, 1.0) is Verdict.NOT_RESOLVED
    assert at_least(interval, 0.1) is Verdict.NOT_RESOLVED


def test_one_value_has_no_interval_and_is_still_valid_json() -> None:
    for found in (mean_interval([3.0]), ratio_interval([3.0], [1.0])):
        assert found.middle == pytest.approx(3.0)
        plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert plain["high"] is None
    assert mean_interval([3.0]).to_dict()["low"] is None


def test_a_ratio_of_means_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    runs = 2000
    found = (
        ratio_of_means(random.normal(0.5, 0.2, 10).tolist(), random.normal(5.0, 1.0, 10).tolist())
        for _ in range(runs)
    )
    held = sum(interval.low <= 0.1 <= interval.high for interval in found)
    assert 0.93 < held / runs < 0.98


def test_a_ratio_to_what_may_be_nothing_is_not_resolved() -> None:
    found = ratio_of_means([1.0, 1.1, 0.9] * 4, [0.1, -0.2, 0.15] * 4)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert at_most(found, 0.1) is Verdict.NOT_RESOLVED
    assert ratio_of_means([-1.0, -1.1] * 5, [2.0, 2.1] * 5).high < 0
    assert ratio_of_means([1.0], [0.0]).to_dict()["middle"] is None
    with pytest.raises(ValueError, match="no values"):
        ratio_of_means([], [1.0])


def test_impossible_input_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
