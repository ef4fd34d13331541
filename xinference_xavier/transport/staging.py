# SPDX-License-Identifier: Apache-2.0
"""Checks that the fetching transports share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import SlotView, TransferFailed


def require_staging(
    views: Mapping[Tier, SlotView], staging: Mapping[Tier, range], slot_bytes: int
) -> None:
    """Check a transport's own arenas once. Raises ValueError naming what is wrong."""
    for tier, view in views.items():
        slots, width = view.data.shape
        if width != slot_bytes:
            raise ValueError(f"{tier.name} slots have {width} bytes, expected {slot_bytes}")
        if view.meta.shape != (slots, 2):
            raise ValueError(f"{tier.name} meta has shape {tuple(view.meta.shape)}")
    for tier, part in staging.items():
        slots = len(views[tier].data) if tier in views else 0
        if part.step != 1 or part.start < 0 or not part or part.stop > slots:
            raise ValueError(f"staging {part} is not a range of the {slots} {tier.name} slots")


def staging_rows(
    slots: Sequence[int], staging: Sequence[int], pool: range
) -> npt.NDArray[np.int32]:
    """Return ``staging`` relative to the pool. Raises ValueError on a caller's mistake."""
    rows = np.asarray(staging, dtype=np.int64) - pool.start
    if len(rows) != len(slots):
        raise ValueError(f"{len(slots)} slots but {len(rows)} staging slots")
    if len(rows) and (rows.min() < 0 or rows.max() >= len(pool)):
        raise ValueError(f"staging slots {sorted(staging)} are not all in {pool}")
    if len(np.unique(rows)) != len(rows):
        raise ValueError(f"a staging slot is given twice: {sorted(staging)}")
    return rows.astype(np.int32)


def peer_rows(slots: Sequence[int], held: int, tier: Tier) -> npt.NDArray[np.int32]:
    """Return the peer's slots as an array. Raises TransferFailed when one does not exist there."""
    rows = np.asarray(slots, dtype=np.int64)
    if rows.min() < 0 or rows.max() >= held:
        raise TransferFailed(
            f"slots {rows.min()}..{rows.max()} asked of a peer with {held} {tier.name} slots"
        )
    return rows.astype(np.int32)
