# SPDX-License-Identifier: Apache-2.0
"""Finds the processes of a server that we started, and the memory that they hold or share.

Everything is found in /proc. Other deployments on the same host are none of our business: a
process is ours by descent, session or a mark in its environment, and an arena is ours when one of
our processes was seen with it. Linux only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

MARK: Final = "XINFERENCE_XAVIER_DEMO"
"""Environment variable that the server's processes inherit, with a value of its own."""

ARENA: Final = "/memfd:xavier-"
SHARED: Final = "/dev/shm/"
DELETED: Final = " (deleted)"

_MAPPING: Final = re.compile(r"^\S+ \S+ \S+ (\S+) (\d+) +(/.*)$")


@dataclass(frozen=True)
class File:
    """A file in memory as a process sees it: number, and the name it had."""

    inode: int
    name: str


@dataclass
class Family:
    """The processes that a started one led to; remembers each that was ever seen."""

    leader: int
    """Process id, and so session id, of the process that was started in a session of its own."""
    mark: str
    """Value of :data:`MARK` in its environment."""
    _seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)

    def alive(self) -> list[psutil.Process]:
        """Return all of them that run now, however they came to be."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if self._is_ours(process):
                    self._remember(process)
                    for child in process.children(recursive=True):
                        self._remember(child)
        return [process for process in self._seen.values() if _runs(process)]

    def _remember(self, process: psutil.Process) -> None:
        self._seen[process.pid, process.create_time()] = process

    def _is_ours(self, process: psutil.Process) -> bool:
        if os.getsid(process.pid) == self.leader:
            return True
        # A process that changes its title overwrites this, hence the other two signs.
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return f"{MARK}={self.mark}".encode() in environment.split(b"\0")


def described(process: psutil.Process) -> str:
    """Return a process for people."""
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:100] or process.name()}"
    return str(process.pid)


def files_of(pids: Iterable[int], prefix: str, proc: Path = Path("/proc")) -> set[File]:
    """Return the files whose names begin with ``prefix`` that these processes map or have open."""
    return {file for pid in pids for file in _files(proc / str(pid)) if _named(file, prefix)}


def holders(files: Iterable[File], proc: Path = Path("/proc")) -> dict[int, set[File]]:
    """Return the processes of the whole host that map or have open any of ``files``, by id."""
    wanted = set(files)
    if not wanted:
        return {}
    found = {}
    for folder in proc.glob("[0-9]*"):
        if held := wanted.intersection(_files(folder)):
            found[int(folder.name)] = held
    return found


def still_there(files: Iterable[File]) -> list[str]:
    """Return the paths of those files that still have a name in the file system."""
    return sorted(
        file.name
        for file in files
        if not file.name.endswith(DELETED) and _inode(Path(file.name)) == file.inode
    )


def _named(file: File, prefix: str) -> bool:
    return file.name.startswith(prefix)


def _files(folder: Path) -> Iterator[File]:
    """Yield what the process of ``/proc/<pid>`` maps or has open; nothing for one that is gone."""
    with suppress(OSError):
        for line in (folder / "maps").read_text(errors="replace").splitlines():
            if match := _MAPPING.match(line):
                yield File(int(match[2]), match[3])
    with suppress(OSError):
        for entry in (folder / "fd").iterdir():
            with suppress(OSError):
                name = os.readlink(entry)
                if name.startswith("/"):
                    yield File(entry.stat().st_ino, name)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
