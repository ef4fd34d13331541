# SPDX-License-Identifier: Apache-2.0
"""A server that streams completions as vLLM's does, or fails in the way that a prompt names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

CACHED = 48
METRICS = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft}
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{{engine="0"}} {prefill}
"""


class StubCompletions:
    """Answers with the tokens 0, 1, 2, ..., in pieces of two.

    An answer of more than 1000 tokens never ends. A prompt that begins with "refuse", "break",
    "stop early", "hang up" or "babble" is not answered well. With ``gather`` answers begin only
    when so many requests are waiting, or ``expected`` have come.
    """

    def __init__(self, *, gather: int = 1, expected: int = 0) -> None:
        self.prompts: list[str] = []
        self.most_in_flight = 0
        self.cut_off = 0
        self._gather = gather
        self._expected = expected
        self._in_flight = 0
        self._changed = asyncio.Condition()
        self._metrics_read = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StubCompletions]:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/metrics", self._metrics)
        # Without the second one a handler is not told that its client is gone.
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def wait_cut_off(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.cut_off >= count)

    async def _metrics(self, _: web.Request) -> web.Response:
        self._metrics_read += 1
        text = METRICS.format(ttft=5.0 * self._metrics_read, prefill=4.0 * self._metrics_read)
        return web.Response(text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with self._changed:
            self.prompts.append(body["prompt"])
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self._changed.notify_all()
        try:
            async with self._changed:
                await self._changed.wait_for(self._enough)
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self._in_flight -= 1
            async with self._changed:
                self._changed.notify_all()

    def _enough(self) -> bool:
        return self._in_flight >= self._gather or len(self.prompts) >= self._expected

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt, tokens = body["prompt"], body["max_tokens"]
        if prompt.startswith("refuse"):
            return web.Response(status=503, text="too busy")
        answer = web.StreamResponse()
        await answer.prepare(request)
        if prompt.startswith("babble"):
            await answer.write(b"data: {nonsense\n\n")
            return answer
        sent = 0
        while sent < tokens:
            piece = list(range(sent, min(sent + 2, tokens)))
            await send(answer, {"choices": [{"token_ids": piece}]})
            sent += len(piece)
            if prompt.startswith("break"):
                await send(answer, {"error": {"message": "the engine is dead"}})
                return answer
            if prompt.startswith("stop early"):
                break
            if prompt.startswith("hang up"):
                assert request.transport is not None
                request.transport.abort()
                return answer
            # A real pause only where the answer never ends.
            await asyncio.sleep(0.001 if tokens > 1000 else 0)
        usage = {"prompt_tokens_details": {"cached_tokens": CACHED}}
        await send(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(f"data: {json.dumps(event)}\n\n".encode())
