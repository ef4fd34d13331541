# SPDX-License-Identifier: Apache-2.0
"""How the slots of the host tier are divided: the worker, the scheduler side and the planner ask.

Some slots hold no blocks that stay. Reads over the network land in *staging* slots, and a step's
demotions go into *spare* ones while the tier is full. Both come out of the tier's budget.
"""

from __future__ import annotations

from typing import Final

LEAST_DEVICE_SLOTS: Final = 1
LEAST_HOST_SLOTS: Final = 3
"""One block, one that arrives, and one for reads over the network."""

STAGING_SHARE: Final = 16
MOST_STAGING: Final = 256
"""Staging slots are one of so many parts of the host tier, and at most so many."""

SPARE_SHARE: Final = 4
"""Spare slots are at most one of so many parts of what is left."""


def staging_slots(slots: int) -> int:
    """Return how many of a host tier's ``slots`` are for reads over the network."""
    return min(MOST_STAGING, slots // STAGING_SHARE) or min(1, slots)


def spare_slots(slots: int, step_blocks: int) -> int:
    """Return how many of ``slots`` (without staging) are kept for demotions.

    ``step_blocks`` is how many blocks one step of the engine can fill.
    """
    return min(step_blocks, slots // SPARE_SHARE) or min(1, slots)


def reserved_slots(slots: int, step_blocks: int) -> int:
    """Return how many of a host tier's ``slots`` hold no blocks that stay."""
    staging = staging_slots(slots)
    return staging + spare_slots(slots - staging, step_blocks)
