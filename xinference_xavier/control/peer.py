# SPDX-License-Identifier: Apache-2.0
"""The source's side of a lease: an actor beside each scheduler side.

It answers from the index alone and never needs a step of the engine, so an idle replica serves.
Everything runs on the control thread but the hooks, which get a thread each.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import xoscar as xo

from xinference_xavier.control.actors import no_lock
from xinference_xavier.control.messages import (
    NAME_CHARACTERS,
    Credential,
    LeaseGrant,
    Refused,
    Timing,
    chunks,
    pack_rows,
    unpack_keys,
)
from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.records import StoreClosed
from xinference_xavier.store.threads import start_thread

if TYPE_CHECKING:
    from xinference_xavier.store.index import SnapshotIndex
    from xinference_xavier.transport.base import WorkerHandle

logger = logging.getLogger(__name__)

LEASE_KEYS = 256
"""Blocks in one lease: the index is locked while it is given, or ends."""


T = TypeVar("T")

StatusHook = Callable[[], dict[str, Any]]
AuditHook = Callable[[], dict[str, Any]]
ClearHook = Callable[[], dict[str, Any] | None]
CloseHook = Callable[[float], dict[str, Any]]
LimitHook = Callable[[int | None, int | None], dict[str, Any]]
WithdrawHook = Callable[[], None]


@dataclass(slots=True)
class PeerState:
    """What a replica puts into its peer. ``credentials`` are by epoch, all that this process had.

    ``withdraw_hook`` tells the directory of blocks that went with the leases on them, where a
    tier's limit was lowered. It is called on the control thread and returns at once.

    A request that names an older epoch of this same process meets the same index and is served;
    one that names an epoch of an earlier process at this address is not. ``refused`` counts calls
    that showed a wrong credential, by reason.
    """

    index: SnapshotIndex
    fingerprint: bytes
    workers: tuple[WorkerHandle, ...]
    status_hook: StatusHook
    audit_hook: AuditHook
    clear_hook: ClearHook
    close_hook: CloseHook
    limit_hook: LimitHook
    withdraw_hook: WithdrawHook
    timing: Timing = field(default_factory=Timing)
    credentials: dict[int, Credential] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


class PeerActor(xo.Actor):  # type: ignore[misc]  # xoscar ships no types
    """Leases out blocks of this replica. All methods are lock-free.

    Each wants to see this replica's credential first. What operators ask for raises
    ``PermissionError`` without it, the rest answers :class:`Refused`, or that nothing was done.
    """

    def __init__(self, state: PeerState) -> None:
        super().__init__()
        self._state = state
        self._closing: asyncio.Task[dict[str, Any]] | None = None
        self._reaper: asyncio.Task[None] | None = None
        self.reap_failures = 0

    async def __post_create__(self) -> None:
        self._reaper = asyncio.create_task(self._reap())

    async def __pre_destroy__(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()

    @no_lock
    async def introduce(self, shown: Credential) -> tuple[WorkerHandle, ...] | Refused:
        """Tell a member that just learnt of us how to reach our workers."""
        return self._refusal(shown) or self._state.workers

    @no_lock
    async def reserve(
        self, shown: Credential, reader: str, request: str, keys: bytes, duration_s: float
    ) -> LeaseGrant | Refused:
        """Lease the longest prefix of ``keys`` that is here, for ``duration_s`` seconds.

        In several leases of at most ``LEASE_KEYS`` blocks, so that neither this nor their release
        keeps the engine's thread from the index for long.
        """
        if refusal := self._refusal(shown):
            return refusal
        asked = unpack_keys(keys)
        _check_names(reader, request)
        duration = self._duration(duration_s)
        now = time.monotonic()
        leases: list[int] = []
        rows: list[Sequence[int]] = []
        try:
            for part in chunks(asked, LEASE_KEYS):
                if leases:
                    await asyncio.sleep(0)
                    if self._closing is not None:
                        break
                grant = self._state.index.acquire(
                    part, reader=reader, request=request, now=now, duration=duration
                )
                if grant.rows:
                    leases.append(grant.lease_id)
                    rows += grant.rows
                if len(grant.rows) < len(part):
                    break
            missing = len(rows) < len(asked) and not self._state.index.holds(asked[len(rows)])
        except StoreClosed:
            return Refused.CLOSED
        first, *further = leases or [0]
        return LeaseGrant(first, pack_rows(rows), tuple(further), missing)

    @no_lock
    async def sample(
        self, shown: Credential, reader: str, tier: int, count: int, duration_s: float
    ) -> LeaseGrant | Refused:
        """Lease up to ``count`` blocks of a tier, at most ``LEASE_KEYS``, whichever they are.

        For who wants to see whether they can be read. No rows where nothing is stored.
        """
        if refusal := self._refusal(shown):
            return refusal
        count = min(count, LEASE_KEYS)
        _check_names(reader, "sample")
        duration = self._duration(duration_s)
        index = self._state.index
        keys: list[bytes] = []
        try:
            # The host tier's slots come behind those of the device tier.
            border = index.counters().capacity[Tier.DEVICE]
            cursor: int | None = border if tier else 0
            end = sys.maxsize if tier else border
            while cursor is not None and cursor < end and len(keys) < count:
                page, cursor = index.snapshot(cursor, min(LEASE_KEYS, end - cursor))
                keys += page
                await asyncio.sleep(0)
            grant = index.acquire(
                keys[:count],
                reader=reader,
                request="sample",
                now=time.monotonic(),
                duration=duration,
            )
        except StoreClosed:
            return Refused.CLOSED
        return LeaseGrant(grant.lease_id, pack_rows(grant.rows))

    @no_lock
    async def renew(self, shown: Credential, leases: list[int], duration_s: float) -> list[bool]:
        """Extend leases to ``duration_s`` seconds from now; False for those that have ended."""
        if self._stranger(shown):
            return [False] * len(leases)
        duration = self._duration(duration_s)
        now = time.monotonic()
        renewed: list[bool] = []
        try:
            for part in chunks(leases, LEASE_KEYS):
                renewed += [
                    self._state.index.renew(lease, now=now, duration=duration) for lease in part
                ]
                await asyncio.sleep(0)
        except StoreClosed:
            return [False] * len(leases)
        return renewed

    @no_lock
    async def release(self, shown: Credential, leases: list[int]) -> int:
        """End leases; return how many had not ended before."""
        if self._stranger(shown):
            return 0
        released = 0
        try:
            for lease in leases:
                released += self._state.index.release(lease)
                await asyncio.sleep(0)  # what waits for the index comes in between
        except StoreClosed:
            return 0
        return released

    @no_lock
    async def describe(self, shown: Credential) -> dict[str, Any]:
        self._admit(shown)
        return await _in_thread(self._state.status_hook)

    @no_lock
    async def audit(self, shown: Credential) -> dict[str, Any]:
        """Check the bookkeeping of this replica, and count what it has in use.

        The index is locked meanwhile, for some microseconds per slot, and the engine may wait for
        it: for a diagnosis, not for monitoring. Answers ``contradiction``, what was found wrong or
        None, and ``in_use``, a count per kind of thing, all zero in an idle replica that nobody
        reads from.
        """
        self._admit(shown)
        return await _in_thread(self._state.audit_hook)

    @no_lock
    async def clear(self, shown: Credential) -> dict[str, Any]:
        """Empty this replica's tiers, as ``reset_cache`` does."""
        self._admit(shown)
        return await _in_thread(self._state.clear_hook) or {}

    @no_lock
    async def set_limits(
        self, shown: Credential, device_slots: int | None, host_slots: int | None
    ) -> dict[str, Any]:
        """Let each tier hold at most so many blocks; None leaves a limit as it is."""
        self._admit(shown)
        return await _in_thread(partial(self._state.limit_hook, device_slots, host_slots))

    @no_lock
    async def close(self, shown: Credential, deadline_s: float) -> dict[str, Any]:
        """Close the store within ``deadline_s`` seconds and return its final counters.

        Reservations are refused from the first call on. Later calls get the result of the first,
        whatever became of its caller; only a close that failed is tried again.
        """
        self._admit(shown)
        if not deadline_s >= 0:
            raise ValueError(f"deadline_s={deadline_s!r} is no number of seconds")
        if self._closing is None or _failed(self._closing):
            hook = partial(self._state.close_hook, deadline_s)
            self._closing = asyncio.create_task(_in_thread(hook))
        return await asyncio.shield(self._closing)

    def _duration(self, asked_s: float) -> float:
        """Return the seconds that a lease gets. Raises ValueError: NaN would last for ever."""
        if not 0 < asked_s < math.inf:
            raise ValueError(f"duration_s={asked_s!r} is no positive number of seconds")
        return min(asked_s, self._state.timing.heartbeat_s)

    def _stranger(self, shown: Credential) -> Refused | None:
        """Return what is wrong with a credential, and count it; None for the right one."""
        own = self._state.credentials.get(shown.epoch)
        if shown.fingerprint != self._state.fingerprint:
            refusal = Refused.FINGERPRINT
        elif own is None:
            refusal = Refused.EPOCH
        elif not hmac.compare_digest(own.proof, shown.proof):
            refusal = Refused.SECRET
        else:
            return None
        self._state.refused[refusal.value] += 1
        return refusal

    def _admit(self, shown: Credential) -> None:
        if refusal := self._stranger(shown):
            raise PermissionError(f"the replica refuses: {refusal.value}")

    def _refusal(self, shown: Credential) -> Refused | None:
        if refusal := self._stranger(shown):
            return refusal
        if self._closing is None:
            return None
        return Refused.CLOSED if self._closing.done() else Refused.DRAINING

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._state.timing.reap_s)
            try:
                self._state.index.reap(time.monotonic())
                self._state.withdraw_hook()
            except StoreClosed:
                return
            except Exception:
                # Leases that nobody ends would pin blocks for ever, so the reaper must survive
                # whatever it meets.
                self.reap_failures += 1
                logger.exception("ending expired leases failed (%d times)", self.reap_failures)


def _check_names(reader: object, request: object) -> None:
    """Raise ValueError unless both are texts of some length: no reader means the replica itself."""
    for name in (reader, request):
        if not isinstance(name, str) or len(name) > NAME_CHARACTERS:
            raise ValueError(f"{name!r:.80} is no name of up to {NAME_CHARACTERS} characters")


async def _in_thread(hook: Callable[[], T]) -> T:
    """Run a hook on a daemon thread: one that hangs must not keep the process from ending."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # who waits may give up, the hook goes on

    def run() -> None:
        try:
            outcome.set_result(hook())
        except BaseException as error:
            # It belongs to whoever asked for the hook, and travels there.
            outcome.set_exception(error)

    start_thread(run, "xavier-hook")
    return await asyncio.wrap_future(outcome)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
