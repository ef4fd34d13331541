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
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import xoscar as xo

from xinference_xavier.control.breaker import Breaker
from xinference_xavier.control.client import (
    PEER_UID,
    bounded,
    directory_members,
    peer_call,
    reach,
    route_address,
)
from xinference_xavier.control.directory_actor import run_directory
from xinference_xavier.control.leases import (
    LeaseKeeper,
    Peer,
    Reservation,
    ReservationState,
    describe,
)
from xinference_xavier.control.messages import MemberInfo, Refused, Timing
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.peer import (
    ClearHook,
    CloseHook,
    PeerActor,
    PeerState,
    StatusHook,
)
from xinference_xavier.control.session import DirectorySession, Outbox
from xinference_xavier.store.threads import start_thread

if TYPE_CHECKING:
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

    ``name`` is stable over restarts and unique in the namespace; ``host`` is the address to
    advertise (None: the local one on the route to the directory); ``directory`` is "host:port"
    (None: nothing is shared, but the peer still answers). ``workers`` are the handles of all
    ranks. The hooks are called on threads of their own, never on the loop.
    """

    def __init__(
        self,
        *,
        index: SnapshotIndex,
        mirror: Mirror,
        name: str,
        host: str | None,
        directory: str | None,
        namespace: str,
        fingerprint: bytes,
        workers: tuple[WorkerHandle, ...],
        status_hook: StatusHook,
        clear_hook: ClearHook,
        close_hook: CloseHook,
        timing: Timing | None = None,
    ) -> None:
        self._timing = timing or Timing()
        self._host = host or route_address(directory)
        if self._host in ("0.0.0.0", "::", "*"):
            raise ValueError(
                f"xavier_host={self._host!r} is a wildcard that no peer can reach; give the "
                "address of one interface"
            )
        self._name = name
        self._host_id = _host_id()
        self._started = time.time()
        self._mirror = mirror
        self._state = PeerState(
            index=index,
            fingerprint=fingerprint,
            workers=workers,
            status_hook=status_hook,
            clear_hook=clear_hook,
            close_hook=close_hook,
            timing=self._timing,
        )
        self._epoch = self._new_epoch()
        self._outbox = Outbox()
        self._keeper = LeaseKeeper(
            fingerprint=fingerprint,
            reader=lambda: f"{name}:{self._epoch}",
            timing=self._timing,
            verdict=self._verdict,
            refused=self._refused,
        )
        self._membership: asyncio.Task[None] | None = None
        self._farewell: asyncio.Future[Any] | None = None
        self._session: DirectorySession | None = None
        if directory is not None:
            self._session = DirectorySession(
                address=directory,
                namespace=namespace,
                fingerprint=fingerprint,
                introduce=self._introduce,
                index=index,
                outbox=self._outbox,
                mirror=mirror,
                members=self,
                post=self._post,
                timing=self._timing,
            )
        self._peers: dict[int, Peer] = {}
        self._before_reset: dict[int, Peer] = {}
        self._infos: dict[int, MemberInfo] = {}
        self._usable = 0
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

    # -- engine thread: what we hold -----------------------------------------------------------

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell the directory, soon, of blocks that came and went. Never waits."""
        self._outbox.put(added, removed)

    def withdraw_all(self) -> None:
        """Tell the directory that nothing is here any more, in order with :meth:`publish`."""
        self._outbox.put_clear()

    # -- engine thread: what others hold -------------------------------------------------------

    def usable_mask(self) -> int:
        """Return the set of members that can be asked now."""
        return self._usable

    def member_info(self, number: int) -> MemberInfo | None:
        """Return what is known of a member, its workers' handles included once it was met."""
        return self._infos.get(number)

    def members(self) -> dict[int, MemberInfo]:
        """Return all other members by number."""
        return dict(self._infos)

    def reserve(self, member: int, keys: Sequence[bytes], request_id: str) -> Reservation:
        """Ask a member for a lease on the longest prefix of ``keys`` (the first 4096) it holds.

        Returns at once; the answer appears in the reservation.
        """
        reservation = Reservation(member, request_id)
        if not self._post(lambda: self._keeper.reserve(reservation, self._peers.get(member), keys)):
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
        """Tell how reading from a member went: it feeds the member's breaker."""

        def report() -> None:
            if peer := self._peers.get(member):
                self._verdict(peer, None if ok else reason or "load failed")

        self._post(report)

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
            "mirror_blocks": len(self._mirror),
            "mirror_overflowed": self._mirror.overflowed,
            "leases_at_others": self._keeper.held(),
            "calls_in_flight": self._keeper.in_flight(),
            "counters": dict(self._keeper.counters),
            "peers": [
                {
                    "number": peer.number,
                    "name": peer.info.name,
                    "address": peer.info.address,
                    "met": peer.ref is not None,
                    "breaker": str(peer.breaker.state),
                    "reason": peer.breaker.reason,
                }
                for peer in list(self._peers.values())
            ],
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
        self._usable = 0
        for peer in self._peers.values():
            if peer.meeting is not None:
                tasks.append(peer.meeting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
        self._state.epochs.add(epoch)
        return epoch

    def _introduce(self, again: bool) -> MemberInfo:
        if again:
            self._epoch = self._new_epoch()
        return MemberInfo(self._name, self._epoch, self._address, self._host_id, self._started)

    # -- control thread: other members (called by the session) ---------------------------------

    def reset(self) -> None:
        """Forget all members; those that the directory names again keep what we know of them."""
        self._before_reset = {peer.info.epoch: peer for peer in self._peers.values()}
        for number in list(self._peers):
            self.gone(number)

    def joined(self, number: int, info: MemberInfo) -> None:
        """Note a member and begin to make its acquaintance."""
        self.gone(number)
        known = self._before_reset.pop(info.epoch, None)
        timing = self._timing
        breaker = Breaker(timing.breaker_min_s, timing.breaker_max_s)
        peer = Peer(number, info, known.breaker if known else breaker)
        if known is not None and known.ref is not None:
            peer.info, peer.ref = known.info, known.ref
        self._peers[number] = peer
        self._infos[number] = peer.info
        self._refresh()
        if not peer.usable:
            self._meet(peer)

    def gone(self, number: int) -> None:
        """Forget a member. Leases at it are kept: it may live, and they end by themselves."""
        peer = self._peers.pop(number, None)
        if peer is not None:
            self._infos.pop(number, None)
            if peer.meeting is not None:
                peer.meeting.cancel()
            self._refresh()

    def _refresh(self) -> None:
        self._usable = sum(1 << number for number, peer in self._peers.items() if peer.usable)

    def _meet(self, peer: Peer) -> bool:
        """Begin to fetch a member's handles; False if that goes on already."""
        if peer.meeting is not None and not peer.meeting.done():
            return False
        peer.meeting = asyncio.create_task(self._meet_until_known(peer))
        return True

    async def _meet_until_known(self, peer: Peer) -> None:
        """Fetch a member's handles: at first, and as the probe that an open breaker asks for."""
        delay = self._timing.retry_min_s
        while not peer.usable:
            wait = peer.breaker.retry_at - time.monotonic()
            if not peer.breaker.usable and wait > 0:
                await asyncio.sleep(wait)
            if await self._introduced(peer):
                return
            if peer.breaker.usable:
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._timing.breaker_max_s)

    async def _introduced(self, peer: Peer) -> bool:
        async def call() -> tuple[xo.ActorRefType[PeerActor], tuple[WorkerHandle, ...] | Refused]:
            await reach(peer.info.address, self._timing.call_timeout_s)
            ref = await xo.actor_ref(address=peer.info.address, uid=PEER_UID)
            return ref, await ref.introduce(self._state.fingerprint, peer.info.epoch)

        try:
            ref, answer = await bounded(call(), self._timing.call_timeout_s)
        except Exception as error:
            # A member that cannot be reached is not used, whatever the cause.
            peer.breaker.reason = describe(error)
            peer.breaker.probed(False, time.monotonic())
            return False
        if isinstance(answer, Refused):
            peer.breaker.reason = answer.value
            peer.breaker.probed(False, time.monotonic())
            return False
        peer.ref = ref
        peer.info = _with_workers(peer.info, answer)
        peer.breaker.probed(True, time.monotonic())
        if self._peers.get(peer.number) is peer:
            self._infos[peer.number] = peer.info
            self._refresh()
        return True

    def _verdict(self, peer: Peer, failure: str | None) -> None:
        if failure is None:
            peer.breaker.success()
        else:
            peer.breaker.failure(time.monotonic(), failure)
        self._after_verdict(peer)

    def _refused(self, peer: Peer, reason: str) -> None:
        peer.breaker.trip(time.monotonic(), reason)
        self._after_verdict(peer)

    def _after_verdict(self, peer: Peer) -> None:
        if self._peers.get(peer.number) is peer:
            self._refresh()
            if not peer.usable and self._meet(peer):
                logger.warning(
                    "%s at %s is not asked for now: %s",
                    peer.info.name,
                    peer.info.address,
                    peer.breaker.reason,
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


def _with_workers(info: MemberInfo, workers: tuple[WorkerHandle, ...]) -> MemberInfo:
    return MemberInfo(
        info.name, info.epoch, info.address, info.host_id, info.started, tuple(workers)
    )


def _host_id() -> str:
    """Name this boot of this machine; its containers share the name, which is only a hint."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
