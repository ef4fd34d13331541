# SPDX-License-Identifier: Apache-2.0
"""Adds our script to the pages of Xinference's web UI, whose files stay as they are.

The script (``frontend/`` in the sources, built into ``web/``) adds a card to the launch dialog.
It is named by one tag before the end of each page's head, which also carries what the script must
know of the options. Only answers of the route that serves these pages are touched.
"""

from __future__ import annotations

import hashlib
import html
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xinference_xavier.options import TRANSPORTS, XavierOptions

logger = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).with_name("web")
SCRIPT: Final = "launch.js"
PREFIX: Final = "/xavier-ui"
CONSOLE: Final = "/xavier"

PAGES_ROUTE: Final = "xinference_spa_fallback"
"""Name of the stock route that serves the pages of the web UI."""

HEAD_END: Final = b"</head>"


def add_script(app: FastAPI) -> None:
    """Let the web UI's pages load our script. API process, before the app starts."""
    script = FOLDER / SCRIPT
    if not script.is_file():
        logger.warning(
            "%s is not there: the launch dialog has no Xavier card; install a wheel, or run make",
            script,
        )
        return
    version = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    app.mount(PREFIX, StaticFiles(directory=FOLDER), name="xavier-ui")
    app.add_middleware(PageScript, tag=lambda: script_tag(version, console=has_console(app)))


def has_console(app: FastAPI) -> bool:
    """Return whether the console is mounted."""
    return any(getattr(route, "path", None) == CONSOLE for route in app.routes)


def script_tag(version: str, *, console: bool) -> bytes:
    """Return the tag; ``version`` makes browsers load a new script at once."""
    default = {name: field.default for name, field in XavierOptions.model_fields.items()}
    told = {
        "gpu": default["xavier_gpu_cache_bytes"].to_plain(),
        "cpu": default["xavier_cpu_cache_bytes"].to_plain(),
        "transport": default["xavier_transport"],
        "transports": TRANSPORTS,
        "console": CONSOLE if console else None,
    }
    data = html.escape(json.dumps(told))
    source = f"{PREFIX}/{SCRIPT}?v={version}"
    return f'<script type="module" src="{source}" data-xavier="{data}"></script>'.encode()


class PageScript:
    """ASGI middleware that puts ``tag()`` into whole HTML answers of :data:`PAGES_ROUTE`."""

    def __init__(self, app: ASGIApp, tag: Callable[[], bytes]) -> None:
        self._app = app
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything else on as it is."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def insert(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_page(scope, message):
                start = message
            elif start is None or message["type"] != "http.response.body":
                if start is not None:
                    await send(start)
                    start = None
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    content = self._with_tag(start, bytes(body))
                    await send(start)
                    await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, insert)

    def _with_tag(self, start: Message, body: bytes) -> bytes:
        """Return the page with the tag, and correct the headers in ``start``."""
        tag = self._tag()
        content = body.replace(HEAD_END, tag + HEAD_END, 1)
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-length"] = str(len(content))
        if (etag := headers.get("etag")) is not None:
            digest = hashlib.sha256(tag).hexdigest()[:12]
            headers["etag"] = f'{etag.removesuffix(chr(34))}-{digest}"'
        # A range of the stock page would not fit into this one.
        del headers["accept-ranges"]
        start["headers"] = headers.raw
        return content


def _is_page(scope: Scope, start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    return (
        getattr(scope.get("route"), "name", None) == PAGES_ROUTE
        and start["status"] != 206
        and headers.get("content-type", "").startswith("text/html")
        and "content-encoding" not in headers
    )
