# SPDX-License-Identifier: Apache-2.0
"""The secret of a launched model on a real server: all replicas have it, and nothing shows it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import xoscar as xo

from tests.control.control_harness import eventually
from tests.extension.server import XinferenceServer
from tests.models import make_tiny_llama
from xinference_xavier.control.client import Contact, directory_members, peer_call
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.names import GROUP_SECRET, NAME, SUPERVISOR_UID
from xinference_xavier.extension.secrets import key_from

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

UID = "secretive"
GPU_FIRST: dict[str, Any] = {
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "4MiB",
    "xavier_cpu_cache_bytes": "16MiB",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[XinferenceServer]:
    root = tmp_path_factory.mktemp("secret")
    model = make_tiny_llama(root / "model")
    loud = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    server = XinferenceServer(root / "home", loud, ["--log-level", "DEBUG"])
    try:
        server.register(model)
        # One after the other: two at once can both want to link an uncached model into the cache.
        answer = server.launch(UID, **GPU_FIRST)
        assert answer.ok, answer.text
        add_replica(server)
        yield server
    finally:
        left = server.stop()
    assert left == []


def add_replica(server: XinferenceServer) -> None:
    answer = requests.post(f"{server.url}/v1/models/{UID}/replicas", json={}, timeout=400)
    assert answer.ok, answer.text


@pytest.fixture(scope="module")
def supervisor(server: XinferenceServer) -> str:
    address: str = requests.get(f"{server.url}/v1/xavier/cluster", timeout=30).json()["supervisor"]
    return address


@pytest.fixture(scope="module")
def secret(supervisor: str) -> str:
    """Whoever reaches the supervisor's port can have it: so can this test."""

    async def ask() -> str:
        ref = await xo.actor_ref(address=supervisor, uid=SUPERVISOR_UID)
        kept: str = await ref.call_extension(NAME, GROUP_SECRET, {"model_uid": UID})
        return kept

    return asyncio.run(ask())


def members(supervisor: str, key: GroupKey | None) -> list[Any]:
    return [] if key is None else asyncio.run(directory_members(supervisor, key))


def replicas(server: XinferenceServer) -> dict[str, str]:
    described = requests.get(f"{server.url}/v1/xavier/models/{UID}", timeout=30).json()
    return {replica["replica"]: replica["state"] for replica in described["replicas"]}


def test_all_replicas_have_the_one_secret(supervisor: str, secret: str) -> None:
    assert re.fullmatch("[0-9a-f]{64}", secret)
    found = eventually(
        lambda: len(found := members(supervisor, GroupKey(UID, secret))) == 2 and found, 30
    )
    key = asyncio.run(key_from(supervisor, UID))
    assert [m.contact for m in members(supervisor, key)] == [m.contact for m in found]
    for member in found:
        status = asyncio.run(peer_call(member.contact, "describe"))
        assert status["control"]["strangers"] == 0
        assert [peer["met"] for peer in status["control"]["peers"]] == [True]


def test_without_it_there_is_nobody_and_nothing_to_be_had(supervisor: str, secret: str) -> None:
    for guess in (None, "0" * 64, UID):
        assert members(supervisor, GroupKey(UID, guess)) == []
    for member in members(supervisor, GroupKey(UID, secret)):
        shown = member.contact.credential
        stranger = GroupKey(UID, None).credential(
            shown.fingerprint, member.info.name, member.info.epoch
        )
        for method, arguments in {"describe": (), "clear": (), "close": (1.0,)}.items():
            with pytest.raises(PermissionError, match="wrong secret"):
                asyncio.run(peer_call(Contact(member.info.address, stranger), method, *arguments))


def test_nothing_shows_it(server: XinferenceServer, secret: str, tmp_path: Path) -> None:
    """Neither the secret nor what is derived from it: logs, files, API, metrics, processes."""
    places: dict[str, bytes] = {"metrics": requests.get(server.metrics_url, timeout=30).content}
    described = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    values = {"model_uid": UID, "model_type": "LLM", "model_name": "random-llama"}
    for path, methods in described["paths"].items():
        names = set(re.findall(r"\{(\w+)\}", path))
        if "get" in methods and names <= values.keys() and "stream" not in path:
            place = path.format(**values)
            try:
                places[place] = requests.get(server.url + place, timeout=20).content
            except requests.RequestException as error:
                places[place] = str(error).encode()
    assert {f"/v1/models/{UID}", f"/v1/xavier/models/{UID}", "/v1/models"} <= places.keys()
    for file in server.output.parent.rglob("*"):
        if file.is_file():
            places[str(file)] = file.read_bytes()
    assert b"kv_connector_extra_config" in places[str(server.output)], "the log is not so loud"
    for process in server.processes():
        try:
            places[f"command line {process.pid}"] = " ".join(process.cmdline()).encode()
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            places[f"environment {process.pid}"] = environ
        except (psutil.Error, OSError):
            continue
    assert len(places) > 40
    key = GroupKey(UID, secret)
    derived = [secret.encode(), key.admission(), key.admission().hex().encode()]
    told = [place for place, text in places.items() if any(part in text for part in derived)]
    assert told == []


def test_a_replica_that_is_added_has_it_too(
    server: XinferenceServer, supervisor: str, secret: str
) -> None:
    add_replica(server)
    eventually(lambda: len(members(supervisor, GroupKey(UID, secret))) == 3, 120)
    states = eventually(lambda: len(found := replicas(server)) == 3 and found, 60)
    assert set(states.values()) == {"ready"}
