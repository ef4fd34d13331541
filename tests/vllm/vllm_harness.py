# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool, with our connector and a fake worker.

:class:`Engine` steps them as vLLM's ``EngineCore`` does: with ``Scheduler`` one step at a time,
with ``AsyncScheduler`` two steps in flight. Everything between the request queue and the worker
is real; the worker and, unless a test wants the real one, the control plane are fakes.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deferred_worker import DeferredWorker
from fake_peers import FakePeer, StandInControl
from fake_worker import BLOCK, FakeWorker, Registry, answer_of, contents_of
from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.vllm import parts as parts_module
from xinference_xavier.vllm.connector import XavierConnector
from xinference_xavier.vllm.loads import Loads
from xinference_xavier.vllm.lookup import Lookups
from xinference_xavier.vllm.scheduler import SchedulerSide

MOST_STEPS = 4000
"""An engine that needs more is stuck."""

SCHEDULERS = (Scheduler, AsyncScheduler)

HASHER = get_request_block_hasher(BLOCK, sha256_cbor)


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """One replica.

    ``late_forward`` runs a step's forward as late as the batch queue allows, instead of at once.
    With ``directory`` the real control plane is used, else a :class:`StandInControl`. With an
    ``order`` of ``tests.deferring`` the worker side is the real one, on a device of that order.
    """

    def __init__(
        self,
        base: VllmConfig,
        scheduler_class: type[Scheduler],
        *,
        name: str = "self",
        blocks: int = 64,
        device_slots: int = 24,
        host_slots: int = 40,
        connector: bool = True,
        options: dict[str, Any] | None = None,
        directory: str | None = None,
        registry: Registry | None = None,
        late_forward: bool = False,
        ranks: int = 1,
        device: str = "cpu",
        max_tokens_per_step: int | None = None,
        order: str | None = None,
        seed: int = 0,
    ) -> None:
        self.registry: Registry = {} if registry is None else registry
        self.clock = Clock()
        self.late_forward = late_forward
        slots = {"blocks": blocks, "device_slots": device_slots, "host_slots": host_slots}
        self.worker: FakeWorker = (
            FakeWorker(name, **slots, ranks=ranks, registry=self.registry, device=device)
            if order is None
            else DeferredWorker(
                name, **slots, config=base, registry=self.registry, order=order, seed=seed
            )
        )
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.usages: dict[str, dict[str, int]] = {}
        """What came back with each finished answer about its prompt tokens."""
        self.cached: dict[str, int] = {}
        """vLLM's own count of them."""
        self.sent: list[Any] = []
        """Statistics that vLLM would send to its metrics, in their order."""
        self.aborted: set[str] = set()
        self._depth = 2 if issubclass(scheduler_class, AsyncScheduler) else 1
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        config = copy.copy(base)
        config.scheduler_config = copy.deepcopy(base.scheduler_config)
        config.scheduler_config.async_scheduling = self._depth == 2
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        if max_tokens_per_step is not None:
            config.scheduler_config.max_num_batched_tokens = max_tokens_per_step
        config.cache_config = copy.deepcopy(base.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        if connector:
            config.kv_transfer_config = _transfer(name, directory, options or {})
        spec = FullAttentionSpec(BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        with self._observed(real_control=directory is not None):
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
            if connector:
                self.connector.set_xfer_handshake_metadata_pp_aware(self.worker.handshakes)

    @contextmanager
    def _observed(self, real_control: bool) -> Iterator[None]:
        """Let the scheduler side make its parts with our clock, and keep the ones we look at."""

        def index(**arguments: Any) -> SnapshotIndex:
            self.index = SnapshotIndex(**arguments)
            return self.index

        def mirror() -> Mirror:
            self.mirror = Mirror()
            return self.mirror

        def control(**arguments: Any) -> Any:
            if real_control:
                self.runtime = ControlRuntime(**arguments)
                return self.runtime
            self.control = StandInControl(clock=self.clock, **arguments)
            return self.control

        def timed(part: Callable[..., Any]) -> Callable[..., Any]:
            return part if real_control else functools.partial(part, clock=self.clock)

        with patch.multiple(
            parts_module,
            SnapshotIndex=index,
            Mirror=mirror,
            ControlRuntime=control,
            Lookups=timed(Lookups),
            Loads=timed(Loads),
        ):
            yield

    # --- looking ------------------------------------------------------------------------------

    @property
    def connector(self) -> XavierConnector:
        found = self.scheduler.get_kv_connector()
        if not isinstance(found, XavierConnector):
            raise TypeError(f"the connector is {found!r}")
        return found

    @property
    def side(self) -> SchedulerSide:
        return self.connector.scheduler_side

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def traffic(self) -> dict[str, Any]:
        return self.side.status()["traffic"]

    @property
    def loaded_tokens(self) -> int:
        return sum(self.traffic["loaded_tokens"].values())

    def status_of(self, request_id: str) -> RequestStatus:
        return self.requests[request_id].status

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        count: int = 4,
        *,
        salt: str | None = None,
        embeds: bool = False,
        **sampling: Any,
    ) -> str:
        """Add a request for ``count`` tokens; return its id."""
        request_id = f"{self.worker.name}-{len(self.requests)}"
        request = make_request(request_id, prompt, count, salt=salt, embeds=embeds, **sampling)
        self.requests[request_id] = request
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> None:
        """Do what one call of EngineCore's step function does."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, None if self.late_forward else self.worker.execute(output)))
            if len(self._queue) < self._depth and (
                output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return
        elif not self._queue:
            return
        output, result = self._queue.popleft()
        if result is None:
            result = self.worker.execute(output)
        self.worker.wait(result)
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.sent.append(outputs.scheduler_stats.kv_connector_stats)
            for item in outputs.outputs:
                if item.prefill_stats is not None:
                    self.cached[item.request_id] = item.prefill_stats.num_cached_tokens
                self.answers[item.request_id].extend(item.new_token_ids)
                if item.finish_reason is not None:
                    if item.request_id in self.reasons:
                        raise AssertionError(f"{item.request_id} finished twice")
                    self.reasons[item.request_id] = str(item.finish_reason)
                    if item.kv_transfer_params is not None:
                        self.usages[item.request_id] = item.kv_transfer_params["xavier"]

    def preempt(self, request_id: str) -> None:
        """Do to one request what ``reset_prefix_cache(reset_running_requests=True)`` does to all.

        Preemption for want of blocks needs no help: tests give the engine few blocks.
        """
        request = self.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(request_id)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    def until(self, condition: Callable[[], Any]) -> None:
        """Step until something is the case."""
        for _ in range(MOST_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError("the engine does not get there")

    def run(self) -> None:
        """Step until there is nothing left to do."""
        self.until(lambda: not self.busy())

    def ask(self, prompt: Sequence[int], count: int = 4, **more: Any) -> str:
        """Run one request to its end and check its answer; return its id."""
        request_id = self.add(prompt, count, **more)
        self.run()
        self.check_answers()
        return request_id

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache, as eviction would, and keep our store."""
        if not self.scheduler.reset_prefix_cache():
            raise AssertionError("vLLM's blocks are still in use")

    # --- verdicts -----------------------------------------------------------------------------

    def check_answers(self) -> None:
        """Every request that was not aborted has exactly the right tokens."""
        for request_id, request in self.requests.items():
            prompt = request.prompt_token_ids or [0] * request.num_prompt_tokens
            expected = answer_of(prompt, request.max_tokens)
            answer = self.answers[request_id]
            if request_id in self.aborted:
                expected = expected[: len(answer)]
            if answer != expected:
                raise AssertionError(f"{request_id} answered {answer}, not {expected}")

    def check_store(self) -> None:
        """Every block that readers can get holds what its key names."""
        self.index.check_invariants()
        contents = {}
        for request in self.requests.values():
            tokens = list(request.all_token_ids)
            contents.update(zip(request.block_hashes, contents_of(tokens), strict=False))
        cursor: int | None = 0
        while cursor is not None:
            keys, cursor = self.index.snapshot(cursor)
            for key in keys:
                grant = self.index.acquire(
                    [key], reader=None, request="audit", now=self.clock(), duration=60
                )
                tier, slot, generation = grant.rows[0]
                self.index.release(grant.lease_id)
                found = self.worker.arenas.read(tier, slot)
                if found != (generation, contents[key]):
                    raise AssertionError(f"slot {slot} of tier {tier} holds the wrong block")

    def check_empty(self, *, errors: bool = False) -> None:
        """Nothing of any request is left. ``errors``: caught exceptions are expected."""
        if self.scheduler.requests or self._queue:
            raise AssertionError(f"left in vLLM: {list(self.scheduler.requests)}")
        if self.connector.has_pending_push_work():
            raise AssertionError("an idle engine would keep stepping")
        free, total = self.pool.get_num_free_blocks(), self.pool.num_gpu_blocks
        if free != total - 1:
            raise AssertionError(f"{total - 1 - free} of vLLM's blocks are still referenced")
        status = self.side.status()
        for name in ("pinned_blocks", "store_jobs", "load_jobs"):
            if status[name]:
                raise AssertionError(f"{name} is {status[name]}")
        counters = self.index.counters()
        writing = counters.staging + counters.demoting + counters.promoting
        if counters.leases or writing or counters.jobs:
            raise AssertionError(f"left in the index: {counters}")
        peers = getattr(self, "control", None)
        for peer in peers.peers.values() if peers is not None else ():
            if peer.leases:
                raise AssertionError(f"{peer.leases} leases at {peer.name}")
        left = self._leftovers()
        if any(left.values()):
            raise AssertionError(f"left in the scheduler side: {left}")
        if not errors and (status["hook_failures"] or status["traffic"]["errors"]):
            caught = status["hook_failures"], status["traffic"]["errors"]
            raise AssertionError(f"caught: {caught}")
        doubled = {r: n for r, n in self.worker.reported.items() if n > self._loads_of(r)}
        if doubled:
            raise AssertionError(f"loads reported too often: {doubled}")

    def _loads_of(self, request_id: str) -> int:
        return sum(job.request_id == request_id for job in self.worker.loads_seen)

    def _leftovers(self) -> dict[str, int]:
        """What the scheduler side says that it has in use, once its bookkeeping is checked."""
        found = self.side.audit()
        if found["contradiction"] is not None:
            raise AssertionError(found["contradiction"])
        in_use: dict[str, int] = found["in_use"]
        return in_use

    def check_all(self) -> None:
        """Run to the end; then nothing is left, and every answer and stored block is right."""
        self.run()
        self.check_answers()
        self.check_empty()
        self.check_store()
        self.forget_local()


Make = Callable[..., Engine]
"""What the fixture ``make`` is."""


def make_request(
    request_id: str,
    prompt: Sequence[int],
    count: int,
    *,
    salt: str | None = None,
    embeds: bool = False,
    **sampling: Any,
) -> Request:
    """A request as EngineCore would make it. With ``embeds`` the prompt's tokens are zeros."""
    return Request(
        request_id,
        None if embeds else list(prompt),
        SamplingParams(max_tokens=count, ignore_eos=True, temperature=0, **sampling),
        None,
        prompt_embeds=torch.zeros(len(prompt), 4) if embeds else None,
        cache_salt=salt,
        block_hasher=HASHER,
    )


def keys_of(prompt: Sequence[int]) -> list[bytes]:
    """vLLM's hashes of a prompt's full blocks."""
    return list(make_request("keys", prompt, 1).block_hashes)


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return [(seed * 31 + position * 7 + position // BLOCK) % 250 for position in range(length)]


def share(
    engine: Engine, number: int, prompt: Sequence[int], first: int = 0, last: int | None = None
) -> FakePeer:
    """Let peer ``number`` hold a prompt's full blocks (or some), and the engine know it."""
    peer = engine.control.peers.get(number) or FakePeer(number, engine.registry)
    keys = keys_of(prompt)[first:last]
    peer.hold(keys, contents_of(prompt)[first:last])
    engine.control.meet(peer, keys)
    return peer


def _transfer(name: str, directory: str | None, options: dict[str, Any]) -> KVTransferConfig:
    extra: dict[str, Any] = {
        "xavier_identity": "tiny",
        "xavier_member": name,
        "xavier_host": "127.0.0.1",
        "xavier_min_load_tokens": 0,
    }
    for option, value in options.items():
        if value is None:
            del extra[option]
        else:
            extra[option] = value
    if directory is not None:
        extra["xavier_directory"] = directory
    return KVTransferConfig(
        kv_connector="XavierConnector",
        kv_connector_module_path="xinference_xavier.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
