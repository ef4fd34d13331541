# SPDX-License-Identifier: Apache-2.0
"""Rounds of load on an arm and on plain vLLM beside it, and what follows from them.

Every arm has a plain engine of its own beside it, bound to the same core; both get the same load,
one after the other, and who is first alternates (ABBA). The first round is not counted. The arm
"plain" is plain vLLM beside plain vLLM: what its figures differ by is the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from xinference_xavier.bench import plots
from xinference_xavier.bench.arms import Arm, ArmSettings, Replicas, make_arm
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import Interval, Verdict, at_least, at_most, ratio_interval

WITHIN: Final = 0.02
"""Target: no figure is worse than plain vLLM's by more than this share."""

RATES: Final = frozenset({"tokens_per_s"})
"""Figures that are better when they are higher."""

SHOWN_ERRORS: Final = 5


@dataclass(frozen=True, slots=True)
class Contest:
    """Running replicas of an arm, and of plain vLLM beside them."""

    plain: Replicas
    own: Replicas

    def rounds(
        self, count: int, measure: Callable[[int, Replicas], dict[str, Any]], report: Report
    ) -> dict[str, list[dict[str, Any]]]:
        """Measure rounds 0 to ``count``; returns those of each side, ``plain`` and ``own``."""
        found: dict[str, list[dict[str, Any]]] = {"plain": [], "own": []}
        with report.steps("rounds", count + 1) as step:
            for number in range(count + 1):
                sides = [("plain", self.plain), ("own", self.own)]
                for name, replicas in sides if number % 2 else reversed(sides):
                    self.settle()
                    found[name].append(measure(number, replicas))
                step.done()
        return found

    def settle(self) -> None:
        """Wait until neither side does anything."""
        self.own.settle()
        self.plain.settle()


@contextmanager
def beside_plain(arm: Arm, settings: ArmSettings) -> Iterator[Contest]:
    """Start an arm's engines and one of plain vLLM."""
    # Of its own: the arm may be plain vLLM, too, with logs of the same names.
    folder = settings.folder / "beside"
    folder.mkdir(exist_ok=True)
    alone = replace(settings.alone(), folder=folder)
    with make_arm("plain").start(alone) as plain, arm.start(settings) as own:
        yield Contest(plain, own)


def judged(
    rounds: Mapping[str, Sequence[Mapping[str, Any]]], keys: Sequence[str]
) -> dict[str, Any]:
    """Return an arm's figures ``keys``, each the median of its rounds, and their comparison.

    ``rounds`` are what :meth:`Contest.rounds` returned. A round has the figures, ``requests`` and
    ``errors``, one text per failed request, and where there are any no figures. ``beside`` has
    the figures of plain vLLM, ``vs_plain`` the paired ratios, with a verdict. Rounds in which
    anything failed are not compared, and an arm of which a request failed has missed its targets.
    """
    errors = [error for each in rounds["own"] for error in each["errors"]]
    pairs = [
        (own, plain)
        for own, plain in zip(rounds["own"][1:], rounds["plain"][1:], strict=True)
        if not own["errors"] and not plain["errors"]
    ]
    found: dict[str, Any] = {key: _median([own[key] for own, _ in pairs]) for key in keys}
    found |= {
        "requests": sum(each["requests"] for each in rounds["own"]),
        "failed": len(errors),
        "errors": errors[:SHOWN_ERRORS],
        "plain_failed": sum(len(each["errors"]) for each in rounds["plain"]),
        "beside": {key: _median([plain[key] for _, plain in pairs]) for key in keys},
        "vs_plain": {},
        "rounds": rounds,
    }
    for key in keys if pairs else ():
        ratio = ratio_interval([own[key] for own, _ in pairs], [plain[key] for _, plain in pairs])
        verdict = Verdict.MISSED if errors else _verdict(key, ratio)
        found["vs_plain"][key] = ratio.to_dict() | {"verdict": verdict}
    return found


def _verdict(key: str, ratio: Interval) -> Verdict:
    return at_least(ratio, 1 - WITHIN) if key in RATES else at_most(ratio, 1 + WITHIN)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def show(arms: Mapping[str, Any], title: str, keys: Sequence[str], report: Report) -> None:
    """Print the figures of all arms, and how each compares with the plain engine beside it."""
    names = (*keys, "requests", "failed")
    report.table(
        title, [{"arm": name} | {key: arm[key] for key in names} for name, arm in arms.items()]
    )
    rows: list[dict[str, object]] = []
    for name, arm in arms.items():
        for key, ratio in arm["vs_plain"].items():
            ends = (ratio["low"], ratio["high"])
            rows.append(
                {
                    "arm": name,
                    "figure": key,
                    "ratio": ratio["middle"],
                    "95 %": "-" if None in ends else "{:.3f} to {:.3f}".format(*ends),
                    "rounds": ratio["pairs"],
                    f"within {WITHIN:.0%}": ratio["verdict"],
                }
            )
    report.table("Arm / plain vLLM beside it", rows)
    for name, arm in arms.items():
        for error in arm["errors"]:
            report.note(f"{name}: {error}")
        if arm["plain_failed"]:
            report.note(f"{arm['plain_failed']} requests of plain vLLM beside {name} failed.")


def plot_ttft(arms: Mapping[str, Any], file: Path, request: str) -> None:
    """Draw the ``ttft_s`` of an arm's rounds, sorted, over their number; a line per arm.

    ``request`` names what there is one time of. Draws nothing where every arm has failed.
    """
    times = {
        name: sorted(value for each in arm["rounds"]["own"][1:] for value in each.get("ttft_s", ()))
        for name, arm in arms.items()
    }
    longest = max(map(len, times.values()))
    if longest:
        plots.lines(
            file,
            "Time to first token, sorted",
            (request, [float(number + 1) for number in range(longest)]),
            "seconds",
            {name: [*values, *[None] * (longest - len(values))] for name, values in times.items()},
        )
