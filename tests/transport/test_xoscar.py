# SPDX-License-Identifier: Apache-2.0
"""``xo.copy_to`` between real processes, over plain sockets and over xoscar's own NIXL."""

from __future__ import annotations

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
    SLOT_BYTES,
    SLOTS,
    Reader,
    Source,
    Spec,
    handle_of,
    make_arenas,
    make_transport,
    soon,
)

from tests.store.fake_cuda import FakeCuda, host
from tests.waiting import wait_until
from xinference_xavier.layout import probe_layout
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport import xoscar as module
from xinference_xavier.transport.base import (
    SlotView,
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
    def test_xoscars_own_nixl_carries_the_same_bytes(self) -> None:
        pytest.importorskip("nixl")
        source, reader = Source(Spec("xoscar-nixl")), Reader("xoscar-nixl")
        try:
            assert source.handle.xoscar is not None
            assert source.handle.xoscar.startswith("nixl://")
            for tier in Tier:
                connection = reader.transport.connect(source.handle, tier)
                data, meta = source.contents[tier]
                slots, staging = [9, 3, 4, 5, 3], [20, 12, 13, 14, 39]
                rows = connection.fetch(slots, staging, deadline=soon())
                assert torch.equal(reader.host[staging], data[slots])
                assert torch.equal(rows, meta[slots])
            assert reader.changed() == set(staging)
        finally:
            reader.close()
            source.stop()

    def test_neighbours_travel_as_one_buffer(self) -> None:
        slots = np.array([1, 2, 3, 7, 7, 8, 9], dtype=np.int32)
        staging = np.array([4, 5, 6, 7, 0, 1, 3], dtype=np.int32)
        assert module._runs(slots, staging) == [(1, 3), (7, 1), (7, 2), (9, 1)]


class TestWrongCalls:
    def test_an_error_in_the_peer_fails_the_read_and_not_the_connection(
        self, source: Source, reader: Reader
    ) -> None:
        connection = reader.transport.connect(source.handle, Tier.HOST)
        connection._slots = 10**6  # so that only the peer notices
        first = [reader.staging.start]
        with pytest.raises(TransferFailed, match="peer failed"):
            connection.fetch([SLOTS[Tier.HOST]], first, deadline=soon())
        assert reader.transport.quarantined(Tier.HOST) == frozenset()
        connection.fetch([0], first, deadline=soon())


class TestDeadAndHungPeers:
    def test_a_peer_killed_before_the_read_fails_it(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
        first = [big_reader.staging.start]
        connection.fetch([0], first, deadline=soon())
        mortal.signal(signal.SIGKILL)
        with pytest.raises(TransferFailed):
            connection.fetch([1], first, deadline=soon())
        assert not connection.alive()
        wait_until(lambda: not big_reader.transport.quarantined(Tier.HOST))
        with pytest.raises(TransportUnavailable):
            big_reader.transport.connect(mortal.handle, Tier.HOST)

    def test_a_peer_killed_during_the_read_fails_it(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
        mortal.signal(signal.SIGSTOP)
        failures: list[BaseException] = []
        begun = threading.Event()

        def read() -> None:
            begun.set()
            try:
                connection.fetch(range(256), list(big_reader.staging), deadline=soon())
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=read)
        thread.start()
        begun.wait()
        mortal.signal(signal.SIGKILL)
        thread.join()
        assert [type(failure) for failure in failures] == [TransferFailed]
        wait_until(lambda: not big_reader.transport.quarantined(Tier.HOST))

    def test_nothing_arrives_after_a_timeout_once_the_quarantine_is_over(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        connection = transport.connect(mortal.handle, Tier.HOST)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(range(256), staging, deadline=soon(0.2))
        wait_until(lambda: not transport.quarantined(Tier.HOST))
        mortal.signal(signal.SIGCONT)
        # Whatever the resumed peer still sends for the first read comes before this answer.
        rows = transport.connect(mortal.handle, Tier.HOST).fetch([7], staging[:1], deadline=soon())
        assert torch.equal(rows, mortal.contents[Tier.HOST][1][[7]])
        assert big_reader.changed() == set(staging[:1])

    def test_a_hung_peer_is_unavailable_to_connect(
        self, mortal: Source, big_reader: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CONNECT_LIMIT_S", 0.1)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransportUnavailable, match="no answer"):
            big_reader.transport.connect(mortal.handle, Tier.HOST)

    def test_close_does_not_wait_for_a_hung_peer(
        self, mortal: Source, big_reader: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch([1], [big_reader.staging.start], deadline=soon(0.1))
        big_reader.transport.close()
        assert not big_reader.transport._thread.is_alive()


class HoldingRef:
    """A peer's actor that takes hold of the buffers, as xoscar's NIXL channel does, and fails."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    async def push(self, tier: int, nonce: bytes, runs: Any, refs: list[Any]) -> Any:
        self.buffers = [type(ref).get_buffer(ref) for ref in refs]
        raise ConnectionError("cut off")


def test_staging_is_quarantined_while_xoscar_holds_a_buffer(reader: Reader) -> None:
    ref = HoldingRef()
    connection = module.XoscarConnection(reader.transport, ref, Tier.HOST, bytes(16), 48)
    with pytest.raises(TransferFailed, match="gone"):
        connection.fetch([1, 2, 9], [12, 13, 30], deadline=soon())
    assert reader.transport.quarantined(Tier.HOST) == {12, 13, 30}
    del ref.buffers[0]
    assert reader.transport.quarantined(Tier.HOST) == {12, 13, 30}
    ref.buffers.clear()
    assert reader.transport.quarantined(Tier.HOST) == frozenset()


class GpuSource:
    """A device tier on a fake GPU, offered over a pool of this process."""

    def __init__(self) -> None:
        kv = {"layer": torch.zeros(6, 16, SLOT_BYTES // 64)}
        layout, views = probe_layout(kv, num_blocks=6, block_tokens=16)
        self.cuda = FakeCuda()
        self.device = CudaDevice(layout, views, self.cuda)
        self.arena = DeviceArena.create(8, SLOT_BYTES, "gpu", self.cuda)
        self.host = Arena.create(1, SLOT_BYTES, "host")
        for slot, row in enumerate(host(self.arena.data)):
            row.fill_(slot + 1)
        self.arena.meta[:, 0] = torch.arange(1, 9)
        arenas: dict[Tier, Any] = {Tier.DEVICE: self.arena, Tier.HOST: self.host}
        self.transport = module.XoscarTransport(
            views={tier: SlotView(arena.data, arena.meta) for tier, arena in arenas.items()},
            nonces={tier: arena.handle().nonce for tier, arena in arenas.items()},
            slot_bytes=SLOT_BYTES,
            staging=range(1),
            host="127.0.0.1",
            device=self.device,
        )
        self.handle = handle_of(self.transport, arenas)

    def close(self) -> None:
        self.transport.close()
        self.device.close()
        self.arena.close()
        self.host.close()
        self.cuda.check_balanced()


class TestGpuMemory:
    @pytest.fixture
    def gpu(self) -> Iterator[GpuSource]:
        made = GpuSource()
        yield made
        made.close()

    def test_slots_of_a_gpu_travel_through_host_memory(
        self, gpu: GpuSource, reader: Reader
    ) -> None:
        connection = reader.transport.connect(gpu.handle, Tier.DEVICE)
        slots, staging = [6, 2, 3, 4, 2], [12, 20, 21, 22, 30]
        rows = connection.fetch(slots, staging, deadline=soon())
        assert rows[:, 0].tolist() == [slot + 1 for slot in slots]
        assert reader.host[staging].tolist() == [[slot + 1] * SLOT_BYTES for slot in slots]
        assert reader.changed() == set(staging)
        assert connection.staging is Tier.HOST

    def test_a_copy_that_cuda_refuses_fails_that_read_only(
        self, gpu: GpuSource, reader: Reader
    ) -> None:
        connection = reader.transport.connect(gpu.handle, Tier.DEVICE)
        gpu.cuda.fail("memcpy", "cudaErrorIllegalAddress")
        with pytest.raises(TransferFailed, match=r"peer failed.*cudaErrorIllegalAddress"):
            connection.fetch([1], [12], deadline=soon())
        assert connection.fetch([1], [12], deadline=soon())[0, 0] == 2

    def test_nothing_is_copied_from_the_gpu_after_close(
        self, gpu: GpuSource, reader: Reader
    ) -> None:
        reader.transport.connect(gpu.handle, Tier.DEVICE).fetch([1], [12], deadline=soon())
        gpu.transport.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("xavier-bounce")]


class TestLifecycle:
    def test_two_pools_of_one_process_reach_each_other(self, reader: Reader) -> None:
        other = Reader("xoscar-tcp")
        other.arenas[Tier.HOST].data[2].fill_(17)
        connection = reader.transport.connect(handle_of(other.transport, other.arenas), Tier.HOST)
        connection.fetch([2], [reader.staging.start], deadline=soon())
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
            reader.transport.connect(replace(source.handle, xoscar=None), Tier.HOST)

    @pytest.mark.parametrize("nonce", [bytes(16), b""], ids=["a guess", "none"])
    def test_whoever_does_not_know_the_arenas_nonce_gets_nothing(
        self, source: Source, reader: Reader, nonce: bytes
    ) -> None:
        """As when an address was guessed, or another worker has it by now."""
        arenas = {tier: replace(arena, nonce=nonce) for tier, arena in source.handle.arenas.items()}
        with pytest.raises(TransportUnavailable, match="not the one that was announced"):
            reader.transport.connect(replace(source.handle, arenas=arenas), Tier.HOST)
        good = reader.transport.connect(source.handle, Tier.HOST)
        forged = module.XoscarConnection(reader.transport, good._ref, Tier.HOST, nonce, 48)
        with pytest.raises(TransferFailed, match="not the one that was announced"):
            forged.fetch([1], [reader.staging.start], deadline=soon())
        assert reader.changed() == set()
        good.fetch([1], [reader.staging.start], deadline=soon())
        assert reader.changed() == {reader.staging.start}
