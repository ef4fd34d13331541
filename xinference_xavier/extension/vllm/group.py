# SPDX-License-Identifier: Apache-2.0
"""A replica's place in its group: where the directory is, who the others are, how to leave.

Coroutines for the event loop of the replica's actor process. Those that get a deadline end within
it, whatever the other side does; whoever runs one of the others must bound it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import xoscar as xo
from xinference.core.utils import parse_replica_model_uid

from xinference_xavier.control.client import directory_members, peer_call
from xinference_xavier.extension.names import NAME, RECORD_FINAL, SUPERVISOR_UID, WORKER_UID
from xinference_xavier.options import Deployment

WILDCARDS: Final = ("0.0.0.0", "::", "[::]", "")

UNREACHABLE: Final = (LookupError, OSError, TimeoutError, xo.ServerClosed, xo.ActorNotExist)
"""What these coroutines raise when somebody is not there, or not any more."""


@dataclass(frozen=True)
class Placement:
    """Where a replica runs: addresses ("host:port") of its supervisor and its worker."""

    supervisor: str
    worker: str
    replicas: int
    """How many replicas the model was launched with."""

    def deployment(self, model_uid: str, replica_uid: str) -> Deployment:
        """Return the replica's place in terms of the connector's extra config.

        The worker's own address is what its operator chose for others to reach this host by; a
        wildcard there says nothing (R11), and the connector then takes the route's address. Only
        a supervisor on this same host is known here by a wildcard, and it answers on loopback.
        """
        host = self.worker.rpartition(":")[0]
        supervisor, _, port = self.supervisor.rpartition(":")
        if supervisor in WILDCARDS:
            supervisor = "[::1]" if ":" in supervisor else "127.0.0.1"
        return Deployment.from_mapping(
            {
                "xavier_directory": f"{supervisor}:{port}",
                "xavier_namespace": model_uid,
                "xavier_member": replica_uid,
                "xavier_host": None if host in WILDCARDS else host,
            }
        )


async def find_placement(address: str, model_uid: str, replica_uid: str) -> Placement:
    """Ask the replica's own actor at ``address`` for its worker, and that for the supervisor."""
    replica = await xo.actor_ref(address=address, uid=replica_uid)
    worker_address = (await replica.get_worker_binding())["address"]
    worker = await xo.actor_ref(address=worker_address, uid=WORKER_UID)
    supervisor = await worker.get_supervisor_ref(add_worker=False)
    infos = await supervisor.get_instance_info(None, model_uid)
    replicas = max((int(info["replica"]) for info in infos), default=1)
    return Placement(supervisor.address, worker_address, replicas)


async def replicas_on_device(worker: str, model_uid: str, index: int) -> int:
    """Return how many replicas of a model the worker at ``worker`` has assigned to a GPU."""
    ref = await xo.actor_ref(address=worker, uid=WORKER_UID)
    status = await ref.get_gpu_allocation_status()
    uids = set(status["models"].get(index, ()))
    uids.update(uid for uid, _ in status["user_specified"].get(index, ()))
    return sum(parse_replica_model_uid(uid)[0] == model_uid for uid in uids)


async def describe(
    deployment: Deployment, timeout_s: float, *, peer: str | None = None
) -> dict[str, Any]:
    """Return what the replica's peer says about itself.

    ``peer`` is its address, where the engine has told it; else the directory is asked, and
    LookupError raised when the replica is not in it.
    """
    address = peer or await _own_peer(deployment, timeout_s)
    return await peer_call(address, "describe", timeout_s=timeout_s)


async def leave(
    deployment: Deployment, timeout_s: float, *, peer: str | None = None
) -> dict[str, Any]:
    """Close the replica's store within ``timeout_s`` seconds and return its final counters.

    A quarter of the time is for finding the peer and for the way there and back. ``peer`` and
    errors are as in :func:`describe`.
    """
    address = peer or await _own_peer(deployment, timeout_s / 8)
    drain_s = timeout_s * 3 / 4
    return await peer_call(address, "close", drain_s, timeout_s=drain_s + timeout_s / 8)


async def report_final(deployment: Deployment, report: dict[str, Any]) -> None:
    """Leave a closed replica's counters with the extension in the supervisor's process."""
    supervisor = await xo.actor_ref(address=deployment.xavier_directory, uid=SUPERVISOR_UID)
    await supervisor.call_extension(NAME, RECORD_FINAL, report)


async def _own_peer(deployment: Deployment, timeout_s: float) -> str:
    address, namespace = deployment.xavier_directory, deployment.xavier_namespace
    if address is None:
        raise LookupError("this replica has no directory")
    for _, _, member in await directory_members(address, namespace, timeout_s=timeout_s):
        if member.name == deployment.xavier_member:
            return member.address
    raise LookupError(f"{deployment.xavier_member} is not in the directory of {namespace}")
