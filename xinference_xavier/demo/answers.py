# SPDX-License-Identifier: Apache-2.0
"""Greedy answers token by token, and when two of them are the same."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

NEAR_TIE: Final = 1e-2
"""Where the control's two best log probabilities are closer than this, either may be taken."""

TOLERANCE: Final = 1e-3
"""Log probabilities of equal tokens differ by at most this."""

COMPARED: Final = (
    "token texts and log probabilities, greedy (Xinference's completions carry no token ids)"
)
"""What is compared, for people."""


@dataclass(frozen=True)
class Token:
    """One generated token: its text, its log probability, and those of the likeliest ones."""

    text: str
    logprob: float
    best: tuple[float, ...] = ()

    @property
    def margin(self) -> float:
        """How far the second best was behind the best; infinite where it is not known."""
        ordered = sorted(self.best, reverse=True)
        return ordered[0] - ordered[1] if len(ordered) > 1 else math.inf


@dataclass(frozen=True)
class Answer:
    """One answer, and what it took."""

    tokens: tuple[Token, ...]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed for it, from vLLM's own cache or loaded."""
    ttft_s: float
    """Seconds from asking to the first token, seen by the client."""
    seconds: float

    @property
    def text(self) -> str:
        """The answer in one piece, with the tokens that people do not see."""
        return "".join(token.text for token in self.tokens).strip()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "text": self.text,
            "logprobs": [round(token.logprob, 6) for token in self.tokens],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Comparison:
    """Whether an answer is the control's; ``difference`` says where it is not."""

    equal: bool
    tokens: int
    """Positions that were compared and equal."""
    worst: float
    """Largest difference of a log probability among them."""
    difference: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "equal": self.equal,
            "tokens": self.tokens,
            "worst_logprob_difference": self.worst,
            "difference": self.difference,
        }


def compare(answer: Answer, control: Answer) -> Comparison:
    """Compare an answer with the control's: equal up to the control's first near tie that splits.

    An answer without a single comparable token proves nothing and is not equal.
    """
    worst = 0.0
    for position, (token, expected) in enumerate(zip(answer.tokens, control.tokens, strict=False)):
        if token.text != expected.text:
            if position > 0 and expected.margin < NEAR_TIE:
                return Comparison(True, position, worst)
            return Comparison(
                False,
                position,
                worst,
                f"token {position} is {token.text!r}, the control's {expected.text!r}",
            )
        distance = abs(token.logprob - expected.logprob)
        if not distance <= TOLERANCE:
            return Comparison(
                False,
                position,
                worst,
                f"log probability of token {position} ({token.text!r}) is {token.logprob:.6f}, "
                f"the control's {expected.logprob:.6f}",
            )
        worst = max(worst, distance)
    compared = min(len(answer.tokens), len(control.tokens))
    if compared == 0:
        return Comparison(False, 0, worst, "there is no token to compare")
    if len(answer.tokens) != len(control.tokens):
        return Comparison(
            False,
            compared,
            worst,
            f"it has {len(answer.tokens)} tokens, the control's {len(control.tokens)}",
        )
    return Comparison(True, compared, worst)


def read_stream(chunks: Iterable[Mapping[str, Any]], started: float) -> Answer:
    """Read a streamed completion that was asked for at ``time.perf_counter() == started``.

    Raises ValueError for a stream without tokens or without usage.
    """
    tokens: list[Token] = []
    usage: Mapping[str, Any] = {}
    first = 0.0
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            logprobs = choice.get("logprobs")
            if not logprobs:
                continue
            if not tokens:
                first = time.perf_counter()
            tokens += _tokens(logprobs)
    if not tokens or not usage:
        raise ValueError("the server's answer has no tokens or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        tuple(tokens),
        int(usage["prompt_tokens"]),
        int(details.get("cached_tokens") or 0),
        first - started,
        time.perf_counter() - started,
    )


def _tokens(logprobs: Mapping[str, Any]) -> Iterable[Token]:
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for text, logprob, best in rows:
        values = tuple(float(value) for value in (best or {}).values())
        yield Token(text, math.nan if logprob is None else float(logprob), values)
