# SPDX-License-Identifier: Apache-2.0
"""Which blocks are copied into the store, and when readers may see them.

A block is planned in the step that fills it: its source is pinned through vLLM's block pool, the
index gives it a slot, and the worker copies it after that step's forward. Readers see it only when
every rank has reported the copy. A pin lasts from the plan to that report. Nothing here waits: if
the index is busy, the blocks stay pinned and are offered again in the next step.

All methods run on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from xinference_xavier.store.index import Admission, SnapshotIndex, StoreClosed
from xinference_xavier.store.jobs import StoreJob, StoreResult
from xinference_xavier.vllm.compat import Blocks
from xinference_xavier.vllm.counters import Counters

logger = logging.getLogger(__name__)

BATCH: Final = 256
"""Blocks per admission: bounds how long the index's lock is held."""

PIN_SHARE: Final = 8
"""Pins stay below one of this many parts of vLLM's pool, or half of what is free if that is more:
pins only hurt when blocks are short. None is taken while less than a sixteenth is free."""

MOST_REASONS: Final = 64
"""Reasons of failures that are told apart: some are texts of errors."""

Publish = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Tells the directory of keys that came and keys that went."""


class SavableRequest(Protocol):
    """The part of vLLM's ``Request`` that saving reads."""

    request_id: str
    block_hashes: Sequence[bytes]


@dataclass(slots=True)
class _Tracked:
    """A request that vLLM runs: its blocks, and the first one that is not dealt with yet."""

    request: SavableRequest
    block_ids: list[int]
    next_block: int


@dataclass(slots=True)
class _Candidate:
    key: bytes
    block_id: int
    request_id: str


@dataclass(slots=True)
class _Job:
    """A job under way; ``ranks_left`` ranks have not reported it."""

    block_ids: list[int]
    request_ids: list[str]
    ranks_left: int
    failed_demotions: Counter[int] = field(default_factory=Counter)
    """Row to the number of ranks on which it failed."""
    failed_stores: set[int] = field(default_factory=set)


class Saves:
    """The save side of one replica's connector."""

    def __init__(
        self,
        *,
        index: SnapshotIndex,
        blocks: Blocks,
        block_tokens: int,
        ranks: int,
        publish: Publish,
        publishing: threading.Lock,
        counters: Counters,
    ) -> None:
        """``publishing`` is held from a commit to the publication of its changes, and by whoever
        clears the index and withdraws: the directory then hears of both in the same order."""
        self._index = index
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._publish = publish
        self._publishing = publishing
        self._counters = counters
        self._tracked: dict[str, _Tracked] = {}
        self._jobs: dict[int, _Job] = {}
        self._offered: list[_Candidate] = []
        self._pinned = 0
        self._most_pins = blocks.total // PIN_SHARE

    @property
    def pending(self) -> bool:
        """Whether a vLLM block is pinned; ends by local copies, so it is bounded."""
        return self._pinned > 0

    @property
    def pinned(self) -> int:
        """How many references this object holds on vLLM's blocks."""
        return self._pinned

    @property
    def jobs(self) -> int:
        """How many jobs the workers have not finished reporting."""
        return len(self._jobs)

    @property
    def following(self) -> int:
        """How many requests are followed."""
        return len(self._tracked)

    def admitted(
        self,
        request: SavableRequest,
        block_ids: Sequence[int],
        first_block: int,
        also: Iterable[int] = (),
    ) -> None:
        """Follow a request that vLLM starts or resumes.

        It computes the blocks from ``first_block`` on; of those before, only ``also`` are saved.
        """
        tracked = _Tracked(request, list(block_ids), first_block)
        self._tracked[request.request_id] = tracked
        for block in also:
            self._offered.extend(self._pinned_range(tracked, block, block + 1))

    def extended(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Note blocks that vLLM added to a running request."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.block_ids.extend(block_ids)

    def finished(self, request_id: str, computed_tokens: int) -> None:
        """Offer the full blocks that are left of a request which ends now, and forget it."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self._offered.extend(self._take(tracked, computed_tokens))
        lost = self._last_full(tracked, computed_tokens) - tracked.next_block
        if lost > 0:
            self._counters.saves_skipped["pins"] += lost

    def forget(self, request_id: str) -> None:
        """Stop following a request that lost its blocks, until it is admitted again."""
        self._tracked.pop(request_id, None)

    def abandon(self, reason: str) -> None:
        """Stop following every request and let go of what no job has yet; jobs go on."""
        self._tracked.clear()
        offered, self._offered = self._offered, []
        self._drop(offered, reason)

    def plan(self, computed: Iterable[tuple[str, int]]) -> list[StoreJob]:
        """Plan the saves of one step.

        ``computed`` holds, for each request scheduled in it, how many of its tokens have KV when
        the step is done.
        """
        for request_id, tokens in computed:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            # The one line that runs per request and step when there is nothing to save.
            if tracked.next_block < tokens // self._block_tokens:
                self._offered.extend(self._take(tracked, tokens))
        candidates, self._offered = self._offered, []
        jobs = []
        for first in range(0, len(candidates), BATCH):
            batch = candidates[first : first + BATCH]
            try:
                job = self._admit(batch)
            except Exception:
                # Fail open: the pins must go, and the jobs of other batches must be shipped.
                self._counters.errors["admit"] += 1
                logger.exception("Xavier could not place %d blocks; they are not saved", len(batch))
                self._drop(batch, "error")
                continue
            if job is not None:
                jobs.append(job)
        return jobs

    def completed(self, results: Iterable[StoreResult]) -> None:
        """Take the ranks' reports; publish each job that every rank has reported."""
        for result in results:
            job = self._jobs.get(result.job_id)
            if job is None:
                self._counters.errors["unknown store job"] += 1
                continue
            job.ranks_left -= 1
            job.failed_demotions.update(result.failed_demotions)
            job.failed_stores |= result.failed_stores
            if result.reason is not None:
                failed = self._counters.saves_failed
                told = result.reason in failed or len(failed) < MOST_REASONS
                failed[result.reason if told else "other"] += len(result.failed_stores)
            if job.ranks_left == 0:
                del self._jobs[result.job_id]
                self._commit(result.job_id, job)
                self._unpin(job.block_ids)

    def invalidated(self, block_ids: Collection[int]) -> None:
        """Drop the pending saves of every request with a block that failed to load."""
        hit = {
            request_id
            for request_id, tracked in self._tracked.items()
            if not set(block_ids).isdisjoint(tracked.block_ids)
        }
        if not hit:
            return
        for job in self._jobs.values():
            job.failed_stores.update(
                row for row, request_id in enumerate(job.request_ids) if request_id in hit
            )
        dropped = [item for item in self._offered if item.request_id in hit]
        self._offered = [item for item in self._offered if item.request_id not in hit]
        self._drop(dropped, "invalid prefix")

    def _last_full(self, tracked: _Tracked, tokens: int) -> int:
        """Return the end of the blocks that are full of ``tokens`` and known by hash."""
        known = min(len(tracked.request.block_hashes), len(tracked.block_ids))
        return min(tokens // self._block_tokens, known)

    def _take(self, tracked: _Tracked, tokens: int) -> list[_Candidate]:
        """Pin and return the next blocks to save, as many as the pin limits allow.

        The rest is taken in a later step: the request itself holds its blocks while it runs.
        """
        first, last = tracked.next_block, self._last_full(tracked, tokens)
        taken = self._pinned_range(tracked, first, last)
        tracked.next_block += len(taken)
        return taken

    def _pinned_range(self, tracked: _Tracked, first: int, last: int) -> list[_Candidate]:
        """Pin blocks ``first`` to ``last`` of a request, or as many of them as may be."""
        free = self._blocks.free
        room = max(self._most_pins, free // 2) - self._pinned
        if free < self._most_pins // 2:
            room = 0
        last = min(last, first + room)
        if last <= first:
            return []
        block_ids = tracked.block_ids[first:last]
        self._blocks.pin(block_ids)
        self._pinned += len(block_ids)
        keys, request_id = tracked.request.block_hashes, tracked.request.request_id
        return [
            _Candidate(key, block_id, request_id)
            for key, block_id in zip(keys[first:last], block_ids, strict=True)
        ]

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._blocks.unpin(block_ids)
        self._pinned -= len(block_ids)

    def _drop(self, candidates: Sequence[_Candidate], reason: str) -> None:
        if candidates:
            self._unpin([item.block_id for item in candidates])
            self._counters.saves_skipped[reason] += len(candidates)

    def _admit(self, candidates: list[_Candidate]) -> StoreJob | None:
        try:
            admission = self._index.admit(
                [(item.key, item.block_id) for item in candidates], wait=False
            )
        except StoreClosed:
            self._drop(candidates, "closed")
            return None
        if admission is None:
            self._offered.extend(candidates)
            return None
        for reason, count in admission.skipped.items():
            self._counters.saves_skipped[reason] += count
        job = self._start(admission, candidates)
        self._announce((), admission.removed)
        return job

    def _start(self, admission: Admission, candidates: list[_Candidate]) -> StoreJob | None:
        requests = {item.block_id: item.request_id for item in candidates}
        stored = [store[0] for store in admission.stores]
        to_keep = Counter(stored)
        not_stored = []
        for item in candidates:
            if to_keep[item.block_id]:
                to_keep[item.block_id] -= 1
            else:
                not_stored.append(item.block_id)
        self._unpin(not_stored)
        if not stored:
            return None
        self._jobs[admission.job_id] = _Job(
            stored, [requests[block_id] for block_id in stored], self._ranks
        )
        return StoreJob(
            admission.job_id,
            np.array(admission.demotions, dtype=np.int64).reshape(-1, 3),
            np.array(admission.stores, dtype=np.int64).reshape(-1, 5),
        )

    def _commit(self, job_id: int, job: _Job) -> None:
        """Let readers see what a job achieved on every rank."""
        try:
            with self._publishing:
                changes = self._index.commit(
                    job_id,
                    failed_demotions=job.failed_demotions,
                    failed_stores=job.failed_stores,
                    unsure_demotions=[
                        row for row, ranks in job.failed_demotions.items() if ranks < self._ranks
                    ],
                )
                self._announce(changes.added, changes.removed)
        except StoreClosed:
            return
        except Exception:
            # Fail open: other jobs of the same report must still be committed.
            self._counters.errors["commit"] += 1
            logger.exception("Xavier could not commit store job %d", job_id)
            self._give_up(job_id)
            return
        self._counters.saved_blocks += len(changes.added)

    def _give_up(self, job_id: int) -> None:
        """Free the slots of a job whose reports make no sense."""
        try:
            with self._publishing:
                self._announce((), self._index.abandon(job_id).removed)
        except StoreClosed:
            return
        except Exception:
            # Fail open, as above.
            self._counters.errors["commit"] += 1
            logger.exception("Xavier could not give up store job %d", job_id)

    def _announce(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if not added and not removed:
            return
        try:
            self._publish(added, removed)
        except Exception:
            # Fail open: the directory is a hint, the index above is what counts.
            self._counters.errors["publish"] += 1
            logger.exception("Xavier could not tell the directory of %d blocks", len(added))
