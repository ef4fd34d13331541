# SPDX-License-Identifier: Apache-2.0
"""Our routes over stand-ins: the stock API and supervisor, the directory, and the replicas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from xinference_xavier.control.client import Member, contact_of
from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.names import FINAL_REPORTS, GROUP_SECRET, NAME
from xinference_xavier.extension.routes import access, add_routes
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.vllm.counters import Counters

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
    families: dict[str, Any] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)

    async def launch_model(self, request: Request, wait_ready: bool) -> JSONResponse:
        self.launched.append((await request.json(), wait_ready))
        return JSONResponse({"model_uid": "m"})

    async def upsert_autostart_model(self, request: Request, user: Any) -> JSONResponse:
        self.stored.append((await request.json(), user))
        return JSONResponse({})

    async def is_local_deployment(self) -> bool:
        return self.local

    async def get_instance_info(
        self, model_name: str | None, model_uid: str | None
    ) -> list[dict[str, Any]]:
        assert model_name is None
        found = [("READY", name) for name in self.ready]
        found += [("CREATING", name) for name in self.starting]
        info = {
            "model_name": "tiny",
            "model_uid": "m",
            "status": "READY",
            "replica": len(found),
            "replica_statuses": [
                {"replica_model_uid": name, "status": status} for status, name in found
            ],
        }
        return [info] if found and model_uid in (None, "m") else []

    async def get_model_registration(self, model_type: str, model_name: str) -> Any:
        assert model_type == "LLM"
        if model_name not in self.families:
            raise ValueError(f"Model {model_name} not found")
        return self.families[model_name]

    async def get_cluster_device_info(self) -> list[dict[str, Any]]:
        return [
            {"node_type": "Supervisor", "ip_address": self.address},
            *({"node_type": "Worker", "ip_address": worker} for worker in self.workers),
        ]

    async def call_extension(self, name: str, operation: str, payload: dict[str, Any]) -> Any:
        assert name == NAME
        if operation == GROUP_SECRET:
            return "the secret of m" if payload == {"model_uid": "m"} else None
        assert operation == FINAL_REPORTS
        return [report for report in self.closed if report["model_uid"] == payload["model_uid"]]


def client_of(stock: Stock, auth: Any = None) -> TestClient:
    async def supervisor() -> Stock:
        return stock

    app = FastAPI()
    app.state.api = stock
    add_routes(
        SimpleNamespace(
            app=app,
            auth_service=auth,
            auth_enabled=auth is not None,
            get_supervisor_ref=supervisor,
        )
    )
    return TestClient(app)


def directory_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the directory of the model "m" have these replicas, and no other one exist."""

    async def members(address: str, key: GroupKey) -> list[Member]:
        assert address == "127.0.0.1:1"
        return [member(name, key) for name in names] if key.namespace == "m" else []

    monkeypatch.setattr(access, "directory_members", members)


def member(name: str, key: GroupKey) -> Member:
    info = MemberInfo(name, 7, f"{name}:1", "host", 0.0)
    return Member(1, info, contact_of(info, b"f" * 32, key))


def status_of(index: SnapshotIndex, **traffic: Any) -> dict[str, Any]:
    """Return what a ready replica with this index says of itself."""
    shape = {
        "device": "cpu",
        "ranks": 1,
        "block_bytes": 1000,
        "slot_bytes": 1024,
        "block_tokens": 16,
        "device_slots": 8,
        "host_slots": 12,
        "spare_slots": 4,
        "staging_slots": 2,
    }
    return {
        "state": "ready",
        "store": {**shape, **asdict(index.counters())},
        "traffic": {**Counters().to_dict(), **traffic},
        "sources": {},
        "transport_refusals": {},
        "control": {"peers": []},
    }


def small_index() -> SnapshotIndex:
    """Return the index of :func:`status_of`: 8 blocks in the GPU tier, 12 in the CPU tier."""
    return SnapshotIndex(device_slots=8, host_slots=16, spare_slots=4)
