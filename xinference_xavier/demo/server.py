# SPDX-License-Identifier: Apache-2.0
"""A real ``xinference-local`` with our extension, as a child whose end is certain."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import psutil
from xinference.client import RESTfulClient

from xinference_xavier.demo.leftovers import (
    ARENA,
    MARK,
    SHARED,
    Family,
    File,
    described,
    files_of,
    holders,
    still_there,
)

START_S: Final = 300.0
STOP_S: Final = 60.0
KILL_S: Final = 10.0
POLL_S: Final = 0.2
CALL_S: Final = 30.0

LONGEST_PLACE: Final = 107 - len("/xavier-demo-12345678/tmp/") - 36
"""Most bytes of a folder's path below which sockets of vLLM, named by a uuid, can be made."""

MODEL_NAME: Final = "smollm2-135m-demo"


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why, for people."""


class Server:
    """Owns the server's process group and one temporary folder, which holds all of its files.

    Used from the main thread. :meth:`stop` may be called in any state, any number of times.
    """

    def __init__(self, keep_logs: Path | None = None) -> None:
        """Make the folder. ``keep_logs`` is where the logs go when the server is stopped."""
        self._keep_logs = keep_logs
        self.folder = _make_folder()
        self.log = self.folder / "xinference.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._family: Family | None = None
        self._arenas: set[File] = set()
        self._shared: set[File] = set()

    def start(self) -> RESTfulClient:
        """Start the server and return a client once it answers. Raises :class:`DemoError`."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        command = Path(sys.executable).with_name("xinference-local")
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": str(temporary),
            "XINFERENCE_HOME": str(self.folder / "home"),
            "XINFERENCE_EXTENSIONS": "xinference_xavier.extension:create",
            "XINFERENCE_AUTH_ADVANCED": "0",
            "XINFERENCE_ENABLE_VIRTUAL_ENV": "0",
            # A busy machine may take longer to start than Xinference waits by default.
            "XINFERENCE_HEALTH_CHECK_ATTEMPTS": "30",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [str(command), "--host", "127.0.0.1", "--port", str(self.port)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C shall reach this process alone, which then ends the server.
                    start_new_session=True,
                )
        except OSError as error:
            raise DemoError(f"cannot start {command}: {error}") from error
        self._family = Family(self._process.pid, self._mark)
        self._wait_ready(self._process)
        return RESTfulClient(self.url)

    def replicas(self, model_uid: str) -> dict[str, Any]:
        """Return what ``GET /v1/xavier/models/{model_uid}`` says."""
        answer: dict[str, Any] = self._get(f"/v1/xavier/models/{model_uid}")
        return answer

    def look(self) -> list[psutil.Process]:
        """Return our processes, and remember the memory that they hold and share now."""
        alive = self._family.alive() if self._family is not None else []
        pids = [process.pid for process in alive]
        self._arenas |= files_of(pids, ARENA)
        self._shared |= files_of(pids, SHARED)
        return alive

    def arenas(self) -> int:
        """Return how many arenas were ever seen."""
        return len(self._arenas)

    def memory_held(self) -> list[str]:
        """Return, for people, which process of this host maps or has open an arena of ours."""
        return [
            f"{_name(pid)} holds {sorted(file.name for file in files)}"
            for pid, files in sorted(holders(self._arenas).items())
        ]

    def left(self) -> list[str]:
        """Return, for people, what is left of a server that was stopped."""
        alive = self._family.alive() if self._family is not None else []
        left = [f"process {described(process)}" for process in alive]
        left += self.memory_held()
        left += [f"file {path}" for path in still_there(self._shared)]
        if self.folder.exists():
            left.append(f"folder {self.folder}")
        return left

    def stop(self) -> None:
        """End the server as an operator would, kill what does not follow, remove its files."""
        self.look()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._family is not None:
            self.look()
            for found in _wait_gone(self._family, KILL_S):
                _kill(found)
            _wait_gone(self._family, KILL_S)
        if self._keep_logs is not None and self.log.exists():
            self._keep_logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.log, self._keep_logs)
        shutil.rmtree(self.folder, ignore_errors=True)

    def tail(self, lines: int = 25) -> str:
        """Return the end of the server's output."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if process.poll() is not None:
                raise DemoError(f"xinference-local ended with status {process.returncode}")
            try:
                self._get("/v1/models")
                return
            except DemoError:
                time.sleep(POLL_S)
        raise DemoError(f"xinference-local does not answer after {START_S:g} s")

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=CALL_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise DemoError(f"GET {path}: HTTP {error.code} {text}") from error
        except (OSError, ValueError) as error:
            raise DemoError(f"GET {path}: {error}") from error


def _make_folder() -> Path:
    """Make a temporary folder where the user wants such, or in /tmp where that is too deep.

    vLLM's sockets are made in it, and the system limits the length of their paths.
    """
    place = Path(tempfile.gettempdir())
    if len(os.fsencode(place)) > LONGEST_PLACE:
        place = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix="xavier-demo-", dir=place))


def _wait_gone(family: Family, timeout_s: float) -> list[psutil.Process]:
    """Wait until all processes have ended; return those that have not."""
    until = time.monotonic() + timeout_s
    while (alive := family.alive()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return alive


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _name(pid: int) -> str:
    try:
        return described(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return str(pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
