# SPDX-License-Identifier: Apache-2.0
"""Real engines with faults at their boundaries, and what is looked at while one strikes.

``source`` stores documents, ``reader`` is asked about them, ``control`` has no connector. All
share one switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.answers import assert_same_answer
from tests.faults.switch import FOLDER, PLACE, Switch
from tests.faults.table import Cell
from tests.models import TOKEN_BYTES, make_tiny_llama
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Completion,
    Engine,
    free_port,
    wait_idle,
    wait_until,
)
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.control.client import Contact, directory_members, peer_call
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.secret import environment_secret

ROOT: Final = Path(__file__).resolve().parents[2]

LOAD_S: Final = 2.0
LOOKUP_S: Final = 0.5
MARGIN_S: Final = 20.0
"""For a busy machine; a request that waits for the end of the fault would never be answered."""

ANSWER_S: Final = LOOKUP_S + LOAD_S + MARGIN_S
"""Longest time until a request is answered."""

DOCUMENT_BLOCKS: Final = 20
BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
OPTIONS: Final = {
    "xavier_gpu_first": True,
    # Three documents: what is stored later is demoted to the host tier.
    "xavier_gpu_cache_bytes": 3 * DOCUMENT_BLOCKS * BLOCK_BYTES,
    # Room for all documents of a run: what the reader knows of only grows.
    "xavier_cpu_cache_bytes": "256MiB",
    "xavier_verify": "checksum",
    "xavier_load_timeout": LOAD_S,
    "xavier_lookup_timeout": LOOKUP_S,
    "xavier_min_load_tokens": 0,
}

ONE_PROCESS: Final = ["--distributed-executor-backend", "uni"]
"""The worker runs in EngineCore's process, which starts sooner than two."""

QUESTION: Final = "And then?"


@dataclass(slots=True)
class Seen:
    """One row of the table, as it was seen."""

    answers: str
    time: str
    tokens: str
    counted: dict[str, int] = field(default_factory=dict)
    breaker: str = ""


class FaultyEngine(Engine):
    """An engine whose connector is `tests.faults.connector`."""

    def command(self) -> list[str]:
        ours, faulty = "xinference_xavier.vllm.connector", "tests.faults.connector"
        return [word.replace(ours, faulty) for word in super().command()]

    def post(self, path: str, body: dict[str, Any], timeout: float = ANSWER_S) -> dict[str, Any]:
        return super().post(path, body, timeout)


class Lab:
    """The engines and the checks. ``reader`` is one that loads over one transport only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._switch = Switch(folder)
        self._switch.turn_off()
        self._model = make_tiny_llama(folder / "model")
        self._directory = f"127.0.0.1:{free_port()}"
        self._documents = itertools.count(1)
        self._ends = contextlib.ExitStack()
        self.source = self._engine("source", 0, "auto")
        self.control = Engine(
            "control", self._model, folder / "control.log", 1, arguments=ONE_PROCESS
        )
        self.reader = self.source
        self._contacts: dict[str, Contact] = {}
        self._sound = False
        """Whether the last cell left everything as it found it."""

    # -- start and end

    @contextlib.contextmanager
    def running(self, transport: str) -> Iterator[None]:
        """Run everything, with a reader over ``transport``."""
        with self._ends:
            self._ends.enter_context(self._running_directory())
            reader = self._reader(transport)
            engines = [self.source, reader, self.control]
            for engine in engines:
                self._ends.callback(engine.stop)
                engine.start()
            for engine in engines:
                self._begin(engine)
            yield

    def read_over(self, transport: str) -> None:
        """Take a reader over another transport."""
        if self.reader.name == f"reader-{transport}":
            return
        self.reader.stop()
        self._sound = False
        reader = self._reader(transport)
        self._ends.callback(reader.stop)
        reader.start()
        self._begin(reader)

    def _reader(self, transport: str) -> Engine:
        self.reader = self._engine(f"reader-{transport}", 1, transport)
        return self.reader

    def _begin(self, engine: Engine) -> None:
        engine.wait_ready()
        engine.complete("warm up")

    def _engine(self, name: str, core: int, transport: str) -> Engine:
        return FaultyEngine(
            name,
            self._model,
            self._folder / f"{name}.log",
            core,
            arguments=ONE_PROCESS,
            extra={
                **OPTIONS,
                "xavier_directory": self._directory,
                "xavier_member": name,
                "xavier_transport": transport,
            },
            environment=self._environment(name.split("-")[0]),
        )

    def _environment(self, place: str) -> dict[str, str]:
        return {FOLDER: str(self._folder), PLACE: place, "PYTHONPATH": str(ROOT)}

    @contextlib.contextmanager
    def _running_directory(self) -> Iterator[None]:
        port = self._directory.rpartition(":")[2]
        with (self._folder / "directory.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.directory", port],
                env=self._environment("directory"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    # -- one cell of the table

    def run(self, cell: Cell) -> Seen:
        """Let the fault strike and go again; check all that must hold in every cell."""
        if not self._sound:
            self._share()
        self._sound = False
        documents = [self._document() for _ in range(cell.asked)]
        if cell.check != "stored under it":
            self._store(documents)
        before = self._numbers()
        self._switch.turn_on(cell.strikes)
        try:
            if cell.check == "waits":
                answers = self._while_held(cell, documents)
            else:
                answers = self._under(cell, documents)
            self._wait_struck(cell)
            seen = self._seen(cell, answers, before)
        finally:
            self._switch.turn_off()
        self._share()
        # Leases, pins and jobs are zero, and the bookkeeping is right, in every process.
        wait_idle(self._directory)
        if cell.opens:
            seen.breaker += ", closed again"
        self._sound = True
        return seen

    def _under(self, cell: Cell, documents: list[str]) -> list[Completion]:
        """Ask about documents, each once; every answer must be the control's, in time."""
        if cell.check == "stored under it":
            for document in documents:
                self._ask(self.source, document)
        return [self._ask(self.reader, document) for document in documents]

    def _while_held(self, cell: Cell, documents: list[str]) -> list[Completion]:
        """Ask about one document whose load is held by the fault, and meanwhile about others."""
        held, *_ = documents
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self._ask, self.reader, held)
            try:
                self._wait_struck(cell)
                others = [self._ask(self.reader, self._document()) for _ in range(2)]
                assert not waiting.done(), "answered while its blocks were still being written"
            finally:
                self._switch.turn_off()
            return [waiting.result(), *others]

    def _wait_struck(self, cell: Cell) -> None:
        point = cell.boundary.point
        wait_until(lambda: self._switch.struck(point) > 0, f"{cell.id} strikes")

    def _ask(self, engine: Engine, document: str) -> Completion:
        """Ask a question; the answer must be the control's, in time."""
        prompt = document + QUESTION
        answer = engine.complete(prompt)
        control = self.control.complete(prompt)
        if answer.cached_tokens:
            # The same chunking: now the control has the document in its own cache.
            control = self.control.complete(prompt)
        assert_same_answer(answer, control)
        return answer

    def _seen(self, cell: Cell, answers: list[Completion], before: dict[str, int]) -> Seen:
        counted: dict[str, int] = {}

        def grown() -> bool:
            now = self._numbers()
            counted.update(
                (name, now[name] - before.get(name, 0)) for name in now if name == cell.counted
            )
            return counted.get(cell.counted, 0) > 0

        if cell.counted:
            wait_until(grown, f"{cell.counted} grows")
        breaker = "stayed closed"
        if cell.opens:
            wait_until(lambda: self._breaker() != "closed", "the breaker opens")
            breaker = "opened"
        else:
            assert self._breaker() in ("closed", "")
        slowest = max(answer.seconds for answer in answers)
        now = self._numbers()
        loaded = sum(
            now[name] - before.get(name, 0)
            for name in now
            if name.startswith("reader: traffic.loaded_tokens.peer_")
        )
        whole = len(answers) * DOCUMENT_BLOCKS * BLOCK_TOKENS
        return Seen(
            f"{len(answers)} of {len(answers)} as the control's",
            "before the load timeout" if slowest < LOAD_S else "at the load timeout",
            "loaded" if loaded == whole else "partly loaded" if loaded else "computed",
            counted,
            breaker,
        )

    # -- what the engines say

    def _document(self) -> str:
        return unique_text(next(self._documents), DOCUMENT_BLOCKS * BLOCK_TOKENS)

    def _store(self, documents: list[str]) -> None:
        """Let the source compute documents and the reader hear of them."""
        before = self._known()
        for document in documents:
            self.source.complete(document, max_tokens=1)
        blocks = len(documents) * DOCUMENT_BLOCKS
        wait_until(lambda: self._known() >= before + blocks, "the reader knows the documents")

    def _known(self) -> int:
        return int(self._status()[self.reader.name]["control"]["mirror_blocks"])

    def _share(self) -> None:
        """Wait until a document of the source is loaded by the reader, and breakers are closed."""
        wait_until(lambda: self._breaker() in ("closed", "half-open"), "the peer is tried again")

        def loads() -> bool:
            document = self._document()
            self._store([document])
            return self._ask(self.reader, document).cached_tokens == len(document)

        wait_until(loads, "sharing is back")
        wait_until(lambda: self._breaker() == "closed", "the breaker closes")

    def _status(self) -> dict[str, dict[str, Any]]:
        """Ask source and reader, also while the directory has forgotten them."""

        async def ask() -> dict[str, dict[str, Any]]:
            key = GroupKey("default", environment_secret(os.environ))
            for member in await directory_members(self._directory, key, timeout_s=20):
                self._contacts[member.info.name] = member.contact
            names = (self.source.name, self.reader.name)
            return {
                name: await peer_call(self._contacts[name], "describe", timeout_s=20)
                for name in names
            }

        return asyncio.run(ask())

    def _breaker(self) -> str:
        """Return the state of the source's breaker at the reader, "" if it is not known there."""
        peers = self._status()[self.reader.name]["control"]["peers"]
        return next((str(peer["breaker"]) for peer in peers if peer["name"] == "source"), "")

    def _numbers(self) -> dict[str, int]:
        """Return every number of the two statuses as "member: path"."""
        found: dict[str, int] = {}
        for name, status in self._status().items():
            _flatten(f"{name.split('-')[0]}: ", status, found)
        return found


def _flatten(prefix: str, value: object, found: dict[str, int]) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            separator = "" if prefix.endswith(" ") else "."
            _flatten(f"{prefix}{separator}{key}", part, found)
    elif isinstance(value, int) and not isinstance(value, bool):
        found[prefix] = value
