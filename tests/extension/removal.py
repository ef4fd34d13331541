# SPDX-License-Identifier: Apache-2.0
"""Xinference's own supervisor while replicas are removed; a stand-in of a worker looks at it.

A program: the supervisor keeps files where ``XINFERENCE_HOME`` says when it is imported. Prints
what was seen as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import xoscar as xo
from xinference.core.supervisor import SupervisorActor

from xinference_xavier.extension.vllm import group
from xinference_xavier.options import Deployment

SUPERVISOR, WORKER, GUARD = "supervisor", "worker", "status_guard"


class Worker(xo.StatelessActor):
    """Stops replicas as Xinference's worker does, which in turn do what ours do first."""

    def __init__(self) -> None:
        super().__init__()
        self.routed: dict[str, list[str]] = {}

    async def get_extension_resources(self) -> dict[str, Any]:
        return {"extensions": {}}

    async def update_system_settings(self, settings: dict[str, Any]) -> None:
        pass

    async def get_model(self, model_uid: str) -> str:
        return model_uid

    async def terminate_model(self, model_uid: str) -> None:
        uid, _, number = model_uid.rpartition("-rep")
        guard = await xo.actor_ref(address=self.address, uid=GUARD)
        await guard.update_replica_status(uid, int(number), {"status": "TERMINATING"})
        await guard.update_instance_info(uid, {"status": "TERMINATING"})
        place = {
            "xavier_directory": self.address,
            "xavier_namespace": uid,
            "xavier_member": model_uid,
        }
        await group.send_no_more(Deployment.from_mapping(place))
        self.routed[model_uid] = await routes(self.address)
        await guard.update_instance_info(uid, {"status": "TERMINATED"})

    async def seen(self) -> dict[str, list[str]]:
        return dict(self.routed)


async def routes(address: str) -> list[str]:
    """Return the replicas that requests are sent to now."""
    supervisor = await xo.actor_ref(address=address, uid=SUPERVISOR)
    return sorted({await supervisor.get_model("m") for _ in range(6)})


@asynccontextmanager
async def deployed(replicas: int) -> AsyncIterator[tuple[Any, Any]]:
    """A supervisor with a model of so many replicas; yields it and the worker."""
    pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
    try:
        address = pool.external_address
        supervisor = await xo.create_actor(SupervisorActor, address=address, uid=SUPERVISOR)
        worker = await xo.create_actor(Worker, address=address, uid=WORKER)
        states = [
            {
                "replica_model_uid": f"m-rep{number}",
                "model_uid": "m",
                "model_name": "a model",
                "model_version": None,
                "model_ability": [],
                "status": "READY",
                "created_ts": 1,
                "instance_created_ts": 1,
            }
            for number in range(replicas)
        ]
        await supervisor.add_worker(address, states)
        yield supervisor, worker
    finally:
        await pool.stop()


async def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with deployed(3) as (supervisor, worker):
        seen["left"] = [await supervisor.terminate_model_replica("m", n) for n in (1, 0)]
        seen["routed meanwhile"] = await worker.seen()
        [info] = await supervisor.get_instance_info(None, "m")
        seen["model"] = [info["replica"], info["status"]]
        seen["routed"] = await routes(supervisor.address)
        told = await supervisor.get_cluster_metrics_data()
        seen["unexpected"] = told["unexpected_down_replicas"]
        seen["last"] = await supervisor.terminate_model_replica("m", 2)
        seen["routed to the last"] = (await worker.seen())["m-rep2"]
    async with deployed(2) as (supervisor, worker):
        await supervisor.terminate_model("m")
        seen["still routed with a whole model"] = sorted(await worker.seen())
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
