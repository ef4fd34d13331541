# SPDX-License-Identifier: Apache-2.0
"""Who leases which slots until when. Time is passed in; locking is the owner's."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

_IDLE_ENTRIES = 64
"""Deadlines of ended leases that may pile up before the heap is rebuilt."""


@dataclass(slots=True)
class Lease:
    """``slots`` are the index's slot numbers in key order.

    ``reader`` is None for the replica itself. ``epoch`` is the content epoch it was given in.
    """

    lease_id: int
    reader: str | None
    request: str
    slots: list[int]
    expires: float
    epoch: int


class LeaseBook:
    """All live leases, and each reader's share of the store.

    ``reader_share`` is the part of the store's ``capacity`` (blocks, both tiers), in (0, 1], that
    one reader may lease, and at least one block. It is not counted per tier: the start of a long
    prefix is in the device tier, and a small device budget would cut every such grant there. Nor
    per lease: requests of one reader that share a prefix keep its blocks from eviction only once.
    """

    def __init__(self, capacity: int, reader_share: float) -> None:
        if not 0 < reader_share <= 1:
            raise ValueError(f"reader_share is {reader_share}, must be in (0, 1]")
        self._share = reader_share
        self._most = self._limit = max(1, math.floor(capacity * reader_share))
        self._leases: dict[int, Lease] = {}
        # Per reader with a live lease: slot to the times that the reader's leases name it.
        self._shares: dict[str, dict[int, int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def get(self, lease_id: int) -> Lease | None:
        """The lease, or None when it has ended."""
        return self._leases.get(lease_id)

    def resize(self, capacity: int) -> None:
        """The store holds ``capacity`` blocks now, at most those it was made for.

        What a reader leases above its new share stays leased.
        """
        self._limit = max(1, math.floor(capacity * self._share))

    def live(self) -> list[Lease]:
        """All leases that have not ended."""
        return list(self._leases.values())

    def readers(self) -> int:
        """How many peers have a share in use."""
        return len(self._shares)

    def allowance(self, reader: str | None, slots: Sequence[int]) -> int:
        """How many of ``slots``, from the first on, ``reader`` may lease now.

        What it leases already is free of charge; the replica itself may lease anything.
        """
        if reader is None:
            return len(slots)
        share = self._shares.get(reader, {})
        room = self._limit - len(share)
        if len(slots) <= room:
            return len(slots)
        new: set[int] = set()
        for position, slot in enumerate(slots):
            if slot not in share and slot not in new:
                if len(new) >= room:
                    return position
                new.add(slot)
        return len(slots)

    def open(
        self,
        slots: Sequence[int],
        *,
        reader: str | None,
        request: str,
        expires: float,
        epoch: int,
    ) -> Lease:
        """Enter a new lease of slots that the reader's :meth:`allowance` covers."""
        self._last_id += 1
        lease = Lease(self._last_id, reader, request, list(slots), expires, epoch)
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (expires, lease.lease_id))
        if reader is not None:
            share = self._shares.setdefault(reader, {})
            for slot in slots:
                share[slot] = share.get(slot, 0) + 1
        return lease

    def renew(self, lease_id: int, expires: float) -> bool:
        """Let the lease end no earlier than ``expires``; False when it has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires = max(lease.expires, expires)
        return True

    def end(self, lease_id: int) -> Lease | None:
        """Take the lease out; None when it had ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._give_back(lease, lease.slots)
        if len(self._deadlines) > 2 * len(self._leases) + _IDLE_ENTRIES:
            self._deadlines = [(live.expires, live.lease_id) for live in self._leases.values()]
            heapq.heapify(self._deadlines)
        return lease

    def shorten(self, lease_id: int, most: int) -> Lease | None:
        """Take the last ``most`` slots out of the lease, and with its last slot the lease.

        Returns a lease of those slots only; None when it had ended already.
        """
        lease = self._leases.get(lease_id)
        if lease is None or len(lease.slots) <= most:
            return self.end(lease_id)
        tail = lease.slots[-most:]
        del lease.slots[-most:]
        self._give_back(lease, tail)
        return replace(lease, slots=tail)

    def end_next_expired(self, now: float) -> Lease | None:
        """End the lease that ran out first, at or before ``now``; None when there is none.

        A deadline is entered once per lease; where renewals have moved it, it is entered again
        when its first turn comes.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(self._deadlines[0][1])
            if lease is not None and lease.expires > now:
                heapq.heapreplace(self._deadlines, (lease.expires, lease.lease_id))
                continue
            heapq.heappop(self._deadlines)
            if lease is not None:
                return self.end(lease.lease_id)
        return None

    def contradiction(self) -> str | None:
        """What is wrong with the book, or None."""
        counts: dict[str, Counter[int]] = {}
        for lease in self._leases.values():
            if not lease.slots:
                return f"lease {lease.lease_id} of request {lease.request!r} has no slots"
            if lease.reader is not None:
                counts.setdefault(lease.reader, Counter()).update(lease.slots)
        # As plain dicts: a Counter takes a slot that is counted 0 times for one that is missing.
        shares = {reader: dict(count) for reader, count in counts.items()}
        for reader in shares.keys() | self._shares.keys():
            if shares.get(reader) != self._shares.get(reader):
                return f"the leases of reader {reader!r} do not add up to its share"
        for reader, share in shares.items():
            if len(share) > self._most:
                return f"reader {reader!r} leases {len(share)}, more than its share {self._most}"
        without = set(self._leases) - {lease_id for _, lease_id in self._deadlines}
        return f"leases {sorted(without)} have no deadline" if without else None

    def _give_back(self, lease: Lease, slots: Sequence[int]) -> None:
        """These slots of a lease no longer count for its reader."""
        if lease.reader is None:
            return
        share = self._shares[lease.reader]
        for slot in slots:
            left = share[slot] - 1
            if left:
                share[slot] = left
            else:
                del share[slot]
        if not share:
            del self._shares[lease.reader]
