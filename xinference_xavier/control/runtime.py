# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side holds of the control plane: one thread, one pool, one peer.

Threads: the engine's thread calls the methods that say so; they only append, read, or post to the
loop, and never wait. A second thread, "xavier-control-post", carries what was posted. All state
of other members is changed on the thread "xavier-control" only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import xoscar as xo

from xinference_xavier.control.client import (
    PEER_UID,
    Contact,
    directory_members,
    peer_call,
    route_address,
    unbracketed,
)
from xinference_xavier.control.directory_actor import run_directory
from xinference_xavier.control.group import Group
from xinference_xavier.control.leases import (
    LeaseKeeper,
    Reservation,
    ReservationState,
    describe,
)
from xinference_xavier.control.messages import MemberInfo, Timing
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.peer import (
    AuditHook,
    ClearHook,
    CloseHook,
    LimitHook,
    PeerActor,
    PeerState,
    StatusHook,
    WithdrawHook,
)
from xinference_xavier.control.session import DirectorySession, Outbox
from xinference_xavier.store.threads import start_thread

if TYPE_CHECKING:
    from xinference_xavier.control.trust import GroupKey
    from xinference_xavier.store.index import SnapshotIndex
    from xinference_xavier.transport.base import WorkerHandle

__all__ = [
    "ControlRuntime",
    "MemberInfo",
    "Reservation",
    "ReservationState",
    "Timing",
    "directory_members",
    "peer_call",
    "run_directory",
]

logger = logging.getLogger(__name__)

ASKS_IN_FLIGHT = 64


class ControlRuntime:
    """One replica's part in its group.

    ``name`` is stable over restarts and unique in the namespace of ``key``; ``host`` is the
    address to advertise (None: the local one on the route to the directory); ``directory`` is
    "host:port" (None: nothing is shared, but the peer still answers). ``workers`` are the
    handles of all ranks. The hooks are called on threads of their own, never on the loop, but for
    ``withdraw_hook``: see :class:`~xinference_xavier.control.peer.PeerState`.
    """

    def __init__(
        self,
        *,
        index: SnapshotIndex,
        mirror: Mirror,
        name: str,
        host: str | None,
        directory: str | None,
        key: GroupKey,
        fingerprint: bytes,
        traits: tuple[tuple[str, str], ...] = (),
        workers: tuple[WorkerHandle, ...],
        status_hook: StatusHook,
        audit_hook: AuditHook,
        clear_hook: ClearHook,
        close_hook: CloseHook,
        limit_hook: LimitHook,
        withdraw_hook: WithdrawHook,
        timing: Timing | None = None,
    ) -> None:
        # Here, because it brings torch: what only runs a directory imports this module, too.
        from xinference_xavier.store.arena import boot_id

        self._timing = timing or Timing()
        self._host = unbracketed(host or route_address(directory))
        if self._host in ("0.0.0.0", "::", "*"):
            raise ValueError(
                f"xavier_host={self._host!r} is a wildcard that no peer can reach; give the "
                "address of one interface"
            )
        self._name = name
        self._traits = traits
        self._host_id = boot_id()
        self._started = time.time()
        self._mirror = mirror
        self._state = PeerState(
            index=index,
            fingerprint=fingerprint,
            workers=workers,
            status_hook=status_hook,
            audit_hook=audit_hook,
            clear_hook=clear_hook,
            close_hook=close_hook,
            limit_hook=limit_hook,
            withdraw_hook=withdraw_hook,
            timing=self._timing,
        )
        self._key = key
        self._epoch = self._new_epoch()
        self._outbox = Outbox()
        self._group = Group(
            fingerprint=fingerprint,
            key=key,
            ranks=len(workers),
            mirror=mirror,
            timing=self._timing,
        )
        self._keeper = LeaseKeeper(
            reader=lambda: f"{name}:{self._epoch}",
            timing=self._timing,
            judged=self._group.judged,
            missed=self._group.missed,
        )
        self._membership: asyncio.Task[None] | None = None
        self._farewell: asyncio.Future[Any] | None = None
        self._session: DirectorySession | None = None
        if directory is not None:
            self._session = DirectorySession(
                address=directory,
                key=key,
                fingerprint=fingerprint,
                introduce=self._introduce,
                index=index,
                outbox=self._outbox,
                mirror=mirror,
                members=self._group,
                post=self._post,
                timing=self._timing,
            )
        self._asking: set[bytes] = set()
        self._address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        # Writing to the loop's pipe gives the interpreter away, and the control thread would keep
        # it for as long as it serialises a request. Putting into this queue does not: a second
        # thread takes the callback when the engine thread pauses by itself.
        self._posted: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._up: Future[str] = Future()
        self._down: Future[None] = Future()

    # -- life ----------------------------------------------------------------------------------

    def start(self, timeout_s: float = 30.0) -> None:
        """Bring the peer up; joining the directory goes on in the background.

        Raises ``RuntimeError`` that names the address if the pool does not come up in time.
        """
        # xoscar loads what it may have to serialise when a pool is made. A library that comes that
        # late on a helper thread can fail for want of static TLS, so load it here.
        importlib.import_module("torch")
        start_thread(self._run, "xavier-control")
        try:
            self._address = self._up.result(timeout_s)
        except Exception as error:
            self.close(timeout_s=1.0)
            raise RuntimeError(
                f"no control pool on {self._host} within {timeout_s:g} s ({describe(error)}); "
                "xavier_host must be an address of this machine"
            ) from error

    def close(self, timeout_s: float = 5.0) -> None:
        """Leave the group and end the thread; idempotent, from any thread but its own.

        Returns after ``timeout_s`` seconds at the latest; the thread is a daemon.
        """
        if self._loop is None:
            return
        self._post(self._stop.set)
        try:
            self._down.result(timeout_s)
        except TimeoutError:
            logger.warning("the control thread did not end within %g s", timeout_s)

    def leave(self) -> None:
        """Leave the group soon, and for good; the peer still answers. From any thread."""
        self._post(self._leave)

    @property
    def address(self) -> str:
        """ "host:port" of the peer, once started."""
        return self._address

    @property
    def contact(self) -> Contact:
        """How to ask the peer, once started."""
        return Contact(self._address, self._state.credentials[self._epoch])

    @property
    def epoch(self) -> int:
        """The epoch under which this replica is known now."""
        return self._epoch

    @property
    def member_number(self) -> int | None:
        """This replica's number in its group, None while it has none."""
        ticket = self._session.ticket if self._session else None
        return ticket.number if ticket else None

    @property
    def connected(self) -> bool:
        """Whether the directory answered the last time it was asked."""
        return self._session is not None and self._session.connected

    # -- any thread, one at a time: what we hold -----------------------------------------------

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell the directory, soon, of blocks that came and went. Never waits."""
        self._outbox.put(added, removed)

    def withdraw_all(self) -> None:
        """Tell the directory that nothing is here any more, in order with :meth:`publish`."""
        self._outbox.put_clear()

    # -- engine thread: what others hold -------------------------------------------------------

    def usable_mask(self) -> int:
        """Return the set of members that can be asked now."""
        return self._group.usable

    def member_info(self, number: int) -> MemberInfo | None:
        """Return what is known of a member, its workers' handles included once it was met."""
        return self._group.infos.get(number)

    def reserve(self, member: int, keys: Sequence[bytes], request_id: str) -> Reservation:
        """Ask a member for a lease on the longest prefix of ``keys`` (the first 4096) it holds.

        Returns at once; the answer appears in the reservation.
        """
        reservation = Reservation(member, request_id)
        if not self._post(lambda: self._keeper.reserve(reservation, self._group.get(member), keys)):
            reservation.fail("closed")
        return reservation

    def hold(self, reservation: Reservation) -> None:
        """Keep a grant alive until it is released: its request has blocks now."""
        self._post(lambda: self._keeper.hold(reservation))

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back, in whatever state it is. Idempotent."""
        if reservation.give_up():
            self._post(lambda: self._keeper.release(reservation))

    def report_load(self, member: int, ok: bool, reason: str | None = None) -> None:
        """Tell how reading from a member went: it feeds the member's breaker.

        To be told before the load's reservation is released, which otherwise ends undecided.
        """
        self._post(lambda: self._group.loaded(member, ok, reason))

    def ask(self, keys: Sequence[bytes]) -> None:
        """Ask the directory itself about ``keys``; what it knows appears in the mirror.

        For blocks that an overflowed mirror may have dropped.
        """
        session = self._session
        if session is None or not keys:
            return
        self._post(lambda: self._ask(session, keys))

    def status(self) -> dict[str, Any]:
        """Describe membership, peers and leases in plain values. From any thread."""
        session = self._session
        return {
            "name": self._name,
            "address": self._address,
            "epoch": self._epoch,
            "number": self.member_number,
            "connected": self.connected,
            "joins": session.joins if session else 0,
            "directory_failures": session.failures if session else 0,
            "directory_error": session.last_error if session else None,
            "strangers": session.strangers if session else 0,
            "refused_calls": dict(self._state.refused),
            "mirror_blocks": len(self._mirror),
            "mirror_overflowed": self._mirror.overflowed,
            "leases_at_others": self._keeper.held(),
            "calls_in_flight": self._keeper.in_flight(),
            "counters": dict(self._keeper.counters),
            "peers": self._group.describe(),
        }

    # -- control thread: life ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            # The thread's last frame: whoever waits for it must hear of it.
            logger.exception("the control thread ended")
            if not self._up.done():
                self._up.set_exception(error)
        finally:
            self._down.set_result(None)
            self._posted.put(None)

    async def _main(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        start_thread(partial(self._pass_on, loop), "xavier-control-post")
        pool = await xo.create_actor_pool(
            f"{self._host}:0", n_process=0, enable_internal_addresses=[False]
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            await pool.start()
            self._address = pool.external_address
            await xo.create_actor(PeerActor, self._state, uid=PEER_UID, address=self._address)
            tasks.append(asyncio.create_task(self._keeper.renew_for_ever()))
            if self._session is not None:
                self._membership = asyncio.create_task(self._session.run())
                tasks.append(self._membership)
            self._up.set_result(self._address)
            await self._stop.wait()
        finally:
            await self._end(tasks)
            await pool.stop()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._group.close(), return_exceptions=True)
        farewell = [self._keeper.drain()]
        if self._session is not None:
            farewell.append(self._session.leave())
        await asyncio.gather(*farewell, return_exceptions=True)

    def _leave(self) -> None:
        if self._session is None or self._membership is None or self._membership.done():
            return
        self._membership.cancel()
        self._farewell = asyncio.gather(self._session.leave(), return_exceptions=True)

    def _post(self, callback: Callable[[], None]) -> bool:
        """Run ``callback`` on the loop, from any thread; False if there is no loop any more."""
        if self._loop is None or self._down.done():
            return False
        self._posted.put(callback)
        return True

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Carry callbacks to the loop, until None; the thread "xavier-control-post"."""
        while (callback := self._posted.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(callback)

    def _new_epoch(self) -> int:
        epoch = secrets.randbits(63)
        state = self._state
        state.credentials[epoch] = self._key.credential(state.fingerprint, self._name, epoch)
        return epoch

    def _introduce(self, again: bool) -> MemberInfo:
        if again:
            self._epoch = self._new_epoch()
        return MemberInfo(
            self._name,
            self._epoch,
            self._address,
            self._host_id,
            self._started,
            traits=self._traits,
        )

    def _ask(self, session: DirectorySession, keys: Sequence[bytes]) -> None:
        first = keys[0]
        if first in self._asking or len(self._asking) >= ASKS_IN_FLIGHT:
            return
        self._asking.add(first)
        task = asyncio.create_task(session.ask(keys))

        def answered(ended: asyncio.Task[None]) -> None:
            self._asking.discard(first)
            if not ended.cancelled() and (error := ended.exception()):
                logger.debug("asking the directory failed: %s", error)

        task.add_done_callback(answered)
