# SPDX-License-Identifier: Apache-2.0
"""What every fetching transport does alike, between real processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from fetch_peer import SLOTS, Reader, Source, Spec, soon

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransferFailed, TransportUnavailable

KINDS = ("nixl", "xoscar-tcp")


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    made = Source(Spec(request.param))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared_reader(source: Source) -> Iterator[Reader]:
    made = Reader(source.spec.kind)
    yield made
    made.close()


@pytest.fixture
def reader(shared_reader: Reader) -> Reader:
    shared_reader.host.fill_(0xA5)
    return shared_reader


@pytest.mark.parametrize("tier", list(Tier))
def test_any_order_and_repetition_of_slots_arrives_where_it_was_asked(
    source: Source, reader: Reader, tier: Tier
) -> None:
    shuffled = random.Random(7)
    connection = reader.transport.connect(source.handle, tier)
    data, meta = source.contents[tier]
    for count in (1, 2, 31, 32):
        slots = shuffled.choices(range(SLOTS[tier]), k=count)
        staging = shuffled.sample(reader.staging, k=count)
        reader.host.fill_(0xA5)
        rows = connection.fetch(slots, staging, deadline=soon())
        assert torch.equal(reader.host[staging], data[slots])
        assert rows.dtype == torch.int64
        assert torch.equal(rows, meta[slots])
        assert reader.changed() <= set(staging)
    assert connection.view() is None
    assert connection.staging is Tier.HOST
    assert reader.transport.quarantined(Tier.HOST) == frozenset()
    connection.close()


def test_an_empty_fetch_is_empty(source: Source, reader: Reader) -> None:
    connection = reader.transport.connect(source.handle, Tier.HOST)
    assert connection.fetch([], [], deadline=soon()).shape == (0, 2)
    connection.close()


def test_threads_fetch_at_the_same_time(source: Source, reader: Reader) -> None:
    connection = reader.transport.connect(source.handle, Tier.HOST)
    data, meta = source.contents[Tier.HOST]
    wrong: list[list[int]] = []

    def read(part: int) -> None:
        shuffled = random.Random(part)
        staging = list(reader.staging[part * 8 : part * 8 + 8])
        for _ in range(10):
            slots = shuffled.choices(range(SLOTS[Tier.HOST]), k=8)
            rows = connection.fetch(slots, staging, deadline=soon())
            same = torch.equal(reader.host[staging], data[slots])
            if not (same and torch.equal(rows, meta[slots])):
                wrong.append(slots)

    threads = [threading.Thread(target=read, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.transport.quarantined(Tier.HOST) == frozenset()
    connection.close()


def test_a_slot_that_the_peer_lacks_fails_that_read_only(source: Source, reader: Reader) -> None:
    connection = reader.transport.connect(source.handle, Tier.HOST)
    first = [reader.staging.start]
    for slot in (-1, SLOTS[Tier.HOST]):
        with pytest.raises(TransferFailed, match="48 HOST slots"):
            connection.fetch([slot], first, deadline=soon())
    connection.fetch([SLOTS[Tier.HOST] - 1], first, deadline=soon())
    assert connection.alive()
    connection.close()


@pytest.mark.parametrize(
    ("slots", "staging"), [([1], [7]), ([1], [40]), ([1, 2], [20]), ([1, 2], [20, 20])]
)
def test_staging_that_is_not_the_callers_to_use_is_a_value_error(
    source: Source, reader: Reader, slots: list[int], staging: list[int]
) -> None:
    connection = reader.transport.connect(source.handle, Tier.HOST)
    with pytest.raises(ValueError, match="staging"):
        connection.fetch(slots, staging, deadline=soon())
    assert reader.changed() == set()
    connection.close()


def test_slots_of_another_size_are_refused(source: Source) -> None:
    other = Reader(source.spec.kind, slot_bytes=8192)
    with pytest.raises(TransportUnavailable, match=r"4096 bytes, ours 8192"):
        other.transport.connect(source.handle, Tier.HOST)
    other.close()


def test_close_is_idempotent_and_final(source: Source) -> None:
    reader = Reader(source.spec.kind)
    connection = reader.transport.connect(source.handle, Tier.HOST)
    reader.close()
    reader.close()
    assert not connection.alive()
    assert reader.transport.quarantined(Tier.HOST) == frozenset()
    with pytest.raises(TransferFailed, match="closed"):
        connection.fetch([0], [reader.staging.start], deadline=soon())
    with pytest.raises(TransportUnavailable):
        reader.transport.connect(source.handle, Tier.HOST)
    connection.close()
