# SPDX-License-Identifier: Apache-2.0
"""Our routes before a stand-in for the stock API: what it gets, and what never reaches it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.security import SecurityScopes
from fastapi.testclient import TestClient

from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.extension import api
from xinference_xavier.extension.launch import CARRIER, read_carrier

GPU_FIRST = {
    "model_name": "m",
    "model_engine": "vLLM",
    "replica": 2,
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "1MiB",
    "xavier_cpu_cache_bytes": "1MiB",
}


@dataclass
class Stock:
    """The stock handlers, the supervisor, and what they were asked."""

    local: bool = True
    launched: list[tuple[dict[str, Any], bool]] = field(default_factory=list)
    stored: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    closed: list[dict[str, Any]] = field(default_factory=list)
    address: str = "127.0.0.1:1"
    ready: list[str] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)

    async def launch_model(self, request: Request, wait_ready: bool) -> JSONResponse:
        self.launched.append((await request.json(), wait_ready))
        return JSONResponse({"model_uid": "m"})

    async def upsert_autostart_model(self, request: Request, user: Any) -> JSONResponse:
        self.stored.append((await request.json(), user))
        return JSONResponse({})

    async def is_local_deployment(self) -> bool:
        return self.local

    async def get_replica_statuses(self, model_uid: str) -> list[dict[str, Any]]:
        assert model_uid == "m"
        found = [("READY", name) for name in self.ready]
        found += [("CREATING", name) for name in self.starting]
        return [{"replica_model_uid": name, "status": status} for status, name in found]

    async def call_extension(self, name: str, operation: str, payload: dict[str, Any]) -> Any:
        assert (name, operation) == ("xinference-xavier", "final_reports")
        return [report for report in self.closed if report["model_uid"] == payload["model_uid"]]


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "cpu_build_installed", lambda: True)


def client_of(stock: Stock, auth: Any = None) -> TestClient:
    async def supervisor() -> Stock:
        return stock

    app = FastAPI()
    app.state.api = stock
    api.add_routes(
        SimpleNamespace(
            app=app,
            auth_service=auth,
            auth_enabled=auth is not None,
            get_supervisor_ref=supervisor,
        )
    )
    return TestClient(app)


@pytest.fixture
def client(stock: Stock) -> TestClient:
    return client_of(stock)


def test_a_stock_launch_reaches_the_stock_handler_as_it_is(
    client: TestClient, stock: Stock
) -> None:
    body = {"model_name": "m", "enable_xavier": True, "xavier_gpu_cache_bytes": 5}
    answer = client.post("/v1/models?wait_ready=false", json=body)
    assert answer.json() == {"model_uid": "m"}
    assert stock.launched == [(body, False)]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_body_that_is_no_object_is_the_stock_handlers_to_refuse(
    stock: Stock, content: bytes
) -> None:
    seen = []

    async def refuse(request: Request, wait_ready: bool) -> JSONResponse:
        seen.append(await request.body())
        raise HTTPException(400, "stock says no")

    stock.launch_model = refuse  # type: ignore[method-assign]  # the stand-in of this test
    answer = client_of(stock).post("/v1/models", content=content)
    assert answer.json() == {"detail": "stock says no"}
    assert seen == [content]


def test_a_gpu_first_launch_is_translated(client: TestClient, stock: Stock) -> None:
    assert client.post("/v1/models", json=GPU_FIRST).status_code == 200
    [(payload, wait_ready)] = stock.launched
    assert wait_ready is True
    assert read_carrier(payload.pop(CARRIER)).xavier_gpu_cache_bytes.bytes == 2**20
    assert payload == {
        "model_name": "m",
        "model_engine": "vLLM",
        "replica": 2,
        "enable_virtual_env": False,
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"enable_xavier": False}, "needs enable_xavier=true"),
        ({"xavier_gpu_cache_bytes": True}, "xavier_gpu_cache_bytes=True"),
        ({"xavier_cpu_cache_bytes": "8EB"}, "unknown unit"),
        ({"xavier_cpu_cache_bytes": "99TiB"}, "need 198.00 TiB on this host (2 x 99.00 TiB)"),
        ({"xavier_cpu_bytes": 1}, "did you mean"),
    ],
)
def test_a_bad_launch_is_answered_and_never_started(
    client: TestClient, stock: Stock, values: dict[str, Any], said: str
) -> None:
    answer = client.post("/v1/models", json={**GPU_FIRST, **values})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert stock.launched == []


def test_in_a_cluster_the_workers_check_their_own_memory(stock: Stock) -> None:
    stock.local = False
    body = {**GPU_FIRST, "xavier_cpu_cache_bytes": "99TiB"}
    assert client_of(stock).post("/v1/models", json=body).status_code == 200
    [(payload, _)] = stock.launched
    assert "enable_virtual_env" not in payload


def test_a_gpu_host_keeps_its_virtual_environments(
    client: TestClient, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "cpu_build_installed", lambda: False)
    monkeypatch.setattr(api, "device_memory", lambda: None)
    assert client.post("/v1/models", json=GPU_FIRST).status_code == 200
    assert "enable_virtual_env" not in stock.launched[0][0]


@pytest.mark.parametrize("nested", [True, False])
def test_a_stored_launch_is_translated_too(client: TestClient, stock: Stock, nested: bool) -> None:
    entry = {"launch": GPU_FIRST, "priority": 5} if nested else {**GPU_FIRST, "priority": 5}
    assert client.post("/v1/autostart/models", json=entry).status_code == 200
    [(stored, user)] = stock.stored
    assert stored["priority"] == 5
    launch = stored["launch"] if nested else stored
    assert CARRIER in launch
    assert "enable_xavier" not in launch
    assert user is None


def test_a_stock_stored_launch_is_left_alone(client: TestClient, stock: Stock) -> None:
    entry = {"launch": {"model_name": "m"}, "enabled": False}
    client.post("/v1/autostart/models", json=entry)
    assert stock.stored == [(entry, None)]


def test_a_bad_stored_launch_is_refused_when_it_is_stored(client: TestClient, stock: Stock) -> None:
    entry = {"launch": {**GPU_FIRST, "n_worker": 2}}
    answer = client.post("/v1/autostart/models", json=entry)
    assert answer.status_code == 400
    assert "n_worker=2" in answer.json()["detail"]
    assert stock.stored == []


def directory_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    async def members(address: str, namespace: str) -> list[Any]:
        assert (address, namespace) == ("127.0.0.1:1", "m")
        return [member(name) for name in names]

    monkeypatch.setattr(api, "directory_members", members)


def member(name: str) -> tuple[bytes, int, MemberInfo]:
    return (b"f", 1, MemberInfo(name, 7, f"{name}:1", "host", 0.0))


def test_the_status_describes_every_replica_and_what_closed_ones_left(
    client: TestClient, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.closed = [{"model_uid": "m", "replica": "m-rep9"}, {"model_uid": "other"}]

    directory_of(monkeypatch, "m-rep1", "m-rep0")

    async def call(address: str, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert method == "describe"
        if address == "m-rep1:1":
            raise TimeoutError("no answer within 3 s")
        return {"blocks": 5}

    monkeypatch.setattr(api, "peer_call", call)
    assert client.get("/v1/xavier/models/m").json() == {
        "model_uid": "m",
        "replicas": [
            {"replica": "m-rep0", "address": "m-rep0:1", "status": {"blocks": 5}},
            {"replica": "m-rep1", "address": "m-rep1:1", "error": "no answer within 3 s"},
        ],
        "closed": [{"model_uid": "m", "replica": "m-rep9"}],
    }


def test_clearing_asks_for_the_scope_of_stopping_a_model(
    stock: Stock, stores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(monkeypatch, "m-rep0")
    stores.update({"m-rep0:1": {"cleared": True}})

    async def auth(scopes: SecurityScopes) -> str:
        if "models:write" in scopes.scopes:
            raise HTTPException(403, "no")
        return "someone"

    assert client_of(stock, auth).post("/v1/xavier/models/m/clear").status_code == 403


def test_a_model_that_is_not_gpu_first_is_not_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(address: str, namespace: str) -> list[Any]:
        return []

    monkeypatch.setattr(api, "directory_members", nobody)
    answer = client.get("/v1/xavier/models/plain")
    assert answer.status_code == 404
    assert "'plain'" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/xavier/models/m", "/v1/xavier/models/m/clear"])
def test_a_directory_that_does_not_answer_is_named(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def silence(address: str, namespace: str) -> list[Any]:
        raise TimeoutError("no answer within 2 s")

    monkeypatch.setattr(api, "directory_members", silence)
    answer = client.request("POST" if path.endswith("clear") else "GET", path)
    assert answer.status_code == 503
    assert "127.0.0.1:1 does not answer: no answer within 2 s" in answer.json()["detail"]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the peer at each address answers; those that are asked meet, or nobody is answered."""
    answers: dict[str, Any] = {}
    meeting: list[asyncio.Event] = []
    waiting: list[str] = []

    async def call(address: str, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert method == "clear"
        assert timeout_s > 0
        if not waiting:
            meeting.append(asyncio.Event())
        waiting.append(address)
        if len(waiting) == len(answers):
            meeting[0].set()
        await asyncio.wait_for(meeting[0].wait(), 10)
        answer = answers[address]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(api, "peer_call", call)
    return answers


def test_clearing_a_model_clears_all_its_replicas_at_once(
    client: TestClient, stock: Stock, stores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready = ["m-rep0", "m-rep1"]
    directory_of(monkeypatch, "m-rep1", "m-rep0")
    stores.update({"m-rep0:1": {"cleared": True}, "m-rep1:1": {"cleared": True}})
    answer = client.post("/v1/xavier/models/m/clear")
    assert answer.status_code == 200
    assert answer.json() == {
        "model_uid": "m",
        "complete": True,
        "replicas": [
            {"replica": "m-rep0", "address": "m-rep0:1", "cleared": True, "error": None},
            {"replica": "m-rep1", "address": "m-rep1:1", "cleared": True, "error": None},
        ],
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (TimeoutError("no answer within 10 s"), "no answer within 10 s"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        ({"cleared": False}, "its store is closed"),
        ({}, "'cleared'"),
    ],
)
def test_a_replica_that_was_not_cleared_is_named_beside_those_that_were(
    client: TestClient,
    stock: Stock,
    stores: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    said: str,
) -> None:
    stock.ready = ["m-rep0", "m-rep1"]
    directory_of(monkeypatch, "m-rep0", "m-rep1")
    stores.update({"m-rep0:1": answer, "m-rep1:1": {"cleared": True}})
    body = client.post("/v1/xavier/models/m/clear").json()
    assert body["complete"] is False
    first, second = body["replicas"]
    assert (first["replica"], first["cleared"], first["error"]) == ("m-rep0", False, said)
    assert (second["replica"], second["cleared"], second["error"]) == ("m-rep1", True, None)


def test_a_serving_replica_that_the_directory_lost_is_named(
    client: TestClient, stock: Stock, stores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready = ["m-rep0", "m-rep1"]
    stock.starting = ["m-rep2"]
    directory_of(monkeypatch, "m-rep1")
    stores.update({"m-rep1:1": {"cleared": True}})
    body = client.post("/v1/xavier/models/m/clear").json()
    assert body["complete"] is False
    assert [replica["replica"] for replica in body["replicas"]] == ["m-rep0", "m-rep1"]
    assert body["replicas"][0]["error"] == "it is not in the directory"
    assert body["replicas"][0]["address"] is None


def test_there_is_nothing_to_clear_without_members(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(monkeypatch)
    answer = client.post("/v1/xavier/models/m/clear")
    assert answer.status_code == 404
    assert "'m'" in answer.json()["detail"]


def test_clearing_is_described_for_clients(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    route = described["paths"]["/v1/xavier/models/{model_uid}/clear"]["post"]
    schema = route["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ClearedModel"}
    assert {"404", "503"} <= set(route["responses"])
    assert "Clear the GPU-first stores" in route["description"]


def test_with_authentication_every_route_asks_for_its_scope(stock: Stock) -> None:
    asked = []

    async def auth(scopes: SecurityScopes) -> str:
        asked.append(scopes.scopes)
        if scopes.scopes == ["models:read"]:
            raise HTTPException(403, "no")
        return "someone"

    client = client_of(stock, auth)
    client.post("/v1/models", json={"model_name": "m"})
    client.post("/v1/autostart/models", json={"model_name": "m"})
    assert client.get("/v1/xavier/models/m").status_code == 403
    assert asked == [["models:write"], ["models:write"], ["models:read"]]
    assert stock.stored[0][1] == "someone"
