# SPDX-License-Identifier: Apache-2.0
"""Where each request's prompt tokens came from, and the totals of it.

A request is counted once, when vLLM first schedules tokens of it: what has KV then was found or
loaded, and the rest is computed. A preempted request starts again and is not counted again. vLLM's
own ``cached_tokens`` is counted alike, but before the load: it is larger after a load that failed,
and by one after a full hit, whose last token is computed again.

All methods run on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from xinference_xavier.metrics.table import SOURCES
from xinference_xavier.vllm.counters import Counters

Usage = dict[str, int]
"""Prompt tokens by source, all of ``SOURCES``."""


class Usages:
    """The usages of running requests."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._by_request: dict[str, Usage] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def started(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        local_tokens: int,
        ready_tokens: int,
        loaded: Iterable[tuple[str, int]],
        looked_up: bool,
    ) -> None:
        """Note a request whose first ``ready_tokens`` have KV before any of it was computed.

        The first ``local_tokens`` of them are vLLM's own; ``loaded`` are sources and tokens of
        what follows, in prefix order. A request that was not ``looked_up`` is in no total.
        """
        if request_id in self._by_request:
            return
        usage = dict.fromkeys(SOURCES, 0)
        # Blocks that another request was still loading may be lost again.
        usage["local"] = min(local_tokens, ready_tokens)
        left = ready_tokens - usage["local"]
        for source, tokens in loaded:
            # Of a full hit, vLLM computes the last token again.
            usage[source] += min(tokens, left)
            left -= min(tokens, left)
        self._by_request[request_id] = usage
        if not looked_up:
            return
        self._counters.prompt_tokens += prompt_tokens
        for source, tokens in usage.items():
            if tokens:
                self._counters.hits[source] += 1
                self._counters.hit_tokens[source] += tokens

    def finished(self, request_id: str) -> Usage | None:
        """Return a request's usage and forget it; None if it never started."""
        return self._by_request.pop(request_id, None)
