# SPDX-License-Identifier: Apache-2.0
"""The demo's server: its end is certain, and what it leaves is found. Real processes, no vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from xinference_xavier.bench.engines import wait_ended
from xinference_xavier.demo import server as server_module
from xinference_xavier.demo.leftovers import (
    ARENA,
    MARK,
    Family,
    File,
    files_of,
    holders,
    still_there,
)
from xinference_xavier.demo.server import DemoError, Server

HOLDER = """
import mmap, os, sys
fd = os.memfd_create("xavier-test")
os.truncate(fd, 4096)
memory = mmap.mmap(fd, 4096) if sys.argv[1] == "maps" else None
if memory is not None:
    os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["maps", "opens"])
def holder(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with process:
        yield process
        process.kill()


def test_who_holds_an_arena_is_found_until_it_ends(holder: subprocess.Popen[bytes]) -> None:
    found = files_of([holder.pid], ARENA)
    assert len(found) == 1
    assert list(holders(found)) == [holder.pid]
    holder.kill()
    holder.wait()
    assert holders(found) == {}


def test_arenas_of_others_are_none_of_ours(holder: subprocess.Popen[bytes]) -> None:
    theirs = files_of([holder.pid], ARENA)
    assert theirs
    assert theirs.isdisjoint(files_of([os.getpid()], ARENA))
    assert holders([]) == {}
    assert holders([File(1, f"{ARENA}elsewhere (deleted)")]) == {}


def test_a_file_in_shared_memory_is_told_until_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"x")
    file = File(path.stat().st_ino, str(path))
    assert still_there([file, File(file.inode, f"{path} (deleted)")]) == [str(path)]
    path.unlink()
    assert still_there([file]) == []


ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


def test_an_orphan_in_a_session_of_its_own_is_ours_by_its_mark() -> None:
    made = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        env={**os.environ, MARK: "a mark of this test"},
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    orphan = psutil.Process(int(made.stdout))
    family = Family(leader=-1, mark="a mark of this test")
    try:
        assert family.alive() == [orphan]
        assert Family(leader=-1, mark="a mark").alive() == []
    finally:
        orphan.kill()
    assert wait_ended([orphan], 10) == []
    assert family.alive() == []


SERVER = """#!{python}
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
open(os.path.join(os.environ["TMPDIR"], "pids"), "w").write(f"{{os.getpid()}} {{child.pid}}")
{end}
"""


def make_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, keep_logs: Path | None = None
) -> Server:
    command = tmp_path / "xinference-local"
    command.write_text(SERVER.format(python=sys.executable, end=end))
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return Server(keep_logs)


@pytest.mark.parametrize(("length", "used"), [(45, True), (46, False)])
def test_the_folder_is_where_the_user_wants_it_unless_sockets_could_not_be_made_there(
    length: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        place = Path(base).joinpath("x" * (length - len(base) - 1))
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        server = Server()
        try:
            assert (server.folder.parent == place) is used
            with socket.socket(socket.AF_UNIX) as longest:
                (server.folder / "tmp").mkdir()
                longest.bind(str(server.folder / "tmp" / str(uuid.uuid4())))
        finally:
            server.stop()
        assert not server.folder.exists()


def test_a_server_that_ends_at_once_is_told_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(tmp_path, monkeypatch, "print('no port'); sys.exit(3)", tmp_path / "logs")
    monkeypatch.setattr(server_module, "KILL_S", 0.2)
    with pytest.raises(DemoError, match="ended with status 3"):
        server.start()
    assert server.tail() == "no port"
    assert any("process" in text and "sleep 60" in text for text in server.left())
    server.stop()
    server.stop()
    assert server.left() == []
    assert (tmp_path / "logs" / "xinference.log").read_text() == "no port\n"


def test_a_server_that_does_not_answer_and_will_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "START_S", 0.5)
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    monkeypatch.setattr(server_module, "KILL_S", 0.2)
    server = make_server(tmp_path, monkeypatch, "signal.pause()\nsignal.pause()")
    with pytest.raises(DemoError, match="does not answer"):
        server.start()
    pids = server.folder / "tmp" / "pids"
    until = time.monotonic() + 30
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert {process.pid for process in server.look()} == {*map(int, pids.read_text().split())}
    server.stop()
    assert server.left() == []
