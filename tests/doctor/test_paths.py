# SPDX-License-Identifier: Apache-2.0
"""Real bytes between processes, and what the command makes of all findings."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import xoscar as xo
from click.testing import CliRunner

from tests.stub_api import StubApi, a_link, a_model, a_replica
from xinference_xavier import cli
from xinference_xavier.control.client import PEER_UID, Member, contact_of
from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.control.peer import PeerActor, PeerState
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.doctor import main, paths, probe
from xinference_xavier.doctor.finding import ok
from xinference_xavier.doctor.paths import Errand, Outcome
from xinference_xavier.store.cuda import DeviceHandle
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import WorkerHandle

FINGERPRINT = b"f" * 32
WITHOUT_NIXL = ("shm", "xoscar")
"""What a test may start in its own process."""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def handle() -> Iterator[WorkerHandle]:
    with paths.source() as handle:
        yield handle


def errand(handle: WorkerHandle, rows: list[Any], *transports: str) -> Errand:
    return Errand(handle, {Tier.HOST: rows}, "127.0.0.1", transports or paths.TRANSPORTS)


def states(findings: Any) -> dict[str, str]:
    return {finding.name: str(finding.state) for finding in findings}


# -- bytes -----------------------------------------------------------------------------------------


def test_every_transport_brings_the_same_bytes(handle: WorkerHandle) -> None:
    outcomes = paths.read(errand(handle, paths.filled_rows()), WAIT_S)
    assert [(outcome.transport, outcome.error) for outcome in outcomes] == [
        ("shm", None),
        ("nixl", None),
        ("xoscar", None),
    ]
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert {outcome.nbytes for outcome in outcomes} == {paths.SLOTS * paths.SLOT_BYTES}
    lanes = {outcome.transport: outcome.lane for outcome in outcomes}
    assert lanes == {"shm": None, "nixl": "cma/memory", "xoscar": None}
    assert set(states(probe.outcome_findings("it", outcomes)).values()) == {"ok"}


def test_memory_of_a_gpu_is_read_by_the_one_way_that_needs_none(handle: WorkerHandle) -> None:
    gpu = DeviceHandle("gpu-0", 1, None, "not here")
    arenas = {Tier.DEVICE: replace(handle.arenas[Tier.HOST], device=gpu), **handle.arenas}
    rows = {tier: [(0, 0)] for tier in Tier}
    both = Errand(replace(handle, arenas=arenas), rows, "127.0.0.1")
    tiers = {name: [found.tier for found in paths._read_over(name, both)] for name in WITHOUT_NIXL}
    assert tiers == {"shm": ["host"], "xoscar": ["device", "host"]}


def test_a_slot_with_another_generation_is_not_taken_for_intact(handle: WorkerHandle) -> None:
    [outcome] = paths.read(errand(handle, [(0, 1), (1, 99), (2, 0)], "shm"), WAIT_S)
    # Before and after the copy.
    assert outcome.error == "2 of 3 blocks were not intact"


def test_a_reader_that_dies_is_an_outcome(
    handle: WorkerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_read_all", die)
    [outcome] = paths.read(errand(handle, [(0, 1)], "nixl"), WAIT_S)
    assert (outcome.transport, outcome.tier) == ("nixl", "host")
    assert outcome.error == "the reading process ended with status 7"


def die(pipe: Any, errand: Errand) -> None:
    os._exit(7)


def test_a_replica_leases_what_is_read_of_it(handle: WorkerHandle) -> None:
    index = SnapshotIndex(device_slots=0, host_slots=paths.SLOTS, spare_slots=0)
    # The slots have been filled under these generations.
    index._table.last_generation = 0
    keys = [bytes([number]) * 32 for number in range(5)]
    answers = asyncio.run(read_replica(handle, index))
    # Nothing is stored: some slots are read, and their content is not judged.
    assert states(probe.outcome_findings("a", answers[0], compared=answers[1])) == {
        f"{name}: host tier of a": "ok" for name in paths.TRANSPORTS
    }
    assert answers[1] is False
    job = index.admit([(key, number) for number, key in enumerate(keys)])
    index.commit(job.job_id)
    generations = {slot: generation for _, _, slot, generation, _ in job.stores}
    assert generations == {slot: slot + 1 for slot in generations}
    outcomes, leased = asyncio.run(read_replica(handle, index))
    assert leased is True
    assert {(outcome.blocks, outcome.error) for outcome in outcomes} == {(5, None)}
    assert index.counters().leases == 0
    index.check_invariants()


async def read_replica(handle: WorkerHandle, index: SnapshotIndex) -> tuple[list[Outcome], bool]:
    state = PeerState(
        index=index,
        fingerprint=FINGERPRINT,
        workers=(handle,),
        status_hook=dict,
        audit_hook=dict,
        clear_hook=lambda: None,
        close_hook=lambda deadline_s: {},
        limit_hook=lambda device, host: {},
        withdraw_hook=lambda: None,
        credentials={5: member("").contact.credential},
    )
    pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
    try:
        await xo.create_actor(PeerActor, state, uid=PEER_UID, address=pool.external_address)
        with pytest.raises(RuntimeError, match="it refuses: wrong fingerprint"):
            await probe._read_replica(member(pool.external_address, b"x" * 32))
        return await probe._read_replica(member(pool.external_address))
    finally:
        await pool.stop()


def member(address: str, fingerprint: bytes = FINGERPRINT) -> Member:
    info = MemberInfo("a", 5, address, "host", 0.0)
    return Member(1, info, contact_of(info, fingerprint, GroupKey("m", None)))


# -- what is made of them --------------------------------------------------------------------------


def test_what_cannot_be_read_over_any_transport_fails() -> None:
    refused = [Outcome(name, "host", "no") for name in paths.TRANSPORTS]
    found = states(probe.outcome_findings("it", refused))
    assert found["host tier of it"] == "fail"
    assert found["shm: host tier of it"] == "warn"
    one = [*refused[:2], Outcome("xoscar", "host", None, 1, 1, 1.0, "d")]
    assert "host tier of it" not in states(probe.outcome_findings("it", one))


def test_bytes_that_differ_by_transport_fail() -> None:
    differing = [Outcome(name, "host", None, 1, 1, 1.0, name) for name in paths.TRANSPORTS]
    assert states(probe.outcome_findings("it", differing))["host tier of it"] == "fail"
    unleased = probe.outcome_findings("it", differing, compared=False)
    assert "fail" not in states(unleased).values()


def test_reads_that_ucx_emulates_are_a_warning() -> None:
    [finding] = probe.outcome_findings(
        "it", [Outcome("nixl", "host", None, 1, 1, 1.0, "d", lane="tcp/eth0")]
    )
    assert finding.state == "warn"
    assert "tcp/eth0" in finding.seen


def test_ucx_is_taken_at_its_last_word_on_reads() -> None:
    table = """
[1.2] [vm:3 :0]   | xavier intra-node cfg#1                                      |
[1.2] [vm:3 :0]   | active message by ucp_am_send*(multi) from host memory       |
[1.2] [vm:3 :0]   |     0..8184 | short              | tcp/lo                    |
[1.2] [vm:3 :0]   +-------------+--------------------+---------------------------+
[1.2] [vm:3 :0]   | remote memory read by ucp_get*(multi) into host memory       |
[1.2] [vm:3 :0]   +--------+-------------+---------------------------------------+
[1.2] [vm:3 :0]   | Range  | Description |                  Config               |
[1.2] [vm:3 :0]   | 0..inf | zero-copy   | cma/memory                            |
[1.2] [vm:3 :0]   +--------+-------------+---------------------------------------+
[1.2] [vm:3 :0]   | 0..inf | zero-copy   | tcp/lo                                |
"""
    assert paths.read_lane(table) == "cma/memory"
    assert paths.read_lane("nothing of the kind") is None


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubApi]:
    monkeypatch.setattr(main, "_paths", lambda group: [ok(f"paths {group}", "sent")])
    monkeypatch.delenv("XINFERENCE_ENDPOINT", raising=False)
    with StubApi().running() as stub:
        yield stub


def doctor(*args: str) -> Any:
    return CliRunner().invoke(cli.main, ["doctor", *args], catch_exceptions=False)


def test_a_host_alone_is_looked_at(stub: StubApi) -> None:
    result = doctor()
    assert result.exit_code == 0
    assert "ok    paths None: sent" in result.output
    assert "-> export XINFERENCE_EXTENSIONS=" in result.output
    assert result.output.rstrip().endswith("0 fail")


def test_a_server_and_its_replicas_are_looked_at(stub: StubApi) -> None:
    stub.has(a_model(a_replica("m-rep0", a_link("m-rep1")), a_replica("m-rep1", a_link("m-rep0"))))
    result = doctor("--endpoint", stub.url, "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    names = {finding["name"]: finding["state"] for finding in found["findings"]}
    assert names["m-rep0 reads m-rep1"] == names["paths ('127.0.0.1:1', 'm')"] == "ok"
    assert sum(found["counts"].values()) == len(found["findings"])
    assert set(found["findings"][0]) == {"name", "state", "seen", "fix"}


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_colours_are_left_out_where_they_are_not_wanted(
    stub: StubApi, monkeypatch: pytest.MonkeyPatch, no_color: str, escapes: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    result = CliRunner().invoke(cli.main, ["doctor"], color=True)
    assert ("\x1b[" in result.output) == escapes


def test_what_fails_gives_an_exit_code(stub: StubApi) -> None:
    stub.has(a_model(a_replica("m-rep0"), a_replica("m-rep1", state="closed")))
    result = doctor("--endpoint", stub.url)
    assert result.exit_code == 1
    assert "fail  replica m-rep1: closed" in result.output
    assert doctor("--endpoint", "http://127.0.0.1:1", "--json").exit_code == 1
    assert CliRunner().invoke(cli.main, ["doctor", "--wrong"]).exit_code == 2


def test_a_server_without_models_is_a_warning(stub: StubApi) -> None:
    stub.has(a_model())
    stub.answers["GET", "models"] = {"models": []}
    result = doctor("--endpoint", stub.url)
    assert result.exit_code == 0
    assert "warn  models: no GPU-first model runs" in result.output


def test_what_takes_long_is_announced_beside_the_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "host_paths", lambda: [ok("a path", "sent")])
    assert main._paths(None) == [ok("a path", "sent")]
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "Reading from this host over each transport" in printed.err


def test_without_the_packages_of_a_replica_no_bytes_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    import xinference_xavier.doctor

    monkeypatch.delattr(xinference_xavier.doctor, "probe")
    monkeypatch.setitem(sys.modules, "xinference_xavier.doctor.probe", None)
    [finding] = main._paths(None)
    assert finding.state == "warn"
    assert "run the doctor where a replica runs" in finding.fix
