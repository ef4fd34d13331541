# SPDX-License-Identifier: Apache-2.0
"""The console under ``/xavier`` in Xinference's API process, where Gradio is installed.

Gradio takes seconds to import and its page is of no use to most visitors, so both wait for the
first request; the server's start costs nothing. The page itself is public, as the web UI's pages
are. It shows nothing by itself: what it asks the API for, it asks with the visitor's own token.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import logging
from typing import TYPE_CHECKING, Final

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier.extension.web import CONSOLE
from xinference_xavier.rest import Api, ApiError

if TYPE_CHECKING:
    import gradio as gr

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0

FORWARDED: Final = ("x-forwarded-for", "x-real-ip")
"""Headers by which Xinference tells whose address a request of a proxy came from."""


def add_console(app: FastAPI) -> None:
    """Mount the console. API process, before the app starts; imports nothing."""
    if importlib.util.find_spec("gradio") is None:
        logger.info("No console at %s: Gradio is not installed", CONSOLE)
        return
    # The page finds what belongs to it only below a slash. Relative, for servers behind a proxy.
    app.add_route(
        CONSOLE,
        lambda request: RedirectResponse(CONSOLE.removeprefix("/") + "/"),
        include_in_schema=False,
    )
    app.mount(CONSOLE, LazyConsole(app), name="xavier-console")


class LazyConsole:
    """ASGI app that is made at its first request, of the API of ``server``."""

    def __init__(self, server: ASGIApp) -> None:
        self._server = server
        self._making: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the console; HTTP 503 when it cannot be made."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        try:
            # A visitor who leaves must not take the page from the others.
            console = await asyncio.shield(self._making)
        except Exception:
            # Fail open: the server goes on without its console. It is not tried again, because
            # everybody may ask for it.
            answer = PlainTextResponse(
                "The console cannot be shown; the server's log says why.\n", status_code=503
            )
            await answer(scope, receive, send)
            return
        await console(scope, receive, send)

    async def _make(self) -> ASGIApp:
        loop = asyncio.get_running_loop()

        def connect(token: str, request: gr.Request) -> Api:
            return OwnApi(self._server, loop, request, token)

        def make() -> ASGIApp:
            from xinference_xavier.ui.app import make_app

            return make_app(connect)

        try:
            return await asyncio.to_thread(make)
        except Exception:
            logger.exception("The console at %s cannot be made", CONSOLE)
            raise


class OwnApi(Api):
    """The API of this very process, asked in a visitor's name, from another thread.

    Requests go to the app itself instead of through its port: so they come from the visitor's
    address, to which Xinference's allow list, bans and audit log apply, and need no name, port or
    certificate of the server.
    """

    def __init__(
        self,
        server: ASGIApp,
        loop: asyncio.AbstractEventLoop,
        visitor: Request | gr.Request,
        token: str,
    ) -> None:
        super().__init__("http://this-server", token, TIMEOUT_S)
        self._server = server
        self._loop = loop
        self._client = (visitor.client.host, visitor.client.port) if visitor.client else ("", 0)
        self._forwarded = {
            name: visitor.headers[name] for name in FORWARDED if name in visitor.headers
        }

    def _send(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        asked = asyncio.run_coroutine_threadsafe(self._request(method, path, data), self._loop)
        try:
            return asked.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            raise ApiError(None, f"no answer within {self._timeout_s:.0f} s") from None
        except ValueError as error:
            # Such as a token of characters that no header may have.
            raise ApiError(None, f"it cannot be asked: {error}") from None

    async def _request(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        import httpx  # comes with Gradio

        transport = httpx.ASGITransport(
            self._server, raise_app_exceptions=False, client=self._client
        )
        headers = {"Content-Type": "application/json", **self._forwarded}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        async with httpx.AsyncClient(transport=transport, base_url=self.endpoint) as client:
            answer = await client.request(method, path, content=data, headers=headers)
        return answer.status_code, answer.content
