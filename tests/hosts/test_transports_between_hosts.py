# SPDX-License-Identifier: Apache-2.0
"""A worker's loads from another host, without engines: what the network does to them.

The source's process runs on its host. The reader is this process, with its sockets on its host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.hosts.conftest import Network
from tests.hosts.hub import CUT, Fault
from tests.transport.store_peer import Peer, content, make_cache
from tests.waiting import drain, wait_until
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device import CpuDevice
from xinference_xavier.store.jobs import LoadJob, LoadSegment, SegmentResult, Tier
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.nixl_agent import Agent
from xinference_xavier.transport.select import Transports

H = int(Tier.HOST)
STAGING = 8
TIMEOUT_S = 1.5
MARGIN_S = 20.0
"""By which a busy machine may be late."""


class Reader:
    """A worker with its transports on the reader's host, and a source on the source's."""

    def __init__(self, network: Network) -> None:
        # UCX keeps for the life of a process the network namespace that it first saw. Were that
        # the host's, it would reach no local peer of any later test.
        Agent("at-home").close()
        self.network = network
        self.peer = Peer("auto", host=network.source.address, entering=network.source.entering)
        self.tensor, self.layout, views = make_cache()
        self.arena = Arena.create(STAGING, self.layout.slot_bytes, "reader")
        with network.reader.network():
            self.transports = Transports.start(
                choice="auto",
                arenas={Tier.HOST: self.arena},
                staging={Tier.HOST: range(STAGING)},
                host=network.reader.address,
                layout_digest=self.layout.digest(),
            )
        self.engine = LoadEngine(
            layout=self.layout,
            arenas={Tier.HOST: self.arena},
            device=CpuDevice(self.layout, views),
            verify="off",
            staging={Tier.HOST: range(STAGING)},
            transports=self.transports,
        )

    def load(self, *slots: int, timeout_s: float = MARGIN_S) -> SegmentResult:
        """Load slots of the source's host tier into blocks 0, 1, and so on."""
        self.tensor.zero_()
        rows = np.array([(H, slot, slot + 1, i) for i, slot in enumerate(slots)], dtype=np.int64)
        job = LoadJob(1, "r", (LoadSegment(1, rows),), timeout_s)
        self.engine.submit(job, {1: self.peer.handle})
        (result,) = drain(self.engine)
        return result.segments[0]

    def holds(self, *slots: int) -> bool:
        """Return whether the blocks hold these slots."""
        return all(
            self.tensor[block].numpy().tobytes() == content(slot + 1, self.layout).tobytes()
            for block, slot in enumerate(slots)
        )

    def close(self) -> None:
        self.engine.close(MARGIN_S)
        self.transports.close()
        self.arena.close()
        self.peer.close()


@pytest.fixture(scope="module")
def reader(network: Network) -> Iterator[Reader]:
    with contextlib.closing(Reader(network)) as made:
        yield made


SLOTS = (5, 1, 0, 6)


def test_blocks_cross_the_network_and_no_memory_is_shared(reader: Reader) -> None:
    received = reader.network.reader.received()
    result = reader.load(*SLOTS)
    assert (result.failed_rows, result.transport) == (set(), "xoscar")
    assert reader.holds(*SLOTS)
    nbytes = len(SLOTS) * reader.layout.slot_bytes
    assert reader.network.reader.received() - received > nbytes
    refusals = reader.transports.take_refusals()
    assert "shm: the peer is on another host" in refusals
    assert any(line.startswith("nixl: UCX has only sockets to this peer") for line in refusals)


def test_the_address_that_is_told_is_the_host_s(reader: Reader) -> None:
    told = reader.peer.handle.xoscar
    assert told is not None
    assert told.rpartition(":")[0] == reader.network.source.address


def cut(network: Network, *, to_reader: bool, to_source: bool) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if to_reader:
        stack.enter_context(network.hub.between(network.source, network.reader, CUT))
    if to_source:
        stack.enter_context(network.hub.between(network.reader, network.source, CUT))
    return stack


def loads_again(reader: Reader) -> bool:
    return not reader.load(*SLOTS, timeout_s=5.0).failed_rows and reader.holds(*SLOTS)


@pytest.mark.parametrize(
    ("to_reader", "to_source"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_load_over_a_cut_network_fails_in_time_and_the_next_ones_succeed(
    reader: Reader, to_reader: bool, to_source: bool
) -> None:
    wait_until(lambda: loads_again(reader))
    with cut(reader.network, to_reader=to_reader, to_source=to_source):
        started = time.monotonic()
        for _ in range(2):  # with the connection that there was, and with a new one
            result = reader.load(*SLOTS, timeout_s=TIMEOUT_S)
            assert result.failed_rows == set(range(len(SLOTS)))
            assert result.reason in {"timeout", "transfer", "unavailable"}
        assert time.monotonic() - started < 2 * TIMEOUT_S + MARGIN_S
        failed = reader.tensor.clone()
    wait_until(lambda: not reader.transports.quarantined(Tier.HOST))
    # Nothing that comes late gets into blocks that were reported as failed.
    assert reader.tensor.equal(failed)
    wait_until(lambda: loads_again(reader))


def test_a_cut_in_the_middle_of_a_copy_fails_the_load(reader: Reader) -> None:
    wait_until(lambda: loads_again(reader))
    network = reader.network
    spared = len(SLOTS) * reader.layout.slot_bytes // 2
    with network.hub.between(network.source, network.reader, Fault(loss=1.0, spared_bytes=spared)):
        result = reader.load(*SLOTS, timeout_s=TIMEOUT_S)
        assert network.hub.began(network.source, network.reader)
    assert result.failed_rows == set(range(len(SLOTS)))
    wait_until(lambda: loads_again(reader))


@pytest.mark.parametrize("fault", [Fault(delay_s=0.2), Fault(loss=0.05)])
def test_a_slow_and_a_lossy_network_bring_the_right_bytes_or_none(
    reader: Reader, fault: Fault
) -> None:
    network = reader.network
    with (
        network.hub.between(network.source, network.reader, fault),
        network.hub.between(network.reader, network.source, fault),
    ):
        wait_until(lambda: loads_again(reader))
