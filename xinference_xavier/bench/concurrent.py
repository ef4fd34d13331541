# SPDX-License-Identifier: Apache-2.0
"""Many requests at once whose prefixes are known: to the engine itself, or to another replica.

In each round a replica computes and shares prefixes that nobody has seen, and then another one
gets requests that begin with them, so many at a time. Plain vLLM beside it has computed the
prefixes itself: it answers from its own cache, which is the limit. "xavier-cpu" has so small a
device tier that its blocks come from the host tier. Before the load, the first answers are got
one by one, of which token ids must be equal in all arms.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench import paired
from xinference_xavier.bench.arms import Arm, ArmSettings, Replicas, make_arm
from xinference_xavier.bench.engines import BLOCK_TOKENS, EngineError
from xinference_xavier.bench.load import Ask, Reply, closed_loop, connected, run_apart
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.sharing import ELEMENT_BYTES
from xinference_xavier.bench.stats import percentile

HOST_TIER: Final = "xavier-cpu"
ARMS: Final = ("plain", "xavier", HOST_TIER, "builtin", "lmcache")
KEYS: Final = ("ttft_p50_s", "ttft_p95_s", "tpot_p95_s", "tokens_per_s")

PREFIXES: Final = 12
QUESTION: Final = 24
ANSWER: Final = 32

DEVICE_BLOCKS: Final = 42
"""What 8 MiB hold of Qwen2.5-0.5B in bfloat16."""

SPARE_BLOCKS: Final = 512
"""More than the host tier keeps for copies under way."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Per round, ``requests`` times ``concurrency`` requests; ``tokens`` per prefix."""

    folder: Path
    core: int
    arms: tuple[str, ...] = ("plain", "xavier", HOST_TIER)
    concurrency: tuple[int, ...] = (16, 32)
    tokens: int = 512
    rounds: int = 10
    requests: int = 3
    gpu_cache_bytes: str = "256MiB"
    shape: Shape = QWEN_KV

    @property
    def block_bytes(self) -> int:
        """Bytes of KV cache per block."""
        return BLOCK_TOKENS * self.shape.token_bytes(ELEMENT_BYTES)

    @property
    def host_blocks(self) -> int:
        """Blocks of the host tier: no prefix may go before its round has ended."""
        per_round = PREFIXES * (self.tokens // BLOCK_TOKENS + 1)
        return (self.rounds + 2) * per_round + SPARE_BLOCKS


@dataclass(frozen=True, slots=True)
class Round:
    """What is shared in one round, and what is asked then."""

    prefixes: list[str]
    asks: list[Ask]


def workload(settings: Settings, number: int, concurrency: int) -> Round:
    """Return round ``number``; its prefixes are in no other, and asked about equally often."""
    first = number * PREFIXES
    prefixes = [unique_text(first + n, settings.tokens) for n in range(PREFIXES)]
    asks = [
        Ask(prefixes[n % PREFIXES] + unique_text(n, QUESTION), ANSWER)
        for n in range(settings.requests * concurrency)
    ]
    random.Random(number).shuffle(asks)
    return Round(prefixes, asks)


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``levels`` has one entry per concurrency, whose ``arms`` has the figures of each.

    ``failed`` says why an arm is not among them. Raises
    :class:`~xinference_xavier.bench.arms.ArmUnavailable` before anything starts, and
    :class:`~xinference_xavier.bench.engines.EngineError` where no arm could be measured.
    """
    arms = {name: make_arm(arm_of(name)) for name in settings.arms}
    for wanted in arms.values():
        wanted.check()
    fixed = asdict(settings)
    for name in ("folder", "arms", "concurrency"):
        del fixed[name]
    record = Record(resume, fixed)
    measured, failed = record.arms(
        {
            _title(name, concurrency): partial(_measure, settings, name, arm, concurrency, report)
            for concurrency in settings.concurrency
            for name, arm in arms.items()
        }
    )
    if not measured:
        raise EngineError("\n".join(failed.values()))
    levels = []
    for concurrency in settings.concurrency:
        titles = {name: _title(name, concurrency) for name in arms}
        at_level = {name: measured[title] for name, title in titles.items() if title in measured}
        if at_level:
            levels.append({"concurrency": concurrency, "arms": judged(at_level)})
    return {
        "tokens": settings.tokens,
        "levels": levels,
        "failed": failed,
        "notes": [f"{name}: {arm.note}." for name, arm in arms.items() if arm.note],
    }


def _title(name: str, concurrency: int) -> str:
    return f"{name}, {concurrency} at once"


def arm_of(name: str) -> str:
    """Return the arm that ``name`` is with other settings, or is."""
    return "xavier" if name == HOST_TIER else name


def judged(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each arm's figures (see :func:`paired.judged`), and whether its answers are right.

    ``first_answers_equal`` compares with the plain engine beside the first arm; the arms that ran
    later had another, which must agree with it too.
    """
    reference = next(iter(measured.values()))["first"]["plain"]
    found = {}
    for name, arm in measured.items():
        own, plain = arm["rounds"]["own"], arm["rounds"]["plain"]
        pairs = [
            (one, other)
            for mine, theirs in zip(own[1:], plain[1:], strict=True)
            for one, other in zip(mine.get("answers", ()), theirs.get("answers", ()), strict=False)
        ]
        found[name] = paired.judged(arm["rounds"], KEYS) | {
            "full_hits": sum(each.get("full_hits", 0) for each in own[1:]),
            "plain_full_hits": sum(each.get("full_hits", 0) for each in plain[1:]),
            "answers": len(pairs),
            "answers_equal": sum(one == other for one, other in pairs),
            "first_answers_equal": arm["first"]["own"] == arm["first"]["plain"] == reference,
            "counters": arm["counters"],
        }
    return found


def _measure(
    settings: Settings, name: str, arm: Arm, concurrency: int, report: Report
) -> dict[str, Any]:
    report.say(f"starting the engines of {_title(name, concurrency)}")
    model = make_random_llama(settings.folder / "model", settings.shape)
    with paired.beside_plain(arm, _arm_settings(settings, model, name)) as contest:

        def measure(number: int, replicas: Replicas) -> dict[str, Any]:
            asked = workload(settings, number, concurrency)
            replicas.share(asked.prefixes)
            return run_apart(
                settings.core, load(replicas.urls[-1], asked, concurrency, settings.tokens)
            )

        # A round of its own, before all others.
        asked = workload(settings, settings.rounds + 1, concurrency)
        first = {
            side: _first_answers(replicas, asked)
            for side, replicas in (("plain", contest.plain), ("own", contest.own))
        }
        rounds = contest.rounds(settings.rounds, measure, report)
        contest.settle()
        return {"rounds": rounds, "first": first, "counters": contest.own.describe()}


def _arm_settings(settings: Settings, model: Path, name: str) -> ArmSettings:
    shared = ArmSettings(
        model,
        settings.folder,
        settings.core,
        settings.tokens + QUESTION + ANSWER,
        replicas=1 if name == "plain" else 2,
        gpu_cache_bytes=settings.gpu_cache_bytes,
        cpu_cache_bytes=str(settings.host_blocks * settings.block_bytes),
        # What is measured is the load, also where computing would be quicker.
        xavier_options={"xavier_min_load_tokens": 0},
    )
    if name == HOST_TIER:
        return replace(shared, gpu_cache_bytes=str(DEVICE_BLOCKS * settings.block_bytes))
    return shared


def _first_answers(replicas: Replicas, asked: Round) -> list[list[int]]:
    """Return the token ids of one answer per prefix, one request in flight."""
    replicas.share(asked.prefixes)
    reader = replicas.engines[-1]
    answers = []
    for prefix in asked.prefixes:
        replicas.settle()
        answers.append(reader.stream(prefix + unique_text(0, QUESTION), ANSWER).token_ids)
    return answers


async def load(url: str, asked: Round, concurrency: int, prefix_tokens: int) -> dict[str, Any]:
    """Return one round's figures, of the time between the first request and the last answer."""
    async with connected(url) as server:
        return figures(await closed_loop(server, asked.asks, concurrency), prefix_tokens)


def figures(replies: list[Reply], prefix_tokens: int) -> dict[str, Any]:
    """Return a round's figures; ``full_hits`` counts requests whose whole prefix was known."""
    errors = [reply.error for reply in replies if reply.error is not None]
    found: dict[str, Any] = {"requests": len(replies), "errors": errors}
    if errors:
        return found
    since = min(reply.sent for reply in replies)
    until = max(reply.times[-1] for reply in replies)
    ttft_s = [reply.ttft_s for reply in replies]
    return found | {
        "ttft_s": ttft_s,
        "ttft_p50_s": percentile(ttft_s, 0.5),
        "ttft_p95_s": percentile(ttft_s, 0.95),
        "tpot_p95_s": percentile([reply.tpot_s for reply in replies], 0.95),
        "tokens_per_s": sum(reply.tokens(since, until) for reply in replies) / (until - since),
        "full_hits": sum(reply.cached_tokens >= prefix_tokens for reply in replies),
        # Only ever compared with each other, and there are thousands of tokens.
        "answers": [zlib.crc32(str(reply.token_ids).encode()) for reply in replies],
    }


def show(result: dict[str, Any], report: Report) -> None:
    """Print the tables of each concurrency."""
    for level in result["levels"]:
        arms = level["arms"]
        title = f"{level['concurrency']} requests at once, prefixes of {result['tokens']} tokens"
        paired.show(arms, title, KEYS, report)
        for name, arm in arms.items():
            equal = "equal" if arm["first_answers_equal"] else "NOT EQUAL"
            report.note(
                f"{name}: first answers {equal}; under load {arm['answers_equal']} of "
                f"{arm['answers']} answers are plain vLLM's; {arm['full_hits']} found their "
                f"whole prefix, {arm['plain_full_hits']} of plain vLLM in its own cache."
            )
    report.failures(result["failed"])
    for note in result["notes"]:
        report.note(note)


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the times to first token of each concurrency, sorted, one line per arm."""
    for level in result["levels"]:
        file = folder / f"concurrent-{level['concurrency']}-ttft.png"
        paired.plot_ttft(level["arms"], file, "request")
