# SPDX-License-Identifier: Apache-2.0
"""Xinference on several hosts: one model, a replica on each of two.

On the first deployment UCX has only sockets, by its operator's choice, so that replicas share
over NIXL. Those that listen on all addresses find their transport themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.extension.server import (
    definition,
    environment,
    launch,
    wait_until_it_answers,
)
from tests.hosts.conftest import Network
from tests.hosts.host import Host
from tests.hosts.hub import CUT
from tests.hosts.programs import end_entered
from tests.models import TOKEN_BYTES, make_tiny_llama
from xinference_xavier.bench.engines import BLOCK_TOKENS, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

START_S = 600
HEAL_S = 180
UID = "shared"
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
BLOCKS = 40
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS

OVER_TCP = {"UCX_TLS": "tcp,self"}

subjects = itertools.count()


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and how many of its prompt's tokens came from the other replica."""

    text: str
    from_peer: int


class Deployment:
    """What runs of Xinference on some hosts; its API is on ``head``."""

    def __init__(self, head: Host, folder: Path, more: dict[str, str]) -> None:
        self.head = head
        self.url = f"http://{head.address}:9997"
        self._folder = folder
        self._more = more
        self._nodes: list[subprocess.Popen[bytes]] = []

    def serve(self, *command: str) -> None:
        """Start what the API is a part of."""
        server = self._start(self.head, *command)
        with self.head.network():
            wait_until_it_answers(self.url, server, START_S)

    def join(self, *workers: tuple[Host, str]) -> None:
        """Start workers, each on a host and told what to listen on."""
        for host, listen in workers:
            self._start(host, "xinference-worker", "--endpoint", self.url, "--host", listen)
        wait_until(lambda: self._workers() == len(workers), "all workers have joined", START_S)

    def launch(self, model: Path) -> None:
        """Launch two replicas of a model."""
        # Stock Xinference tells only the workers that there are of a model that it does not keep.
        self._post("/v1/model_registrations/LLM", model=definition(model), persist=False)
        with self.head.network():
            launched = launch(
                self.url,
                UID,
                replica=2,
                enable_xavier=True,
                # Each host keeps its own copy of the model, at a path of its own.
                xavier_identity="the same files",
                xavier_gpu_first=True,
                xavier_gpu_cache_bytes=512 * BLOCK_BYTES,
                xavier_cpu_cache_bytes="16MiB",
                xavier_min_load_tokens=0,
                xavier_lookup_timeout=5,
                xavier_load_timeout=5,
                xavier_verify="checksum",
            )
        assert launched.status_code == 200, launched.text

    def ask(self, prompt: str) -> Answer:
        """Ask whichever replica is next; raises when the answer is not HTTP 200."""
        told = self._post("/v1/completions", model=UID, prompt=prompt, max_tokens=8, temperature=0)
        sources = (told["usage"].get("prompt_tokens_details") or {}).get("xavier", {})
        from_peer = sum(n for source, n in sources.items() if source.startswith("peer"))
        return Answer(told["choices"][0]["text"], from_peer)

    def members(self) -> dict[str, dict[str, Any]]:
        """Return what each replica says about itself."""
        replicas = self._get(f"/v1/xavier/models/{UID}")["replicas"]
        return {found["replica"]: found["status"] for found in replicas if found["status"]}

    def told_hosts(self) -> list[str]:
        """Return the hosts of the addresses that the replicas tell each other."""
        statuses = self.members().values()
        return sorted(status["control"]["address"].rpartition(":")[0] for status in statuses)

    def loaded_tokens(self) -> int:
        """Return how many tokens the replicas have loaded so far."""
        statuses = self.members().values()
        return sum(sum(status["traffic"]["loaded_tokens"].values()) for status in statuses)

    def transports(self) -> set[str]:
        """Return what the replicas load over from each other."""
        statuses = self.members().values()
        sources = [source for status in statuses for source in status["sources"].values()]
        return {source["transport"] for source in sources if source.get("transport")} - {"local"}

    def known_blocks(self) -> int:
        """Return how many blocks the replicas know of each other, in all."""
        return sum(status["control"]["mirror_blocks"] for status in self.members().values())

    def from_peers(self, subject: str) -> list[int]:
        """Ask both replicas about a new text; return how many tokens came from another one.

        Requests go to the replicas in turn: the first computes the text, and when it is known to
        the second, that one is asked. All answers must be equal.
        """
        document, before = text(subject), self.known_blocks()
        answers = [self.ask(document)]
        wait_until(lambda: self.known_blocks() >= before + BLOCKS, f"{subject} is known", HEAL_S)
        answers += [self.ask(document) for _ in range(3)]
        assert len({answer.text for answer in answers}) == 1
        return [answer.from_peer for answer in answers]

    def shares(self) -> bool:
        """Return whether what one replica computes now is loaded by the other."""
        found = self.from_peers(f"Bridge {next(subjects)}")
        return max(found) >= PROMPT_TOKENS // 2

    def close(self) -> None:
        for node in reversed(self._nodes):
            end_entered(node, 60)

    def _start(self, host: Host, *command: str) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name(command[0]))
        with (self._folder / f"{host.name}-{command[0]}.log").open("wb") as log:
            node = subprocess.Popen(
                [*host.entering, program, *command[1:]],
                env={
                    **environment(self._folder / host.name),
                    "XINFERENCE_SUBPOOL_LAUNCH_TIMEOUT": str(START_S),
                    **self._more,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(node)
        return node

    def _workers(self) -> int:
        return sum(node["node_type"] == "Worker" for node in self._get("/v1/cluster/info"))

    def _get(self, path: str) -> Any:
        with self.head.network():
            answer = requests.get(f"{self.url}{path}", timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _post(self, path: str, **body: Any) -> Any:
        with self.head.network():
            answer = requests.post(f"{self.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()


def text(subject: str) -> str:
    line = f"{subject} is what this line is about, and the next one too. "
    return (line * PROMPT_TOKENS)[:PROMPT_TOKENS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def deployment(
    network: Network, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("xinference")
    with contextlib.closing(Deployment(network.head, folder, OVER_TCP)) as made:
        made.serve("xinference-supervisor", "--host", network.head.address)
        made.join(*((host, host.address) for host in (network.source, network.reader)))
        made.launch(model)
        yield made


def test_each_worker_has_one_replica_and_tells_its_host_s_address(
    network: Network, deployment: Deployment
) -> None:
    assert deployment.told_hosts() == [network.source.address, network.reader.address]


def test_what_is_shared_crosses_the_network_over_nixl(
    network: Network, deployment: Deployment
) -> None:
    before = network.source.sent() + network.reader.sent()
    wait_until(deployment.shares, "a prefix is loaded", HEAL_S)
    loaded = deployment.loaded_tokens()
    assert loaded >= PROMPT_TOKENS // 2
    crossed = network.source.sent() + network.reader.sent() - before
    assert crossed > loaded // BLOCK_TOKENS * BLOCK_BYTES
    assert deployment.transports() == {"nixl"}


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_partition_of_the_replicas_means_to_compute_and_ends(
    network: Network, deployment: Deployment, both_ways: bool
) -> None:
    with contextlib.ExitStack() as partition:
        partition.enter_context(network.hub.between(network.source, network.reader, CUT))
        if both_ways:
            partition.enter_context(network.hub.between(network.reader, network.source, CUT))
        assert set(deployment.from_peers(f"Tunnel {next(subjects)}")) == {0}
    wait_until(deployment.shares, "sharing returns", HEAL_S)


def test_nothing_is_left_on_the_hosts(network: Network, deployment: Deployment) -> None:
    """Ends the deployment; the tests that follow have others."""
    deployment.close()
    left = [each for host in network.hosts for each in host.processes()]
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_worker_that_listens_everywhere_tells_its_host_s_address(
    network: Network, model: Path, tmp_path: Path
) -> None:
    """Beside its supervisor: nobody else could reach such a worker, with stock Xinference."""
    with contextlib.closing(Deployment(network.head, tmp_path, {})) as deployment:
        deployment.serve("xinference-supervisor", "--host", network.head.address)
        deployment.join((network.head, "0.0.0.0"), (network.reader, network.reader.address))
        deployment.launch(model)
        assert deployment.told_hosts() == [network.head.address, network.reader.address]
        wait_until(deployment.shares, "a prefix is loaded", HEAL_S)
        assert deployment.transports() == {"xoscar"}


def test_replicas_of_one_host_share_when_it_listens_everywhere(
    network: Network, model: Path, tmp_path: Path
) -> None:
    with contextlib.closing(Deployment(network.head, tmp_path, {})) as deployment:
        deployment.serve("xinference-local", "--host", "0.0.0.0")
        deployment.launch(model)
        assert deployment.told_hosts() == ["127.0.0.1", "127.0.0.1"]
        wait_until(deployment.shares, "a prefix is loaded", HEAL_S)
