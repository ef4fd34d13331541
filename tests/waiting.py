# SPDX-License-Identifier: Apache-2.0
"""How tests wait for threads and processes: until something holds, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

WAIT_S = 30.0
"""Longest wait in a test; reaching it is a failure."""

_PAUSE_S = 0.0005

Result_co = TypeVar("Result_co", covariant=True)


class Engine(Protocol[Result_co]):
    """What the copy engine and the load engine have in common."""

    @property
    def pending(self) -> int: ...

    def poll(self) -> list[Result_co]: ...


def wait_until(condition: Callable[[], object]) -> None:
    """Return once ``condition`` holds; raise TimeoutError when it does not in :data:`WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(_PAUSE_S)


def drain(engine: Engine[Result_co]) -> list[Result_co]:
    """Poll as a worker does, once per step, until every submitted job has its result."""
    results: list[Result_co] = []

    def ended() -> bool:
        results.extend(engine.poll())
        return not engine.pending

    wait_until(ended)
    return results
