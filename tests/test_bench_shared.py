# SPDX-License-Identifier: Apache-2.0
"""The shared workload is the same for all arms, and its figures follow from what was measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.bench import shared
from xinference_xavier.bench.arms import Replicas
from xinference_xavier.bench.engines import Completion, EngineError
from xinference_xavier.bench.report import Report

SETTINGS = shared.Settings(Path("unused"), 0, tokens=64)


def test_every_arm_is_asked_the_same() -> None:
    assert shared.workload(SETTINGS, 1, 2) == shared.workload(SETTINGS, 1, 2)


def test_documents_are_asked_about_equally_often_at_random_replicas() -> None:
    questions = shared.workload(SETTINGS, 1, 2)
    assert len(questions) == 40
    documents = Counter(question.prompt[: SETTINGS.tokens] for question in questions)
    assert sorted(documents.values()) == [10, 10, 10, 10]
    assert len({question.prompt for question in questions}) == 40
    assert {question.replica for question in questions} == {0, 1}


def test_no_document_of_another_round_comes_again() -> None:
    one, other = (
        {question.prompt[:16] for question in shared.workload(SETTINGS, number, 2)}
        for number in (0, 1)
    )
    assert not one & other


class Caching:
    """An engine that has what it answered before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def stream(self, prompt: str, max_tokens: int) -> Completion:
        document = prompt[: SETTINGS.tokens]
        cached = len(document) if document in self.seen else 0
        self.seen.add(document)
        return Completion([max_tokens], [-0.5], cached, 0.1, 0.1)


def test_a_round_counts_what_had_to_be_computed() -> None:
    engines: Any = [Caching(), Caching()]
    found = shared._round(SETTINGS, 0, Replicas(engines))
    held = sum(len(engine.seen) for engine in engines)
    assert found["prefill_tokens"] == held * SETTINGS.tokens + 40 * shared.QUESTION
    assert found["ttft_s"] == [0.1] * 40
    assert found["total_s"] > 0


def rounds(total_s: float, answer: int = 1) -> list[dict[str, Any]]:
    totals = [100.0, total_s, total_s, total_s]
    return [
        {"total_s": each, "ttft_s": [each / 2], "prefill_tokens": 7, "answers": [[1], [answer]]}
        for each in totals
    ]


def test_arms_are_compared_with_plain_vllm_without_the_first_round() -> None:
    found = shared.figures({"plain": rounds(2.0), "xavier": rounds(1.0, answer=2)})
    assert found["plain"]["total_s"] == 2.0
    assert "vs_plain" not in found["plain"]
    xavier = found["xavier"]
    assert xavier["vs_plain"]["middle"] == pytest.approx(0.5)
    assert xavier["vs_plain"]["pairs"] == 3
    assert (xavier["answers_equal"], xavier["answers"]) == (3, 6)
    assert (xavier["ttft_p50_s"], xavier["prefill_tokens"]) == (0.5, 7)


def test_an_arm_that_fails_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"xavier"}

    def measure(_: shared.Settings, arm: Any, report: Report) -> list[dict[str, Any]]:
        if arm.name in broken:
            raise EngineError("no memory")
        return rounds(2.0)

    monkeypatch.setattr(shared, "_measure", measure)
    found = shared.run(SETTINGS, Report())
    assert list(found["arms"]) == ["plain"]
    assert found["failed"] == {"xavier": "EngineError: no memory"}
    broken.add("plain")
    with pytest.raises(EngineError, match="no memory"):
        shared.run(SETTINGS, Report())


def test_without_plain_vllm_nothing_is_compared() -> None:
    assert "vs_plain" not in shared.figures({"xavier": rounds(1.0)})["xavier"]
