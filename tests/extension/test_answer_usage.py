# SPDX-License-Identifier: Apache-2.0
"""A request's sources in the usage of Xinference's answers, by the stock conversions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from xinference.model.llm.vllm.core import VLLMChatModel

from xinference_xavier.extension.vllm.models import (
    GpuFirstVLLMChatModel,
    GpuFirstVLLMModel,
    GpuFirstVLLMMultiModel,
)

SOURCES = {"local": 0, "own_device": 0, "own_host": 0, "peer_device": 64, "peer_host": 0}
PARAMS = {"xavier": SOURCES}
CHATS = (GpuFirstVLLMChatModel, GpuFirstVLLMMultiModel)


def output(params: dict[str, Any] | None = PARAMS, count: int = 1) -> RequestOutput:
    outputs = [
        CompletionOutput(number, "hi", [1, 2], None, None, finish_reason="stop")
        for number in range(count)
    ]
    return RequestOutput(
        "r", "prompt", [0] * 70, None, outputs, True,
        num_cached_tokens=64, kv_transfer_params=params,
    )  # fmt: skip


def completion(cls: Any, request_output: RequestOutput) -> Any:
    return cls._convert_request_output_to_completion("r", "m", request_output)


@pytest.mark.parametrize("cls", [GpuFirstVLLMModel, *CHATS])
def test_a_completion_tells_the_sources_beside_cached_tokens(cls: Any) -> None:
    usage = completion(cls, output(count=2))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64, "xavier": SOURCES}
    assert usage["prompt_tokens"] == 70
    assert usage["completion_tokens"] == 4


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"xavier": 1}])
@pytest.mark.parametrize("cls", [GpuFirstVLLMModel, *CHATS])
def test_without_our_connector_the_usage_is_the_stock_one(cls: Any, params: Any) -> None:
    usage = completion(cls, output(params))["usage"]
    assert usage == cls.stock_class._get_completion_usage(output(params))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64}
    assert cls._sanitize_usage(usage) == VLLMChatModel._sanitize_usage(usage)


@pytest.mark.parametrize("cls", CHATS)
def test_a_chat_tells_them(cls: Any) -> None:
    chat = cls._to_chat_completion(completion(cls, output()), None)
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 64, "xavier": SOURCES}


@pytest.mark.parametrize("cls", CHATS)
def test_a_streamed_chat_tells_them_at_its_end(cls: Any) -> None:
    async def chunks() -> AsyncIterator[Any]:
        for params, choices in ((None, True), (PARAMS, True), (PARAMS, False)):
            chunk, _ = cls._convert_request_output_to_completion_chunk(
                request_id="r", model="m", request_output=output(params)
            )
            chunk["usage"] = cls._get_completion_usage(output(params))
            if not choices:
                chunk["choices"] = []
            yield chunk

    async def run() -> list[Any]:
        made = cls._async_to_chat_completion_chunks(chunks())
        return [chunk async for chunk in made]

    told = [chunk["usage"] for chunk in asyncio.run(run()) if chunk.get("usage")]
    assert told[-1]["prompt_tokens_details"] == {"cached_tokens": 64, "xavier": SOURCES}


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 1}, object()])
def test_a_usage_that_the_stock_class_drops_stays_dropped(usage: Any) -> None:
    assert GpuFirstVLLMChatModel._sanitize_usage(usage) is None
