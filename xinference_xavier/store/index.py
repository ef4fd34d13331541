# SPDX-License-Identifier: Apache-2.0
"""The snapshot index: which block is in which slot, in what order, leased by whom.

Pure bookkeeping of one replica, on its scheduler side: no bytes, no torch, no sockets, and no
clock (times are floats of the caller's monotonic clock, in seconds). The engine's thread, the
peer's thread and the reaper share it; every public method takes one lock, and nothing waits,
logs or calls back under it. The engine's thread passes ``wait=False`` where it looks up, and gets
None ("ask again") while another thread is inside.

``admit``, ``commit`` and ``acquire`` hold the lock for all of their keys, at a microsecond or
less each. Callers bound that time: they pass a few hundred keys at once. ``release`` lets others
in between pieces of a long lease, and ``reap`` ends after some hundred blocks.

A block is written by a job: :meth:`SnapshotIndex.admit` plans it, a worker runs it, and
:meth:`SnapshotIndex.commit` makes what succeeded visible. What readers have leased neither moves
nor goes until the lease ends.

Where a tier's limit was lowered, blocks also go when leases end. The next ``admit`` or ``commit``
tells of those among the removed keys, or :meth:`SnapshotIndex.take_removed` does.

Orders: within one call, earlier keys end up more recently used than later ones, so that a prefix
outlives its suffix, which is useless without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Literal, overload

from xinference_xavier.store import audit, census, grants
from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.leases import Lease, LeaseBook
from xinference_xavier.store.placement import Placement
from xinference_xavier.store.promotions import Promotions
from xinference_xavier.store.records import (
    KEY_BYTES,
    Admission,
    Changes,
    Counters,
    FinalCounters,
    Grant,
    InvariantError,
    Promotion,
    Row,
    SkipReason,
    StoreClosed,
    Totals,
)
from xinference_xavier.store.slots import SlotTable

__all__ = [
    "KEY_BYTES",
    "Admission",
    "Changes",
    "Counters",
    "FinalCounters",
    "Grant",
    "InvariantError",
    "Promotion",
    "Row",
    "SkipReason",
    "SnapshotIndex",
    "StoreClosed",
    "Totals",
]

RELEASE_BLOCKS = 256
"""A release lets others in after so many blocks."""

REAP_BLOCKS = 512
"""One ``reap`` stops after the lease that brings it to this many blocks."""

TRIM_BLOCKS = 256
"""A lowered limit takes effect in pieces of so many blocks."""

TRIM_PAUSE_S = 0.0005
"""Pause between the pieces: without one, who waits for the lock would hardly ever get it."""


class SnapshotIndex:
    """The bookkeeping of both tiers of one replica.

    ``device_slots`` and ``host_slots`` are the slots of the arenas; ``spare_slots`` of the host
    slots are kept for blocks that arrive while the tier is full, so that tier holds at most
    ``host_slots - spare_slots`` blocks. Either tier, or both, may be empty. One reader may lease
    at most ``reader_share`` of what both tiers together may hold, but at least one block; a block
    that several of its leases name counts once.

    Every method but :meth:`close` raises :class:`StoreClosed` after :meth:`close`.
    """

    def __init__(
        self,
        *,
        device_slots: int,
        host_slots: int,
        spare_slots: int,
        reader_share: float = 0.25,
    ) -> None:
        if device_slots < 0 or host_slots < 0:
            raise ValueError(f"slots are {device_slots} and {host_slots}, must not be negative")
        if not 0 <= spare_slots <= host_slots:
            raise ValueError(f"spare_slots is {spare_slots}, must be in [0, {host_slots}]")
        self._lock = threading.Lock()
        self._capacity = (device_slots, host_slots - spare_slots)
        self._table = SlotTable(device_slots, host_slots)
        self._book = LeaseBook(sum(self._capacity), reader_share)
        self._totals = Totals()
        self._placement = Placement(self._table, self._capacity, self._totals)
        self._promotions = Promotions(self._placement, self._book)
        self._removed: dict[bytes, None] = {}
        self._trimming = 0
        self._epoch = 0
        self._final: FinalCounters | None = None

    # Writing: the plan and its outcome.

    @overload
    def admit(
        self, blocks: Sequence[tuple[bytes, int]], *, wait: Literal[True] = True
    ) -> Admission: ...
    @overload
    def admit(self, blocks: Sequence[tuple[bytes, int]], *, wait: bool) -> Admission | None: ...
    def admit(self, blocks: Sequence[tuple[bytes, int]], *, wait: bool = True) -> Admission | None:
        """Find a place for a batch of new blocks, given as (key, vLLM block id).

        For each block: a free device slot; else the least recently used device block that is not
        leased makes room, by a demotion, or at once without a copy where the host tier cannot
        take it; else a place in the host tier; else it is skipped. Blocks that are held or being
        written are only used again; none of them makes room for others of its own batch.

        Raises ValueError, with nothing changed, for a key that is not 32 bytes or a negative
        block id. Returns None if ``wait`` is False and the index is busy.
        """
        for key, block_id in blocks:
            if len(key) != KEY_BYTES:
                raise ValueError(f"block {block_id} has a key of {len(key)} bytes, not {KEY_BYTES}")
            if block_id < 0:
                raise ValueError(f"block id is {block_id}, must not be negative")
        if not self._enter(wait):
            return None
        try:
            plan = self._placement.plan(blocks, self._epoch)
            self._tell(plan.removed)
            return plan
        finally:
            self._lock.release()

    def commit(
        self,
        job_id: int,
        *,
        failed_demotions: Collection[int] = (),
        failed_stores: Collection[int] = (),
        unsure_demotions: Collection[int] = (),
    ) -> Changes:
        """Make visible what a job achieved, once every rank has reported it.

        The failed entries are indices into the admission's ``demotions`` and ``stores``; a store
        whose demotion failed counts as failed. Where a demotion is unsure (it failed on some
        ranks only, and on the others the new block has overwritten its source), both blocks are
        gone. A job from before a ``clear()`` only frees its slots. Raises ValueError, with
        nothing changed, for a job that is unknown or committed already, and for an index that
        the job does not have.
        """
        self._enter(wait=True)
        try:
            changes = self._placement.finish(
                job_id,
                self._epoch,
                frozenset(failed_demotions),
                frozenset(failed_stores),
                frozenset(unsure_demotions),
            )
            self._tell(changes.removed)
            return changes
        finally:
            self._lock.release()

    def abandon(self, job_id: int) -> Changes:
        """Commit a job whose outcome is not known: the blocks that it stored or moved are gone.

        Raises ValueError for a job that is unknown or committed already.
        """
        with self._locked():
            changes = self._placement.give_up(job_id, self._epoch)
            self._tell(changes.removed)
            return changes

    # Reading: lookups and leases.

    @overload
    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        reader: str | None,
        request: str,
        now: float,
        duration: float,
        wait: Literal[True] = True,
    ) -> Grant: ...
    @overload
    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        reader: str | None,
        request: str,
        now: float,
        duration: float,
        wait: bool,
    ) -> Grant | None: ...
    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        reader: str | None,
        request: str,
        now: float,
        duration: float,
        wait: bool = True,
    ) -> Grant | None:
        """Lease the longest prefix of ``keys`` that readers can get, for ``duration`` seconds.

        ``reader`` is the peer (with its epoch), or None for the replica itself, to which no
        share applies. When the lease ends, its blocks become the most recently used ones.
        Returns None if ``wait`` is False and the index is busy.
        """
        if not 0 < duration < inf:
            raise ValueError(f"duration is {duration} s, must be positive and finite")
        if not self._enter(wait):
            return None
        try:
            return grants.give(
                self._placement,
                self._book,
                keys,
                reader=reader,
                request=request,
                expires=now + duration,
                epoch=self._epoch,
            )
        finally:
            self._lock.release()

    def renew(self, lease_id: int, *, now: float, duration: float) -> bool:
        """Let the lease last ``duration`` seconds from ``now``, never shorter than before.

        False when it has ended: then the blocks may be gone.
        """
        if not 0 < duration < inf:
            raise ValueError(f"duration is {duration} s, must be positive and finite")
        with self._locked():
            return self._book.renew(lease_id, now + duration)

    def release(self, lease_id: int) -> bool:
        """End a lease. False, and counted, when it had ended already; 0 is no lease.

        A long lease ends piece by piece, from its end on, and lets others in between the pieces.
        """
        live = False
        while True:
            self._enter(wait=True)
            try:
                if lease_id == 0:
                    return False
                piece = self._book.shorten(lease_id, RELEASE_BLOCKS)
                if piece is not None:
                    self._unhold(piece)
                elif not live:
                    self._totals.double_releases += 1
                if piece is None or lease_id not in self._book:
                    return live or piece is not None
            finally:
                self._lock.release()
            live = True

    def knows(self, key: bytes) -> bool:
        """Return what :meth:`holds` does, of this instant or the last, without the lock."""
        return key in self._table.where

    def holds(self, key: bytes) -> bool:
        """Whether the block is here in any state: readable, being written or on the move."""
        with self._locked():
            return key in self._table.where

    def reap(self, now: float) -> int:
        """End leases that have run out; returns how many.

        Bounded work: it stops after some hundred blocks, and the next call goes on.
        """
        ended = blocks = 0
        with self._locked():
            while blocks < REAP_BLOCKS:
                lease = self._book.end_next_expired(now)
                if lease is None:
                    break
                self._unhold(lease)
                ended += 1
                blocks += len(lease.slots)
            self._totals.reaped += ended
        return ended

    def snapshot(self, cursor: int = 0, limit: int = 256) -> tuple[list[bytes], int | None]:
        """The keys that readers can get in the ``limit`` slots from ``cursor`` on.

        Returns them with the cursor of the next call, None after the last slot. What changes
        between two calls is missing or contained; the deltas of those changes tell.
        """
        if cursor < 0 or limit < 1:
            raise ValueError(f"cursor is {cursor} and limit {limit}, must be >= 0 and >= 1")
        with self._locked():
            end = min(cursor + limit, self._table.slots)
            return self._table.visible(cursor, end), end if end < self._table.slots else None

    # Back to the device tier.

    def promote(
        self, lease_id: int, first: int, count: int, *, wait: bool = True
    ) -> Promotion | None:
        """Find free device slots for host blocks that the replica itself has leased and loads.

        For those of the lease's blocks ``first`` to before ``first + count`` that nobody else
        has leased, as many as find a free slot; never by moving another block. Nothing for a
        lease that has ended, is a peer's or is from before a ``clear()``. The slots stay taken
        until :meth:`finish_promotion`. Returns None if ``wait`` is False and the index is busy.
        """
        if not self._enter(wait):
            return None
        try:
            return self._promotions.plan(lease_id, first, count, self._epoch)
        finally:
            self._lock.release()

    def finish_promotion(self, promotion_id: int, promoted: Collection[int] = ()) -> int:
        """End a promotion once no worker writes for it any more; returns how many blocks moved.

        ``promoted`` are the rows whose copies are good on every rank. Called before the lease is
        released: a block moves to its device slot, and the lease with it, while that lease is
        live and the only one on the block. All other device slots become free. Raises ValueError
        for a promotion that is unknown or finished already.
        """
        with self._locked():
            return self._promotions.finish(promotion_id, promoted, self._epoch)

    # The whole store.

    def set_limits(
        self, *, device_slots: int | None = None, host_slots: int | None = None
    ) -> Changes:
        """Let each tier hold at most so many blocks from now on; None leaves a tier's limit.

        Lowering a limit evicts the least recently used blocks above it that are not leased,
        without a copy; leased ones and those in flight follow when their leases end and their
        jobs are committed. No memory is returned. Not for the engine's thread: it works, and
        pauses, in pieces, between which others use the index.

        Returns the removed keys; some of them may be here again by then (see :meth:`holds`).
        Raises ValueError, with nothing changed, for a limit that is negative or above the tier's
        capacity.
        """
        limits = []
        for tier, asked in zip(Tier, (device_slots, host_slots), strict=True):
            most = self._capacity[tier]
            if asked is not None and not 0 <= asked <= most:
                name = tier.name.lower()
                raise ValueError(f"the {name} limit is {asked} slots, must be in [0, {most}]")
            limits.append(asked)
        with self._locked():
            device, host = (
                old if asked is None else asked
                for old, asked in zip(self._placement.limits, limits, strict=True)
            )
            self._placement.limits = (device, host)
            self._book.resize(device + host)
            self._trimming += 1
        removed: list[bytes] = []
        while True:
            with self._locked():
                piece = self._placement.trim(TRIM_BLOCKS)
                removed += piece
                if len(piece) < TRIM_BLOCKS:
                    self._trimming -= 1
                    return Changes([], removed)
            time.sleep(TRIM_PAUSE_S)

    def take_removed(self) -> list[bytes]:
        """The keys of blocks that went when leases ended, as far as no call has told of them."""
        with self._locked():
            taken, self._removed = self._removed, {}
        return list(taken)

    def clear(self) -> int:
        """Take all blocks from readers at once; returns the new content epoch.

        Slots that are leased become free when their leases end, slots that are written when
        their jobs are committed, and nothing of those is ever visible again. The caller
        withdraws the keys from the directory.
        """
        with self._locked():
            old = self._table.clear()
            self._removed.clear()
            self._epoch += 1
            epoch = self._epoch
        # Millions of keys take a while to destroy: not while others wait for the lock.
        del old
        return epoch

    def counters(self) -> Counters:
        """The index at this instant."""
        with self._locked():
            return self._counters()

    def close(self) -> FinalCounters:
        """Forget everything: orders, keys, leases, jobs. Idempotent, returns the same each time.

        Leases end and jobs are abandoned the way they always do after a ``clear()``; the result
        counts what that leaves behind, which is nothing unless the bookkeeping has a fault.
        """
        with self._lock:
            if self._final is not None:
                return self._final
            reached = self._counters()
            table = self._table
            old = table.clear()
            self._placement.abort_all()
            self._promotions.abort_all()
            self._removed.clear()
            for lease in self._book.live():
                self._book.end(lease.lease_id)
                table.unhold(lease.slots, zombie=True)
            final = self._final = census.final(self._placement, self._book, reached)
        del old
        return final

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the bookkeeping contradicts itself.

        Looks at every slot under the lock: for tests and for a diagnosis.
        """
        with self._locked():
            found = audit.contradiction(
                self._placement,
                self._promotions,
                self._book,
                capacity=self._capacity,
                epoch=self._epoch,
                trimming=self._trimming > 0,
            )
        if found is not None:
            raise InvariantError(found)

    # Inner parts, all under the lock.

    def _enter(self, wait: bool) -> bool:
        """Take the lock of an open store; False, without it, when it is busy and ``wait`` is not.

        Spelt out with ``try`` and ``release`` in what the engine's thread calls per request.
        """
        if not self._lock.acquire(blocking=wait):
            return False
        if self._final is not None:
            self._lock.release()
            raise StoreClosed("the snapshot store is closed")
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._enter(wait=True)
        try:
            yield
        finally:
            self._lock.release()

    def _unhold(self, lease: Lease) -> None:
        """End a lease, or the part of it that is given here."""
        self._table.unhold(lease.slots[::-1], zombie=lease.epoch != self._epoch)
        for key in self._placement.trim(len(lease.slots)):
            self._removed[key] = None

    def _tell(self, removed: list[bytes]) -> None:
        """Add what is still to be told to ``removed``.

        A key is told before its block can come back: an admission tells of everything.
        """
        if self._removed:
            removed += self._removed
            self._removed.clear()

    def _counters(self) -> Counters:
        return census.now(self._placement, self._book, capacity=self._capacity, epoch=self._epoch)
