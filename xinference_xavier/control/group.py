# SPDX-License-Identifier: Apache-2.0
"""The other members of the group, as this replica knows them, and which of them to ask.

Changed on the control thread only; ``usable``, ``infos`` and :meth:`Group.describe` may be read
from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xoscar as xo

from xinference_xavier.control.breaker import Breaker, BreakerState, Plane
from xinference_xavier.control.client import PEER_UID, bounded, reach
from xinference_xavier.control.leases import Peer, describe
from xinference_xavier.control.messages import MemberInfo, Refused, Timing

if TYPE_CHECKING:
    from xinference_xavier.control.mirror import Mirror
    from xinference_xavier.control.peer import PeerActor
    from xinference_xavier.control.trust import GroupKey
    from xinference_xavier.transport.base import WorkerHandle

logger = logging.getLogger(__name__)


class Group:
    """Meets every member that the directory names, and sets aside those that fail.

    ``usable`` is the set of members that can be asked now; ``infos`` has what is known of each
    member by number, its workers' handles included once it was met.
    """

    def __init__(
        self, *, fingerprint: bytes, key: GroupKey, ranks: int, mirror: Mirror, timing: Timing
    ) -> None:
        """``ranks`` is the number of workers of each member."""
        self.usable = 0
        self.infos: dict[int, MemberInfo] = {}
        self._fingerprint = fingerprint
        self._key = key
        self._ranks = ranks
        self._mirror = mirror
        self._timing = timing
        self._peers: dict[int, Peer] = {}
        self._before_reset: dict[int, Peer] = {}

    def get(self, number: int) -> Peer | None:
        return self._peers.get(number)

    def describe(self) -> list[dict[str, Any]]:
        """Return every member in plain values."""
        return [
            {
                "number": peer.number,
                "name": peer.info.name,
                "address": peer.info.address,
                "met": peer.ref is not None,
                "breaker": str(peer.breaker.state),
                "reason": peer.breaker.reason,
            }
            for peer in list(self._peers.values())
        ]

    def close(self) -> list[asyncio.Task[None]]:
        """Use nobody any more; return what is still going on, cancelled."""
        self.usable = 0
        meetings = [peer.meeting for peer in self._peers.values() if peer.meeting is not None]
        for meeting in meetings:
            meeting.cancel()
        return meetings

    # -- what the directory says (called by the session) ---------------------------------------

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
        credential = self._key.credential(self._fingerprint, info.name, info.epoch)
        peer = Peer(number, info, credential, known.breaker if known else breaker)
        if known is not None and known.ref is not None:
            peer.info, peer.ref = known.info, known.ref
        self._peers[number] = peer
        self.infos[number] = peer.info
        self._refresh()
        if not peer.usable:
            self._meet(peer)

    def gone(self, number: int) -> None:
        """Forget a member. Leases at it are kept: it may live, and they end by themselves."""
        peer = self._peers.pop(number, None)
        if peer is not None:
            self.infos.pop(number, None)
            if peer.meeting is not None:
                peer.meeting.cancel()
            self._refresh()

    # -- what became of calls and loads --------------------------------------------------------

    def loaded(self, number: int, ok: bool, reason: str | None) -> None:
        """Note how reading from a member went."""
        peer = self._peers.get(number)
        if peer is None:
            return
        if ok:
            peer.breaker.success(Plane.DATA)
        else:
            peer.breaker.failure(Plane.DATA, time.monotonic(), reason or "load failed")
        self.judged(peer)

    def judged(self, peer: Peer) -> None:
        """Act on a change of ``peer``'s breaker; it may be known by another number now."""
        self._refresh()
        for known in self._peers.values():
            opened = known.breaker is peer.breaker and known.breaker.state is BreakerState.OPEN
            if opened and self._meet(known):
                logger.warning(
                    "%s at %s is not asked for now: %s",
                    known.info.name,
                    known.info.address,
                    known.breaker.reason,
                )

    def missed(self, peer: Peer, key: bytes) -> None:
        """Correct the mirror: ``peer`` does not have ``key``. A later delta may bring it back."""
        if self._peers.get(peer.number) is peer:
            self._mirror.missed(peer.number, key)

    # -- acquaintance --------------------------------------------------------------------------

    def _refresh(self) -> None:
        self.usable = sum(1 << number for number, peer in self._peers.items() if peer.usable)

    def _meet(self, peer: Peer) -> bool:
        """Begin to fetch a member's handles; False if that goes on already."""
        if peer.meeting is not None and not peer.meeting.done():
            return False
        peer.meeting = asyncio.create_task(self._meet_until_known(peer))
        return True

    async def _meet_until_known(self, peer: Peer) -> None:
        """Fetch a member's handles: at first, and as the probe that an open breaker asks for."""
        delay = self._timing.retry_min_s
        while peer.ref is None or peer.breaker.state is BreakerState.OPEN:
            wait = peer.breaker.retry_at - time.monotonic()
            if peer.breaker.state is BreakerState.OPEN and wait > 0:
                await asyncio.sleep(wait)
            if await self._introduced(peer):
                return
            if peer.breaker.state is not BreakerState.OPEN:
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._timing.breaker_max_s)

    async def _introduced(self, peer: Peer) -> bool:
        # Here, because it brings torch: what only runs a directory imports this module, too.
        from xinference_xavier.transport.handles import check_handles

        async def call() -> tuple[xo.ActorRefType[PeerActor], tuple[WorkerHandle, ...] | Refused]:
            await reach(peer.info.address, self._timing.call_timeout_s)
            ref = await xo.actor_ref(address=peer.info.address, uid=PEER_UID)
            answer = await ref.introduce(peer.credential)
            return ref, answer if isinstance(answer, Refused) else check_handles(answer)

        try:
            ref, answer = await bounded(call(), self._timing.call_timeout_s)
            if not isinstance(answer, Refused) and len(answer) != self._ranks:
                raise ValueError(f"handles of {len(answer)} workers, not of {self._ranks}")
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
        peer.info = replace(peer.info, workers=answer)
        peer.breaker.probed(True, time.monotonic())
        if self._peers.get(peer.number) is peer:
            self.infos[peer.number] = peer.info
            self._refresh()
        return True
