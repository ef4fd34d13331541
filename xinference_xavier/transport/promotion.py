# SPDX-License-Identifier: Apache-2.0
"""Keeps host blocks that a load has just read in device slots as well.

They are copied from the KV blocks that the load has filled, not from the host tier: there they
are on the device already, and cross the bus only once. Nobody else writes those blocks until
vLLM gets the load's result, which is made afterwards.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from xinference_xavier.store.copier import publish, withdraw
from xinference_xavier.store.jobs import OWN_STORE, LoadJob, Tier

if TYPE_CHECKING:
    from xinference_xavier.transport.segment import Means

logger = logging.getLogger(__name__)


def promote(means: Means, job: LoadJob) -> set[int]:
    """Run the promotions of a job all of whose rows are good; return those that are published.

    On the load thread that ran the job. Never raises: the load itself has succeeded.
    """
    try:
        return _promote(means, job)
    except Exception:
        logger.exception("the promotions of load job %d failed", job.job_id)
        return set()


def _promote(means: Means, job: LoadJob) -> set[int]:
    arena, host = means.arenas.get(Tier.DEVICE), means.arenas.get(Tier.HOST)
    if arena is None or host is None:
        return set()
    blocks = {
        slot: block_id
        for segment in job.segments
        if segment.member == OWN_STORE
        for tier, slot, _, block_id in segment.rows.tolist()
        if tier == Tier.HOST
    }
    rows = [
        row
        for row, (source, target, _) in enumerate(job.promotions.tolist())
        if source in blocks and 0 <= target < arena.slots
    ]
    table = job.promotions[rows]
    sources, slots, generations = table[:, 0], table[:, 1], table[:, 2]
    block_ids = np.array([blocks[source] for source in sources.tolist()], dtype=np.int64)
    withdraw(arena.meta, slots)
    try:
        means.device.gather(block_ids, arena.data, slots)
    finally:
        means.device.fence()
    # The content is the same, so the checksum is, too.
    publish(arena.meta, slots, generations, host.meta.numpy()[sources, 1])
    return set(rows)
