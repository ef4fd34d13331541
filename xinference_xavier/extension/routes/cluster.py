# SPDX-License-Identifier: Apache-2.0
"""What the server and its workers run, for the command ``doctor`` and the console."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import xoscar as xo
from fastapi import FastAPI

from xinference_xavier import __version__
from xinference_xavier.control.client import bounded, reach
from xinference_xavier.extension.names import NAME, WORKER_UID
from xinference_xavier.extension.routes.access import READ, needs
from xinference_xavier.installed import installed_versions
from xinference_xavier.schemas import Cluster, ClusterWorker

WORKER_TIMEOUT_S: Final = 3.0


def add_routes(context: Any) -> None:
    """Add the route to an ``APIExtensionContext``."""
    app: FastAPI = context.app

    @app.get("/v1/xavier/cluster", dependencies=needs(context, READ))
    async def xavier_cluster() -> Cluster:
        """Say which versions the server has, and which workers have this extension."""
        supervisor = await context.get_supervisor_ref()
        nodes = await supervisor.get_cluster_device_info()
        addresses = [node["ip_address"] for node in nodes if node["node_type"] == "Worker"]
        return Cluster(
            version=__version__,
            versions=installed_versions(),
            supervisor=supervisor.address,
            local=await supervisor.is_local_deployment(),
            workers=list(await asyncio.gather(*map(_worker, addresses))),
        )


async def _worker(address: str) -> ClusterWorker:
    async def call() -> Any:
        await reach(address, WORKER_TIMEOUT_S)
        worker = await xo.actor_ref(address=address, uid=WORKER_UID)
        return await worker.get_extension_resources()

    try:
        extensions = (await bounded(call(), WORKER_TIMEOUT_S))["extensions"]
    except Exception as error:
        # Whatever a worker of another version raises, the others are still told.
        text = str(error) or type(error).__name__
        return ClusterWorker(address=address, extension=None, error=text)
    found = extensions.get(NAME)
    return ClusterWorker(
        address=address,
        extension=None if found is None else found["version"],
        error="it does not have this extension" if found is None else None,
    )
