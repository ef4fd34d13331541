# SPDX-License-Identifier: Apache-2.0
"""The hosts and the hub do what the other tests here rely on."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts.conftest import Network
from tests.hosts.host import Host, require_hosts
from tests.hosts.hub import CUT, Fault
from tests.waiting import WAIT_S, wait_until

SILENCE_S = 0.2
"""In which a datagram that is not held up has long arrived."""


def output(host: Host, *command: str) -> str:
    ran = subprocess.run([*host.entering, *command], check=True, capture_output=True, text=True)
    return ran.stdout


class Post:
    """Datagrams between two hosts."""

    def __init__(self, network: Network) -> None:
        self.ends: dict[Host, socket.socket] = {}
        for host in (network.source, network.reader):
            with host.network():
                end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            end.bind((host.address, 0))
            end.settimeout(WAIT_S)
            self.ends[host] = end

    def send(self, receiver: Host, word: bytes) -> None:
        (sender,) = (end for host, end in self.ends.items() if host is not receiver)
        sender.sendto(word, self.ends[receiver].getsockname())

    def receive(self, host: Host, timeout_s: float = WAIT_S) -> bytes | None:
        self.ends[host].settimeout(timeout_s)
        try:
            return self.ends[host].recv(2000)
        except TimeoutError:
            return None

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture
def post(network: Network) -> Iterator[Post]:
    with contextlib.closing(Post(network)) as made:
        # Both ends know each other's hardware address from here on.
        for host in (network.source, network.reader):
            made.send(host, b"hello")
            assert made.receive(host) == b"hello"
        yield made


def test_hosts_share_neither_boot_id_nor_processes_nor_memory(network: Network) -> None:
    boot_id = "/proc/sys/kernel/random/boot_id"
    identities = {output(host, "cat", boot_id) for host in network.hosts}
    identities.add(Path(boot_id).read_text())
    assert len(identities) == 1 + len(network.hosts)
    output(network.source, "touch", "/dev/shm/a-segment")
    assert output(network.reader, "ls", "/dev/shm") == ""
    # The first process, and the one that asks.
    assert len(output(network.reader, "sh", "-c", "echo /proc/[0-9]*").split()) == 2


def test_what_one_host_sends_counts_as_received_by_the_other(network: Network, post: Post) -> None:
    sent, received = network.source.sent(), network.reader.received()
    post.send(network.reader, b"x" * 1000)
    assert post.receive(network.reader) == b"x" * 1000
    assert network.source.sent() - sent > 1000
    assert network.reader.received() - received > 1000


def test_one_direction_is_cut_and_the_other_works(network: Network, post: Post) -> None:
    with network.hub.between(network.source, network.reader, CUT):
        post.send(network.reader, b"lost")
        post.send(network.source, b"arrives")
        assert post.receive(network.source) == b"arrives"
        assert post.receive(network.reader, SILENCE_S) is None
    post.send(network.reader, b"healed")
    assert post.receive(network.reader) == b"healed"


def test_a_delayed_frame_is_overtaken_by_a_later_one(network: Network, post: Post) -> None:
    hub, sender, receiver = network.hub, network.source, network.reader
    with hub.between(sender, receiver, Fault(delay_s=SILENCE_S)):
        seen = network.source.sent()
        post.send(receiver, b"early")
        wait_until(lambda: network.source.sent() > seen and hub.late())
    post.send(receiver, b"late")
    assert [post.receive(receiver), post.receive(receiver)] == [b"late", b"early"]


def test_a_share_of_the_frames_is_lost(network: Network, post: Post) -> None:
    with network.hub.between(network.source, network.reader, Fault(loss=0.5)):
        for _ in range(200):
            post.send(network.reader, b"word")
        arrived = 0
        while post.receive(network.reader, SILENCE_S):
            arrived += 1
    assert 50 < arrived < 150


def test_a_fault_may_begin_after_some_bytes(network: Network, post: Post) -> None:
    hub, sender, receiver = network.hub, network.source, network.reader
    with hub.between(sender, receiver, Fault(loss=1.0, spared_bytes=500)):
        assert not hub.began(sender, receiver)
        post.send(receiver, b"x" * 1000)
        assert post.receive(receiver) == b"x" * 1000
        assert hub.began(sender, receiver)
        post.send(receiver, b"lost")
        assert post.receive(receiver, SILENCE_S) is None


def test_a_cable_can_be_unplugged(network: Network, post: Post) -> None:
    network.reader.set_link("down")
    post.send(network.reader, b"lost")
    assert post.receive(network.reader, SILENCE_S) is None
    network.reader.set_link("up")

    def answers() -> bool:
        post.send(network.reader, b"again")
        return post.receive(network.reader, SILENCE_S) == b"again"

    wait_until(answers)


def test_closing_a_host_ends_what_runs_on_it_and_removes_its_cable(tmp_path: Path) -> None:
    require_hosts()
    host = Host(9, tmp_path)
    program = subprocess.Popen([*host.entering, "sleep", "1000"])
    wait_until(host.processes)
    (running,) = host.processes()
    host.close()
    program.wait(WAIT_S)
    assert not psutil.pid_exists(running.pid)
    assert not Path(f"/sys/class/net/{host.cable}").exists()


def test_a_host_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    require_hosts()
    script = (
        "import pathlib, sys, time; from tests.hosts.host import Host\n"
        "host = Host(8, pathlib.Path(sys.argv[1])); print(host.cable, flush=True)\n"
        "time.sleep(1000)"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with maker:
        assert maker.stdout is not None
        cable = Path("/sys/class/net", maker.stdout.readline().strip())
        assert cable.exists()
        maker.kill()
    wait_until(lambda: not cable.exists())
