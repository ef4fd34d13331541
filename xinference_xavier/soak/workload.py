# SPDX-License-Identifier: Apache-2.0
"""What is asked: documents that many questions share, prompts of their own, and some oddities.

Deterministic: a seed gives the same documents and, per thread, the same order of questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final

from xinference_xavier.bench.engines import BLOCK_TOKENS
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.soak.client import greedy

WORKING_SET: Final = 3
"""The documents together take so many times the blocks that all stores hold."""

SHORTEST: Final = 8
LONGEST: Final = 48
"""Blocks of a document."""

SAMPLE: Final = 24
"""Questions whose answers are compared with the control's."""

SAMPLE_TOKENS: Final = 12
ABORTED: Final = 0.2
"""Part of the requests whose clients leave early."""

COMPARED: Final = 0.15
UNSHARED: Final = 0.2
ODD: Final = 0.1
"""Parts of the requests: of the sample, with prompts of their own, with unusual parameters."""

MOST_TOKENS: Final = 40
LONGEST_WAIT_S: Final = 0.5
"""A client that leaves before it was answered does so within this time."""

# Unique prompts get seeds that no document has.
_UNIQUE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Leaving:
    """When a client leaves: after so many chunks, or unanswered ``wait_s`` after it asked."""

    after_chunks: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body; ``sample`` is its number in the sample, if it is of it."""

    body: dict[str, Any]
    sample: int | None = None
    leaving: Leaving | None = None


def documents(seed: int) -> Iterator[tuple[str, int]]:
    """Yield the documents of a seed without end, each with its number of full blocks."""
    chance = random.Random(seed)
    for number in count():
        blocks = chance.randint(SHORTEST, LONGEST)
        # Not a whole number of blocks: most prefixes end within one.
        tokens = blocks * BLOCK_TOKENS + chance.randrange(BLOCK_TOKENS)
        yield unique_text(seed * _UNIQUE + number, tokens), blocks


def sample(seed: int) -> list[dict[str, Any]]:
    """Return the bodies of the questions whose answers are compared."""
    return [
        greedy(f"{document} What?", SAMPLE_TOKENS)
        for document, _ in islice(documents(seed), SAMPLE)
    ]


class Workload:
    """The questions of one soak. Read only once made, so for any number of threads."""

    def __init__(self, seed: int, blocks: int) -> None:
        """``blocks`` is what the stores of all replicas hold together."""
        self._seed = seed
        self._sample = sample(seed)
        self.documents: list[str] = []
        left = WORKING_SET * blocks
        for document, length in documents(seed):
            if left <= 0:
                break
            self.documents.append(document)
            left -= length

    def question(self, chance: random.Random) -> Question:
        """Return the next question of the thread that ``chance`` belongs to."""
        leaving = None
        if chance.random() < ABORTED:
            leaving = Leaving(chance.choice([0, 1, 2, 8]), chance.uniform(0, LONGEST_WAIT_S))
        kind = chance.random()
        if kind < COMPARED:
            number = chance.randrange(SAMPLE)
            return Question(self._sample[number], number, leaving)
        tokens = chance.randint(1, MOST_TOKENS)
        if kind < COMPARED + UNSHARED:
            seed = self._seed * _UNIQUE + _UNIQUE // 2 + chance.randrange(_UNIQUE // 2)
            length = chance.randint(1, LONGEST * BLOCK_TOKENS)
            return Question(greedy(unique_text(seed, length), tokens), leaving=leaving)
        document = chance.choice(self.documents)
        tail = unique_text(chance.randrange(_UNIQUE), chance.randint(0, 3 * BLOCK_TOKENS))
        more = self._oddity(chance) if chance.random() < ODD else {}
        return Question(greedy(document + tail, tokens) | more, leaving=leaving)

    def _oddity(self, chance: random.Random) -> dict[str, Any]:
        # No seeds: a seeded sample of a prompt that is prefilled in parts ends vLLM's CPU worker
        # ("CPU Generator does not use offset", vLLM 0.27.1), with or without a connector.
        return chance.choice(
            [
                {"n": 3, "temperature": 1.0},
                {"temperature": 0.8},
                {"cache_salt": "another tenant"},
                {"max_tokens": 1},
            ]
        )
