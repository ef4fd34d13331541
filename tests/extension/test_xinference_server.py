# SPDX-License-Identifier: Apache-2.0
"""A real Xinference server with our extension, real vLLM replicas of a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.extension.server import MODEL_NAME, XinferenceServer
from tests.models import make_tiny_llama
from xinference_xavier.demo.judge import DRAINED, EMPTY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

GPU_FIRST: dict[str, Any] = {
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "4MiB",
    "xavier_cpu_cache_bytes": "16MiB",
}
BLOCK_TOKENS = 16
LAUNCH_TIMEOUT_S = 600


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
    return {replica["replica"]: replica["status"] for replica in replicas if "status" in replica}


def complete(server: XinferenceServer, uid: str, prompt: str) -> tuple[list[Any], int]:
    """Return log probabilities of a greedy answer, and how many prompt tokens were cached."""
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
    details = result["usage"].get("prompt_tokens_details") or {}
    return result["choices"][0]["logprobs"]["token_logprobs"], details.get("cached_tokens", 0)


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
    """Launch by command line, share, grow, recover a killed replica, and end."""
    launch_by_command_line(server, "group", 2)
    eventually(lambda: ready(server, "group") == {"group-rep0", "group-rep1"}, LAUNCH_TIMEOUT_S)
    eventually(lambda: set(members(server, "group")) == {"group-rep0", "group-rep1"})

    # Requests go round, so that each prompt's second request meets the other replica; and the
    # third meets the first one's own cache.
    prompt = "".join(f"line {number} of a shared document\n" for number in range(20))
    blocks = len(prompt) // BLOCK_TOKENS
    cold, cold_cached = complete(server, "group", prompt)
    assert cold_cached == 0
    eventually(lambda: published(members(server, "group")) >= blocks)
    remote, remote_cached = complete(server, "group", prompt)
    assert remote_cached >= (blocks - 1) * BLOCK_TOKENS
    assert remote == pytest.approx(cold, abs=1e-3)
    other, other_cached = complete(server, "group", "z" + prompt)
    assert other_cached == 0
    assert other != pytest.approx(cold, abs=1e-3)

    body = {"model": "group", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).ok

    grown = requests.post(f"{server.url}/v1/models/group/replicas", json={}, timeout=900)
    assert grown.ok, grown.text
    eventually(lambda: "group-rep2" in members(server, "group"))

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
    # Dead members leave the directory within its heartbeat limit.
    eventually(lambda: status(server, "group")["replicas"] == [])


def published(replicas: dict[str, Any]) -> int:
    """Return the blocks that readers can see, over all replicas."""
    stores = [state["store"] for state in replicas.values()]
    return sum(int(store["device_blocks"] + store["host_blocks"]) for store in stores)


def address_of(server: XinferenceServer, replica: str) -> str | None:
    for found in status(server, "group")["replicas"]:
        if found["replica"] == replica and "status" in found:
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
    _, cached = complete(server, "plain", "x" * 100)
    assert cached == 0
    assert status(server, "plain")["replicas"] == []
    assert requests.delete(f"{server.url}/v1/models/plain", timeout=120).ok
    assert_nothing_left(server)
