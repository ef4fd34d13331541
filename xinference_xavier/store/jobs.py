# SPDX-License-Identifier: Apache-2.0
"""The jobs that cross from the scheduler side to the workers, and their results.

A job says which bytes to move; it never says why. The scheduler side makes it from the index's
plan, ships it in the step's connector metadata, and changes what readers can see only when every
rank has reported the job (docs/design.md, "Policy apart from bytes"). All tables are int64 arrays
of fixed columns, so that a step's metadata pickles to a few hundred bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntTable = npt.NDArray[np.int64]

OWN_STORE = 0
"""``LoadSegment.member`` of the replica's own tiers; directory member numbers start at 1."""


NOT_STARTED = "not started"
"""Reason of a job that failed before anything of it was tried."""


class Tier(IntEnum):
    """Where a slot lives. On a CPU-only host the device tier is host memory too."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Demotions, then stores, of one batch of new blocks.

    ``demotions`` is int64 ``[D, 3]``: device slot, host slot, generation of the host slot.
    ``stores`` is int64 ``[S, 5]``: vLLM block id, tier, slot, generation, and ``after``: the row
    of ``demotions`` that must have succeeded first, or -1. A store whose demotion failed is not
    run and is reported failed.
    """

    job_id: int
    demotions: IntTable
    stores: IntTable


@dataclass(frozen=True, slots=True)
class LoadSegment:
    """Blocks of one source: ``rows`` is int64 ``[N, 4]``: tier, slot, generation, vLLM block id."""

    member: int
    rows: IntTable


def no_promotions() -> IntTable:
    """An empty :attr:`LoadJob.promotions`."""
    return np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load: segments in prefix order, at most ``timeout_s`` seconds in all.

    ``promotions`` is int64 ``[P, 3]``: host slot, device slot, generation of the device slot. Each
    host slot is one that the job loads from the own store: once all of the job's rows are good,
    its content is kept in the device slot, too.
    """

    job_id: int
    request_id: str
    segments: tuple[LoadSegment, ...]
    timeout_s: float
    promotions: IntTable = field(default_factory=no_promotions)


@dataclass(slots=True)
class StoreResult:
    """Outcome of a :class:`StoreJob` on one rank: the failed rows of each table."""

    job_id: int
    failed_demotions: set[int] = field(default_factory=set)
    failed_stores: set[int] = field(default_factory=set)
    reason: str | None = None
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class SegmentResult:
    """Outcome of one segment: failed rows with one reason, and what it cost."""

    member: int
    transport: str
    failed_rows: set[int] = field(default_factory=set)
    reason: str | None = None
    nbytes: int = 0
    seconds: float = 0.0
    verified_blocks: int = 0


@dataclass(slots=True)
class LoadResult:
    """Outcome of a :class:`LoadJob` on one rank, made when nothing of it can write any more.

    ``promoted`` are the rows of the job's ``promotions`` whose device slot is published; all
    others failed, or were not run.
    """

    job_id: int
    request_id: str
    segments: list[SegmentResult] = field(default_factory=list)
    seconds: float = 0.0
    promoted: set[int] = field(default_factory=set)


def failed_store(job: StoreJob, reason: str) -> StoreResult:
    """Return the result of a job of which nothing was done."""
    return StoreResult(
        job.job_id,
        failed_demotions=set(range(len(job.demotions))),
        failed_stores=set(range(len(job.stores))),
        reason=reason,
    )


def failed_segment(segment: LoadSegment, reason: str) -> SegmentResult:
    """Return the result of a segment of which nothing was loaded."""
    rows = set(range(len(segment.rows)))
    return SegmentResult(segment.member, "none", failed_rows=rows, reason=reason)
