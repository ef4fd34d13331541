# SPDX-License-Identifier: Apache-2.0
"""Real vLLM API servers for the end-to-end tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from xinference_xavier.control.client import directory_members, peer_call

START_S = 240.0
BLOCK_TOKENS = 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Completion:
    """One greedy answer, by token ids and log probabilities."""

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    seconds: float


@dataclass
class Engine:
    """``python -m vllm.entrypoints.openai.api_server`` in a process group of its own."""

    name: str
    model: Path
    log: Path
    core: int
    extra: dict[str, Any] | None = None
    """Options of the connector; None for a plain engine without one."""
    kv_blocks: int = 400
    max_model_len: int = 2048
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", str(self.max_model_len),
            "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", "2048",
            "--num-gpu-blocks-override", str(self.kv_blocks),
            "--enable-prompt-tokens-details", "--prefix-caching-hash-algo", "sha256_cbor",
            *self.arguments,
        ]  # fmt: skip
        if self.extra is not None:
            transfer = {
                "kv_connector": "XavierConnector",
                "kv_connector_module_path": "xinference_xavier.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self.extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return command

    def start(self) -> None:
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process is None or self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} did not start:\n{self.tail()}")

    def wait_failed(self) -> str:
        """Wait for a launch that must fail; return its log."""
        if self.process is None:
            raise RuntimeError("not started")
        self.process.wait(START_S)
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def complete(self, prompt: str, max_tokens: int = 8, **more: Any) -> Completion:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "logprobs": 1, "return_token_ids": True, "ignore_eos": True, **more,
        }  # fmt: skip
        started = time.monotonic()
        answer = self.post("/v1/completions", body)
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Completion(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            details.get("cached_tokens") or 0,
            time.monotonic() - started,
        )

    def stop(self, timeout: float = 30) -> None:
        """End the server as an operator would; kill what is left."""
        if self.process is None:
            return
        children = self.processes()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        _, alive = psutil.wait_procs(children, timeout=10)
        for process in alive:
            process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def processes(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def describe(directory: str, namespace: str = "default") -> dict[str, dict[str, Any]]:
    """Ask every member of a namespace for its status, by member name."""

    async def ask() -> dict[str, dict[str, Any]]:
        members = await directory_members(directory, namespace, timeout_s=20)
        return {
            info.name: await peer_call(info.address, "describe", timeout_s=20)
            for _, _, info in members
        }

    return asyncio.run(ask())


@contextlib.contextmanager
def running_directory(log: Path) -> Iterator[str]:
    """Run ``xinference-xavier directory``; yields its address."""
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    command = [sys.executable, "-m", "xinference_xavier.cli", "directory"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", host, "--port", port], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield address
    finally:
        process.terminate()
        process.wait(20)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Poll a condition of another process; fails the test with ``what`` at the timeout."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)
