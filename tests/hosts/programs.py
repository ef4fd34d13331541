# SPDX-License-Identifier: Apache-2.0
"""The programs that run on hosts, seen from here."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.host import Host
from xinference_xavier.bench.engines import Engine, describe, wait_ended

DIRECTORY_PORT = 9990


@dataclass
class HostEngine(Engine):
    """A vLLM API server on ``host``, on its loopback address."""

    host: Host | None = None

    def command(self) -> list[str]:
        assert self.host is not None
        return [*self.host.entering, *super().command()]

    def wait_ready(self) -> None:
        assert self.host is not None
        with self.host.network():
            super().wait_ready()

    def stop(self, timeout: float = 30) -> None:
        """End the server; what enters the host for it ends with it, and passes no signal on."""
        end_entered(self.process, timeout)
        super().stop(timeout)

    def _open(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        assert self.host is not None
        with self.host.network():
            return super()._open(path, body, timeout)


def end_entered(process: subprocess.Popen[Any] | None, timeout_s: float) -> None:
    """Ask the program that ``process`` runs on a host to end; kill it at the timeout."""
    if process is None or process.poll() is not None:
        return
    programs = psutil.Process(process.pid).children()
    for program in programs:
        program.terminate()
    for program in wait_ended(programs, timeout_s):
        program.kill()
    process.wait(timeout_s)


@contextlib.contextmanager
def running_directory(host: Host, log: Path) -> Iterator[str]:
    """Run ``xinference-xavier directory`` on a host, on all its addresses; yields the one."""
    command = [sys.executable, "-m", "xinference_xavier.cli", "directory"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*host.entering, *command, "--host", "0.0.0.0", "--port", str(DIRECTORY_PORT)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"{host.address}:{DIRECTORY_PORT}"
    finally:
        end_entered(process, 20)


def describe_from(host: Host, directory: str) -> dict[str, dict[str, Any]]:
    """Ask every member for its status, from ``host``."""
    with host.network():
        return describe(directory)
