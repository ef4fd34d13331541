# SPDX-License-Identifier: Apache-2.0
"""What a launch's budgets would hold, for the launch dialog and the console.

Serves text that changes while somebody types: it asks the supervisor at most twice, reads one
small file, and starts nothing.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request

from xinference_xavier.control.client import peer_call
from xinference_xavier.extension.launch import (
    STOCK_SWITCH,
    SWITCH,
    Launch,
    launch_problems,
    translate,
)
from xinference_xavier.extension.model_files import model_directory
from xinference_xavier.extension.routes.access import (
    NO_DIRECTORY,
    NO_MODEL,
    READ,
    REFUSED,
    WRITE,
    needs,
    require,
    some_members_of,
)
from xinference_xavier.extension.routes.models import PEER_TIMEOUT_S
from xinference_xavier.extension.vllm.cpu import cpu_build_installed
from xinference_xavier.extension.vllm.gpu import launch_room
from xinference_xavier.extension.vllm.group import UNREACHABLE
from xinference_xavier.hostmemory import HostMemory, host_memory
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.planner import (
    BLOCK_TOKENS,
    KvShape,
    Memory,
    UnknownBlock,
    UnsupportedModel,
    make_plan,
    read_config,
    read_options,
    with_request,
)
from xinference_xavier.preflight import (
    DeviceMemory,
    EngineClaim,
    check_budgets,
    largest_budget,
)
from xinference_xavier.schemas import (
    Plan,
    PlanLimits,
    PlannedModel,
    PlanNote,
    PlanRequest,
)


@dataclass(frozen=True)
class _Block:
    """The size of a KV block, as far as it is known, and from where."""

    model: PlannedModel
    tokens: int
    nbytes: int | None = None
    unsupported: str | None = None


@dataclass(frozen=True)
class _Here:
    """The memory of this process's host, as far as a launch may use it.

    ``device``, ``claim`` and ``promised`` are those of ``launch_room``, or as they are here on a
    CPU-only host.
    """

    host: HostMemory
    device: DeviceMemory | None = None
    claim: EngineClaim | None = None
    promised: int = 0

    @property
    def kind(self) -> Literal["cpu", "cuda"] | None:
        if self.device is None:
            return "cpu"
        return "cuda" if self.device.total else None

    @property
    def memory(self) -> Memory:
        total = self.host.total.bytes
        if self.device is None:
            return Memory(gpu_total=total, cpu_total=total)
        return Memory(gpu_total=self.device.total or None, cpu_total=total)


def add_routes(context: Any) -> None:
    """Add the route to an ``APIExtensionContext``."""
    app: FastAPI = context.app

    @app.post(
        "/v1/xavier/plan",
        dependencies=needs(context, READ),
        responses={**REFUSED, **NO_MODEL, **NO_DIRECTORY},
    )
    async def xavier_plan(launch: PlanRequest, request: Request) -> Plan:
        """Say how many KV blocks and tokens the budgets of a launch hold, and what is wrong.

        Takes the body of a launch as it is. Values that are not allowed are ``errors`` of a 200
        answer. Without the size of a block (a model that is not downloaded yet, say) only bytes
        are told.
        """
        if launch.model_path is not None:
            # Tells what lies on the server's disk: for those who may launch from there.
            await require(context, request, WRITE)
        supervisor = await context.get_supervisor_ref()
        local = bool(await supervisor.is_local_deployment())
        block = await _block(supervisor, launch)
        here = await asyncio.to_thread(_here, launch) if local else None
        plan = make_plan(
            launch,
            model=block.model,
            block_bytes=block.nbytes,
            block_tokens=block.tokens,
            memory=here.memory if here is not None else None,
        )
        errors = [*plan.errors, *_refusals(launch, block)]
        limits = PlanLimits()
        if here is not None:
            limits = _limits(plan, launch, here)
            if not errors and (problem := _misfit(launch, here)) is not None:
                errors.append(problem)
        return plan.model_copy(
            update={
                "valid": not errors,
                "errors": errors,
                "warnings": [*plan.warnings, *_warnings(here)],
                "device": here.kind if here is not None else None,
                "limits": limits,
            }
        )


def _here(request: PlanRequest) -> _Here:
    if cpu_build_installed():
        return _Here(host_memory())
    config = request.model_dump(exclude_none=True)
    return _Here(host_memory(), *launch_room(config, request.replica or 1))


async def _block(supervisor: Any, launch: PlanRequest) -> _Block:
    """Return the size of the launch's blocks, by whatever tells it first."""
    tokens = launch.block_size or BLOCK_TOKENS
    numbers = all((launch.layers, launch.kv_heads, launch.head_dim))
    named = launch.model_name or launch.model_path
    try:
        if launch.model_uid and not (named or numbers):
            return await _running_block(supervisor, launch.model_uid)
        shape = None
        if not numbers and named:
            shape = await _configured(supervisor, launch)
        shape = with_request(shape, launch)
    except UnknownBlock as error:
        unsupported = str(error) if isinstance(error, UnsupportedModel) else None
        model = PlannedModel(name=launch.model_name, source="unknown", reason=str(error))
        return _Block(model, tokens, unsupported=unsupported)
    model = PlannedModel(
        name=launch.model_name, source="numbers" if numbers else "config", **asdict(shape)
    )
    return _Block(model, tokens, shape.block_bytes(tokens))


async def _configured(supervisor: Any, launch: PlanRequest) -> KvShape:
    if launch.model_path is not None:
        path = Path(launch.model_path)
    else:
        path = await model_directory(supervisor, launch)
    return await asyncio.to_thread(read_config, path)


async def _running_block(supervisor: Any, model_uid: str) -> _Block:
    """Return the block of a model whose replicas are there to ask."""
    member = (await some_members_of(supervisor, model_uid))[0]
    try:
        status = await peer_call(member.contact, "describe", timeout_s=PEER_TIMEOUT_S)
    except UNREACHABLE as error:
        raise UnknownBlock(f"{member.info.name} does not answer: {error}") from None
    if status["state"] != "ready":
        raise UnknownBlock(f"{member.info.name} is {status['state']}")
    store = status["store"]
    model = PlannedModel(name=model_uid, source="replica")
    return _Block(model, store["block_tokens"], store["block_bytes"] * store["ranks"])


def _refusals(launch: PlanRequest, block: _Block) -> list[PlanNote]:
    """Return why a launch with these arguments cannot be GPU-first."""
    problems = launch_problems(launch.model_dump(exclude_none=True))
    notes = [PlanNote(field=_field(text), code="unsupported", message=text) for text in problems]
    if block.unsupported is not None:
        field = "model_path" if launch.model_path is not None else "model_name"
        notes.append(PlanNote(field=field, code="unsupported", message=block.unsupported))
    return notes


def _field(problem: str) -> str | None:
    """Return the launch argument that a problem begins with."""
    found = re.match(r"([a-z_]+)\b(\[\d+\]\.\w+)?=", problem)
    return found[1] if found else None


def _misfit(request: PlanRequest, here: _Here) -> PlanNote | None:
    """Return why this launch's budgets do not fit on this host, or None."""
    body = {**request.model_dump(exclude_none=True), STOCK_SWITCH: True, SWITCH: True}
    try:
        launch = translate(body)
        if isinstance(launch, Launch):
            check_budgets(
                launch.options,
                replicas_on_host=launch.replicas,
                device=here.device,
                claim=here.claim,
                promised=here.promised,
                host=here.host,
            )
    except OptionError as error:
        message = str(error)
        return PlanNote(field=_field(message), code="does_not_fit", message=message)
    return None


def _limits(plan: Plan, request: PlanRequest, here: _Here) -> PlanLimits:
    """Return the largest budget of each tier beside the other one as it is."""
    gpu, cpu = plan.per_replica.gpu.budget_bytes, plan.per_replica.cpu.budget_bytes
    each = here.host.available.bytes // plan.replica
    if here.host.process is not None:
        each = min(each, here.host.process.bytes)
    if here.device is None or here.claim is None:
        return PlanLimits(
            gpu_bytes=None if cpu is None else max(0, each - cpu),
            cpu_bytes=None if gpu is None else max(0, each - gpu),
        )
    if not here.device.total:
        return PlanLimits(cpu_bytes=each)
    # Only the transport makes a difference.
    transport = read_options(request)[0].get("xavier_transport")
    options = XavierOptions.from_mapping({"xavier_transport": transport})
    most = largest_budget(options, here.device, here.claim, here.promised)
    return PlanLimits(gpu_bytes=most, cpu_bytes=each)


def _warnings(here: _Here | None) -> list[PlanNote]:
    if here is None:
        return [
            PlanNote(
                field=None,
                code="other_hosts",
                message="the workers run elsewhere: each checks the budgets against its own host",
            )
        ]
    if here.device is None:
        return [
            PlanNote(
                field="xavier_gpu_cache_bytes",
                code="host_memory",
                message="this host has vLLM's CPU build: the GPU tier is host memory, too",
            )
        ]
    return []
