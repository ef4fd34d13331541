# SPDX-License-Identifier: Apache-2.0
"""What tests with real engines look at: answers that must be equal, and what a replica knows."""

from __future__ import annotations

import pytest

from xinference_xavier.bench.engines import Completion, describe


def assert_same_answer(one: Completion, other: Completion) -> None:
    """Fail unless two greedy answers are the same, as those to one request at a time must be."""
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def known(directory: str, member: str) -> int:
    """Return how many blocks of others a member of the directory knows of."""
    return int(describe(directory)[member]["control"]["mirror_blocks"])
