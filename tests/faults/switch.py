# SPDX-License-Identifier: Apache-2.0
"""The switch that turns faults on and off in all processes of a test: one small file.

The test writes it, whoever crosses a boundary reads it. Each time a fault strikes, a byte is
added to a file of the boundary's name: a cell of the table whose fault never struck proves nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "XAVIER_TEST_FAULTS"
"""Environment variable: where the switch is."""

PLACE: Final = "XAVIER_TEST_PLACE"
"""Environment variable: the name of the engine (or directory) that a process belongs to."""

SLOW_S: Final = 0.3
"""What a slow boundary takes longer: less than every deadline in these tests."""

FOREVER_S: Final = 120.0
"""A test that forgot to turn a hang off must end all the same."""

_PAUSE_S: Final = 0.01


class InjectedFault(RuntimeError):
    """An error that no part of the product expects."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault ``kind`` at a boundary's ``point``, in the processes of ``place``."""

    place: str
    point: str
    kind: str


class Switch:
    """One end of the switch; ``place`` is empty at the test's own end."""

    def __init__(self, folder: Path, place: str = "") -> None:
        self._file = folder / "faults.json"
        self._folder = folder
        self._place = place

    @classmethod
    def of_process(cls) -> Switch:
        """Return the end of an engine or directory."""
        return cls(Path(os.environ[FOLDER]), os.environ[PLACE])

    # -- the test's end

    def turn_on(self, strikes: Sequence[Strike]) -> None:
        """Let these faults strike, and no others, from now on."""
        for strike in strikes:
            (self._folder / strike.point).unlink(missing_ok=True)
        rows = [[strike.place, strike.point, strike.kind] for strike in strikes]
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(rows))
        draft.replace(self._file)

    def turn_off(self) -> None:
        self.turn_on([])

    def struck(self, point: str) -> int:
        """Return how often the fault at ``point`` struck since it was turned on."""
        path = self._folder / point
        return path.stat().st_size if path.exists() else 0

    # -- the other ends

    def kind(self, point: str) -> str | None:
        """Return the fault that is on at ``point`` here."""
        for place, name, kind in json.loads(self._file.read_text()):
            if name == point and place == self._place:
                return str(kind)
        return None

    def points(self) -> list[str]:
        """Return the points at which a fault is on, here or elsewhere."""
        return [str(point) for _, point, _ in json.loads(self._file.read_text())]

    def strike(self, point: str) -> str | None:
        """Return the fault that is on here, and note that it strikes."""
        kind = self.kind(point)
        if kind is not None:
            with (self._folder / point).open("ab") as file:
                file.write(b"x")
        return kind

    def wait_for_end(self, point: str) -> None:
        """Hang: return when the fault is turned off."""
        end = time.monotonic() + FOREVER_S
        while self.kind(point) is not None and time.monotonic() < end:
            time.sleep(_PAUSE_S)
