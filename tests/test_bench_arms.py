# SPDX-License-Identifier: Apache-2.0
"""Ways of sharing are told apart, refused where they are not installed, and leave nothing behind.

What they measure is shown with real engines, in the slow lane.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from xinference_xavier import cli
from xinference_xavier.bench import helper, warm
from xinference_xavier.bench.arms import ArmSettings, ArmUnavailable, Replicas, builtin, make_arm
from xinference_xavier.bench.arms import nixl as nixl_arm
from xinference_xavier.bench.arms.lmcache import PYTHON_VARIABLE
from xinference_xavier.bench.engines import (
    Engine,
    EngineError,
    accepts,
    wait_ended,
    wait_until,
)
from xinference_xavier.bench.helper import helper_process
from xinference_xavier.bench.sharing import rest

NAMES = ("plain", "xavier", "builtin", "lmcache", "nixl")


def settings(folder: Path) -> ArmSettings:
    return ArmSettings(folder / "model", folder, 0, 64, arguments=("--max-num-seqs", "7"))


@pytest.mark.parametrize("name", NAMES)
def test_an_arm_is_made_by_its_name(name: str) -> None:
    arm = make_arm(name)
    assert arm.name == name
    assert arm.chunk_tokens % 16 == 0


def test_every_way_of_sharing_that_can_be_chosen_can_be_made() -> None:
    assert set(warm.SHARING) == set(NAMES) - {"plain"}


@pytest.mark.parametrize("name", ["builtin", "nixl"])
def test_missing_software_is_named_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (builtin, nixl_arm):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    monkeypatch.setattr(Engine, "start", pytest.fail)
    with pytest.raises(ArmUnavailable, match="pip install"):
        make_arm(name).check()
    result = CliRunner().invoke(cli.main, ["bench", "warm", "--tiny", "--arms", f"local,{name}"])
    assert result.exit_code == 1
    assert f"the arm {name} needs" in result.output


def test_a_python_without_lmcache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(
        ArmUnavailable, match="/nowhere/python does not have: run 'make lmcache-env"
    ):
        make_arm("lmcache").check()
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(ArmUnavailable, match="make lmcache-env"):
        make_arm("lmcache").check()


def test_all_engines_of_a_measurement_have_its_arguments(tmp_path: Path) -> None:
    shared = settings(tmp_path)
    plain, ours = shared.engine("plain"), shared.engine("ours", {"xavier_member": "ours"})
    for engine in (plain, ours):
        command = engine.command()
        assert command[command.index("--max-num-seqs") + 1] == "7"
    assert "--kv-transfer-config" not in plain.command()
    assert "--kv-transfer-config" in ours.command()
    assert shared.alone().replicas == 1


SPINNING = """
import threading, time
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print("spinning", flush=True)
time.sleep(600)
"""


class Spinning(Engine):
    """A process that never rests, but whose main thread does."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", SPINNING]


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[Spinning]:
    engine = Spinning("spinning", tmp_path, tmp_path / "log", core=0)
    engine.start()
    try:
        wait_until(lambda: "spinning" in engine.tail(), "it spins")
        yield engine
    finally:
        engine.stop()


def test_an_engine_rests_with_its_main_threads_where_others_never_do(spinning: Spinning) -> None:
    wait_until(
        lambda: spinning.cpu_seconds() > spinning.cpu_seconds(main_threads=True) + 0.5,
        "what is not in the main thread is left out",
    )
    rest([spinning], main_threads=True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other core")
def test_nixl_s_threads_leave_the_core_of_the_models(
    spinning: Spinning, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spinning.process is not None
    process = psutil.Process(spinning.process.pid)
    monkeypatch.setattr(spinning, "processes", lambda: [process])
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    nixl_arm._move_off(core, [spinning])
    found = {thread.id: os.sched_getaffinity(thread.id) for thread in process.threads()}
    assert len(found) == 2
    assert found.pop(process.pid) == allowed
    assert list(found.values()) == [allowed - {core}]


def test_replicas_are_reached_by_url_and_counted_with_their_helpers(tmp_path: Path) -> None:
    engine = settings(tmp_path).engine("one")
    with helper_process(["sleep", "600"], tmp_path / "log") as process:
        replicas = Replicas([engine], helpers=[process.pid])
        assert replicas.urls == [f"http://127.0.0.1:{engine.port}"]
        assert [each.pid for each in replicas.processes()] == [process.pid]
        assert replicas.describe() == {}


def test_a_helper_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "END_S", 0.5)
    parent = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']);"
        "print(child.pid, flush=True); child.wait()"
    )
    command = [sys.executable, "-c", parent]
    with helper_process(command, tmp_path / "log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
    assert not wait_ended([child], timeout_s=20)
    assert process.returncode is not None


def test_a_helper_tells_when_it_listens(tmp_path: Path) -> None:
    server = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", server]
    with helper_process(command, tmp_path / "log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert accepts(port)
    assert not accepts(port)


def test_actors_that_do_not_start_are_told_with_their_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print('noise'); sys.exit('no such luck')"]
    with (
        helper_process(command, log, stdout=subprocess.PIPE) as process,
        pytest.raises(EngineError, match="no such luck"),
    ):
        builtin._addresses(process, log)


def test_actors_that_never_start_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "START_S", 0.0)
    log = tmp_path / "log"
    with (
        helper_process(["sleep", "600"], log, stdout=subprocess.PIPE) as process,
        pytest.raises(EngineError, match="did not start"),
    ):
        builtin._addresses(process, log)


# As its server does, it makes a segment under a longer name than it was given.
DYING_SERVER = """#!/bin/sh
while [ "$1" != --shm-name ]; do shift; done
touch "/dev/shm/pool_$2"
echo "$2" > "$(dirname "$0")/name"
echo out of memory
exit 1
"""


def test_an_lmcache_server_that_ends_is_told_and_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "lmcache"
    server.write_text(DYING_SERVER)
    server.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with (
        pytest.raises(EngineError, match="out of memory"),
        make_arm("lmcache").start(settings(tmp_path)),
    ):
        pytest.fail("it does not listen")
    name = (tmp_path / "name").read_text().strip()
    assert not Path(f"/dev/shm/pool_{name}").exists()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["builtin", "lmcache", "nixl"])
def test_another_way_of_sharing_is_measured_on_real_engines(tmp_path: Path, name: str) -> None:
    try:
        make_arm(name).check()
    except ArmUnavailable as error:
        pytest.skip(str(error))
    file = tmp_path / "result.json"
    args = ["bench", "warm", "--tiny", "--tokens", "512", "--pairs", "2", "--arms", f"local,{name}"]
    result = CliRunner().invoke(
        cli.main, [*args, "--logs", str(tmp_path), "--json", str(file)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    (length,) = json.loads(file.read_text())["lengths"]
    arm = length["arms"][name]
    assert arm["full_hits"] == 2
    assert arm["outputs_equal"]
    assert length["another_prefix_differs"]
