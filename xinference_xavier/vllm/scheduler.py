# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of one replica: what EngineCore's thread calls, and what peers may ask.

This module only composes: `lookup` finds what can be loaded, `loads` follows loads, `saves`
follows copies into the store, `control` talks to the other replicas. Two kinds of thread come
here. The engine's thread calls every hook of vLLM and waits for no RPC and no copy (commits and
releases take the index's lock, for microseconds). The control thread, for peers and operators,
calls :meth:`SchedulerSide.status`, :meth:`audit`, :meth:`clear` and :meth:`close`, none of
which needs an engine step, except that ``close`` gives work in flight its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from xinference_xavier.features import bypass_reason
from xinference_xavier.options import Deployment, OptionError, XavierOptions
from xinference_xavier.secret import FILE_VARIABLE, VARIABLE
from xinference_xavier.store.index import SnapshotIndex, StoreClosed
from xinference_xavier.store.jobs import StoreJob
from xinference_xavier.vllm import limits
from xinference_xavier.vllm.audit import audit
from xinference_xavier.vllm.compat import Blocks
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.engine import request_facts
from xinference_xavier.vllm.metadata import ConnectorMeta, Handshake, WorkerMeta
from xinference_xavier.vllm.pace import Pace, Steps
from xinference_xavier.vllm.parts import Parts, assemble
from xinference_xavier.vllm.stats import StatsSource, XavierStats
from xinference_xavier.vllm.usage import Usage, Usages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

CLOSE_POLL_S: Final = 0.01

WATCH_QUARANTINE_S: Final = 10.0
"""How long the engine steps for the sole sake of seeing a timed-out transfer end."""


class SchedulerSide:
    """Scheduler half of the connector; does nothing until the workers' handshake is in."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: XavierOptions,
        deployment: Deployment,
        secret: str | None,
        failures: Mapping[str, int],
    ) -> None:
        """Take the configuration, and the group's secret if there is one.

        ``failures`` is what the facade counts, shown in the status.
        """
        if secret is None and deployment.xavier_directory is not None:
            logger.warning(
                "Xavier: no secret is set, so whoever reaches the directory and knows this model "
                "may join its replicas: give all of them the same %s or %s",
                VARIABLE,
                FILE_VARIABLE,
            )
        self._secret = secret
        self._failures = failures
        self._config = vllm_config
        self._options = options
        self._deployment = deployment
        self._block_tokens = vllm_config.cache_config.block_size
        self._counters = Counters()
        self._usages = Usages(self._counters)
        self._stats = StatsSource(self.measured, self._counters.load_seconds)
        self._pace = Pace()
        self._steps = Steps(self._pace)
        self._blocks: Blocks | None = None
        self._parts: Parts | None = None
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._final: dict[str, Any] | None = None
        self._stopped = False
        self._requests: dict[str, Request] = {}
        self._no_more_loads: set[str] = set()
        self._cleared = threading.Event()
        self._outdated: set[str] = set()
        """Requests with KV that was loaded before a clear; what they compute is not saved."""

    # --- start -----------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        """Take vLLM's block pool; called before the handshake."""
        self._blocks = Blocks(pool)

    def connect(self, handshakes: Mapping[int, Handshake]) -> None:
        """Build the index from what the workers made, and join the group.

        Raises OptionError when the workers disagree; the launch then fails with that message.
        """
        if self._blocks is None or not handshakes:
            raise OptionError("vLLM gave no block pool or no worker handshake to the connector")
        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        if len({(rank.worker.layout_digest, rank.block_tokens) for rank in ranks}) != 1:
            raise OptionError("the ranks of this replica have different KV cache layouts")
        self._parts = assemble(
            config=self._config,
            options=self._options,
            deployment=self._deployment,
            secret=self._secret,
            ranks=ranks,
            blocks=self._blocks,
            pace=self._pace,
            counters=self._counters,
            status=self.status,
            audit=self.audit,
            clear=lambda: {"cleared": self.clear()},
            close=self.close,
            limit=self.set_limits,
            withdraw=self.withdraw,
        )
        logger.info("Xavier is ready: %s", self._parts.summary)

    # --- hooks of vLLM's scheduler, on the engine's thread -----------------------------------

    def on_new_request(self, request: Request) -> None:
        """Count the request and start looking for its blocks."""
        self._requests[request.request_id] = request
        self._counters.requests += 1
        if self._parts is None:
            return
        reason = self._bypass(request)
        if reason is None:
            self._parts.lookups.begin(request)
        else:
            self._counters.bypassed[reason] += 1

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens after ``computed_tokens`` will be loaded; None: ask again."""
        parts = self._parts
        if parts is None or self._bypass(request) is not None:
            return 0
        count = parts.lookups.matched(
            request, computed_tokens // self._block_tokens, room=parts.loads.room()
        )
        if count and self._would_bar_loaded(parts, request):
            return None
        return None if count is None else count * self._block_tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Start the load that vLLM has made room for, or note that there is none."""
        parts = self._parts
        if parts is None:
            return
        request_id = request.request_id
        if external_tokens == 0:
            parts.lookups.settled(request_id)
            return
        # A resumed request has other blocks than before it was preempted.
        parts.saves.forget(request_id)
        count = external_tokens // self._block_tokens
        block_ids = blocks.get_block_ids()[0]
        # An async load is allocated without new tokens: its blocks are the table's last ones.
        first = len(block_ids) - count
        parts.loads.begin(
            request_id,
            parts.lookups.take(request_id),
            keys=request.block_hashes,
            first_block=first,
            block_ids=block_ids[first:],
        )

    def build_meta(self, output: SchedulerOutput) -> ConnectorMeta:
        """Plan the step's saves and ship the loads that start with it."""
        parts = self._parts
        if parts is None:
            return ConnectorMeta()
        jobs, peers = parts.loads.ship()
        stores: list[StoreJob] = []
        try:
            if self._cleared.is_set():
                self._start_over(parts)
            self._follow(parts, output)
            if self._closing.is_set():
                parts.saves.abandon("closed")
            else:
                stores = parts.saves.plan(self._computed(output))
        except Exception:
            # The loads must go out whatever becomes of the saves: vLLM waits for them. A block
            # table that missed an extension would name wrong blocks, so none is kept.
            self._counters.errors["plan saves"] += 1
            logger.exception("Xavier could not plan the saves of a step; they are skipped")
            parts.saves.abandon("error")
        step = self._steps.started(output.total_num_scheduled_tokens)
        return ConnectorMeta(stores, jobs, peers, step)

    def completed(self, output: KVConnectorOutput) -> None:
        """Take what the workers report: publish saves, end loads."""
        parts = self._parts
        if parts is None:
            return
        if output.invalid_block_ids:
            parts.saves.invalidated(output.invalid_block_ids)
        meta = output.kv_connector_worker_meta
        self._steps.ended(meta.step if isinstance(meta, WorkerMeta) else 0)
        if not isinstance(meta, WorkerMeta):
            return
        if meta.quarantined > parts.quarantined:
            parts.watch_quarantine_until = time.monotonic() + WATCH_QUARANTINE_S
        parts.quarantined = meta.quarantined
        parts.refusals.update(meta.transports or {})
        try:
            for loaded in parts.loads.completed(meta.loads):
                if loaded.request_id not in self._requests:
                    continue  # aborted meanwhile
                if not loaded.complete:
                    self._no_more_loads.add(loaded.request_id)
                parts.loaded[loaded.request_id] = loaded
        finally:
            # Pins hang on these reports, whatever becomes of the others.
            parts.saves.completed(meta.stores)

    def finished(self, request: Request) -> Usage | None:
        """Forget a request that ends; its full blocks that are left are still saved.

        Returns where its prompt tokens came from, or None if it never got to run.
        """
        usage = self._usages.finished(request.request_id)
        parts = self._parts
        self._requests.pop(request.request_id, None)
        self._no_more_loads.discard(request.request_id)
        self._outdated.discard(request.request_id)
        if parts is None:
            return usage
        parts.lookups.settled(request.request_id)
        parts.loaded.pop(request.request_id, None)
        parts.saves.finished(request.request_id, request.num_computed_tokens)
        return usage

    def stats(self) -> XavierStats | None:
        """Return what vLLM's metrics are to hear at the end of a step, or None."""
        return self._stats.take(idle=not self._requests and not self.pending)

    @property
    def pending(self) -> bool:
        """Whether an idle engine must keep stepping: a pin is held, a load is under way, or a
        timed-out transfer may end soon."""
        parts = self._parts
        if parts is None:
            return False
        if parts.saves.pending or parts.loads.jobs > 0:
            return True
        return parts.quarantined > 0 and time.monotonic() < parts.watch_quarantine_until

    @property
    def must_step(self) -> bool:
        """Whether vLLM may not take the engine for idle.

        Besides what is :attr:`pending` that is a request that waits with blocks that were loaded.
        While its scheduler is paused, vLLM does not count it; it then clears its cache, cannot
        because of those blocks, and ends the engine. So the pause completes when that request
        has run or is aborted.
        """
        return self.pending or (self._parts is not None and bool(self._parts.loaded))

    def reset(self) -> bool:
        """Clear this replica's tiers and withdraw its directory entries (R16)."""
        cleared = self.clear()
        if self._parts is not None:
            self._start_over(self._parts)
        return cleared

    # --- any thread ----------------------------------------------------------------------------

    def clear(self) -> bool:
        """Make every stored block unreadable at once; False once the store is closed."""
        parts = self._parts
        if parts is None:
            return True
        # Before the index: what the engine's thread plans in between is of the old epoch.
        self._cleared.set()
        try:
            with parts.publishing:
                parts.index.clear()
                parts.control.withdraw_all()
        except StoreClosed:
            return False
        self._counters.resets += 1
        return True

    def measured(self) -> dict[str, Any]:
        """Return the part of the status that the metrics are made of."""
        parts = self._parts
        if parts is None:
            return {"state": "starting"}
        return {
            "state": "closed" if self._final is not None else "ready",
            "store": {**parts.shape, **_counters(parts.index)},
            "traffic": self._counters.to_dict(),
            "transport_refusals": dict(parts.refusals),
            "hook_failures": dict(self._failures),
        }

    def set_limits(self, device_slots: int | None, host_slots: int | None) -> dict[str, Any]:
        """Let each tier hold at most so many blocks; see :func:`limits.set_limits`."""
        if self._parts is None:
            return {"limited": False}
        return limits.set_limits(self._parts, device_slots, host_slots)

    def withdraw(self) -> None:
        """Tell the directory of blocks that went when the leases on them ended."""
        if self._parts is not None:
            limits.withdraw(self._parts)

    def status(self) -> dict[str, Any]:
        """Return this replica's state as plain values for JSON."""
        parts = self._parts
        measured = self.measured()
        if parts is None:
            return measured
        return {
            **measured,
            "member": self._deployment.xavier_member,
            "options": self._options.to_mapping(),
            "sources": parts.loads.sources(),
            "pace": self._pace.to_dict(),
            "pinned_blocks": parts.saves.pinned,
            "store_jobs": parts.saves.jobs,
            "load_jobs": parts.loads.jobs,
            "quarantined": parts.quarantined,
            "control": parts.control.status(),
        }

    def audit(self) -> dict[str, Any]:
        """Check the bookkeeping, and count what is in use; see :func:`audit.audit`."""
        if self._parts is None:
            return {"contradiction": None, "in_use": {}}
        kept = {
            "requests": len(self._requests),
            "no_more_loads": len(self._no_more_loads),
            "outdated": len(self._outdated),
            "usages": len(self._usages),
        }
        return audit(self._parts, kept)

    def close(self, deadline_s: float) -> dict[str, Any]:
        """Stop admission, drain what is in flight until the deadline, clear everything.

        Returns the final counters. Idempotent; concurrent callers get the same answer. Called
        before the engine stops, from a thread that may wait (never the engine's while it steps).
        """
        with self._close_lock:
            if self._final is None:
                self._final = self._close(deadline_s)
            return self._final

    def shutdown(self) -> None:
        """End everything; the engine's thread, after its last step."""
        # No step comes after this one, so nothing in flight can be drained any more.
        self._stopped = True
        self.close(0.0)
        if self._parts is not None:
            self._parts.control.close(2.0)

    # --- inside ----------------------------------------------------------------------------------

    def _close(self, deadline_s: float) -> dict[str, Any]:
        self._closing.set()
        parts = self._parts
        if parts is None:
            return {"state": "closed", "drained": True}
        until = time.monotonic() + deadline_s
        while self.pending and not self._stopped and time.monotonic() < until:
            # The engine keeps stepping while something is pending, and reports to `completed`.
            time.sleep(CLOSE_POLL_S)
        drained = not self.pending
        left = {
            "pinned_blocks": parts.saves.pinned,
            "load_jobs": parts.loads.jobs,
            "quarantined": parts.quarantined,
        }
        final = {"state": "closed", "drained": drained, **left, **asdict(parts.index.close())}
        parts.control.leave()
        log = logger.info if drained else logger.warning
        log("Xavier closed its store: %s", final)
        return final

    def _start_over(self, parts: Parts) -> None:
        """Save nothing, and promise nothing, that is from before a clear; the engine's thread."""
        self._cleared.clear()
        parts.lookups.drop_all()
        parts.saves.abandon("cleared")
        self._outdated = parts.loads.request_ids() | set(parts.loaded)
        self._outdated &= self._requests.keys()

    def _would_bar_loaded(self, parts: Parts, request: Request) -> bool:
        """Whether a load for this request must wait until vLLM has run others whose load ended.

        vLLM gives a load no block that requests already loaded still need. One that does not fit
        beside them stays at the head of its queue, and if they are behind it there, neither would
        ever run. When told to ask again, vLLM goes on to the next one in the queue.
        """
        if not parts.loaded or self._blocks is None:
            return False
        need = -(-request.num_tokens // self._block_tokens)
        for loaded in parts.loaded.values():
            other = self._requests.get(loaded.request_id)
            if other is not None:
                need += -(-other.num_tokens // self._block_tokens) - loaded.until
        return need > self._blocks.free

    def _bypass(self, request: Request) -> str | None:
        """Return why a request's blocks are not read from the store, or None."""
        if self._closing.is_set():
            return "closing"
        if request.request_id in self._no_more_loads:
            return "load failed"
        return bypass_reason(request_facts(request))

    def _computed(self, output: SchedulerOutput) -> Iterator[tuple[str, int]]:
        """Yield, per scheduled request, its tokens with KV once this step is done."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            yield request_id, computed + scheduled[request_id]

    def _follow(self, parts: Parts, output: SchedulerOutput) -> None:
        """Keep the block tables of running requests."""
        for new in output.scheduled_new_reqs:
            self._admit(parts, new.req_id, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_block_ids, computed in rows:
            if request_id in cached.resumed_req_ids:
                block_ids = new_block_ids[0] if new_block_ids else []
                self._admit(parts, request_id, block_ids, computed)
            elif new_block_ids:
                parts.saves.extended(request_id, new_block_ids[0])

    def _admit(
        self, parts: Parts, request_id: str, block_ids: Sequence[int], computed: int
    ) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        loaded = parts.loaded.pop(request_id, None)
        facts = request_facts(request)
        if request.num_preemptions == 0:
            sources = loaded.sources if loaded is not None else ()
            self._usages.started(
                request_id,
                prompt_tokens=request.num_prompt_tokens,
                local_tokens=loaded.first * self._block_tokens if loaded and sources else computed,
                ready_tokens=computed,
                loaded=[(source, blocks * self._block_tokens) for source, blocks in sources],
                looked_up=not self._closing.is_set() and bypass_reason(facts) is None,
            )
        if request_id in self._outdated:
            self._outdated.discard(request_id)
            return
        if facts.multimodal or facts.prompt_embeds:
            return  # nobody would ever read its blocks
        first = computed // self._block_tokens
        again: tuple[int, ...] = ()
        if loaded is not None:
            # After a full hit vLLM computes the last token again, in a block that was loaded.
            first = max(first, loaded.until)
            again = loaded.store_again
        parts.saves.admitted(request, block_ids, first, again)


def _counters(index: SnapshotIndex) -> dict[str, Any]:
    """Return an index's counters, the final ones if it is closed."""
    try:
        return asdict(index.counters())
    except StoreClosed:
        return asdict(index.close())
