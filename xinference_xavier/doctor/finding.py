# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How bad it is: ``warn`` is slower or less safe than it could be, ``fail`` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was seen, and what to do if it is not as it should be."""

    name: str
    state: State
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.state is State.OK) != (not self.fix):
            raise ValueError(f"{self.name}: a finding has a fix exactly when it is not ok")


def ok(name: str, seen: str) -> Finding:
    return Finding(name, State.OK, seen)


def warn(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, State.WARN, seen, fix)


def fail(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, State.FAIL, seen, fix)
