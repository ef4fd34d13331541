# SPDX-License-Identifier: Apache-2.0
"""What a replica that is to be killed has, to look for it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import psutil

from tests.arenas import own_arenas
from xinference_xavier.bench.engines import wait_ended, wait_until
from xinference_xavier.demo.leftovers import SHARED, files_of, holders, still_there

GONE_S = 40.0
"""Within so long a dead replica is gone: the heartbeat limit of 10 s, on a busy machine."""

ENDED_S = 240.0
"""Within so long its processes have ended: a worker of vLLM whose engine was killed takes down a
whole interpreter, which takes long on a busy machine."""


class Victim:
    """The processes of a replica and their memory; ``rank`` is the one that made its arenas."""

    def __init__(self, processes: Sequence[psutil.Process], rank: psutil.Process) -> None:
        self._processes = processes
        self._arenas = own_arenas(rank.pid)
        self._shared = files_of((process.pid for process in processes), SHARED)
        assert self._arenas

    def mapped_by(self) -> set[int]:
        """Return the processes of the host that have its arenas."""
        return set(holders(self._arenas))

    def assert_gone(self) -> None:
        """Nothing runs any more, nobody maps its memory, and no segment has a name."""
        running = [title(process) for process in wait_ended(self._processes, ENDED_S)]
        assert not running, running
        with suppress(TimeoutError):
            wait_until(lambda: not self.mapped_by(), "nobody maps its arenas", GONE_S)
        left = holders(self._arenas)
        assert not left, left
        wait_until(lambda: not still_there(self._shared), "no segment has a name", GONE_S)


def title(process: psutil.Process) -> str:
    """Return a process's command line, or the title that it gave itself."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
