# SPDX-License-Identifier: Apache-2.0
"""What a prefix costs: computed, found in the engine's own cache, or loaded from a replica.

For each way of sharing, three engines live side by side, bound to the same core; one request is in
flight. The first replica computes a prefix and shares it, the second one loads it, and ``control``
is plain vLLM. Every pair is one prefix that nobody has seen. ``control`` answers a first question
cold, and a second one from its own cache; the second replica answers the second one with the loaded
prefix, so that both compute the same tail; their answers must be equal. It answers a third one from
its own cache. The order of the first two alternates, and all engines rest before each request. The
first pair pays for connections and first touches of memory and is reported apart.

Ways of sharing do not fit into memory together: they run one after another, each with engines, a
control and a local hit of its own, and what is compared is what a load costs above that hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.arms import Arm, ArmSettings, Replicas, make_arm
from xinference_xavier.bench.engines import BLOCK_TOKENS, Completion, Engine
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.sharing import ELEMENT_BYTES, rest
from xinference_xavier.bench.warm_result import Pair, judged

LOCAL: Final = ("cold", "local")
SHARING: Final = ("xavier", "builtin", "lmcache", "nixl")
ARMS: Final = (*LOCAL, *SHARING)

QUESTIONS: Final = (
    "What was it, in short?  ",
    "How long did that take? ",
    "Is all of that known?   ",
)
"""All of one length, and different from their first letter on, hence the same tail to compute."""

HAND_OFF_QUESTIONS: Final = tuple(question[0] for question in QUESTIONS)
"""A replica that is handed a whole prompt computes its last token only, so that is the tail."""

ANSWER: Final = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """``tokens`` are lengths of prefixes; ``pairs`` are measured after one that is not."""

    folder: Path
    core: int
    arms: tuple[str, ...] = ARMS
    tokens: tuple[int, ...] = (1100, 4400)
    pairs: int = 10
    transport: str = "auto"
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    shape: Shape = QWEN_KV

    def prefixes(self, chunk_tokens: int) -> list[int]:
        """Return the lengths in whole chunks, at least one."""
        return [max(count // chunk_tokens, 1) * chunk_tokens for count in self.tokens]


class _Group:
    """The control and at most one way of sharing."""

    def __init__(self, control: Engine, arm: Arm | None, replicas: Replicas | None) -> None:
        self._control = control
        self._arm = arm
        self._replicas = replicas
        self._made = 0

    def pair(self, tokens: int) -> Pair:
        """Measure one prefix of ``tokens`` tokens that nobody has seen."""
        self._made += 1
        prefix = unique_text(self._made, tokens)
        hand_off = self._arm is not None and self._arm.hand_off
        questions = HAND_OFF_QUESTIONS if hand_off else QUESTIONS
        first, second, third = (prefix + question for question in questions)
        cold = self._ask(self._control, first)
        if self._replicas is None:
            return Pair(tokens, cold, self._ask(self._control, second))
        more = self._replicas.publish(prefix, questions[1])
        reader = self._replicas.engines[1]
        if self._made % 2:
            local = self._ask(self._control, second)
            remote = self._ask(reader, second, more)
        else:
            remote = self._ask(reader, second, more)
            local = self._ask(self._control, second)
        own_local = self._ask(reader, third)
        return Pair(tokens, cold, local, remote, own_local)

    def counters(self) -> dict[str, dict[str, Any]]:
        """Return what the replicas count."""
        return {} if self._replicas is None else self._replicas.describe()

    def _ask(
        self, engine: Engine, prompt: str, more: Mapping[str, Any] | None = None
    ) -> Completion:
        if self._replicas is not None:
            self._replicas.settle()
        rest([self._control])
        return engine.stream(prompt, ANSWER, **(more or {}))


def run(settings: Settings, report: Report, resume: Path | None = None) -> dict[str, Any]:
    """Measure; ``lengths`` has one entry per prefix length, with one entry per arm in ``arms``.

    ``failed`` says why a way of sharing is not among them. Raises
    :class:`~xinference_xavier.bench.arms.ArmUnavailable` before anything starts.
    """
    sharing = {name: make_arm(name) for name in settings.arms if name not in LOCAL}
    for wanted in sharing.values():
        wanted.check()
    chunk = max([BLOCK_TOKENS, *(arm.chunk_tokens for arm in sharing.values())])
    lengths = settings.prefixes(chunk)
    record = Record(resume, _fixed(settings, lengths))
    measured, failed = record.arms(
        {name: partial(_measure, settings, lengths, arm, report) for name, arm in sharing.items()}
    )
    if not measured:
        alone = partial(_measure, settings, lengths, None, report)
        measured = {"local": record.arm("local", alone)}
    token_bytes = settings.shape.token_bytes(ELEMENT_BYTES)
    return {
        "lengths": [
            judged(
                settings.arms,
                {name: _pairs(found["pairs"][number]) for name, found in measured.items()},
                {name: found["counters"][number] for name, found in measured.items()},
                token_bytes,
            )
            for number in range(len(lengths))
        ],
        "failed": failed,
        "notes": [f"{name}: {arm.note}." for name, arm in sharing.items() if arm.note],
    }


def _fixed(settings: Settings, lengths: list[int]) -> dict[str, Any]:
    """Return what must be equal for arms of different runs to be compared."""
    return {
        "core": settings.core,
        "tokens": lengths,
        "pairs": settings.pairs,
        "transport": settings.transport,
        "gpu_cache_bytes": settings.gpu_cache_bytes,
        "cpu_cache_bytes": settings.cpu_cache_bytes,
        "shape": asdict(settings.shape),
    }


def _measure(
    settings: Settings, lengths: list[int], arm: Arm | None, report: Report
) -> dict[str, Any]:
    """Return the pairs of each length, and the counters after it, as JSON can hold them."""
    pairs, counters = [], []
    title = arm.name if arm else "local"
    report.say(f"starting the engines of {title}")
    with _running(settings, max(lengths), arm) as group:
        for tokens in lengths:
            found = []
            with report.steps(f"{title}, {tokens} tokens", settings.pairs + 1) as step:
                for _ in range(settings.pairs + 1):
                    found.append(asdict(group.pair(tokens)))
                    step.done()
            pairs.append(found)
            counters.append(group.counters())
    return {"pairs": pairs, "counters": counters}


@contextmanager
def _running(settings: Settings, longest: int, arm: Arm | None) -> Iterator[_Group]:
    model = make_random_llama(settings.folder / "model", settings.shape)
    shared = ArmSettings(
        model,
        settings.folder,
        settings.core,
        longest + len(QUESTIONS[0]) + ANSWER,
        gpu_cache_bytes=settings.gpu_cache_bytes,
        cpu_cache_bytes=settings.cpu_cache_bytes,
        xavier_options={
            "xavier_transport": settings.transport,
            # What is measured is the load, also where computing would be quicker.
            "xavier_min_load_tokens": 0,
        },
    )
    with ExitStack() as running:
        plain = running.enter_context(make_arm("plain").start(shared.alone()))
        replicas = running.enter_context(arm.start(shared)) if arm else None
        yield _Group(plain.engines[0], arm, replicas)


def _pairs(found: list[dict[str, Any]]) -> list[Pair]:
    return [
        Pair(
            pair["prefix_tokens"],
            Completion(**pair["cold"]),
            Completion(**pair["local"]),
            Completion(**pair["remote"]) if pair["remote"] else None,
            Completion(**pair["own_local"]) if pair["own_local"] else None,
        )
        for pair in found
    ]
