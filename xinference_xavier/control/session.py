# SPDX-License-Identifier: Apache-2.0
"""A replica's membership in its directory: join, publish, follow; again and again.

All of it runs on the control thread but :class:`Outbox`, which the engine thread fills. Losing
the directory costs new sharing only: what the mirror says stays usable, calls are repeated until
somebody answers, and a directory that no longer knows us is joined anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import xoscar as xo

from xinference_xavier.control.client import bounded, directory_ref, reach
from xinference_xavier.control.leases import describe
from xinference_xavier.control.messages import (
    MAX_KEYS,
    Cursor,
    Event,
    MemberCleared,
    MemberGone,
    MemberInfo,
    MemberJoined,
    Publication,
    Reply,
    Ticket,
    Timing,
    Update,
    chunks,
    pack_keys,
)
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.store.records import StoreClosed

if TYPE_CHECKING:
    from xinference_xavier.control.directory_actor import DirectoryActor
    from xinference_xavier.control.trust import GroupKey
    from xinference_xavier.store.index import SnapshotIndex

logger = logging.getLogger(__name__)

POLLS_PER_HEARTBEAT = 4
SNAPSHOT_KEYS = 256
"""Keys read from the index at once: it holds its lock for so long."""

OUTBOX_KEYS = 64 * MAX_KEYS

WORK_S = 0.0002
PAUSE_S = 0.001
"""While the mirror changes, this thread pauses after so much work, for so long."""

Change = tuple[Sequence[bytes], Sequence[bytes]]
Post = Callable[[Callable[[], None]], object]
"""Runs a callback on the control thread's loop soon; from any thread."""


class Outbox:
    """Changes of what this replica holds, on their way to the directory.

    Those that append (the engine thread nearly always) do so one at a time, the control thread
    takes; both ends of a deque are atomic. While nobody collects (no directory) changes are
    dropped, for a snapshot will follow. Beyond ``limit`` keys they are dropped too, and
    ``overflowed`` asks for that snapshot.
    """

    def __init__(self, limit: int = OUTBOX_KEYS) -> None:
        self.overflowed = False
        self._limit = limit
        self._changes: deque[Change | None] = deque()
        # Keys ever put in (written by who appends) and taken out (by the control thread).
        self._put = 0
        self._taken = 0
        self._collecting = False
        self._post: Post | None = None
        self._awake = True
        self._filled = asyncio.Event()

    # -- any thread, one at a time -------------------------------------------------------------

    def put(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Note that blocks came (``added``) or went (``removed``; a key in both came)."""
        if not self._collecting or not (added or removed):
            return
        size = len(added) + len(removed)
        if self._put - self._taken + size > self._limit:
            self.overflowed = True
        else:
            self._put += size
            self._changes.append((added, removed))
        self._ring()

    def put_clear(self) -> None:
        """Note that everything went."""
        if self._collecting:
            self._changes.append(None)
            self._ring()

    def _ring(self) -> None:
        # At most one wake-up per batch.
        if not self._awake and self._post is not None:
            self._awake = True
            self._post(self._filled.set)

    # -- control thread ------------------------------------------------------------------------

    def restart(self, post: Post) -> None:
        """Forget what was collected and collect from now on; ``post`` reaches this loop.

        The index is to be read after this: a change that was not collected had been made before,
        so the reader sees it.
        """
        self._changes.clear()
        self._taken = self._put
        self.overflowed = False
        self._post = post
        self._collecting = True

    def stop(self) -> None:
        self._collecting = False
        self._changes.clear()

    async def take(self, batch_s: float) -> list[Publication]:
        """Wait for changes, gather for ``batch_s`` seconds more, and return them with seq 0.

        A clear comes alone; changes before it do not matter any more.
        """
        while not self._changes and not self.overflowed:
            self._filled.clear()
            self._awake = False
            # Looked at again after the bell was armed, or a change in between would not ring.
            if not self._changes and not self.overflowed:
                await self._filled.wait()
        await asyncio.sleep(batch_s)
        final: dict[bytes, bool] = {}
        while self._changes and len(final) < MAX_KEYS:
            change = self._changes.popleft()
            if change is None:
                return [Publication(0, clear=True)]
            added, removed = change
            self._taken += len(added) + len(removed)
            final.update(dict.fromkeys(removed, False))
            final.update(dict.fromkeys(added, True))
        here = [key for key, held in final.items() if held]
        gone = [key for key, held in final.items() if not held]
        if len(final) <= MAX_KEYS:
            return [Publication(0, pack_keys(here), pack_keys(gone))] if final else []
        return [Publication(0, removed=pack_keys(part)) for part in chunks(gone)] + [
            Publication(0, added=pack_keys(part)) for part in chunks(here)
        ]


class Members(Protocol):
    """Who wants to know of the other members."""

    def reset(self) -> None: ...
    def joined(self, number: int, info: MemberInfo) -> None: ...
    def gone(self, number: int) -> None: ...


class DirectorySession:
    """Keeps this replica a member of the key's namespace at ``address`` for as long as it runs.

    ``introduce(again)`` returns how to present ourselves; ``again`` asks for a new epoch, because
    the directory did not know the last one any more.
    """

    def __init__(
        self,
        *,
        address: str,
        key: GroupKey,
        fingerprint: bytes,
        introduce: Callable[[bool], MemberInfo],
        index: SnapshotIndex,
        outbox: Outbox,
        mirror: Mirror,
        members: Members,
        post: Post,
        timing: Timing,
    ) -> None:
        self.connected = False
        self.ticket: Ticket | None = None
        self.joins = 0
        self.failures = 0
        self.strangers = 0
        self.last_error: str | None = None
        self._address = address
        self._key = key
        self._fingerprint = fingerprint
        self._introduce = introduce
        self._index = index
        self._outbox = outbox
        self._mirror = mirror
        self._members = members
        self._post = post
        self._timing = timing
        self._poll_s = timing.heartbeat_s / POLLS_PER_HEARTBEAT
        self._ref: xo.ActorRefType[DirectoryActor] | None = None
        self._seq = 0
        self._changing = asyncio.Lock()
        """Held for one change of the mirror, which is many steps."""
        self._paused_at = 0.0
        self._heard_at = 0.0
        self._withdrawn = 0
        """Counts what makes older answers about holders wrong: who left, cleared, or all of it."""

    async def run(self) -> None:
        """Be a member until cancelled."""
        loop = asyncio.get_running_loop()
        delay = self._timing.retry_min_s
        while True:
            ticket = await self._join()
            joined_at = loop.time()
            tasks = [
                asyncio.create_task(self._publish_changes(ticket)),
                asyncio.create_task(self._follow(ticket)),
            ]
            try:
                # Either ends when the directory does not know us; both raise only by mistake.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._outbox.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self.ticket = None
            for task in done:
                if error := task.exception():
                    logger.error("the directory session met a mistake of ours", exc_info=error)
            # Two replicas of one name would replace each other as fast as the network allows.
            if loop.time() - joined_at > 2 * self._timing.heartbeat_s:
                delay = self._timing.retry_min_s
            logger.warning(
                "the directory does not know us any more, joining again in %g s; if this comes "
                "back, another replica has the same xavier_member",
                delay,
            )
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._timing.heartbeat_s)

    async def leave(self) -> None:
        """Say goodbye, so that the others need not wait for the heartbeat limit."""
        ref, ticket = self._ref, self.ticket
        self.ticket = None
        if ref is not None and ticket is not None:
            await bounded(ref.leave(ticket), self._timing.call_timeout_s)

    async def holders(self, keys: Sequence[bytes]) -> list[int]:
        """Ask the directory itself who holds ``keys``; empty if it cannot tell now."""
        ref, ticket = self._ref, self.ticket
        if ref is None or ticket is None:
            return []
        answer = await bounded(
            ref.holders(ticket, pack_keys(keys[:MAX_KEYS])), self._timing.call_timeout_s
        )
        # A ticket that changed meanwhile may have given the numbers new meanings.
        return answer if isinstance(answer, list) and ticket is self.ticket else []

    async def ask(self, keys: Sequence[bytes]) -> None:
        """Put into the mirror what the directory knows of ``keys``."""
        withdrawn = self._withdrawn
        by_holders: dict[int, list[bytes]] = {}
        for key, holders in zip(keys, await self.holders(keys), strict=False):
            if holders:
                by_holders.setdefault(holders, []).append(key)
        for holders, held in by_holders.items():
            async with self._changing:
                # Nobody would ever sweep what a member that has gone is said to hold.
                if withdrawn != self._withdrawn:
                    return
                await self._pace(self._mirror.applying(holders, pack_keys(held), b""))

    # -- calls ---------------------------------------------------------------------------------

    async def _join(self) -> Ticket:
        delay = self._timing.retry_min_s
        while True:
            try:
                self._ref = await directory_ref(self._address, self._key.namespace, self._timing)
                joined = await bounded(
                    self._ref.join(
                        self._key.admission(),
                        self._fingerprint,
                        self._introduce(self.joins > 0),
                    ),
                    self._timing.call_timeout_s,
                )
                # Read here: an answer that is none must not end the attempts either.
                ticket: Ticket = joined.ticket
                strangers: int = joined.strangers
                unlike, differing = joined.unlike, ", ".join(joined.differing)
                self._poll_s = joined.heartbeat_s / POLLS_PER_HEARTBEAT
            except Exception as error:
                # Nothing that a directory does may end the attempts to find it again.
                self._failed(error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._timing.retry_max_s)
                continue
            self.joins += 1
            self.ticket = ticket
            self._seq = 0
            self._answered()
            self._met_strangers(strangers)
            self._met_unlike(unlike, differing)
            return ticket

    async def _call(self, wait_s: float, method: str, *args: Any) -> Any:
        """Call the directory until it answers; ``Reply.STALE`` if it is not there any more."""
        delay = self._timing.retry_min_s
        while True:
            try:
                call = getattr(self._ref, method)(*args)
                answer = await bounded(call, wait_s + self._timing.call_timeout_s)
            except xo.ActorNotExist:
                return Reply.STALE
            except Exception as error:
                # As above. The call may have been obeyed: every one of them can be repeated.
                self._failed(error)
                delay = await self._until_reachable(delay)
                continue
            self._answered()
            return answer

    async def _until_reachable(self, delay: float) -> float:
        """Wait until something listens at the directory's address; return the next delay."""
        while True:
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._timing.retry_max_s)
            try:
                await reach(self._address, self._timing.call_timeout_s)
            except OSError as error:
                self._failed(error)
            else:
                return delay

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error = describe(error)
        if self.connected or self.failures == 1:
            logger.warning(
                "no directory at %s (%s): no new sharing until it is back",
                self._address,
                self.last_error,
            )
        self.connected = False

    def _answered(self) -> None:
        if not self.connected:
            logger.info("member of the directory %s at %s", self._key.namespace, self._address)
        self.connected = True

    def _met_strangers(self, count: int) -> None:
        self.strangers = count
        if count:
            logger.error(
                "%d replicas of this model in %s have another secret, and nothing is shared with "
                "them: give all replicas the same XINFERENCE_XAVIER_SECRET or "
                "XINFERENCE_XAVIER_SECRET_FILE",
                count,
                self._key.namespace,
            )

    def _met_unlike(self, count: int, differing: str) -> None:
        if count:
            logger.warning(
                "%d replicas of the same weights in %s are in another group, and nothing is shared "
                "with them: they differ in %s (where that is only the model's path, set "
                "xavier_identity)",
                count,
                self._key.namespace,
                differing,
            )

    # -- publishing ----------------------------------------------------------------------------

    async def _publish_changes(self, ticket: Ticket) -> None:
        reply = await self._publish_everything(ticket)
        while reply is not Reply.STALE:
            if reply is Reply.RESEND or self._outbox.overflowed:
                reply = await self._publish_everything(ticket)
                continue
            for publication in await self._outbox.take(self._timing.batch_s):
                reply = await self._publish(ticket, publication)
                if reply is not Reply.OK:
                    break

    async def _publish_everything(self, ticket: Ticket) -> Reply:
        self._outbox.restart(self._post)
        reply = Reply.OK
        if self._seq:
            reply = await self._publish(ticket, Publication(0, clear=True))
        cursor: int | None = 0
        while cursor is not None and reply is Reply.OK:
            keys: list[bytes] = []
            while cursor is not None and len(keys) <= MAX_KEYS - SNAPSHOT_KEYS:
                try:
                    page, cursor = self._index.snapshot(cursor, SNAPSHOT_KEYS)
                except StoreClosed:
                    page, cursor = [], None
                keys += page
                await asyncio.sleep(0)
            if keys:
                reply = await self._publish(ticket, Publication(0, added=pack_keys(keys)))
        return reply

    async def _publish(self, ticket: Ticket, publication: Publication) -> Reply:
        self._seq += 1
        numbered = Publication(self._seq, publication.added, publication.removed, publication.clear)
        reply: Reply = await self._call(0.0, "publish", ticket, numbered)
        return reply

    # -- following -----------------------------------------------------------------------------

    async def _follow(self, ticket: Ticket) -> None:
        cursor: Cursor | None = None
        while True:
            update: Update | Reply = await self._call(
                self._poll_s, "poll", ticket, cursor, self._poll_s, self._mirror.limit
            )
            if isinstance(update, Reply):
                return
            self._paused_at = self._heard_at = asyncio.get_running_loop().time()
            if update.reset:
                async with self._changing:
                    self._withdrawn += 1
                    self._mirror.reset(overflowed=update.partial)
                    self._members.reset()
            for event in update.events:
                await self._apply(event)
            cursor = update.cursor

    async def _apply(self, event: Event) -> None:
        if isinstance(event, MemberJoined):
            self._members.joined(event.number, event.info)
            return
        if isinstance(event, MemberGone):
            self._members.gone(event.number)
        async with self._changing:
            if isinstance(event, MemberGone | MemberCleared):
                self._withdrawn += 1
                await self._pace(self._mirror.removing_member(event.number))
            else:
                await self._pace(self._mirror.applying(event.members, event.added, event.removed))

    async def _pace(self, steps: Iterator[None]) -> None:
        """Change the mirror, and leave the interpreter to the engine's thread in between.

        That thread is let in when this one sleeps, not when it only could: an interpreter that is
        given away and wanted back at once is never seen free by the other, which then waits for
        as long as changes come.
        """
        clock = asyncio.get_running_loop().time
        for _ in chain(steps, [None]):
            if clock() - self._paused_at > WORK_S:
                await asyncio.sleep(PAUSE_S)
                if clock() - self._heard_at > self._poll_s:
                    await self._say_alive()
                self._paused_at = clock()

    async def _say_alive(self) -> None:
        """Be heard by the directory during a change that takes longer than polls may be apart."""
        with contextlib.suppress(Exception):  # the next poll finds out what is wrong
            await self.holders([])
        self._heard_at = asyncio.get_running_loop().time()
