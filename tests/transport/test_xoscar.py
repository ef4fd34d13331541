# SPDX-License-Identifier: Apache-2.0
"""``xo.copy_to`` between real processes, over plain sockets and over xoscar's own NIXL."""

from __future__ import annotations

import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xoscar as xo
from fetch_peer import (
    SLOTS,
    Reader,
    Source,
    Spec,
    handle_of,
    make_arenas,
    make_transport,
    soon,
    wait_until,
)

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport import xoscar as module
from xinference_xavier.transport.base import (
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    made = Source(Spec("xoscar-tcp"))
    yield made
    made.stop()


@pytest.fixture
def mortal() -> Iterator[Source]:
    made = Source(Spec("xoscar-tcp", slot_bytes=65536, slots={Tier.HOST: 256}))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader("xoscar-tcp")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _pattern(request: pytest.FixtureRequest) -> None:
    if "reader" in request.fixturenames:
        request.getfixturevalue("reader").host.fill_(0xA5)


@pytest.fixture
def big_reader() -> Iterator[Reader]:
    made = Reader("xoscar-tcp", staging=256, host=260, slot_bytes=65536)
    yield made
    made.close()


class TestBytes:
    @pytest.mark.parametrize("tier", list(Tier))
    def test_any_order_and_repetition_of_slots_arrives_where_it_was_asked(
        self, source: Source, reader: Reader, tier: Tier
    ) -> None:
        shuffled = random.Random(7)
        connection = reader.transport.connect(source.handle)
        data, meta = source.contents[tier]
        for count in (1, 2, 31, 32):
            slots = shuffled.choices(range(SLOTS[tier]), k=count)
            staging = shuffled.sample(reader.staging, k=count)
            reader.host.fill_(0xA5)
            rows = connection.fetch(tier, slots, staging, deadline=soon())
            assert torch.equal(reader.host[staging], data[slots])
            assert rows.dtype == torch.int64
            assert torch.equal(rows, meta[slots])
            assert reader.changed() <= set(staging)
        assert reader.transport.quarantined() == frozenset()
        connection.close()

    def test_xoscars_own_nixl_carries_the_same_bytes(self) -> None:
        pytest.importorskip("nixl")
        source, reader = Source(Spec("xoscar-nixl")), Reader("xoscar-nixl")
        try:
            assert source.handle.xoscar is not None
            assert source.handle.xoscar.startswith("nixl://")
            connection = reader.transport.connect(source.handle)
            for tier in Tier:
                data, meta = source.contents[tier]
                slots, staging = [9, 3, 4, 5, 3], [20, 12, 13, 14, 39]
                rows = connection.fetch(tier, slots, staging, deadline=soon())
                assert torch.equal(reader.host[staging], data[slots])
                assert torch.equal(rows, meta[slots])
            assert reader.changed() == set(staging)
        finally:
            reader.close()
            source.stop()

    def test_threads_fetch_at_the_same_time(self, source: Source, reader: Reader) -> None:
        connection = reader.transport.connect(source.handle)
        data, meta = source.contents[Tier.HOST]
        wrong: list[list[int]] = []

        def read(part: int) -> None:
            shuffled = random.Random(part)
            staging = list(reader.staging[part * 8 : part * 8 + 8])
            for _ in range(5):
                slots = shuffled.choices(range(SLOTS[Tier.HOST]), k=8)
                rows = connection.fetch(Tier.HOST, slots, staging, deadline=soon())
                if not (
                    torch.equal(reader.host[staging], data[slots])
                    and torch.equal(rows, meta[slots])
                ):
                    wrong.append(slots)

        threads = [threading.Thread(target=read, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_an_empty_fetch_is_empty(self, source: Source, reader: Reader) -> None:
        connection = reader.transport.connect(source.handle)
        assert connection.fetch(Tier.HOST, [], [], deadline=soon()).shape == (0, 2)

    def test_neighbours_travel_as_one_buffer(self) -> None:
        slots = np.array([1, 2, 3, 7, 7, 8, 9], dtype=np.int32)
        staging = np.array([4, 5, 6, 7, 0, 1, 3], dtype=np.int32)
        assert module._runs(slots, staging) == [(1, 3), (7, 1), (7, 2), (9, 1)]


class TestWrongCalls:
    def test_a_slot_or_tier_that_the_peer_lacks_fails_that_read_only(
        self, source: Source, reader: Reader
    ) -> None:
        connection = reader.transport.connect(source.handle)
        first = [reader.staging.start]
        with pytest.raises(TransferFailed, match="48 HOST slots"):
            connection.fetch(Tier.HOST, [SLOTS[Tier.HOST]], first, deadline=soon())
        connection.fetch(Tier.HOST, [0], first, deadline=soon())
        assert connection.alive()

    @pytest.mark.parametrize(
        ("slots", "staging"), [([1], [7]), ([1], [40]), ([1, 2], [20]), ([1, 2], [20, 20])]
    )
    def test_staging_that_is_not_the_callers_to_use_is_a_value_error(
        self, source: Source, reader: Reader, slots: list[int], staging: list[int]
    ) -> None:
        connection = reader.transport.connect(source.handle)
        with pytest.raises(ValueError, match="staging"):
            connection.fetch(Tier.HOST, slots, staging, deadline=soon())
        assert reader.changed() == set()

    def test_an_error_in_the_peer_fails_the_read_and_not_the_connection(
        self, source: Source, reader: Reader
    ) -> None:
        connection = reader.transport.connect(source.handle)
        connection._tiers[Tier.HOST] = 10**6  # so that only the peer notices
        first = [reader.staging.start]
        with pytest.raises(TransferFailed, match="peer failed"):
            connection.fetch(Tier.HOST, [SLOTS[Tier.HOST]], first, deadline=soon())
        assert reader.transport.quarantined() == frozenset()
        connection.fetch(Tier.HOST, [0], first, deadline=soon())

    def test_slots_of_another_size_are_refused(self, mortal: Source, reader: Reader) -> None:
        with pytest.raises(TransportUnavailable, match=r"65536 bytes, ours 4096"):
            reader.transport.connect(mortal.handle)


class TestDeadAndHungPeers:
    def test_a_peer_killed_before_the_read_fails_it(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle)
        first = [big_reader.staging.start]
        connection.fetch(Tier.HOST, [0], first, deadline=soon())
        mortal.signal(signal.SIGKILL)
        with pytest.raises(TransferFailed):
            connection.fetch(Tier.HOST, [1], first, deadline=soon())
        assert not connection.alive()
        wait_until(lambda: not big_reader.transport.quarantined())
        with pytest.raises(TransportUnavailable):
            big_reader.transport.connect(mortal.handle)

    def test_a_peer_killed_during_the_read_fails_it(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle)
        mortal.signal(signal.SIGSTOP)
        failures: list[BaseException] = []
        begun = threading.Event()

        def read() -> None:
            begun.set()
            try:
                connection.fetch(Tier.HOST, range(256), list(big_reader.staging), deadline=soon())
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=read)
        thread.start()
        begun.wait()
        mortal.signal(signal.SIGKILL)
        thread.join()
        assert [type(failure) for failure in failures] == [TransferFailed]
        wait_until(lambda: not big_reader.transport.quarantined())

    def test_nothing_arrives_after_a_timeout_once_the_quarantine_is_over(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        connection = transport.connect(mortal.handle)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(Tier.HOST, range(256), staging, deadline=soon(0.2))
        wait_until(lambda: not transport.quarantined())
        mortal.signal(signal.SIGCONT)
        # Whatever the resumed peer still sends for the first read comes before this answer.
        rows = transport.connect(mortal.handle).fetch(Tier.HOST, [7], staging[:1], deadline=soon())
        assert torch.equal(rows, mortal.contents[Tier.HOST][1][[7]])
        assert big_reader.changed() == set(staging[:1])

    def test_a_hung_peer_is_unavailable_to_connect(
        self, mortal: Source, big_reader: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CONNECT_LIMIT_S", 0.1)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransportUnavailable, match="no answer"):
            big_reader.transport.connect(mortal.handle)

    def test_close_does_not_wait_for_a_hung_peer(
        self, mortal: Source, big_reader: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(Tier.HOST, [1], [big_reader.staging.start], deadline=soon(0.1))
        big_reader.transport.close()
        assert not big_reader.transport._thread.is_alive()


class HoldingRef:
    """A peer's actor that takes hold of the buffers, as xoscar's NIXL channel does, and fails."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    async def push(self, tier: int, runs: Any, refs: list[Any]) -> Any:
        self.buffers = [type(ref).get_buffer(ref) for ref in refs]
        raise ConnectionError("cut off")


def test_staging_is_quarantined_while_xoscar_holds_a_buffer(reader: Reader) -> None:
    ref = HoldingRef()
    connection = module.XoscarConnection(reader.transport, ref, {Tier.HOST: 48})
    with pytest.raises(TransferFailed, match="gone"):
        connection.fetch(Tier.HOST, [1, 2, 9], [12, 13, 30], deadline=soon())
    assert reader.transport.quarantined() == {12, 13, 30}
    del ref.buffers[0]
    assert reader.transport.quarantined() == {12, 13, 30}
    ref.buffers.clear()
    assert reader.transport.quarantined() == frozenset()


class TestLifecycle:
    def test_close_is_idempotent_and_final(self, source: Source) -> None:
        reader = Reader("xoscar-tcp")
        connection = reader.transport.connect(source.handle)
        reader.close()
        reader.close()
        assert not connection.alive()
        assert not reader.transport._thread.is_alive()
        with pytest.raises(TransferFailed, match="closed"):
            connection.fetch(Tier.HOST, [0], [reader.staging.start], deadline=soon())
        with pytest.raises(TransportUnavailable):
            reader.transport.connect(source.handle)

    def test_two_pools_of_one_process_reach_each_other(self, reader: Reader) -> None:
        other = Reader("xoscar-tcp")
        other.arenas[Tier.HOST].data[2].fill_(17)
        connection = reader.transport.connect(handle_of(other.transport, other.arenas))
        connection.fetch(Tier.HOST, [2], [reader.staging.start], deadline=soon())
        assert reader.host[reader.staging.start].eq(17).all()
        other.close()

    def test_the_port_is_free_after_close(self) -> None:
        reader = Reader("xoscar-tcp")
        host, port = reader.transport.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))):
            pass
        reader.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))

    def test_a_pool_that_cannot_start_is_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError("no such address")

        monkeypatch.setattr(xo, "create_actor_pool", refuse)
        with pytest.raises(TransportUnavailable, match="no such address"):
            Reader("xoscar-tcp")

    def test_without_nixl_only_that_scheme_is_unavailable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "nixl", None)
        arenas = make_arenas({Tier.HOST: 2}, 4096)
        with pytest.raises(TransportUnavailable, match="not installed"):
            make_transport("xoscar-nixl", arenas, range(2))
        make_transport("xoscar-tcp", arenas, range(2)).close()

    def test_a_peer_without_a_pool_is_unavailable(self, source: Source, reader: Reader) -> None:
        with pytest.raises(TransportUnavailable, match="no xoscar pool"):
            reader.transport.connect(replace(source.handle, xoscar=None))
