# SPDX-License-Identifier: Apache-2.0
"""GPU-first models: what their replicas say, clearing their stores, and limiting them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, HTTPException

from xinference_xavier.control.client import Member, peer_call
from xinference_xavier.extension.names import FINAL_REPORTS, NAME
from xinference_xavier.extension.routes import describe, limits
from xinference_xavier.extension.routes.access import (
    NO_DIRECTORY,
    NO_MODEL,
    READ,
    REFUSED,
    WRITE,
    members_of,
    needs,
    some_members_of,
)
from xinference_xavier.extension.vllm.group import UNREACHABLE
from xinference_xavier.schemas import (
    AuditedModel,
    AuditedReplica,
    BudgetsRequest,
    BudgetsResult,
    ClearedModel,
    ClearedReplica,
    ClosedReplica,
    DescribedReplica,
    LimitedReplica,
    Model,
    ModelList,
    ModelStatus,
    Replica,
)

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S: Final = 3.0
CHANGE_TIMEOUT_S: Final = 10.0

READY: Final = "READY"
"""Xinference's word for a replica that gets requests."""

Instance = Mapping[str, Any]
"""What the supervisor says of a model."""


def add_routes(context: Any) -> None:
    """Add the routes to an ``APIExtensionContext``."""
    app: FastAPI = context.app
    read, write = needs(context, READ), needs(context, WRITE)

    @app.get("/v1/xavier/models", dependencies=read, responses=NO_DIRECTORY)
    async def xavier_models() -> ModelList:
        """List the models that have GPU-first replicas, with a summary of each replica."""
        supervisor = await context.get_supervisor_ref()
        infos = await supervisor.get_instance_info(None, None)
        uids = sorted({info["model_uid"] for info in infos})
        members = await asyncio.gather(*(members_of(supervisor, uid) for uid in uids))
        shared = {uid: found for uid, found in zip(uids, members, strict=True) if found}
        models = await asyncio.gather(*(_model(uid, found, infos) for uid, found in shared.items()))
        return ModelList(models=list(models))

    @app.get(
        "/v1/xavier/models/{model_uid}", dependencies=read, responses={**NO_MODEL, **NO_DIRECTORY}
    )
    async def xavier_model(model_uid: str) -> ModelStatus:
        """Describe each replica of a GPU-first model in full, and what stopped ones left."""
        supervisor = await context.get_supervisor_ref()
        members = await members_of(supervisor, model_uid)
        closed = await supervisor.call_extension(NAME, FINAL_REPORTS, {"model_uid": model_uid})
        if not members and not closed:
            raise HTTPException(404, f"no GPU-first model with uid {model_uid!r}")
        infos = await supervisor.get_instance_info(None, model_uid)
        return ModelStatus(
            **_launched(model_uid, infos),
            replicas=await _replicas(infos, members),
            closed=[ClosedReplica.model_validate(report) for report in closed],
        )

    @app.post(
        "/v1/xavier/models/{model_uid}/clear",
        dependencies=write,
        responses={**NO_MODEL, **NO_DIRECTORY},
    )
    async def xavier_clear(model_uid: str) -> ClearedModel:
        """Clear the GPU-first stores of all replicas of a model, and their directory entries.

        The prefix caches inside the engines keep what they have. A replica that cannot be reached
        keeps its store and is named with the reason; then ``complete`` is false.
        """
        supervisor = await context.get_supervisor_ref()
        members = await some_members_of(supervisor, model_uid)
        replicas = list(await asyncio.gather(*map(_cleared, members)))
        infos = await supervisor.get_instance_info(None, model_uid)
        replicas += [
            ClearedReplica(replica=absent.replica, address=None, cleared=False, error=absent.error)
            for absent in _absent(infos, members)
        ]
        return ClearedModel(
            model_uid=model_uid,
            complete=all(replica.cleared for replica in replicas),
            replicas=sorted(replicas, key=lambda replica: replica.replica),
        )

    @app.post(
        "/v1/xavier/models/{model_uid}/audit",
        dependencies=write,
        responses={**NO_MODEL, **NO_DIRECTORY},
    )
    async def xavier_audit(model_uid: str) -> AuditedModel:
        """Check the bookkeeping of all replicas of a model, and say what they have in use.

        An engine may wait while its store is checked, some microseconds per block: for a
        diagnosis, not for monitoring. What is in use is nothing when nothing runs.
        """
        supervisor = await context.get_supervisor_ref()
        members = await some_members_of(supervisor, model_uid)
        replicas = list(await asyncio.gather(*map(_audited, members)))
        infos = await supervisor.get_instance_info(None, model_uid)
        replicas += [
            AuditedReplica(
                replica=absent.replica,
                address=None,
                contradiction=None,
                in_use={},
                error=absent.error,
            )
            for absent in _absent(infos, members)
        ]
        return AuditedModel(
            model_uid=model_uid,
            consistent=not any(r.contradiction or r.error for r in replicas),
            replicas=sorted(replicas, key=lambda replica: replica.replica),
        )

    @app.post(
        "/v1/xavier/models/{model_uid}/budgets",
        dependencies=write,
        responses={**REFUSED, **NO_MODEL, **NO_DIRECTORY},
    )
    async def xavier_budgets(model_uid: str, budgets: BudgetsRequest) -> BudgetsResult:
        """Limit how much of their tiers the replicas of a model use, from now on.

        A limit lies between 0 and what was allocated at start; above that, 400 is answered and
        nothing is changed. Unleased blocks above a limit are gone at once, leased ones when their
        leases end. No memory is returned. A replica that starts later has no limit.
        """
        supervisor = await context.get_supervisor_ref()
        members = await some_members_of(supervisor, model_uid)
        described = await asyncio.gather(*map(_described, members))
        try:
            wanted = [limits.wanted(budgets, replica) for replica in described]
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        replicas = list(
            await asyncio.gather(
                *(
                    _limited(member, replica, slots)
                    for member, replica, slots in zip(members, described, wanted, strict=True)
                )
            )
        )
        infos = await supervisor.get_instance_info(None, model_uid)
        replicas += [limits.unlimited(absent, absent.error) for absent in _absent(infos, members)]
        return BudgetsResult(
            model_uid=model_uid,
            complete=all(replica.applied for replica in replicas),
            replicas=sorted(replicas, key=lambda replica: replica.replica),
        )


async def _model(model_uid: str, members: Sequence[Member], infos: Iterable[Instance]) -> Model:
    mine = [info for info in infos if info["model_uid"] == model_uid]
    found = await _replicas(mine, members)
    replicas = [Replica(**replica.model_dump(exclude={"status"})) for replica in found]
    return Model(**_launched(model_uid, mine), replicas=replicas)


def _launched(model_uid: str, infos: Iterable[Instance]) -> dict[str, Any]:
    """Return what Xinference knows of a model as a whole."""
    info: Instance = next(iter(infos), {})
    return {
        "model_uid": model_uid,
        "model_name": info.get("model_name"),
        "status": info.get("status"),
        "replica": info.get("replica", 0),
    }


async def _replicas(infos: Iterable[Instance], members: Sequence[Member]) -> list[DescribedReplica]:
    found = [*await asyncio.gather(*map(_described, members)), *_absent(infos, members)]
    return sorted(found, key=lambda replica: replica.replica)


def _absent(infos: Iterable[Instance], members: Iterable[Member]) -> list[DescribedReplica]:
    """Return the replicas that Xinference sends requests to and that are no members."""
    named = {member.info.name for member in members}
    statuses = [status for info in infos for status in info["replica_statuses"]]
    ready = [item["replica_model_uid"] for item in statuses if item["status"] == READY]
    return [describe.missing(name) for name in ready if name not in named]


async def _described(member: Member) -> DescribedReplica:
    info = member.info
    try:
        status = await peer_call(member.contact, "describe", timeout_s=PEER_TIMEOUT_S)
    except UNREACHABLE as error:
        # A replica that has just died is in the directory until its heartbeat runs out.
        logger.warning("%s at %s does not answer: %r", info.name, info.address, error)
        return describe.unreachable(info.name, info.address, _text(error))
    return describe.described(info.name, info.address, status)


async def _cleared(member: Member) -> ClearedReplica:
    info = member.info
    cleared, problem = False, None
    try:
        answer = await peer_call(member.contact, "clear", timeout_s=CHANGE_TIMEOUT_S)
        cleared = bool(answer["cleared"])
        if not cleared:
            problem = "its store is closed"
    except Exception as error:
        # Whatever one replica raises, the others are cleared and the caller must learn which.
        logger.warning("%s at %s was not cleared: %r", info.name, info.address, error)
        problem = _text(error)
    return ClearedReplica(replica=info.name, address=info.address, cleared=cleared, error=problem)


async def _audited(member: Member) -> AuditedReplica:
    info = member.info
    contradiction, in_use, problem = None, {}, None
    try:
        answer = await peer_call(member.contact, "audit", timeout_s=CHANGE_TIMEOUT_S)
        contradiction = answer["contradiction"]
        in_use = {name: count for name, count in answer["in_use"].items() if count}
    except Exception as error:
        # As above.
        logger.warning("%s at %s was not checked: %r", info.name, info.address, error)
        problem = _text(error)
    return AuditedReplica(
        replica=info.name,
        address=info.address,
        contradiction=contradiction,
        in_use=in_use,
        error=problem,
    )


async def _limited(
    member: Member, replica: DescribedReplica, slots: limits.Slots | None
) -> LimitedReplica:
    if slots is None:
        return limits.unlimited(replica, replica.error or f"it is {replica.state}")
    try:
        answer = await peer_call(member.contact, "set_limits", *slots, timeout_s=CHANGE_TIMEOUT_S)
    except Exception as error:
        # As above.
        logger.warning("%s at %s was not limited: %r", replica.replica, replica.address, error)
        return limits.unlimited(replica, _text(error))
    return limits.limited(replica, answer)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
