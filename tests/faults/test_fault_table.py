# SPDX-License-Identifier: Apache-2.0
"""Faults at every boundary, on real engines: requests are answered rightly and nothing is lost.

Each cell of the table checks that every answer is the connector-free control's and comes in time,
that the failure is counted with its reason, that a repeated one opens the peer's circuit breaker,
and that afterwards sharing is back, the breaker closed, and no lease, pin or job left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.lab import Lab, Seen
from tests.faults.table import BOUNDARIES, CELLS, FAULTS, REPRESENTATIVES, SKIPPED, Cell

RECORD = "XAVIER_TEST_RECORD"
"""Environment variable: file into which what was seen is written."""


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Seen]]:
    seen: dict[str, Seen] = {}
    yield seen
    if path := os.environ.get(RECORD):
        rows = {name: asdict(row) for name, row in seen.items()}
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("faults"))
    with lab.running("shm"):
        yield lab


def cells() -> list[object]:
    """Return the cells in an order that changes the reader's transport seldom."""
    order = sorted(CELLS, key=lambda cell: ("shm", "nixl", "xoscar").index(cell.boundary.transport))
    return [
        pytest.param(
            cell, id=cell.id, marks=() if cell.id in REPRESENTATIVES else (pytest.mark.slow,)
        )
        for cell in order
    ]


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", cells())
def test_a_fault_costs_sharing_and_nothing_else(
    lab: Lab, record: dict[str, Seen], cell: Cell
) -> None:
    lab.read_over(cell.boundary.transport)
    record[cell.id] = lab.run(cell)


def test_every_boundary_meets_every_fault_or_says_why_not() -> None:
    run = {(cell.boundary.name, cell.fault) for cell in CELLS}
    assert len(run) == len(CELLS)
    assert not run & SKIPPED.keys()
    assert run | SKIPPED.keys() == {(name, fault) for name in BOUNDARIES for fault in FAULTS}
    assert set(REPRESENTATIVES) <= {cell.id for cell in CELLS}
