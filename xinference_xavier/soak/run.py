# SPDX-License-Identifier: Apache-2.0
"""One soak from its engines' start to its verdict."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.engines import (
    Engine,
    EngineError,
    audit,
    describe,
    free_port,
    running,
    running_directory,
    wait_ended,
    wait_idle,
)
from xinference_xavier.bench.models import TINY, make_random_llama
from xinference_xavier.bench.report import machine
from xinference_xavier.demo.answers import Answer
from xinference_xavier.soak import client, judge, watch
from xinference_xavier.soak.replicas import Replica
from xinference_xavier.soak.traffic import Outcomes, Traffic
from xinference_xavier.soak.watch import Sample
from xinference_xavier.soak.workload import Workload, sample

KV_BLOCKS: Final = 160
"""vLLM's own blocks: fewer than the clients' requests need together, so that some are preempted."""

CLIENTS: Final = 6
KILL_EVERY_S: Final = 90.0
"""Mean time between two kills."""

SAMPLE_EVERY_S: Final = 5.0
TICK_S: Final = 0.5
CONTROL_ROUNDS: Final = 4
"""How often the control answers the sample under load, to be compared with itself."""

DRAIN_S: Final = 60.0
ENDED_S: Final = 10.0
TIERS: Final = 2
"""Arenas of one replica."""

OPTIONS: Final = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "4MiB",
    "xavier_cpu_cache_bytes": "8MiB",
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 2,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be chosen."""

    minutes: float
    replicas: int
    seed: int


@dataclass(slots=True)
class Record:
    """What a soak has found so far."""

    samples: list[Sample] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)
    control: Outcomes = field(default_factory=Outcomes)
    interrupted: bool = False


Progress = Callable[[str], None]
"""Shows a line that replaces the one before."""


def run(settings: Settings, folder: Path, progress: Progress) -> dict[str, Any]:
    """Run a soak with its model and logs in ``folder``; return what was found, for JSON.

    ``problems`` is empty if all is as it should be. A KeyboardInterrupt ends the traffic early.
    Raises :class:`EngineError` when the engines do not start.
    """
    where = machine()
    progress("making the model")
    model = make_random_llama(folder / "model", TINY, seed=settings.seed)
    cores = sorted(os.sched_getaffinity(0))
    record = Record()

    def engine(
        number: int, log: str, extra: dict[str, Any] | None = None, port: int | None = None
    ) -> Engine:
        return Engine(
            log,
            model,
            folder / f"{log}.log",
            cores[number % len(cores)],
            extra=extra,
            kv_blocks=KV_BLOCKS,
            environment={"PYTHONHASHSEED": "0"},
            port=port or free_port(),
        )

    progress("the control starts")
    control = engine(0, "control")
    with running([control]):
        expected = _control(control, sample(settings.seed), record.control)

    with running_directory(folder / "directory.log") as directory:

        def replica(number: int) -> Replica:
            name, port = f"replica-{number}", free_port()
            extra = {**OPTIONS, "xavier_directory": directory, "xavier_member": name}
            return Replica(name, lambda count: engine(number, f"{name}-{count}", extra, port))

        replicas = [replica(number) for number in range(settings.replicas)]
        try:
            progress("the replicas start")
            for one in replicas:
                one.start()
            _settle(replicas)
            if faults := [fault for one in replicas for fault in one.faults]:
                raise EngineError(faults[0])
            wait_idle(directory, len(replicas))  # by then all are in the directory
            limits = [status["store"]["limits"] for status in describe(directory).values()]
            workload = Workload(settings.seed, sum(map(sum, limits)))
            traffic = Traffic(
                replicas,
                workload,
                expected,
                record.outcomes,
                seed=settings.seed,
                clients=CLIENTS,
            )
            _soak(settings, replicas, directory, record, progress)
            progress("the last replicas come back, and everything is drained")
            problems = _drained(traffic, replicas, directory)
            processes = [p for one in replicas for p in one.processes()]
        finally:
            for one in replicas:
                one.stop()
    problems += [f"{process} survived the end" for process in wait_ended(processes, ENDED_S)]
    return _result(settings, where, replicas, workload, record, problems)


def _control(control: Engine, bodies: Sequence[dict[str, Any]], outcomes: Outcomes) -> list[Answer]:
    """Return the control's answers at rest, and compare with them what it answers under load."""
    expected = [client.answer(control.port, body) for body in bodies]
    work = [number for _ in range(CONTROL_ROUNDS) for number in range(len(bodies))]
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = pool.map(lambda number: client.answer(control.port, bodies[number]), work)
        for number, answer in zip(work, found, strict=True):
            outcomes.judge("control", answer, expected[number])
    return expected


def _soak(
    settings: Settings,
    replicas: Sequence[Replica],
    directory: str,
    record: Record,
    progress: Progress,
) -> None:
    """Watch the traffic, and kill replicas but the first until the time is over."""
    chance = random.Random(settings.seed)
    started = time.monotonic()
    end = started + 60 * settings.minutes
    sampling, killing = started, started + chance.expovariate(1 / KILL_EVERY_S)
    try:
        while (now := time.monotonic()) < end:
            for one in replicas:
                one.go_on()
            if now >= sampling:
                sampling = now + SAMPLE_EVERY_S
                record.samples.append(watch.take(now - started, replicas, directory))
                progress(_line(record, replicas, end - now))
            # One at a time, and none that would not be back: the others' requests need somebody.
            if now >= killing and not any(one.in_transition for one in replicas):
                chance.choice(replicas[1:]).kill(chance)
                killing = now + chance.expovariate(1 / KILL_EVERY_S)
            time.sleep(TICK_S)
    except KeyboardInterrupt:
        record.interrupted = True


def _settle(replicas: Sequence[Replica]) -> None:
    """Wait until no replica is being replaced or started."""
    while any(one.in_transition for one in replicas):
        for one in replicas:
            one.go_on()
        time.sleep(TICK_S)


def _drained(traffic: Traffic, replicas: Sequence[Replica], directory: str) -> list[str]:
    """End the traffic, let everything come to rest, and say what is not as it should be."""
    problems = []
    if not traffic.stop(DRAIN_S):
        problems.append(f"requests are still out {DRAIN_S:g} s after the last one")
    _settle(replicas)
    most_arenas = TIERS * len(replicas)
    until = time.monotonic() + DRAIN_S
    while True:
        left = judge.undrained(audit(directory), len(replicas))
        if (count := watch.arenas(replicas)) > most_arenas:
            left.append(f"{count} arenas are mapped, of {len(replicas)} replicas with {TIERS} each")
        if not left or time.monotonic() > until:
            break
        time.sleep(TICK_S)
    final = watch.take(0.0, replicas, directory)
    return problems + left + judge.unaccounted(final.stores)


def _line(record: Record, replicas: Sequence[Replica], left_s: float) -> str:
    """Return one line on how it goes."""
    last = record.samples[-1]
    counts = record.outcomes.to_dict()
    prompt = sum(store.prompt_tokens for store in last.stores.values())
    hit = sum(store.hit_tokens for store in last.stores.values())
    return (
        f"{left_s / 60:.1f} min left; {sum(one.serving is not None for one in replicas)} of "
        f"{len(replicas)} replicas serve, {sum(len(one.kills) for one in replicas)} kills; "
        f"{counts['answered']:,} answered, {counts['left']:,} left, {counts['lost']} lost, "
        f"{counts['failed']} failed, {counts['different']} of {counts['compared']} different; "
        f"hits {100 * hit / prompt if prompt else 0:.0f} %; "
        f"leases {sum(store.leases for store in last.stores.values())}"
    )


def _result(
    settings: Settings,
    where: dict[str, object],
    replicas: Sequence[Replica],
    workload: Workload,
    record: Record,
    problems: list[str],
) -> dict[str, Any]:
    outcomes, control = record.outcomes.to_dict(), record.control.to_dict()
    developed = judge.growths(record.samples)
    kills = {one.name: one.kills for one in replicas}
    problems = [
        *problems,
        *(fault for one in replicas for fault in one.faults),
        *judge.wrong_requests(outcomes, control),
        *judge.growing(developed),
        *judge.caught(record.samples),
        *judge.unproven(record.samples, developed),
    ]
    return {
        "ok": not problems,
        "problems": problems,
        "interrupted": record.interrupted,
        "settings": asdict(settings),
        "machine": where,
        "documents": len(workload.documents),
        "requests": outcomes,
        "control": control,
        "kills": kills,
        "growth": [item.to_dict() for item in developed],
        "allowed_growth": dict(judge.ALLOWED),
        "samples": [one.to_dict() for one in record.samples],
    }
