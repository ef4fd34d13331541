# SPDX-License-Identifier: Apache-2.0
"""Short ways to drive a snapshot index in tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from xinference_xavier.store.index import Admission, Changes, Grant, SnapshotIndex
from xinference_xavier.store.jobs import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def key(name: int | str) -> bytes:
    """A 32-byte key that is readable in a failure message."""
    return str(name).encode().rjust(32, b".")


def keys(names: Iterable[int | str]) -> list[bytes]:
    return [key(name) for name in names]


def make(device: int, host: int, spare: int = 2, reader_share: float = 0.25) -> SnapshotIndex:
    """An index whose host tier holds ``host`` blocks, with ``spare`` slots beside it."""
    return SnapshotIndex(
        device_slots=device,
        host_slots=host + spare,
        spare_slots=spare,
        reader_share=reader_share,
    )


def admit(index: SnapshotIndex, names: Iterable[int | str]) -> Admission:
    plan = index.admit([(key(name), number) for number, name in enumerate(names)])
    index.check_invariants()
    return plan


def commit(index: SnapshotIndex, plan: Admission, **failed: Collection[int]) -> Changes:
    changes = index.commit(plan.job_id, **failed)
    index.check_invariants()
    return changes


def store(index: SnapshotIndex, names: Iterable[int | str]) -> Changes:
    """Admit and commit one batch in which every copy succeeds."""
    plan = admit(index, names)
    return commit(index, plan) if plan.job_id else Changes([], [])


def store_each(index: SnapshotIndex, names: Iterable[int | str]) -> None:
    """One batch per block: the last name is the most recently used."""
    for name in names:
        store(index, [name])


def lease(
    index: SnapshotIndex,
    names: Iterable[int | str],
    *,
    reader: str | None = None,
    now: float = 0.0,
    duration: float = 10.0,
) -> Grant:
    grant = index.acquire(keys(names), reader=reader, request="r", now=now, duration=duration)
    index.check_invariants()
    return grant


def visible(index: SnapshotIndex, names: Iterable[int | str]) -> list[int | str]:
    """Those of ``names`` that readers can get; uses none of them."""
    found, _ = index.snapshot(limit=1 << 20)
    return [name for name in names if key(name) in found]


def tiers(index: SnapshotIndex, names: Sequence[int | str]) -> list[Tier | None]:
    """Where readers find each block; None where they do not."""
    found: list[Tier | None] = []
    for name in names:
        grant = index.acquire([key(name)], reader=None, request="look", now=0.0, duration=1.0)
        found.append(grant.rows[0][0] if grant.rows else None)
        index.release(grant.lease_id)
    return found
