# SPDX-License-Identifier: Apache-2.0
"""The console's page as Gradio serves it, over an API that is a stub."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.stub_api import TOKEN, StubApi, a_model, a_replica
from tests.ui.gradio_page import SKIPPED, GradioPage
from xinference_xavier.planner import make_plan
from xinference_xavier.rest import Api
from xinference_xavier.schemas import (
    BudgetsResult,
    ClearedModel,
    ClearedReplica,
    ModelList,
    PlannedModel,
    PlanRequest,
)

pytest.importorskip("gradio")

NUMBERS = (None, 24, 2, 64, "bfloat16", 16, 2048, 2, "256MiB", "4GiB")


@pytest.fixture
def stub() -> Iterator[StubApi]:
    with StubApi().running() as stub:
        stub.has(a_model(a_replica("m-rep0")))
        yield stub


@pytest.fixture
def client(stub: StubApi) -> TestClient:
    from xinference_xavier.ui.app import make_app

    return TestClient(make_app(lambda token, request: Api(stub.url, token), server=stub.url))


@pytest.fixture
def page(client: TestClient) -> GradioPage:
    return GradioPage(client)


def test_the_first_model_is_shown_and_can_be_acted_on(page: GradioPage) -> None:
    choice, body, actions, login, known = page.call("refresh", None, None)
    assert "m-rep0" in body
    assert [uid for uid, _ in choice["choices"]] == ["m"]
    assert choice["value"] == "m"
    assert (actions["visible"], login["visible"]) == (True, False)
    # What stays as it is is left alone, so that an open list stays open.
    assert page.call("refresh", "m", known) == [SKIPPED, body, SKIPPED, SKIPPED, SKIPPED]


def test_what_changed_is_shown(page: GradioPage, stub: StubApi) -> None:
    _, body, _, _, known = page.call("refresh", None, None)
    assert '<td class="n">77</td>' not in body
    stub.has(a_model(a_replica("m-rep0", requests=77)))
    skipped, later, *_ = page.call("refresh", "m", known)
    assert skipped == SKIPPED
    assert '<td class="n">77</td>' in later


def test_a_model_that_is_gone_gives_place_to_no_other(page: GradioPage) -> None:
    choice, body, actions, _, _ = page.call("refresh", "other", None)
    assert choice["value"] == "other"
    assert "other is not running" in body
    assert actions["visible"] is False


def test_an_empty_cluster_is_told_how_to_launch(page: GradioPage, stub: StubApi) -> None:
    stub.answers["GET", "models"] = ModelList(models=[])
    choice, body, actions, _, _ = page.call("refresh", None, None)
    assert "No GPU-first model is running" in body
    assert choice["choices"] == []
    assert actions["visible"] is False


def test_a_server_that_cannot_be_asked_is_named(page: GradioPage, stub: StubApi) -> None:
    stub.answers["GET", "models"] = (503, {"detail": "the directory does not answer"})
    _, body, _, login, _ = page.call("refresh", None, None)
    assert "the directory does not answer" in body
    assert login["visible"] is False


def test_a_token_is_asked_for_and_a_wrong_one_is_shown_once(
    client: TestClient, stub: StubApi
) -> None:
    stub.token = TOKEN
    page = GradioPage(client, token="a login that has ended")
    for _ in range(5):
        _, body, actions, login, _ = page.call("refresh", None, None)
        page.call("plan", *NUMBERS)
        page.call("clear", "m")
        assert "Could not validate credentials" in body
        assert (actions["visible"], login["visible"]) == (False, True)
    assert stub.asked == [("GET", "models", None)]
    page.token = TOKEN
    _, body, _, login, _ = page.call("refresh", None, None)
    assert "m-rep0" in body
    assert login["visible"] is False


def test_what_is_cleared_is_what_was_asked_about(page: GradioPage, stub: StubApi) -> None:
    confirm, question, pending, _ = page.call("question", "m")
    assert confirm["visible"] is True
    assert "`m`" in question
    assert stub.asked == []
    done = ClearedReplica(replica="m-rep0", address="a", cleared=True, error=None)
    stub.answers["POST", "models/m/clear"] = ClearedModel(
        model_uid="m", complete=True, replicas=[done]
    )
    confirm, outcome = page.call("clear", pending)
    assert confirm["visible"] is False
    assert "m: cleared m-rep0." in outcome
    assert stub.asked == [("POST", "models/m/clear", None)]


def test_limits_are_sent_as_typed(page: GradioPage, stub: StubApi) -> None:
    stub.answers["POST", "models/m/budgets"] = BudgetsResult(
        model_uid="m", complete=True, replicas=[]
    )
    [outcome] = page.call("limit", "m", " 64MiB ", "")
    assert "no memory is returned" in outcome
    assert stub.asked == [("POST", "models/m/budgets", {"gpu": "64MiB"})]


def test_a_limit_that_says_nothing_is_refused_here(page: GradioPage, stub: StubApi) -> None:
    for nothing in ("", None):
        [outcome] = page.call("limit", "m", nothing, nothing)
        assert "give gpu, cpu or both" in outcome
    assert stub.asked == []


def test_the_planner_asks_the_server(page: GradioPage, stub: StubApi) -> None:
    request = PlanRequest(replica=2, xavier_gpu_cache_bytes="256MiB", xavier_cpu_cache_bytes=0)
    stub.answers["POST", "plan"] = make_plan(
        request, model=PlannedModel(source="numbers"), block_bytes=196608, block_tokens=16
    )
    [shown] = page.call("plan", *NUMBERS)
    assert "1,365 blocks = 21,840 tokens" in shown
    numbers = {"layers": 24, "kv_heads": 2, "head_dim": 64}
    rest = {
        "kv_cache_dtype": "bfloat16",
        "block_size": 16,
        "max_num_batched_tokens": 2048,
        "replica": 2,
        "xavier_gpu_cache_bytes": "256MiB",
        "xavier_cpu_cache_bytes": "4GiB",
    }
    assert stub.asked == [("POST", "plan", {**numbers, **rest})]
    page.call("plan", "/models/x", *NUMBERS[1:])
    assert stub.asked[1][2] == {"model_path": "/models/x", **rest}


def test_numbers_that_are_none_are_named(page: GradioPage) -> None:
    [shown] = page.call("plan", None, -3, *NUMBERS[2:])
    assert "layers: " in shown
    [shown] = page.call("plan", *([None] * len(NUMBERS)))
    assert "Nothing to show" in shown


NOT_SERVED = (
    *("gradio_api/upload", "gradio_api/proxy=http://x", "gradio_api/file=/etc/passwd", "config"),
    *("gradio_api/queue/join", "gradio_api/queue/data", "gradio_api/heartbeat/x", "monitoring"),
    *("gradio_api/component_server", "assets", "docs", "gradio_api/call/refresh", "login"),
    *("assets/../../../console.py", "static/%2e%2e/%2e%2e/%2e%2e/app.py"),
)


def test_nothing_of_gradio_is_served_but_what_the_page_needs(client: TestClient) -> None:
    for path in NOT_SERVED:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
            assert client.request(method, f"/{path}").status_code in (403, 404), path


def test_the_page_needs_no_more_than_it_is_let_through(
    client: TestClient,
) -> None:
    from xinference_xavier.ui.app import NEEDED

    text = client.get("/").text
    files = re.findall(r'(?:src|href)="\./((?:assets|static)/[^"]+)"', text)
    assert files
    for file in {*files, "theme.css", "gradio_api/app_id"}:
        assert NEEDED.fullmatch(f"/{file}"), file
    assert client.get(f"/{files[0]}").status_code == 200
    assert client.get("/theme.css").status_code == 200


def test_no_call_waits_in_a_queue_and_no_connection_stays_open(page: GradioPage) -> None:
    assert page.config["connect_heartbeat"] is False
    calls = [event for event in page.config["dependencies"] if event["backend_fn"]]
    assert len(calls) > 8
    for call in calls:
        assert call["queue"] is False
        assert "sessionStorage" in call["js"]


def test_links_follow_the_proxy_and_the_path(stub: StubApi) -> None:
    from xinference_xavier.ui.app import make_app

    app = make_app(lambda token, request: Api(stub.url, token))
    page = GradioPage(TestClient(app, root_path="/below"), "/below/")
    assert page.config["root"] == "http://testserver/below"
    proxied = {"X-Forwarded-Host": "example.com", "X-Forwarded-Proto": "https"}
    page = GradioPage(TestClient(app, headers=proxied))
    assert page.config["root"] == "https://example.com"


def test_nobody_else_is_asked_or_told(
    stub: StubApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from xinference_xavier.ui.app import make_app

    asked: list[Any] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def watched(host: Any, *more: Any, **options: Any) -> Any:
        asked.append(host)
        return look_up(host, *more, **options)

    def watched_connect(self: socket.socket, address: Any) -> None:
        asked.append(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    monkeypatch.setattr(socket.socket, "connect", watched_connect)
    page = GradioPage(TestClient(make_app(lambda token, request: Api(stub.url, token))))
    page.look()
    page.call("plan", *NUMBERS)
    assert set(asked) <= {"127.0.0.1"}
    assert asked
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_visitors_who_come_and_go_leave_little(client: TestClient, page: GradioPage) -> None:
    from xinference_xavier.ui import app

    [event] = [e for e in page.config["dependencies"] if e["api_name"] == "refresh"]
    body = {"data": ["", None, None], "fn_index": event["id"]}
    for number in range(app.SESSIONS + 5):
        call = {**body, "session_hash": f"visitor-{number}"}
        assert client.post("/gradio_api/run/predict", json=call).status_code == 200
    holder = client.app._app.routes[-1].app.state_holder  # type: ignore[attr-defined]
    assert len(holder.session_data) == app.SESSIONS
