# SPDX-License-Identifier: Apache-2.0
"""What one rank has beside its KV cache: slots in both tiers, and what copies between them.

Built on the worker's main thread when vLLM registers the KV cache, each tier in one allocation
whose size never changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.cuda import CudaApi
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.device import CpuDevice, Device
from xinference_xavier.store.device_arena import DeviceArena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.pinning import Pinning
from xinference_xavier.tiers import staging_slots
from xinference_xavier.transport.base import Gpu


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of each tier; ``device_staging`` ones come on top of ``device``, for a GPU only."""

    device: int
    host: int
    device_staging: int = 0


class WorkerMemory:
    """Arenas and device of one rank. ``staging`` are the slots at an arena's end that no index
    knows, into which the network reads.

    ``gpu`` is None where the KV cache is in host memory. ``pinned`` tells whether the GPU reaches
    the host tier directly, ``unpinned`` why it does not, where it should.
    """

    def __init__(
        self,
        layout: BlockLayout,
        views: Sequence[torch.Tensor],
        slots: Slots,
        api: CudaApi | None = None,
    ) -> None:
        """Allocate for the KV cache of ``layout.probe_layout``, on the GPU of ``api`` if given.

        Raises ArenaError where memory is missing, CudaError where the GPU does not do its part.
        """
        self.arenas: dict[Tier, Arena | DeviceArena] = {}
        self.staging: dict[Tier, range] = {}
        self.pinned = False
        self.unpinned: str | None = None
        self.gpu: Gpu | None = None
        with contextlib.ExitStack() as made:
            if slots.device:
                count = slots.device + slots.device_staging
                arena = (
                    Arena.create(count, layout.slot_bytes, "device")
                    if api is None
                    else DeviceArena.create(count, layout.slot_bytes, "device", api)
                )
                self._add(made, Tier.DEVICE, arena, slots.device_staging)
            if slots.host:
                host = Arena.create(slots.host, layout.slot_bytes, "host")
                self._add(made, Tier.HOST, host, staging_slots(slots.host))
                if api is not None:
                    pinning = Pinning(host, api)
                    made.callback(pinning.close)
                    self.pinned, self.unpinned = pinning.reason is None, pinning.reason
            self.device: Device = (
                CpuDevice(layout, views) if api is None else CudaDevice(layout, views, api)
            )
            made.callback(self.device.close)
            if api is not None:
                self.gpu = Gpu(api, self.device)
            self._made = made.pop_all()

    def _add(
        self,
        made: contextlib.ExitStack,
        tier: Tier,
        arena: Arena | DeviceArena,
        staging: int = 0,
    ) -> None:
        made.callback(arena.close)
        self.arenas[tier] = arena
        if staging:
            self.staging[tier] = range(arena.slots - staging, arena.slots)

    def close(self) -> None:
        """Give everything back, what was made last first, each step whatever became of the others.

        No copy may be running. Idempotent; raises the last step's error that there was.
        """
        self.arenas.clear()
        self._made.close()
