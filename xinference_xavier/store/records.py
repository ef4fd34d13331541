# SPDX-License-Identifier: Apache-2.0
"""What the snapshot index takes and gives: plain values, no behaviour.

A key is the 32-byte hash of one block; a slot is a number within its tier, from 0; a generation
is a positive int that names one content of one slot and is never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from xinference_xavier.store.jobs import Tier

KEY_BYTES = 32

Row: TypeAlias = tuple[Tier, int, int]
"""Tier, slot, generation of one leased block."""


class StoreClosed(RuntimeError):
    """The store was closed; it does not come back."""


class InvariantError(RuntimeError):
    """The index's bookkeeping contradicts itself; the text names the first contradiction."""


class SkipReason(StrEnum):
    """Why a new block found no place."""

    NO_TIER = "no_tier"
    """Neither tier has room for a single block."""
    DEVICE_BUSY = "device_busy"
    """No device block may go now, and the host tier has no capacity."""
    HOST_LEASED = "host_leased"
    """No device block may go now, and the host tier is full of leased blocks."""
    HOST_BUSY = "host_busy"
    """No device block may go now, and copies in flight occupy every free host slot."""


class Admission(NamedTuple):
    """The plan for one batch of new blocks.

    ``demotions`` are (device slot, host slot, generation of the host slot). ``stores`` are
    (vLLM block id, tier, slot, generation, after), where ``after`` is the index of the demotion
    that must have succeeded first, or -1; ``keys`` has one key per store. ``held`` are indices
    into the batch of the blocks that need no copy, ``skipped`` counts the blocks that found no
    place, ``removed`` are keys that readers can no longer get. ``job_id`` is to be committed
    exactly once; it is 0 when there is nothing to store, and then nothing is to be committed.
    """

    job_id: int
    demotions: list[tuple[int, int, int]]
    stores: list[tuple[int, Tier, int, int, int]]
    keys: list[bytes]
    held: list[int]
    skipped: dict[SkipReason, int]
    removed: list[bytes]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Host blocks of one lease that are to be copied into free device slots.

    ``rows`` are (host slot, device slot, generation of the device slot), in key order.
    ``promotion_id`` is to be finished exactly once; it is 0 when there are no rows, and then
    nothing is to be finished.
    """

    promotion_id: int
    rows: list[tuple[int, int, int]]


class Changes(NamedTuple):
    """Keys that readers can newly get, and keys that they no longer can. Never in both."""

    added: list[bytes]
    removed: list[bytes]


class Grant(NamedTuple):
    """A lease on the blocks in ``rows``, in key order, until ``expires`` on the source's clock.

    With no rows there is no lease, and ``lease_id`` is 0.
    """

    lease_id: int
    rows: list[Row]
    expires: float


@dataclass(slots=True)
class Totals:
    """What happened since the index was made. Only ever grows."""

    admitted: int = 0
    """Blocks published by a commit."""
    held: int = 0
    """Blocks of batches that were held already, or twice in one batch."""
    demotions: int = 0
    """Blocks moved from the device tier to the host tier."""
    promotions: int = 0
    """Blocks moved from the host tier to the device tier."""
    failed_promotions: int = 0
    """Blocks that stayed in the host tier: their copy failed, or meanwhile others leased them too,
    or the lease had ended, or the device tier's limit was lowered."""
    evictions: int = 0
    """Host blocks that made room for an arriving block."""
    drops: int = 0
    """Device blocks that were dropped without a copy to make room."""
    limit_evictions: int = 0
    """Blocks of either tier that went because its limit was lowered."""
    arrival_drops: int = 0
    """Copied blocks that found every host block leased (or reported held) when they arrived."""
    failed_stores: int = 0
    """Blocks whose copy failed, or whose demotion did."""
    failed_demotions: int = 0
    discarded: int = 0
    """Blocks copied in vain: the store was cleared meanwhile."""
    granted: int = 0
    """Blocks leased, counted once per lease."""
    double_releases: int = 0
    """Releases of leases that had ended."""
    reaped: int = 0
    """Leases that ran out."""
    share_cuts: int = 0
    """Grants cut short because the reader held its share of the store."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The index at one instant. Blocks are counted in blocks, leases in leases.

    ``device_blocks`` and ``host_blocks`` are the ready ones, leased or not; ``staging`` blocks
    are being written for the first time, ``demoting`` ones from tier to tier, and copies of
    ``promoting`` ones back, readable meanwhile; ``zombies`` left with a ``clear()`` and wait for
    their leases to end; ``leased_blocks`` counts ready blocks, ``leased`` those of each tier.
    ``limits`` are the blocks that each tier may hold now, ``capacity`` the most that it can.
    """

    epoch: int
    limits: tuple[int, int]
    capacity: tuple[int, int]
    device_blocks: int
    host_blocks: int
    device_free: int
    host_free: int
    staging: int
    demoting: int
    promoting: int
    zombies: int
    leased_blocks: int
    leased: tuple[int, int]
    leases: int
    jobs: int
    skips: dict[SkipReason, int]
    totals: Totals


@dataclass(frozen=True, slots=True)
class FinalCounters:
    """A closed store: what clearing it left behind, and ``reached``, the last state before.

    Everything but ``reached`` is 0 unless the bookkeeping has a fault. ``device_lru``,
    ``host_lru`` and ``global_lru`` are the lengths of the orders, ``keys`` is what lookups can
    find, ``readers`` counts peers whose share is in use, and ``used_slots`` the slots of both
    tiers that are not free. The others are those of :class:`Counters`.
    """

    device_lru: int
    host_lru: int
    global_lru: int
    keys: int
    leases: int
    readers: int
    jobs: int
    staging: int
    demoting: int
    promoting: int
    zombies: int
    leased_blocks: int
    used_slots: int
    reached: Counters
