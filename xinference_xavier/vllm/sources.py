# SPDX-License-Identifier: Apache-2.0
"""What loads tell of the members they read from: totals, bandwidth, and verdicts for breakers.

A load counts once, when every rank has reported it. All methods run on the engine's thread, except
:meth:`Sources.to_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from xinference_xavier.control.runtime import ControlRuntime, MemberInfo
from xinference_xavier.store.jobs import NOT_STARTED, OWN_STORE, SegmentResult
from xinference_xavier.vllm.counters import Counters, Durations
from xinference_xavier.vllm.pace import MOST_SOURCES, Pace

BLAMELESS: Final = frozenset({"skipped", "closed", NOT_STARTED})
"""Reasons for which a segment was not read at all; they say nothing of its member."""

OWN: Final = "own"
"""The own store's name among the sources."""


@dataclass(slots=True)
class Part:
    """One segment of a load, as the ranks report it.

    ``seconds`` are those of the slowest rank, ``nbytes`` the sum; ``failed`` are the rows that
    failed on any rank, for the first ``reason`` that came.
    """

    member: int
    rows: int
    transport: str = "none"
    failed: set[int] = field(default_factory=set)
    reason: str | None = None
    nbytes: int = 0
    seconds: float = 0.0
    verified_blocks: int = 0

    def add(self, segment: SegmentResult) -> None:
        """Take one rank's report."""
        if segment.transport != "none":
            self.transport = segment.transport
        self.failed |= segment.failed_rows
        self.reason = self.reason or segment.reason
        self.nbytes += segment.nbytes
        self.seconds = max(self.seconds, segment.seconds)
        self.verified_blocks += segment.verified_blocks


@dataclass(slots=True)
class Source:
    """What was loaded from one member (or :data:`OWN`) so far, and over which transport.

    ``seconds`` are those of the loads that brought something, opening connections included.
    """

    transport: str
    loads: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failures: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return plain values; ``mb_per_s`` is over ``seconds``."""
        rate = self.nbytes / self.seconds / 1e6 if self.seconds else None
        return {**asdict(self), "mb_per_s": rate}


class Sources:
    """The members that this replica has loaded from."""

    def __init__(
        self,
        *,
        control: ControlRuntime,
        info: Callable[[int], MemberInfo | None],
        pace: Pace,
        counters: Counters,
        block_tokens: int,
    ) -> None:
        self._control = control
        self._info = info
        self._pace = pace
        self._counters = counters
        self._block_tokens = block_tokens
        self._sources: dict[str, Source] = {}

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return what was loaded, by member name; any thread."""
        return {name: source.to_dict() for name, source in list(self._sources.items())}

    def judge(self, parts: Sequence[Part]) -> None:
        """Take a load that every rank has reported."""
        verdicts: dict[int, str | None] = {}
        for part in parts:
            self._count(part)
            if part.member != OWN_STORE and part.reason not in BLAMELESS:
                verdicts[part.member] = verdicts.get(part.member) or part.reason
        for member, reason in verdicts.items():
            self._control.report_load(member, reason is None, reason)

    def _count(self, part: Part) -> None:
        counters = self._counters
        counters.verified_blocks += part.verified_blocks
        good = part.rows - len(part.failed)
        source = self._source(part.member, part.transport)
        source.loads += 1
        source.blocks += good
        source.failures += part.reason is not None
        if part.nbytes:
            source.nbytes += part.nbytes
            source.seconds += part.seconds
            counters.load_bytes[part.transport] += part.nbytes
            counters.load_seconds.setdefault(part.transport, Durations()).add(part.seconds)
        if part.reason is not None:
            counters.loads_failed[part.reason] += 1
        if good:
            self._pace.loaded(part.member, good * self._block_tokens, part.seconds)

    def _source(self, member: int, transport: str) -> Source:
        info = self._info(member)
        name = OWN if member == OWN_STORE else info.name if info else f"member {member}"
        source = self._sources.setdefault(name, Source(transport))
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(name for name in self._sources if name != OWN)]
        if transport != "none":
            source.transport = transport
        return source
