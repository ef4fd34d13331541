# SPDX-License-Identifier: Apache-2.0
"""A real ``xinference-local`` with our extension, on a free loopback port, in a process group of
its own. Nothing of it is left after ``stop()``: :meth:`leftovers` tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import requests
from xinference.client import Client

from xinference_xavier.bench.engines import free_port, wait_ended

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
MODEL_NAME = "random-llama"


def environment(home: Path) -> dict[str, str]:
    """Return what every process of a deployment of ours runs with."""
    return {
        **os.environ,
        "XINFERENCE_HOME": str(home),
        "XINFERENCE_EXTENSIONS": "xinference_xavier.extension:create",
        "XINFERENCE_AUTH_ADVANCED": "0",
        "XINFERENCE_ENABLE_VIRTUAL_ENV": "0",
        "XINFERENCE_HEALTH_CHECK_ATTEMPTS": "30",
        # A replica's process imports vLLM meanwhile, and others start beside it.
        "XINFERENCE_SUBPOOL_LAUNCH_TIMEOUT": "240",
    }


def definition(model: Path) -> str:
    """Return the registration of a model directory as the chat model :data:`MODEL_NAME`."""
    return f"""{{
        "version": 2, "model_name": "{MODEL_NAME}", "model_lang": ["en"],
        "model_ability": ["chat"], "context_length": 2048,
        "model_family": "tiny", "architectures": ["LlamaForCausalLM"],
        "chat_template": "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}",
        "stop_token_ids": [], "stop": [],
        "model_specs": [{{"model_format": "pytorch", "model_size_in_billions": "0_1",
            "quantization": "none", "model_id": "tiny/tiny", "model_uri": "file://{model}"}}]
    }}"""


def wait_until_it_answers(
    url: str, process: subprocess.Popen[bytes], timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait for the API at ``url``, a part of ``process``; raises RuntimeError if it does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            answer = requests.get(f"{url}/v1/models", timeout=5)
            # With authentication on, nobody may list models yet.
            if answer.ok or answer.status_code == 401:
                return
        except (requests.ConnectionError, requests.Timeout):
            # The listener is open before the API behind it answers.
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} does not answer")


def launch(url: str, uid: str, **arguments: Any) -> requests.Response:
    """Ask for a launch as the Python client does, and return the raw answer."""
    body = {
        "model_uid": uid,
        "model_name": MODEL_NAME,
        "model_engine": "vLLM",
        "model_format": "pytorch",
        "model_size_in_billions": "0_1",
        "quantization": "none",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * 2**20,
        **arguments,
    }
    return requests.post(f"{url}/v1/models", json=body, timeout=900)


class XinferenceServer:
    """Owns one server. ``home`` is its XINFERENCE_HOME; its output goes to ``home/output.txt``."""

    def __init__(
        self, home: Path, more: dict[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{free_port()}"
        metrics_port = str(free_port())
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.output = home / "output.txt"
        command = Path(sys.executable).with_name("xinference-local")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(str(command), "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]),
                    *("--metrics-exporter-port", metrics_port),
                    *arguments,
                ],
                env={**environment(home), **(more or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_it_answers(self.url, self.process)
        except RuntimeError:
            self.stop()
            raise RuntimeError(f"xinference-local is not ready:\n{self.tail()}") from None
        self.client = Client(self.url)

    def register(self, model: Path) -> None:
        """Register a model directory as the chat model :data:`MODEL_NAME`."""
        self.client.register_model("LLM", definition(model), persist=False)

    def launch(self, uid: str, **arguments: Any) -> requests.Response:
        """See :func:`launch`."""
        return launch(self.url, uid, **arguments)

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes: its group, and whoever it started."""
        found = {}
        for process in psutil.process_iter(["pid"]):
            try:
                in_group = os.getpgid(process.pid) == self.process.pid
            except ProcessLookupError:
                continue
            if in_group:
                found[process.pid] = process
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                found[child.pid] = child
        except psutil.NoSuchProcess:
            pass
        return list(found.values())

    def tail(self, nbytes: int = 8000) -> str:
        """Return the end of the server's output."""
        return self.output.read_bytes()[-nbytes:].decode(errors="replace")

    def stop(self) -> list[str]:
        """End the server as an operator would; return the command lines of what stayed behind."""
        known = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        left = []
        for process in wait_ended(known, timeout_s=10):
            try:
                left.append(" ".join(process.cmdline()))
                process.kill()
            except psutil.NoSuchProcess:  # it ended just now
                continue
        return left
