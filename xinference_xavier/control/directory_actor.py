# SPDX-License-Identifier: Apache-2.0
"""The directory as an xoscar actor, and a process of its own for it.

One actor per namespace lives in any pool that the members can reach: next to Xinference's
supervisor, or in :func:`run_directory`. The first member to look for it creates it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable

import xoscar as xo

from xinference_xavier.control.actors import no_lock
from xinference_xavier.control.directory import DirectoryCore
from xinference_xavier.control.messages import (
    DIGEST_BYTES,
    Cursor,
    Joined,
    MemberInfo,
    Publication,
    Reply,
    Ticket,
    Update,
    group_id,
)

logger = logging.getLogger(__name__)

SWEEPS_PER_HEARTBEAT = 20


def directory_uid(namespace: str) -> str:
    """Return the actor's uid: the namespace keeps several launched models apart."""
    return f"xinference-xavier-directory-{namespace}"


class DirectoryActor(xo.Actor):  # type: ignore[misc]  # xoscar ships no types
    """Clock, wake-ups and sweeping around a :class:`DirectoryCore`.

    Every method is lock-free and, but for the long poll and the sweep after a clear, does not
    await: so a heartbeat never queues behind a large message.
    """

    def __init__(self, heartbeat_s: float) -> None:
        super().__init__()
        self._core = DirectoryCore(incarnation=secrets.randbits(63), heartbeat_s=heartbeat_s)
        self._changed: dict[bytes, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._dirty = asyncio.Event()
        self._populated = asyncio.Event()

    async def __post_create__(self) -> None:
        self._tasks = [asyncio.create_task(self._expire()), asyncio.create_task(self._sweep())]

    async def __pre_destroy__(self) -> None:
        for task in self._tasks:
            task.cancel()

    @no_lock
    async def join(self, admission: bytes, fingerprint: bytes, info: MemberInfo) -> Joined:
        """Admit a member to the group of this admission and fingerprint, whoever it is.

        Nothing is compared: who shows another admission is in a group of its own.
        """
        group = group_id(admission, fingerprint)
        joined = self._core.join(group, info, time.monotonic())
        logger.info("%s joined as member %d from %s", info.name, joined.ticket.number, info.address)
        self._wake(group)
        self._populated.set()
        return joined

    @no_lock
    async def leave(self, ticket: Ticket) -> Reply:
        reply = self._core.leave(ticket)
        self._wake(ticket.group)
        return reply

    @no_lock
    async def publish(self, ticket: Ticket, publication: Publication) -> Reply:
        self._core.touch(ticket, time.monotonic())
        reply = self._core.publish(ticket, publication)
        self._wake(ticket.group)
        if publication.clear:
            while self._core.sweep():
                await asyncio.sleep(0)
        return reply

    @no_lock
    async def poll(
        self, ticket: Ticket, cursor: Cursor | None, wait_s: float, most: int = sys.maxsize
    ) -> Update | Reply:
        """Return news since ``cursor``, waiting for them for at most ``wait_s`` seconds.

        Without a cursor that can be followed, begin with the ``most`` keys that came last.

        No longer than the heartbeat limit, after which nobody waits any more. Only its arrival
        counts as a sign of life: the wait may outlast the one who waits.
        """
        now = time.monotonic()
        self._core.touch(ticket, now)
        limit = self._core.heartbeat_s
        deadline = now + (wait_s if 0 <= wait_s <= limit else limit)
        while True:
            answer = self._core.read(ticket, cursor, most)
            if isinstance(answer, Reply) or answer.events or answer.reset:
                return answer
            if answer.cursor.page is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return answer
                changed = self._changed.setdefault(ticket.group, asyncio.Event())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
            cursor = answer.cursor

    @no_lock
    async def holders(self, ticket: Ticket, keys: bytes) -> list[int] | Reply:
        self._core.touch(ticket, time.monotonic())
        return self._core.holders(ticket, keys)

    @no_lock
    async def members(self, admission: bytes) -> list[tuple[bytes, int, MemberInfo]]:
        """List (fingerprint, number, member) of those that joined with this admission."""
        return [
            (group[DIGEST_BYTES:], number, info)
            for group, number, info in self._core.members()
            if hmac.compare_digest(group[:DIGEST_BYTES], admission)
        ]

    @no_lock
    async def describe(self) -> dict[str, int]:
        return self._core.counts()

    def _wake(self, group: bytes) -> None:
        if event := self._changed.pop(group, None):
            event.set()
        self._dirty.set()

    async def _expire(self) -> None:
        interval = self._core.heartbeat_s / SWEEPS_PER_HEARTBEAT
        while True:
            if not self._core.members():
                self._populated.clear()
                await self._populated.wait()
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now > due + interval:
                # This process was stopped or busy: what the members said meanwhile is unread.
                self._core.forgive(now)
            for group, info in self._core.expire(now):
                logger.warning("%s at %s was silent for too long: gone", info.name, info.address)
                self._wake(group)

    async def _sweep(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            while self._core.sweep():
                await asyncio.sleep(0)


def run_directory(host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve directories at ``host:port`` until SIGTERM or SIGINT.

    ``port`` 0 takes a free one; ``ready`` is called with the address in use. Must run on the main
    thread. Raises ``OSError`` if the address cannot be bound.
    """
    asyncio.run(_serve(f"{host}:{port}", ready))


async def _serve(address: str, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pool = await xo.create_actor_pool(address, n_process=0, enable_internal_addresses=[False])
    try:
        await pool.start()
        ready(pool.external_address)
        await stop.wait()
    finally:
        await pool.stop()
