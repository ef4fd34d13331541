# SPDX-License-Identifier: Apache-2.0
"""Many requests at once: an HTTP client that keeps when each piece of each answer came.

A request that fails is part of the result, never left out or sent again. All times are those of
the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp  # comes with vLLM

from xinference_xavier.bench.engines import SERVED_NAME

Result = TypeVar("Result")

DEADLINE_S: Final = 600.0
"""A request that takes longer has failed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, to be answered greedily with exactly ``tokens`` tokens."""

    prompt: str
    tokens: int


@dataclass(slots=True)
class Reply:
    """What has come back. ``times`` and ``counts`` are of its pieces: when, and how many tokens.

    ``error`` is None until it is known to have failed.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token, in seconds. Raises IndexError where there is none."""
        return self.times[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Time per token after the first piece, in seconds; 0.0 where nothing came after it."""
        rest = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / rest if rest else 0.0

    def gaps_s(self, since: float, until: float) -> list[float]:
        """Return the times between pieces, of those gaps that lie in a span."""
        return [
            after - before
            for before, after in itertools.pairwise(self.times)
            if since <= before and after <= until
        ]

    def tokens(self, since: float, until: float) -> int:
        """Return how many tokens came in a span."""
        pieces = zip(self.times, self.counts, strict=True)
        return sum(count for at, count in pieces if since <= at <= until)


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI interface at ``url``, and the connections to it."""

    url: str
    session: aiohttp.ClientSession

    async def fetch(self, path: str) -> str:
        """Return the text at a path. Raises aiohttp.ClientError."""
        async with self.session.get(self.url + path) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def ask(self, ask: Ask, reply: Reply) -> None:
        """Send a prompt and note in ``reply`` what comes, and what goes wrong."""
        try:
            await self._stream(ask, reply)
        except Exception as error:  # whatever it is, it is this request that failed
            reply.error = f"{type(error).__name__}: {error}"
            return
        if reply.error is None and len(reply.token_ids) != ask.tokens:
            reply.error = f"{len(reply.token_ids)} tokens instead of {ask.tokens}"

    async def _stream(self, ask: Ask, reply: Reply) -> None:
        clock = asyncio.get_running_loop().time
        body = {
            "model": SERVED_NAME, "prompt": ask.prompt, "max_tokens": ask.tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                reply.error = f"status {answer.status}: {(await answer.text())[:500]}"
                return
            async for line in answer.content:
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    reply.error = str(event["error"])
                    return
                if usage := event.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    reply.cached_tokens = details.get("cached_tokens") or 0
                for choice in event["choices"]:
                    if token_ids := choice.get("token_ids"):
                        reply.times.append(clock())
                        reply.counts.append(len(token_ids))
                        reply.token_ids += token_ids


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Server]:
    """Give the server at a base URL, with as many connections as requests need."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Server(url, session)


async def closed_loop(server: Server, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
    """Keep ``concurrency`` requests in flight until all are answered; replies are in order."""
    clock = asyncio.get_running_loop().time
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(asks))

    async def client() -> None:
        # Shared by all clients, who only ever wait for answers: each gets the next one.
        for number, ask in waiting:
            replies[number] = Reply(clock())
            await server.ask(ask, replies[number])

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [replies[number] for number in range(len(asks))]


async def staggered(server: Server, asks: Sequence[Ask], stagger_s: float) -> list[Reply]:
    """Send a request every ``stagger_s`` seconds, whatever the answers do; wait for all."""
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def client(number: int, ask: Ask) -> Reply:
        due = started + number * stagger_s
        await asyncio.sleep(due - loop.time())
        # From when it was due: what a late client adds is not hidden.
        reply = Reply(due)
        await server.ask(ask, reply)
        return reply

    return await asyncio.gather(*(client(number, ask) for number, ask in enumerate(asks)))


@asynccontextmanager
async def ongoing(server: Server, asks: Sequence[Ask]) -> AsyncIterator[list[Reply]]:
    """Give replies that all have begun to come, and come until the end of the block.

    There each is cut off. One that had failed by then, or had ended, has an ``error``.
    """
    clock = asyncio.get_running_loop().time
    replies = [Reply(clock()) for _ in asks]
    tasks = [
        asyncio.create_task(_write_on(server, ask, reply))
        for ask, reply in zip(asks, replies, strict=True)
    ]
    try:
        await asyncio.gather(*(_begun(reply) for reply in replies))
        yield replies
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write_on(server: Server, ask: Ask, reply: Reply) -> None:
    await server.ask(ask, reply)
    if reply.error is None:
        reply.error = f"ended after {len(reply.token_ids)} tokens, before the others"


async def _begun(reply: Reply) -> None:
    while not reply.times and reply.error is None:
        await asyncio.sleep(0.005)


def run_apart(core: int, load: Coroutine[Any, Any, Result]) -> Result:
    """Run a load on this thread, kept off the engines' core where there is another one."""
    with _off(core):
        return asyncio.run(load)


@contextmanager
def _off(core: int) -> Iterator[None]:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine - {core} or mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
