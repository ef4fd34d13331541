# SPDX-License-Identifier: Apache-2.0
"""Our routes in Xinference's REST API.

Two stand before stock routes of the same path, translate what asks for GPU-first, and let the
stock handler do the rest with the scopes that it has there: launching a model, and storing a
launch for autostart. Two below ``/v1/xavier/models/{model_uid}`` are our own: what a model's
replicas say of themselves, and clearing the stores of all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Query, Request, Security
from fastapi.params import Depends
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from xinference_xavier.control.client import directory_members, peer_call
from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.extension.devices import device_memory
from xinference_xavier.extension.launch import Launch, translate, with_default
from xinference_xavier.extension.names import FINAL_REPORTS, NAME
from xinference_xavier.extension.vllm.cpu import cpu_build_installed
from xinference_xavier.extension.vllm.group import UNREACHABLE
from xinference_xavier.preflight import check_budgets

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S: Final = 3.0
CLEAR_TIMEOUT_S: Final = 10.0

READY: Final = "READY"
"""Xinference's word for a replica that gets requests."""


class ClearedReplica(BaseModel):
    """What became of one replica's store."""

    replica: str
    address: str | None = Field(description="Of its peer; null if it is not in the directory")
    cleared: bool = Field(description="Whether no block that it had stored can be read any more")
    error: str | None = Field(description="Why it was not cleared, or is not known to be")


class ClearedModel(BaseModel):
    """What became of the stores of a model's replicas."""

    model_uid: str
    complete: bool = Field(description="Whether every replica was cleared")
    replicas: list[ClearedReplica] = Field(description="By name")


class Problem(BaseModel):
    """Xinference's form of an error."""

    detail: str


def add_routes(context: Any) -> None:
    """Add the routes to an ``APIExtensionContext``. Must run before the stock routes exist."""
    app: FastAPI = context.app
    auth = context.auth_service if context.auth_enabled else None

    def needs(scope: str) -> list[Depends]:
        return [] if auth is None else [Security(auth, scopes=[scope])]

    @app.post("/v1/models", dependencies=needs("models:write"), include_in_schema=False)
    async def launch_model(request: Request, wait_ready: bool = Query(True)) -> Any:
        body = await _json_object(request)
        if body is not None:
            translated = await _translated(body, context)
            if translated is not body:
                request = _with_body(request, translated)
        return await request.app.state.api.launch_model(request, wait_ready)

    # The user who stores a launch is part of the stock handler's arguments.
    async def nobody() -> None:
        return None

    user_of = Security(auth, scopes=["models:write"]) if auth is not None else Security(nobody)

    @app.post("/v1/autostart/models", include_in_schema=False)
    async def store_autostart(request: Request, user: Any = user_of) -> Any:
        body = await _json_object(request)
        if body is not None:
            nested = body.get("launch")
            stored = nested if isinstance(nested, Mapping) else body
            translated = await _translated(stored, context)
            if translated is not stored:
                body = translated if stored is body else {**body, "launch": translated}
                request = _with_body(request, body)
        return await request.app.state.api.upsert_autostart_model(request, user)

    @app.get("/v1/xavier/models/{model_uid}", dependencies=needs("models:read"))
    async def xavier_status(model_uid: str) -> JSONResponse:
        """Describe each replica of a GPU-first model, and what stopped ones left."""
        supervisor = await context.get_supervisor_ref()
        members = await _members(supervisor, model_uid)
        closed = await supervisor.call_extension(NAME, FINAL_REPORTS, {"model_uid": model_uid})
        if not members and not closed:
            raise HTTPException(404, f"no GPU-first model with uid {model_uid!r}")
        replicas = await asyncio.gather(*(_described(info) for info in members))
        replicas.sort(key=lambda replica: str(replica["replica"]))
        return JSONResponse({"model_uid": model_uid, "replicas": replicas, "closed": closed})

    @app.post(
        "/v1/xavier/models/{model_uid}/clear",
        dependencies=needs("models:write"),
        responses={
            404: {"model": Problem, "description": "No replica is in the directory"},
            503: {"model": Problem, "description": "The directory does not answer"},
        },
    )
    async def xavier_clear(model_uid: str) -> ClearedModel:
        """Clear the GPU-first stores of all replicas of a model, and their directory entries.

        The prefix caches inside the engines keep what they have. A replica that cannot be reached
        keeps its store and is named with the reason; then ``complete`` is false.
        """
        supervisor = await context.get_supervisor_ref()
        members = await _members(supervisor, model_uid)
        if not members:
            raise HTTPException(404, f"no GPU-first replica of {model_uid!r} is in the directory")
        replicas = list(await asyncio.gather(*map(_cleared, members)))
        named = {info.name for info in members}
        replicas += [
            ClearedReplica(
                replica=name, address=None, cleared=False, error="it is not in the directory"
            )
            for name in await _ready_replicas(supervisor, model_uid)
            if name not in named
        ]
        return ClearedModel(
            model_uid=model_uid,
            complete=all(replica.cleared for replica in replicas),
            replicas=sorted(replicas, key=lambda replica: replica.replica),
        )


async def _json_object(request: Request) -> Mapping[str, Any] | None:
    """Return the body, or None for one that the stock handler shall complain about."""
    try:
        body = await request.json()
    except ValueError:
        return None
    return body if isinstance(body, Mapping) else None


async def _translated(body: Mapping[str, Any], context: Any) -> Mapping[str, Any]:
    """Return the launch arguments for the stock handler: ``body`` itself if it is not ours."""
    try:
        launch = translate(body)
        if not isinstance(launch, Launch):
            return launch
        supervisor = await context.get_supervisor_ref()
        if await supervisor.is_local_deployment():
            launch = _checked_here(launch)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return launch.payload


def _checked_here(launch: Launch) -> Launch:
    """Check a launch whose replicas will all run on this host; elsewhere their workers do."""
    on_cpu = cpu_build_installed()
    device = None if on_cpu else device_memory()
    check_budgets(launch.options, replicas_on_host=launch.replicas, device=device)
    # A virtual environment would get vLLM's build for GPUs.
    return with_default(launch, "enable_virtual_env", False) if on_cpu else launch


def _with_body(request: Request, body: Mapping[str, Any]) -> Request:
    """Return the same request (state, headers, user) with another body."""
    content = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return Request(request.scope, receive)


async def _members(supervisor: Any, model_uid: str) -> list[MemberInfo]:
    """Return a model's replicas that are in the directory."""
    address = supervisor.address
    try:
        members = await directory_members(address, model_uid)
    except OSError as error:
        raise HTTPException(503, f"the directory at {address} does not answer: {error}") from None
    return [info for _, _, info in members]


async def _ready_replicas(supervisor: Any, model_uid: str) -> list[str]:
    """Return the names of the replicas that Xinference sends requests to."""
    statuses = await supervisor.get_replica_statuses(model_uid)
    return [item["replica_model_uid"] for item in statuses if item["status"] == READY]


async def _cleared(info: MemberInfo) -> ClearedReplica:
    cleared, problem = False, None
    try:
        answer = await peer_call(info.address, "clear", timeout_s=CLEAR_TIMEOUT_S)
        cleared = bool(answer["cleared"])
        if not cleared:
            problem = "its store is closed"
    except Exception as error:
        # Whatever one replica raises, the others are cleared and the caller must learn which.
        logger.warning("%s at %s was not cleared: %r", info.name, info.address, error)
        problem = str(error) or type(error).__name__
    return ClearedReplica(replica=info.name, address=info.address, cleared=cleared, error=problem)


async def _described(info: MemberInfo) -> dict[str, Any]:
    replica = {"replica": info.name, "address": info.address}
    try:
        status = await peer_call(info.address, "describe", timeout_s=PEER_TIMEOUT_S)
    except UNREACHABLE as error:
        # A replica that has just died is in the directory until its heartbeat runs out.
        logger.warning("%s at %s does not answer: %r", info.name, info.address, error)
        return {**replica, "error": str(error) or type(error).__name__}
    return {**replica, "status": status}
