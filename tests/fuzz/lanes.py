# SPDX-License-Identifier: Apache-2.0
"""One fuzz test in both lanes: few examples, always the same, for every change; many, for the
slow lane, other ones each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def in_both_lanes(few: int, many: int) -> Callable[[Callable[[], None]], Any]:
    """Run a test under ``@given`` with ``few`` examples, and in the slow lane with ``many``."""

    def wrap(test: Callable[[], None]) -> Any:
        def run(examples: int) -> None:
            settings(
                max_examples=examples,
                derandomize=examples == few,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            )(test)()

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        run.__module__ = test.__module__
        sizes = [few, pytest.param(many, marks=pytest.mark.slow)]
        return pytest.mark.parametrize("examples", sizes)(run)

    return wrap
