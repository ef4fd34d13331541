# SPDX-License-Identifier: Apache-2.0
"""When two answers are the same, and how a streamed completion is read."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from xinference_xavier.demo.answers import Answer, Token, compare, read_stream


def answer(*tokens: tuple[str, float] | tuple[str, float, float], cached: int = 0) -> Answer:
    """Return an answer of (text, log probability, margin to the second best) tokens."""
    made = []
    for text, logprob, *margin in tokens:
        best = (logprob, logprob - margin[0]) if margin else (logprob, logprob - 3.0)
        made.append(Token(text, logprob, best))
    return Answer(tuple(made), 1600, cached, 0.1, 0.2)


CONTROL = answer(("The", -0.5), (" lamp", -1.0), (" burns", -0.25))


def test_equal_tokens_with_nearly_equal_logprobs_are_the_same_answer() -> None:
    same = compare(answer(("The", -0.5004), (" lamp", -1.0), (" burns", -0.25)), CONTROL)
    assert same.equal
    assert same.tokens == 3
    assert same.worst == pytest.approx(4e-4)


def test_a_logprob_further_away_is_a_difference_although_the_texts_are_equal() -> None:
    other = compare(answer(("The", -0.5), (" lamp", -1.002), (" burns", -0.25)), CONTROL)
    assert not other.equal
    assert other.difference is not None
    assert "token 1 (' lamp')" in other.difference


def test_another_token_is_a_difference() -> None:
    other = compare(answer(("The", -0.5), (" sea", -1.0), (" burns", -0.25)), CONTROL)
    assert not other.equal
    assert other.difference == "token 1 is ' sea', the control's ' lamp'"


def test_after_a_near_tie_of_the_control_that_splits_nothing_is_compared() -> None:
    control = answer(("The", -0.5), (" lamp", -1.0, 0.005), (" burns", -0.25))
    same = compare(answer(("The", -0.5), (" sea", -1.003), (" rises", -9.0)), control)
    assert same.equal
    assert same.tokens == 1


def test_a_near_tie_at_the_first_token_proves_nothing() -> None:
    control = answer(("The", -0.5, 0.005))
    assert not compare(answer(("A", -0.505)), control).equal


@pytest.mark.parametrize(
    "tokens",
    [
        (("The", -0.5), (" lamp", -1.0)),
        (("The", -0.5), (" lamp", -1.0), (" burns", -0.25), (".", -0.1)),
        (),
        (("The", math.nan), (" lamp", -1.0), (" burns", -0.25)),
    ],
    ids=["shorter", "longer", "empty", "without a log probability"],
)
def test_an_answer_of_another_length_or_without_numbers_is_not_the_same(tokens: Any) -> None:
    assert not compare(answer(*tokens), CONTROL).equal


def test_a_margin_that_is_not_known_is_no_near_tie() -> None:
    control = Answer((*CONTROL.tokens[:1], Token(" lamp", -1.0, (-1.0,))), 1600, 0, 0.1, 0.2)
    assert not compare(answer(("The", -0.5), (" sea", -1.0)), control).equal


def chunk(tokens: list[str], cached: int | None = None, **usage: int) -> dict[str, Any]:
    rows = len(tokens)
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [-0.5] * rows,
        "top_logprobs": [{text: -0.5, "other": -2.0} for text in tokens],
    }
    found: dict[str, Any] = {"choices": [{"text": "", "logprobs": logprobs if tokens else None}]}
    if usage:
        details = None if cached is None else {"cached_tokens": cached}
        found["usage"] = {**usage, "prompt_tokens_details": details}
    return found


def test_a_stream_gives_tokens_usage_and_the_time_of_the_first_token() -> None:
    started = time.perf_counter() - 5.0
    stream = [
        chunk([]),
        chunk(["A", " light"], cached=16, prompt_tokens=40),
        chunk(["."]),
        {"choices": [], "usage": chunk([], cached=32, prompt_tokens=41)["usage"]},
    ]
    found = read_stream(stream, started)
    assert found.text == "A light."
    assert [token.margin for token in found.tokens] == [1.5, 1.5, 1.5]
    assert (found.prompt_tokens, found.cached_tokens) == (41, 32)
    assert 5.0 <= found.ttft_s <= found.seconds


def test_nothing_cached_is_zero() -> None:
    assert read_stream([chunk(["A"], prompt_tokens=40)], 0.0).cached_tokens == 0


@pytest.mark.parametrize("stream", [[], [chunk(["A"])], [chunk([], prompt_tokens=3)]])
def test_a_stream_without_tokens_or_usage_is_refused(stream: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="no tokens or no usage"):
        read_stream(stream, 0.0)
