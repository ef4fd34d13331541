# SPDX-License-Identifier: Apache-2.0
"""Routes about models: what their replicas say, clearing them, and limiting them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.extension.stock_api import Stock, client_of, directory_of, small_index, status_of
from xinference_xavier.control.client import Contact
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.routes import access, models
from xinference_xavier.schemas import NO_MEMORY_RETURNED
from xinference_xavier.store.index import SnapshotIndex

KEYS = [bytes([number]) * 32 for number in range(20)]


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.fixture
def client(stock: Stock) -> TestClient:
    return client_of(stock)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the peer at each address answers to ``describe``: a status or an exception."""
    answers: dict[str, Any] = {}

    async def call(contact: Contact, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert method == "describe"
        answer = answers[contact.address]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(models, "peer_call", call)
    return answers


def filled(blocks: int) -> SnapshotIndex:
    index = small_index()
    job = index.admit([(key, number) for number, key in enumerate(KEYS[:blocks])])
    index.commit(job.job_id)
    index.check_invariants()
    return index


# -- what is there ---------------------------------------------------------------------------------


def test_a_ready_replica_is_told_in_blocks_bytes_and_tokens(
    client: TestClient, stock: Stock, peers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready = ["m-rep0"]
    directory_of(monkeypatch, "m-rep0")
    index = filled(11)
    index.acquire(KEYS[:1], reader="b", request="r", now=0.0, duration=9.0)
    index.set_limits(host_slots=2)
    index.set_limits(host_slots=6)
    peers["m-rep0:1"] = status = {
        **status_of(
            index,
            requests=3,
            prompt_tokens=100,
            hit_tokens={"local": 16, "peer_host": 32},
            bypassed={"images": 1},
            saved_blocks=10,
            saves_skipped={"pins": 2},
            loads_failed={"timeout": 1},
        ),
        "sources": {
            "own": {"transport": "local", "blocks": 5},
            "m-rep1": {
                "transport": "shm",
                "loads": 2,
                "blocks": 2,
                "nbytes": 2048,
                "seconds": 0.5,
                "failures": 1,
            },
            "m-rep8": {"transport": "none", "loads": 1},
        },
        "control": {
            "peers": [
                {"name": "m-rep1", "met": True, "breaker": "closed", "reason": None},
                {"name": "m-rep2", "met": True, "breaker": "open", "reason": "load failed"},
            ]
        },
    }
    [model] = client.get("/v1/xavier/models").json()["models"]
    assert (model["model_uid"], model["model_name"], model["status"]) == ("m", "tiny", "READY")
    assert model["replica"] == 1
    [replica] = model["replicas"]
    assert "status" not in replica
    assert replica["state"] == "ready"
    assert (replica["block_tokens"], replica["block_bytes"], replica["device"]) == (16, 1024, "cpu")
    assert replica["gpu"] == {
        "capacity_blocks": 8,
        "limit_blocks": 8,
        "used_blocks": 8,
        "leased_blocks": 1,
        "capacity_bytes": 8192,
        "limit_bytes": 8192,
        "used_bytes": 8192,
        "leased_bytes": 1024,
    }
    assert (replica["cpu"]["capacity_blocks"], replica["cpu"]["limit_blocks"]) == (12, 6)
    assert replica["cpu"]["used_blocks"] == 2
    assert replica["tokens"] == {
        "prompt": 100,
        "local": 16,
        "own_device": 0,
        "own_host": 0,
        "peer_device": 0,
        "peer_host": 32,
    }
    assert (replica["requests"], replica["saved_blocks"]) == (3, 10)
    assert (replica["skips"], replica["load_failures"]) == ({"pins": 2}, {"timeout": 1})
    assert replica["evictions"] == 1
    read, unused, left = replica["links"]
    assert (read["replica"], read["transport"], read["usable"]) == ("m-rep1", "shm", True)
    assert (read["bytes_per_s"], read["failures"]) == (4096.0, 1)
    assert (unused["transport"], unused["usable"], unused["reason"]) == (None, False, "load failed")
    assert (left["transport"], left["reason"]) == (None, "it left the group")
    full = client.get("/v1/xavier/models/m").json()["replicas"]
    assert full[0]["status"]["store"]["totals"] == status["store"]["totals"]


def test_replicas_that_say_nothing_are_told_with_the_reason(
    client: TestClient, stock: Stock, peers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready, stock.starting = ["m-rep0", "m-rep1", "m-rep2", "m-rep4"], ["m-rep3"]
    directory_of(monkeypatch, "m-rep2", "m-rep1", "m-rep0")
    peers["m-rep0:1"] = TimeoutError("no answer within 3 s")
    peers["m-rep1:1"] = {"state": "starting"}
    peers["m-rep2:1"] = {**status_of(small_index()), "state": "closed"}
    replicas = client.get("/v1/xavier/models/m").json()["replicas"]
    assert [(r["replica"], r["state"], r["error"]) for r in replicas] == [
        ("m-rep0", "unreachable", "no answer within 3 s"),
        ("m-rep1", "starting", None),
        ("m-rep2", "closed", None),
        ("m-rep4", "missing", "it is not in the directory"),
    ]
    assert all(replica["gpu"] is None for replica in replicas)


def test_stopped_replicas_are_told_by_what_they_left(
    client: TestClient, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"model_uid": "m", "replica": "m-rep9", "counters": {"drained": True}}
    stock.closed = [left, {"model_uid": "other", "replica": "other-rep0", "counters": {}}]
    directory_of(monkeypatch)
    assert client.get("/v1/xavier/models/m").json() == {
        "model_uid": "m",
        "model_name": None,
        "status": None,
        "replica": 0,
        "replicas": [],
        "closed": [left],
    }


def test_models_without_gpu_first_replicas_are_not_listed(
    client: TestClient, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready = ["m-rep0"]
    directory_of(monkeypatch)
    assert client.get("/v1/xavier/models").json() == {"models": []}


def test_a_model_that_is_not_gpu_first_is_not_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(monkeypatch)
    answer = client.get("/v1/xavier/models/plain")
    assert answer.status_code == 404
    assert "'plain'" in answer.json()["detail"]


ROUTES = [
    ("GET", "/v1/xavier/models"),
    ("GET", "/v1/xavier/models/m"),
    ("POST", "/v1/xavier/models/m/clear"),
    ("POST", "/v1/xavier/models/m/audit"),
    ("POST", "/v1/xavier/models/m/budgets"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_directory_that_does_not_answer_is_named(
    client: TestClient, stock: Stock, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    async def silence(address: str, key: GroupKey) -> list[Any]:
        raise TimeoutError("no answer within 2 s")

    stock.ready = ["m-rep0"]
    monkeypatch.setattr(access, "directory_members", silence)
    answer = client.request(method, path, json={"gpu": 0})
    assert answer.status_code == 503
    assert "127.0.0.1:1 does not answer: no answer within 2 s" in answer.json()["detail"]


# -- clearing --------------------------------------------------------------------------------------


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the peer at each address answers; those that are asked meet, or nobody is answered."""
    answers: dict[str, Any] = {}
    meeting: list[asyncio.Event] = []
    waiting: list[str] = []

    async def call(contact: Contact, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert method in ("clear", "audit")
        assert timeout_s > 0
        if not waiting:
            meeting.append(asyncio.Event())
        waiting.append(contact.address)
        if len(waiting) == len(answers):
            meeting[0].set()
        await asyncio.wait_for(meeting[0].wait(), 10)
        answer = answers[contact.address]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(models, "peer_call", call)
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


IDLE = {"contradiction": None, "in_use": {"leases": 0, "requests": 0}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (IDLE, {"contradiction": None, "in_use": {}, "error": None}),
        (
            {"contradiction": None, "in_use": {"leases": 2, "requests": 0}},
            {"contradiction": None, "in_use": {"leases": 2}, "error": None},
        ),
        (
            {"contradiction": "slot 3 is lost", "in_use": {}},
            {"contradiction": "slot 3 is lost", "in_use": {}, "error": None},
        ),
        (
            TimeoutError("no answer within 10 s"),
            {"contradiction": None, "in_use": {}, "error": "no answer within 10 s"},
        ),
    ],
)
def test_an_audit_says_what_is_wrong_and_what_is_in_use(
    client: TestClient,
    stock: Stock,
    stores: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    said: dict[str, Any],
) -> None:
    stock.ready = ["m-rep0", "m-rep1"]
    directory_of(monkeypatch, "m-rep0", "m-rep1")
    stores.update({"m-rep0:1": answer, "m-rep1:1": IDLE})
    body = client.post("/v1/xavier/models/m/audit").json()
    assert body["consistent"] is (said["contradiction"] is None and said["error"] is None)
    first, second = body["replicas"]
    assert first == {"replica": "m-rep0", "address": "m-rep0:1"} | said
    assert (second["replica"], second["in_use"], second["error"]) == ("m-rep1", {}, None)


def test_a_serving_replica_that_could_not_be_audited_is_named(
    client: TestClient, stock: Stock, stores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.ready = ["m-rep0", "m-rep1"]
    directory_of(monkeypatch, "m-rep1")
    stores.update({"m-rep1:1": IDLE})
    body = client.post("/v1/xavier/models/m/audit").json()
    assert body["consistent"] is False
    assert body["replicas"][0]["error"] == "it is not in the directory"


def test_there_is_nothing_to_clear_without_members(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(monkeypatch)
    answer = client.post("/v1/xavier/models/m/clear")
    assert answer.status_code == 404
    assert "'m'" in answer.json()["detail"]


# -- limits ----------------------------------------------------------------------------------------


class Limits:
    """Replicas with indexes of their own, by address."""

    def __init__(self, *names: str) -> None:
        self.indexes = {f"{name}:1": filled(10) for name in names}
        self.broken: dict[str, Exception] = {}
        self.closed: set[str] = set()
        self.asked: list[tuple[str, Any, Any]] = []

    async def call(
        self, contact: Contact, method: str, *args: Any, timeout_s: float
    ) -> dict[str, Any]:
        address = contact.address
        index = self.indexes[address]
        if method == "describe":
            return status_of(index)
        assert method == "set_limits"
        self.asked.append((address, *args))
        if address in self.broken:
            raise self.broken[address]
        if address in self.closed:
            return {"limited": False}
        device, host = args
        removed = index.set_limits(device_slots=device, host_slots=host).removed
        index.check_invariants()
        return {"limited": True, "evicted_blocks": len(removed), **status_of(index)}


@pytest.fixture
def limits(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Limits:
    stock.ready = ["m-rep0", "m-rep1"]
    directory_of(monkeypatch, "m-rep1", "m-rep0")
    made = Limits("m-rep0", "m-rep1")
    monkeypatch.setattr(models, "peer_call", made.call)
    return made


def test_limits_reach_every_replica_and_no_memory_is_returned(
    client: TestClient, limits: Limits
) -> None:
    answer = client.post("/v1/xavier/models/m/budgets", json={"gpu": "50%", "cpu": 1024})
    assert answer.status_code == 200
    result = answer.json()
    assert (result["complete"], result["memory_returned"]) == (True, False)
    assert result["note"] == NO_MEMORY_RETURNED
    assert [replica["replica"] for replica in result["replicas"]] == ["m-rep0", "m-rep1"]
    for replica in result["replicas"]:
        assert (replica["applied"], replica["error"]) == (True, None)
        # Of 8 blocks in the GPU tier and 2 in the CPU tier.
        assert replica["evicted_blocks"] == 4 + 1
        assert (replica["gpu"]["limit_bytes"], replica["gpu"]["used_blocks"]) == (4096, 4)
        assert (replica["cpu"]["limit_blocks"], replica["cpu"]["capacity_blocks"]) == (1, 12)


@pytest.mark.parametrize(
    ("body", "slots"),
    [
        ({"gpu": "0"}, (0, None)),
        ({"cpu": "2047"}, (None, 1)),
        ({"gpu": "100%", "cpu": "100%"}, (8, 12)),
        # What the launch's budgets may have been: slots that hold no blocks are part of them.
        ({"gpu": 8 * 1024 + 1023, "cpu": 18 * 1024 + 1023}, (8, 12)),
    ],
)
def test_a_limit_is_rounded_down_to_whole_blocks(
    client: TestClient, limits: Limits, body: dict[str, Any], slots: tuple[int | None, int | None]
) -> None:
    assert client.post("/v1/xavier/models/m/budgets", json=body).json()["complete"]
    assert sorted(limits.asked) == [("m-rep0:1", *slots), ("m-rep1:1", *slots)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"gpu": 9 * 1024}, "relaunch the model with a larger xavier_gpu_cache_bytes"),
        ({"cpu": 19 * 1024}, "relaunch the model with a larger xavier_cpu_cache_bytes"),
        ({"gpu": 0, "cpu": "1 TiB"}, "12 KiB (12 blocks)"),
        ({"gpu": -1}, "gpu=-1 is negative"),
        ({"cpu": "8 QB"}, "unknown unit"),
        ({"cpu": "101%"}, "outside 0% to 100%"),
    ],
)
def test_a_bad_limit_is_refused_before_any_replica_is_changed(
    client: TestClient, limits: Limits, body: dict[str, Any], said: str
) -> None:
    answer = client.post("/v1/xavier/models/m/budgets", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert limits.asked == []


@pytest.mark.parametrize(
    "body", [{}, {"gpu": None}, {"gpus": 5}, {"gpu": [1]}, {"gpu": False}, {"cpu": True}]
)
def test_a_request_without_a_limit_is_refused(
    client: TestClient, limits: Limits, body: dict[str, Any]
) -> None:
    assert client.post("/v1/xavier/models/m/budgets", json=body).status_code == 422
    assert limits.asked == []


def test_replicas_that_were_not_limited_are_named_beside_those_that_were(
    client: TestClient, stock: Stock, limits: Limits
) -> None:
    stock.ready.append("m-rep2")
    limits.broken["m-rep0:1"] = TimeoutError("no answer within 10 s")
    result = client.post("/v1/xavier/models/m/budgets", json={"gpu": 0}).json()
    assert result["complete"] is False
    assert [(r["applied"], r["error"]) for r in result["replicas"]] == [
        (False, "no answer within 10 s"),
        (True, None),
        (False, "it is not in the directory"),
    ]
    limits.closed.add("m-rep1:1")
    result = client.post("/v1/xavier/models/m/budgets", json={"gpu": 0}).json()
    assert result["replicas"][1]["error"] == "its store is closed"


def test_there_is_nothing_to_limit_without_members(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(monkeypatch)
    assert client.post("/v1/xavier/models/m/budgets", json={"gpu": 0}).status_code == 404
