# SPDX-License-Identifier: Apache-2.0
"""The HTTP API's client, and the command that shows what it says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.stub_api import TOKEN, StubApi, a_link, a_model, a_replica
from xinference_xavier import cli
from xinference_xavier.rest import Api, ApiError
from xinference_xavier.schemas import (
    AuditedModel,
    AuditedReplica,
    BudgetsRequest,
    BudgetsResult,
    ClearedModel,
    ModelList,
    PlanRequest,
)


@pytest.fixture
def stub() -> Iterator[StubApi]:
    with StubApi().running() as stub:
        yield stub


# -- the client ------------------------------------------------------------------------------------


def test_answers_are_typed(stub: StubApi) -> None:
    stub.has(a_model(a_replica("m-rep0")))
    api = Api(stub.url + "/")
    assert api.models().models[0].replicas[0].replica == "m-rep0"
    assert api.model("m").replicas[0].status == {"control": {"connected": True}}
    assert api.cluster().workers[0].extension == "0.1"


def test_what_is_sent_leaves_out_what_is_not_given(stub: StubApi) -> None:
    result = BudgetsResult(model_uid="a/b", complete=True, replicas=[])
    stub.answers["POST", "models/a%2Fb/budgets"] = result
    cleared = ClearedModel(model_uid="a/b", complete=True, replicas=[])
    stub.answers["POST", "models/a%2Fb/clear"] = cleared
    audited = AuditedModel(model_uid="a/b", consistent=True, replicas=[])
    stub.answers["POST", "models/a%2Fb/audit"] = audited
    api = Api(stub.url)
    assert api.audit("a/b") == audited
    assert api.set_budgets("a/b", BudgetsRequest(gpu="64MiB")) == result
    assert api.clear("a/b") == cleared
    with pytest.raises(ApiError):
        api.plan(PlanRequest(layers=3, replica=2))
    assert [body for _, _, body in stub.asked] == [
        None,
        {"gpu": "64MiB"},
        None,
        {"layers": 3, "replica": 2},
    ]


def test_a_token_is_shown_where_one_is_asked_for(stub: StubApi) -> None:
    stub.token = TOKEN
    stub.answers["GET", "models"] = ModelList(models=[])
    with pytest.raises(ApiError, match="Could not validate credentials; give an API key") as told:
        Api(stub.url).models()
    assert told.value.status == 401
    assert Api(stub.url, TOKEN).models().models == []


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ((404, {"detail": "Not Found"}), 404, "XINFERENCE_EXTENSIONS="),
        ((404, {"detail": "no GPU-first model with uid 'm'"}), 404, "no GPU-first model"),
        ((503, {"detail": "the directory at x does not answer"}), 503, "does not answer"),
        ((422, {"detail": [{"loc": ["body", "gpu"], "msg": "wrong"}]}), 422, "gpu: wrong"),
        ((502, b"<html>bad gateway"), 502, "<html>bad gateway"),
        ((422, {"detail": ["of another form"]}), 422, "of another form"),
        ((200, b"<html>a web page"), None, "does not answer as one with this extension does"),
        ((200, {"models": 5}), None, "does not answer as one with this extension does"),
    ],
)
def test_refusals_are_told_in_words(
    stub: StubApi, answer: Any, status: int | None, said: str
) -> None:
    stub.answers["GET", "models"] = answer
    with pytest.raises(ApiError, match=said) as told:
        Api(stub.url).models()
    assert told.value.status == status


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ApiError, match=r"http://127.0.0.1:1 cannot be asked: .*refused") as told:
        Api("http://127.0.0.1:1").models()
    assert told.value.status is None


@pytest.mark.parametrize(
    "answer", [b"\0\1 no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
def test_what_speaks_no_http_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ApiError, match=r"cannot be asked: no answer in HTTP"):
            Api(f"http://127.0.0.1:{server.getsockname()[1]}").models()
        thread.join()


def test_a_token_goes_to_no_other_server() -> None:
    with StubApi().running() as other, StubApi().running() as stub:
        other.token = stub.token = TOKEN
        stub.redirect = f"{other.url}/v1/xavier/models"
        with pytest.raises(ApiError, match="Could not validate credentials"):
            Api(stub.url, TOKEN).models()
        assert [path for _, path, _ in other.asked] == ["models"]


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:9997", "ftp://x", "http://", "", "http://x:port", "http://[::1", "http://x:99999"],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ApiError, match="is no URL"):
        Api(endpoint)


# -- the command -----------------------------------------------------------------------------------


def status(stub: StubApi, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["status", "--endpoint", stub.url, *args])


def test_models_are_shown_with_their_tiers_and_hits(
    stub: StubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stub.has(a_model(a_replica("m-rep0"), a_replica("m-rep1")))
    result = status(stub)
    assert result.exit_code == 0
    assert "m (tiny): READY, 2 replicas" in result.output
    for shown in (
        "m-rep1",
        "50 MiB of 100 MiB",
        "of 150 MiB",
        "(limited)",
        "10 % local",
        "40 % peers",
    ):
        assert shown in result.output


def test_one_model_is_shown_with_what_its_replicas_read(stub: StubApi) -> None:
    away = a_link("m-rep1", usable=False, reason="load failed", transport=None, bytes_per_s=None)
    stub.has(a_model(a_replica("m-rep0", away), a_replica("m-rep1", a_link("m-rep0"))))
    result = status(stub, "m")
    assert result.exit_code == 0
    for shown in ("nothing read yet", "load failed", "shm", "3,000 MB/s", "30 MiB"):
        assert shown in result.output


def test_one_replica_is_counted_as_one(stub: StubApi) -> None:
    stub.has(a_model(a_replica("m-rep0")))
    assert status(stub).output.splitlines()[0].rstrip() == "m (tiny): READY, 1 replica"


def test_json_is_what_the_server_says(stub: StubApi, tmp_path: Any) -> None:
    model = a_model(a_replica("m-rep0"))
    stub.has(model)
    assert json.loads(status(stub, "m", "--json").output) == model.model_dump()
    file = tmp_path / "status.json"
    assert "m-rep0" in status(stub, "--json", str(file)).output
    assert json.loads(file.read_text())["models"][0]["model_uid"] == "m"


def test_a_server_without_models_says_how_to_launch_one(stub: StubApi) -> None:
    stub.answers["GET", "models"] = ModelList(models=[])
    result = status(stub)
    assert result.exit_code == 0
    assert "Launch one with enable_xavier=true and xavier_gpu_first=true" in result.output


def test_replicas_that_are_not_ready_give_an_exit_code(
    stub: StubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    silent = {"state": "unreachable", "error": "no answer within 3 s", "gpu": None, "tokens": None}
    stub.has(a_model(a_replica("m-rep0"), a_replica("m-rep1", **silent)))
    result = status(stub)
    assert result.exit_code == 1
    assert "no answer within 3 s" in result.output
    assert "not ready: m-rep1" in result.output


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["gone"], 1, "XINFERENCE_EXTENSIONS="),
        (["--wrong"], 2, "No such option"),
        (["--audit"], 2, "--audit needs a MODEL_UID"),
    ],
)
def test_what_cannot_be_shown_gives_an_exit_code(
    stub: StubApi, args: list[str], code: int, said: str
) -> None:
    result = status(stub, *args)
    assert result.exit_code == code
    assert said in result.output


def test_an_audit_shows_what_is_in_use_and_names_what_is_wrong(
    stub: StubApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    busy = AuditedReplica(
        replica="m-rep0", address="h:1", contradiction=None, in_use={"leases": 2}, error=None
    )
    lost = AuditedReplica(
        replica="m-rep1", address="h:2", contradiction="slot 3 is lost", in_use={}, error=None
    )
    good = AuditedModel(model_uid="m", consistent=True, replicas=[busy])
    stub.answers["POST", "models/m/audit"] = good
    result = status(stub, "m", "--audit")
    assert result.exit_code == 0
    assert "2 leases" in result.output
    bad = AuditedModel(model_uid="m", consistent=False, replicas=[busy, lost])
    stub.answers["POST", "models/m/audit"] = bad
    result = status(stub, "m", "--audit")
    assert result.exit_code == 1
    assert "slot 3 is lost" in result.output
    assert "not consistent, or not checked: m-rep1" in result.output
    assert json.loads(status(stub, "m", "--audit", "--json").stdout.split("\nError")[0]) == (
        bad.model_dump()
    )
