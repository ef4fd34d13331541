# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each process of plain vLLM replicas, and of their directory, at the worst moments.

``source`` stores documents and ``reader`` loads them. Each test leaves both running. Nothing is
asked twice at the same time, so answers can be compared exactly. In the order of this file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.answers import assert_same_answer, known
from tests.crash.held import HeldEngine, Part
from tests.crash.victim import GONE_S, Victim
from tests.models import make_tiny_llama
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Completion,
    describe,
    free_port,
    wait_ended,
    wait_idle,
    wait_until,
)
from xinference_xavier.bench.prompts import unique_text

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

DOCUMENT_TOKENS = 30 * BLOCK_TOKENS
QUESTION = "Who was it?"


class Group:
    """A directory and two replicas, each of which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = f"127.0.0.1:{free_port()}"
        self.model = make_tiny_llama(folder / "model")
        self.directory_process = self.start_directory()
        self.engines = {name: self.new_engine(name) for name in ("source", "reader")}
        self._documents = 0
        self._threads = ThreadPoolExecutor(4)

    @property
    def source(self) -> HeldEngine:
        return self.engines["source"]

    @property
    def reader(self) -> HeldEngine:
        return self.engines["reader"]

    def start_directory(self) -> subprocess.Popen[bytes]:
        host, port = self.directory.split(":")
        command = [sys.executable, "-m", "xinference_xavier.cli", "directory"]
        with (self.folder / "directory.log").open("ab") as log:
            started = subprocess.Popen(
                [*command, "--host", host, "--port", port], stdout=log, stderr=subprocess.STDOUT
            )
        self.directory_process = started
        return started

    def start(self, *names: str) -> None:
        for name in names:
            self.engines[name].start()
        for name in names:
            self.engines[name].wait_ready()
            self.engines[name].complete("warm up")
        self.wait_met()

    def start_again(self, name: str) -> None:
        """Replace an engine that was killed, under its name."""
        self.engines[name].stop()
        self.engines[name] = self.new_engine(name)
        self.start(name)

    def wait_met(self) -> None:
        def met() -> bool:
            with suppress(Exception):  # a member that has just died does not answer
                members = describe(self.directory).values()
                peers = [peer for member in members for peer in member["control"]["peers"]]
                return len(peers) == 2 and all(peer["met"] for peer in peers)
            return False

        wait_until(met, "source and reader know each other", 120)

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()
        self.directory_process.kill()
        self.directory_process.wait()
        self._threads.shutdown()

    def document(self) -> str:
        """Return a text that nobody has seen."""
        self._documents += 1
        return unique_text(self._documents, DOCUMENT_TOKENS)

    def published(self, engine: HeldEngine, other: HeldEngine) -> tuple[str, Completion]:
        """Let ``engine`` compute a document and ``other`` hear of it; return it, with an answer."""
        document = self.document()
        before = known(self.directory, other.name)
        engine.complete(document, max_tokens=1)
        blocks = DOCUMENT_TOKENS // BLOCK_TOKENS
        wait_until(
            lambda: known(self.directory, other.name) >= before + blocks,
            f"{other.name} heard of it",
            60,
        )
        return document, engine.complete(document + QUESTION)

    def epoch(self, name: str) -> int:
        found: int = describe(self.directory)[name]["control"]["epoch"]
        return found

    def asked(self, engine: HeldEngine, prompt: str) -> Future[Completion]:
        """Ask on a thread of its own."""
        return self._threads.submit(engine.complete, prompt)

    def assert_shared(self, engine: HeldEngine, other: HeldEngine) -> None:
        """Let ``other`` load what ``engine`` computes now."""
        document, answer = self.published(engine, other)
        loaded = other.complete(document + QUESTION)
        assert loaded.cached_tokens == DOCUMENT_TOKENS
        assert_same_answer(loaded, answer)

    def assert_alone(self, name: str) -> None:
        """Within one heartbeat limit only ``name`` is in the directory, and knows of no block."""

        def alone() -> bool:
            with suppress(Exception):  # the dead one is asked as long as it is in there
                members = describe(self.directory)
                return [*members] == [name] and not known(self.directory, name)
            return False

        wait_until(alone, f"only {name} is in the directory", GONE_S)

    def new_engine(self, name: str) -> HeldEngine:
        number = len(list(self.folder.glob(f"{name}-*")))
        folder = self.folder / f"{name}-{number}"
        core = ("source", "reader").index(name)
        return HeldEngine(name, self.model, folder, core, self.directory)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("crash"))
    try:
        group.start("source", "reader")
        yield group
    finally:
        group.stop()


def victim(engine: HeldEngine) -> Victim:
    return Victim(engine.everything(), engine.part("rank"))


@pytest.mark.parametrize("part", ["rank", "engine", "server"])
def test_an_idle_replica_is_killed(group: Group, part: Part) -> None:
    group.assert_shared(group.source, group.reader)
    unread, answer = group.published(group.source, group.reader)
    epoch, killed = group.epoch("source"), victim(group.source)
    assert group.reader.part("rank").pid in killed.mapped_by()
    group.source.part(part).kill()
    killed.assert_gone()
    group.assert_alone("reader")
    recomputed = group.reader.complete(unread + QUESTION)
    assert recomputed.cached_tokens == 0
    assert_same_answer(recomputed, answer)
    wait_idle(group.directory, 1)
    group.start_again("source")
    assert group.epoch("source") != epoch
    # What the reader computed meanwhile is there for the one that comes back.
    assert group.source.complete(unread + QUESTION).cached_tokens == DOCUMENT_TOKENS
    group.assert_shared(group.source, group.reader)


def test_the_source_of_a_load_is_killed(group: Group) -> None:
    document, answer = group.published(group.source, group.reader)
    killed = victim(group.source)
    with group.reader.holding("load"):
        asked = group.asked(group.reader, document + QUESTION)
        group.reader.wait_held("load")
        group.source.part("engine").kill()
        assert wait_ended([group.source.part("server")], GONE_S) == []
    assert_same_answer(asked.result(), answer)
    killed.assert_gone()
    group.assert_alone("reader")
    wait_idle(group.directory, 1)
    group.start_again("source")
    group.assert_shared(group.source, group.reader)


def test_the_reader_of_a_load_is_killed(group: Group) -> None:
    document, answer = group.published(group.source, group.reader)
    killed = victim(group.reader)
    with group.reader.holding("load"):
        asked = group.asked(group.reader, document + QUESTION)
        group.reader.wait_held("load")
        assert describe(group.directory)["source"]["store"]["leases"] > 0
        group.reader.part("engine").kill()
        assert isinstance(asked.exception(), OSError)
    killed.assert_gone()
    group.assert_alone("source")
    # Nobody renews its leases any more.
    wait_idle(group.directory, 1)
    assert_same_answer(group.source.complete(document + QUESTION), answer)
    group.start_again("reader")
    loaded = group.reader.complete(document + QUESTION)
    assert loaded.cached_tokens == DOCUMENT_TOKENS
    assert_same_answer(loaded, answer)


def test_a_replica_is_killed_while_it_saves(group: Group) -> None:
    document = group.document()
    killed = victim(group.source)
    with group.source.holding("save"):
        answer = group.source.complete(document + QUESTION)
        group.source.wait_held("save")
        group.source.part("rank").kill()
        killed.assert_gone()
        group.assert_alone("reader")
    recomputed = group.reader.complete(document + QUESTION)
    assert recomputed.cached_tokens == 0
    assert_same_answer(recomputed, answer)
    wait_idle(group.directory, 1)
    group.start_again("source")
    group.assert_shared(group.source, group.reader)


@pytest.mark.parametrize("part", ["server", "engine"])
def test_a_replica_is_killed_while_it_starts(group: Group, part: Part) -> None:
    group.source.stop()
    group.engines["source"] = starting = group.new_engine("source")
    starting.start()

    def there() -> bool:
        with suppress(ValueError, psutil.Error):
            return bool(starting.part("rank"))
        return False

    wait_until(there, "the engine starts", 240)
    processes = starting.everything()
    starting.part(part).kill()
    # An engine without a server notices when it has loaded the model.
    assert wait_ended(processes, 240) == []
    assert set(describe(group.directory)) == {"reader"}
    group.start_again("source")
    group.assert_shared(group.source, group.reader)


def test_the_directory_is_killed_and_comes_back(group: Group) -> None:
    before, answer = group.published(group.source, group.reader)
    status = describe(group.directory)
    epochs = {name: member["control"]["epoch"] for name, member in status.items()}
    group.directory_process.kill()
    group.directory_process.wait()
    # What is known stays of use, and what is new is computed.
    loaded = group.reader.complete(before + QUESTION)
    assert loaded.cached_tokens == DOCUMENT_TOKENS
    assert_same_answer(loaded, answer)
    meanwhile = group.document()
    group.source.complete(meanwhile, max_tokens=1)
    answer = group.source.complete(meanwhile + QUESTION)
    group.start_directory()
    group.wait_met()
    assert all(group.epoch(name) != epochs[name] for name in epochs)
    wait_until(lambda: group.known(group.reader) > 0, "the reader hears of the blocks", 60)
    loaded = group.reader.complete(meanwhile + QUESTION)
    assert loaded.cached_tokens == DOCUMENT_TOKENS
    assert_same_answer(loaded, answer)
    group.assert_shared(group.source, group.reader)
    wait_idle(group.directory, 2)
