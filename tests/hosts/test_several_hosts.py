# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM on several hosts: what is shared crosses the network, and the network may fail.

The directory runs on the first host, ``source`` on the second. On the third are ``reader``, which
finds its transport itself, and ``remote``, whose operator has chosen NIXL over sockets; both read
from ``source``. The source computes all that it is asked, so that its answers are the control.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.answers import assert_same_answer
from tests.hosts.conftest import Network
from tests.hosts.hub import CUT, Fault
from tests.hosts.programs import HostEngine, describe_from, running_directory
from tests.models import TOKEN_BYTES, make_tiny_llama
from xinference_xavier.bench.engines import BLOCK_TOKENS, Completion, running, wait_until

pytestmark = pytest.mark.e2e

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
BLOCKS = 50
LOAD_TIMEOUT_S, LOOKUP_TIMEOUT_S = 5, 5
REQUEST_S = LOOKUP_TIMEOUT_S + LOAD_TIMEOUT_S + 20
"""Longest answer whatever the network does; 20 s are for computing it on a busy machine."""
HEAL_S = 120
OPTIONS = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": 1024 * BLOCK_BYTES,
    "xavier_cpu_cache_bytes": "32MiB",
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": LOOKUP_TIMEOUT_S,
    "xavier_load_timeout": LOAD_TIMEOUT_S,
}
OVER_TCP = {"UCX_TLS": "tcp,self"}

subjects = itertools.count()


@dataclass(frozen=True)
class Replicas:
    """The engines, by name, and where their directory is."""

    engines: dict[str, HostEngine]
    network: Network
    directory: str
    folder: Path
    model: Path

    def engine(self, name: str, **more: Any) -> HostEngine:
        """Make the engine of a replica; more fields of it may be given."""
        extra = {
            **OPTIONS,
            "xavier_directory": self.directory,
            "xavier_member": name,
            "xavier_transport": "nixl" if name == "remote" else "auto",
        }
        return HostEngine(name, self.model, self.folder / f"{name}.log", extra=extra, **more)

    @contextlib.contextmanager
    def running(self, *engines: HostEngine) -> Iterator[None]:
        """Run engines for the length of the block."""
        with running(engines):
            self.engines.update({each.name: each for each in engines})
            yield

    def status(self, name: str) -> dict[str, Any]:
        return describe_from(self.network.head, self.directory)[name]

    def document(self) -> str:
        """Return text that no engine has seen, of :data:`BLOCKS` blocks (a token a character)."""
        line = f"Bridge {next(subjects)} is what this line is about, and the next one too. "
        return (line * BLOCK_TOKENS * BLOCKS)[: BLOCK_TOKENS * BLOCKS]

    def shared(self, reader: str) -> str:
        """Return a document that ``source`` has computed and ``reader`` knows of."""
        before = self.status(reader)["control"]["mirror_blocks"]
        document = self.document()
        self.engines["source"].complete(document, max_tokens=1)
        wait_until(
            lambda: self.status(reader)["control"]["mirror_blocks"] >= before + BLOCKS,
            f"{reader} hears of {BLOCKS} blocks",
        )
        return document

    def answers_right(self, name: str, document: str) -> Completion:
        """Ask about a document; the answer must be the source's, and in time."""
        question = document + "How long is it?"
        answer = self.engines[name].complete(question)
        assert_same_answer(answer, self.engines["source"].complete(question))
        assert answer.seconds < REQUEST_S
        return answer

    def loaded(self, name: str) -> int:
        """Return how many tokens an engine has loaded so far."""
        return sum(self.status(name)["traffic"]["loaded_tokens"].values())

    def loads(self, name: str) -> bool:
        """Return whether a document of the source is loaded, all of it, by an engine now."""
        return self.answers_right(name, self.shared(name)).cached_tokens == BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def replicas(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """``source`` and ``reader``."""
    folder = tmp_path_factory.mktemp("engines")
    model = make_tiny_llama(folder / "model")
    with running_directory(network.head, folder / "directory.log") as directory:
        made = Replicas({}, network, directory, folder, model)
        source = made.engine("source", core=0, host=network.source, environment=OVER_TCP)
        reader = made.engine("reader", core=1, host=network.reader)
        with made.running(source, reader):
            yield made


@pytest.fixture(scope="module")
def remote(replicas: Replicas) -> Iterator[Replicas]:
    """All three."""
    host = replicas.network.reader
    with replicas.running(replicas.engine("remote", core=1, host=host, environment=OVER_TCP)):
        yield replicas


def loads_over_the_network(replicas: Replicas, reader: str, transport: str) -> None:
    document = replicas.shared(reader)
    network = replicas.network
    received, sent = network.reader.received(), network.source.sent()
    answer = replicas.answers_right(reader, document)
    assert answer.cached_tokens == len(document)
    assert network.reader.received() - received > BLOCKS * BLOCK_BYTES
    assert network.source.sent() - sent > BLOCKS * BLOCK_BYTES
    status = replicas.status(reader)
    assert status["sources"]["source"]["transport"] == transport
    assert status["traffic"]["verified_blocks"] >= BLOCKS
    assert status["traffic"]["loads_failed"] == {}


def test_what_is_loaded_crosses_the_network(replicas: Replicas) -> None:
    loads_over_the_network(replicas, "reader", "xoscar")


@pytest.mark.slow
def test_what_is_loaded_over_nixl_crosses_the_network(remote: Replicas) -> None:
    loads_over_the_network(remote, "remote", "nixl")


def test_the_addresses_that_are_told_are_those_of_the_hosts(replicas: Replicas) -> None:
    hosts = {"source": replicas.network.source, "reader": replicas.network.reader}
    for name, host in hosts.items():
        told = replicas.status(name)["control"]["address"]
        assert ipaddress.ip_address(told.rpartition(":")[0]) == ipaddress.ip_address(host.address)


Partition = Callable[[Network], contextlib.AbstractContextManager[None]]


def link_down(network: Network) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def unplugged() -> Iterator[None]:
        network.reader.set_link("down")
        try:
            yield
        finally:
            network.reader.set_link("up")

    return unplugged()


def to_reader(network: Network) -> contextlib.AbstractContextManager[None]:
    return network.hub.between(network.source, network.reader, CUT)


def to_source(network: Network) -> contextlib.AbstractContextManager[None]:
    return network.hub.between(network.reader, network.source, CUT)


def during_the_copy(network: Network) -> contextlib.AbstractContextManager[None]:
    fault = Fault(loss=1.0, spared_bytes=BLOCKS * BLOCK_BYTES // 2)
    return network.hub.between(network.source, network.reader, fault)


@pytest.mark.parametrize(
    "partition",
    [
        to_reader,
        pytest.param(during_the_copy, marks=pytest.mark.slow),
        pytest.param(to_source, marks=pytest.mark.slow),
        pytest.param(link_down, marks=pytest.mark.slow),
    ],
)
def test_a_partition_means_to_compute_and_ends(replicas: Replicas, partition: Partition) -> None:
    wait_until(lambda: replicas.loads("reader"), "the reader loads", HEAL_S)
    document = replicas.shared("reader")
    loaded = replicas.loaded("reader")
    with partition(replicas.network):
        replicas.answers_right("reader", document)
    assert replicas.loaded("reader") == loaded
    wait_until(lambda: replicas.loads("reader"), "the reader loads again", HEAL_S)


def slow(network: Network) -> contextlib.AbstractContextManager[None]:
    return both_ways(network, Fault(delay_s=0.2))


def lossy(network: Network) -> contextlib.AbstractContextManager[None]:
    return both_ways(network, Fault(loss=0.05))


@contextlib.contextmanager
def both_ways(network: Network, fault: Fault) -> Iterator[None]:
    with (
        network.hub.between(network.source, network.reader, fault),
        network.hub.between(network.reader, network.source, fault),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("partition", [slow, lossy])
@pytest.mark.parametrize("reader", ["reader", "remote"])
def test_a_bad_network_gives_right_answers_and_heals(
    remote: Replicas, partition: Partition, reader: str
) -> None:
    with partition(remote.network):
        for _ in range(3):
            remote.answers_right(reader, remote.shared(reader))
    wait_until(lambda: remote.loads(reader), f"{reader} loads again", HEAL_S)


def test_nothing_is_held_when_nothing_runs(replicas: Replicas) -> None:
    """Runs last: partitions must not leave anything behind."""
    for name in replicas.engines:

        def idle(name: str = name) -> bool:
            status = replicas.status(name)
            held = (status["store"]["leases"], status["store"]["jobs"], status["load_jobs"])
            return held == (0, 0, 0) and status["pinned_blocks"] == status["quarantined"] == 0

        wait_until(idle, f"{name} holds nothing")
        assert replicas.status(name)["hook_failures"] == {}
    assert replicas.loaded("source") == 0
