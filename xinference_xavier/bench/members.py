# SPDX-License-Identifier: Apache-2.0
"""Members of a directory that have no engine, for measurements: they only publish and follow."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from typing import Any, Final, Self

import numpy as np

from xinference_xavier.control.client import directory_ref
from xinference_xavier.control.messages import (
    Cursor,
    Delta,
    MemberInfo,
    Publication,
    Reply,
    Ticket,
    Timing,
    Update,
)
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.store.records import KEY_BYTES

HOST: Final = "127.0.0.1"
KEY: Final = GroupKey("bench", "the secret of a measurement")
FINGERPRINT: Final = b"b" * 32

PATIENT: Final = Timing(heartbeat_s=600.0, reserve_timeout_s=30.0, call_timeout_s=60.0)
"""Nobody is declared dead because he does nothing between two parts of a measurement."""

START_S: Final = 60.0


def packed_keys(what: str, count: int) -> bytes:
    """Return that many random keys, concatenated; the same ones for the same ``what``."""
    seed = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(count * KEY_BYTES)


def unpacked(packed: bytes) -> list[bytes]:
    """Return any number of keys one by one."""
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


class RawMember:
    """A ticket, and the calls that a replica makes with it."""

    def __init__(self, ref: Any, ticket: Ticket) -> None:
        self._ref = ref
        self._ticket = ticket
        self._seq = 0
        self._cursor: Cursor | None = None

    @classmethod
    async def join(cls, directory: str, name: str) -> Self:
        """Join; waits for a directory that is being started. Raises OSError if there is none."""
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                ref = await directory_ref(directory, KEY.namespace, PATIENT)
                break
            if time.monotonic() > until:
                raise TimeoutError(f"no directory at {directory} within {START_S:g} s")
            await asyncio.sleep(0.05)
        info = MemberInfo(name, 1, f"{HOST}:1", HOST, 0.0)
        joined = await ref.join(KEY.admission(), FINGERPRINT, info)
        return cls(ref, joined.ticket)

    @property
    def bit(self) -> int:
        """Return this member as a set."""
        return 1 << self._ticket.number

    async def publish(self, added: bytes, removed: bytes = b"") -> None:
        """Tell of keys that came and went, at most 4096."""
        self._seq += 1
        reply = await self._ref.publish(self._ticket, Publication(self._seq, added, removed))
        if reply is not Reply.OK:
            raise RuntimeError(f"the directory answered {reply} to publication {self._seq}")

    async def follow(self, mirror: Mirror) -> int:
        """Enter all news into the mirror; return how many changes of keys there were."""
        changes = 0
        while True:
            update: Update = await self._ref.poll(self._ticket, self._cursor, 0.0)
            for event in update.events:
                if isinstance(event, Delta):
                    mirror.apply(event.members, event.added, event.removed)
                    changes += (len(event.added) + len(event.removed)) // KEY_BYTES
            self._cursor = update.cursor
            if not update.events and update.cursor.page is None:
                return changes

    async def holders(self, packed: bytes) -> list[int]:
        """Ask who holds these keys."""
        found: list[int] = await self._ref.holders(self._ticket, packed)
        return found
