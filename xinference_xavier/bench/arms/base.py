# SPDX-License-Identifier: Apache-2.0
"""What a measurement may ask of an arm: some replicas of one model, sharing in the arm's way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from xinference_xavier.bench.engines import BLOCK_TOKENS, Engine, running
from xinference_xavier.bench.sharing import make_engine, rest


class ArmUnavailable(Exception):
    """An arm's software is not installed; ``str()`` says what to install."""


@dataclass(frozen=True, slots=True)
class ArmSettings:
    """What all arms of one measurement have in common.

    ``core`` is the CPU that the model threads of all engines are bound to, ``longest`` the tokens
    of the longest prompt with its answer. ``xavier_options`` are options of our connector beyond
    the budgets; ``arguments`` go to every engine's command line.
    """

    model: Path
    folder: Path
    core: int
    longest: int
    replicas: int = 2
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    xavier_options: Mapping[str, object] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def engine(self, name: str, extra: Mapping[str, object] | None = None) -> Engine:
        """Return an engine that is not running; ``extra`` are options of our connector."""
        made = make_engine(
            name,
            model=self.model,
            folder=self.folder,
            core=self.core,
            longest=self.longest,
            extra=extra,
        )
        made.arguments += self.arguments
        return made

    def alone(self) -> ArmSettings:
        """Return the same for a single replica, as controls are."""
        return replace(self, replicas=1)


class Replicas:
    """Running engines of one arm; the first one computes what the others are to load."""

    def __init__(self, engines: Sequence[Engine], helpers: Sequence[int] = ()) -> None:
        """The engines are started and ended by the arm, and so are the processes ``helpers``."""
        self.engines = tuple(engines)
        self._helpers = tuple(helpers)

    @property
    def urls(self) -> list[str]:
        """Return the base URLs of the engines' OpenAI interfaces."""
        return [f"http://127.0.0.1:{engine.port}" for engine in self.engines]

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the arm, for their CPU time and memory."""
        found = []
        for engine in self.engines:
            if engine.process is not None:
                found += [psutil.Process(engine.process.pid), *engine.processes()]
        for pid in self._helpers:
            helper = psutil.Process(pid)
            found += [helper, *helper.children(recursive=True)]
        return found

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the arm's own counters by replica; nothing where it has none to read."""
        return {}

    def settle(self) -> None:
        """Wait until nothing that an earlier request caused goes on."""
        rest(self.engines, helpers=self._helpers)

    def publish(self, prefix: str, question: str) -> dict[str, Any]:
        """Let the first replica compute ``prefix``, and wait until the others can load it.

        ``question`` follows the prefix in the prompt that will load it. Returns what the request
        of that prompt must carry.
        """
        self.share([prefix])
        return {}

    def share(self, prefixes: Sequence[str]) -> None:
        """Let the first replica compute ``prefixes``, and wait until the others can load them."""
        for prefix in prefixes:
            self.engines[0].complete(prefix, max_tokens=1)
        self.settle()


class Arm(Protocol):
    """One way of sharing. All arms have the same engines, bound to the same core."""

    @property
    def name(self) -> str:
        """What it is chosen by."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Only whole chunks of so many tokens are shared."""
        ...

    @property
    def hand_off(self) -> bool:
        """Whether a replica hands over a whole prompt, of which only its last token is computed."""
        ...

    @property
    def note(self) -> str | None:
        """What a reader of the figures must know of this arm."""
        ...

    def check(self) -> None:
        """Raise :class:`ArmUnavailable` where its software is missing; starts nothing."""
        ...

    def start(self, settings: ArmSettings) -> AbstractContextManager[Replicas]:
        """Start ``settings.replicas`` engines, each warm; end them at exit.

        Raises :class:`~xinference_xavier.bench.engines.EngineError` when one does not start.
        """
        ...


class PlainArm:
    """vLLM as it is: each replica has only its own prefix cache."""

    name = "plain"
    chunk_tokens = BLOCK_TOKENS
    hand_off = False
    note = None

    def check(self) -> None:
        """vLLM is what all arms run on."""

    @contextmanager
    def start(self, settings: ArmSettings) -> Iterator[Replicas]:
        """See :class:`Arm`."""
        engines = [settings.engine(f"plain-{number}") for number in range(settings.replicas)]
        with running(engines):
            yield Replicas(engines)
