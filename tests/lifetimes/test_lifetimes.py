# SPDX-License-Identifier: Apache-2.0
"""Requests of all lengths and lives on real engines: answered like the control, nothing left.

``left`` and ``right`` share one directory and have few KV blocks, ``control`` has no connector.
"""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator

import pytest
from pair import MAX_MODEL_LEN, Config, Pair, check_answers, leave_in_storm, running_pair
from prometheus_client.parser import text_string_to_metric_families

from xinference_xavier.bench.engines import BLOCK_TOKENS, SERVED_NAME, Engine
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.demo.answers import compare
from xinference_xavier.soak import client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHUNKED = Config(("--max-num-batched-tokens", "256"))
WHOLE = Config(("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(MAX_MODEL_LEN)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CHUNKED, id="chunked"),
        pytest.param(WHOLE, id="whole"),
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with running_pair(tmp_path_factory.mktemp("pair"), request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Pair) -> Iterator[None]:
    """After each test everything is given back, and the bookkeeping of both replicas is right."""
    yield
    pair.check_idle()


def preemptions(engine: Engine) -> float:
    """How many requests an engine has preempted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )


@pytest.mark.parametrize("edge", [1, 2, 9], ids=lambda edge: f"{edge}-blocks")
def test_prompts_around_block_edges_are_loaded_and_answered_like_the_control(
    pair: Pair, edge: int
) -> None:
    lengths = [edge * BLOCK_TOKENS + more for more in (-1, 0, 1)]
    documents = [unique_text(100 + edge * 10 + number, n) for number, n in enumerate(lengths)]
    pair.fill(documents)
    before = pair.total("traffic", "hit_tokens")
    for document in documents:
        body = client.greedy(document, BLOCK_TOKENS + 1)
        found = client.answer(pair.replicas[1].port, body)
        comparison = compare(found, client.answer(pair.control.port, body))
        assert comparison.equal, (len(document), comparison.difference)
        # Of a prompt that ends with a block, the last token is computed again.
        full = (len(document) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert found.cached_tokens >= full
    assert pair.total("traffic", "hit_tokens") > before


@pytest.mark.parametrize(
    ("prompt_tokens", "answer_tokens"),
    [(1, 1), (1, 40), (MAX_MODEL_LEN - 1, 1), (MAX_MODEL_LEN - 24, 24)],
)
def test_the_shortest_and_the_longest_requests_are_answered_like_the_control(
    pair: Pair, prompt_tokens: int, answer_tokens: int
) -> None:
    document = unique_text(prompt_tokens, prompt_tokens)
    pair.fill([document])
    body = client.greedy(document, answer_tokens)
    expected = client.answer(pair.control.port, body)
    for engine in pair.replicas:
        comparison = compare(client.answer(engine.port, body), expected)
        assert comparison.equal, (engine.name, comparison.difference)
        assert comparison.tokens == answer_tokens


def test_several_answers_seeds_salts_and_prompt_logprobs_are_those_of_the_control(
    pair: Pair,
) -> None:
    document = unique_text(7, 12 * BLOCK_TOKENS + 3)
    pair.fill([document])
    for more in (
        {"temperature": 0},
        {"n": 3, "temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "seed": 12},
        {"temperature": 0, "cache_salt": "a tenant"},
        {"temperature": 0, "prompt_logprobs": 1},
    ):
        body = {
            "model": SERVED_NAME,
            "prompt": document,
            "max_tokens": 6,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            **more,
        }
        expected = pair.control.post("/v1/completions", body)["choices"]
        for engine in pair.replicas:
            found = engine.post("/v1/completions", body)["choices"]
            assert len(found) == len(expected) == more.get("n", 1)
            for one, other in zip(found, expected, strict=True):
                assert one["token_ids"] == other["token_ids"], (engine.name, more)
                assert one["logprobs"]["token_logprobs"] == pytest.approx(
                    other["logprobs"]["token_logprobs"], abs=1e-3
                )
            if "prompt_logprobs" in more:
                values = [logprobs(choice) for choice in (found[0], expected[0])]
                assert len(values[0]) == len(document) - 1
                assert values[0] == pytest.approx(values[1], abs=1e-3)


def logprobs(choice: dict[str, list[dict[str, dict[str, float]] | None]]) -> list[float]:
    """The log probabilities of a prompt's tokens; the first one has none."""
    return [
        max(entry["logprob"] for entry in position.values())
        for position in choice["prompt_logprobs"]
        if position is not None
    ]


def test_a_salt_finds_nothing_of_another_one(pair: Pair) -> None:
    document = unique_text(8, 10 * BLOCK_TOKENS)
    pair.fill([document])
    for salt in ("one tenant", "another tenant"):
        body = client.greedy(document + "?", 1, cache_salt=salt)
        assert client.answer(pair.replicas[1].port, body).cached_tokens == 0
        assert client.answer(pair.replicas[1].port, body).cached_tokens == len(document)


def test_the_same_prompt_from_32_clients_of_both_replicas(pair: Pair) -> None:
    document = unique_text(9, 15 * BLOCK_TOKENS + 5)
    check_answers(pair, [client.greedy(document, 8)] * 32, clients=32)


def test_a_preemption_storm(pair: Pair) -> None:
    # Two dozen requests of some ten blocks of their own, in pools of a hundred.
    chance = random.Random(10)
    shared = [unique_text(1000 + number, 8 * BLOCK_TOKENS) for number in range(3)]
    bodies = [
        client.greedy(
            shared[number % 3] + unique_text(2000 + number, chance.randint(1, 4 * BLOCK_TOKENS)),
            chance.randint(80, 120),
        )
        for number in range(24)
    ]
    before = [preemptions(engine) for engine in pair.replicas]
    check_answers(pair, bodies, clients=24)
    after = [preemptions(engine) for engine in pair.replicas]
    assert sum(after) > sum(before)


def test_a_storm_of_clients_that_leave(pair: Pair) -> None:
    chance = random.Random(11)
    documents = [unique_text(3000 + number, chance.randint(5, 40) * 16) for number in range(12)]
    # Some are there to be loaded, so that clients leave during loads, too.
    pair.fill(documents[:4])
    loads = pair.total("traffic", "loads")
    bodies = [client.greedy(chance.choice(documents), 30) for _ in range(80)]
    leave_in_storm(pair, bodies, chance=chance, clients=16, longest_s=0.5)
    pair.check_idle()
    assert pair.total("traffic", "loads") > loads
    check_answers(pair, [client.greedy(document, 8) for document in documents], clients=8)
