# SPDX-License-Identifier: Apache-2.0
"""A real supervisor and real workers, each a process tree of its own, whose parts can be killed.

Everything listens on loopback; each worker has an address of its own, 127.0.0.2 and up.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import requests
import xoscar as xo
from xinference.client import Client

from tests.crash.victim import title
from tests.extension.server import definition, environment, launch, wait_until_it_answers
from xinference_xavier.bench.engines import free_port, wait_ended, wait_until
from xinference_xavier.demo.leftovers import (
    MARK,
    SHARED,
    Family,
    File,
    files_of,
    still_there,
)
from xinference_xavier.extension.names import WORKER_UID

CALL_S = 60.0

START_S = 600.0
"""Longest time until an engine or a node has started; a busy machine."""

Part = Literal["actor", "engine", "rank"]
"""What a replica consists of: its model actor, vLLM's engine and that one's worker process."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A greedy answer: log probabilities, tokens found in a cache, and where they came from."""

    logprobs: list[float]
    cached_tokens: int
    sources: dict[str, int]


class Node:
    """One ``xinference-supervisor`` or ``xinference-worker``."""

    def __init__(self, name: str, command: list[str], folder: Path, more: dict[str, str]) -> None:
        self.name = name
        self._actor = {"xinference-supervisor": "start_supervisor"}.get(command[0], "relaunch")
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name(command[0])), *command[1:]],
                env={**environment(folder), **more, MARK: f"{os.getpid()}-{name}"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.family = Family(self.process.pid, f"{os.getpid()}-{name}")

    def kill(self) -> None:
        """SIGKILL the process that has the actor; what was started only looks after that one."""
        host = psutil.Process(self.process.pid)
        [found] = [child for child in host.children() if self._actor in title(child)]
        found.kill()

    def end(self) -> list[psutil.Process]:
        """End the tree as an operator would; kill and return what stays behind."""
        known = self.family.alive()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        left = wait_ended(known, 15)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        return left


class Cluster:
    """A supervisor and workers; ``folder`` takes the logs and everything else that is written."""

    def __init__(self, folder: Path, model: Path, workers: int = 2) -> None:
        self.folder = folder
        # Where vLLM and others put sockets and files; short, since sockets go in there.
        self.temporary = Path(tempfile.mkdtemp(prefix="xavier-crash-"))
        self.url = f"http://127.0.0.1:{free_port()}"
        self._supervisor_port = str(free_port())
        self._worker_addresses = [f"127.0.0.{2 + n}:{free_port()}" for n in range(workers)]
        self._ended: list[Node] = []
        self.nodes: dict[str, Node] = {}
        try:
            self.start_supervisor()
            # For good, so that restarted nodes know it.
            Client(self.url).register_model("LLM", definition(model), persist=True)
            for number in range(workers):
                self.start_worker(number)
            wait_until(lambda: self._workers() == workers, "the workers have joined", START_S)
        except BaseException:
            self.stop()
            raise

    # -- nodes ---------------------------------------------------------------------------------

    def start_supervisor(self) -> None:
        """Start the supervisor, at the addresses that it had before."""
        ports = ("--port", self.url.rpartition(":")[2], "--supervisor-port", self._supervisor_port)
        node = self._start("supervisor", ["xinference-supervisor", "--host", "127.0.0.1", *ports])
        wait_until_it_answers(self.url, node.process)

    def start_worker(self, number: int) -> None:
        """Start a worker, at the address that its predecessor had."""
        host, port = self._worker_addresses[number].split(":")
        command = ["xinference-worker", "--endpoint", self.url, "--host", host]
        self._start(f"worker{number}", [*command, "--worker-port", port])

    def worker_of(self, replica: str) -> int:
        """Return the number of the worker that runs a replica."""
        uid = replica.rpartition("-rep")[0]
        replicas = requests.get(f"{self.url}/v1/models/{uid}/replicas", timeout=CALL_S).json()
        [address] = [r["worker_address"] for r in replicas if r["replica_model_uid"] == replica]
        return self._worker_addresses.index(address)

    def stop(self) -> list[str]:
        """End everything; return what stayed: processes, shared memory, files in ``temporary``."""
        shared = self.files(SHARED)
        nodes = [*reversed(self.nodes.values()), *self._ended]
        left = [f"{node.name}: {process}" for node in nodes for process in node.end()]
        left += still_there(shared) + sorted(map(str, self.temporary.rglob("*")))
        shutil.rmtree(self.temporary)
        return left

    def processes(self) -> list[psutil.Process]:
        """Return everything that runs of this deployment, of killed nodes too."""
        nodes = [*self.nodes.values(), *self._ended]
        return [process for node in nodes for process in node.family.alive()]

    def files(self, prefix: str) -> set[File]:
        """Return the files with this prefix that our processes hold or map."""
        return files_of((process.pid for process in self.processes()), prefix)

    def _start(self, name: str, command: list[str]) -> Node:
        if name in self.nodes:
            self._ended.append(self.nodes[name])
        node = Node(name, command, self.folder, {"TMPDIR": str(self.temporary)})
        self.nodes[name] = node
        return node

    def _workers(self) -> int:
        with suppress(requests.RequestException):
            answer = requests.get(f"{self.url}/v1/cluster/info", timeout=10)
            if answer.ok:
                return sum(node["node_type"] == "Worker" for node in answer.json())
        return 0

    # -- replicas ------------------------------------------------------------------------------

    def launch(self, uid: str, **arguments: Any) -> requests.Response:
        """Ask for a launch, and return the raw answer."""
        return launch(self.url, uid, **arguments)

    def part(self, replica: str, part: Part) -> psutil.Process:
        """Return one of the processes of a replica."""
        [actor] = [p for p in self.processes() if title(p) == f"Model: {replica}"]
        if part == "actor":
            return actor
        name = {"engine": "VLLM::EngineCor", "rank": "VLLM::Worker"}[part]
        [found] = [p for p in actor.children(recursive=True) if title(p).startswith(name)]
        return found

    def members(self, uid: str) -> dict[str, Any]:
        """Return each member of a model's directory, and what it says of itself if it answers."""
        answer = requests.get(f"{self.url}/v1/xavier/models/{uid}", timeout=CALL_S)
        if answer.status_code == 404:
            return {}
        assert answer.ok, answer.text
        return {found["replica"]: found["status"] for found in answer.json()["replicas"]}

    def epoch(self, uid: str, replica: str) -> int:
        """Return the epoch of a member that answers."""
        found: int = self.members(uid)[replica]["control"]["epoch"]
        return found

    def ask(self, replica: str, prompt: str, max_tokens: int = 4) -> Answer:
        """Let one replica answer, whatever the supervisor thinks of it."""
        return _run(self._ask(replica, prompt, max_tokens))

    async def _ask(self, replica: str, prompt: str, max_tokens: int) -> Answer:
        body = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        model = await self._model(replica)
        text = await xo.wait_for(model.generate(prompt, body, raw_params=dict(body)), CALL_S)
        answer = json.loads(text)
        details = answer["usage"].get("prompt_tokens_details") or {}
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        return Answer(logprobs, details.get("cached_tokens", 0), details.get("xavier", {}))

    def stream(
        self, replica: str, prompt: str, max_tokens: int, begun: Callable[[], object]
    ) -> int:
        """Let one replica answer piece by piece; return the number of tokens that came.

        ``begun`` is called at each piece.
        """
        return _run(self._stream(replica, prompt, max_tokens, begun))

    async def _stream(
        self, replica: str, prompt: str, max_tokens: int, begun: Callable[[], object]
    ) -> int:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}
        model = await self._model(replica)
        tokens = 0
        async for piece in await model.generate(prompt, body, raw_params=dict(body)):
            begun()
            event = json.loads(piece.removeprefix(b"data: "))
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        return tokens

    async def _model(self, replica: str) -> Any:
        for address in self._worker_addresses:
            with suppress(Exception):
                worker = await xo.actor_ref(address=address, uid=WORKER_UID)
                return await worker.get_model(model_uid=replica)
        raise LookupError(f"no worker has {replica}")


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def soon(found: Callable[[], T], what: str, timeout_s: float) -> T:
    """Poll until ``found()`` returns something true without an error; return it."""
    result: list[T] = []

    def there() -> bool:
        with suppress(Exception):
            result[:] = [found()]
        return bool(result and result[0])

    wait_until(there, what, timeout_s)
    return result[0]
