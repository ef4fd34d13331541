# SPDX-License-Identifier: Apache-2.0
"""Shared memory between two real processes: right bytes, or a failed row; and nothing left over."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from store_peer import BLOCKS, SLOTS, Peer, content, make_cache

from tests.waiting import WAIT_S, drain, wait_until
from xinference_xavier.store.device import CpuDevice, IntArray
from xinference_xavier.store.jobs import LoadJob, LoadSegment, SegmentResult, Tier
from xinference_xavier.transport.base import TransferFailed, TransportUnavailable
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import ShmTransport

H, D = int(Tier.HOST), int(Tier.DEVICE)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def mortal() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


class PausingDevice(CpuDevice):
    """Calls ``pause`` before it copies out of a slot."""

    pause = staticmethod(lambda: None)

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        self.pause()
        super().scatter(data, slots, block_ids)


class Reader:
    """A load engine with no own tiers that reads from one peer."""

    def __init__(self, peer: Peer, *, reap_s: float = 60.0) -> None:
        self.tensor, self.layout, views = make_cache()
        self.device = PausingDevice(self.layout, views)
        self.peers = {1: peer.handle}
        self.engine = LoadEngine(
            layout=self.layout,
            arenas={},
            device=self.device,
            verify="off",
            staging={},
            transports=Transports([ShmTransport()], layout_digest=self.layout.digest()),
            reap_s=reap_s,
        )

    def load(self, *rows: tuple[int, int, int, int]) -> SegmentResult:
        table = np.array(rows, dtype=np.int64)
        self.engine.submit(LoadJob(1, "r", (LoadSegment(1, table),), WAIT_S), self.peers)
        (result,) = drain(self.engine)
        return result.segments[0]

    def block(self, block: int) -> bytes:
        return self.tensor[block].numpy().tobytes()

    def content(self, generation: int) -> bytes:
        return content(generation, self.layout).tobytes()


@pytest.fixture
def reader(peer: Peer) -> Iterator[Reader]:
    made = Reader(peer)
    yield made
    made.engine.close(WAIT_S)


def maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "xavier-remote" in line]


def test_blocks_of_another_process_arrive_byte_for_byte(peer: Peer, reader: Reader) -> None:
    slots = [5, 1, 2, 1, 7]
    result = reader.load(*[(D if i % 2 else H, s, s + 1, i) for i, s in enumerate(slots)])
    assert (result.failed_rows, result.transport) == (set(), "shm")
    for block, slot in enumerate(slots):
        assert reader.block(block) == reader.content(slot + 1)
    assert reader.block(BLOCKS - 1) == bytes(reader.layout.slot_bytes)


def test_a_reader_that_slept_while_its_slot_was_reassigned_delivers_nothing(
    peer: Peer, reader: Reader
) -> None:
    def sleep_past_the_lease() -> None:
        peer.ask("write", H, 3, 77)

    reader.device.pause = sleep_past_the_lease
    result = reader.load((H, 2, 3, 0), (H, 3, 4, 1))
    reader.device.pause = lambda: None
    assert (result.failed_rows, result.reason) == ({1}, "generation")
    assert reader.load((H, 3, 77, 1)).failed_rows == set()
    assert reader.block(1) == reader.content(77)
    peer.ask("write", H, 3, 4)


def test_no_torn_slot_ever_counts_as_loaded(peer: Peer, reader: Reader) -> None:
    """One slot is rewritten without a pause while it is read; what is delivered is whole."""
    peer.ask("churn")
    connection = ShmTransport().connect(peer.handle, Tier.HOST)
    meta = connection.view().meta
    # Lets the writer in between the look at the generation and the copy, every other time.
    turns = itertools.cycle([0.0, 5e-5])
    reader.device.pause = lambda: time.sleep(next(turns))
    refused = 0
    end = time.monotonic() + WAIT_S
    while refused < 200 and time.monotonic() < end:
        generation = int(meta[0, 0])
        result = reader.load((H, 0, generation, 0))
        if result.failed_rows:
            refused += 1
        else:
            assert reader.block(0) == reader.content(generation)
    peer.ask("stop")
    reader.device.pause = lambda: None
    assert refused == 200
    last = int(meta[0, 0])
    assert reader.load((H, 0, last, 0)).failed_rows == set()
    assert reader.block(0) == reader.content(last)
    peer.ask("write", H, 0, 1)
    connection.close()


def test_a_killed_peer_is_unmapped_without_a_load(mortal: Peer) -> None:
    reader = Reader(mortal, reap_s=0.01)
    assert reader.load((H, 2, 3, 0)).failed_rows == set()
    assert maps()
    mortal.kill()
    wait_until(lambda: maps() == [])
    result = reader.load((H, 2, 3, 1))
    reader.engine.close(WAIT_S)
    assert (result.failed_rows, result.reason) == ({0}, "unavailable")
    assert not [path for path in Path("/dev/shm").iterdir() if "xavier" in path.name]


def test_a_peer_killed_during_a_copy_does_no_harm(mortal: Peer) -> None:
    reader = Reader(mortal)
    reader.device.pause = mortal.kill
    result = reader.load((H, 2, 3, 0))
    reader.engine.close(WAIT_S)
    assert result.failed_rows == set()
    assert reader.block(0) == reader.content(3)
    assert maps() == []


def test_a_peer_that_closes_its_store_withdraws_every_slot(mortal: Peer) -> None:
    reader = Reader(mortal)
    connection = ShmTransport().connect(mortal.handle, Tier.HOST)
    assert connection.alive()
    assert reader.load((H, 2, 3, 0)).failed_rows == set()
    mortal.ask("close")
    result = reader.load((H, 2, 3, 0))
    reader.engine.close(WAIT_S)
    assert (result.failed_rows, result.reason) == ({0}, "generation")
    assert not connection.alive()
    connection.close()
    assert maps() == []


def test_the_mapping_cannot_be_written(peer: Peer) -> None:
    connection = ShmTransport().connect(peer.handle, Tier.HOST)
    line = next(line for line in maps() if "xavier-remote" in line)
    assert line.split()[1] == "r--s"
    connection.close()


def test_warming_touches_every_page_once_and_ends(peer: Peer) -> None:
    connection = ShmTransport().connect(peer.handle, Tier.HOST)
    assert [connection.warm() for _ in range(3)] == [True, False, False]
    connection.close()


def test_a_closed_connection_shows_nothing(peer: Peer) -> None:
    connection = ShmTransport().connect(peer.handle, Tier.HOST)
    held = connection.view()
    assert held.data.shape[0] == SLOTS
    connection.close()
    connection.close()
    assert connection.view() is None
    assert not connection.alive()
    assert held.meta[SLOTS - 1, 0] == SLOTS
    del held
    assert maps() == []


def test_there_is_nothing_to_fetch(peer: Peer) -> None:
    connection = ShmTransport().connect(peer.handle, Tier.HOST)
    with pytest.raises(TransferFailed):
        connection.fetch([0], [0], deadline=time.monotonic() + 1)
    connection.close()


@pytest.mark.parametrize("case", ["other host", "another arena"])
def test_a_peer_that_cannot_be_mapped_is_unavailable_and_leaves_nothing(
    peer: Peer, case: str
) -> None:
    if case == "other host":
        handle = dataclasses.replace(peer.handle, host_id="elsewhere")
    else:
        wrong = dataclasses.replace(peer.handle.arenas[Tier.HOST], nonce=bytes(16))
        handle = dataclasses.replace(peer.handle, arenas={Tier.HOST: wrong})
    with pytest.raises(TransportUnavailable):
        ShmTransport().connect(handle, Tier.HOST)
    assert maps() == []
