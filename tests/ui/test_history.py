# SPDX-License-Identifier: Apache-2.0
"""What the plots are drawn from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stub_api import MIB, a_link, a_replica
from xinference_xavier.schemas import Model, Replica
from xinference_xavier.ui import history
from xinference_xavier.ui.history import History, Interval


def models(mib: int, seconds: float, failures: int = 0, **more: Any) -> list[Model]:
    """Return a model with one replica that has read this much."""
    link = a_link("m-rep1", bytes=mib * MIB, seconds=seconds)
    described = a_replica("m-rep0", link, load_failures={"timeout": failures}, **more)
    replica = Replica(**described.model_dump(exclude={"status"}))
    return [Model(model_uid="m", model_name=None, status=None, replica=1, replicas=[replica])]


def seen(*samples: tuple[float, list[Model]]) -> list[Interval]:
    kept = History()
    for at, found in samples:
        kept.add(found, at)
    return kept.of("m", "m-rep0")


def test_an_interval_is_what_happened_between_two_samples() -> None:
    intervals = seen((10, models(1, 0.5)), (12, models(5, 1.5, 2)), (15, models(5, 1.5, 3)))
    assert intervals == [
        Interval(begin=5, end=3, rate=4 * MIB, failures=2),
        Interval(begin=3, end=0, rate=None, failures=1),
    ]


def test_one_sample_is_no_interval_and_a_stranger_has_none() -> None:
    assert seen((10, models(1, 1.0))) == []
    assert History().of("m", "m-rep0") == []


def test_visitors_who_refresh_at_the_same_time_make_one_sample() -> None:
    intervals = seen((10, models(1, 1)), (10.5, models(2, 2)), (12, models(3, 3)))
    assert [interval.begin for interval in intervals] == [2]


@pytest.mark.parametrize("later", [models(0, 2), models(9, 0.1), models(9, 2, failures=0)])
def test_totals_that_began_anew_begin_a_new_history(later: list[Model]) -> None:
    before = (10, models(2, 1, failures=1)), (12, models(3, 1.5, failures=1))
    assert len(seen(*before)) == 1
    assert seen(*before, (14, later)) == []


def test_what_does_not_answer_is_left_out() -> None:
    lost = models(9, 9, state="unreachable")
    intervals = seen((10, models(1, 1)), (12, lost), (14, models(2, 2)))
    assert [interval.begin for interval in intervals] == [4]


def test_the_history_is_short() -> None:
    samples = [(at, models(at, at)) for at in range(0, 2 * history.LENGTH)]
    assert len(seen(*samples)) == history.LENGTH - 1


def test_who_was_not_seen_for_long_is_forgotten() -> None:
    kept = History()
    kept.add(models(1, 1), 0)
    kept.add(models(2, 2), 2)
    kept.add([], 2 + history.FORGET_S)
    assert len(kept.of("m", "m-rep0")) == 1
    kept.add([], 3 + history.FORGET_S)
    assert kept.of("m", "m-rep0") == []
