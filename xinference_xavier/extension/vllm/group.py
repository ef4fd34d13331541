# SPDX-License-Identifier: Apache-2.0
"""A replica's place in its group: where the directory is, who the others are, how to leave.

Coroutines for the event loop of the replica's actor process. Those that get a deadline end within
it, whatever the other side does; whoever runs one of the others must bound it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import xoscar as xo
from xinference.core.utils import parse_replica_model_uid

from xinference_xavier.control.client import Contact, directory_members, peer_call
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.names import NAME, RECORD_FINAL, SUPERVISOR_UID, WORKER_UID
from xinference_xavier.extension.secrets import agreed_secret
from xinference_xavier.options import Deployment

WILDCARDS: Final = ("0.0.0.0", "::", "[::]", "")

TERMINATING: Final = "TERMINATING"
READY: Final = "READY"
"""States of a replica, in Xinference's words: it is being stopped by request, it serves."""

UNREACHABLE: Final = (LookupError, OSError, TimeoutError, xo.ServerClosed, xo.ActorNotExist)
"""What these coroutines raise when somebody is not there, or not any more."""


@dataclass(frozen=True)
class Placement:
    """Where a replica runs: addresses ("host:port") of its supervisor and its worker."""

    supervisor: str
    worker: str
    replicas: int
    """How many replicas the model was launched with."""

    secret: str | None = field(default=None, repr=False)
    """What its replicas share, see ``secrets``; None where it was not asked for."""

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


async def find_placement(
    address: str, model_uid: str, replica_uid: str, offer: str | None = None
) -> Placement:
    """Ask the replica's own actor at ``address`` for its worker, and that for the supervisor.

    ``offer`` becomes the model's secret if it has none yet; None asks for no secret.
    """
    replica = await xo.actor_ref(address=address, uid=replica_uid)
    worker_address = (await replica.get_worker_binding())["address"]
    worker = await xo.actor_ref(address=worker_address, uid=WORKER_UID)
    supervisor = await worker.get_supervisor_ref(add_worker=False)
    infos = await supervisor.get_instance_info(None, model_uid)
    replicas = max((int(info["replica"]) for info in infos), default=1)
    secret = None if offer is None else await agreed_secret(supervisor, model_uid, offer)
    return Placement(supervisor.address, worker_address, replicas, secret)


async def replicas_on_device(worker: str, model_uid: str, index: int) -> int:
    """Return how many replicas of a model the worker at ``worker`` has assigned to a GPU."""
    ref = await xo.actor_ref(address=worker, uid=WORKER_UID)
    status = await ref.get_gpu_allocation_status()
    uids = set(status["models"].get(index, ()))
    uids.update(uid for uid, _ in status["user_specified"].get(index, ()))
    return sum(parse_replica_model_uid(uid)[0] == model_uid for uid in uids)


async def describe(
    deployment: Deployment, key: GroupKey, timeout_s: float, *, peer: Contact | None = None
) -> dict[str, Any]:
    """Return what the replica's peer says about itself.

    ``peer`` is how to ask it, where the engine has told it; else the directory is asked, and
    LookupError raised when the replica is not in it.
    """
    contact = peer or await _own_peer(deployment, key, timeout_s)
    return await peer_call(contact, "describe", timeout_s=timeout_s)


async def leave(
    deployment: Deployment, key: GroupKey, timeout_s: float, *, peer: Contact | None = None
) -> dict[str, Any]:
    """Close the replica's store within ``timeout_s`` seconds and return its final counters.

    A quarter of the time is for finding the peer and for the way there and back. ``peer`` and
    errors are as in :func:`describe`.
    """
    contact = peer or await _own_peer(deployment, key, timeout_s / 8)
    drain_s = timeout_s * 3 / 4
    return await peer_call(contact, "close", drain_s, timeout_s=drain_s + timeout_s / 8)


async def send_no_more(deployment: Deployment) -> None:
    """Let the supervisor send no new requests to a replica that is being removed beside others.

    Stock Xinference goes on sending it its share until it has stopped, and the worker refuses
    those. The supervisor forgets about a replica at once when it is told that it is dead; the
    removal that goes on then takes back what else that means: until it has ended, the replica
    counts as unexpectedly terminated.
    """
    supervisor = await xo.actor_ref(address=deployment.xavier_directory, uid=SUPERVISOR_UID)
    replicas = await supervisor.get_replica_statuses(deployment.xavier_namespace)
    states = {replica["replica_model_uid"]: replica["status"] for replica in replicas}
    if states.pop(deployment.xavier_member, None) == TERMINATING and READY in states.values():
        await supervisor.mark_replica_dead(deployment.xavier_member)


async def report_final(deployment: Deployment, report: dict[str, Any]) -> None:
    """Leave a closed replica's counters with the extension in the supervisor's process."""
    supervisor = await xo.actor_ref(address=deployment.xavier_directory, uid=SUPERVISOR_UID)
    await supervisor.call_extension(NAME, RECORD_FINAL, report)


async def _own_peer(deployment: Deployment, key: GroupKey, timeout_s: float) -> Contact:
    address = deployment.xavier_directory
    if address is None:
        raise LookupError("this replica has no directory")
    for member in await directory_members(address, key, timeout_s=timeout_s):
        if member.info.name == deployment.xavier_member:
            return member.contact
    raise LookupError(f"{deployment.xavier_member} is not in the directory of {key.namespace}")
