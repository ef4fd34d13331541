# SPDX-License-Identifier: Apache-2.0
"""What the index's parts count, as plain values. No lock: the caller holds it."""

from __future__ import annotations

import dataclasses

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.leases import LeaseBook
from xinference_xavier.store.placement import Placement
from xinference_xavier.store.records import Counters, FinalCounters


def now(
    placement: Placement, book: LeaseBook, *, capacity: tuple[int, int], epoch: int
) -> Counters:
    """The store at this instant."""
    table = placement.table
    device, host = Tier
    return Counters(
        epoch=epoch,
        limits=placement.limits,
        capacity=capacity,
        device_blocks=table.ready(device),
        host_blocks=table.ready(host),
        device_free=table.free(device),
        host_free=table.free(host),
        staging=table.staging,
        demoting=table.arriving,
        promoting=table.promoting,
        zombies=sum(table.zombies),
        leased_blocks=sum(table.leased),
        leased=(table.leased[device], table.leased[host]),
        leases=len(book),
        jobs=len(placement.jobs),
        skips=dict(placement.skips),
        totals=dataclasses.replace(placement.totals),
    )


def final(placement: Placement, book: LeaseBook, reached: Counters) -> FinalCounters:
    """What is left of a store that was cleared to be closed."""
    table = placement.table
    return FinalCounters(
        device_lru=table.order.sizes[Tier.DEVICE],
        host_lru=table.order.sizes[Tier.HOST],
        global_lru=table.recency.sizes[0],
        keys=len(table.where),
        leases=len(book),
        readers=book.readers(),
        jobs=len(placement.jobs),
        staging=table.staging,
        demoting=table.arriving,
        promoting=table.promoting,
        zombies=sum(table.zombies),
        leased_blocks=sum(table.leased),
        used_slots=table.slots - sum(table.free(tier) for tier in Tier),
        reached=reached,
    )
