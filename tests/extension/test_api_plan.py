# SPDX-License-Identifier: Apache-2.0
"""The planner's route: what a launch dialog is told while somebody types."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.extension.stock_api import (
    GPU_FIRST,
    Stock,
    client_of,
    directory_of,
    small_index,
    status_of,
)
from xinference_xavier.control.client import Contact
from xinference_xavier.extension import model_files
from xinference_xavier.extension.routes import plan
from xinference_xavier.extension.vllm import gpu
from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.preflight import DeviceMemory

QWEN = {"num_hidden_layers": 24, "num_key_value_heads": 2, "num_attention_heads": 14} | {
    "hidden_size": 896,
    "torch_dtype": "bfloat16",
}
NUMBERS = {"layers": 24, "kv_heads": 2, "head_dim": 64, "replica": 2}
HOST = HostMemory(Bound(64 << 30, "test"), Bound(32 << 30, "test"))


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.fixture
def client(stock: Stock) -> TestClient:
    return client_of(stock)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU-only host of 64 GiB, half of them free."""
    monkeypatch.setattr(plan, "cpu_build_installed", lambda: True)
    monkeypatch.setattr(plan, "host_memory", lambda: HOST)


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/xavier/plan", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    assert result["valid"] is not bool(result["errors"])
    return result


def codes(notes: list[dict[str, Any]]) -> list[tuple[str | None, str]]:
    return [(note["field"], note["code"]) for note in notes]


def test_numbers_of_a_model_are_planned_per_replica_and_in_all(client: TestClient) -> None:
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="256MiB", xavier_cpu_cache_bytes="4GiB")
    assert (found["block_bytes"], found["block_tokens"]) == (196608, 16)
    assert (found["gpu_blocks"], found["gpu_tokens"]) == (1365, 21840)
    assert found["total"]["gpu"]["tokens"] == 2 * 21840
    assert found["per_replica"]["cpu"]["reserved_blocks"] == 384
    assert found["model"] == {
        "name": None,
        "source": "numbers",
        "layers": 24,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "reason": None,
    }
    assert found["valid"]
    assert codes(found["warnings"]) == [("xavier_gpu_cache_bytes", "host_memory")]


def test_a_percentage_is_a_share_of_this_hosts_memory(client: TestClient) -> None:
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="1%")
    assert found["per_replica"]["gpu"]["budget_bytes"] == (64 << 30) // 100
    # The default of the other tier.
    assert found["per_replica"]["cpu"]["budget_bytes"] == (64 << 30) // 10


def test_the_largest_budgets_are_told_beside_the_other_one(client: TestClient) -> None:
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="2GiB")
    assert found["limits"] == {"gpu_bytes": 14 << 30, "cpu_bytes": 15 << 30}
    assert found["device"] == "cpu"


def test_every_bad_budget_is_an_error_of_its_own_field(client: TestClient) -> None:
    found = ask(
        client,
        **NUMBERS,
        xavier_gpu_cache_bytes="12 QB",
        xavier_cpu_cache_bytes="-1",
        xavier_transport="pigeon",
    )
    assert codes(found["errors"]) == [
        ("xavier_gpu_cache_bytes", "invalid"),
        ("xavier_cpu_cache_bytes", "invalid"),
        ("xavier_transport", "invalid"),
    ]
    assert "12 QB" in found["errors"][0]["message"]
    assert found["per_replica"]["gpu"]["blocks"] is None


@pytest.mark.parametrize(
    ("gpu", "cpu", "errors"),
    [
        (1000, "4GiB", [("xavier_gpu_cache_bytes", "below_block")]),
        ("1MiB", 200_000, [("xavier_cpu_cache_bytes", "below_block")]),
        (0, 0, [("xavier_gpu_cache_bytes", "no_tier")]),
        ("1MiB", "99GiB", [("xavier_gpu_cache_bytes", "does_not_fit")]),
    ],
)
def test_budgets_that_a_launch_would_refuse_are_errors(
    client: TestClient, gpu: Any, cpu: Any, errors: list[tuple[str, str]]
) -> None:
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes=gpu, xavier_cpu_cache_bytes=cpu)
    assert codes(found["errors"]) == errors


def test_the_body_of_a_launch_is_a_request_and_what_it_may_not_have_is_named(
    client: TestClient,
) -> None:
    found = ask(client, **GPU_FIRST, n_worker=2, tensor_parallel_size=4, max_model_len=1024)
    assert [(field, code) for field, code in codes(found["errors"])] == [
        ("tensor_parallel_size", "unsupported"),
        ("n_worker", "unsupported"),
    ]


def test_one_replica_has_nobody_to_share_with(client: TestClient) -> None:
    found = ask(client, **{**NUMBERS, "replica": 1}, xavier_cpu_cache_bytes="1GiB")
    assert found["valid"]
    assert ("replica", "offload_only") in codes(found["warnings"])


def test_a_request_of_the_wrong_types_is_refused_field_by_field(client: TestClient) -> None:
    answer = client.post("/v1/xavier/plan", json={"layers": 0, "replica": "many"})
    assert answer.status_code == 422
    assert [item["loc"][1] for item in answer.json()["detail"]] == ["layers", "replica"]


# -- models that Xinference knows ------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models are downloaded to: a directory per name and quantization."""

    def places(name: str, spec: Any) -> list[Path]:
        if spec.model_uri:
            return [Path(spec.model_uri)]
        return [tmp_path / f"{name}-{spec.quantization}"]

    monkeypatch.setattr(model_files, "_places", places)
    return tmp_path


def family(name: str, *quantizations: str, uri: str | None = None) -> Any:
    specs = [
        SimpleNamespace(
            model_format="pytorch",
            model_size_in_billions="0_5",
            quantization=quantization,
            model_uri=uri,
        )
        for quantization in quantizations
    ]
    return SimpleNamespace(model_name=name, model_specs=specs)


def write_config(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**QWEN, **config}))
    return path


@pytest.mark.parametrize("size", ["0_5", "0.5", 0.5])
def test_a_downloaded_model_is_planned_by_its_configuration(
    client: TestClient, stock: Stock, cache: Path, size: Any
) -> None:
    stock.families["qwen"] = family("qwen", "Int4", "none")
    write_config(cache / "qwen-none")
    found = ask(client, model_name="qwen", model_size_in_billions=size, quantization="none")
    assert (found["model"]["source"], found["block_bytes"]) == ("config", 196608)
    # Any of them will do where the launch does not say which.
    assert ask(client, model_name="qwen")["block_bytes"] == 196608


def test_a_registered_model_is_planned_from_where_it_lies(
    client: TestClient, stock: Stock, cache: Path
) -> None:
    path = write_config(cache / "mine", num_hidden_layers=12)
    stock.families["mine"] = family("mine", "none", uri=str(path))
    found = ask(client, model_name="mine", kv_cache_dtype="fp8", block_size=32)
    assert (found["block_bytes"], found["block_tokens"]) == (196608 // 2, 32)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "layers, kv_heads and head_dim are needed"),
        ({"model_name": "who"}, "Xinference has no model 'who'"),
        ({"model_name": "qwen"}, "not downloaded yet"),
        ({"model_name": "qwen", "model_format": "gptq"}, "no such format"),
        ({"layers": 3}, "layers, kv_heads and head_dim are needed"),
    ],
)
def test_a_model_that_is_not_known_is_planned_in_bytes(
    client: TestClient, stock: Stock, cache: Path, body: dict[str, Any], reason: str
) -> None:
    stock.families["qwen"] = family("qwen", "none")
    found = ask(client, **body, replica=3, xavier_gpu_cache_bytes="1GiB")
    assert found["model"]["source"] == "unknown"
    assert reason in found["model"]["reason"]
    assert (found["valid"], found["block_bytes"], found["gpu_blocks"]) == (True, None, None)
    assert found["total"]["gpu"]["budget_bytes"] == 3 << 30
    assert (None, "unknown_block") in codes(found["warnings"])


def test_a_model_that_gpu_first_refuses_is_an_error(
    client: TestClient, stock: Stock, cache: Path
) -> None:
    path = write_config(cache / "latent", kv_lora_rank=512)
    stock.families["latent"] = family("latent", "none", uri=str(path))
    found = ask(client, model_name="latent")
    assert codes(found["errors"]) == [("model_name", "unsupported")]
    assert "latent attention (MLA)" in found["errors"][0]["message"]


def test_a_path_of_the_server_is_planned_too(client: TestClient, tmp_path: Path) -> None:
    path = write_config(tmp_path / "there")
    assert ask(client, model_path=str(path))["block_bytes"] == 196608
    assert ask(client, model_path=str(tmp_path))["block_bytes"] is None


def test_a_running_model_is_planned_by_the_blocks_that_it_has(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["ready", "starting"])

    async def call(contact: Contact, method: str, *, timeout_s: float) -> dict[str, Any]:
        assert (contact.address, method) == ("m-rep0:1", "describe")
        return {**status_of(small_index()), "state": next(states)}

    directory_of(monkeypatch, "m-rep0")
    monkeypatch.setattr(plan, "peer_call", call)
    found = ask(client, model_uid="m", xavier_gpu_cache_bytes=10_240)
    assert (found["model"]["source"], found["gpu_blocks"]) == ("replica", 10)
    assert (found["block_bytes"], found["slot_bytes"]) == (1000, 1024)
    assert ask(client, model_uid="m")["model"]["reason"] == "m-rep0 is starting"
    assert client.post("/v1/xavier/plan", json={"model_uid": "other"}).status_code == 404


# -- where it runs ---------------------------------------------------------------------------------


def test_a_gpu_host_is_planned_by_its_device(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "cpu_build_installed", lambda: False)
    device = DeviceMemory("GPU 0", 80 << 30, 80 << 30)
    monkeypatch.setattr(gpu, "device_memories", lambda devices: [device])
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="1%", xavier_cpu_cache_bytes="1GiB")
    assert (found["device"], found["warnings"]) == ("cuda", [])
    assert found["per_replica"]["gpu"]["budget_bytes"] == (80 << 30) // 100
    # The second replica would need another GPU.
    assert (found["limits"]["gpu_bytes"], found["valid"]) == (0, False)
    budgets = {"xavier_cpu_cache_bytes": "1GiB", **NUMBERS, "replica": 1}
    most = ask(client, **budgets)["limits"]["gpu_bytes"]
    assert 40 << 30 < most < 72 << 30
    assert ask(client, **budgets, xavier_gpu_cache_bytes=most)["valid"]
    more = ask(client, **budgets, xavier_gpu_cache_bytes=most + 1)
    assert codes(more["errors"]) == [("xavier_gpu_cache_bytes", "does_not_fit")]


def test_a_host_without_a_known_gpu_is_planned_in_bytes(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "cpu_build_installed", lambda: False)
    monkeypatch.setattr(gpu, "device_memories", lambda devices: [])
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="10%")
    assert (found["device"], found["limits"]["gpu_bytes"]) == (None, None)
    assert found["per_replica"]["gpu"]["budget_bytes"] is None


def test_workers_elsewhere_have_memory_of_their_own(client: TestClient, stock: Stock) -> None:
    stock.local = False
    found = ask(client, **NUMBERS, xavier_gpu_cache_bytes="99TiB", xavier_cpu_cache_bytes="1%")
    assert (found["valid"], found["device"]) == (True, None)
    assert found["limits"] == {"gpu_bytes": None, "cpu_bytes": None}
    assert found["per_replica"]["cpu"]["budget_bytes"] is None
    assert (None, "other_hosts") in codes(found["warnings"])
