# SPDX-License-Identifier: Apache-2.0
"""A real Xinference server with our extension, real vLLM replicas of a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.extension.server import MODEL_NAME, XinferenceServer
from tests.models import make_tiny_llama
from xinference_xavier.demo.judge import DRAINED, EMPTY
from xinference_xavier.metrics.table import SOURCES
from xinference_xavier.rest import Api, ApiError
from xinference_xavier.schemas import BudgetsRequest, PlanRequest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

GPU_FIRST: dict[str, Any] = {
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "4MiB",
    "xavier_cpu_cache_bytes": "16MiB",
}
BLOCK_TOKENS = 16
XAVIER = [sys.executable, "-m", "xinference_xavier.cli"]
LAUNCH_TIMEOUT_S = 600
STREAM_TOKENS = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[XinferenceServer]:
    root = tmp_path_factory.mktemp("xinference")
    model = make_tiny_llama(root / "model")
    server = XinferenceServer(root / "home")
    try:
        server.register(model)
        yield server
    finally:
        left = server.stop()
        print(server.tail())
    assert left == []


def eventually(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Poll until ``found()`` returns something true; for what other processes do by themselves."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {found}")
        time.sleep(0.5)
    return result


def engines(server: XinferenceServer) -> list[psutil.Process]:
    """Return the server's processes that belong to replicas."""
    found = []
    for process in server.processes():
        try:
            # A replica's own process and its engine's write their titles over their environment.
            titled = title(process).startswith(("Model: ", "VLLM::"))
            if titled or "XINFERENCE_MODEL_UID" in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def assert_nothing_left(server: XinferenceServer) -> None:
    assert requests.get(f"{server.url}/v1/models", timeout=30).json()["data"] == []
    eventually(lambda: not engines(server))


def status(server: XinferenceServer, uid: str) -> dict[str, Any]:
    answer = requests.get(f"{server.url}/v1/xavier/models/{uid}", timeout=30)
    if answer.status_code == 404:
        return {"replicas": [], "closed": []}
    assert answer.ok, answer.text
    result: dict[str, Any] = answer.json()
    return result


def ready(server: XinferenceServer, uid: str) -> set[str]:
    """Return the replicas that Xinference sends requests to; the command line does not wait."""
    replicas = requests.get(f"{server.url}/v1/models/{uid}/replicas", timeout=30).json()
    assert not [replica for replica in replicas if replica["status"] == "ERROR"]
    return {item["replica_model_uid"] for item in replicas if item["status"] == "READY"}


def members(server: XinferenceServer, uid: str) -> dict[str, Any]:
    """Return what each replica in the directory that answers says of itself."""
    replicas = status(server, uid)["replicas"]
    return {replica["replica"]: replica["status"] for replica in replicas if replica["status"]}


def complete(server: XinferenceServer, uid: str, prompt: str) -> tuple[list[Any], dict[str, Any]]:
    """Return log probabilities of a greedy answer, and what is said of its prompt tokens."""
    body = {
        "model": uid,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
    }
    answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.ok, answer.text
    result = answer.json()
    details = result["usage"].get("prompt_tokens_details") or {"cached_tokens": 0}
    return result["choices"][0]["logprobs"]["token_logprobs"], details


def streamed_chat(server: XinferenceServer, uid: str, prompt: str) -> dict[str, Any]:
    """Return what is said of a streamed chat's prompt tokens."""
    body = {
        "model": uid,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, stream=True)
    assert answer.ok, answer.text
    lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    events = [json.loads(line) for line in lines if line.startswith(b"{")]
    [*_, usage] = [event["usage"] for event in events if event.get("usage")]
    details: dict[str, Any] = usage["prompt_tokens_details"]
    return details


def metric(server: XinferenceServer, name: str, **labels: str) -> dict[str, float]:
    """Return a metric of the worker's endpoint by replica."""
    text = requests.get(server.metrics_url, timeout=30).text
    return {
        sample.labels["replica_index"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"xinference:{name}" and labels.items() <= sample.labels.items()
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({**GPU_FIRST, "xavier_gpu_cache_bytes": True}, "xavier_gpu_cache_bytes=True"),
        ({**GPU_FIRST, "xavier_gpu_cache_bytes": "1 parsec"}, "unknown unit"),
        ({**GPU_FIRST, "xavier_gpu_cache": 1}, "did you mean xavier_gpu_cache_bytes?"),
        ({**GPU_FIRST, "enable_xavier": "false"}, "needs enable_xavier=true"),
        ({**GPU_FIRST, "model_engine": "transformers"}, "use vLLM"),
        ({**GPU_FIRST, "n_worker": 2}, "n_worker=2"),
        ({**GPU_FIRST, "xavier_cpu_cache_bytes": "9TiB"}, "on this host"),
    ],
)
def test_a_bad_launch_is_refused_and_leaves_nothing(
    server: XinferenceServer, arguments: dict[str, Any], said: str
) -> None:
    answer = server.launch("bad", **arguments)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert_nothing_left(server)


def test_what_only_the_engine_can_know_fails_the_launch_with_our_reason(
    server: XinferenceServer,
) -> None:
    answer = server.launch("small", **{**GPU_FIRST, "xavier_gpu_cache_bytes": 1})
    assert answer.status_code == 400
    assert "xavier_gpu_cache_bytes" in answer.json()["detail"]
    assert "below one KV block" in answer.json()["detail"]
    assert_nothing_left(server)
    assert status(server, "small")["replicas"] == []


def launch_by_command_line(server: XinferenceServer, uid: str, replicas: int) -> None:
    command = [str(Path(sys.executable).with_name("xinference")), "launch"]
    for name, value in {
        "--endpoint": server.url,
        "--model-name": MODEL_NAME,
        "--model-uid": uid,
        "--model-engine": "vLLM",
        "--size-in-billions": "0_1",
        "--model-format": "pytorch",
        "--quantization": "none",
        "--replica": str(replicas),
        "--max_model_len": "1024",
        "--max_num_seqs": "8",
        "--enforce_eager": "true",
        "--dtype": "float32",
        "--kv_cache_memory_bytes": str(64 * 2**20),
        "--enable_xavier": "true",
        "--xavier_gpu_first": "true",
        "--xavier_gpu_cache_bytes": "4MiB",
        "--xavier_cpu_cache_bytes": str(16 * 2**20),
    }.items():
        command += [name, value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_the_life_of_a_group(server: XinferenceServer) -> None:
    """Launch by command line, share, grow, shrink, recover a killed replica, and end."""
    launch_by_command_line(server, "group", 2)
    eventually(lambda: ready(server, "group") == {"group-rep0", "group-rep1"}, LAUNCH_TIMEOUT_S)
    eventually(lambda: set(members(server, "group")) == {"group-rep0", "group-rep1"})

    # Requests go round, so that each prompt's second request meets the other replica; and the
    # third meets the first one's own cache.
    prompt = "".join(f"line {number} of a shared document\n" for number in range(20))
    blocks = len(prompt) // BLOCK_TOKENS
    cold, cold_details = complete(server, "group", prompt)
    assert cold_details == {"cached_tokens": 0, "xavier": dict.fromkeys(SOURCES, 0)}
    eventually(lambda: published(members(server, "group")) >= blocks)
    remote, remote_details = complete(server, "group", prompt)
    remote_cached = remote_details["cached_tokens"]
    assert remote_cached >= (blocks - 1) * BLOCK_TOKENS
    assert remote_details["xavier"] == {
        **dict.fromkeys(SOURCES, 0), "peer_device": remote_cached
    }  # fmt: skip
    assert remote == pytest.approx(cold, abs=1e-3)
    other, other_details = complete(server, "group", "z" + prompt)
    assert other_details["cached_tokens"] == 0
    assert other != pytest.approx(cold, abs=1e-3)

    chatted = streamed_chat(server, "group", "z" + prompt)
    assert sum(chatted["xavier"].values()) == chatted["cached_tokens"] > 0

    # Replicas report every few seconds, the idle ones too.
    hit = {"model_uid": "group", "source": "peer_device"}
    eventually(
        lambda: sum(metric(server, "xavier_hit_tokens_total", **hit).values()) >= remote_cached
    )
    assert set(metric(server, "xavier_capacity_bytes", tier="device")) == {"0", "1"}

    look_at_the_group(server, blocks)

    grown = requests.post(f"{server.url}/v1/models/group/replicas", json={}, timeout=900)
    assert grown.ok, grown.text
    eventually(lambda: "group-rep2" in members(server, "group"))

    shrink_under_load(server, 1)

    [victim] = [p for p in engines(server) if title(p).strip() == "Model: group-rep0"]
    before = address_of(server, "group-rep0")
    victim.kill()
    eventually(lambda: address_of(server, "group-rep0") not in (None, before), LAUNCH_TIMEOUT_S)
    complete(server, "group", "after the recovery")

    assert requests.delete(f"{server.url}/v1/models/group", timeout=120).ok
    # A killed replica has no final counters; the one that took its place has.
    reports = {report["replica"]: report for report in status(server, "group")["closed"]}
    assert set(reports) == {"group-rep0", "group-rep1", "group-rep2"}
    for report in reports.values():
        counters = report["counters"]
        assert counters["drained"]
        assert {name: counters[name] for name in EMPTY} == dict.fromkeys(EMPTY, 0)
        reached = counters["reached"]
        assert {name: reached[name] for name in DRAINED} == dict.fromkeys(DRAINED, 0)
    assert_nothing_left(server)
    eventually(lambda: not mapped_arenas())
    # Dead members leave the directory within its heartbeat limit, and the metrics soon after.
    eventually(lambda: status(server, "group")["replicas"] == [])
    eventually(lambda: metric(server, "xavier_requests_total", model_uid="group") == {})


def shrink_under_load(server: XinferenceServer, number: int) -> None:
    """Remove a replica of "group" while all of them stream, and new requests come: none fails."""
    running = [threading.Event() for _ in range(6)]
    removed = threading.Event()

    def ask_until_removed() -> int:
        asked = 0
        while not removed.is_set():
            complete(server, "group", f"request {asked}")
            asked += 1
        return asked

    with ThreadPoolExecutor(len(running) + 1) as threads:
        streams = [threads.submit(streamed, server, "group", begun) for begun in running]
        assert all(begun.wait(60) for begun in running)
        asked = threads.submit(ask_until_removed)
        url = f"{server.url}/v1/models/group/replicas/{number}"
        try:
            answer = requests.delete(url, timeout=120)
            assert answer.ok, answer.text
        finally:
            removed.set()
        assert [stream.result() for stream in streams] == [STREAM_TOKENS] * len(streams)
        assert asked.result() > 0
    eventually(lambda: f"group-rep{number}" not in members(server, "group"))
    assert len(ready(server, "group")) == 2


def streamed(server: XinferenceServer, uid: str, begun: threading.Event) -> int:
    """Read a long streamed answer to its end; return how many tokens its usage says it has."""
    body = {
        "model": uid,
        "prompt": "once upon a time",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=120, stream=True)
    assert answer.ok, answer.text
    tokens = 0
    for line in answer.iter_lines():
        begun.set()
        if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
            tokens = usage["completion_tokens"]
    return tokens


def look_at_the_group(server: XinferenceServer, blocks: int) -> None:
    """Plan, describe, limit and examine two replicas that have shared ``blocks`` blocks."""
    api = Api(server.url)
    [model] = api.models().models
    assert (model.model_uid, model.model_name, model.status) == ("group", MODEL_NAME, "READY")
    assert {replica.state for replica in model.replicas} == {"ready"}
    [link] = [link for replica in model.replicas for link in replica.links if link.loads]
    assert (link.transport, link.usable, link.blocks >= blocks - 1) == ("shm", True, True)
    size = model.replicas[0].block_bytes

    # From the registered model's own files, and from a running replica: the same block.
    plan = api.plan(PlanRequest(model_name=MODEL_NAME, dtype="float32", replica=2))
    assert (plan.model.source, plan.slot_bytes, plan.valid) == ("config", size, True)
    running = api.plan(PlanRequest(model_uid="group", xavier_gpu_cache_bytes="4MiB"))
    assert (running.slot_bytes, running.gpu_blocks) == (size, model.replicas[0].gpu.capacity_blocks)

    assert requests.get(f"{server.url}/openapi.json", timeout=60).json()["paths"].keys() >= {
        "/v1/xavier/models",
        "/v1/xavier/models/{model_uid}",
        "/v1/xavier/models/{model_uid}/clear",
        "/v1/xavier/models/{model_uid}/budgets",
        "/v1/xavier/plan",
        "/v1/xavier/cluster",
    }

    doctor = subprocess.run(
        [*XAVIER, "doctor", "--endpoint", server.url, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    found = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    intact = set()
    for name in ("group-rep0", "group-rep1"):
        for transport in ("shm", "nixl", "xoscar"):
            finding = found[f"{transport}: device tier of {name}"]
            assert finding["state"] == "ok", finding
            # What came from a peer once is not stored again, so one of them may be empty.
            intact.add((transport, "intact" in finding["seen"]))
    assert intact >= {("shm", True), ("nixl", True), ("xoscar", True)}
    assert api.model("group").replicas[0].gpu.leased_blocks == 0

    with pytest.raises(ApiError, match="relaunch the model") as refused:
        api.set_budgets("group", BudgetsRequest(gpu="5MiB"))
    assert refused.value.status == 400
    limited = api.set_budgets("group", BudgetsRequest(gpu=3 * size, cpu=0))
    assert limited.complete
    assert published(members(server, "group")) <= 6
    assert sum(replica.evicted_blocks for replica in limited.replicas) >= blocks - 6
    everything = BudgetsRequest(gpu="100%", cpu="100%")
    assert api.set_budgets("group", everything).replicas[0].gpu == model.replicas[0].gpu.model_copy(
        update={"used_blocks": 3, "used_bytes": 3 * size}
    )

    shown = subprocess.run(
        [*XAVIER, "status", "--endpoint", server.url], capture_output=True, text=True, timeout=60
    )
    assert (shown.returncode, "group-rep1" in shown.stdout) == (0, True), shown.stderr


def published(replicas: dict[str, Any]) -> int:
    """Return the blocks that readers can see, over all replicas."""
    stores = [state["store"] for state in replicas.values()]
    return sum(int(store["device_blocks"] + store["host_blocks"]) for store in stores)


def address_of(server: XinferenceServer, replica: str) -> str | None:
    for found in status(server, "group")["replicas"]:
        if found["replica"] == replica and found["status"]:
            return str(found["address"])
    return None


def mapped_arenas() -> list[int]:
    """Return the processes of this user that hold or map memory of ours."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        if "memfd:xavier-" in maps and process.pid != os.getpid():
            found.append(process.pid)
    return found


def test_a_stock_launch_is_untouched(server: XinferenceServer) -> None:
    answer = server.launch("plain", xavier_gpu_first=False)
    assert answer.ok, answer.text
    _, details = complete(server, "plain", "x" * 100)
    assert details == {"cached_tokens": 0}
    assert status(server, "plain")["replicas"] == []
    assert requests.delete(f"{server.url}/v1/models/plain", timeout=120).ok
    assert_nothing_left(server)
