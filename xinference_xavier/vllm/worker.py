# SPDX-License-Identifier: Apache-2.0
"""The worker side of one rank: arenas beside the KV cache, and the engines that copy.

Made in the worker process; every method runs on its main thread, between or around forwards, and
none waits for a copy. The copies run on the copy thread and the load threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from xinference_xavier.control.client import route_address
from xinference_xavier.layout import BlockLayout, probe_layout
from xinference_xavier.options import Deployment, OptionError, XavierOptions
from xinference_xavier.preflight import (
    DeviceMemory,
    check_budgets,
    check_device_room,
    device_need,
    device_staging_slots,
)
from xinference_xavier.sizes import format_size
from xinference_xavier.store.copier import CopyEngine
from xinference_xavier.store.cuda import Cuda, CudaApi
from xinference_xavier.store.cuda_device import device_bytes
from xinference_xavier.store.device import Mark
from xinference_xavier.store.jobs import (
    NOT_STARTED,
    LoadJob,
    LoadResult,
    StoreResult,
    Tier,
    failed_segment,
    failed_store,
)
from xinference_xavier.tiers import LEAST_HOST_SLOTS
from xinference_xavier.transport.base import WorkerHandle
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports
from xinference_xavier.transport.shm import host_id
from xinference_xavier.vllm.engine import device_claim
from xinference_xavier.vllm.memory import Slots, WorkerMemory
from xinference_xavier.vllm.metadata import ConnectorMeta, Handshake, WorkerMeta

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

SHUTDOWN_S: Final = 4.0
"""Longest shutdown, all together; vLLM kills a worker after five seconds."""

DRAIN_S: Final = 1.0
"""Of that, longest wait for running loads, and again for running stores."""


def _cuda(device: torch.device) -> CudaApi | None:
    """Return the API of the GPU that the KV cache is on; None where it is in host memory."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return Cuda(device)
    raise OptionError(f"a KV cache on {device} is not supported: cuda and cpu are")


def _device_memory(api: CudaApi) -> DeviceMemory:
    available, total = api.memory()
    return DeviceMemory(str(api.device), total, available)


class WorkerSide:
    """Worker half of the connector."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: XavierOptions,
        deployment: Deployment,
    ) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._deployment = deployment
        self._memory: WorkerMemory | None = None
        self._handshake: Handshake | None = None
        self._copies: CopyEngine | None = None
        self._loads: LoadEngine | None = None
        self._transports: Transports | None = None
        self._submitted: ConnectorMeta | None = None
        self._stored: ConnectorMeta | None = None
        self._ended: list[LoadResult] = []
        self._refused: list[StoreResult] = []
        self._blocks_of: dict[int, list[list[int]]] = {}
        self._finished: set[str] = set()
        self._invalid: set[int] = set()
        self._quarantined = 0

    # --- start and end -----------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Build arenas and copy engines for vLLM's KV cache.

        Raises OptionError, LayoutError, ArenaError, CudaError or TransportUnavailable, which fail
        the launch with that message. Nothing is left then.
        """
        try:
            self._build(kv_caches)
        except BaseException:
            self.shutdown()
            raise

    def _build(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        block_tokens = self._config.cache_config.block_size
        layout, views = probe_layout(
            kv_caches, num_blocks=self._kv_cache_config.num_blocks, block_tokens=block_tokens
        )
        device = views[0].device
        api = _cuda(device)
        slots = self._slots(layout, self._config.parallel_config.world_size, api)
        memory = self._memory = WorkerMemory(layout, views, slots, api)
        self._transports = Transports.start(
            choice=self._options.xavier_transport,
            arenas=memory.arenas,
            staging=memory.staging,
            host=self._deployment.xavier_host or route_address(self._deployment.xavier_directory),
            layout_digest=layout.digest(),
            gpu=memory.gpu,
        )
        self._copies = CopyEngine(
            layout=layout,
            arenas=memory.arenas,
            device=memory.device,
            verify=self._options.xavier_verify,
        )
        self._loads = LoadEngine(
            layout=layout,
            arenas=memory.arenas,
            device=memory.device,
            verify=self._options.xavier_verify,
            staging=memory.staging,
            transports=self._transports,
        )
        rank = self._config.parallel_config.rank
        staging = {tier: len(memory.staging.get(tier, ())) for tier in Tier}
        self._handshake = Handshake(
            worker=WorkerHandle(
                rank=rank,
                host_id=host_id(),
                layout_digest=layout.digest(),
                arenas={tier: arena.handle() for tier, arena in memory.arenas.items()},
                **self._transports.published(),
            ),
            device=device.type,
            device_slots=slots.device,
            host_slots=slots.host - staging[Tier.HOST],
            staging_slots=staging[Tier.HOST],
            block_bytes=layout.block_bytes,
            slot_bytes=layout.slot_bytes,
            block_tokens=block_tokens,
            device_staging_slots=staging[Tier.DEVICE],
            host_pinned=memory.pinned,
            unpinned_reason=memory.unpinned,
        )
        logger.info(
            "Xavier rank %d: %d device slots in %s memory and %d host slots of %s, populated",
            rank,
            slots.device,
            device.type,
            slots.host,
            format_size(layout.slot_bytes),
        )

    def _slots(self, layout: BlockLayout, ranks: int, api: CudaApi | None) -> Slots:
        """Return this rank's device and host slots; raises OptionError (R10, third point)."""
        memory = None if api is None else _device_memory(api)
        budgets = check_budgets(self._options, device=memory)
        gpu = layout.slots(budgets.device // ranks)
        if budgets.device and not gpu:
            block = format_size(layout.slot_bytes * ranks)
            raise OptionError(
                f"xavier_gpu_cache_bytes={format_size(budgets.device)} is below one KV block "
                f"of this model, {block} for {layout.block_tokens} tokens; give at least that, "
                "or 0 to keep blocks in the CPU tier only"
            )
        host = layout.slots(budgets.host // ranks)
        if budgets.host and host < LEAST_HOST_SLOTS:
            least = format_size(LEAST_HOST_SLOTS * layout.slot_bytes * ranks)
            raise OptionError(
                f"xavier_cpu_cache_bytes={format_size(budgets.host)} holds {host} KV blocks of "
                f"this model; the CPU tier needs {LEAST_HOST_SLOTS} ({least}): one block, one "
                "that arrives and one for reads over the network. Give at least that, or 0 to "
                "turn the tier off"
            )
        if api is None or memory is None:
            return Slots(device=gpu, host=host)
        need = device_need(
            self._options,
            gpu * layout.slot_bytes,
            slot_bytes=layout.slot_bytes,
            scratch=device_bytes(layout.slot_bytes, len(layout.spans)),
        )
        claim = device_claim(self._config)
        check_device_room(self._options, need, memory, claim, api.reserved())
        staging = device_staging_slots(self._options, layout.slot_bytes) if gpu else 0
        return Slots(device=gpu, host=host, device_staging=staging)

    def handshake(self) -> Handshake | None:
        """Return what the scheduler side needs to know; None before :meth:`register`."""
        return self._handshake

    def shutdown(self) -> None:
        """Stop copies, close transports, give memory back, in :data:`SHUTDOWN_S`. Idempotent.

        Memory that a copy or a transfer may still use is left to a later call, or to the end of
        the process.
        """
        end = time.monotonic() + SHUTDOWN_S
        running = [
            engine
            for engine in (self._loads, self._copies)
            if engine is not None and not engine.close(DRAIN_S)
        ]
        if running:
            logger.warning("Xavier: copies were still running after %.0f s", DRAIN_S)
        unused = not running
        if self._transports is not None:
            # They go first: they serve peers from the memory, and copy with the device.
            try:
                unused &= self._transports.close(end - time.monotonic())
            except Exception:  # the memory goes all the same
                logger.exception("Xavier: a transport could not be closed")
        if self._memory is not None and unused:
            try:
                self._memory.close()
            except Exception:  # the engine ends all the same
                logger.exception("Xavier: not all memory could be given back")

    # --- one step --------------------------------------------------------------------------------

    def start_loads(self, meta: ConnectorMeta) -> None:
        """Submit the step's loads, once, whichever hook of vLLM comes first."""
        if meta is self._submitted:
            return
        self._submitted = meta
        if not meta.loads:
            return
        for job in meta.loads:
            self._blocks_of[job.job_id] = [segment.rows[:, 3].tolist() for segment in job.segments]
        try:
            # Forwards in flight may still use the blocks for requests that had them before.
            after = self._mark()
        except Exception:
            # Fail open: vLLM waits for these requests, so their loads must end now, as failed.
            logger.exception("Xavier could not start the loads of a step")
            for job in meta.loads:
                self._refuse_load(job)
            return
        for job in meta.loads:
            self._start_load(job, meta, after)

    def start_stores(self, meta: ConnectorMeta) -> None:
        """Submit the step's stores, once; called after the forward that fills the blocks."""
        self.start_loads(meta)
        if meta is self._stored:
            return
        self._stored = meta
        left = list(meta.stores)
        try:
            after = self._mark() if left else None
            while left and self._copies is not None:
                self._copies.submit(left[0], after)
                del left[0]
        except Exception:
            # Fail open: pins hang on the results, so what was not started must end as failed.
            logger.exception("Xavier could not start %d store jobs of a step", len(left))
            self._refused += [failed_store(job, NOT_STARTED) for job in left]

    def finished(self) -> set[str]:
        """Return requests whose load ended since the last call, each exactly once."""
        for result in self._loads.poll() if self._loads is not None else ():
            self._end_load(result)
        finished, self._finished = self._finished, set()
        return finished

    def load_errors(self) -> set[int]:
        """Return the KV blocks that those requests' loads did not fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerMeta | None:
        """Return the results for the scheduler side; None when there is nothing to say."""
        stored = self._copies.poll() if self._copies is not None else []
        refused, self._refused = self._refused, []
        stored += refused
        ended, self._ended = self._ended, []
        step = self._submitted.step if self._submitted is not None else 0
        refusals = self._transports.take_refusals() if self._transports is not None else {}
        # Load threads keep this number: asking the transports could wait for them.
        quarantined = self._loads.quarantined if self._loads is not None else 0
        before, self._quarantined = self._quarantined, quarantined
        if not (stored or ended or quarantined or before or step or refusals):
            return None
        return WorkerMeta(stored, ended, quarantined, step, refusals or None)

    def _mark(self) -> Mark | None:
        return None if self._memory is None else self._memory.device.mark()

    def _start_load(self, job: LoadJob, meta: ConnectorMeta, after: Mark | None) -> None:
        try:
            if self._loads is None:
                raise RuntimeError("the KV cache is not registered")
            rank = self._config.parallel_config.rank
            handles = {member: workers[rank] for member, workers in meta.peers.items()}
            self._loads.submit(job, handles, after)
        except Exception:
            # Fail open: vLLM waits for this request, so its load must end now, as failed.
            logger.exception("Xavier could not start the load of request %s", job.request_id)
            self._refuse_load(job)

    def _refuse_load(self, job: LoadJob) -> None:
        failed = [failed_segment(segment, NOT_STARTED) for segment in job.segments]
        self._end_load(LoadResult(job.job_id, job.request_id, failed))

    def _end_load(self, result: LoadResult) -> None:
        blocks = self._blocks_of.pop(result.job_id, None)
        if blocks is None:
            logger.error("Xavier: load job %d ended twice; the second is ignored", result.job_id)
            return
        # A segment without a result was not loaded at all.
        failed = [segment.failed_rows for segment in result.segments]
        for number, block_ids in enumerate(blocks):
            rows = failed[number] if number < len(failed) else range(len(block_ids))
            self._invalid.update(block_ids[row] for row in rows)
        self._finished.add(result.request_id)
        self._ended.append(result)
