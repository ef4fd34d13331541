# SPDX-License-Identifier: Apache-2.0
"""What the tests of copies have in common."""

from __future__ import annotations

import pytest

from tests.deferring import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return in which order the device does what it was given."""
    return str(request.param)
