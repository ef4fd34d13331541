# SPDX-License-Identifier: Apache-2.0
"""One segment of a load: the rows of one source, copied, checked and accounted.

A row counts when its slot's generation was the promised one before and after the copy and, with
verification on, when the KV block has the slot's checksum afterwards. Anything else leaves the
row failed. Loading stops at the first failed chunk: later blocks of a prefix are useless then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.arena import SlotMemory
from xinference_xavier.store.checksum import Mask, Verifier
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.device import Device, IntArray, Mark
from xinference_xavier.store.jobs import OWN_STORE, LoadSegment, SegmentResult, Tier
from xinference_xavier.transport.base import (
    Connection,
    SlotView,
    TransferFailed,
    TransferTimeout,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.faults import blames
from xinference_xavier.transport.gate import Gate
from xinference_xavier.transport.links import Paths, PeerLinks
from xinference_xavier.transport.pool import StagingPool

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 64 << 20
"""A thread looks at the clock after copying this much, some 10 ms."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the segment loads of one engine share. ``arenas`` are our own.

    Tensors over them are taken for each copy, never kept: a closed arena's memory goes at once.
    """

    layout: BlockLayout
    arenas: Mapping[Tier, SlotMemory]
    device: Device
    links: PeerLinks
    pools: Mapping[Tier, StagingPool]

    @property
    def chunk(self) -> int:
        """Rows between two looks at the clock."""
        return max(1, _CHUNK_BYTES // self.layout.slot_bytes)


class SegmentLoad:
    """Loads one segment on the calling load thread. Use once."""

    def __init__(
        self,
        means: Means,
        segment: LoadSegment,
        *,
        request_id: str,
        peer: WorkerHandle | None,
        after: Mark | None,
        deadline: float,
        quick: bool,
        verifier: Verifier | None,
        gate: Gate,
    ) -> None:
        """``peer`` is the handle of the segment's member, ``deadline`` a monotonic instant.

        Nothing is written into KV blocks before the mark ``after``, or when ``gate`` is shut.

        A ``quick`` load opens no connection: it uses memory that is mapped already, or fails.
        """
        self._means = means
        self._segment = segment
        self._request_id = request_id
        self._peer = peer
        self._after = after
        self._deadline = deadline
        self._quick = quick
        self._verifier = verifier
        self._gate = gate
        self._good: Mask = np.zeros(len(segment.rows), dtype=np.bool_)
        self._result = SegmentResult(segment.member, "none")
        self._connected: float | None = None
        self._read_at = 0.0
        self._used: dict[Tier, Connection] = {}
        """The connections that rows were read over, in that order."""

    def run(self) -> SegmentResult:
        """Load what can be loaded; every row that was not is in ``failed_rows``."""
        member, result = self._segment.member, self._result
        start = time.monotonic()
        try:
            self._check()
            self._means.device.after(self._after)
            if member == OWN_STORE:
                result.transport = "local"
                self._rows(None)
            else:
                self._from_peer(member)
        except TransportUnavailable as error:
            self._fail("unavailable", error)
        except (TransferTimeout, TimeoutError) as error:
            self._fail("timeout", error)
        except TransferFailed as error:
            self._fail("transfer", error)
        except Exception as error:  # fail open: the rows are recomputed, the thread lives on
            logger.exception("load of request %s failed", self._request_id)
            self._fail("transfer", error)
        result.failed_rows = set(np.flatnonzero(~self._good).tolist())
        result.nbytes = int(self._good.sum()) * self._means.layout.slot_bytes
        end = time.monotonic()
        result.seconds = end - start
        if self._connected is not None:
            # Opening a connection is no part of the path's bandwidth.
            self._means.links.worked(member, self._used, result.nbytes, end - self._connected)
        return result

    def _from_peer(self, member: int) -> None:
        if self._peer is None:
            raise TransportUnavailable(f"the handle of member {member} is not known")
        links = self._means.links
        use = (
            links.use_mapped(member, self._peer, tiers_of(self._segment))
            if self._quick
            else links.use(member, self._peer, deadline=self._deadline)
        )
        with use as paths:
            for tier in tiers_of(self._segment) - set(paths):
                raise TransferFailed(f"the peer has no {Tier(tier).name} tier")
            self._connected = self._read_at = time.monotonic()
            try:
                self._rows(paths)
            except TransferFailed as error:
                self._blame(error)
                raise
            except CudaError as error:
                # No local variable names the new one: with its traceback it would keep this frame,
                # and with that the peer's mapped memory.
                self._blame(TransferFailed(str(error)))
                raise TransferFailed(str(error)) from error
            finally:
                names = {path.transport for path in self._used.values()}
                self._result.transport = "+".join(sorted(names)) or "none"

    def _blame(self, error: TransferFailed) -> None:
        """Tell of a connection that failed: the next load opens it anew or takes another path.

        One that had too little time, for whatever came before, is kept.
        """
        if self._used and blames(error, self._deadline - self._read_at):
            self._means.links.failed(list(self._used.values())[-1], error)

    def _check(self) -> None:
        blocks = self._segment.rows[:, 3]
        if ((blocks < 0) | (blocks >= self._means.layout.num_blocks)).any():
            raise TransferFailed("a block id lies outside the KV cache")

    def _rows(self, paths: Paths | None) -> None:
        """Load chunks in prefix order until one of them has a failed row."""
        rows, size = self._segment.rows, self._means.chunk
        for start in range(0, len(rows), size):
            if time.monotonic() >= self._deadline:
                raise TimeoutError("the load's time was over")
            chunk = rows[start : start + size]
            good = self._good[start : start + len(chunk)]
            for tier in sorted(set(chunk[:, 0].tolist())):
                mine = np.flatnonzero(chunk[:, 0] == tier)
                if paths is None:
                    good[mine] = self._copy(self._own(Tier(tier)), chunk[mine])
                    continue
                connection = self._path(paths, Tier(tier))
                view = connection.view()
                if view is not None:
                    good[mine] = self._copy(view, chunk[mine])
                else:
                    self._fetch(connection, chunk, mine, good)
            if not good.all():
                return

    def _own(self, tier: Tier) -> SlotView:
        arena = self._means.arenas.get(tier)
        if arena is None:
            raise TransferFailed(f"there is no {tier.name} tier")
        return SlotView(arena.data, arena.meta)

    def _path(self, paths: Paths, tier: Tier) -> Connection:
        # The last one is the one in use: it is blamed for what goes wrong.
        self._used.pop(tier, None)
        self._used[tier] = paths[tier]
        return paths[tier]

    def _copy(self, view: SlotView, rows: IntArray) -> Mask:
        """Copy mapped slots straight into KV blocks; return which rows are good."""
        slots, promised, blocks = rows[:, 1], rows[:, 2], rows[:, 3]
        if ((slots < 0) | (slots >= len(view.data))).any():
            raise TransferFailed(f"a slot lies outside the source's {len(view.data)}")
        meta = view.meta.numpy()
        good = _holds(meta[slots, 0], promised)
        checksums = meta[slots, 1]
        self._scatter(view.data, slots[good], blocks[good])
        good &= _holds(meta[slots, 0], promised)
        return self._judge(good, blocks, checksums)

    def _fetch(self, connection: Connection, chunk: IntArray, mine: IntArray, good: Mask) -> None:
        """Read rows ``mine`` of the chunk through staging slots, as many at once as are free."""
        ours = self._means.arenas[connection.staging]
        pool = self._means.pools[connection.staging]
        done = 0
        while done < len(mine):
            left = len(mine) - done
            with pool.lend(left, deadline=self._deadline) as staging:
                part = mine[done : done + len(staging)]
                slots, promised, blocks = chunk[part, 1], chunk[part, 2], chunk[part, 3]
                self._read_at = time.monotonic()
                meta = connection.fetch(slots.tolist(), staging, deadline=self._deadline)
                if tuple(meta.shape) != (len(part), 2):
                    raise TransferFailed(f"{tuple(meta.shape)} meta rows for {len(part)} slots")
                table = meta.numpy()
                holds = _holds(table[:, 0], promised)
                places = np.asarray(staging, dtype=np.int64)
                self._scatter(ours.data, places[holds], blocks[holds])
                good[part] = self._judge(holds, blocks, table[:, 1])
            if not good[part].all():
                return
            done += len(part)

    def _scatter(self, data: torch.Tensor, slots: IntArray, blocks: IntArray) -> None:
        with self._gate.writing():
            try:
                self._means.device.scatter(data, slots, blocks)
            finally:
                self._means.device.fence()

    def _judge(self, good: Mask, blocks: IntArray, checksums: IntArray) -> Mask:
        """Return which copied rows count, after verification, and note why others do not."""
        if not good.all():
            self._result.reason = "generation"
        if self._verifier is None:
            return good
        equal = self._verifier.equal(blocks[good], checksums[good])
        self._result.verified_blocks += int(equal.sum())
        if not equal.all():
            self._result.reason = self._result.reason or "checksum"
            logger.error(
                "Xavier: %d blocks of request %s differ from what member %d published",
                int((~equal).sum()),
                self._request_id,
                self._segment.member,
            )
        verified: Mask = good.copy()
        verified[good] = equal
        return verified

    def _fail(self, reason: str, error: Exception) -> None:
        self._result.reason = reason
        logger.warning(
            "Xavier load of request %s from member %d: %s: %s",
            self._request_id,
            self._segment.member,
            reason,
            str(error),  # a handler that keeps the record would keep this load's frames, too
        )


def tiers_of(segment: LoadSegment) -> set[int]:
    """Return the numbers of the tiers that a segment has rows of."""
    return set(segment.rows[:, 0].tolist())


def _holds(generations: IntArray, promised: IntArray) -> Mask:
    """Return where a slot has the promised content; 0 is a slot being written."""
    holds: Mask = (generations == promised) & (promised != 0)
    return holds
