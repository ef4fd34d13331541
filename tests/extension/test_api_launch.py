# SPDX-License-Identifier: Apache-2.0
"""Our routes before the stock ones: what those get, and what never reaches them."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from tests.extension.stock_api import GPU_FIRST, Stock, client_of
from xinference_xavier.extension.launch import CARRIER, read_carrier
from xinference_xavier.extension.routes import launch
from xinference_xavier.extension.vllm import gpu


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_build_installed", lambda: True)


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
    monkeypatch.setattr(launch, "cpu_build_installed", lambda: False)
    monkeypatch.setattr(gpu, "device_memories", lambda devices: [])
    assert client.post("/v1/models", json=GPU_FIRST).status_code == 200
    assert "enable_virtual_env" not in stock.launched[0][0]


@pytest.mark.parametrize("nested", [True, False])
def test_a_stored_launch_is_translated_too(client: TestClient, stock: Stock, nested: bool) -> None:
    entry = {"launch": GPU_FIRST, "priority": 5} if nested else {**GPU_FIRST, "priority": 5}
    assert client.post("/v1/autostart/models", json=entry).status_code == 200
    [(stored, user)] = stock.stored
    assert stored["priority"] == 5
    entry = stored["launch"] if nested else stored
    assert CARRIER in entry
    assert "enable_xavier" not in entry
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
