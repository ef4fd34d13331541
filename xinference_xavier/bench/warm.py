# SPDX-License-Identifier: Apache-2.0
"""What a prefix costs: computed, found in the engine's own cache, or loaded from a replica.

Three engines live side by side, bound to the same core; one request is in flight. ``source``
computes a prefix and shares it, ``reader`` loads it, ``control`` is plain vLLM. Every pair is one
prefix that nobody has seen. ``control`` answers a first question cold, and a second one from its
own cache; ``reader`` answers the second one with the loaded prefix, so that both compute the same
tail; their answers must be equal. The order of the two alternates, and all engines rest before each
request. The first pair pays for connections and first touches of memory and is reported apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Completion,
    Engine,
    describe,
    running,
    running_directory,
    wait_until,
)
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.sharing import ELEMENT_BYTES, make_engine, rest, settle
from xinference_xavier.bench.stats import Interval, Verdict, at_most, mean_interval, percentile

ARMS: Final = ("cold", "local", "xavier")

FLOOR_MB_PER_S: Final = 500.0
"""Target: a load is at least this fast, end to end, over shared memory."""

LOGPROB_LIMIT: Final = 1e-3

QUESTIONS: Final = (
    "What was it, in short?  ",
    "How long did that take? ",
    "Is all of that known?   ",
)
"""All of one length, and different from their first letter on, hence the same tail to compute."""

ANSWER: Final = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """``tokens`` are lengths of prefixes; ``pairs`` are measured after one that is not."""

    folder: Path
    core: int
    arms: tuple[str, ...] = ARMS
    tokens: tuple[int, ...] = (1100, 2200)
    pairs: int = 10
    transport: str = "auto"
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    shape: Shape = QWEN_KV


@dataclass(slots=True)
class _Pair:
    """The answers for one prefix; an arm that was not asked for is None."""

    prefix_tokens: int
    cold: Completion
    local: Completion
    remote: Completion | None = None
    own_local: Completion | None = None


@dataclass(slots=True)
class _Group:
    """The engines, and what is needed to ask them."""

    control: Engine
    directory: str
    source: Engine | None = None
    reader: Engine | None = None
    made: int = field(default=0)

    def pair(self, tokens: int) -> _Pair:
        """Measure one prefix of ``tokens`` tokens that nobody has seen."""
        self.made += 1
        prefix = unique_text(self.made, tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        first, second, third = (prefix + question for question in QUESTIONS)
        cold = self._ask(self.control, first)
        if self.source is None or self.reader is None:
            return _Pair(len(prefix), cold, self._ask(self.control, second))
        self._share(self.source, prefix)
        if self.made % 2:
            local = self._ask(self.control, second)
            remote = self._ask(self.reader, second)
        else:
            remote = self._ask(self.reader, second)
            local = self._ask(self.control, second)
        own_local = self._ask(self.reader, third)
        settle(self.directory, 2)
        return _Pair(len(prefix), cold, local, remote, own_local)

    def engines(self) -> list[Engine]:
        """Return all engines of the group."""
        return [engine for engine in (self.control, self.source, self.reader) if engine]

    def _ask(self, engine: Engine, prompt: str) -> Completion:
        rest(self.engines())
        return engine.stream(prompt, ANSWER)

    def _share(self, source: Engine, prefix: str) -> None:
        """Let ``source`` compute a prefix, and ``reader`` hear of all its blocks."""
        before = self._known()
        source.complete(prefix, max_tokens=1)
        blocks = len(prefix) // BLOCK_TOKENS
        wait_until(
            lambda: self._known() >= before + blocks, f"the reader knows {blocks} more blocks", 60
        )
        settle(self.directory, 2)

    def _known(self) -> int:
        return int(describe(self.directory)["reader"]["control"]["mirror_blocks"])


def run(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure; ``lengths`` has one entry per prefix length, with one entry per arm in ``arms``."""
    folder = settings.folder
    model = make_random_llama(folder / "model", settings.shape)
    longest = max(settings.tokens) + len(QUESTIONS[0]) + ANSWER
    with running_directory(folder / "directory.log") as directory:

        def engine(name: str, extra: dict[str, object] | None) -> Engine:
            return make_engine(
                name, model=model, folder=folder, core=settings.core, longest=longest, extra=extra
            )

        group = _Group(engine("control", None), directory)
        if "xavier" in settings.arms:
            group.source = engine("source", _options(settings, directory, "source"))
            group.reader = engine("reader", _options(settings, directory, "reader"))
        report.say(f"starting {len(group.engines())} engines")
        lengths = []
        with running(group.engines()):
            for tokens in settings.tokens:
                with report.steps(f"pairs of {tokens} tokens", settings.pairs + 1) as step:
                    pairs = []
                    for _ in range(settings.pairs + 1):
                        pairs.append(group.pair(tokens))
                        step.done()
                status = describe(directory)["reader"] if group.reader else None
                lengths.append(_judged(settings, pairs, status))
    return {"lengths": lengths}


def _options(settings: Settings, directory: str, member: str) -> dict[str, object]:
    return {
        "xavier_gpu_cache_bytes": settings.gpu_cache_bytes,
        "xavier_cpu_cache_bytes": settings.cpu_cache_bytes,
        "xavier_transport": settings.transport,
        "xavier_directory": directory,
        "xavier_member": member,
        # What is measured is the load, also where computing would be quicker.
        "xavier_min_load_tokens": 0,
    }


def _judged(
    settings: Settings, pairs: Sequence[_Pair], status: dict[str, Any] | None
) -> dict[str, Any]:
    arms = {
        "cold": _arm([pair.cold for pair in pairs]),
        "local": _arm([pair.local for pair in pairs])
        | {"full_hits": sum(_full_hit(pair, pair.local) for pair in pairs[1:])},
    }
    if status is not None:
        arms["xavier"] = _xavier(pairs, settings.shape.token_bytes(ELEMENT_BYTES), status)
    return {
        "tokens": pairs[0].prefix_tokens,
        "pairs": len(pairs) - 1,
        "arms": {name: arm for name, arm in arms.items() if name in settings.arms},
        "another_prefix_differs": all(
            not same_answer(one.local, other.local) for one, other in itertools.pairwise(pairs)
        ),
    }


def _arm(answers: Sequence[Completion]) -> dict[str, Any]:
    first, *rest = (_ttft(answer) for answer in answers)
    return {
        "ttft_p50_s": percentile(rest, 0.5),
        "ttft_p95_s": percentile(rest, 0.95),
        "first_ttft_s": first,
        "ttft_s": rest,
    }


def _xavier(pairs: Sequence[_Pair], token_bytes: int, status: dict[str, Any]) -> dict[str, Any]:
    complete = [(p, p.remote, p.own_local) for p in pairs if p.remote and p.own_local]
    arm = _arm([remote for _, remote, _ in complete])
    arm["own_local_ttft_p50_s"] = percentile([_ttft(own) for _, _, own in complete[1:]], 0.5)
    hits = [
        (pair, remote)
        for pair, remote, _ in complete[1:]
        if _full_hit(pair, remote) and _full_hit(pair, pair.local)
    ]
    load = mean_interval([_ttft(r) - _ttft(p.local) for p, r in hits]) if hits else None
    nbytes = pairs[0].prefix_tokens * token_bytes
    source = status["sources"].get("source", {})
    return arm | {
        "full_hits": len(hits),
        "loaded_bytes": nbytes,
        "load_s": load.to_dict() if load else None,
        "load_mb_per_s": megabytes_per_s(nbytes, load.middle) if load else None,
        "floor_mb_per_s": FLOOR_MB_PER_S,
        "verdict": floor_verdict(nbytes, load) if load else Verdict.NOT_RESOLVED,
        "outputs_equal": bool(hits) and all(same_answer(r, p.local) for p, r in hits),
        "transport": source.get("transport"),
        "copy_mb_per_s": megabytes_per_s(source.get("nbytes", 0), source.get("seconds", 0.0)),
        "missed": status["traffic"]["lookups_missed"],
        "loads_failed": status["traffic"]["loads_failed"],
    }


def _full_hit(pair: _Pair, answer: Completion) -> bool:
    return answer.cached_tokens == pair.prefix_tokens


def _ttft(answer: Completion) -> float:
    if answer.ttft_s is None:
        raise RuntimeError("a streamed answer has no token")
    return answer.ttft_s


def same_answer(one: Completion, other: Completion) -> bool:
    """Whether token ids are equal and log probabilities within :data:`LOGPROB_LIMIT`."""
    return one.token_ids == other.token_ids and all(
        abs(a - b) <= LOGPROB_LIMIT for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def megabytes_per_s(nbytes: int, seconds: float) -> float | None:
    """Return the rate in 10^6 bytes per second; None where no time was lost at all."""
    return nbytes / seconds / 1e6 if seconds > 0 else None


def floor_verdict(nbytes: int, load: Interval) -> Verdict:
    """Judge the time of a load, which must be at most what the floor takes for its bytes."""
    return at_most(load, nbytes / FLOOR_MB_PER_S / 1e6)


def show(result: dict[str, Any], report: Report) -> None:
    """Print a table per prefix length."""
    for length in result["lengths"]:
        rows = [
            {"arm": name}
            | {key: arm[key] for key in ("ttft_p50_s", "ttft_p95_s", "first_ttft_s")}
            | {key: arm.get(key) for key in ("load_mb_per_s", "outputs_equal", "full_hits")}
            for name, arm in length["arms"].items()
        ]
        title = f"Time to first token with a prefix of {length['tokens']} tokens"
        report.table(f"{title}, {length['pairs']} pairs", rows)
        xavier = length["arms"].get("xavier")
        if xavier is not None:
            _show_load(xavier, length, report)


def _show_load(xavier: dict[str, Any], length: dict[str, Any], report: Report) -> None:
    load = xavier["load_s"]
    if load is None or load["low"] is None:
        report.note(f"Too few full hits to judge; misses: {xavier['missed'] or 'none'}.")
        return
    report.note(
        f"{xavier['loaded_bytes'] / 1e6:.1f} MB over {xavier['transport']} cost "
        f"{load['middle'] * 1e3:.1f} ms more than the local hit ({load['low'] * 1e3:.1f} to "
        f"{load['high'] * 1e3:.1f}, 95 %); {FLOOR_MB_PER_S:.0f} MB/s or more: "
        f"{xavier['verdict']}. Another prefix gives another answer: "
        f"{'yes' if length['another_prefix_differs'] else 'NO'}."
    )
