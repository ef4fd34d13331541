# SPDX-License-Identifier: Apache-2.0
"""Load is what it says: so many requests at once, no failure hidden, every piece timed."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.stub_completions import CACHED, StubCompletions
from xinference_xavier.bench import load
from xinference_xavier.bench.load import Ask, Reply, connected, ongoing, run_apart, staggered

ENDLESS = 1_000_000


def answered(*asks: Ask, concurrency: int = 1) -> list[Reply]:
    """Ask a server that answers."""

    async def run() -> list[Reply]:
        async with StubCompletions().running() as stub, connected(stub.url) as server:
            return await load.closed_loop(server, asks, concurrency)

    return asyncio.run(run())


def test_an_answer_is_kept_with_the_time_of_each_piece() -> None:
    (reply,) = answered(Ask("prompt", 5))
    assert reply.error is None
    assert reply.token_ids == [0, 1, 2, 3, 4]
    assert reply.counts == [2, 2, 1]
    assert reply.sent <= reply.times[0] <= reply.times[1] <= reply.times[2]
    assert reply.cached_tokens == CACHED


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", "status 503: too busy"),
        ("break", "the engine is dead"),
        ("stop early", "2 tokens instead of 5"),
        ("hang up", "Client"),
        ("babble", "JSONDecodeError"),
    ],
)
def test_a_failed_request_is_told_and_the_others_go_on(prompt: str, error: str) -> None:
    bad, good = answered(Ask(prompt, 5), Ask("prompt", 5))
    assert bad.error is not None
    assert error in bad.error
    assert good.error is None


def test_a_server_that_is_gone_is_a_failure_of_each_request() -> None:
    async def run() -> list[Reply]:
        async with StubCompletions().running() as stub:
            url = stub.url
        async with connected(url) as server:
            return await load.closed_loop(server, [Ask("a", 1), Ask("b", 1)], 2)

    errors = [reply.error for reply in asyncio.run(run())]
    assert all(error is not None and "ClientConnectorError" in error for error in errors)
    assert len(errors) == 2


def test_an_answer_that_does_not_end_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "DEADLINE_S", 0.2)
    (reply,) = answered(Ask("prompt", ENDLESS))
    assert reply.error is not None
    assert "Timeout" in reply.error
    assert reply.token_ids


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_so_many_requests_are_in_flight_and_never_more(concurrency: int) -> None:
    asks = [Ask(f"prompt {number}", number + 1) for number in range(12)]
    at_once = min(concurrency, len(asks))

    async def run() -> tuple[list[Reply], StubCompletions]:
        # Nothing is answered before so many wait: with fewer clients this would never end.
        stub = StubCompletions(gather=at_once, expected=len(asks))
        async with stub.running(), connected(stub.url) as server, asyncio.timeout(60):
            return await load.closed_loop(server, asks, concurrency), stub

    replies, stub = asyncio.run(run())
    assert stub.most_in_flight == at_once
    assert [len(reply.token_ids) for reply in replies] == [ask.tokens for ask in asks]


def test_staggered_requests_do_not_wait_for_answers() -> None:
    asks = [Ask(f"prompt {number}", 2) for number in range(5)]

    async def run() -> tuple[list[Reply], StubCompletions]:
        stub = StubCompletions(gather=len(asks), expected=len(asks))
        async with stub.running(), connected(stub.url) as server, asyncio.timeout(60):
            return await staggered(server, asks, 0.02), stub

    replies, stub = asyncio.run(run())
    assert stub.most_in_flight == len(asks)
    assert sorted(stub.prompts) == [ask.prompt for ask in asks]
    sent = [reply.sent for reply in replies]
    for number, at in enumerate(sent):
        assert at - sent[0] == pytest.approx(0.02 * number)


def test_answers_are_written_until_the_end_and_then_cut_off() -> None:
    async def run() -> tuple[list[Reply], list[int]]:
        stub = StubCompletions()
        async with stub.running(), connected(stub.url) as server, asyncio.timeout(60):
            async with ongoing(server, [Ask("one", ENDLESS), Ask("two", ENDLESS)]) as replies:
                begun = [len(reply.token_ids) for reply in replies]
                while any(
                    len(reply.token_ids) <= old + 4
                    for reply, old in zip(replies, begun, strict=True)
                ):
                    await asyncio.sleep(0.001)
            await stub.wait_cut_off(2)
        return replies, begun

    replies, begun = asyncio.run(run())
    assert min(begun) > 0
    assert [reply.error for reply in replies] == [None, None]


def test_an_answer_that_does_not_go_on_to_the_end_is_a_failure() -> None:
    async def run() -> list[Reply]:
        stub = StubCompletions()
        async with stub.running(), connected(stub.url) as server, asyncio.timeout(60):
            asks = [Ask("refuse", ENDLESS), Ask("short", 3), Ask("long", ENDLESS)]
            async with ongoing(server, asks) as replies:
                while replies[1].error is None:
                    await asyncio.sleep(0.001)
        return replies

    refused, short, endless = asyncio.run(run())
    assert refused.error == "status 503: too busy"
    assert short.error == "ended after 3 tokens, before the others"
    assert endless.error is None


def test_figures_of_an_answer_follow_from_its_pieces() -> None:
    reply = Reply(10.0, times=[11.0, 11.5, 13.5], counts=[1, 2, 2])
    assert reply.ttft_s == 1.0
    assert reply.tpot_s == pytest.approx(2.5 / 4)
    assert reply.gaps_s(11.0, 13.5) == [0.5, 2.0]
    assert reply.gaps_s(11.2, 13.5) == [2.0]
    assert reply.tokens(11.2, 13.0) == 2
    assert Reply(0.0, times=[1.0], counts=[1]).tpot_s == 0.0


def test_load_comes_from_other_cores_than_the_engines() -> None:
    cores = os.sched_getaffinity(0)

    async def seen() -> set[int]:
        return os.sched_getaffinity(0)

    core = max(cores)
    assert run_apart(core, seen()) == (cores - {core} or cores)
    assert os.sched_getaffinity(0) == cores
