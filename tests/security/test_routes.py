# SPDX-License-Identifier: Apache-2.0
"""No route of ours without Xinference's scopes: found by comparing its app with and without us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount, Route
from starlette.testclient import TestClient

from tests.extension.stock_api import Stock
from xinference_xavier.extension import create
from xinference_xavier.extension.web import CONSOLE, PREFIX

PUBLIC = {CONSOLE, PREFIX}
"""Files of the web page and the console's page, which show nothing by themselves."""

SCOPES = {
    ("GET", "/v1/xavier/models"): "models:read",
    ("GET", "/v1/xavier/models/{model_uid}"): "models:read",
    ("GET", "/v1/xavier/cluster"): "models:read",
    ("POST", "/v1/xavier/plan"): "models:read",
    ("POST", "/v1/xavier/models/{model_uid}/audit"): "models:write",
    ("POST", "/v1/xavier/models/{model_uid}/clear"): "models:write",
    ("POST", "/v1/xavier/models/{model_uid}/budgets"): "models:write",
    ("POST", "/v1/models"): "models:write",
    ("POST", "/v1/autostart/models"): "models:write",
}
"""What each route asks for. A new route is not in it, and fails the test that compares."""

ALL_SCOPES = ("models:list", "models:read", "models:write", "models:register")


class Server:
    """The app of a stock server with authentication on, and with our extension."""

    def __init__(self, root: Path) -> None:
        from xinference.api.oauth2.advanced.auth_service import AdvancedAuthService

        self.auth = AdvancedAuthService(
            db_path=str(root / "auth.db"),
            jwt_secret_key="a" * 64,
            encryption_key="b" * 64,
            api_key_cache_enabled=False,
        )
        self.stock = Stock()
        self.app = FastAPI()
        before = list(self.app.routes)

        async def supervisor() -> Stock:
            return self.stock

        create().configure_api(
            SimpleNamespace(
                app=self.app,
                router=self.app.router,
                auth_service=self.auth,
                auth_enabled=True,
                get_supervisor_ref=supervisor,
            )
        )
        self.app.state.api = self.stock
        self.ours = [route for route in self.app.routes if route not in before]
        self.client = TestClient(self.app)

    def token(self, *scopes: str) -> str:
        name = "-".join(scopes) or "nobody"
        user = self.auth.db.create_user(name, password_hash=None, permissions=list(scopes))
        return str(self.auth.create_access_token(user, name, list(scopes)))

    def ask(self, method: str, path: str, token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        body = {"model_name": "m", "gpu": 0, "layers": 1, "kv_heads": 1, "head_dim": 8}
        path = path.format(model_uid="m")
        sent = None if method == "GET" else body
        return self.client.request(method, path, json=sent, headers=headers).status_code


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.client.close()


def guarded(routes: list[BaseRoute]) -> set[tuple[str, str]]:
    """Return (method, path) of the routes that are not public; fails at any other kind."""
    found = set()
    for route in routes:
        assert isinstance(route, APIRoute | Route | Mount), route
        if route.path in PUBLIC:
            continue
        assert isinstance(route, APIRoute), f"{route.path} cannot ask for scopes"
        found |= {(method, route.path) for method in route.methods}
    return found


def test_every_route_that_we_add_is_known_here(server: Server) -> None:
    assert guarded(server.ours) == set(SCOPES)


@pytest.mark.parametrize(("method", "path"), SCOPES)
def test_a_route_is_closed_to_everyone_without_its_scope(
    server: Server, method: str, path: str
) -> None:
    scope = SCOPES[method, path]
    assert server.ask(method, path, None) == 401
    for others in [*((name,) for name in ALL_SCOPES if name != scope), ()]:
        assert server.ask(method, path, server.token(*others)) == 403, others
    rest = [name for name in ALL_SCOPES if name != scope]
    assert server.ask(method, path, server.token(*rest)) == 403
    assert server.ask(method, path, server.token(scope)) not in (401, 403)


def test_the_api_knows_no_secrets(server: Server) -> None:
    """They are the business of actors; no request or answer has a field for one."""
    assert "secret" not in str(server.app.openapi()).lower()


def test_asking_for_a_model_makes_no_secret() -> None:
    """Else whoever may read could fill the supervisor's memory with names."""
    extension: Any = create()
    for uid in ("m", "n"):
        assert extension.control_operation("group_secret", {"model_uid": uid}) is None
    kept = {
        extension.control_operation("keep_secret", {"model_uid": "m", "secret": s}) for s in "ab"
    }
    assert kept == {"a"}
    assert extension.control_operation("group_secret", {"model_uid": "m"}) == "a"
    assert repr(extension._secrets) == "<secrets of 1 models>"


def test_the_supervisor_forgets_the_models_it_heard_of_longest_ago() -> None:
    from xinference_xavier.extension.secrets import MOST_SECRETS, Secrets

    kept = Secrets()
    for number in range(MOST_SECRETS):
        kept.keep(str(number), "s")
    kept.keep("0", "another")
    kept.keep("new", "s")
    assert (kept.get("0"), kept.get("1"), kept.get("new")) == ("s", None, "s")


def test_a_restarted_supervisor_is_told_a_secret_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import xoscar as xo

    from xinference_xavier.extension import secrets

    class Supervisor(xo.StatelessActor):
        def __init__(self) -> None:
            super().__init__()
            self.extension = create()

        async def call_extension(self, name: str, operation: str, payload: Any) -> Any:
            return self.extension.control_operation(operation, payload)

    async def run() -> Any:
        pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
        try:
            at = pool.external_address
            supervisor = await xo.create_actor(Supervisor, address=at, uid="supervisor")
            assert await secrets.model_key(supervisor, "m") is None
            reminding = asyncio.create_task(secrets.remind_for_ever(at, "m", "kept"))
            while await secrets.model_key(supervisor, "m") is None:
                await asyncio.sleep(0)
            reminding.cancel()
            key = await secrets.key_from(at, "m")
            return key, await secrets.agreed_secret(supervisor, "m", "too late")
        finally:
            await pool.stop()

    monkeypatch.setattr(secrets, "INTERVAL_S", 0.001)
    key, agreed = asyncio.run(asyncio.wait_for(run(), 30))
    assert (key.namespace, agreed) == ("m", "kept")
