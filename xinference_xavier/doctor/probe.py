# SPDX-License-Identifier: Apache-2.0
"""Real bytes: between two processes of this host, and from running replicas to this host.

A replica's workers answer no calls, so none of them can be told to read from another. Instead the
doctor reads from each replica itself, as a replica on this host would: slots that the replica
leases to it, the same ones over every transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xoscar as xo

from xinference_xavier.control.client import (
    PEER_UID,
    Member,
    bounded,
    directory_members,
    reach,
    route_address,
    unbracketed,
)
from xinference_xavier.control.messages import Credential, LeaseGrant, unpack_rows
from xinference_xavier.doctor.finding import Finding, fail, ok, warn
from xinference_xavier.doctor.paths import (
    Errand,
    Outcome,
    Row,
    filled_rows,
    read,
    source,
)
from xinference_xavier.extension.secrets import key_from
from xinference_xavier.store.jobs import Tier

CALL_S = 5.0
READ_S = 90.0
LEASE_S = 8.0
RENEW_S = 2.0
BLOCKS = 64
UNLEASED = 8
"""Slots that are read where nothing is stored: their content is not compared."""


def host_paths() -> Iterator[Finding]:
    """Judge each transport between two processes of this host."""
    name = "paths on this host"
    try:
        with source() as handle:
            outcomes = read(Errand(handle, {Tier.HOST: filled_rows()}, "127.0.0.1"), READ_S)
    except (EOFError, OSError, TimeoutError) as error:
        yield fail(
            name, f"no process to read from: {error!r}", "run it again; see its output above"
        )
        return
    yield from outcome_findings("this host", outcomes)


def replica_paths(directory: str, model_uid: str) -> Iterator[Finding]:
    """Judge each transport from each of a model's replicas to this host."""
    try:
        members = asyncio.run(_members(directory, model_uid))
    except OSError as error:
        yield warn(
            f"reading {model_uid}",
            f"this host does not reach the directory at {directory}: {error}",
            "run the doctor on a host of the cluster: what it reads is then what a replica there "
            "would read",
        )
        return
    for member in sorted(members, key=lambda member: member.info.name):
        info = member.info
        try:
            outcomes, leased = asyncio.run(_read_replica(member))
        except Exception as error:
            # Whatever a replica answers or breaks, the others are still looked at.
            yield fail(
                f"reading {info.name}",
                f"{info.address} gave nothing to read: {error!r}",
                "let this host through to the replica's ports, and see its log",
            )
            continue
        yield from outcome_findings(info.name, outcomes, compared=leased)


@dataclass(frozen=True, slots=True)
class _Lease:
    lease_id: int
    rows: list[Row]


async def _members(directory: str, model_uid: str) -> list[Member]:
    """List the replicas of a model of the supervisor at ``directory``, which knows its secret."""
    await reach(directory, CALL_S)
    key = await bounded(key_from(unbracketed(directory), model_uid), CALL_S)
    return [] if key is None else await directory_members(directory, key)


async def _read_replica(member: Member) -> tuple[list[Outcome], bool]:
    """Return how reading from a replica went, and whether what was read was leased."""
    info, shown = member.info, member.contact.credential
    await reach(info.address, CALL_S)
    peer = await bounded(xo.actor_ref(address=unbracketed(info.address), uid=PEER_UID), CALL_S)
    workers = await bounded(peer.introduce(shown), CALL_S)
    if not isinstance(workers, tuple):
        raise RuntimeError(f"it refuses: {workers.value}")
    handle = workers[0]
    leases = {tier: await _lease(peer, shown, tier) for tier in sorted(handle.arenas)}
    leased = {tier: lease for tier, lease in leases.items() if lease.rows}
    rows = {tier: lease.rows for tier, lease in leased.items()}
    if not rows:
        counts = {tier: handle.arenas[tier].slots for tier in handle.arenas}
        rows = {tier: [(n, 0) for n in range(min(UNLEASED, counts[tier]))] for tier in counts}
    ids = [lease.lease_id for lease in leased.values()]
    errand = Errand(handle, rows, route_address(info.address))
    renewing = asyncio.create_task(_renew(peer, shown, ids))
    try:
        return await asyncio.to_thread(read, errand, READ_S), bool(leased)
    finally:
        renewing.cancel()
        if ids:
            await bounded(peer.release(shown, ids), CALL_S)


async def _lease(peer: Any, shown: Credential, tier: Tier) -> _Lease:
    call = peer.sample(shown, "doctor", int(tier), BLOCKS, LEASE_S)
    grant = await bounded(call, CALL_S)
    if not isinstance(grant, LeaseGrant):
        raise RuntimeError(f"it refuses: {grant.value}")
    rows = [(slot, generation) for at, slot, generation in unpack_rows(grant.rows) if at == tier]
    return _Lease(grant.lease_id, rows)


async def _renew(peer: Any, shown: Credential, leases: Sequence[int]) -> None:
    while leases:
        await asyncio.sleep(RENEW_S)
        await bounded(peer.renew(shown, list(leases), LEASE_S), CALL_S)


def outcome_findings(
    whose: str, outcomes: Sequence[Outcome], *, compared: bool = True
) -> Iterator[Finding]:
    """Judge what was read of one process, a finding per tier and transport."""
    for tier in dict.fromkeys(outcome.tier for outcome in outcomes):
        tried = [outcome for outcome in outcomes if outcome.tier == tier]
        working = [outcome for outcome in tried if outcome.error is None]
        digests = {outcome.digest for outcome in working}
        if compared and len(digests) > 1:
            yield fail(
                f"{tier} tier of {whose}",
                "the same blocks came as different bytes over different transports",
                "report this with the output of --json; meanwhile launch with "
                "xavier_verify=checksum",
            )
        for outcome in tried:
            yield _outcome_finding(
                f"{outcome.transport}: {tier} tier of {whose}", outcome, compared
            )
        if not working:
            yield fail(
                f"{tier} tier of {whose}",
                "no transport reaches it from this host",
                "see the reasons above; replicas that cannot read it compute instead",
            )


def _outcome_finding(name: str, outcome: Outcome, compared: bool) -> Finding:
    if outcome.error is not None:
        return warn(name, outcome.error, _FIXES[outcome.transport])
    lane = f", UCX took {outcome.lane}" if outcome.lane else ""
    content = "intact" if compared else "not compared, for nothing is stored"
    seen = f"{outcome.blocks} blocks at {outcome.gb_per_s:.2f} GB/s{lane}, {content}"
    if outcome.lane and "tcp" in outcome.lane:
        return warn(name, f"{seen}: it emulates reads over sockets", _FIXES["nixl"])
    return ok(name, seen)


_FIXES = {
    "shm": "needed on one host: one user, one pid namespace (containers: --pid=host or "
    "--pid=container:NAME), and /proc mounted",
    "nixl": "pip install 'xoscar[nixl]'; between hosts it needs RDMA, on one host "
    "kernel.yama.ptrace_scope=0; auto takes another transport meanwhile",
    "xoscar": "let the hosts of the cluster through to each other's dynamic ports",
}
