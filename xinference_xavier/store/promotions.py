# SPDX-License-Identifier: Apache-2.0
"""Leased host blocks that are copied back into free device slots. No lock.

A block is on its way as part of the load that has just read it. Nothing is given up for it: it
takes a free slot or stays, and until its copy is good readers get it from the host tier.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.leases import LeaseBook
from xinference_xavier.store.placement import Placement
from xinference_xavier.store.records import Promotion


@dataclass(frozen=True, slots=True)
class _Pending:
    """``moves`` are (position in the lease, host slot, device slot), in slot numbers of the table.

    The device slots stay taken until the workers are done with them, whatever becomes of the
    lease and its blocks.
    """

    lease_id: int
    moves: list[tuple[int, int, int]]


class Promotions:
    """Plans promotions of leased blocks and applies their outcomes."""

    def __init__(self, placement: Placement, book: LeaseBook) -> None:
        self._placement = placement
        self._table = placement.table
        self._book = book
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0

    def targets(self) -> list[int]:
        """The device slots that are being written."""
        return [target for pending in self._pending.values() for _, _, target in pending.moves]

    def plan(self, lease_id: int, first: int, count: int, epoch: int) -> Promotion:
        """See ``SnapshotIndex.promote``."""
        nothing = Promotion(0, [])
        table = self._table
        room = self._placement.room(Tier.DEVICE)
        lease = self._book.get(lease_id)
        if room <= 0 or lease is None or lease.reader is not None or lease.epoch != epoch:
            return nothing
        movable = [
            (position, source)
            for position, source in enumerate(lease.slots[first : first + count], first)
            if source >= table.device_slots and table.holds[source] == 1
        ]
        # Fewer slots than blocks: the end of the prefix stays where it is.
        targets = table.take(Tier.DEVICE, min(room, len(movable)))
        moves = [(*one, target) for one, target in zip(movable, targets, strict=False)]
        rows = [(table.local(source), target, table.copy_to(target)) for _, source, target in moves]
        if not moves:
            return nothing
        self._last_id += 1
        self._pending[self._last_id] = _Pending(lease_id, moves)
        return Promotion(self._last_id, rows)

    def finish(self, promotion_id: int, promoted: Collection[int], epoch: int) -> int:
        """See ``SnapshotIndex.finish_promotion``."""
        pending = self._pending.pop(promotion_id, None)
        if pending is None:
            raise ValueError(f"promotion {promotion_id} is unknown, or was finished already")
        table, totals, moves = self._table, self._placement.totals, pending.moves
        lease = self._book.get(pending.lease_id)
        # Of a lease that is being released, what is left keeps its positions.
        slots = lease.slots if lease is not None and lease.epoch == epoch else []
        moved = 0
        # From the end of the prefix on: that is what stays behind where a limit was lowered.
        for row in range(len(moves) - 1, -1, -1):
            position, source, target = moves[row]
            if (
                row in promoted
                and position < len(slots)
                and slots[position] == source
                and table.holds[source] == 1
                and self._placement.room(Tier.DEVICE) >= 0
            ):
                table.promote(source, target)
                slots[position] = target
                moved += 1
            else:
                table.reclaim(target)
        totals.promotions += moved
        totals.failed_promotions += len(moves) - moved
        return moved

    def abort_all(self) -> None:
        """Give up every promotion in flight."""
        for target in self.targets():
            self._table.reclaim(target)
        self._pending.clear()
