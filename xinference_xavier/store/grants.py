# SPDX-License-Identifier: Apache-2.0
"""How blocks are leased to a reader. No lock: the caller holds it."""

from __future__ import annotations

from collections.abc import Sequence

from xinference_xavier.store.leases import LeaseBook
from xinference_xavier.store.placement import Placement
from xinference_xavier.store.records import Grant, Row
from xinference_xavier.store.slots import DEVICE, HOST, READY, SlotTable


def give(
    placement: Placement,
    book: LeaseBook,
    keys: Sequence[bytes],
    *,
    reader: str | None,
    request: str,
    expires: float,
    epoch: int,
) -> Grant:
    """Lease the longest prefix of ``keys`` that is here and that the reader may lease.

    See ``SnapshotIndex.acquire``.
    """
    table, totals = placement.table, placement.totals
    slots = _ready_prefix(table, keys)
    allowed = book.allowance(reader, slots)
    if allowed < len(slots):
        totals.share_cuts += 1
        del slots[allowed:]
    if not slots:
        return Grant(0, [], expires)
    table.hold(slots)
    totals.granted += len(slots)
    border, generation = table.device_slots, table.generation
    rows: list[Row] = [
        (DEVICE, slot, generation[slot])
        if slot < border
        else (HOST, slot - border, generation[slot])
        for slot in slots
    ]
    lease = book.open(slots, reader=reader, request=request, expires=expires, epoch=epoch)
    return Grant(lease.lease_id, rows, expires)


def _ready_prefix(table: SlotTable, keys: Sequence[bytes]) -> list[int]:
    get, state = table.where.get, table.state
    slots = []
    for key in keys:
        slot = get(key)
        if slot is None or state[slot] != READY:
            break
        slots.append(slot)
    return slots
