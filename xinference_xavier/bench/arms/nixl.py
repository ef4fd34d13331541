# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector: a replica computes a prompt and hands it over. No cache, a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from xinference_xavier.bench.arms.base import ArmSettings, ArmUnavailable, Replicas
from xinference_xavier.bench.engines import BLOCK_TOKENS, SERVED_NAME, free_port, running


class NixlReplicas(Replicas):
    """The first replica prefills, the others decode what it hands over."""

    def publish(self, prefix: str, question: str) -> dict[str, Any]:
        """See :class:`~xinference_xavier.bench.arms.base.Replicas`.

        The hand-off is of the whole prompt, and of one request only.
        """
        answer = self.engines[0].post(
            "/v1/completions",
            {
                "model": SERVED_NAME,
                "prompt": prefix + question,
                "max_tokens": 1,
                "temperature": 0,
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
            },
        )
        self.settle()
        return {"kv_transfer_params": answer["kv_transfer_params"]}


class NixlArm:
    """The upper bound of a hand-off."""

    name = "nixl"
    chunk_tokens = BLOCK_TOKENS
    hand_off = True
    note = (
        "NixlConnector hands a whole prompt from prefill to decode, once; its CPU backend spins "
        "a thread per worker"
    )

    def check(self) -> None:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        if find_spec("nixl") is None:
            raise ArmUnavailable("the arm nixl needs NIXL: pip install 'xoscar[nixl]'")

    @contextmanager
    def start(self, settings: ArmSettings) -> Iterator[NixlReplicas]:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        }
        engines = []
        for number in range(settings.replicas):
            engine = settings.engine(f"nixl-{number}")
            engine.arguments += ["--kv-transfer-config", json.dumps(transfer)]
            engine.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            engines.append(engine)
        with running(engines):
            yield NixlReplicas(engines)
