# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.gpu.platforms import PLATFORMS, Platform, needs_gpu


@pytest.fixture(params=["fake", pytest.param("cuda", marks=needs_gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a platform, for processes that make their own."""
    return str(request.param)


@pytest.fixture
def platform(kind: str) -> Iterator[Platform]:
    made = PLATFORMS[kind]()
    yield made
    gc.collect()
    made.close()
