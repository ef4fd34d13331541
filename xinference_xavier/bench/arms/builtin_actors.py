# SPDX-License-Identifier: Apache-2.0
"""The actors of the Xavier that is built into Xinference, as a process that a benchmark starts.

Xinference's supervisor and workers make the same actors when they launch a model: a block tracker
and a rank 0 that only coordinates, and per replica a transfer actor in a process of its own. They
come from the installed package and run unmodified, except that creating a CUDA stream, which a
transfer actor does on any machine, gives None here: on the CPU it is never used.

Prints one line of JSON, ``tracker_address``, ``tracker_uid`` and ``rank_addresses`` by rank, and
then runs until SIGTERM.

Every process of the pool imports the actors before any is created: an import takes tens of seconds
of CPU time, since it brings all of Xinference and of vLLM, and ranks that join the mesh wait for
each other for 30 seconds only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
from typing import Any, Final
from unittest import mock

import torch
import xoscar
from xinference.model.llm.vllm.xavier.transfer import Rank0TransferActor, TransferActor
from xinference.model.llm.xavier.block_tracker import BlockTracker

MODEL: Final = "bench"
MODULE: Final = "xinference_xavier.bench.arms.builtin_actors"


class CpuTransferActor(TransferActor):  # type: ignore[misc]
    """A transfer actor that can be made without CUDA."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with mock.patch.object(torch.cuda, "Stream", return_value=None):
            super().__init__(*args, **options)


async def serve(replicas: int) -> None:
    """Create the actors, tell where they are, and wait for the end."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    pool = await xoscar.create_actor_pool(
        "127.0.0.1:0", n_process=replicas + 1, modules=[MODULE], auto_recover=False
    )
    async with pool:
        tracker = await xoscar.create_actor(
            BlockTracker,
            address=pool.external_address,
            uid=f"{BlockTracker.default_uid()}-{MODEL}",
        )
        ranks = sorted(pool.sub_processes)
        world = {
            "world_size": replicas + 1,
            "store_address": "127.0.0.1",
            "store_port": xoscar.utils.get_next_port(),
            "world_addresses": ranks,
        }
        # All at once: each waits for the others when it joins their mesh.
        await asyncio.gather(
            *(_transfer_actor(rank, ranks[rank], world) for rank in range(len(ranks)))
        )
        found = {
            "tracker_address": pool.external_address,
            "tracker_uid": tracker.uid.decode(),
            "rank_addresses": ranks,
        }
        print(json.dumps(found), flush=True)
        await ended.wait()
        # Actors with open meshes may take long to end; nothing of them is needed any more.
        for process in pool.sub_processes.values():
            process.kill()
    os._exit(0)


async def _transfer_actor(rank: int, address: str, world: dict[str, Any]) -> None:
    kind, options = (CpuTransferActor, {"freeze_initialization_gc": True})
    if rank == 0:
        kind, options = (Rank0TransferActor, {})
    await xoscar.create_actor(
        kind,
        address=address,
        uid=f"{TransferActor.default_uid()}-{rank}",
        rank=rank,
        rank_address=address,
        **world,
        **options,
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    asyncio.run(serve(parser.parse_args().replicas))


if __name__ == "__main__":
    # Other processes must find the actors' classes by name, so not as those of __main__.
    importlib.import_module(MODULE).main()
