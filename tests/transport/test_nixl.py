# SPDX-License-Identifier: Apache-2.0
"""NIXL between real processes: bytes, deadlines, dead and hung peers, and what is left behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fetch_peer import (
    TCP_ONLY,
    Reader,
    Source,
    Spec,
    handle_of,
    make_arenas,
    make_transport,
    soon,
    views_of,
)

from tests.waiting import wait_until
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import (
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
)

nixl = pytest.importorskip("xinference_xavier.transport.nixl")
pytest.importorskip("nixl")


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    """A source that lives through the tests that do not hurt it."""
    made = Source(Spec("nixl"))
    yield made
    made.stop()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader("nixl")
    yield made
    made.close()


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A source over sockets, to be stopped or killed by one test."""
    for key, value in TCP_ONLY.items():
        monkeypatch.setenv(key, value)
    made = Source(Spec("nixl", env=TCP_ONLY, slot_bytes=65536, slots={Tier.HOST: 256}))
    yield made
    made.stop()


@pytest.fixture
def big_reader(mortal: Source) -> Iterator[Reader]:
    made = Reader("nixl", staging=256, host=260, slot_bytes=65536)
    yield made
    made.close()


class TestBytes:
    def test_neighbouring_slots_arrive_as_one_run(self, source: Source, reader: Reader) -> None:
        connection = reader.transport.connect(source.handle, Tier.HOST)
        slots, staging = list(range(8, 40)), list(reader.staging)
        connection.fetch(slots, staging, deadline=soon())
        assert torch.equal(reader.host[staging], source.contents[Tier.HOST][0][slots])

    def test_nothing_of_our_own_slots_outside_staging_is_written(
        self, source: Source, reader: Reader
    ) -> None:
        connection = reader.transport.connect(source.handle, Tier.HOST)
        staging = list(reader.staging)
        connection.fetch([5] * len(staging), staging, deadline=soon())
        assert reader.changed() == set(staging)
        assert reader.arenas[Tier.DEVICE].data.eq(0xA5).all()
        assert not reader.arenas[Tier.HOST].meta.any()

    def test_content_is_what_the_source_holds_now(self, reader: Reader, source: Source) -> None:
        connection = reader.transport.connect(source.handle, Tier.HOST)
        slot, staging = [3], [reader.staging.start]
        before = connection.fetch(slot, staging, deadline=soon()).clone()
        source.order("touch")
        after = connection.fetch(slot, staging, deadline=soon())
        assert torch.equal(after, before + 1)
        assert torch.equal(reader.host[staging], ~source.contents[Tier.HOST][0][slot])
        # Put it back for the other tests.
        for tensor, change in zip(source.contents[Tier.HOST], ("not", "add"), strict=True):
            tensor.bitwise_not_() if change == "not" else tensor.add_(1)

    def test_several_connections_to_one_peer_live_apart(
        self, source: Source, reader: Reader
    ) -> None:
        first = reader.transport.connect(source.handle, Tier.HOST)
        second = reader.transport.connect(source.handle, Tier.HOST)
        first.close()
        first.close()
        assert not first.alive()
        with pytest.raises(TransferFailed, match="closed"):
            first.fetch([0], [reader.staging.start], deadline=soon())
        second.fetch([0], [reader.staging.start], deadline=soon())
        second.close()
        third = reader.transport.connect(source.handle, Tier.HOST)
        third.fetch([1], [reader.staging.start], deadline=soon())
        assert third.alive()
        assert third.view() is None


def test_the_same_bytes_come_over_sockets(mortal: Source, big_reader: Reader) -> None:
    connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
    data, meta = mortal.contents[Tier.HOST]
    shuffled = random.Random(7)
    for count in (1, 100, 256):
        slots = shuffled.choices(range(256), k=count)
        staging = shuffled.sample(big_reader.staging, k=count)
        rows = connection.fetch(slots, staging, deadline=soon())
        assert torch.equal(big_reader.host[staging], data[slots])
        assert torch.equal(rows, meta[slots])


class TestWrongCalls:
    def test_a_deadline_in_the_past_posts_nothing(self, source: Source, reader: Reader) -> None:
        connection = reader.transport.connect(source.handle, Tier.HOST)
        with pytest.raises(TransferTimeout):
            connection.fetch([1], [reader.staging.start], deadline=0.0)
        assert reader.transport.quarantined(Tier.HOST) == frozenset()
        assert reader.changed() == set()
        assert connection.alive()


class TestDeadAndHungPeers:
    def test_a_peer_killed_before_the_read_fails_it(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
        first = [big_reader.staging.start]
        connection.fetch([0], first, deadline=soon())
        assert connection.alive()
        mortal.signal(signal.SIGKILL)
        with pytest.raises(TransferFailed):
            connection.fetch([1], first, deadline=soon())
        assert not connection.alive()
        wait_until(lambda: not big_reader.transport.quarantined(Tier.HOST))
        connection.close()
        with pytest.raises((TransferFailed, TransportUnavailable)):
            big_reader.transport.connect(mortal.handle, Tier.HOST).fetch(
                [1], first, deadline=soon(2.0)
            )

    def test_a_peer_killed_during_the_read_fails_it_within_the_deadline(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        connection = big_reader.transport.connect(mortal.handle, Tier.HOST)
        connection.fetch([0], [big_reader.staging.start], deadline=soon())
        mortal.signal(signal.SIGSTOP)  # so that the read is certainly under way
        failures: list[Exception] = []

        def read() -> None:
            try:
                connection.fetch(range(256), list(big_reader.staging), deadline=soon())
            except Exception as exc:
                failures.append(exc)

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: big_reader.transport._active == 1)
        mortal.signal(signal.SIGKILL)
        thread.join()
        assert [type(failure) for failure in failures] == [TransferFailed]
        wait_until(lambda: not big_reader.transport.quarantined(Tier.HOST))

    def test_a_hung_read_keeps_its_staging_until_it_really_ends(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        connection = transport.connect(mortal.handle, Tier.HOST)
        connection.fetch([0], staging[:1], deadline=soon())
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(range(256), staging, deadline=soon(0.2))
        connection.close()
        assert transport.quarantined(Tier.HOST) == frozenset(staging)
        mortal.signal(signal.SIGCONT)
        wait_until(lambda: not transport.quarantined(Tier.HOST))
        # The late write did come: this is what the quarantine is for.
        assert torch.equal(big_reader.host[staging], mortal.contents[Tier.HOST][0])
        again = transport.connect(mortal.handle, Tier.HOST)
        again.fetch([9], staging[:1], deadline=soon())

    def test_a_hung_read_whose_peer_dies_frees_its_staging(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        connection = transport.connect(mortal.handle, Tier.HOST)
        connection.fetch([0], staging[:1], deadline=soon())
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(range(256), staging, deadline=soon(0.2))
        mortal.signal(signal.SIGKILL)
        wait_until(lambda: not transport.quarantined(Tier.HOST))
        assert not connection.alive()
        frozen = big_reader.host.clone()
        assert transport.quarantined(Tier.HOST) == frozenset()
        assert torch.equal(big_reader.host, frozen)

    def test_closing_ends_a_hung_read_for_good(self, mortal: Source, big_reader: Reader) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        connection = transport.connect(mortal.handle, Tier.HOST)
        connection.fetch([0], staging[:1], deadline=soon())
        mortal.signal(signal.SIGSTOP)
        with pytest.raises(TransferTimeout):
            connection.fetch(range(256), staging, deadline=soon(0.2))
        transport.close()
        big_reader.host.fill_(0xA5)
        # The source ends of this (see nixl_path): whichever way, nothing arrives any more.
        mortal.signal(signal.SIGCONT)
        mortal.process.join(2.0)
        assert big_reader.changed() == set()

    def test_a_hung_peer_does_not_hold_up_the_reads_from_another(
        self, mortal: Source, big_reader: Reader
    ) -> None:
        transport, staging = big_reader.transport, list(big_reader.staging)
        healthy = Source(replace(mortal.spec, seed=2))
        try:
            hung = transport.connect(mortal.handle, Tier.HOST)
            hung.fetch([0], staging[:1], deadline=soon())
            mortal.signal(signal.SIGSTOP)
            stuck = threading.Thread(
                target=hung.fetch,
                args=(range(64), staging[:64]),
                kwargs={"deadline": soon()},
            )
            stuck.start()
            wait_until(lambda: transport._active == 1)
            rows = transport.connect(healthy.handle, Tier.HOST).fetch(
                range(64), staging[64:128], deadline=soon()
            )
            assert stuck.is_alive()
            assert torch.equal(rows, healthy.contents[Tier.HOST][1][:64])
            assert torch.equal(
                big_reader.host[staging[64:128]], healthy.contents[Tier.HOST][0][:64]
            )
            mortal.signal(signal.SIGCONT)
            stuck.join()
        finally:
            healthy.stop()


class TestHandshake:
    @pytest.mark.parametrize(
        "blob",
        [
            None,
            b"",
            b"\x80\x04.",
            b"[]",
            b"{}",
            b'{"format": 99}',
            b'{"format": 1, "agent": "?", "slot_bytes": 4096, "tiers": {}}',
            b'{"format": 1, "agent": "AAAA", "slot_bytes": 4096, "tiers": {}}',
            b'{"format": 1, "agent": "AAAA", "slot_bytes": 4096, "tiers": {"7": []}}',
            b'{"format": 1, "agent": "AAAA", "slot_bytes": 4096, "path": {}, "tiers": '
            b'{"1": [["DRAM", 0, 99999999999999999999999, 4096], ["DRAM", 0, 0, 16]]}}',
            b"[" * 100_000,
        ],
    )
    def test_a_malformed_handle_makes_the_peer_unavailable(
        self, reader: Reader, source: Source, blob: bytes | None
    ) -> None:
        with pytest.raises(TransportUnavailable):
            reader.transport.connect(replace(source.handle, nixl=blob), Tier.HOST)

    def test_a_region_that_the_peer_did_not_register_is_refused(
        self, reader: Reader, source: Source
    ) -> None:
        assert source.handle.nixl is not None
        advert = nixl.decode(source.handle.nixl)
        host = advert.tiers[Tier.HOST]
        moved = replace(host, data=replace(host.data, address=4096))
        blob = replace(advert, tiers={Tier.HOST: moved}).encode()
        with pytest.raises(TransportUnavailable):
            reader.transport.connect(replace(source.handle, nixl=blob), Tier.HOST)
        # and the failed attempt left nothing that hinders a good one
        reader.transport.connect(source.handle, Tier.HOST).fetch(
            [0], [reader.staging.start], deadline=soon()
        )

    def test_a_peer_that_only_sockets_reach_is_left_to_others(
        self, source: Source, reader: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("UCX_TLS", raising=False)
        assert source.handle.nixl is not None
        advert = nixl.decode(source.handle.nixl)
        elsewhere = [
            replace(advert.path, pid=2**22 - 1),  # no such process here
            replace(advert.path, pid=os.getpid()),  # a number that is somebody else's here
            replace(advert.path, token="00" * 16),  # memory that holds something else
        ]
        for path in elsewhere:
            blob = replace(advert, path=path).encode()
            with pytest.raises(TransportUnavailable, match="only sockets"):
                reader.transport.connect(replace(source.handle, nixl=blob), Tier.HOST)
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        reader.transport.connect(replace(source.handle, nixl=blob), Tier.HOST)

    def test_a_worker_does_not_read_from_itself(self, reader: Reader) -> None:
        with pytest.raises(TransportUnavailable, match="itself"):
            reader.transport.connect(handle_of(reader.transport, reader.arenas), Tier.HOST)

    def test_an_empty_device_tier_is_left_out(self, source: Source, reader: Reader) -> None:
        views = views_of(reader.arenas)
        empty = replace(
            views[Tier.DEVICE],
            data=views[Tier.DEVICE].data[:0],
            meta=views[Tier.DEVICE].meta[:0],
        )
        transport = nixl.NixlTransport(
            views={**views, Tier.DEVICE: empty},
            slot_bytes=reader.arenas[Tier.HOST].slot_bytes,
            staging={Tier.HOST: reader.staging},
            agent_name="test",
        )
        peer = replace(source.handle, nixl=transport.metadata())
        reader.transport.connect(peer, Tier.HOST)
        with pytest.raises(TransportUnavailable, match="does not offer its DEVICE tier"):
            reader.transport.connect(peer, Tier.DEVICE)
        transport.close()


class TestLifecycle:
    def test_threads_and_files_of_an_agent_are_gone_after_close(self) -> None:
        def held() -> tuple[int, int]:
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        Reader("nixl").close()  # UCX keeps some things of its first context for ever
        before = held()
        for _ in range(3):
            Reader("nixl").close()
        # A thread that was joined may still be leaving the kernel's list.
        wait_until(lambda: held() <= before)

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
    def test_the_progress_thread_is_not_pinned_with_its_creator(self) -> None:
        allowed = os.sched_getaffinity(0)
        before = set(os.listdir("/proc/self/task"))
        os.sched_setaffinity(0, {min(allowed)})
        try:
            reader = Reader("nixl")
            assert os.sched_getaffinity(0) == {min(allowed)}
            new = set(os.listdir("/proc/self/task")) - before
            masks = [os.sched_getaffinity(int(task)) for task in new]
            reader.close()
        finally:
            os.sched_setaffinity(0, allowed)
        assert masks
        assert all(mask == allowed for mask in masks)

    def test_without_nixl_the_reason_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl._bindings", None)
        with pytest.raises(TransportUnavailable, match="not installed"):
            make_transport("nixl", make_arenas({Tier.HOST: 2}, 4096), range(2))

    @pytest.mark.parametrize("staging", [range(0), range(1, 9), range(-1, 1), range(0, 4, 2)])
    def test_staging_must_be_a_range_of_host_slots(self, staging: range) -> None:
        with pytest.raises(ValueError, match="staging"):
            make_transport("nixl", make_arenas({Tier.HOST: 4}, 4096), staging)
