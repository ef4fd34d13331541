# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU may reach: pinned in place, and told where it could not be.

An arena's pages are populated before they are pinned, so that pinning takes no memory: a cgroup
has been charged for them already, and a limit there fails the arena, not the pinning. What is left
to fail is the driver. NVIDIA's kernel module takes the pages without charging ``RLIMIT_MEMLOCK``
(``os_lock_user_pages`` in its ``kernel-open/nvidia/os-mlock.c``), so that a low limit, as most
containers have it, is looked at first and refuses nothing; it is named when the driver refuses.
"""

from __future__ import annotations

import logging
import mmap
import resource

import torch

from xinference_xavier.sizes import format_size
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.cuda import CudaApi, CudaError

logger = logging.getLogger(__name__)


class Pinning:
    """The pinned slots of a host arena; ``reason`` is why they are not, and None if they are.

    Close it after the last copy and before the arena.
    """

    def __init__(self, arena: Arena, api: CudaApi) -> None:
        """Pin the slots of an arena, or note why they stay unpinned."""
        self._api = api
        self._data: torch.Tensor | None = None
        self.reason: str | None = None
        low = memlock_below(arena.data.nbytes)
        try:
            api.host_register(arena.data)
        except CudaError as error:
            self.reason = f"{error} (and {low})" if low else str(error)
            logger.warning(
                "Xavier: %s of host memory stay unpinned, copies to and from them are slower: %s",
                format_size(arena.data.nbytes),
                self.reason,
            )
        else:
            self._data = arena.data

    def close(self) -> None:
        """Unpin. Idempotent; raises :class:`CudaError`."""
        data, self._data = self._data, None
        if data is not None:
            self._api.host_unregister(data)


def memlock_below(nbytes: int) -> str | None:
    """Return what ``RLIMIT_MEMLOCK`` says against ``nbytes`` of locked memory; None if nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= nbytes:
        return None
    return f"ulimit -l (RLIMIT_MEMLOCK) is {format_size(soft)}"


def page_aligned(nbytes: int) -> torch.Tensor:
    """Return zeroed host memory that shares no page with anything, uint8 ``[nbytes]``."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8, count=nbytes)
