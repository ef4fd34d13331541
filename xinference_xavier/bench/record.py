# SPDX-License-Identifier: Apache-2.0
"""Finished arms of a long measurement, kept in a file so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xinference_xavier.bench.report import save


class RecordMismatch(Exception):
    """The file is of another measurement; ``str()`` says what differs."""


class Record:
    """Runs arms, or takes their results from an earlier run with the same settings.

    Results are what JSON can hold, and are given back as JSON gives them, first time or not.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        """Without a file nothing is kept. Raises :class:`RecordMismatch`."""
        self._file = file
        self._kept: dict[str, Any] = {"settings": _as_json(settings), "arms": {}}
        if file is None or not file.exists():
            return
        try:
            found = json.loads(file.read_text())
            theirs, arms = dict(found["settings"]), dict(found["arms"])
        except (ValueError, TypeError, KeyError) as error:
            raise RecordMismatch(f"{file} is no record of a measurement: {error!r}") from error
        mine = self._kept["settings"]
        for name in sorted(theirs.keys() | mine.keys()):
            if theirs.get(name) != mine.get(name):
                raise RecordMismatch(
                    f"{file} was made with {name}={theirs.get(name)!r}, not {mine.get(name)!r}: "
                    "give the same options, or another --resume file"
                )
        self._kept["arms"] = arms

    def arm(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the arm's result, measured now unless it is kept already."""
        arms = self._kept["arms"]
        if name not in arms:
            arms[name] = _as_json(measure())
            if self._file is not None:
                save(self._file, self._kept)
        return arms[name]

    def arms(
        self, measures: Mapping[str, Callable[[], Any]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the results of the arms that could be measured, and why the others could not.

        What is not measured is not kept either: the next run tries it again.
        """
        found: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for name, measure in measures.items():
            try:
                found[name] = self.arm(name, measure)
            except Exception as error:  # whatever it was, it takes nothing from the other arms
                failed[name] = f"{type(error).__name__}: {error}"
        return found, failed


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))
