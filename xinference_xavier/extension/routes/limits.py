# SPDX-License-Identifier: Apache-2.0
"""From budgets that people give to the numbers of blocks that one replica's tiers may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinference_xavier.extension.routes.describe import tiers
from xinference_xavier.schemas import (
    Budget,
    BudgetsRequest,
    DescribedReplica,
    LimitedReplica,
    TierUse,
)
from xinference_xavier.sizes import format_size, parse_size

Slots = tuple[int | None, int | None]
"""Blocks of the device and of the host tier; None leaves a limit as it is."""


def wanted(budgets: BudgetsRequest, replica: DescribedReplica) -> Slots | None:
    """Return the limits for a replica, None if it is not ready.

    Raises ValueError naming value and limit for what is no size or above what was allocated.
    """
    if replica.status is None or replica.gpu is None or replica.cpu is None:
        for tier in ("gpu", "cpu"):
            if (value := getattr(budgets, tier)) is not None:
                parse_size(value, option=tier)
        return None
    store = replica.status["store"]
    size = store["slot_bytes"] * store["ranks"]
    # Slots on top of the capacity are part of the launch's budget, which is a fair limit, too.
    kept = store["spare_slots"] + store["staging_slots"] if replica.cpu.capacity_blocks else 0
    name = replica.replica
    return (
        _blocks("gpu", budgets.gpu, replica.gpu, size, 0, name),
        _blocks("cpu", budgets.cpu, replica.cpu, size, kept, name),
    )


def _blocks(
    tier: str, value: Budget | None, use: TierUse, size: int, kept: int, replica: str
) -> int | None:
    if value is None:
        return None
    nbytes = parse_size(value, option=tier).resolve(use.capacity_bytes)
    # The launch's budget was rounded down to whole blocks.
    if nbytes >= (use.capacity_blocks + kept + 1) * size:
        raise ValueError(
            f"{tier}={value!r} is more than the {format_size(use.capacity_bytes)} "
            f"({use.capacity_blocks} blocks) that {replica} allocated at its start; give at most "
            f"that, or relaunch the model with a larger xavier_{tier}_cache_bytes"
        )
    return min(use.capacity_blocks, nbytes // size)


def limited(replica: DescribedReplica, answer: Mapping[str, Any]) -> LimitedReplica:
    """Return what became of a replica that answered to its new limits."""
    if not answer["limited"]:
        return unlimited(replica, "its store is closed")
    gpu, cpu = tiers(answer["store"])
    return LimitedReplica(
        replica=replica.replica,
        address=replica.address,
        applied=True,
        error=None,
        evicted_blocks=answer["evicted_blocks"],
        gpu=gpu,
        cpu=cpu,
    )


def unlimited(replica: DescribedReplica, error: str | None) -> LimitedReplica:
    """Return a replica whose limits are what they were, as far as is known."""
    return LimitedReplica(
        replica=replica.replica,
        address=replica.address,
        applied=False,
        error=error,
        evicted_blocks=0,
        gpu=replica.gpu,
        cpu=replica.cpu,
    )
