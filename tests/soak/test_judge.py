# SPDX-License-Identifier: Apache-2.0
"""When a soak says that something is not as it should be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from xinference_xavier.soak import judge
from xinference_xavier.soak.judge import MIB
from xinference_xavier.soak.watch import Sample, Store, Usage

USAGE = Usage("replica-0 engine", 1, 4711, 800 * MIB, 500 * MIB, 60, 40, 4)
STORE = Store(
    leases=0,
    pinned_blocks=0,
    load_jobs=0,
    quarantined=0,
    used_blocks=90,
    free_blocks=10,
    moving_blocks=0,
    total_blocks=100,
    prompt_tokens=1000,
    hit_tokens=300,
    peer_tokens=100,
)
IDLE: dict[str, Any] = {"contradiction": None, "in_use": {"leases": 0, "requests": 0}}
MINUTES = 10


def samples(usage: Callable[[float], Usage | None], step_s: float = 5.0) -> list[Sample]:
    """Samples of one process over ten minutes; None where it does not run."""
    found = []
    for number in range(int(MINUTES * 60 / step_s)):
        seconds = number * step_s
        now = usage(seconds)
        processes = () if now is None else (now,)
        found.append(Sample(seconds, processes, {"replica-0": STORE}, {}))
    return found


def grown(usage: Callable[[float], Usage | None]) -> list[str]:
    return judge.growing(judge.growths(samples(usage)))


def test_a_process_that_stays_as_it_is_does_not_grow() -> None:
    found = judge.growths(samples(lambda _: USAGE))
    assert {item.what for item in found} == set(judge.ALLOWED)
    assert judge.growing(found) == []


def test_noise_and_single_peaks_are_no_growth() -> None:
    chance = random.Random(1)

    def usage(seconds: float) -> Usage:
        peak = 400 * MIB if seconds in (430.0, 590.0) else 0
        noise = chance.randint(-20, 20) * MIB
        return replace(
            USAGE,
            rss_bytes=USAGE.rss_bytes + noise + peak,
            descriptors=USAGE.descriptors + chance.choice([0, 0, 3, 6]),
        )

    assert grown(usage) == []


def test_what_grows_at_the_start_only_is_no_growth() -> None:
    assert grown(lambda s: replace(USAGE, rss_bytes=int(min(s, 200.0) * MIB))) == []


@pytest.mark.parametrize(
    ("what", "per_minute"),
    [
        ("rss_bytes", 8 * MIB),
        ("private_bytes", 8 * MIB),
        ("descriptors", 1),
        ("threads", 0.5),
        ("arenas", 0.6),
    ],
)
def test_a_leak_is_named(what: str, per_minute: float) -> None:
    def usage(seconds: float) -> Usage:
        value = getattr(USAGE, what) + int(per_minute * seconds / 60)
        return replace(USAGE, **{what: value})

    (problem,) = grown(usage)
    assert problem.startswith(f"replica-0 engine (incarnation 1): {what} grew by ")


def test_each_incarnation_is_judged_by_itself_and_short_ones_are_not() -> None:
    def usage(seconds: float) -> Usage | None:
        if seconds < 100:
            return replace(USAGE, descriptors=int(seconds))
        return replace(USAGE, incarnation=2, descriptors=50)

    found = judge.growths(samples(usage))
    assert {item.incarnation for item in found} == {2}
    assert judge.growing(found) == []


def test_too_few_samples_tell_nothing() -> None:
    found = judge.growths(samples(lambda _: USAGE, step_s=60.0))
    assert found == []
    assert judge.unproven(samples(lambda _: USAGE), found) == [
        "the run was too short to tell whether anything grows"
    ]
    assert judge.growths([]) == []


def test_a_run_without_sharing_proves_nothing() -> None:
    alone = Sample(0.0, (USAGE,), {"replica-0": replace(STORE, peer_tokens=0)}, {})
    (problem,) = judge.unproven([alone], judge.growths(samples(lambda _: USAGE)))
    assert "from another replica" in problem


def test_what_is_still_in_use_after_the_drain_is_named() -> None:
    assert judge.undrained({"a": IDLE, "b": IDLE}, 2) == []
    leased = {"contradiction": None, "in_use": {"leases": 2, "requests": 0}}
    broken = {"contradiction": "slot 3 is lost", "in_use": {}}
    problems = judge.undrained({"a": leased, "b": broken}, 3)
    assert problems == [
        "2 replicas are in the directory, not 3",
        "a: still in use when nothing runs: {'leases': 2}",
        "b: the index contradicts itself: slot 3 is lost",
    ]


def test_blocks_that_are_neither_used_nor_free_are_named() -> None:
    assert judge.unaccounted({"a": STORE}) == []
    (problem,) = judge.unaccounted({"a": STORE, "b": replace(STORE, free_blocks=9)})
    assert problem.startswith("b: 90 used and 9 free blocks are not the 100 ")


def requests(**counts: int) -> dict[str, Any]:
    return {
        "failed": 0,
        "compared": 100,
        "different": 0,
        "failures": ["replica-1: HTTP 500"],
        "differences": ["replica-1: token 3 is 'a', the control's 'b'"],
        **counts,
    }


def test_requests_and_answers_are_judged_by_the_control_under_load() -> None:
    exact, loose = {"compared": 50, "different": 0}, {"compared": 50, "different": 1}
    assert judge.wrong_requests(requests(), exact) == []
    assert judge.wrong_requests(requests(different=2), loose) == []
    (problem,) = judge.wrong_requests(requests(different=3), loose)
    assert problem.startswith("3 of 100 answers are not the control's")
    (problem,) = judge.wrong_requests(requests(different=1), exact)
    assert "token 3 is 'a'" in problem
    (problem,) = judge.wrong_requests(requests(failed=4), exact)
    assert problem == "4 requests failed; the first: replica-1: HTTP 500"
    (problem,) = judge.wrong_requests(requests(compared=0), exact)
    assert problem == "no answer was compared with the control's"


def test_exceptions_that_a_connector_caught_are_named() -> None:
    quiet = Sample(0.0, (), {}, {"a": 0, "b": 0})
    assert judge.caught([quiet]) == []
    restarted = [replace(quiet, errors={"a": 2}), replace(quiet, errors={"a": 0})]
    assert judge.caught(restarted) == ["a: its connector caught 2 exceptions"]
