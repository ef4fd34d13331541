# SPDX-License-Identifier: Apache-2.0
"""One streamed completion over HTTP, which its client may leave before the end."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final

from xinference_xavier.bench.engines import SERVED_NAME
from xinference_xavier.demo.answers import Answer, read_stream

TIMEOUT_S: Final = 180.0
"""Longest silence of a server, in seconds."""


class Refused(RuntimeError):
    """The server answered with something else than a completion."""


def greedy(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a request for a greedy answer that can be compared."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        **more,
    }


def answer(port: int, body: dict[str, Any]) -> Answer:
    """Return the answer to a body of :func:`greedy`.

    Raises :class:`Refused` or, when the connection breaks, OSError or HTTPException.
    """
    started = time.perf_counter()
    try:
        return read_stream(chunks(port, body), started)
    except ValueError as error:
        raise Refused(f"an answer that cannot be read: {error}") from error


def leave(port: int, body: dict[str, Any], *, after_chunks: int, wait_s: float) -> None:
    """Ask, and close the connection after so many chunks; with 0 ``wait_s`` after asking.

    Raises like :func:`answer`.
    """
    if after_chunks == 0:
        with closing(_asked(port, body)):
            time.sleep(wait_s)
        return
    with closing(chunks(port, body)) as stream:
        for count, _ in enumerate(stream, 1):
            if count == after_chunks:
                return


def chunks(port: int, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Yield a completion's chunks; the connection is closed with the generator."""
    with closing(_asked(port, body)) as connection:
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise Refused(f"HTTP {response.status}: {text}")
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if not data:
                continue
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise Refused(f"an error in the stream: {chunk['error']}")
            yield chunk
        raise ConnectionResetError("the stream ended early")


def _asked(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Return a connection on which the request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    asked = {
        "model": SERVED_NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
    except BaseException:
        connection.close()
        raise
    return connection
