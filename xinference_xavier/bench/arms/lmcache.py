# SPDX-License-Identifier: Apache-2.0
"""LMCache with a server of its own (its "MP mode"), from an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from xinference_xavier.bench.arms.base import ArmSettings, ArmUnavailable, Replicas
from xinference_xavier.bench.engines import (
    START_S,
    EngineError,
    accepts,
    free_port,
    running,
    wait_until,
)
from xinference_xavier.bench.helper import helper_process

PYTHON_VARIABLE: Final = "XINFERENCE_XAVIER_LMCACHE_PYTHON"
DEFAULT_PYTHON: Final = ".venv-lmcache/bin/python"
CACHE_GB: Final = 4


class LmcacheArm:
    """The main baseline."""

    name = "lmcache"
    chunk_tokens = 256
    hand_off = False
    note = "LMCache in MP mode with a 4 GiB server; it shares whole chunks of 256 tokens"

    def check(self) -> None:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        python = _python()
        # Looked for, not imported: that would take as long as to start an engine.
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmcache') is None)"
        found = (
            python.exists()
            and not subprocess.run(
                [python, "-c", look], capture_output=True, check=False
            ).returncode
        )
        if not found:
            raise ArmUnavailable(
                f"the arm lmcache needs LMCache, which {python} does not have: run "
                f"'make lmcache-env', or name a Python that has it and vLLM in {PYTHON_VARIABLE}"
            )

    @contextmanager
    def start(self, settings: ArmSettings) -> Iterator[Replicas]:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        python, port = _python(), free_port()
        segment = f"xavier-bench-{uuid.uuid4().hex[:12]}"
        command = [
            str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port),
            "--http-port", str(free_port()), "--l1-size-gb", str(CACHE_GB),
            "--eviction-policy", "LRU",
            "--supported-transfer-mode", "engine_driven", "--shm-name", segment,
        ]  # fmt: skip
        log = settings.folder / "lmcache-server.log"
        try:
            with helper_process(command, log) as server:
                _wait_listening(server, port, log)
                engines = []
                for number in range(settings.replicas):
                    engine = settings.engine(f"lmcache-{number}")
                    engine.python = str(python)
                    engine.arguments += ["--kv-transfer-config", json.dumps(_transfer(port))]
                    engines.append(engine)
                with running(engines):
                    yield Replicas(engines, helpers=[server.pid])
        finally:
            # Killed, it leaves its cache behind in shared memory, under that name and a prefix.
            for left in Path("/dev/shm").glob(f"*{segment}"):
                left.unlink(missing_ok=True)


def _python() -> Path:
    return Path(os.environ.get(PYTHON_VARIABLE, DEFAULT_PYTHON)).absolute()


def _wait_listening(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def up() -> bool:
        if server.poll() is not None:
            raise EngineError(f"LMCache's server ended:\n{log.read_text(errors='replace')}")
        return accepts(port)

    wait_until(up, "LMCache's server listens", START_S)


def _transfer(port: int) -> dict[str, object]:
    # Without the mode and the timeout the worker on a CPU and the server wait for each other.
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "engine_driven",
            "lmcache.mp.mq_timeout": 30,
        },
    }
