# SPDX-License-Identifier: Apache-2.0
"""Xinference's vLLM model classes, with GPU-first Xavier where a launch asks for it.

An instance is made in the worker's process, pickled into the replica's own process, and loaded,
used and stopped there. So ``__init__`` is the last point before that process exists, and the one
that every launch passes: recovery, scale-up and autostart do not come through the REST route.

Without our options everything is as in the stock class, except on vLLM's CPU build, which stock
Xinference does not know (see ``cpu``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, Final, TypeVar
from weakref import WeakSet

from xinference.model.llm.vllm.core import VLLMChatModel, VLLMModel, VLLMMultiModel

from xinference_xavier.control.client import Contact
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.devices import device_memories
from xinference_xavier.extension.launch import (
    CARRIER,
    OURS_ALONE,
    SWITCH,
    launch_problems,
    read_carrier,
)
from xinference_xavier.extension.secrets import new_secret, remind_for_ever
from xinference_xavier.extension.vllm import cpu, gpu, group
from xinference_xavier.extension.vllm.ending import end_with_engine, finish_requests
from xinference_xavier.extension.vllm.engine import engine_arguments
from xinference_xavier.extension.vllm.reporting import report_for_ever
from xinference_xavier.extension.vllm.usage import SourcesInUsage
from xinference_xavier.hostmemory import host_memory
from xinference_xavier.installed import require
from xinference_xavier.launch_note import ENVIRONMENT as NOTE_VARIABLE
from xinference_xavier.launch_note import LaunchNote
from xinference_xavier.options import Deployment, OptionError, XavierOptions
from xinference_xavier.preflight import UNKNOWN_DEVICE, EngineClaim, check_budgets, make_room
from xinference_xavier.sizes import format_size

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 8.0
REPORT_TIMEOUT_S: Final = 2.0

LOOP_GRACE_S: Final = 1.0
"""How much later than its coroutine a thread gives up, for a loop that is not running at all."""

T = TypeVar("T")


class GpuFirstModel(SourcesInUsage):
    """What the three classes below have in common.

    ``__init__`` runs on a thread of the worker's process. ``load``, ``wait_for_load`` and
    ``stop`` run on threads of the replica's process, ``stop`` also on its event loop.
    """

    stock_class: ClassVar[type]
    """The class of Xinference that this one stands before."""

    _launching: ClassVar[WeakSet[GpuFirstModel]] = WeakSet()
    """Launches in progress in this (worker's) process: an instance lives here until it is
    loaded, and its budgets are promised but not yet allocated."""
    _launching_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        model_uid: str,
        model_family: Any,
        model_path: str,
        model_config: dict[str, Any] | None,
        peft_model: list[Any] | None = None,
    ) -> None:
        config = {} if model_config is None else model_config
        self.gpu_first: XavierOptions | None = _take_options(config)
        self._budget_bytes = 0
        self._claim: EngineClaim | None = None
        self._engine_share: dict[str, float | int] = {}
        self._used_before: dict[int, int] = {}
        self._deployment: Deployment | None = None
        self._key = GroupKey(model_uid, None)
        self._worker = ""
        self._note: LaunchNote | None = None
        self._final: dict[str, Any] | None = None
        self._reports: list[Future[None]] = []
        self._leaving = False
        self._stopping = False
        if self.gpu_first is not None:
            problems = launch_problems({**config, "peft_model_config": peft_model})
            if problems:
                raise OptionError("; ".join(problems))
        super().__init__(model_uid, model_family, model_path, config, peft_model)
        if self.gpu_first is not None:
            self._reserve(self.gpu_first)

    @classmethod
    def _has_cuda_device(cls) -> bool:
        """Whether vLLM can run here, as stock Xinference asks it: its CPU build needs no GPU."""
        return cpu.cpu_build_installed() or bool(super()._has_cuda_device())

    def set_xavier_config(self, value: dict[str, Any] | None) -> None:
        """Refuse Xinference's built-in Xavier beside ours; else as in the stock class."""
        if value is not None and self.gpu_first is not None:
            raise OptionError(f"the built-in Xavier cannot run beside {SWITCH}")
        super().set_xavier_config(value)

    def load(self) -> None:
        """Start the engine: as in the stock class, once its surroundings are prepared."""
        on_cpu = cpu.cpu_build_installed()
        if on_cpu or self.gpu_first is not None:
            placement = self._find_placement()
            if on_cpu:
                self._bind_cores(placement.replicas)
            if self.gpu_first is not None:
                self._prepare(self.gpu_first, placement)
        super().load()

    def wait_for_load(self) -> None:
        """Wait for the engine; a refusal by our connector becomes this call's own error.

        Raises ValueError with the connector's message, which Xinference answers with HTTP 400.
        """
        try:
            super().wait_for_load()
        except Exception:
            reason = self._note.reason() if self._note is not None else None
            if reason is None:
                raise
            logger.exception("The engine of %s did not start: %s", self.raw_model_uid, reason)
            raise ValueError(reason) from None
        if self._deployment is not None and not self._reports:
            self._reports = self._report(self._deployment)

    def stop(self) -> None:
        """End what runs, leave the group, then stop the engine.

        Bounded; a second call finds nothing to leave.
        """
        self._stopping = True
        for report in self._reports:
            report.cancel()
        try:
            self._leave()
        finally:
            super().stop()
            if self._note is not None:
                self._note.close()

    async def xavier_status(self) -> dict[str, Any]:
        """Return options, deployment, the peer's description, and after a stop final counters."""
        status: dict[str, Any] = {
            "replica": self.raw_model_uid,
            "gpu_first": self.gpu_first is not None,
        }
        if self.gpu_first is None or self._deployment is None:
            return status
        status["options"] = self.gpu_first.to_mapping()
        status["deployment"] = self._deployment.to_mapping()
        if self._final is not None:
            return {**status, "final": self._final}
        try:
            status["peer"] = await group.describe(
                self._deployment, self._key, REPORT_TIMEOUT_S, peer=self._peer()
            )
        except group.UNREACHABLE as error:
            status["error"] = str(error) or type(error).__name__
        return status

    async def _check_healthy(self, interval: int = 30) -> None:
        """Watch the engine until it is stopped; the actor's loop."""
        check = super()._check_healthy
        if self.gpu_first is None:
            await check(interval)
        else:
            await end_with_engine(self.raw_model_uid, check, lambda: self._stopping)

    def _sanitize_model_config(self, model_config: dict[str, Any] | None) -> dict[str, Any]:
        config = dict(model_config or {})
        if cpu.cpu_build_installed():
            config.update(cpu.engine_defaults(config, os.environ, host_memory()))
        config = dict(super()._sanitize_model_config(config))
        if self.gpu_first is not None and self._deployment is not None:
            config.update(engine_arguments(self.gpu_first, self._deployment))
            config.update(self._engine_share)
        return config

    def _reserve(self, options: XavierOptions) -> None:
        """Refuse budgets that this host cannot give beside the launches already in progress."""
        device, promised = None, 0
        if not cpu.cpu_build_installed():
            self._claim = gpu.engine_claim(self._model_config or {}, self.model_path)
        with self._launching_lock:
            others = list(self._launching)
            if self._claim is not None:
                devices = device_memories()
                self._used_before = {each.index: each.total - each.available for each in devices}
                launches = [
                    gpu.Launching(other._claim, other._indices() or None, other._used_before)
                    for other in others
                    if other._claim is not None
                ]
                device, promised = gpu.roomiest(devices, launches) or (UNKNOWN_DEVICE, 0)
            budgets = check_budgets(
                options,
                device=device,
                claim=self._claim,
                promised=promised,
                reserved=sum(other._budget_bytes for other in others),
            )
            self._budget_bytes = budgets.host + (budgets.device if device is None else 0)
            self._launching.add(self)

    def _indices(self) -> list[int]:
        """Return the GPUs that Xinference has assigned; none yet in ``__init__``."""
        assigned = getattr(self.model_family, "accelerators", None)
        return [int(index) for index in assigned or ()]

    def _find_placement(self) -> group.Placement:
        identity = (self.model_family.address, self.model_uid, self.raw_model_uid)
        offer = None if self.gpu_first is None else new_secret()
        try:
            return self._on_loop(group.find_placement(*identity, offer), PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(
                f"{self.raw_model_uid} did not learn from its worker within "
                f"{PLACEMENT_TIMEOUT_S:g} s where the supervisor is; launch it again when the "
                "supervisor answers"
            ) from None

    def _prepare(self, options: XavierOptions, placement: group.Placement) -> None:
        require("vllm")
        if self._claim is not None:
            self._engine_share = self._share_beside_store(options, placement, self._claim)
        self._worker = placement.worker
        self._deployment = placement.deployment(self.model_uid, self.raw_model_uid)
        self._key = GroupKey(self.model_uid, placement.secret)
        self._note = LaunchNote(placement.secret)
        # This process is the replica's own, and the engine's processes inherit its environment.
        os.environ[NOTE_VARIABLE] = self._note.path

    def _share_beside_store(
        self, options: XavierOptions, placement: group.Placement, claim: EngineClaim
    ) -> dict[str, float | int]:
        """Return the argument that gives vLLM its share of the GPU less what the store needs.

        Raises :class:`OptionError` when both do not fit beside what else is to come there.
        """
        indices = self._indices()
        found = device_memories(indices)
        if not found:
            # The connector looks at the device when vLLM has its KV cache.
            logger.warning("%s: nothing is known of its GPU (%s)", self.raw_model_uid, indices)
            return {}
        device = found[0]
        beside = group.replicas_on_device(placement.worker, self.model_uid, device.index)
        siblings = self._on_loop(beside, PLACEMENT_TIMEOUT_S) - 1
        promised = gpu.still_promised(device, claim, siblings)
        check_budgets(options, device=device, claim=claim, promised=promised)
        less = make_room(options, device, claim, promised)
        logger.info(
            "%s: %s becomes %s, since the store takes its part of %s (%s)",
            self.raw_model_uid,
            claim.setting,
            less.setting,
            device.name,
            format_size(device.total),
        )
        return less.arguments()

    def _report(self, deployment: Deployment) -> list[Future[None]]:
        """Begin to report the engine's metrics to the worker, under Xinference's own labels.

        And to remind the supervisor of the model's secret.
        """
        labels = {
            "model_uid": self.model_uid,
            "replica_index": str(self.rep_id),
            "worker_address": self._worker,
        }

        def describe() -> Coroutine[Any, Any, dict[str, Any]]:
            return group.describe(deployment, self._key, REPORT_TIMEOUT_S, peer=self._peer())

        reports = [report_for_ever(self._worker, labels, describe)]
        secret = self._note.secret if self._note is not None else None
        if secret is not None and deployment.xavier_directory is not None:
            reports.append(remind_for_ever(deployment.xavier_directory, self.model_uid, secret))
        return [asyncio.run_coroutine_threadsafe(report, self._loop) for report in reports]

    def _bind_cores(self, replicas: int) -> None:
        if os.environ.get(cpu.BINDING_VARIABLE):
            return
        cores, shared = cpu.cores_of(max(0, self.rep_id), replicas, cpu.allowed_cores())
        os.environ[cpu.BINDING_VARIABLE] = cpu.binding(cores)
        logger.log(
            logging.WARNING if shared else logging.INFO,
            "%s runs on cores %s%s; set %s in the launch's envs to choose others",
            self.raw_model_uid,
            cpu.binding(cores),
            ", which other replicas use too" if shared else "",
            cpu.BINDING_VARIABLE,
        )

    def _leave(self) -> None:
        if self._leaving or self._deployment is None or self._engine is None:
            return
        self._leaving = True
        if self._on_own_loop():
            # Xinference stops a model from its loop only once the engine is dead, and nothing
            # on this thread may wait for that loop.
            logger.warning("%s: the engine died; nothing to close", self.raw_model_uid)
            return
        try:
            finish_requests(self._engine, self._deployment, self._on_loop)
            counters = self._on_loop(
                group.leave(self._deployment, self._key, CLOSE_TIMEOUT_S, peer=self._peer()),
                CLOSE_TIMEOUT_S,
            )
        except Exception:
            # Fail open: whatever the store does, the engine must still be stopped.
            logger.exception("%s could not close its store", self.raw_model_uid)
            return
        self._final = {
            "model_uid": self.model_uid,
            "replica": self.raw_model_uid,
            "counters": counters,
        }
        logger.info("Final counters of GPU-first Xavier: %s", json.dumps(self._final, default=str))
        try:
            self._on_loop(group.report_final(self._deployment, self._final), REPORT_TIMEOUT_S)
        except Exception as error:
            # Fail open: the counters are in the log.
            logger.warning("%s could not report final counters: %r", self.raw_model_uid, error)

    def _peer(self) -> Contact | None:
        """Return what the engine wrote down: no directory is needed to find its peer."""
        text = self._note.peer() if self._note is not None else None
        return None if text is None else Contact.from_text(text)

    def _on_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is not None
        except RuntimeError:
            return False

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the actor's loop from another thread, and wait for its result.

        Raises TimeoutError, and cancels the coroutine, when there is none within the limit.
        """
        return asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(work, timeout_s), self._loop
        ).result(timeout_s + LOOP_GRACE_S)


class GpuFirstVLLMModel(GpuFirstModel):
    """Text completion."""

    stock_class = VLLMModel


class GpuFirstVLLMChatModel(GpuFirstModel, VLLMChatModel):
    """Chat."""

    stock_class = VLLMChatModel


class GpuFirstVLLMMultiModel(GpuFirstModel, VLLMMultiModel):
    """Chat with images, audio or video; requests that have any go past the store."""

    stock_class = VLLMMultiModel


MODEL_CLASSES: Final = (GpuFirstVLLMModel, GpuFirstVLLMChatModel, GpuFirstVLLMMultiModel)
"""In the order of the stock classes that they stand before."""


def _take_options(config: dict[str, Any]) -> XavierOptions | None:
    """Take our launch arguments out of ``config``, which goes on to vLLM."""
    carried = config.pop(CARRIER, None)
    direct = {name: config.pop(name) for name in sorted(OURS_ALONE.intersection(config))}
    if carried is not None:
        return read_carrier(carried)
    if XavierOptions.from_mapping({SWITCH: direct.get(SWITCH)}).xavier_gpu_first:
        raise OptionError(
            f"{SWITCH}=true has not passed the translation of launches; launch the model through "
            "POST /v1/models, xinference launch or the Python client of a server that has "
            "XINFERENCE_EXTENSIONS=xinference_xavier.extension:create"
        )
    return None
