# SPDX-License-Identifier: Apache-2.0
"""What a request pays that gains nothing: cold prefill with the connector, against plain vLLM.

Three engines live side by side, bound to the same core; one request is in flight. Every pair is one
prompt that nobody has seen, answered by all, in rotating order. The connector looks it up, finds
nothing, and saves all of its blocks while the prefill runs. All engines rest before each. The third
one, ``control``, is plain vLLM again: what it differs from ``plain`` by is the noise.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.arms import ArmSettings, make_arm
from xinference_xavier.bench.engines import BLOCK_TOKENS
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.sharing import rest
from xinference_xavier.bench.stats import at_most, percentile, ratio_interval

LIMIT: Final = 1.02
"""Target: a cold prefill takes at most this many times as long as plain vLLM's."""

ARMS: Final = ("plain", "control", "xavier")

ANSWER: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """``tokens`` per prompt; ``pairs`` are measured after one that is not."""

    folder: Path
    core: int
    tokens: int = 2200
    pairs: int = 12
    gpu_cache_bytes: str = "256MiB"
    cpu_cache_bytes: str = "1GiB"
    shape: Shape = QWEN_KV


def run(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure; keys ``arms`` with TTFTs in seconds, ``ratio``, ``verdict``, ``noise_ratio``."""
    shared = ArmSettings(
        make_random_llama(settings.folder / "model", settings.shape),
        settings.folder,
        settings.core,
        settings.tokens + ANSWER,
        gpu_cache_bytes=settings.gpu_cache_bytes,
        cpu_cache_bytes=settings.cpu_cache_bytes,
    )
    report.say("starting three engines")
    with ExitStack() as running:
        both = running.enter_context(make_arm("plain").start(shared))
        ours = running.enter_context(make_arm("xavier").start(shared.alone()))
        engines = dict(zip(ARMS, (*both.engines, *ours.engines), strict=True))
        times: dict[str, list[float]] = {name: [] for name in ARMS}
        with report.steps("cold pairs", settings.pairs + 1) as step:
            for number in range(settings.pairs + 1):
                prompt = unique_text(number, settings.tokens)
                for name in _order(number):
                    rest(list(engines.values()))
                    answer = engines[name].stream(prompt, ANSWER)
                    if answer.ttft_s is None or answer.cached_tokens:
                        raise RuntimeError(
                            f"{name}: {answer.cached_tokens} of the tokens of a prompt "
                            f"that nobody has seen are cached:\n{engines[name].tail()}"
                        )
                    times[name].append(answer.ttft_s)
                    ours.settle()
                step.done()
        (status,) = ours.describe().values()
    return _result(settings, times, status)


def _order(number: int) -> list[str]:
    """Return the arms, each first, second and last equally often, in both directions."""
    turn = number % len(ARMS)
    order = [*ARMS[turn:], *ARMS[:turn]]
    return order if number // len(ARMS) % 2 else order[::-1]


def _result(
    settings: Settings, times: dict[str, list[float]], status: dict[str, Any]
) -> dict[str, Any]:
    # The first pair pays what happens once: memory that is touched for the first time.
    first = {name: values[0] for name, values in times.items()}
    rest = {name: values[1:] for name, values in times.items()}
    ratio = ratio_interval(rest["xavier"], rest["plain"])
    noise = ratio_interval(rest["control"], rest["plain"])
    arms: dict[str, Any] = {
        name: {
            "ttft_p50_s": percentile(values, 0.5),
            "ttft_p95_s": percentile(values, 0.95),
            "tokens_per_s": settings.tokens / percentile(values, 0.5),
            "first_ttft_s": first[name],
            "ttft_s": values,
        }
        for name, values in rest.items()
    }
    blocks = settings.tokens // BLOCK_TOKENS
    return {
        "tokens": settings.tokens,
        "arms": arms,
        "ratio": ratio.to_dict(),
        "limit": LIMIT,
        "verdict": at_most(ratio, LIMIT),
        "slower_beyond_noise": ratio.low > max(1.0, noise.high),
        "noise_ratio": noise.to_dict(),
        "saved_blocks": status["traffic"]["saved_blocks"],
        "savable_blocks": blocks * (settings.pairs + 1),
        "demotions": status["store"]["totals"]["demotions"],
    }


def show(result: dict[str, Any], report: Report) -> None:
    """Print the table."""
    rows = [
        {"arm": name}
        | {key: arm[key] for key in ("ttft_p50_s", "ttft_p95_s", "first_ttft_s", "tokens_per_s")}
        for name, arm in result["arms"].items()
    ]
    report.table(f"Cold prefill of {result['tokens']} tokens", rows)
    ratio, noise = result["ratio"], result["noise_ratio"]
    if ratio["low"] is not None:
        report.note(
            f"xavier / plain: {ratio['middle']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, "
            f"95 %, {ratio['pairs']} pairs); at most {LIMIT}: {result['verdict']}. "
            f"{result['saved_blocks']} of {result['savable_blocks']} blocks were saved. "
            f"Plain against plain: {noise['middle']:.3f} ({noise['low']:.3f} to "
            f"{noise['high']:.3f})."
        )
