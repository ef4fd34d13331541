# SPDX-License-Identifier: Apache-2.0
"""Peers without a network: a stand-in for ``ControlRuntime`` whose answers the test times.

It keeps the runtime's promises to the engine's thread: nothing waits, a reservation is given back
once, and a grant that arrives for a released reservation is released at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fake_worker import Arenas, Content, Registry

from xinference_xavier.control.client import Contact
from xinference_xavier.control.messages import Credential, MemberInfo
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import Reservation, ReservationState
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.transport.base import WorkerHandle

PROMISE_S = 2.0


class FakePeer:
    """Another replica: its index, its arenas, and how it behaves."""

    def __init__(self, number: int, registry: Registry, slots: int = 256) -> None:
        self.number = number
        self.name = f"peer-{number}"
        self.index = SnapshotIndex(
            device_slots=slots, host_slots=0, spare_slots=0, reader_share=1.0
        )
        self.arenas = Arenas()
        self.usable = True
        self.refuses: str | None = None
        self.most_rows: int | None = None
        """Grant at most so many blocks of a reservation."""
        registry[self.name] = self.arenas

    def hold(self, keys: Sequence[bytes], contents: Sequence[Content]) -> None:
        """Make blocks readable."""
        admission = self.index.admit([(key, number) for number, key in enumerate(keys)])
        for number, tier, slot, generation, _ in admission.stores:
            self.arenas.write(tier, slot, generation, contents[number])
        if admission.job_id:
            self.index.commit(admission.job_id)

    @property
    def info(self) -> MemberInfo:
        handle = WorkerHandle(rank=0, host_id=self.name, layout_digest="fake", arenas={})
        return MemberInfo(self.name, 1, "", self.name, 0.0, (handle,))

    @property
    def leases(self) -> int:
        return self.index.counters().leases


class StandInControl:
    """The engine thread's side of ``ControlRuntime``."""

    def __init__(self, *, mirror: Mirror, clock: Callable[[], float], **hooks: Any) -> None:
        self.mirror = mirror
        self.hooks = hooks
        self.peers: dict[int, FakePeer] = {}
        self.answers_at_once = True
        self.unanswered: list[tuple[Reservation, list[bytes]]] = []
        self.reserved: list[Reservation] = []
        self.held: list[Reservation] = []
        self.reports: list[tuple[int, bool, str | None]] = []
        self.published: set[bytes] = set()
        self.closed = False
        self.left = False
        self.address = "stand-in"
        self.contact = Contact(self.address, Credential(b"", 1, b""))
        self._clock = clock

    # --- for tests ---------------------------------------------------------------------------

    def meet(self, peer: FakePeer, keys: Sequence[bytes]) -> None:
        """Let the mirror say that a peer holds these keys."""
        self.peers[peer.number] = peer
        self.mirror.apply(1 << peer.number, b"".join(keys), b"")

    def answer_all(self) -> None:
        """Let every peer answer what it was asked."""
        waiting, self.unanswered = self.unanswered, []
        for reservation, keys in waiting:
            self._answer(reservation, keys)

    def _answer(self, reservation: Reservation, keys: Sequence[bytes]) -> None:
        peer = self.peers[reservation.member]
        if peer.refuses is not None:
            reservation.fail(peer.refuses)
            return
        now = self._clock()
        grant = peer.index.acquire(
            keys[: peer.most_rows],
            reader="reader",
            request=reservation.request_id,
            now=now,
            duration=PROMISE_S,
        )
        if not grant.lease_id:
            reservation.fail("not held")
            return
        reservation.grant(grant.lease_id, list(grant.rows), now + PROMISE_S)
        if reservation.state is ReservationState.RELEASED:
            peer.index.release(grant.lease_id)

    # --- what the scheduler side calls -------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        pass

    def leave(self) -> None:
        self.left = True

    def close(self, timeout_s: float) -> None:
        self.closed = True

    def usable_mask(self) -> int:
        return sum(1 << number for number, peer in self.peers.items() if peer.usable)

    def member_info(self, number: int) -> MemberInfo | None:
        peer = self.peers.get(number)
        return peer.info if peer is not None else None

    def reserve(self, member: int, keys: Sequence[bytes], request_id: str) -> Reservation:
        reservation = Reservation(member, request_id)
        self.reserved.append(reservation)
        if self.answers_at_once:
            self._answer(reservation, keys)
        else:
            self.unanswered.append((reservation, list(keys)))
        return reservation

    def hold(self, reservation: Reservation) -> None:
        self.held.append(reservation)

    def release(self, reservation: Reservation) -> None:
        granted = reservation.state is ReservationState.GRANTED
        if reservation.give_up() and granted:
            self.peers[reservation.member].index.release(reservation.lease_id)

    def report_load(self, member: int, ok: bool, reason: str | None = None) -> None:
        self.reports.append((member, ok, reason))

    def publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.published.update(added)
        self.published.difference_update(removed)

    def withdraw_all(self) -> None:
        self.published.clear()

    def status(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "leases_at_others": sum(peer.leases for peer in self.peers.values()),
            "calls_in_flight": len(self.unanswered),
        }
