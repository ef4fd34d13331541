# SPDX-License-Identifier: Apache-2.0
"""The replicas of a soak: started, killed and restarted while others serve."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import psutil

from xinference_xavier.bench.engines import START_S, Engine, EngineError, wait_ended

TITLES: Final = {"VLLM::EngineCore": "engine", "VLLM::Worker": "worker"}
"""How vLLM calls the processes of an engine's scheduler and of its worker, and how we do."""

ENDED_S: Final = 60.0
"""Within so many seconds after a kill, all processes of the replica have ended."""


@dataclass(slots=True)
class Incarnation:
    """One engine from its start to its end. ``ending`` is set before it is killed or stopped."""

    number: int
    engine: Engine
    started: float = field(default_factory=time.monotonic)
    ending: threading.Event = field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        """Whether its server has ended, as it does when its engine is dead."""
        popen = self.engine.process
        return popen is None or popen.poll() is not None

    def roles(self) -> dict[str, psutil.Process]:
        """Return its running processes by role: server, engine, helper."""
        popen = self.engine.process
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.Error):
            if popen is not None:
                found["server"] = psutil.Process(popen.pid)
            for child in self.engine.processes():
                title = " ".join(child.cmdline())
                role = next((TITLES[name] for name in TITLES if title.startswith(name)), "helper")
                found[role] = child
        return found


@dataclass(slots=True)
class _Kill:
    role: str
    at: float
    processes: list[psutil.Process]


class Replica:
    """A replica under one name, whatever becomes of its engines.

    One thread, which outlives the engines, calls all methods: the kernel ends an engine with the
    thread that started it. :attr:`serving` may be read by others.
    """

    def __init__(self, name: str, make: Callable[[int], Engine]) -> None:
        """``make`` makes the engine of an incarnation, which is counted from 1."""
        self.name = name
        self.kills: list[str] = []
        """Roles of the processes that were killed."""
        self.faults: list[str] = []
        """What went wrong with its ends and starts."""
        self.serving: Incarnation | None = None
        """The incarnation that takes requests, if there is one."""
        self._make = make
        self._count = 0
        self._starting: Incarnation | None = None
        self._killed: _Kill | None = None

    def start(self) -> None:
        """Start an engine; :meth:`go_on` lets it serve when it is ready."""
        self._count += 1
        self._starting = Incarnation(self._count, self._make(self._count))
        self._starting.engine.start()

    def kill(self, chance: random.Random) -> bool:
        """Kill its server, engine or worker with SIGKILL; False when it does not serve now."""
        incarnation = self.serving
        if incarnation is None:
            return False
        roles = incarnation.roles()
        role = chance.choice(["server", *TITLES.values()])
        if role not in roles:
            return False
        incarnation.ending.set()
        self.serving = None
        self._killed = _Kill(role, time.monotonic(), [*roles.values()])
        self.kills.append(role)
        roles[role].kill()
        return True

    def go_on(self) -> None:
        """Do what is due between an end and the next incarnation; never waits for long."""
        killed, starting, serving = self._killed, self._starting, self.serving
        if serving is not None and serving.ended:
            self.faults.append(f"{self.name} ended by itself:\n{serving.engine.tail()}")
            serving.ending.set()
            self.serving = None
            serving.engine.stop()
            self.start()
        elif killed is not None:
            left = wait_ended(killed.processes, 0.0)
            if left and time.monotonic() < killed.at + ENDED_S:
                return
            self._killed = None
            for process in left:
                self.faults.append(f"{self.name}: {process} survived a killed {killed.role}")
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.start()
        elif starting is not None:
            try:
                if starting.engine.ready():
                    self.serving, self._starting = starting, None
                elif time.monotonic() > starting.started + START_S:
                    raise EngineError(f"{self.name} does not answer:\n{starting.engine.tail()}")
            except EngineError as error:
                self.faults.append(str(error))
                starting.engine.stop()
                self._starting = None

    @property
    def in_transition(self) -> bool:
        """Whether it is being replaced or started."""
        return self._killed is not None or self._starting is not None

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the engine that serves."""
        return [] if self.serving is None else [*self.serving.roles().values()]

    def stop(self) -> None:
        """End its engine, whatever its state."""
        for incarnation in (self.serving, self._starting):
            if incarnation is not None:
                incarnation.ending.set()
                incarnation.engine.stop()
