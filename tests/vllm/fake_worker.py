# SPDX-License-Identifier: Apache-2.0
"""A worker without a model: KV blocks are lists of numbers, and the "model" reads all of them.

The KV value of a position is a function of its token and of *every* value before it, read through
the request's block table at the moment of the forward. The next token is a function of all values.
So one stale, late, missing or foreign block anywhere in a prefix gives wrong tokens.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from xinference_xavier.store.jobs import (
    OWN_STORE,
    LoadJob,
    LoadResult,
    SegmentResult,
    StoreJob,
    StoreResult,
    Tier,
)
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.vllm.metadata import ConnectorMeta, Handshake, WorkerMeta

BLOCK = 16
"""Tokens of one KV block."""

MASK = (1 << 61) - 1
SLOT_BYTES = 4096

Content = tuple[int, ...]
"""KV values of one block, one per token."""

GARBAGE: Content = (7,) * BLOCK
"""What a failed copy leaves behind."""


def value(before: int, token: int) -> int:
    """KV value of a token after a prefix whose values add up to ``before``."""
    return hash((before, token)) & MASK


def next_token(total: int) -> int:
    """The greedy next token after a prefix whose values add up to ``total``."""
    return total % 251


def values_of(tokens: Sequence[int]) -> list[int]:
    """KV values of a token sequence, computed from nothing."""
    values: list[int] = []
    total = 0
    for token in tokens:
        values.append(value(total, token))
        total = (total + values[-1]) & MASK
    return values


def contents_of(tokens: Sequence[int]) -> list[Content]:
    """Contents of the full blocks of a token sequence."""
    values = values_of(tokens)
    return [tuple(values[end - BLOCK : end]) for end in range(BLOCK, len(values) + 1, BLOCK)]


def answer_of(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that a correct engine answers."""
    total = 0
    for token in prompt:
        total = (total + value(total, token)) & MASK
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(total))
        total = (total + value(total, answer[-1])) & MASK
    return answer


class SlotMemory(Protocol):
    """Somebody's arenas."""

    def read(self, tier: int, slot: int) -> tuple[int, Content]:
        """Return the generation and the content of a slot."""


@dataclass
class Arenas:
    """Slots of both tiers: generation and content."""

    slots: dict[tuple[int, int], tuple[int, Content]] = field(default_factory=dict)

    def read(self, tier: int, slot: int) -> tuple[int, Content]:
        return self.slots.get((tier, slot), (0, ()))

    def write(self, tier: int, slot: int, generation: int, content: Content) -> None:
        self.slots[tier, slot] = (generation, content)


def no_store_fault(job: StoreJob) -> tuple[set[int], set[int]]:
    return set(), set()


@dataclass
class _Running:
    tokens: list[int]
    block_ids: list[int]


LoadFault = Callable[[LoadJob, int], str | None]
"""Takes a load and one of its rows (counted over all segments); returns why the row fails."""

StoreFault = Callable[[StoreJob], tuple[set[int], set[int]]]
"""Returns the rows of demotions and of stores that fail."""


class FakeWorker:
    """One rank. Copies run at once, or, while held, when the test says so.

    With two ``ranks`` the second one copies like the first, but reports its stores one step later
    and may fail rows of its own.
    """

    def __init__(
        self,
        name: str,
        *,
        blocks: int,
        device_slots: int,
        host_slots: int,
        ranks: int,
        registry: Registry,
        device: str = "cpu",
    ) -> None:
        self.ranks = ranks
        self.device = device
        self.second_rank_fails: set[int] = set()
        self.second_rank_fails_demotions: set[int] = set()
        self.second_rank_fails_promotions: set[int] = set()
        self._second_rank: list[StoreResult] = []
        self.name = name
        self.arenas = Arenas()
        self.kv: list[list[int]] = [[-1 - number] * BLOCK for number in range(blocks)]
        self.hold_loads = False
        self.hold_stores = False
        self.load_fault: LoadFault = lambda job, row: None
        self.store_fault: StoreFault = no_store_fault
        self.store_reason = "broken"
        self.failed_promotions: set[int] = set()
        self.loads: list[tuple[LoadJob, dict[int, tuple[WorkerHandle, ...]]]] = []
        self.stores: list[StoreJob] = []
        self.loads_seen: list[LoadJob] = []
        self.stores_seen: list[StoreJob] = []
        self.reported: Counter[str] = Counter()
        """Load reports by request."""
        self.invalid_reported: list[set[int]] = []
        self.starts: dict[str, int] = {}
        """From which token on each request was computed when it first ran."""
        self.load_seconds = 1e-6
        """What each segment of a load reports as its duration."""
        self.extra_results = WorkerMeta()
        """Results that go out with the next report, whatever they are."""
        self._slots = (device_slots, host_slots)
        self._registry = registry
        self._running: dict[str, _Running] = {}
        self._finished: set[str] = set()
        self._invalid: set[int] = set()
        self._loaded: list[LoadResult] = []
        self._stored: list[StoreResult] = []
        registry[name] = self.arenas

    @property
    def handshakes(self) -> dict[tuple[int, int], Handshake]:
        return {(0, rank): self._handshake(rank) for rank in range(self.ranks)}

    def _handshake(self, rank: int) -> Handshake:
        handle = WorkerHandle(rank=rank, host_id=self.name, layout_digest="fake", arenas={})
        return Handshake(
            worker=handle,
            device=self.device,
            device_slots=self._slots[0],
            host_slots=self._slots[1],
            staging_slots=1,
            block_bytes=SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            block_tokens=BLOCK,
        )

    # --- one step, in the order of vLLM's model runner ---------------------------------------

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and report what ended until now."""
        # On a CPU host the worker is another process: what crosses is pickled.
        meta = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if isinstance(meta, ConnectorMeta):
            for load in meta.loads:
                waiting = [job.request_id for job, _ in self.loads]
                if load.request_id in waiting:
                    raise AssertionError(f"two loads at a time for {load.request_id}")
                self.loads.append((load, meta.peers))
                self.loads_seen.append(load)
        if not self.hold_loads:
            self.run_loads()
        sampled = self._forward(output)
        if isinstance(meta, ConnectorMeta):
            self.stores.extend(meta.stores)
            self.stores_seen.extend(meta.stores)
        if not self.hold_stores:
            self.run_stores()
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        report = self._report(meta.step if isinstance(meta, ConnectorMeta) else 0)
        if not output.total_num_scheduled_tokens:
            empty = EMPTY_MODEL_RUNNER_OUTPUT
            if report.is_empty():
                return empty
            return ModelRunnerOutput(
                req_ids=empty.req_ids,
                req_id_to_index=empty.req_id_to_index,
                kv_connector_output=report,
            )
        request_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in request_ids],
            kv_connector_output=report,
        )

    def wait(self, result: ModelRunnerOutput) -> None:
        """Return when the tokens of a step are there. Here they always are."""

    def close(self) -> None:
        """End what runs in the background: nothing."""

    def _forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prompt_token_ids
            if tokens is None:
                tokens = [0] * (0 if new.prompt_embeds is None else len(new.prompt_embeds))
            self._running[new.req_id] = _Running(list(tokens), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
            self.starts.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                tokens = cached.all_token_ids[request_id]
                self._running[request_id] = _Running(list(tokens), list((new_blocks or [[]])[0]))
            elif new_blocks is not None:
                self._running[request_id].block_ids.extend(new_blocks[0])
            computed[request_id] = cached.num_computed_tokens[row]
        return {
            request_id: self._compute(self._running[request_id], computed[request_id], count)
            for request_id, count in output.num_scheduled_tokens.items()
        }

    def _compute(self, request: _Running, computed: int, count: int) -> list[int]:
        """Fill positions ``computed`` to ``computed + count``; return the sampled token if any."""
        total = 0
        for position in range(0, computed, BLOCK):
            content = self.kv[request.block_ids[position // BLOCK]]
            total += sum(content[: min(BLOCK, computed - position)])
        total &= MASK
        for position in range(computed, computed + count):
            kv = value(total, request.tokens[position])
            self.kv[request.block_ids[position // BLOCK]][position % BLOCK] = kv
            total = (total + kv) & MASK
        if computed + count < len(request.tokens):
            return []
        token = next_token(total)
        request.tokens.append(token)
        return [token]

    # --- copies ----------------------------------------------------------------------------------

    def run_loads(self, which: Sequence[int] | None = None) -> None:
        """Run the loads at these positions of ``loads``, in this order; all by default."""
        chosen = list(self.loads) if which is None else [self.loads[number] for number in which]
        for item in chosen:
            self.loads.remove(item)
            self._run_load(*item)

    def _run_load(self, job: LoadJob, peers: Mapping[int, Sequence[WorkerHandle]]) -> None:
        segments = []
        offset = 0
        for segment in job.segments:
            memory: SlotMemory | None = self.arenas
            if segment.member != OWN_STORE:
                handles = peers.get(segment.member)
                memory = self._registry.get(handles[0].host_id) if handles else None
            transport = "fake" if memory else "none"
            result = SegmentResult(segment.member, transport, seconds=self.load_seconds)
            for row, (tier, slot, generation, block_id) in enumerate(segment.rows.tolist()):
                reason = self.load_fault(job, offset + row)
                found, content = memory.read(tier, slot) if memory else (0, ())
                if reason is None and (not generation or found != generation):
                    reason = "stale"
                if reason is None:
                    self.kv[block_id] = list(content)
                    result.nbytes += SLOT_BYTES
                else:
                    # A failed load may have written anything.
                    self.kv[block_id] = list(GARBAGE)
                    result.failed_rows.add(row)
                    result.reason = reason
                    self._invalid.add(block_id)
            offset += len(segment.rows)
            segments.append(result)
        result = LoadResult(job.job_id, job.request_id, segments)
        if not any(segment.failed_rows for segment in segments):
            result.promoted = self._promote(job)
        self._finished.add(job.request_id)
        self._loaded.append(result)

    def _promote(self, job: LoadJob) -> set[int]:
        promoted = set()
        for row, (host, device, generation) in enumerate(job.promotions.tolist()):
            self._in_range(Tier.DEVICE, device)
            content = self.arenas.read(Tier.HOST, host)[1]
            if row in self.failed_promotions:
                self.arenas.write(Tier.DEVICE, device, 0, GARBAGE)
            else:
                self.arenas.write(Tier.DEVICE, device, generation, content)
                promoted.add(row)
        return promoted

    def run_stores(self) -> None:
        """Run the stores that wait, in order."""
        waiting, self.stores = self.stores, []
        for job in waiting:
            self._stored.append(self._run_store(job, *self.store_fault(job)))

    def _run_store(
        self, job: StoreJob, failed_demotions: set[int], failed_stores: set[int]
    ) -> StoreResult:
        result = StoreResult(job.job_id, set(failed_demotions), set(failed_stores))
        for row, (device, host, generation) in enumerate(job.demotions.tolist()):
            self._in_range(Tier.DEVICE, device)
            self._in_range(Tier.HOST, host)
            content = self.arenas.read(Tier.DEVICE, device)[1]
            if row in failed_demotions:
                generation, content = 0, GARBAGE
            self.arenas.write(Tier.HOST, host, generation, content)
        for row, (block_id, tier, slot, generation, after) in enumerate(job.stores.tolist()):
            self._in_range(tier, slot)
            if after in failed_demotions:
                # Not run: the slot still holds the block that could not be demoted.
                result.failed_stores.add(row)
            elif row in failed_stores:
                self.arenas.write(tier, slot, 0, GARBAGE)
            else:
                self.arenas.write(tier, slot, generation, tuple(self.kv[block_id]))
        if result.failed_demotions or result.failed_stores:
            result.reason = self.store_reason
        return result

    def _in_range(self, tier: int, slot: int) -> None:
        if not 0 <= slot < self._slots[tier]:
            raise AssertionError(f"slot {slot} of tier {tier} is outside the arena")

    def _report(self, step: int) -> KVConnectorOutput:
        finished, self._finished = self._finished, set()
        invalid, self._invalid = self._invalid, set()
        loaded, self._loaded = self._loaded, []
        stored, self._stored = self._stored, []
        extra, self.extra_results = self.extra_results, WorkerMeta()
        self.reported.update(finished)
        if invalid:
            self.invalid_reported.append(invalid)
        meta = WorkerMeta(stored, loaded, step=step).aggregate(extra)
        if self.ranks == 2:
            again = [
                replace(r, promoted=r.promoted - self.second_rank_fails_promotions) for r in loaded
            ]
            meta = meta.aggregate(WorkerMeta(self._second_rank, again))
            moves, fails = self.second_rank_fails_demotions, self.second_rank_fails
            self._second_rank = [StoreResult(r.job_id, set(moves), set(fails)) for r in stored]
        return KVConnectorOutput(
            finished_recving=finished or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=(
                pickle.loads(pickle.dumps(meta)) if meta.stores or meta.loads or step else None
            ),
        )


Registry = dict[str, SlotMemory]
"""Every worker's arenas by ``WorkerHandle.host_id``: what a transport would reach."""
