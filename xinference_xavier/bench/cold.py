# SPDX-License-Identifier: Apache-2.0
"""What a request pays that gains nothing: cold prefill with the connector, against plain vLLM.

Two engines live side by side, bound to the same core; one request is in flight. Every pair is one
prompt that nobody has seen, answered by both, in alternating order. The connector looks it up,
finds nothing, and saves all of its blocks while the prefill runs. Both engines rest before each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench.engines import BLOCK_TOKENS, running, running_directory
from xinference_xavier.bench.models import QWEN_KV, Shape, make_random_llama
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.sharing import make_engine, rest, settle
from xinference_xavier.bench.stats import at_most, percentile, ratio_interval

LIMIT: Final = 1.02
"""Target: a cold prefill takes at most this many times as long as plain vLLM's."""

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
    """Measure; keys ``plain`` and ``xavier`` with TTFTs in seconds, ``ratio``, ``verdict``."""
    folder = settings.folder
    model = make_random_llama(folder / "model", settings.shape)
    with running_directory(folder / "directory.log") as directory:
        plain, xavier = (
            make_engine(
                name,
                model=model,
                folder=folder,
                core=settings.core,
                longest=settings.tokens + ANSWER,
                extra=extra,
            )
            for name, extra in (("plain", None), ("xavier", _options(settings, directory)))
        )
        report.say("starting two engines")
        times: dict[str, list[float]] = {"plain": [], "xavier": []}
        with running([plain, xavier]), report.steps("cold pairs", settings.pairs + 1) as step:
            for number in range(settings.pairs + 1):
                prompt = unique_text(number, settings.tokens)
                for engine in (plain, xavier) if number % 2 else (xavier, plain):
                    rest([plain, xavier])
                    answer = engine.stream(prompt, ANSWER)
                    if answer.ttft_s is None or answer.cached_tokens:
                        raise RuntimeError(
                            f"{engine.name}: {answer.cached_tokens} of the tokens of a prompt "
                            f"that nobody has seen are cached:\n{engine.tail()}"
                        )
                    times[engine.name].append(answer.ttft_s)
                    status = settle(directory, 1)["xavier"]
                step.done()
    return _result(settings, times, status)


def _options(settings: Settings, directory: str) -> dict[str, object]:
    return {
        "xavier_gpu_cache_bytes": settings.gpu_cache_bytes,
        "xavier_cpu_cache_bytes": settings.cpu_cache_bytes,
        "xavier_directory": directory,
        "xavier_member": "xavier",
    }


def _result(
    settings: Settings, times: dict[str, list[float]], status: dict[str, Any]
) -> dict[str, Any]:
    # The first pair pays what happens once: memory that is touched for the first time.
    first = {name: values[0] for name, values in times.items()}
    rest = {name: values[1:] for name, values in times.items()}
    ratio = ratio_interval(rest["xavier"], rest["plain"])
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
        "slower_beyond_noise": ratio.low > 1.0,
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
    ratio = result["ratio"]
    if ratio["low"] is not None:
        report.note(
            f"xavier / plain: {ratio['middle']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, "
            f"95 %, {ratio['pairs']} pairs); at most {LIMIT}: {result['verdict']}. "
            f"{result['saved_blocks']} of {result['savable_blocks']} blocks were saved."
        )
