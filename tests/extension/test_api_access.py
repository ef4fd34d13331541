# SPDX-License-Identifier: Apache-2.0
"""Who may call our routes, by Xinference's own authentication, and how clients learn of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import xoscar as xo
from fastapi import HTTPException
from fastapi.security import SecurityScopes

from tests.extension.stock_api import Stock, client_of
from tests.extension.users import Users
from xinference_xavier import __version__
from xinference_xavier.extension.routes import cluster

READS = [
    ("GET", "/v1/xavier/models", None),
    ("GET", "/v1/xavier/models/m", None),
    ("GET", "/v1/xavier/cluster", None),
    ("POST", "/v1/xavier/plan", {"layers": 1, "kv_heads": 1, "head_dim": 8}),
]
WRITES = [
    ("POST", "/v1/xavier/models/m/clear", None),
    ("POST", "/v1/xavier/models/m/budgets", {"gpu": 0}),
    ("POST", "/v1/xavier/plan", {"model_path": "/no/such/model"}),
    ("POST", "/v1/models", {"model_name": "m"}),
    ("POST", "/v1/autostart/models", {"model_name": "m"}),
]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    return Users(tmp_path, monkeypatch)


def answers(users: Users, routes: list[Any], token: str | None) -> set[int]:
    return {users.ask(route, token) for route in routes}


@pytest.mark.parametrize("token", [None, "nonsense", "sk-nonsense"])
def test_without_a_valid_token_nothing_is_told_and_nothing_done(
    users: Users, token: str | None
) -> None:
    # One wrong token more, and Xinference would shut this client out for a while.
    assert answers(users, READS + WRITES, token) == {401}
    assert users.stock.launched == users.stock.stored == []


def test_a_user_who_may_read_reads_only(users: Users) -> None:
    token = users.token("models:list", "models:read")
    assert answers(users, READS, token) == {200}
    assert answers(users, WRITES, token) == {403}


def test_a_user_who_may_launch_may_clear_and_limit(users: Users) -> None:
    token = users.token("models:read", "models:write")
    assert answers(users, READS + WRITES, token) == {200}


def test_a_user_with_other_rights_is_refused(users: Users) -> None:
    assert answers(users, READS + WRITES, users.token("models:register")) == {403}


def test_an_administrator_may_do_everything(users: Users) -> None:
    assert answers(users, READS + WRITES, users.token("admin")) == {200}


def test_an_api_key_reads_only_whoever_owns_it(users: Users) -> None:
    key = users.api_key("admin")
    assert answers(users, READS, key) == {200}
    assert answers(users, WRITES, key) == {403}


def test_every_route_asks_for_its_scope_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    async def auth(scopes: SecurityScopes) -> str:
        asked.append(scopes.scopes)
        raise HTTPException(403, "no")

    client = client_of(Stock(), auth)
    for method, path, body in [*READS, *WRITES[:2]]:
        assert client.request(method, path, json=body).status_code == 403
    assert asked == [["models:read"]] * 4 + [["models:write"]] * 2


def test_the_user_who_stores_a_launch_is_told_to_the_stock_handler() -> None:
    async def auth(scopes: SecurityScopes) -> str:
        return "someone"

    stock = Stock()
    client_of(stock, auth).post("/v1/autostart/models", json={"model_name": "m"})
    assert stock.stored[0][1] == "someone"


# -- for clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "model", "refusals"),
    [
        ("get", "/v1/xavier/models", "ModelList", {"503"}),
        ("get", "/v1/xavier/models/{model_uid}", "ModelStatus", {"404", "503"}),
        ("get", "/v1/xavier/cluster", "Cluster", set()),
        ("post", "/v1/xavier/plan", "Plan", {"404", "422", "503"}),
        ("post", "/v1/xavier/models/{model_uid}/clear", "ClearedModel", {"404", "503"}),
        (
            "post",
            "/v1/xavier/models/{model_uid}/budgets",
            "BudgetsResult",
            {"400", "404", "422", "503"},
        ),
    ],
)
def test_routes_are_described_with_their_types(
    method: str, path: str, model: str, refusals: set[str]
) -> None:
    described = client_of(Stock()).get("/openapi.json").json()
    route = described["paths"][path][method]
    schema = route["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{model}"}
    assert refusals <= set(route["responses"])
    assert len(route["description"]) > 40
    for status in refusals - {"422"}:
        content = route["responses"][status]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/Problem"}


# -- the cluster -----------------------------------------------------------------------------------


class Worker(xo.StatelessActor):
    def __init__(self, extensions: dict[str, Any]) -> None:
        super().__init__()
        self.extensions = extensions

    async def get_extension_resources(self) -> dict[str, Any]:
        return {"extensions": self.extensions}


def test_the_cluster_tells_which_workers_have_the_extension() -> None:
    async def run() -> list[Any]:
        pools = []
        addresses = []
        try:
            for extensions in ({"xinference-xavier": {"version": "1.2"}}, {"other": {}}):
                pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
                pools.append(pool)
                addresses.append(pool.external_address)
                await xo.create_actor(
                    Worker, extensions, address=pool.external_address, uid="worker"
                )
            # Nothing listens at the last one.
            return [await cluster._worker(at) for at in (*addresses, "127.0.0.1:1")]
        finally:
            for pool in pools:
                await pool.stop()

    first, second, third = asyncio.run(run())
    assert (first.extension, first.error) == ("1.2", None)
    assert (second.extension, second.error) == (None, "it does not have this extension")
    assert third.extension is None
    assert third.error


def test_the_cluster_tells_versions() -> None:
    found = client_of(Stock()).get("/v1/xavier/cluster").json()
    assert found["version"] == __version__
    assert found["versions"]["xoscar"]
    assert (found["supervisor"], found["local"], found["workers"]) == ("127.0.0.1:1", True, [])
