# SPDX-License-Identifier: Apache-2.0
"""The console's page as an ASGI app, which serves the same under any path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import gradio as gr
from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier.ui.console import Connect, build

FOLDER: Final = Path(__file__).parent

CALLS: Final = "/gradio_api/run/predict"
NEEDED: Final = re.compile(r"/|/(assets|static)/.+|/theme\.css|/gradio_api/app_id")

THREADS: Final = 8
"""Calls that wait for the server's API at the same time, over all visitors."""

SESSIONS: Final = 64
"""Visitors that Gradio keeps its copy of the page's parts for, about 0.1 MB each. Nothing of ours
is in it: who is forgotten notices nothing."""


def make_app(connect: Connect, *, server: str = "") -> ASGIApp:
    """Return the page; see :func:`~xinference_xavier.ui.console.build`. Needs no lifespan."""
    page = build(connect, server=server)
    page.limiter = CapacityLimiter(THREADS)  # type: ignore[assignment]
    page.state_session_capacity = SESSIONS
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        "/",
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        js=(FOLDER / "theme.js").read_text(encoding="utf-8"),
        footer_links=[],
        # All of these can be turned on by the environment, too.
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
    )
    return _OnlyThePage(app)


class _OnlyThePage:
    """Lets through what the page asks for.

    Gradio also takes uploads from anybody, fetches addresses for them, and holds streams open that
    a server waits for when it stops.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        method = scope.get("method")
        get = method in ("GET", "HEAD") and NEEDED.fullmatch(path)
        if get or (method == "POST" and path == CALLS):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse("Not Found", status_code=404)(scope, receive, send)
