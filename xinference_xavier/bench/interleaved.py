# SPDX-License-Identifier: Apache-2.0
"""Prompts that nobody has seen arrive one after another while other answers are being written.

Nobody gains anything from sharing here: this is what it costs an engine that is busy. The time
between two prompts follows from how long a prompt takes alone, measured first, so that the machine
is busy and not drowned; what share of the time to first token was spent waiting to be computed is
reported, from plain vLLM's own metrics. The answers that are being written go on until the last
prompt is answered.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

from xinference_xavier.bench import paired
from xinference_xavier.bench.arms import Arm, ArmSettings, Replicas, make_arm
from xinference_xavier.bench.engines import EngineError
from xinference_xavier.bench.load import (
    Ask,
    Reply,
    Server,
    connected,
    ongoing,
    run_apart,
    staggered,
)
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import percentile

ARMS: Final = ("plain", "xavier", "builtin", "lmcache")
KEYS: Final = ("ttft_p50_s", "ttft_p95_s", "tokens_per_s", "gap_p99_s")

ANSWER: Final = 16
ONGOING_PROMPT: Final = 64
ONGOING_ANSWER: Final = 4096
"""Tokens; far more than come until the last prompt is answered."""

STAGGER: Final = 1.5
"""Time between two prompts, in times that one takes alone: the rest is for writing the answers."""

QUEUEING_LIMIT: Final = 0.5
"""Above this share of the time to first token, the machine is drowned."""

CALIBRATIONS: Final = 5

_TTFT: Final = "vllm:time_to_first_token_seconds_sum"
_PREFILL: Final = "vllm:request_prefill_time_seconds_sum"


@dataclass(frozen=True, slots=True)
class Settings:
    """Per round, ``prompts`` of ``tokens`` tokens arrive while ``streams`` answers are written."""

    folder: Path
    core: int
    arms: tuple[str, ...] = ("plain", "xavier")
    streams: int = 4
    prompts: int = 8
    tokens: int = 512
    rounds: int = 12
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    shape: Shape = QWEN_KV


@dataclass(frozen=True, slots=True)
class Round:
    """What is asked in one round."""

    streams: list[Ask]
    prompts: list[Ask]


def workload(settings: Settings, number: int) -> Round:
    """Return round ``number``, no prompt of which is in another."""
    each = settings.streams + settings.prompts
    first = CALIBRATIONS + number * each
    streams, prompts = settings.streams, settings.prompts
    return Round(
        [Ask(unique_text(first + n, ONGOING_PROMPT), ONGOING_ANSWER) for n in range(streams)],
        [Ask(unique_text(first + streams + n, settings.tokens), ANSWER) for n in range(prompts)],
    )


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``arms`` has the figures of each (see :func:`paired.judged`).

    ``failed`` says why an arm is not among them. Raises
    :class:`~xinference_xavier.bench.arms.ArmUnavailable` before anything starts, and
    :class:`~xinference_xavier.bench.engines.EngineError` where no arm could be measured.
    """
    arms = {name: make_arm(name) for name in settings.arms}
    for wanted in arms.values():
        wanted.check()
    fixed = asdict(settings)
    for name in ("folder", "arms"):
        del fixed[name]
    record = Record(resume, fixed)
    # Kept with the arms: all of them are measured with the same.
    alone_s = record.arm("one prompt alone", partial(_alone_s, settings, report))
    stagger_s = STAGGER * alone_s
    measured, failed = record.arms(
        {name: partial(_measure, settings, arm, stagger_s, report) for name, arm in arms.items()}
    )
    if not measured:
        raise EngineError("\n".join(failed.values()))
    return {
        "tokens": settings.tokens,
        "alone_s": alone_s,
        "stagger_s": stagger_s,
        "queueing_share": queueing_share([found["rounds"]["plain"] for found in measured.values()]),
        "arms": {
            name: paired.judged(found["rounds"], KEYS) | {"counters": found["counters"]}
            for name, found in measured.items()
        },
        "failed": failed,
        "notes": [f"{name}: {arm.note}." for name, arm in arms.items() if arm.note],
    }


def queueing_share(plain: Sequence[Sequence[dict[str, Any]]]) -> float | None:
    """Return what share of the time to first token plain engines did not spend computing it.

    None where nothing came. That is more than vLLM calls queueing, which begins only when the
    engine, after the step that it is in, takes note of a request.
    """
    rounds = [each for rounds in plain for each in rounds[1:]]
    ttft = sum(each["engine_ttft_s"] for each in rounds)
    prefill = sum(each["engine_prefill_s"] for each in rounds)
    return (ttft - prefill) / ttft if ttft > 0 else None


def _arm_settings(settings: Settings) -> ArmSettings:
    return ArmSettings(
        make_random_llama(settings.folder / "model", settings.shape),
        settings.folder,
        settings.core,
        max(settings.tokens + ANSWER, ONGOING_PROMPT + ONGOING_ANSWER),
        replicas=1,
        gpu_cache_bytes=settings.gpu_cache_bytes,
        cpu_cache_bytes=settings.cpu_cache_bytes,
    )


def _alone_s(settings: Settings, report: Report) -> float:
    """Return how long the first token of a prompt takes when nothing else is asked."""
    report.say("measuring one prompt alone")
    with make_arm("plain").start(_arm_settings(settings)) as replicas:
        times = []
        for seed in range(CALIBRATIONS):
            replicas.settle()
            answer = replicas.engines[0].stream(unique_text(seed, settings.tokens), 1)
            assert answer.ttft_s is not None
            times.append(answer.ttft_s)
    return statistics.median(times[1:])


def _measure(settings: Settings, arm: Arm, stagger_s: float, report: Report) -> dict[str, Any]:
    report.say(f"starting the engines of {arm.name}")

    def measure(number: int, replicas: Replicas) -> dict[str, Any]:
        asked = workload(settings, number)
        return run_apart(settings.core, load(replicas.urls[0], asked, stagger_s))

    with paired.beside_plain(arm, _arm_settings(settings)) as contest:
        rounds = contest.rounds(settings.rounds, measure, report)
        contest.settle()
        return {"rounds": rounds, "counters": contest.own.describe()}


async def load(url: str, asked: Round, stagger_s: float) -> dict[str, Any]:
    """Return one round's figures, of the time between the first prompt and the last answer."""
    async with connected(url) as server, ongoing(server, asked.streams) as streams:
        before = await _engine_seconds(server)
        since = asyncio.get_running_loop().time()
        replies = await staggered(server, asked.prompts, stagger_s)
        until = asyncio.get_running_loop().time()
        after = await _engine_seconds(server)
    return {
        **figures(streams, replies, since, until),
        "engine_ttft_s": after[_TTFT] - before[_TTFT],
        "engine_prefill_s": after[_PREFILL] - before[_PREFILL],
    }


async def _engine_seconds(server: Server) -> dict[str, float]:
    """Return two sums that vLLM keeps over its requests, in seconds."""
    sums = dict.fromkeys((_TTFT, _PREFILL), 0.0)
    for family in text_string_to_metric_families(await server.fetch("/metrics")):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return sums


def figures(
    streams: Sequence[Reply], replies: Sequence[Reply], since: float, until: float
) -> dict[str, Any]:
    """Return a round's figures, from the answers being written and those to the prompts."""
    every = [*streams, *replies]
    errors = [reply.error for reply in every if reply.error is not None]
    found: dict[str, Any] = {"requests": len(every), "errors": errors}
    if errors:
        return found
    ttft_s = [reply.ttft_s for reply in replies]
    gaps_s = [gap for stream in streams for gap in stream.gaps_s(since, until)]
    return found | {
        "ttft_s": ttft_s,
        "ttft_p50_s": percentile(ttft_s, 0.5),
        "ttft_p95_s": percentile(ttft_s, 0.95),
        "tokens_per_s": sum(reply.tokens(since, until) for reply in every) / (until - since),
        "gap_p99_s": percentile(gaps_s, 0.99),
    }


def show(result: dict[str, Any], report: Report) -> None:
    """Print the tables."""
    title = f"Prompts of {result['tokens']} tokens, while other answers are written"
    paired.show(result["arms"], title, KEYS, report)
    share = result["queueing_share"]
    if share is not None:
        drowned = share >= QUEUEING_LIMIT
        report.note(
            f"A prompt alone took {result['alone_s']:.3g} s; one came every "
            f"{result['stagger_s']:.3g} s. With plain vLLM {share:.0%} of the time to first token "
            f"were waiting{': this machine drowned, do not believe the figures' * drowned}."
        )
    report.failures(result["failed"])
    for note in result["notes"]:
        report.note(note)


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the times to first token, sorted, one line per arm."""
    paired.plot_ttft(result["arms"], folder / "interleaved-ttft.png", "prompt")
