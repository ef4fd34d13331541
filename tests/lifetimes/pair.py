# SPDX-License-Identifier: Apache-2.0
"""Two replicas with few KV blocks and a control without the connector, and loads for all three."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.models import TOKEN_BYTES, make_tiny_llama
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Engine,
    describe,
    running,
    running_directory,
    wait_idle,
    wait_until,
)
from xinference_xavier.demo.answers import Answer, compare
from xinference_xavier.soak import client

BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
KV_BLOCKS: Final = 100
MAX_MODEL_LEN: Final = 1024
OPTIONS: Final = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": 96 * BLOCK_BYTES,
    "xavier_cpu_cache_bytes": 2048 * BLOCK_BYTES,
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 5,
}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Config:
    """How the engines of a pair schedule."""

    arguments: tuple[str, ...] = ()
    kv_blocks: int = KV_BLOCKS


@dataclass(frozen=True, slots=True)
class Pair:
    """``replicas`` share; ``control`` has no connector."""

    replicas: tuple[Engine, Engine]
    control: Engine
    directory: str

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return the status of both replicas, by name."""
        names = {engine.name for engine in self.replicas}
        return {name: found for name, found in describe(self.directory).items() if name in names}

    def total(self, *path: str) -> int:
        """Return a number of the status, or the sum of a table of numbers, over both replicas."""
        found = 0
        for status in self.statuses().values():
            value: Any = functools.reduce(operator.getitem, path, status)
            found += sum(value.values()) if isinstance(value, Mapping) else value
        return found

    def fill(self, documents: Sequence[str]) -> None:
        """Let the left replica compute documents, and the right one hear of what it stored.

        That may not be all: the end of a long prompt finds no pins in so small a pool.
        """
        left, right = (engine.name for engine in self.replicas)
        before = self.statuses()
        for document in documents:
            client.answer(self.replicas[0].port, client.greedy(document, 1))
        wait_idle(self.directory, len(self.replicas))
        stored = self.statuses()[left]["traffic"]["saved_blocks"]
        new = stored - before[left]["traffic"]["saved_blocks"]
        known = before[right]["control"]["mirror_blocks"] + new
        wait_until(
            lambda: self.statuses()[right]["control"]["mirror_blocks"] >= known,
            f"{right} knows {new} more blocks",
        )

    def check_idle(self) -> None:
        """Wait until nothing is in use; the bookkeeping is right in both, and nothing failed."""
        wait_idle(self.directory, len(self.replicas), timeout_s=60)
        for name, status in self.statuses().items():
            assert status["hook_failures"] == {}, name
            assert status["traffic"]["errors"] == {}, name
            assert status["traffic"]["loads_failed"] == {}, name


@contextmanager
def running_pair(folder: Path, config: Config) -> Iterator[Pair]:
    """Run a pair with its directory."""
    with running_directory(folder / "directory.log") as directory:
        model = make_tiny_llama(folder / "model")
        left, right, control = (
            made(name, model, folder, core, config, replica_options(directory, name))
            for core, name in ((0, "left"), (1, "right"), (0, "control"))
        )
        control.extra = None
        with running([left, right, control]):
            yield Pair((left, right), control, directory)


def replica_options(directory: str, name: str) -> dict[str, Any]:
    """Return the connector's options of a replica."""
    return {**OPTIONS, "xavier_directory": directory, "xavier_member": name}


def made(
    name: str, model: Path, folder: Path, core: int, config: Config, extra: dict[str, Any] | None
) -> Engine:
    """Return an engine that was not started."""
    return Engine(
        name,
        model,
        folder / f"{name}.log",
        core,
        extra=extra,
        kv_blocks=config.kv_blocks,
        max_model_len=MAX_MODEL_LEN,
        arguments=list(config.arguments),
    )


def answers(engines: Sequence[Engine], bodies: Sequence[Body], *, clients: int) -> list[Answer]:
    """Let so many clients ask, in turn of the engines; return the answers in order."""
    with ThreadPoolExecutor(clients) as pool:
        return list(
            pool.map(
                lambda numbered: client.answer(
                    engines[numbered[0] % len(engines)].port, numbered[1]
                ),
                enumerate(bodies),
            )
        )


def check_answers(pair: Pair, bodies: Sequence[Body], *, clients: int) -> None:
    """Ask the replicas under load: no more answers differ than of the control under that load.

    Both are compared with what the control answers at rest.
    """
    expected = answers([pair.control], bodies, clients=1)
    control = differences(answers([pair.control], bodies, clients=clients), expected)
    found = differences(answers(pair.replicas, bodies, clients=clients), expected)
    assert len(found) <= len(control), found


def differences(found: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """Say which answers are not the expected ones."""
    comparisons = [compare(one, other) for one, other in zip(found, expected, strict=True)]
    return [
        f"answer {number}: {comparison.difference}"
        for number, comparison in enumerate(comparisons)
        if not comparison.equal
    ]


def leave_in_storm(
    pair: Pair, bodies: Sequence[Body], *, chance: random.Random, clients: int, longest_s: float
) -> None:
    """Ask the replicas, and leave each request at another moment of its life.

    A third goes before the first chunk, at random within ``longest_s``; the others after some.
    """
    leaving = [
        (chance.choice([0, 0, 1, 2, 5, 9]), chance.uniform(0, longest_s), body) for body in bodies
    ]

    def leave(numbered: tuple[int, tuple[int, float, Body]]) -> None:
        number, (chunks, wait_s, body) = numbered
        engine = pair.replicas[number % len(pair.replicas)]
        client.leave(engine.port, body, after_chunks=chunks, wait_s=wait_s)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(leave, enumerate(leaving)))
