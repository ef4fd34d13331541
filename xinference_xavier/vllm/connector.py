# SPDX-License-Identifier: Apache-2.0
"""The connector class that vLLM loads: a facade that forwards by role.

vLLM imports this module in the API server, in EngineCore and in each worker, and makes one object
per role. Every hook on the engine's path is a fail-open boundary: what goes wrong inside is
counted and logged, the engine gets the answer that means "nothing", and the request is computed
(R7). Only the start may raise, which fails the launch with our message.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from xinference_xavier.launch_note import reported
from xinference_xavier.metrics.table import USAGE
from xinference_xavier.options import split_options
from xinference_xavier.secret import group_secret
from xinference_xavier.vllm.compat import join_logging
from xinference_xavier.vllm.contract import check_contract
from xinference_xavier.vllm.engine import check_engine_config
from xinference_xavier.vllm.identity import fix_hash_seed
from xinference_xavier.vllm.metadata import ConnectorMeta, Handshake, WorkerMeta
from xinference_xavier.vllm.orphan import end_with_parent
from xinference_xavier.vllm.scheduler import SchedulerSide
from xinference_xavier.vllm.stats import XavierPromMetrics, XavierStats
from xinference_xavier.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def fails_open(nothing: Callable[[], object]) -> Callable[[Hook], Hook]:
    """Turn an exception inside a hook into ``nothing()``, loudly."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: XavierConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                # An exception out of a hook ends vLLM's engine; a lost cache hit does not.
                self.failures[hook.__name__] = self.failures.get(hook.__name__, 0) + 1
                logger.exception("Xavier: %s failed; going on without it", hook.__name__)
                return nothing()

        return cast(Hook, guarded)

    return wrap


class XavierConnector(KVConnectorBase_V1):
    """Shares KV blocks between replicas through a GPU-first tiered snapshot store."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        join_logging()
        super().__init__(vllm_config, role, kv_cache_config)
        self.failures: dict[str, int] = {}
        """Exceptions that a hook caught, by hook; part of the status."""
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        with reported():
            extra = self._kv_transfer_config.kv_connector_extra_config
            options, deployment = split_options(extra)
            secret = group_secret(os.environ)
            # A failed load must lead to recomputation; vLLM's default fails the request. vLLM
            # reads this field right after it has made the scheduler side.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            fix_hash_seed()
            check_engine_config(vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                end_with_parent()
                self._scheduler = SchedulerSide(
                    vllm_config, options, deployment, secret, self.failures
                )
            else:
                self._worker = WorkerSide(vllm_config, kv_cache_config, options, deployment)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: this is a cache, a lost save is a future miss."""
        return False

    # --- scheduler side ----------------------------------------------------------------------

    @property
    def scheduler_side(self) -> SchedulerSide:
        """Return the scheduler side; raises in a worker."""
        if self._scheduler is None:
            raise RuntimeError("this connector has the worker role")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's block pool."""
        self.scheduler_side.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' handshakes, by tensor-parallel rank; raises to fail the launch."""
        handshakes = {r: m for r, m in metadata.items() if isinstance(m, Handshake)}
        with reported():
            self.scheduler_side.connect(handshakes)

    @fails_open(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """Begin looking for the request's blocks."""
        self.scheduler_side.on_new_request(request)

    @fails_open(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that an asynchronous load will bring; None means ask again."""
        count = self.scheduler_side.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    @fails_open(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load that vLLM has made room for."""
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    @fails_open(ConnectorMeta)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step."""
        return self.scheduler_side.build_meta(scheduler_output)

    @fails_open(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' results."""
        self.scheduler_side.completed(connector_output)

    @fails_open(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks are never held: saves pin them by themselves.

        The parameters tell whoever asked where its prompt tokens came from.
        """
        usage = self.scheduler_side.finished(request)
        return False, None if usage is None else {USAGE: usage}

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping; see :attr:`SchedulerSide.must_step`."""
        return self._scheduler is not None and self._scheduler.must_step

    @fails_open(lambda: False)
    def reset_cache(self) -> bool | None:
        """Clear this replica's tiers."""
        return self.scheduler_side.reset()

    # --- worker side -----------------------------------------------------------------------------

    @property
    def worker_side(self) -> WorkerSide:
        """Return the worker side; raises in the scheduler."""
        if self._worker is None:
            raise RuntimeError("this connector has the scheduler role")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build the arenas; raises to fail the launch."""
        with reported():
            self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's part of the handshake."""
        return self.worker_side.handshake()

    @fails_open(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start loads; in newer versions this comes before the forward, start_load_kv after."""
        if isinstance(kv_connector_metadata, ConnectorMeta):
            self.worker_side.start_loads(kv_connector_metadata)

    @fails_open(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start loads."""
        if isinstance(self._connector_metadata, ConnectorMeta):
            self.worker_side.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, no layer waits."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: whole blocks are copied after the forward."""

    @fails_open(lambda: None)
    def wait_for_save(self) -> None:
        """Start stores; nothing is waited for, the sources are pinned."""
        if isinstance(self._connector_metadata, ConnectorMeta):
            self.worker_side.start_stores(self._connector_metadata)

    @fails_open(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load ended."""
        if isinstance(self._connector_metadata, ConnectorMeta):
            # Steps without tokens do not call wait_for_save.
            self.worker_side.start_stores(self._connector_metadata)
        return None, self.worker_side.finished() or None

    @fails_open(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the exact blocks that those loads did not fill."""
        return self.worker_side.load_errors()

    @fails_open(lambda: None)
    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """Return the results for the scheduler side."""
        return self.worker_side.report()

    # --- both -------------------------------------------------------------------------------------

    @fails_open(lambda: None)
    def get_kv_connector_stats(self) -> XavierStats | None:
        """Return what the metrics are to hear; the scheduler side counts for all workers."""
        return None if self._scheduler is None else self._scheduler.stats()

    @fails_open(lambda: None)
    def shutdown(self) -> None:
        """Close this side; idempotent."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # --- in the API server ------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> XavierStats:
        """Return statistics that arrived as plain data."""
        return XavierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> XavierPromMetrics:
        """Register our metrics beside vLLM's."""
        return XavierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


check_contract(XavierConnector, KVConnectorBase_V1, own=("scheduler_side", "worker_side"))
