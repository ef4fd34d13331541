# SPDX-License-Identifier: Apache-2.0
"""Real vLLM API servers as child processes, for measurements and end-to-end tests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from xinference_xavier.control.client import directory_members, peer_call
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.secret import environment_secret

START_S: Final = 600.0
BLOCK_TOKENS: Final = 16
SERVED_NAME: Final = "bench"
API_SERVER: Final = "vllm.entrypoints.openai.api_server"

# Looked up here: between fork and exec nothing may be imported or loaded.
_PRCTL: Final = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG: Final = 1


class EngineError(RuntimeError):
    """An engine did not start, or not answer as it must; the text ends with its log."""


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Return whether somebody on this machine accepts connections at ``port``."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One greedy answer. ``ttft_s`` is None unless it was streamed."""

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    seconds: float
    ttft_s: float | None = None


@dataclass
class Engine:
    """``python -m vllm.entrypoints.openai.api_server`` in a process group of its own.

    ``core`` is the CPU that the model's threads are bound to. ``extra`` are the options of the
    connector, None for a plain engine without one. ``module`` is what ``python`` runs: vLLM's API
    server, or what ends up as one.
    """

    name: str
    model: Path
    log: Path
    core: int
    extra: dict[str, Any] | None = None
    kv_blocks: int = 400
    block_tokens: int = BLOCK_TOKENS
    max_model_len: int = 2048
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    module: str = API_SERVER
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command line."""
        command = [
            self.python, "-m", self.module,
            "--model", str(self.model), "--served-model-name", SERVED_NAME,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", str(self.max_model_len),
            "--block-size", str(self.block_tokens), "--max-num-batched-tokens", "2048",
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
        """Start the process; :meth:`wait_ready` waits for it."""
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
                preexec_fn=end_with_parent,
            )

    def wait_ready(self) -> None:
        """Wait until it answers. Raises :class:`EngineError` when it ends or takes too long."""
        until = time.monotonic() + START_S
        while not self.ready():
            if time.monotonic() > until:
                raise EngineError(f"{self.name} did not start:\n{self.tail()}")
            time.sleep(0.2)

    def ready(self) -> bool:
        """Return whether it answers now. Raises :class:`EngineError` when it has ended."""
        if self.process is None or self.process.poll() is not None:
            raise EngineError(f"{self.name} did not start:\n{self.tail()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def wait_failed(self) -> str:
        """Wait for a launch that must fail; return its log."""
        if self.process is None:
            raise EngineError(f"{self.name} was not started")
        self.process.wait(START_S)
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
        """Send JSON and return the answer's."""
        with self._open(path, body, timeout) as answer:
            text = answer.read()
        return json.loads(text) if text else {}

    def complete(self, prompt: str, max_tokens: int = 8, **more: Any) -> Completion:
        """Answer a prompt greedily; ``more`` goes into the request."""
        started = time.monotonic()
        answer = self.post("/v1/completions", _request(prompt, max_tokens, more))
        seconds = time.monotonic() - started
        choice = answer["choices"][0]
        return Completion(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            _cached_tokens(answer["usage"]),
            seconds,
        )

    def stream(
        self, prompt: str, max_tokens: int = 8, timeout: float = 600, **more: Any
    ) -> Completion:
        """Answer a prompt greedily, and measure the time to its first token."""
        more |= {"stream": True, "stream_options": {"include_usage": True}}
        token_ids: list[int] = []
        logprobs: list[float] = []
        cached, ttft_s = 0, None
        started = time.monotonic()
        with self._open("/v1/completions", _request(prompt, max_tokens, more), timeout) as answer:
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                now = time.monotonic()
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(f"{self.name}: {event['error']}\n{self.tail()}")
                if event.get("usage"):
                    cached = _cached_tokens(event["usage"])
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or []
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                    if token_ids and ttft_s is None:
                        ttft_s = now - started
        return Completion(token_ids, logprobs, cached, time.monotonic() - started, ttft_s)

    def stop(self, timeout: float = 30) -> None:
        """End the server as an operator would; kill what is left."""
        if self.process is None:
            return
        children = self.processes()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        for process in wait_ended(children, timeout_s=10):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the running child processes."""
        if self.process is None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self, *, main_threads: bool = False) -> float:
        """Return the CPU time that its running processes, or only their main threads, have used."""
        return 0.0 if self.process is None else cpu_seconds(self.process.pid, main_threads)

    def _open(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout)


@contextlib.contextmanager
def running(engines: Sequence[Engine]) -> Iterator[None]:
    """Start engines together, wait for all, answer a first request on each; stop them at the end.

    Raises :class:`EngineError` when one does not start.
    """
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        for engine in engines:
            engine.complete("warm up")
        yield
    finally:
        for engine in engines:
            engine.stop()


@contextlib.contextmanager
def running_directory(log: Path) -> Iterator[str]:
    """Run ``xinference-xavier directory``; yields its address once it listens there.

    Raises :class:`EngineError` when it does not start: engines would go on without it.
    """
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    command = [sys.executable, "-m", "xinference_xavier.cli", "directory"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", host, "--port", port],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for who started it
            preexec_fn=end_with_parent,
        )

    def listens() -> bool:
        if process.poll() is not None:
            raise EngineError(f"the directory did not start:\n{log.read_text(errors='replace')}")
        return accepts(int(port))

    try:
        wait_until(listens, "the directory listens", START_S)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def describe(directory: str, namespace: str = "default") -> dict[str, dict[str, Any]]:
    """Ask every member of a namespace for its status, by member name."""
    return _ask_members(directory, namespace, "describe")


def audit(directory: str, namespace: str = "default") -> dict[str, dict[str, Any]]:
    """Let every member check its bookkeeping; return the answers by member name."""
    return _ask_members(directory, namespace, "audit")


def wait_idle(directory: str, members: int = 1, *, timeout_s: float = 30) -> None:
    """Wait until at least so many members, and all there are, have nothing in use.

    Raises :class:`EngineError` where the bookkeeping of one contradicts itself, TimeoutError with
    what is still in use.
    """
    until = time.monotonic() + timeout_s
    while True:
        answers = audit(directory)
        left = {}
        for name, found in answers.items():
            if found["contradiction"] is not None:
                raise EngineError(f"{name}: {found['contradiction']}")
            if used := {kind: count for kind, count in found["in_use"].items() if count}:
                left[name] = used
        if not left and len(answers) >= members:
            return
        if time.monotonic() > until:
            raise TimeoutError(
                f"after {timeout_s:g} s there are {len(answers)} members of {members}, "
                f"and still in use is {left}"
            )
        time.sleep(0.05)


def _ask_members(directory: str, namespace: str, method: str) -> dict[str, dict[str, Any]]:
    async def ask() -> dict[str, dict[str, Any]]:
        # The engines have this process's environment.
        key = GroupKey(namespace, environment_secret(os.environ))
        members = await directory_members(directory, key, timeout_s=20)
        return {
            member.info.name: await peer_call(member.contact, method, timeout_s=20)
            for member in members
        }

    return asyncio.run(ask())


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Poll a condition of another process; raises TimeoutError with ``what`` at the timeout."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def wait_ended(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until none of these runs; return those that still do at the timeout.

    A zombie does not run: when one is reaped is up to its parent, for an orphan to process 1.
    """
    until = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_with_parent() -> None:
    """Let the kernel end this child when the process that measures is killed."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def cpu_seconds(pid: int, main_threads: bool = False) -> float:
    """Return the CPU time of a process and its running descendants, or of their main threads."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it may just have ended
                total += _cpu_seconds(process, main_threads)
    return total


def _cpu_seconds(process: psutil.Process, main_thread: bool) -> float:
    if main_thread:
        (main,) = (thread for thread in process.threads() if thread.id == process.pid)
        return float(main.user_time + main.system_time)
    times = process.cpu_times()
    return float(times.user + times.system)


def _request(prompt: str, max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 1, "return_token_ids": True, "ignore_eos": True, **more,
    }  # fmt: skip


def _cached_tokens(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
