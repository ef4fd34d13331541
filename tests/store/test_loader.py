# SPDX-License-Identifier: Apache-2.0
"""The load engine: a row is right or reported, whatever the source does."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvcache import Cache, table
from loader_rig import STAGING, D, H, Rig, rows

from tests.deferring import placed
from tests.waiting import WAIT_S, drain, wait_until
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.copier import CopyEngine, EngineClosed
from xinference_xavier.store.device import Mark
from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    LoadSegment,
    StoreJob,
    Tier,
)
from xinference_xavier.transport.base import (
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
)
from xinference_xavier.transport.faults import FAIR_S
from xinference_xavier.transport.loader import OVERDUE_S, LoadEngine
from xinference_xavier.transport.select import Transports


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(**settings: object) -> Rig:
        rigs.append(Rig(kind=kind, **settings))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


@pytest.fixture(params=["mapped", "fetching"])
def rig(make: Callable[..., Rig], request: pytest.FixtureRequest) -> Rig:
    return make(mapped=request.param == "mapped")


FIVE = rows((0, 20), (1, 21), (7, 22), (6, 23), (2, 30))


def test_own_tiers_are_loaded_without_a_transport(rig: Rig) -> None:
    result = rig.load((OWN_STORE, rows((3, 8), (4, 9)) + rows((5, 10), tier=D)))
    (part,) = result.segments
    assert (part.failed_rows, part.reason, part.transport) == (set(), None, "local")
    assert part.nbytes == 3 * rig.cache.layout.slot_bytes
    for slot, block in [(3, 8), (4, 9), (5, 10)]:
        assert rig.has(block, rig.own, slot)
    assert rig.untouched(7, 11)
    assert rig.transport.connections == []


def test_one_load_joins_own_store_and_two_peers_into_one_prefix(rig: Rig) -> None:
    result = rig.load(
        (OWN_STORE, rows((3, 0))),
        (1, rows((4, 1)) + rows((5, 2), tier=D)),
        (2, rows((4, 3))),
    )
    assert [part.failed_rows for part in result.segments] == [set()] * 3
    assert [part.member for part in result.segments] == [OWN_STORE, 1, 2]
    assert result.segments[1].transport == "faulty"
    assert rig.has(0, rig.own, 3)
    assert rig.has(1, rig.peers[1], 4)
    assert rig.has(2, rig.peers[1], 5)
    assert rig.has(3, rig.peers[2], 4)
    assert result.request_id == "request-1"


def test_a_fetch_takes_no_more_slots_than_are_staged(make: Callable[..., Rig]) -> None:
    rig = make(mapped=False)
    ten = rows(*[(slot, slot + 20) for slot in range(10)])
    assert rig.load((1, ten)).segments[0].failed_rows == set()
    assert [len(slots) for slots, _ in rig.transport.fetches] == [4, 4, 2]
    assert all(set(staging) <= set(STAGING) for _, staging in rig.transport.fetches)
    assert all(rig.has(slot + 20, rig.peers[1], slot) for slot in range(10))


def test_a_connection_is_opened_once_and_kept(rig: Rig) -> None:
    for _ in range(3):
        rig.load((1, FIVE))
    assert len(rig.transport.connections) == 1


@pytest.mark.parametrize("found", [0, 999])
def test_a_slot_with_another_generation_is_a_failed_row(rig: Rig, found: int) -> None:
    rig.peers[1].arenas[Tier.HOST].meta[7, 0] = found
    (part,) = rig.load((1, FIVE)).segments
    assert 2 in part.failed_rows
    assert part.reason == "generation"
    assert rig.has(20, rig.peers[1], 0)
    assert rig.has(21, rig.peers[1], 1)
    assert rig.untouched(22)


def test_a_promise_of_generation_zero_is_never_kept(rig: Rig) -> None:
    rig.peers[1].arenas[Tier.HOST].meta[3, 0] = 0
    (part,) = rig.load((1, [(H, 3, 0, 20)])).segments
    assert (part.failed_rows, part.reason) == ({0}, "generation")


def test_a_slot_reassigned_during_the_copy_is_a_failed_row(make: Callable[..., Rig]) -> None:
    rig = make(mapped=True)
    meta = rig.peers[1].arenas[Tier.HOST].meta

    def reassign() -> None:
        meta[7, 0] = 999

    rig.device.then["scatter"] = reassign
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({2}, "generation")


def test_own_slots_are_checked_too(rig: Rig) -> None:
    rig.own.arenas[Tier.DEVICE].meta[2, 0] = 1
    (part,) = rig.load((OWN_STORE, rows((1, 20), (2, 21), tier=D))).segments
    assert (part.failed_rows, part.reason) == ({1}, "generation")


def test_after_a_failed_row_the_rest_of_the_prefix_is_not_loaded(rig: Rig) -> None:
    rig.peers[1].arenas[Tier.HOST].meta[1, 0] = 999
    result = rig.load((OWN_STORE, rows((0, 0))), (1, FIVE), (2, rows((0, 1), (1, 2))))
    own, failed, skipped = result.segments
    assert own.failed_rows == set()
    assert 1 in failed.failed_rows
    assert (skipped.failed_rows, skipped.reason) == ({0, 1}, "skipped")
    assert rig.untouched(1, 2)
    assert len(rig.transport.connections) == 1


def test_a_read_that_fails_keeps_what_was_loaded_before_it(make: Callable[..., Rig]) -> None:
    rig = make(mapped=False)

    def fault(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        if n == 2:
            raise TransferFailed("broken")
        return meta

    rig.transport.fault = fault
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({4}, "transfer")
    assert rig.has(23, rig.peers[1], 6)
    assert rig.untouched(30)
    assert part.nbytes == 4 * rig.cache.layout.slot_bytes


def test_a_path_that_failed_is_opened_anew_by_the_next_load(make: Callable[..., Rig]) -> None:
    rig = make(mapped=False)

    def broken(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        raise TransferFailed("broken")

    rig.transport.fault = broken
    rig.load((1, FIVE))
    assert rig.transport.connections[0].closed.is_set()
    rig.transport.fault = lambda _n, _staging, meta: meta
    assert rig.load((1, FIVE)).segments[0].failed_rows == set()
    assert len(rig.transport.connections) == 2


@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_short_data_is_a_failed_read(make: Callable[..., Rig], delivered: int) -> None:
    rig = make(mapped=False)
    rig.transport.fault = lambda _n, _staging, meta: meta[:delivered]
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "transfer")
    assert rig.untouched(20, 21, 22, 23, 30)


def test_slots_of_a_timed_out_read_stay_out_of_use_until_it_is_over(
    make: Callable[..., Rig],
) -> None:
    rig = make(mapped=False)

    def never(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        rig.transport.stuck.update(staging)
        raise TransferTimeout("never ended")

    rig.transport.fault = never
    (part,) = rig.load((1, rows((0, 20), (1, 21), (2, 22)))).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2}, "timeout")
    assert rig.untouched(20, 21, 22)
    rig.transport.fault = lambda _n, _staging, meta: meta
    assert rig.load((2, FIVE)).segments[0].failed_rows == set()
    late = set(rig.transport.fetches[0][1])
    assert all(not late & set(staging) for _, staging in rig.transport.fetches[1:])
    rig.transport.stuck.clear()
    rig.transport.fetches.clear()
    rig.load((2, FIVE))
    assert len(rig.transport.fetches[0][1]) == len(STAGING)
    assert rig.transport.connections[0].closed.is_set()


def test_a_read_that_had_too_little_time_does_not_cost_its_connection(
    make: Callable[..., Rig],
) -> None:
    rig = make(mapped=False)
    rig.load((1, FIVE))

    def late(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        raise TransferTimeout("late")

    rig.transport.fault = late
    (part,) = rig.load((1, FIVE), timeout_s=FAIR_S / 2).segments
    assert part.reason == "timeout"
    assert not rig.transport.connections[0].closed.is_set()


def test_the_quarantine_is_known_with_the_result_and_watched_until_it_ends(
    make: Callable[..., Rig],
) -> None:
    rig = make(mapped=False)
    assert rig.engine.quarantined == 0

    def never(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        rig.transport.stuck.update(staging)
        raise TransferTimeout("never ended")

    rig.transport.fault = never
    rig.load((1, rows((0, 20), (1, 21), (2, 22))))
    assert rig.engine.quarantined == 3
    rig.transport.stuck.clear()
    wait_until(lambda: rig.engine.quarantined == 0)


def test_a_peer_that_delivers_no_first_slot_is_unavailable(make: Callable[..., Rig]) -> None:
    rig = make(mapped=False)

    def broken(staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        raise TransferFailed("broken")

    rig.transport.probe = broken
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "unavailable")
    assert [connection.closed.is_set() for connection in rig.transport.opened] == [True]
    assert rig.transport.fetches == []


@pytest.mark.parametrize("where", ["connecting", "reading"])
def test_hung_peers_do_not_hold_up_a_restore_from_our_own_store(
    make: Callable[..., Rig], where: str
) -> None:
    rig = make(mapped=False)
    inside, go = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        inside.release()
        assert go.wait(WAIT_S)

    def hung_read(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        hang()
        return meta

    if where == "connecting":
        rig.transport.connecting = hang
    else:
        rig.transport.fault = hung_read
    hung = [rig.submit((member, rows((0, 20 + member)))) for member in (1, 2)]
    hung.append(rig.submit((1, rows((1, 25)))))
    for _ in range(2):
        assert inside.acquire(timeout=WAIT_S)
    own = rig.submit((OWN_STORE, rows((3, 8))))
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(rig.engine.poll()) or results))
    assert [(r.job_id, r.segments[0].failed_rows) for r in results] == [(own, set())]
    assert rig.has(8, rig.own, 3)
    go.set()
    assert sorted(r.job_id for r in drain(rig.engine)) == hung


def test_hung_peers_do_not_hold_up_loads_from_mapped_memory(make: Callable[..., Rig]) -> None:
    rig = make(mapped=True)
    rig.load((1, FIVE))
    inside, go = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        inside.release()
        assert go.wait(WAIT_S)

    rig.transport.connecting = hang
    rig.handles[3] = dataclasses.replace(rig.handles[2], rank=3)
    hung = [rig.submit((member, rows((0, 20)))) for member in (2, 3)]
    for _ in range(2):
        assert inside.acquire(timeout=WAIT_S)
    quick = rig.submit((OWN_STORE, rows((3, 8))), (1, rows((4, 9))))
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(rig.engine.poll()) or results))
    assert [r.job_id for r in results] == [quick]
    assert rig.has(9, rig.peers[1], 4)
    go.set()
    assert sorted(r.job_id for r in drain(rig.engine)) == hung


@pytest.mark.parametrize("where", ["connecting", "reading"])
def test_a_load_whose_thread_hangs_is_given_up_and_never_writes_again(
    make: Callable[..., Rig], where: str
) -> None:
    rig = make(mapped=False, threads=2)
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    def hung_read(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        hang()
        return meta

    if where == "connecting":
        rig.transport.connecting = hang
    else:
        rig.transport.fault = hung_read
    rig.submit((OWN_STORE, rows((3, 8))), (1, rows((0, 20))), (2, rows((1, 21))), timeout_s=0.2)
    assert inside.wait(WAIT_S)
    (result,) = drain(rig.engine)
    told = [(part.failed_rows, part.reason) for part in result.segments]
    assert told == [({0}, "skipped"), ({0}, "timeout"), ({0}, "skipped")]
    # All threads that may wait for peers hang: the next such load does not even try.
    refused = rig.load((OWN_STORE, rows((4, 9))), (2, rows((2, 22)))).segments
    assert [(part.failed_rows, part.reason) for part in refused] == [
        ({0}, "skipped"),
        ({0}, "unavailable"),
    ]
    assert rig.load((OWN_STORE, rows((4, 9)))).segments[0].failed_rows == set()
    go.set()
    wait_until(lambda: rig.load((2, rows((2, 22)))).segments[0].failed_rows == set())
    assert rig.untouched(20, 21)
    assert rig.engine.poll() == []


def test_a_restore_that_hangs_keeps_no_peer_from_being_read(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(mapped=False, threads=2)
    connecting, waiting, go = threading.Event(), threading.Event(), threading.Event()
    ready, begin = rig.runs_on.after, threading.Event()

    def connect() -> None:
        connecting.set()
        assert begin.wait(WAIT_S)

    def after(mark: Mark | None) -> None:
        if threading.current_thread().name == "xavier-load-0":
            waiting.set()
            assert go.wait(WAIT_S)
        ready(mark)

    rig.transport.connecting = connect
    monkeypatch.setattr(rig.runs_on, "after", after)
    peer = rig.submit((1, rows((0, 20))))
    assert connecting.wait(WAIT_S)
    rig.submit((OWN_STORE, rows((3, 8))), timeout_s=0.2)
    assert waiting.wait(WAIT_S)
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(rig.engine.poll()) or results))
    assert [part.reason for part in results[0].segments] == ["timeout"]
    begin.set()
    (loaded,) = drain(rig.engine)
    assert (loaded.job_id, loaded.segments[0].failed_rows) == (peer, set())
    assert rig.load((2, rows((2, 22)))).segments[0].failed_rows == set()
    go.set()
    rig.close()
    assert rig.untouched(8)


def test_a_load_that_writes_is_never_given_up(make: Callable[..., Rig]) -> None:
    rig = make()
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.before["scatter"] = hang
    rig.submit((1, rows((0, 20))), timeout_s=FAIR_S)
    assert inside.wait(WAIT_S)
    long_after = time.monotonic() + FAIR_S + 4 * OVERDUE_S
    wait_until(lambda: time.monotonic() > long_after or rig.engine.poll())
    assert rig.engine.pending == 1
    go.set()
    (result,) = drain(rig.engine)
    assert result.segments[0].failed_rows == set()
    assert rig.has(20, rig.peers[1], 0)


def test_a_load_that_finds_no_staging_slot_in_time_has_failed_rows(
    make: Callable[..., Rig],
) -> None:
    rig = make(mapped=False)
    rig.transport.stuck.update(STAGING)

    def never(n: int, staging: list[int], meta: torch.Tensor) -> torch.Tensor:
        raise TransferTimeout("never ended")

    rig.transport.fault = never
    rig.load((1, rows(*[(slot, slot + 20) for slot in range(4)])))
    (part,) = rig.load((1, FIVE), timeout_s=0.05).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "timeout")
    assert len(rig.transport.fetches) == 1


def test_a_load_that_begins_too_late_reads_nothing(rig: Rig) -> None:
    result = rig.load((OWN_STORE, rows((0, 20))), (1, FIVE), timeout_s=0.0)
    own, peer = result.segments
    assert (own.failed_rows, own.reason) == ({0}, "timeout")
    assert (peer.failed_rows, peer.reason) == ({0, 1, 2, 3, 4}, "skipped")
    assert rig.untouched(20, 21)


def damage(rig: Rig, slot: int) -> None:
    rig.peers[1].arenas[Tier.HOST].data[slot, 777] ^= 1


@pytest.mark.parametrize("mapped", [True, False])
def test_a_flipped_byte_is_found_when_verification_is_on(
    make: Callable[..., Rig], mapped: bool
) -> None:
    rig = make(mapped=mapped, verify="checksum")
    damage(rig, 7)
    (part,) = rig.load((1, FIVE)).segments
    assert 2 in part.failed_rows
    assert not part.failed_rows & {0, 1, 3}
    assert part.reason == "checksum"
    assert part.verified_blocks == 5 - len(part.failed_rows)


@pytest.mark.parametrize("mapped", [True, False])
def test_intact_blocks_are_all_verified(make: Callable[..., Rig], mapped: bool) -> None:
    rig = make(mapped=mapped, verify="checksum")
    many = rows(*[(slot % 12, slot) for slot in range(37)])
    result = rig.load((1, many), (OWN_STORE, rows((0, 38))))
    assert [part.verified_blocks for part in result.segments] == [37, 1]
    assert [part.failed_rows for part in result.segments] == [set(), set()]


def test_a_kv_block_damaged_by_the_copy_itself_is_found(make: Callable[..., Rig]) -> None:
    rig = make(verify="checksum")

    def clobber() -> None:
        rig.cache.views[1][21, 5] ^= 64

    rig.device.then["scatter"] = clobber
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({1}, "checksum")


def test_a_slot_without_checksum_does_not_pass_verification(make: Callable[..., Rig]) -> None:
    rig = make(verify="checksum")
    rig.peers[1].arenas[Tier.HOST].meta[:, 1] = 0
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "checksum")
    assert part.verified_blocks == 0


def test_without_verification_nothing_counts_as_verified(rig: Rig) -> None:
    damage(rig, 7)
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.verified_blocks) == (set(), 0)


def refuse() -> None:
    raise TransportUnavailable("no route")


@pytest.mark.parametrize("case", ["no handle", "no route", "other layout"])
def test_a_peer_that_cannot_be_reached_is_unavailable(rig: Rig, case: str) -> None:
    if case == "no handle":
        del rig.handles[1]
    elif case == "no route":
        rig.transport.connecting = refuse
    else:
        rig.handles[1] = dataclasses.replace(rig.handles[1], layout_digest="other")
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "unavailable")
    assert part.transport == "none"
    assert rig.transport.connections == []


def test_a_refused_peer_is_tried_again_by_the_next_load(rig: Rig) -> None:
    rig.transport.connecting = refuse
    rig.load((1, FIVE))
    rig.transport.connecting = lambda: None
    assert rig.load((1, FIVE)).segments[0].failed_rows == set()


@pytest.mark.parametrize("row", [(H, 0, 100, 40), (H, 0, 100, -1), (H, 16, 100, 3), (H, -1, 1, 3)])
def test_rows_outside_cache_or_arena_fail_without_a_copy(
    make: Callable[..., Rig], row: tuple[int, ...]
) -> None:
    rig = make(mapped=True)
    (part,) = rig.load((1, [row])).segments
    assert (part.failed_rows, part.reason) == ({0}, "transfer")
    assert rig.device.calls == []


def test_an_unforeseen_error_fails_the_rows_and_spares_the_thread(make: Callable[..., Rig]) -> None:
    rig = make(threads=1)

    def boom() -> None:
        raise RuntimeError("boom")

    rig.device.before["scatter"] = boom
    (part,) = rig.load((1, FIVE)).segments
    assert (part.failed_rows, part.reason) == ({0, 1, 2, 3, 4}, "transfer")
    rig.device.before.clear()
    assert rig.load((1, FIVE)).segments[0].failed_rows == set()


def test_two_loads_of_one_peer_share_the_connection_that_is_being_opened(rig: Rig) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.transport.connecting = slow
    rig.submit((1, rows((0, 20))))
    rig.submit((1, rows((1, 21))))
    assert inside.wait(WAIT_S)
    go.set()
    assert [r.segments[0].failed_rows for r in drain(rig.engine)] == [set(), set()]
    assert len(rig.transport.connections) == 1


def test_a_peer_with_a_new_handle_gets_a_new_connection(rig: Rig) -> None:
    rig.load((1, FIVE))
    rig.handles[1] = dataclasses.replace(rig.handles[1], rank=1)
    assert rig.load((1, FIVE)).segments[0].failed_rows == set()
    old, new = rig.transport.connections
    assert old.closed.is_set()
    assert not new.closed.is_set()


def test_a_connection_in_use_is_closed_by_its_last_user(make: Callable[..., Rig]) -> None:
    rig = make(mapped=True)
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        rig.device.before.clear()
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.before["scatter"] = hold
    rig.submit((1, rows((0, 20))))
    assert inside.wait(WAIT_S)
    rig.handles[1] = dataclasses.replace(rig.handles[1], rank=1)
    rig.submit((1, rows((1, 21))))
    wait_until(lambda: len(rig.transport.connections) == 2)
    assert not rig.transport.connections[0].closed.is_set()
    go.set()
    assert len(drain(rig.engine)) == 2
    assert rig.transport.connections[0].closed.is_set()
    assert rig.has(20, rig.peers[1], 0)


def test_a_dead_peer_is_let_go_without_any_load(make: Callable[..., Rig]) -> None:
    rig = make(reap_s=0.01)
    rig.load((1, FIVE), (2, rows((0, 1))))
    dead, living = rig.transport.connections
    dead.dead = True
    assert dead.closed.wait(WAIT_S)
    assert not living.closed.is_set()


def test_a_transport_that_cannot_tell_whether_a_peer_lives_stops_nothing(
    make: Callable[..., Rig],
) -> None:
    rig = make(reap_s=0.01, threads=1)
    rig.load((1, FIVE))
    asked = threading.Event()

    def fail() -> bool:
        asked.set()
        raise RuntimeError("boom")

    rig.transport.connections[0].alive = fail
    assert asked.wait(WAIT_S)
    assert rig.load((1, FIVE)).segments[0].failed_rows == set()


def test_closing_ends_queued_loads_and_closes_connections(rig: Rig) -> None:
    for _ in range(4):
        rig.submit((1, FIVE))
    assert rig.engine.close(WAIT_S)
    assert rig.engine.close(WAIT_S)
    results = rig.engine.poll()
    assert [result.segments[0].failed_rows for result in results] == [set()] * 4
    assert all(connection.closed.is_set() for connection in rig.transport.connections)
    with pytest.raises(EngineClosed):
        rig.submit((1, FIVE))
    assert rig.engine.pending == 0


def test_closing_past_the_deadline_fails_what_had_not_begun(make: Callable[..., Rig]) -> None:
    rig = make(mapped=True, threads=1)
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go.wait(WAIT_S)

    rig.device.before["scatter"] = hold
    rig.submit((1, rows((0, 20))))
    rig.submit((1, rows((1, 21))))
    assert inside.wait(WAIT_S)
    assert not rig.engine.close(0.0)
    assert rig.engine.poll() == []
    assert not rig.transport.connections[0].closed.is_set()
    go.set()
    assert rig.engine.close(WAIT_S)
    running, waiting = rig.engine.poll()
    assert running.segments[0].failed_rows == set()
    assert (waiting.segments[0].failed_rows, waiting.segments[0].reason) == ({0}, "closed")
    assert rig.transport.connections[0].closed.is_set()


def test_a_closed_store_keeps_no_memory(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.load((OWN_STORE, FIVE))
    files = [arena.handle().inode for arena in rig.own.arenas.values()]
    rig.close()
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in lines if "memfd" in line and int(line.split()[4]) in files]


def test_every_bfloat16_pattern_survives_store_demotion_and_load(kind: str) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    kv = {"layer": patterns.clone().view(torch.bfloat16).view(8, 16, 512)}
    cache = Cache(kv, num_blocks=8)
    arenas = {tier: Arena.create(9, cache.layout.slot_bytes, "bf16") for tier in Tier}
    device = placed(cache.device, kind)
    means = {"layout": cache.layout, "arenas": arenas, "device": device}
    copies = CopyEngine(**means, verify="checksum")
    blocks = range(8)
    copies.submit(StoreJob(1, table([], 3), table([(b, D, b, 1 + b, -1) for b in blocks], 5)))
    copies.submit(StoreJob(2, table([(b, 7 - b, 20 + b) for b in blocks], 3), table([], 5)))
    assert copies.close(WAIT_S)
    assert not any(r.failed_stores | r.failed_demotions for r in copies.poll())
    kv["layer"].view(torch.int16).fill_(-1)
    loads = LoadEngine(
        **means,
        verify="checksum",
        staging={Tier.HOST: range(8, 9)},
        transports=Transports([], layout_digest=cache.layout.digest()),
    )
    segment = LoadSegment(OWN_STORE, table([(H, 7 - b, 20 + b, b) for b in blocks], 4))
    loads.submit(LoadJob(1, "r", (segment,), WAIT_S), {})
    (result,) = drain(loads)
    loads.close(WAIT_S)
    for arena in arenas.values():
        arena.close()
    assert result.segments[0].verified_blocks == 8
    assert torch.equal(kv["layer"].view(torch.int16).flatten(), patterns)


def test_an_empty_load_succeeds(rig: Rig) -> None:
    assert rig.load().segments == []
    assert rig.load((1, [])).segments[0].failed_rows == set()


def test_failed_rows_are_plain_integers(rig: Rig) -> None:
    rig.peers[1].arenas[Tier.HOST].meta[0, 0] = 5
    (part,) = rig.load((1, FIVE)).segments
    assert {type(row) for row in part.failed_rows} == {int}
