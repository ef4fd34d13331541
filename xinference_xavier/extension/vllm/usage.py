# SPDX-License-Identifier: Apache-2.0
"""The sources of a request's prompt tokens in its ``usage``, beside ``cached_tokens``.

The connector returns them with the last output of a request, as ``kv_transfer_params``. vLLM gives
them to nobody when its API side ends a request itself, at a stop string or when the client left;
such an answer's usage is the stock one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinference.model.llm.utils import ChatModelMixin
from xinference.model.llm.vllm.core import VLLMModel

from xinference_xavier.metrics.table import USAGE

DETAILS = "prompt_tokens_details"


class SourcesInUsage(VLLMModel):
    """Adds ``prompt_tokens_details.xavier`` to the usage of completions and chats.

    Answers of engines without our connector are as in the stock class.
    """

    @staticmethod
    def _get_completion_usage(request_output: Any) -> Any:
        usage = VLLMModel._get_completion_usage(request_output)
        return _with_sources(usage, getattr(request_output, "kv_transfer_params", None))

    @staticmethod
    def _convert_request_output_to_completion(
        request_id: str, model: str, request_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        completion = VLLMModel._convert_request_output_to_completion(
            request_id, model, request_output, *args, **kwargs
        )
        # The stock function makes the usage by the stock class's name.
        completion["usage"] = SourcesInUsage._get_completion_usage(request_output)
        return completion

    @staticmethod
    def _sanitize_usage(usage: Any) -> Any:
        """Keep what the stock function, which streamed chats go through, does not know."""
        kept = ChatModelMixin._sanitize_usage(usage)
        details = usage.get(DETAILS) if isinstance(usage, Mapping) else None
        return kept if kept is None else _with_sources(kept, details)


def _with_sources(usage: Any, params: Any) -> Any:
    sources = params.get(USAGE) if isinstance(params, Mapping) else None
    if not isinstance(sources, Mapping):
        return usage
    return {**usage, DETAILS: {**(usage.get(DETAILS) or {}), USAGE: dict(sources)}}
