# SPDX-License-Identifier: Apache-2.0
"""What follows from the answers that ``bench warm`` got. Pure functions, a table and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench import plots
from xinference_xavier.bench.engines import Completion
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import (
    Interval,
    Verdict,
    at_most,
    mean_interval,
    percentile,
    ratio_of_means,
)

FLOOR_MB_PER_S: Final = 500.0
"""Target: a load of ours is at least this fast, end to end, over shared memory."""

LIMITS: Final = {"builtin": 0.1, "lmcache": 1.0}
"""Targets: what a load of ours costs above a local hit, at most, as a share of another's cost."""

LOGPROB_LIMIT: Final = 1e-3


@dataclass(slots=True)
class Pair:
    """The answers for one prefix; an arm that was not asked for is None."""

    prefix_tokens: int
    cold: Completion
    local: Completion
    remote: Completion | None = None
    own_local: Completion | None = None


def judged(
    arms: Sequence[str],
    measured: Mapping[str, Sequence[Pair]],
    counters: Mapping[str, Mapping[str, Any]],
    token_bytes: int,
) -> dict[str, Any]:
    """Return one length's figures for ``arms``, from each group's pairs and counters.

    ``cold`` and ``local`` are the first group's; every way of sharing has its own beside them.
    """
    first = next(iter(measured.values()))
    found: dict[str, Any] = {
        "cold": _arm([pair.cold for pair in first]),
        "local": _arm([pair.local for pair in first])
        | {"full_hits": sum(_full_hit(pair, pair.local) for pair in first[1:])},
    }
    for name, pairs in measured.items():
        if pairs[0].remote is None:
            continue
        found[name] = _sharing(pairs, token_bytes)
        if name == "xavier":
            found[name] |= _ours(found[name], counters[name])
    every = [pair.local for pairs in measured.values() for pair in pairs]
    return {
        "tokens": first[0].prefix_tokens,
        "pairs": len(first) - 1,
        "arms": {name: arm for name, arm in found.items() if name in arms},
        "comparisons": _comparisons(found),
        # Each group has the same prefixes: neighbours in it are different ones.
        "another_prefix_differs": all(
            not same_answer(one.local, other.local)
            for pairs in measured.values()
            for one, other in itertools.pairwise(pairs)
        )
        and len(every) > 1,
    }


def _arm(answers: Sequence[Completion]) -> dict[str, Any]:
    first, *rest = (_ttft(answer) for answer in answers)
    return {
        "ttft_p50_s": percentile(rest, 0.5),
        "ttft_p95_s": percentile(rest, 0.95),
        "first_ttft_s": first,
        "ttft_s": rest,
    }


def _sharing(pairs: Sequence[Pair], token_bytes: int) -> dict[str, Any]:
    complete = [(p, p.remote, p.own_local) for p in pairs if p.remote and p.own_local]
    arm = _arm([remote for _, remote, _ in complete])
    arm["cold_ttft_p50_s"] = percentile([_ttft(pair.cold) for pair, _, _ in complete[1:]], 0.5)
    arm["local_ttft_p50_s"] = percentile([_ttft(pair.local) for pair, _, _ in complete[1:]], 0.5)
    arm["own_local_ttft_p50_s"] = percentile([_ttft(own) for _, _, own in complete[1:]], 0.5)
    hits = [
        (pair, remote, own)
        for pair, remote, own in complete[1:]
        if _full_hit(pair, remote) and _full_hit(pair, pair.local)
    ]
    above = [_ttft(remote) - _ttft(pair.local) for pair, remote, _ in hits]
    above_own = [_ttft(remote) - _ttft(own) for pair, remote, own in hits if _full_hit(pair, own)]
    load = mean_interval(above) if above else None
    nbytes = pairs[0].prefix_tokens * token_bytes
    return arm | {
        "full_hits": len(hits),
        "loaded_bytes": nbytes,
        "load_s": load.to_dict() if load else None,
        "above_local_s": above,
        "above_own_local_s": above_own,
        "load_mb_per_s": megabytes_per_s(nbytes, load.middle) if load else None,
        "outputs_equal": bool(hits) and all(same_answer(r, p.local) for p, r, _ in hits),
    }


def _ours(arm: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what our replicas tell beyond that, of the one that loaded."""
    source_name, reader_name = sorted(counters)[:2]
    reader = counters[reader_name]
    source = reader["sources"].get(source_name, {})
    above = arm["above_local_s"]
    return {
        "floor_mb_per_s": FLOOR_MB_PER_S,
        "verdict": floor_verdict(arm["loaded_bytes"], mean_interval(above))
        if above
        else Verdict.NOT_RESOLVED,
        "transport": source.get("transport"),
        "copy_mb_per_s": megabytes_per_s(source.get("nbytes", 0), source.get("seconds", 0.0)),
        "missed": reader["traffic"]["lookups_missed"],
        "loads_failed": reader["traffic"]["loads_failed"],
    }


def _comparisons(arms: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare what a load costs above a local hit: of plain vLLM, and of the arm's own engine."""
    if "xavier" not in arms:
        return []
    rows = []
    for name, other in arms.items():
        if name == "xavier" or "above_local_s" not in other:
            continue
        for above in ("above_local_s", "above_own_local_s"):
            ours, theirs = arms["xavier"][above], other[above]
            ratio = ratio_of_means(ours, theirs) if ours and theirs else None
            limit = LIMITS.get(name)
            rows.append(
                {
                    "than": name,
                    "of": above,
                    "ratio": ratio.to_dict() if ratio else None,
                    "limit": limit,
                    "verdict": None
                    if limit is None
                    else (at_most(ratio, limit) if ratio else Verdict.NOT_RESOLVED),
                }
            )
    return rows


def _full_hit(pair: Pair, answer: Completion) -> bool:
    """Whether the whole prefix was found; a hand-off may count its last token with it."""
    return answer.cached_tokens >= pair.prefix_tokens


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
            | {
                key: arm.get(key)
                for key in (
                    "local_ttft_p50_s",
                    "own_local_ttft_p50_s",
                    "load_mb_per_s",
                    "outputs_equal",
                    "full_hits",
                )
            }
            for name, arm in length["arms"].items()
        ]
        title = f"Time to first token with a prefix of {length['tokens']} tokens"
        report.table(f"{title}, {length['pairs']} pairs", rows)
        xavier = length["arms"].get("xavier")
        if xavier is not None:
            _show_load(xavier, length, report)
        for row in length["comparisons"]:
            _show_comparison(row, report)
    report.failures(result["failed"])
    for note in result["notes"]:
        report.note(note)


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


def _show_comparison(row: Mapping[str, Any], report: Report) -> None:
    local = "plain vLLM's local hit" if row["of"] == "above_local_s" else "its own local hit"
    text = f"A load of xavier costs, above {local}, as a share of one of {row['than']}: "
    ratio = row["ratio"]
    if ratio is None or ratio["low"] is None:
        text += "not resolved"
    else:
        text += f"{ratio['middle']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, 95 %)"
    if row["limit"] is not None:
        text += f"; at most {row['limit']}: {row['verdict']}"
    report.note(f"{text}.")


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw the medians by length of prefix, one line per arm."""
    lengths = result["lengths"]
    names = list(lengths[0]["arms"])
    plots.lines(
        folder / "warm-ttft.png",
        "Time to first token, median",
        ("tokens of the prefix", [float(length["tokens"]) for length in lengths]),
        "seconds",
        {name: [length["arms"][name]["ttft_p50_s"] for length in lengths] for name in names},
    )
