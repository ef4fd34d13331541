# SPDX-License-Identifier: Apache-2.0
"""The Xavier that is built into Xinference, under plain vLLM servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.arms.base import ArmSettings, ArmUnavailable, Replicas
from xinference_xavier.bench.engines import BLOCK_TOKENS, EngineError, running
from xinference_xavier.bench.helper import helper_process

ACTORS: Final = "xinference_xavier.bench.arms.builtin_actors"
START_S: Final = 1200.0
CONNECTOR: Final = "xinference.model.llm.vllm.xavier.v1_connector"


class BuiltinArm:
    """What our package is there to improve on."""

    name = "builtin"
    chunk_tokens = BLOCK_TOKENS
    hand_off = False
    note = (
        "the Xavier of the installed Xinference, with its CUDA stream calls stubbed in the "
        "benchmark's own processes"
    )

    def check(self) -> None:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        for package in ("xinference", "xxhash"):
            if find_spec(package) is None:
                raise ArmUnavailable(f"the arm builtin needs {package}: pip install {package}")

    @contextmanager
    def start(self, settings: ArmSettings) -> Iterator[Replicas]:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        command = [sys.executable, "-m", ACTORS, "--replicas", str(settings.replicas)]
        log = settings.folder / "builtin-actors.log"
        with helper_process(command, log, stdout=subprocess.PIPE) as process:
            found = _addresses(process, log)
            engines = []
            for rank, address in enumerate(found["rank_addresses"][1:], start=1):
                engine = settings.engine(f"builtin-{rank - 1}")
                transfer = _transfer(found, rank, address)
                engine.arguments += ["--kv-transfer-config", json.dumps(transfer)]
                engines.append(engine)
            with running(engines):
                yield Replicas(engines, helpers=[process.pid])


def _addresses(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
    finally:
        late.cancel()
    raise EngineError(f"Xinference's actors did not start:\n{log.read_text(errors='replace')}")


def _transfer(found: dict[str, Any], rank: int, address: str) -> dict[str, Any]:
    """Return vLLM's option as Xinference makes it for a replica of that rank."""
    config = {
        "block_tracker_uid": found["tracker_uid"],
        "block_tracker_address": found["tracker_address"],
        "rank": rank,
        "rank_address": address,
        "role": "hybrid",
        "vllm_transfer_backend_type": "xavier",
        "world_size": len(found["rank_addresses"]),
    }
    return {
        "kv_connector": "XavierConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"xavier_config": config},
    }
