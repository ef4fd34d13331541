# SPDX-License-Identifier: Apache-2.0
"""The console below the server's own address, with the rights of each visitor."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from xinference.api.frontend_static import mount_frontend

from tests.extension.users import Users
from tests.ui.gradio_page import GradioPage
from xinference_xavier.extension import console, web
from xinference_xavier.extension.console import LazyConsole, OwnApi, add_console
from xinference_xavier.rest import ApiError

pytest.importorskip("gradio")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Users]:
    """Users of a server with the console and the stock pages."""
    users = Users(tmp_path, monkeypatch)
    app = users.client.app
    assert isinstance(app, FastAPI)
    add_console(app)
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("index.html", "404.html"):
        (dist / name).write_text("<html><head></head>a stock page</html>")
    assert mount_frontend(app, dist)
    # One event loop for all requests, as in a server.
    with users.client:
        yield users


def page_of(users: Users, token: str = "") -> GradioPage:
    return GradioPage(users.client, f"{web.CONSOLE}/", token)


def test_the_page_is_public_and_says_nothing(users: Users) -> None:
    _, body, actions, login, _ = page_of(users).call("refresh", None, None)
    assert "Could not validate credentials" in body
    assert "m-rep0" not in body
    assert (actions["visible"], login["visible"]) == (False, True)


def test_a_visitor_sees_and_does_what_the_api_lets_them(users: Users) -> None:
    reader = page_of(users, users.token("models:read"))
    assert "m-rep0" in reader.look()
    assert "Not enough permissions" in reader.call("clear", "m")[1]
    assert "Not enough permissions" in reader.call("limit", "m", "0", "")[0]
    key = page_of(users, users.api_key("admin"))
    assert "m-rep0" in key.look()
    assert "API keys can only" in key.call("clear", "m")[1]
    writer = page_of(users, users.token("models:read", "models:write"))
    assert "m: cleared m-rep0" in writer.call("clear", "m")[1]
    assert "m: limited m-rep0" in writer.call("limit", "m", "0", "")[0]
    stranger = page_of(users, users.token("models:register"))
    assert "Not enough permissions" in stranger.look()


def test_a_login_that_has_ended_does_not_get_its_visitor_banned(users: Users) -> None:
    ended = page_of(users, "ended")
    # Ten wrong tokens would.
    for _ in range(20):
        assert "Could not validate credentials" in ended.look()
    assert "m-rep0" in page_of(users, users.token("models:read")).look()


def test_the_address_without_a_slash_leads_to_the_page(users: Users) -> None:
    answer = users.client.get(web.CONSOLE, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "xavier/")
    assert "gradio_config" in users.client.get(web.CONSOLE).text
    assert web.has_console(users.client.app)  # type: ignore[arg-type]
    assert "a stock page" in users.client.get("/").text


def test_the_page_s_links_are_below_it(users: Users) -> None:
    assert page_of(users).config["root"] == "http://testserver/xavier"
    client = TestClient(users.client.app, root_path="/below")
    config = GradioPage(client, "/below/xavier/").config
    assert config["root"] == "http://testserver/below/xavier"


def test_requests_come_from_the_visitor_s_address(users: Users) -> None:
    app = FastAPI()
    seen: list[Any] = []

    @app.get("/v1/xavier/models")
    async def models(request: Request) -> dict[str, list[Any]]:
        seen.append((request.client, request.headers.get("x-real-ip")))
        return {"models": []}

    add_console(app)
    client = TestClient(app, client=("192.0.2.7", 1234), headers={"X-Real-IP": "192.0.2.8"})
    with client:
        GradioPage(client, "/xavier/").look()
    assert seen == [(("192.0.2.7", 1234), "192.0.2.8")]


def test_without_gradio_there_is_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    app = FastAPI()
    add_console(app)
    assert not web.has_console(app)


def test_the_server_s_start_imports_no_gradio() -> None:
    code = (
        "import sys; from fastapi import FastAPI; "
        "from xinference_xavier.extension.console import add_console; "
        "app = FastAPI(); add_console(app); "
        "assert [route for route in app.routes if route.path == '/xavier']; "
        "assert not {'gradio', 'httpx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_console_that_cannot_be_made_is_told_and_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from xinference_xavier.ui import app as ui

    tried = []

    def broken(*arguments: Any, **more: Any) -> None:
        tried.append(arguments)
        raise TypeError("another Gradio")

    monkeypatch.setattr(ui, "make_app", broken)
    app = FastAPI()
    add_console(app)
    with TestClient(app) as client:
        for _ in range(3):
            answer = client.get("/xavier/")
            assert answer.status_code == 503
            assert "log says why" in answer.text
    assert len(tried) == 1
    assert "another Gradio" in caplog.text


def test_a_visitor_who_leaves_does_not_take_the_page_from_the_others() -> None:
    served: list[str] = []
    go_on = asyncio.Event()

    async def page(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])

    class Slow(LazyConsole):
        async def _make(self) -> Any:
            await go_on.wait()
            return page

    async def visits() -> None:
        slow = Slow(page)

        def visit(path: str) -> asyncio.Task[None]:
            scope = {"type": "http", "path": path}
            return asyncio.create_task(slow(scope, None, None))  # type: ignore[arg-type]

        first, second = visit("/first"), visit("/second")
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        go_on.set()
        await second

    asyncio.run(visits())
    assert served == ["/second"]


def test_a_call_that_is_not_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "TIMEOUT_S", 0.01)
    cancelled: list[bool] = []

    async def never(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def ask() -> None:
        visitor = Request({"type": "http", "headers": [], "client": ("192.0.2.7", 1)})
        api = OwnApi(never, asyncio.get_running_loop(), visitor, "")
        with pytest.raises(ApiError, match="no answer within"):
            await asyncio.to_thread(api.models)
        while not cancelled:
            await asyncio.sleep(0)

    asyncio.run(ask())


def test_a_token_that_no_header_may_have_is_refused_here() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was asked")

    async def ask() -> None:
        visitor = Request({"type": "http", "headers": [], "client": None})
        api = OwnApi(app, asyncio.get_running_loop(), visitor, "schlüssel")
        with pytest.raises(ApiError, match="cannot be asked"):
            await asyncio.to_thread(api.models)

    asyncio.run(ask())
