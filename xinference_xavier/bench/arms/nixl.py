# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector: a replica computes a prompt and hands it over. No cache, a bound."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from xinference_xavier.bench.arms.base import ArmSettings, ArmUnavailable, Replicas
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    SERVED_NAME,
    Engine,
    free_port,
    running,
)
from xinference_xavier.bench.sharing import rest


class NixlReplicas(Replicas):
    """The first replica prefills, the others decode what it hands over."""

    def settle(self) -> None:
        """Wait until no engine computes; a thread of NIXL in each worker never rests."""
        rest(self.engines, main_threads=True)

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
        "NixlConnector hands a whole prompt from prefill to decode, once; a thread of NIXL in "
        "each worker never rests, and is moved off the core that the models are bound to"
    )

    def check(self) -> None:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        if find_spec("nixl") is None:
            raise ArmUnavailable("the arm nixl needs NIXL: pip install 'xoscar[nixl]'")

    @contextlib.contextmanager
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
            _move_off(settings.core, engines)
            yield NixlReplicas(engines)


def _move_off(core: int, engines: Sequence[Engine]) -> None:
    """Move all threads but the workers' main ones, which compute, to other cores, if any.

    The connector binds the workers to the last core. There NIXL's threads would take their shares
    of what the models of all engines are bound to, also of the control.
    """
    others = os.sched_getaffinity(0) - {core}
    if not others:
        return
    for engine in engines:
        for process in engine.processes():
            for thread in process.threads():
                if thread.id != process.pid:
                    with contextlib.suppress(ProcessLookupError):  # it may just have ended
                        os.sched_setaffinity(thread.id, others)
