# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each process of a Xinference deployment, and replicas that come and go under load.

One supervisor, two workers, one replica of a tiny model on each; in the order of this file. A
replica is asked at its own actor where it matters which one answers, since the supervisor goes on
sending a killed one its share of the requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import requests

from tests.crash.cluster import CALL_S, START_S, Answer, Cluster, Part, soon
from tests.crash.victim import GONE_S, Victim, title
from tests.models import make_tiny_llama
from xinference_xavier.bench.engines import wait_ended, wait_until
from xinference_xavier.bench.prompts import unique_text

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2400)]

BLOCK_TOKENS = 16
DOCUMENT_TOKENS = 30 * BLOCK_TOKENS
QUESTION = "Who was it?"
GPU_FIRST: dict[str, Any] = {
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "4MiB",
    "xavier_cpu_cache_bytes": "16MiB",
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 5,
}
UID = "m"


class Deployment(Cluster):
    """The cluster with the model on it, and what all tests ask of its replicas."""

    documents = 0

    def document(self) -> str:
        """Return a text that nobody has seen."""
        self.documents += 1
        return unique_text(self.documents, DOCUMENT_TOKENS)

    def launch_pair(self) -> None:
        answer = self.launch(UID, replica=2, **GPU_FIRST)
        assert answer.ok, answer.text
        self.wait_members("m-rep0", "m-rep1")

    def wait_members(self, *names: str) -> dict[str, Any]:
        """Wait until just these are in the group, know each other, and serve; return them."""

        def there() -> dict[str, Any] | None:
            members = self.members(UID)
            known = {
                name: {peer["name"] for peer in member["control"]["peers"] if peer["met"]}
                for name, member in members.items()
            }
            right = known == {name: {*names} - {name} for name in names}
            return members if right and self.ready() == {*names} else None

        return soon(there, f"{names} are in the group", START_S) or {}

    def ready(self) -> set[str]:
        """Return the replicas that the supervisor sends requests to."""
        answer = requests.get(f"{self.url}/v1/models/{UID}/replicas", timeout=CALL_S).json()
        return {found["replica_model_uid"] for found in answer if found["status"] == "READY"}

    def publish(self, source: str, reader: str) -> tuple[str, Answer]:
        """Let ``source`` compute a document and ``reader`` hear of it; return it and an answer."""
        document = self.document()
        before = self.known(reader)
        self.ask(source, document)
        blocks = DOCUMENT_TOKENS // BLOCK_TOKENS
        wait_until(lambda: self.known(reader) >= before + blocks, f"{reader} heard of it", CALL_S)
        return document, self.ask(source, document + QUESTION)

    def known(self, reader: str) -> int:
        found: int = self.members(UID)[reader]["control"]["mirror_blocks"]
        return found

    def assert_loads(self, reader: str, document: str, answer: Answer) -> None:
        loaded = self.ask(reader, document + QUESTION)
        peers = sum(loaded.sources[name] for name in ("peer_device", "peer_host"))
        assert peers == loaded.cached_tokens == DOCUMENT_TOKENS
        assert loaded.logprobs == pytest.approx(answer.logprobs, abs=1e-3)

    def assert_shared(self, source: str, reader: str) -> None:
        self.assert_loads(reader, *self.publish(source, reader))

    def replica_processes(self, replica: str) -> list[psutil.Process]:
        actor = self.part(replica, "actor")
        return [actor, *actor.children(recursive=True)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("crash")
    cluster = Deployment(folder, make_tiny_llama(folder / "tiny"))
    try:
        cluster.launch_pair()
        assert cluster.worker_of("m-rep0") != cluster.worker_of("m-rep1")
        yield cluster
    finally:
        left = cluster.stop()
    assert left == []


class Life:
    """One life of a replica: what it has, and what must come after it."""

    def __init__(self, cluster: Deployment, replica: str) -> None:
        self._cluster, self._replica = cluster, replica
        self._epoch = cluster.epoch(UID, replica)
        self._victim = Victim(cluster.replica_processes(replica), cluster.part(replica, "rank"))

    def assert_over(self) -> None:
        """Within one heartbeat limit: out of the directory, of memory and of the host."""

        def left() -> bool:
            member = self._cluster.members(UID).get(self._replica)
            return member is None or member["control"]["epoch"] != self._epoch

        soon(left, f"{self._replica} has left the group", GONE_S)
        self._victim.assert_gone()

    def wait_recovered(self) -> None:
        """Wait for the replica that Xinference puts in its place."""
        members = self._cluster.wait_members("m-rep0", "m-rep1")
        assert members[self._replica]["control"]["epoch"] != self._epoch


@pytest.mark.parametrize("part", ["engine", "rank", "actor"])
def test_a_killed_replica_comes_back_and_shares_again(cluster: Deployment, part: Part) -> None:
    cluster.assert_shared("m-rep0", "m-rep1")
    unread, answer = cluster.publish("m-rep0", "m-rep1")
    life = Life(cluster, "m-rep0")
    with ThreadPoolExecutor(1) as threads:
        # It computes something at that moment.
        asked = threads.submit(cluster.ask, "m-rep0", cluster.document(), 500)
        soon(lambda: running(cluster, "m-rep0"), "a request runs", CALL_S)
        cluster.part("m-rep0", part).kill()
        assert asked.exception() is not None
    life.assert_over()
    other = cluster.ask("m-rep1", unread + QUESTION)
    assert other.logprobs == pytest.approx(answer.logprobs, abs=1e-3)
    life.wait_recovered()
    cluster.assert_shared("m-rep1", "m-rep0")
    cluster.assert_shared("m-rep0", "m-rep1")


def running(cluster: Deployment, replica: str) -> int:
    """Return the CPU time that a replica's model has used, in seconds, beyond that at rest."""
    return int(cluster.part(replica, "rank").cpu_percent(0.2) > 10)


def test_replicas_come_and_go_under_load(cluster: Deployment) -> None:
    document, answer = cluster.publish("m-rep0", "m-rep1")
    grown = requests.post(f"{cluster.url}/v1/models/{UID}/replicas", json={}, timeout=START_S)
    assert grown.ok, grown.text
    cluster.wait_members("m-rep0", "m-rep1", "m-rep2")
    # Its first request.
    cluster.assert_loads("m-rep2", document, answer)

    for removed, left in (("m-rep0", ("m-rep1", "m-rep2")), ("m-rep2", ("m-rep1",))):
        streams = [Stream(cluster, removed, max_tokens=300) for _ in range(4)]
        for stream in streams:
            stream.wait_begun()
        number = removed.rpartition("-rep")[2]
        url = f"{cluster.url}/v1/models/{UID}/replicas/{number}"
        with new_requests(cluster) as answers:
            assert requests.delete(url, timeout=START_S).ok
        assert {answer.status_code for answer in answers} == {200}
        for stream in streams:
            assert stream.tokens() == 300
        cluster.wait_members(*left)
    again = requests.post(f"{cluster.url}/v1/models/{UID}/replicas", json={}, timeout=START_S)
    assert again.ok, again.text
    cluster.wait_members("m-rep1", "m-rep2")
    cluster.assert_shared("m-rep2", "m-rep1")


@contextmanager
def new_requests(cluster: Deployment) -> Iterator[list[requests.Response]]:
    """Send one request after the other through the API while the block runs."""
    answers: list[requests.Response] = []
    ended = threading.Event()

    def send() -> None:
        body: dict[str, Any] = {"model": UID, "prompt": "a new request", "max_tokens": 2}
        while not ended.is_set():
            url = f"{cluster.url}/v1/completions"
            answers.append(requests.post(url, json=body, timeout=CALL_S))

    with ThreadPoolExecutor(1) as threads:
        sender = threads.submit(send)
        try:
            yield answers
        finally:
            ended.set()
            sender.result()


class Stream:
    """A streamed answer of one replica, read on a thread of its own, as a client would."""

    def __init__(self, cluster: Deployment, replica: str, max_tokens: int) -> None:
        self._begun = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        prompt = cluster.document()
        self._done = self._threads.submit(
            cluster.stream, replica, prompt, max_tokens, self._begun.set
        )

    def wait_begun(self) -> None:
        assert self._begun.wait(CALL_S)

    def tokens(self) -> int:
        """Return the number of tokens that came, once the stream has ended."""
        self._threads.shutdown()
        return self._done.result()


def test_a_killed_supervisor_stops_no_replica_and_sharing_returns(cluster: Deployment) -> None:
    names = sorted(cluster.ready())
    source, reader = names
    document, answer = cluster.publish(source, reader)
    cluster.nodes["supervisor"].kill()
    # What is known stays of use.
    cluster.assert_loads(reader, document, answer)
    unknown = cluster.document()
    answer = cluster.ask(source, unknown + QUESTION)
    cluster.nodes["supervisor"].end()
    cluster.start_supervisor()
    cluster.wait_members(*names)
    wait_until(lambda: cluster.known(reader) > 0, f"{reader} hears of the others", CALL_S)
    cluster.assert_loads(reader, unknown, answer)
    cluster.assert_shared(reader, source)


def test_a_killed_worker_takes_its_replica_along_and_brings_it_back(cluster: Deployment) -> None:
    lost, left = sorted(cluster.ready())
    unread, answer = cluster.publish(lost, left)
    life = Life(cluster, lost)
    number = cluster.worker_of(lost)
    cluster.nodes[f"worker{number}"].kill()
    life.assert_over()
    other = cluster.ask(left, unread + QUESTION)
    assert other.logprobs == pytest.approx(answer.logprobs, abs=1e-3)
    cluster.nodes[f"worker{number}"].end()
    cluster.start_worker(number)
    cluster.wait_members(lost, left)
    cluster.assert_shared(left, lost)
    cluster.assert_shared(lost, left)


def test_a_uid_can_be_launched_again_at_once_after_a_launch_that_was_killed(
    cluster: Deployment,
) -> None:
    assert requests.delete(f"{cluster.url}/v1/models/{UID}", timeout=START_S).ok
    with ThreadPoolExecutor(1) as threads:
        launch = threads.submit(cluster.launch, UID, replica=2, **GPU_FIRST)
        soon(lambda: cluster.part("m-rep0", "engine"), "the engine starts", START_S)
        killed = cluster.replica_processes("m-rep0")
        killed[0].kill()
        assert not launch.result().ok
    assert wait_ended(killed, START_S) == []
    with suppress(requests.RequestException):
        requests.delete(f"{cluster.url}/v1/models/{UID}", timeout=START_S)
    cluster.launch_pair()
    cluster.assert_shared("m-rep0", "m-rep1")
    assert requests.delete(f"{cluster.url}/v1/models/{UID}", timeout=START_S).ok
    assert cluster.members(UID) == {}
    models = ("Model: ", "VLLM::")
    soon(
        lambda: not [p for p in cluster.processes() if title(p).startswith(models)],
        "no process of the model is left",
        GONE_S,
    )
