# SPDX-License-Identifier: Apache-2.0
"""Routes before stock ones of the same path: launching a model, and storing a launch for autostart.

They translate what asks for GPU-first, and let the stock handler do the rest with the scopes that
it has there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Query, Request, Security

from xinference_xavier.extension.launch import Launch, translate, with_default
from xinference_xavier.extension.routes.access import WRITE, needs
from xinference_xavier.extension.vllm.cpu import cpu_build_installed
from xinference_xavier.extension.vllm.gpu import launch_room
from xinference_xavier.preflight import check_budgets


def add_routes(context: Any) -> None:
    """Add both routes. Must run before the stock ones exist."""
    app: FastAPI = context.app

    @app.post("/v1/models", dependencies=needs(context, WRITE), include_in_schema=False)
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

    user = context.auth_service if context.auth_enabled else nobody
    user_of = Security(user, scopes=[WRITE])

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
            # On a thread: it asks the driver, and reads the model's files.
            launch = await asyncio.to_thread(checked_here, launch)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return launch.payload


def checked_here(launch: Launch) -> Launch:
    """Check a launch whose replicas will all run on this host; elsewhere their workers do."""
    if cpu_build_installed():
        check_budgets(launch.options, replicas_on_host=launch.replicas)
        # A virtual environment would get vLLM's build for GPUs.
        return with_default(launch, "enable_virtual_env", False)
    device, claim, promised = launch_room(launch.payload, launch.replicas)
    check_budgets(
        launch.options,
        replicas_on_host=launch.replicas,
        device=device,
        claim=claim,
        promised=promised,
    )
    return launch


def _with_body(request: Request, body: Mapping[str, Any]) -> Request:
    """Return the same request (state, headers, user) with another body."""
    content = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return Request(request.scope, receive)
