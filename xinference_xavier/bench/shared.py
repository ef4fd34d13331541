# SPDX-License-Identifier: Apache-2.0
"""The workload that people have: questions about a few documents, at replicas chosen at random.

One request is in flight. A question goes to a replica drawn with a seed, so that every arm gets the
same ones; without sharing each replica computes each document once. Every round has documents that
nobody has seen. Arms run one after another, each with fresh engines bound to the same core, and
are compared by the paired totals of their rounds.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench import plots
from xinference_xavier.bench.arms import Arm, ArmSettings, Replicas, make_arm
from xinference_xavier.bench.engines import EngineError
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import percentile, ratio_interval

ARMS: Final = ("plain", "xavier", "builtin", "lmcache")

QUESTION: Final = 24
ANSWER: Final = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """``tokens`` per document; ``rounds`` are measured, after one that is not."""

    folder: Path
    core: int
    arms: tuple[str, ...] = ("plain", "xavier")
    documents: int = 4
    questions: int = 40
    tokens: int = 2048
    rounds: int = 3
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    shape: Shape = QWEN_KV


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the number of the replica that is."""

    replica: int
    prompt: str


def workload(settings: Settings, number: int, replicas: int) -> list[Question]:
    """Return round ``number``'s questions, each document's equally often, in random order."""
    choice = random.Random(number)
    first = number * settings.documents
    documents = [
        unique_text(seed, settings.tokens) for seed in range(first, first + settings.documents)
    ]
    asked = [documents[index % len(documents)] for index in range(settings.questions)]
    choice.shuffle(asked)
    return [
        Question(choice.randrange(replicas), document + unique_text(index, QUESTION))
        for index, document in enumerate(asked)
    ]


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``arms`` has the figures of each, with ``vs_plain`` where plain was measured.

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
    measured, failed = record.arms(
        {name: partial(_measure, settings, arm, report) for name, arm in arms.items()}
    )
    if not measured:
        raise EngineError("\n".join(failed.values()))
    return {
        "arms": figures(measured),
        "failed": failed,
        "notes": [f"{name}: {arm.note}." for name, arm in arms.items() if arm.note],
    }


def figures(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of each arm, from its rounds; the first round is apart."""
    plain = measured.get("plain")
    found: dict[str, Any] = {}
    for name, (_, *rounds) in measured.items():
        ttft = [value for each in rounds for value in each["ttft_s"]]
        found[name] = {
            "total_s": sum(each["total_s"] for each in rounds) / len(rounds),
            "ttft_p50_s": percentile(ttft, 0.5),
            "ttft_p95_s": percentile(ttft, 0.95),
            "prefill_tokens": sum(each["prefill_tokens"] for each in rounds) / len(rounds),
            "rounds": rounds,
        }
        if plain is not None and name != "plain":
            mine = [each["total_s"] for each in rounds]
            theirs = [each["total_s"] for each in plain[1:]]
            answers = [
                one == other
                for each, reference in zip(rounds, plain[1:], strict=True)
                for one, other in zip(each["answers"], reference["answers"], strict=True)
            ]
            found[name] |= {
                "vs_plain": ratio_interval(mine, theirs).to_dict(),
                "answers_equal": sum(answers),
                "answers": len(answers),
            }
    return found


def _measure(settings: Settings, arm: Arm, report: Report) -> list[dict[str, Any]]:
    shared = ArmSettings(
        make_random_llama(settings.folder / "model", settings.shape),
        settings.folder,
        settings.core,
        settings.tokens + QUESTION + ANSWER,
        gpu_cache_bytes=settings.gpu_cache_bytes,
        cpu_cache_bytes=settings.cpu_cache_bytes,
    )
    report.say(f"starting the engines of {arm.name}")
    rounds = []
    with (
        arm.start(shared) as replicas,
        report.steps(f"{arm.name}, rounds", settings.rounds + 1) as step,
    ):
        for number in range(settings.rounds + 1):
            replicas.settle()
            rounds.append(_round(settings, number, replicas))
            step.done()
    return rounds


def _round(settings: Settings, number: int, replicas: Replicas) -> dict[str, Any]:
    questions = workload(settings, number, len(replicas.engines))
    started = time.monotonic()
    answers = [
        replicas.engines[question.replica].stream(question.prompt, ANSWER) for question in questions
    ]
    total = time.monotonic() - started
    return {
        "total_s": total,
        "ttft_s": [answer.ttft_s for answer in answers],
        "prefill_tokens": sum(
            len(question.prompt) - answer.cached_tokens
            for question, answer in zip(questions, answers, strict=True)
        ),
        "answers": [answer.token_ids for answer in answers],
    }


def show(result: dict[str, Any], report: Report) -> None:
    """Print the table."""
    keys = ("total_s", "ttft_p50_s", "ttft_p95_s", "prefill_tokens")
    arms = result["arms"]
    report.table(
        "Questions about shared documents, per round",
        [{"arm": name} | {key: arm[key] for key in keys} for name, arm in arms.items()],
    )
    for name, arm in arms.items():
        ratio = arm.get("vs_plain")
        if ratio is not None and ratio["low"] is not None:
            report.note(
                f"{name} / plain, total time: {ratio['middle']:.3f} ({ratio['low']:.3f} to "
                f"{ratio['high']:.3f}, 95 %, {ratio['pairs']} rounds); {arm['answers_equal']} of "
                f"{arm['answers']} answers are plain vLLM's."
            )
    report.failures(result["failed"])
    for note in result["notes"]:
        report.note(note)


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the times to first token, sorted, one line per arm."""
    arms = result["arms"]
    sorted_s = {
        name: sorted(value for each in arm["rounds"] for value in each["ttft_s"])
        for name, arm in arms.items()
    }
    count = len(next(iter(sorted_s.values())))
    plots.lines(
        folder / "shared-ttft.png",
        "Time to first token of every question, sorted",
        ("question", [float(number + 1) for number in range(count)]),
        "seconds",
        sorted_s,
    )
