# SPDX-License-Identifier: Apache-2.0
"""Control runtimes, peers and directories in real processes that talk over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from control_harness import (
    FINGERPRINT,
    NAMESPACE,
    PATIENT,
    QUICK,
    SECRET,
    Cluster,
    RemoteProcess,
    Replica,
    cluster,
    eventually,
    key,
    key_of,
    keys,
    serve_directory,
)

from xinference_xavier.control.client import Contact, Member, directory_ref, reach, route_address
from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import (
    ControlRuntime,
    Reservation,
    ReservationState,
    directory_members,
    peer_call,
)
from xinference_xavier.identity import fingerprint, traits
from xinference_xavier.store.index import SnapshotIndex

GRANTED, FAILED = ReservationState.GRANTED, ReservationState.FAILED


@pytest.fixture
def group() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


def settled(reservation: Reservation) -> Reservation:
    eventually(lambda: reservation.state is not ReservationState.PENDING)
    return reservation


def counter(replica: Replica, name: str) -> int:
    count: int = replica.runtime.status()["counters"].get(name, 0)
    return count


def call(contact: Contact, method: str, *args: Any) -> dict[str, Any]:
    return asyncio.run(peer_call(contact, method, *args))


def members_at(directory: RemoteProcess, secret: str | None = SECRET) -> list[Member]:
    return asyncio.run(directory_members(directory.address, key_of(secret)))


# -- leases ----------------------------------------------------------------------------------------


def test_a_source_whose_engine_never_steps_grants_and_gets_its_blocks_back(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    source.call("fill", 0, 20)
    number = eventually(lambda: reader.sees(0, 20))

    reservation = settled(reader.runtime.reserve(number, keys(0, 30), "request"))
    assert reservation.state is GRANTED
    assert [row[1] for row in reservation.rows] == list(range(20))
    assert source.call("leases") == 1

    reader.runtime.release(reservation)
    reader.runtime.release(reservation)
    assert reservation.state is ReservationState.RELEASED
    eventually(lambda: source.call("leases") == 0)
    assert counter(reader, "given back") == 1


def test_a_held_lease_outlives_its_promise_and_an_unheld_one_does_not(group: Cluster) -> None:
    directory = group.directory()
    timing = replace(PATIENT, promise_s=0.5, lease_s=1.0, renew_s=0.1)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))

    held = settled(reader.runtime.reserve(number, keys(0, 2), "held"))
    forgotten = settled(reader.runtime.reserve(number, keys(2, 4), "forgotten"))
    first_expiry = forgotten.expires
    reader.runtime.hold(held)
    eventually(lambda: source.call("leases") == 1)
    eventually(lambda: held.expires > first_expiry + timing.lease_s)
    assert source.call("leases") == 1
    assert held.state is GRANTED
    assert forgotten.expires == first_expiry


def test_a_grant_that_arrives_after_the_release_is_given_back(group: Cluster) -> None:
    directory = group.directory()
    timing = replace(PATIENT, reserve_timeout_s=30.0, promise_s=30.0, lease_s=30.0)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))

    source.signal(signal.SIGSTOP)
    reservation = reader.runtime.reserve(number, keys(0, 4), "request")
    eventually(lambda: reader.runtime.status()["calls_in_flight"])
    reader.runtime.release(reservation)
    source.signal(signal.SIGCONT)
    eventually(lambda: counter(reader, "given back") == 1)
    eventually(lambda: source.call("leases") == 0)
    assert reservation.state is ReservationState.RELEASED


def test_a_hint_that_is_wrong_fails_without_blaming_the_member(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    source.call("fill", 0, 1)
    number = eventually(lambda: reader.sees(0, 1))
    for _ in range(5):
        missed = settled(reader.runtime.reserve(number, keys(50, 60), "request"))
        assert (missed.state, missed.reason) == (FAILED, "not held")
    assert reader.runtime.usable_mask() == 1 << number
    unknown = settled(reader.runtime.reserve(number + 5, keys(0, 1), "request"))
    assert (unknown.state, unknown.reason) == (FAILED, "unknown member")


def test_a_hung_peer_fails_by_the_deadline_and_is_used_again_once_it_answers(
    group: Cluster,
) -> None:
    directory = group.directory()
    timing = replace(PATIENT, reserve_timeout_s=0.1, call_timeout_s=0.2, breaker_min_s=0.05)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))

    source.signal(signal.SIGSTOP)
    for _ in range(3):
        hung = settled(reader.runtime.reserve(number, keys(0, 4), "request"))
        assert (hung.state, hung.reason) == (FAILED, "no answer within 0.1 s")
    eventually(lambda: reader.runtime.usable_mask() == 0)
    assert reader.runtime.status()["peers"][0]["breaker"] == "open"

    source.signal(signal.SIGCONT)
    eventually(lambda: reader.runtime.usable_mask() == 1 << number)
    eventually(
        lambda: settled(reader.runtime.reserve(number, keys(0, 4), "again")).state is GRANTED
    )
    assert reader.runtime.status()["peers"][0]["breaker"] == "closed"


def test_failing_loads_open_the_breaker_though_every_reservation_is_granted(
    group: Cluster,
) -> None:
    directory = group.directory()
    timing = replace(PATIENT, breaker_min_s=30.0)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))
    mask = 1 << number

    def load(ok: bool) -> None:
        reservation = settled(reader.runtime.reserve(number, keys(0, 4), "request"))
        assert reservation.state is GRANTED
        reader.runtime.hold(reservation)
        reader.runtime.report_load(number, ok, None if ok else "generation")
        reader.runtime.release(reservation)

    load(False)
    load(True)
    for _ in range(3):
        assert reader.runtime.usable_mask() == mask
        load(False)
    eventually(lambda: reader.runtime.usable_mask() == 0)
    (peer,) = reader.runtime.status()["peers"]
    assert (peer["breaker"], peer["reason"]) == ("open", "generation")


def test_after_failed_loads_one_load_at_a_time_tries_until_one_is_good(group: Cluster) -> None:
    directory = group.directory()
    timing = replace(PATIENT, breaker_min_s=0.02, promise_s=8.0)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))

    def reserve() -> Reservation:
        return settled(reader.runtime.reserve(number, keys(0, 4), "request"))

    def breaker() -> str:
        return str(reader.runtime.status()["peers"][0]["breaker"])

    for _ in range(3):
        reader.runtime.report_load(number, False, "generation")
    eventually(lambda: reader.runtime.usable_mask() == 0)
    eventually(reader.runtime.usable_mask)
    assert breaker() == "half-open"

    trial = reserve()
    assert trial.state is GRANTED
    assert reader.runtime.usable_mask() == 0
    assert reserve().reason == "breaker half-open"
    reader.runtime.release(trial)
    eventually(reader.runtime.usable_mask)
    assert breaker() == "half-open"

    trial = reserve()
    reader.runtime.report_load(number, True)
    reader.runtime.release(trial)
    eventually(lambda: breaker() == "closed")
    assert [reserve().state, reserve().state] == [GRANTED, GRANTED]


def test_a_hint_that_the_member_denies_is_dropped_and_a_later_change_brings_it_back(
    group: Cluster,
) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    source.call("fill", 0, 2)
    number = eventually(lambda: reader.sees(0, 2))
    reader.mirror.apply(1 << number, b"".join(keys(2, 4)), b"")
    assert reader.sees(0, 4) == number

    assert len(settled(reader.runtime.reserve(number, keys(0, 4), "request")).rows) == 2
    eventually(lambda: not reader.mirror.holders(key(2)))
    assert reader.sees(0, 2) == number
    assert reader.mirror.holders(key(3)) == 1 << number
    source.call("fill", 2, 3)
    eventually(lambda: reader.sees(0, 3))


# -- membership ------------------------------------------------------------------------------------


def test_changes_reach_the_others_in_order(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.remote("b", directory.address, PATIENT)
    source.fill(0, 10)
    number = eventually(lambda: reader.call("sees", 0, 10))
    source.runtime.publish([], keys(0, 4))
    source.runtime.publish(keys(2, 3), [])
    source.runtime.publish([key(99)], [])
    eventually(lambda: reader.call("sees", 99, 100))
    assert [reader.call("sees", n, n + 1) for n in range(5)] == [0, 0, number, 0, number]


def test_a_reset_withdraws_what_was_published_before_and_nothing_after(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.remote("b", directory.address, PATIENT)
    source.fill(0, 10)
    eventually(lambda: reader.call("sees", 0, 10))
    assert call(source.runtime.contact, "clear") == {"epoch": 1}
    source.fill(20, 30)
    eventually(lambda: reader.call("sees", 20, 30))
    assert reader.call("sees", 0, 1) == 0


def test_blocks_that_go_for_a_lower_limit_leave_the_directory(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.remote("b", directory.address, PATIENT)
    source.fill(0, 10)
    number = eventually(lambda: reader.call("sees", 0, 10))
    grant = source.index.acquire(keys(0, 6), reader="c", request="r", now=0.0, duration=1e9)
    assert call(source.runtime.contact, "set_limits", 4, None) == {"evicted_blocks": 4}
    eventually(lambda: reader.call("sees", 9, 10) == 0)
    assert reader.call("sees", 0, 6) == number
    # Nobody calls the index for an idle replica but its own reaper.
    source.index.release(grant.lease_id)
    eventually(lambda: reader.call("sees", 5, 6) == 0)
    assert source.index.counters().device_blocks == 4
    source.index.check_invariants()


def test_a_replica_that_joins_late_sees_everything(group: Cluster) -> None:
    directory = group.directory()
    first = group.remote("a", directory.address, PATIENT)
    second = group.remote("b", directory.address, PATIENT)
    first.call("fill", 0, 30)
    second.call("fill", 20, 50)
    late = group.local("c", directory.address, PATIENT)
    one, two = eventually(lambda: late.sees(0, 30)), eventually(lambda: late.sees(20, 50))
    assert {late.members()[one].name, late.members()[two].name} == {"a", "b"}
    assert late.mirror.holders(key(25)) == 1 << one | 1 << two
    listed = members_at(directory)
    assert sorted(member.info.name for member in listed) == ["a", "b", "c"]
    assert {member.contact.credential.fingerprint for member in listed} == {FINGERPRINT}


def test_a_killed_replica_goes_with_all_its_blocks(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address)
    reader = group.local("b", directory.address)
    source.call("fill", 0, 20)
    eventually(lambda: reader.sees(0, 20))
    source.kill()
    eventually(lambda: not reader.members())
    assert reader.runtime.usable_mask() == 0
    eventually(lambda: len(reader.mirror) == 0)


def test_a_replica_that_closes_leaves_at_once(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    eventually(reader.members)
    source.runtime.close()
    source.runtime.close()
    eventually(lambda: not reader.members())
    late = source.runtime.reserve(1, keys(0, 1), "request")
    assert (late.state, late.reason) == (FAILED, "closed")
    source.runtime.publish(keys(0, 1), [])
    source.runtime.release(late)


def test_a_replica_that_leaves_is_gone_at_once_and_stays_out_but_still_answers(
    group: Cluster,
) -> None:
    directory = group.directory()
    other = group.local("a", directory.address, PATIENT)
    leaver = group.local("b", directory.address, PATIENT)
    eventually(lambda: len(other.members()) == 1)
    leaver.runtime.leave()
    eventually(lambda: not other.members())
    assert isinstance(call(leaver.runtime.contact, "describe"), dict)
    leaver.runtime.leave()
    assert members_at(directory)[0].info.name == "a"


def test_one_publication_after_another_arrives_in_one_session(group: Cluster) -> None:
    """What the directory answers keeps its type on the wire: "ok" must not read as a failure."""
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    for first in range(0, 5):
        source.call("fill", first, first + 1)
        eventually(lambda last=first + 1: reader.sees(0, last))
    assert reader.runtime.status()["joins"] == 1


def test_a_replica_that_slept_too_long_rejoins_with_a_new_epoch_and_all_its_blocks(
    group: Cluster,
) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address)
    reader = group.local("b", directory.address)
    source.call("fill", 0, 20)
    eventually(lambda: reader.sees(0, 20))
    (before,) = reader.members().values()
    source.signal(signal.SIGSTOP)
    eventually(lambda: not reader.members())
    source.signal(signal.SIGCONT)
    number = eventually(lambda: reader.sees(0, 20))
    after = reader.members()[number]
    assert (after.name, after.address) == (before.name, before.address)
    assert after.epoch != before.epoch


def test_a_restarted_replica_replaces_its_former_life_at_once(group: Cluster) -> None:
    directory = group.directory()
    reader = group.local("b", directory.address, PATIENT)
    former = group.remote("a", directory.address, PATIENT)
    former.call("fill", 0, 20)
    eventually(lambda: reader.sees(0, 20))
    former.kill()  # and nobody is told: the heartbeat limit is a minute
    latter = group.remote("a", directory.address, PATIENT)
    latter.call("fill", 30, 40)
    eventually(lambda: reader.sees(30, 40))
    assert [info.address for info in reader.members().values()] == [latter.address]
    assert reader.mirror.holders(key(0)) == 0


def test_sharing_survives_the_directory_and_comes_back_with_it(group: Cluster) -> None:
    directory = group.directory()
    port = int(directory.address.rpartition(":")[2])
    timing = replace(PATIENT, call_timeout_s=0.5)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 20)
    number = eventually(lambda: reader.sees(0, 20))

    directory.kill()
    eventually(lambda: not reader.runtime.connected)
    source.call("fill", 20, 30)
    assert reader.sees(0, 20) == number
    assert settled(reader.runtime.reserve(number, keys(0, 20), "request")).state is GRANTED

    group.directory(port)
    eventually(lambda: reader.runtime.connected)
    eventually(lambda: reader.sees(0, 30))
    assert reader.runtime.member_number is not None


def test_a_directory_that_slept_declares_nobody_dead(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address)
    reader = group.local("b", directory.address)
    source.call("fill", 0, 20)
    number = eventually(lambda: reader.sees(0, 20))
    directory.signal(signal.SIGSTOP)
    eventually(lambda: reader.runtime.status()["directory_failures"] > 0)
    assert settled(reader.runtime.reserve(number, keys(0, 20), "request")).state is GRANTED
    directory.signal(signal.SIGCONT)
    eventually(lambda: reader.runtime.connected)
    source.call("fill", 20, 30)
    assert eventually(lambda: reader.sees(0, 30)) == number
    assert reader.runtime.status()["joins"] == 1


def test_a_host_that_swallows_packets_delays_nobody_else(group: Cluster) -> None:
    directory = group.directory()
    timing = replace(PATIENT, call_timeout_s=60.0)
    source = group.remote("a", directory.address, timing)
    reader = group.local("b", directory.address, timing)
    source.call("fill", 0, 4)
    number = eventually(lambda: reader.sees(0, 4))
    with black_hole() as address:
        asyncio.run(join_as("hole", directory.address, address))
        hole = eventually(lambda: number_of(reader, "hole"))
        # Now, while the connection to the hole is still being tried.
        assert settled(reader.runtime.reserve(number, keys(0, 4), "request")).state is GRANTED
        assert reader.runtime.usable_mask() == 1 << number
        assert hole != number
        reader.runtime.close()


def number_of(replica: Replica, name: str) -> int:
    members = replica.members().items()
    return next((number for number, info in members if info.name == name), 0)


async def join_as(name: str, directory: str, address: str) -> None:
    ref = await directory_ref(directory, NAMESPACE, PATIENT)
    await ref.join(
        key_of(SECRET).admission(), FINGERPRINT, MemberInfo(name, 1, address, "host", 0.0)
    )


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address where the kernel drops connection attempts: the queue of a listener is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"{address[0]}:{address[1]}"


def test_replicas_of_another_fingerprint_are_strangers(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    source.call("fill", 0, 4)
    stranger = make_runtime(directory=directory.address, fingerprint=b"q" * 32)
    stranger.start()
    try:
        eventually(lambda: stranger.member_number)
        eventually(lambda: len(members_at(directory)) == 2)
        assert stranger.status()["peers"] == []
    finally:
        stranger.close()


def test_a_replica_says_in_what_those_of_the_same_weights_differ(
    group: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    directory = group.directory()
    made = [
        make_runtime(
            directory=directory.address,
            name=name,
            fingerprint=fingerprint(fields),
            traits=traits(fields),
        )
        for name in "ab"
        for fields in [{"weights": "w", "isa": "AVX2" if name == "a" else "AVX512", "ranks": 1}]
    ]
    with contextlib.ExitStack() as stack:
        for runtime in made:
            runtime.start()
            stack.callback(runtime.close)
            eventually(lambda runtime=runtime: runtime.member_number)
        [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "1 replicas of the same weights in" in warning
    assert "they differ in isa (" in warning


def test_an_overflowed_mirror_asks_the_directory(group: Cluster) -> None:
    directory = group.directory()
    source = group.remote("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    source.call("fill", 0, 20)
    number = eventually(lambda: reader.sees(0, 20))
    reader.mirror.reset()
    reader.runtime.ask(keys(5, 30))
    assert eventually(lambda: reader.sees(5, 20)) == number


# -- administration --------------------------------------------------------------------------------


def test_close_runs_once_for_all_callers_and_the_peer_then_refuses(group: Cluster) -> None:
    directory = group.directory()
    source = group.local("a", directory.address, PATIENT)
    reader = group.local("b", directory.address, PATIENT)
    source.fill(0, 4)
    number = eventually(lambda: reader.sees(0, 4))

    async def close_often() -> list[dict[str, Any]]:
        contact = source.runtime.contact
        return await asyncio.gather(*(peer_call(contact, "close", 2.0) for _ in range(4)))

    results = asyncio.run(close_often())
    assert results == [{"deadline_s": 2.0, "closes": 1, "keys": 0}] * 4
    assert call(source.runtime.contact, "close", 9.0) == results[0]
    refused = settled(reader.runtime.reserve(number, keys(0, 4), "request"))
    assert (refused.state, refused.reason) == (FAILED, "closed")
    eventually(lambda: reader.runtime.usable_mask() == 0)


def test_hooks_run_off_the_control_thread() -> None:
    with cluster() as alone:
        replica = alone.local("a", None)
        described = call(replica.runtime.contact, "describe")
        assert described["thread"] != "xavier-control"
        assert replica.runtime.usable_mask() == 0
        assert replica.runtime.member_number is None
        with pytest.raises(ValueError, match="method='reserve'"):
            call(replica.runtime.contact, "reserve")


def make_runtime(**changes: Any) -> ControlRuntime:
    options: dict[str, Any] = {
        "index": SnapshotIndex(device_slots=1, host_slots=0, spare_slots=0),
        "mirror": Mirror(),
        "name": "made",
        "host": "127.0.0.1",
        "directory": None,
        "key": key_of(SECRET),
        "fingerprint": FINGERPRINT,
        "workers": (),
        "status_hook": dict,
        "audit_hook": dict,
        "clear_hook": dict,
        "close_hook": lambda deadline_s: {},
        "limit_hook": lambda device, host: {},
        "withdraw_hook": lambda: None,
        "timing": QUICK,
    }
    return ControlRuntime(**(options | changes))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    with pytest.raises(ValueError, match=f"xavier_host='{host}'"):
        make_runtime(host=host)


def test_an_address_of_another_machine_is_refused_with_the_option_to_change() -> None:
    runtime = make_runtime(host="192.0.2.1")
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1.*xavier_host"):
        runtime.start()


def test_a_directory_without_a_route_is_refused_with_the_option_to_change() -> None:
    with pytest.raises(ValueError, match=r"xavier_directory='nonsense'.*xavier_host"):
        make_runtime(host=None, directory="nonsense")


def test_a_directory_that_listens_on_every_address_is_joined_at_one_of_them(
    group: Cluster,
) -> None:
    directory = RemoteProcess(serve_directory, 0, "0.0.0.0")
    try:
        address = f"127.0.0.1:{directory.address.rpartition(':')[2]}"
        source = group.local("a", address, PATIENT)
        reader = group.local("b", address, PATIENT)
        source.fill(0, 3)
        eventually(lambda: reader.sees(0, 3))
    finally:
        directory.kill()


@pytest.fixture
def v6_listener() -> Iterator[str]:
    """ "[host]:port" of something that listens on IPv6."""
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        yield f"[::1]:{listener.getsockname()[1]}"


def test_an_ipv6_directory_is_written_in_brackets(v6_listener: str) -> None:
    assert route_address(v6_listener) == "::1"
    asyncio.run(reach(v6_listener, 5.0))


def test_a_group_meets_over_ipv6(v6_listener: str) -> None:
    with contextlib.ExitStack() as stack:
        directory = RemoteProcess(serve_directory, 0, "::1")
        stack.callback(directory.kill)
        port = directory.address.rpartition(":")[2]
        runtime = make_runtime(host="[::1]", directory=f"[::1]:{port}", timing=PATIENT)
        stack.callback(runtime.close)
        runtime.start()
        eventually(lambda: runtime.member_number)
        port = runtime.address.rpartition(":")[2]
        assert call(replace(runtime.contact, address=f"[::1]:{port}"), "describe") == {}


def test_a_lost_directory_delays_neither_start_nor_close() -> None:
    runtime = make_runtime(host=None, directory="127.0.0.1:1", timing=PATIENT)
    runtime.start()
    eventually(lambda: runtime.status()["directory_failures"] > 1)
    assert not runtime.connected
    assert runtime.address.startswith("127.0.0.1:")
    runtime.publish(keys(0, 1), [])
    runtime.close()
    assert runtime.status()["joins"] == 0
