# SPDX-License-Identifier: Apache-2.0
"""The traffic of a soak against a server that behaves as it is told to."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from xinference_xavier.bench.engines import Engine
from xinference_xavier.demo.answers import Answer, Token
from xinference_xavier.soak import client, run, watch
from xinference_xavier.soak.replicas import Incarnation, Replica
from xinference_xavier.soak.traffic import Outcomes, Traffic
from xinference_xavier.soak.workload import SAMPLE, Workload

EXPECTED = [Answer((Token("token_id:7", -0.5, (-0.5, -2.0)),), 5, 0, 0.0, 0.0)] * SAMPLE


class Server(ThreadingHTTPServer):
    """Streams one token per answer. ``mode``: good, other (token), broken (stream), refuses."""

    daemon_threads = True
    mode = "good"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are no error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        mode = self.server.mode
        if mode == "refuses":
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        token = "token_id:8" if mode == "other" else "token_id:7"
        logprobs = {
            "tokens": [token],
            "token_logprobs": [-0.5],
            "top_logprobs": [{token: -0.5, "token_id:9": -2.0}],
        }
        self.send({"choices": [{"index": 0, "text": "x", "logprobs": logprobs}]})
        if mode != "broken":
            self.send({"choices": [], "usage": {"prompt_tokens": 5}})
            self.wfile.write(b"data: [DONE]\n\n")

    def send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def incarnation(port: int) -> Incarnation:
    return Incarnation(1, Engine("replica-0", Path("model"), Path("log"), 0, port=port))


@contextmanager
def traffic(serving: Incarnation | None) -> Iterator[Outcomes]:
    replica = Replica("replica-0", lambda number: pytest.fail("nothing is started here"))
    replica.serving = serving
    outcomes = Outcomes()
    made = Traffic([replica], Workload(0, 100), EXPECTED, outcomes, seed=1, clients=3)
    try:
        yield outcomes
    finally:
        assert made.stop(30)


def test_answers_are_counted_and_compared_and_some_clients_leave(server: Server) -> None:
    with traffic(incarnation(server.server_port)) as outcomes:
        wait_until(lambda: {"answered", "left", "compared"} <= set(outcomes.counts))
    found = outcomes.to_dict()
    assert (found["failed"], found["lost"], found["different"]) == (0, 0, 0)


def test_another_answer_is_told_with_the_difference(server: Server) -> None:
    server.mode = "other"
    with traffic(incarnation(server.server_port)) as outcomes:
        wait_until(lambda: outcomes.counts["different"])
    assert "token 0 is 'token_id:8'" in outcomes.to_dict()["differences"][0]


@pytest.mark.parametrize(("mode", "said"), [("refuses", "HTTP 500"), ("broken", "ended early")])
def test_a_serving_replica_that_does_not_answer_has_failed(
    server: Server, mode: str, said: str
) -> None:
    server.mode = mode
    with traffic(incarnation(server.server_port)) as outcomes:
        wait_until(lambda: outcomes.counts["failed"] > 30)
    found = outcomes.to_dict()
    assert any(said in failure for failure in found["failures"])
    assert len(found["failures"]) < found["failed"]
    assert found["lost"] == 0


def test_what_a_killed_replica_does_not_answer_is_lost(server: Server) -> None:
    server.mode = "broken"
    killed = incarnation(server.server_port)
    killed.ending.set()
    with traffic(killed) as outcomes:
        wait_until(lambda: outcomes.counts["lost"])
    assert outcomes.to_dict()["failed"] == 0


def test_nothing_is_asked_while_nobody_serves() -> None:
    with traffic(None) as outcomes:
        pass
    assert not outcomes.counts


def test_a_seed_gives_the_same_questions_again() -> None:
    def questions(seed: int) -> list[str]:
        chance = random.Random(5)
        workload = Workload(seed, 100)
        return [json.dumps(workload.question(chance).body) for _ in range(200)]

    assert questions(1) == questions(1)
    assert questions(1) != questions(2)


def test_the_documents_take_three_times_the_stores() -> None:
    blocks = sum(len(document) // 16 for document in Workload(3, 1000).documents)
    assert 3000 <= blocks < 3000 + 48


def test_ctrl_c_ends_the_traffic_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> watch.Sample:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "take", interrupted)
    record = run.Record()
    run._soak(run.Settings(60, 2, 0), [], "127.0.0.1:1", record, lambda text: None)
    assert record.interrupted


def test_a_client_that_leaves_closes_its_connection(server: Server) -> None:
    client.leave(server.server_port, client.greedy("x", 1), after_chunks=1, wait_s=0.0)
    client.leave(server.server_port, client.greedy("x", 1), after_chunks=0, wait_s=0.0)
    assert client.answer(server.server_port, client.greedy("x", 1)).tokens == EXPECTED[0].tokens
