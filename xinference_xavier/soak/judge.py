# SPDX-License-Identifier: Apache-2.0
"""What is wrong after a soak: growth, things that were not given back, other answers.

Everything here works on plain values, so that it is tested without an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from xinference_xavier.soak.watch import Sample, Store

MIB: Final = 2**20

ALLOWED: Final[Mapping[str, float]] = {
    "rss_bytes": 32 * MIB,
    "private_bytes": 32 * MIB,
    "descriptors": 4,
    "threads": 2,
    "arenas": 1,
}
"""How much a process may hold more at the end of the second half than at its start, by trend."""

FEWEST: Final = 12
"""Samples of the second half; with fewer there is no trend."""

SPAN: Final = 0.5
"""A process is judged if it lived for so large a part of the soak."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How one number of one process developed over the second half of its samples."""

    process: str
    incarnation: int
    what: str
    first: float
    last: float
    """Medians of the first and the last tenth of all samples."""
    growth: float
    """The trend (Theil and Sen's, which single samples do not move) times the time."""
    allowed: float

    @property
    def grows(self) -> bool:
        """Whether that is more than allowed."""
        return self.growth > self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "grows": self.grows}


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return the development of every process that lived for long enough."""
    series: dict[tuple[str, int], list[tuple[float, Any]]] = {}
    for sample in samples:
        for usage in sample.processes:
            series.setdefault((usage.name, usage.incarnation), []).append((sample.seconds, usage))
    found = []
    span = samples[-1].seconds - samples[0].seconds if samples else 0.0
    for (name, incarnation), rows in series.items():
        if rows[-1][0] - rows[0][0] < SPAN * span:
            continue
        half = rows[len(rows) // 2 :]
        if len(half) < FEWEST:
            continue
        times = np.array([seconds for seconds, _ in half])
        tenth = max(1, len(rows) // 10)
        for what, allowed in ALLOWED.items():
            values = np.array([float(getattr(usage, what)) for _, usage in rows])
            found.append(
                Growth(
                    name,
                    incarnation,
                    what,
                    float(np.median(values[:tenth])),
                    float(np.median(values[-tenth:])),
                    trend(times, values[len(rows) // 2 :]) * float(times[-1] - times[0]),
                    allowed,
                )
            )
    return found


def trend(times: np.ndarray, values: np.ndarray) -> float:
    """Return the median of the slopes between all pairs of points."""
    first, second = np.triu_indices(len(times), k=1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def growing(found: Sequence[Growth]) -> list[str]:
    """Say what grows."""
    return [
        f"{item.process} (incarnation {item.incarnation}): {item.what} grew by "
        f"{item.growth:,.0f} in the second half, allowed are {item.allowed:,.0f}"
        for item in found
        if item.grows
    ]


def undrained(audits: Mapping[str, Mapping[str, Any]], members: int) -> list[str]:
    """Say what idle replicas still have in use, or where their bookkeeping is wrong."""
    problems = []
    if len(audits) != members:
        problems.append(f"{len(audits)} replicas are in the directory, not {members}")
    for name, audit in audits.items():
        if audit["contradiction"] is not None:
            problems.append(f"{name}: the index contradicts itself: {audit['contradiction']}")
        if used := {kind: count for kind, count in audit["in_use"].items() if count}:
            problems.append(f"{name}: still in use when nothing runs: {used}")
    return problems


def unaccounted(stores: Mapping[str, Store]) -> list[str]:
    """Say where used and free blocks of an idle replica are not its budget."""
    return [
        f"{name}: {store.used_blocks} used and {store.free_blocks} free blocks are not the "
        f"{store.total_blocks} of its budget"
        for name, store in stores.items()
        if store.used_blocks + store.free_blocks != store.total_blocks
    ]


def wrong_requests(outcomes: Mapping[str, Any], control: Mapping[str, int]) -> list[str]:
    """Say what was wrong with the requests.

    ``control`` is how often the control, under such a load, was unlike itself at rest: no larger
    part of the answers may differ here.
    """
    problems = []
    if outcomes["failed"]:
        first = outcomes["failures"][0] if outcomes["failures"] else ""
        problems.append(f"{outcomes['failed']} requests failed; the first: {first}")
    if not outcomes["compared"]:
        problems.append("no answer was compared with the control's")
    elif outcomes["different"] * control["compared"] > control["different"] * outcomes["compared"]:
        problems.append(
            f"{outcomes['different']} of {outcomes['compared']} answers are not the control's "
            f"(the control's own under load: {control['different']} of {control['compared']}); "
            f"the first: {outcomes['differences'][0]}"
        )
    return problems


def unproven(samples: Sequence[Sample], developed: Sequence[Growth]) -> list[str]:
    """Say why a run shows nothing."""
    problems = []
    if not any(store.peer_tokens for sample in samples for store in sample.stores.values()):
        problems.append("no prompt token was loaded from another replica")
    if not developed:
        problems.append("the run was too short to tell whether anything grows")
    return problems


def caught(samples: Sequence[Sample]) -> list[str]:
    """Say which connectors had to catch exceptions of their own."""
    most: Counter[str] = Counter()
    for sample in samples:
        for name, count in sample.errors.items():
            most[name] = max(most[name], count)
    return [
        f"{name}: its connector caught {count} exceptions" for name, count in most.items() if count
    ]
