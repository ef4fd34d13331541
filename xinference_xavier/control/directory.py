# SPDX-License-Identifier: Apache-2.0
"""The directory's state: members of each group, and who of them holds which block.

Pure: no clock, no sockets, no tasks; ``directory_actor`` adds those. One thread only.

A group is the members that share a fingerprint and an admission. Its table maps key -> set of
members. Every change also goes into a bounded log, which the members poll from their cursor on. A
member whose cursor has left the log reads a *fuzzy* snapshot instead: pages of the live table, and
then the log from where it was when the first page was made. All changes in the log set or clear
bits, so replaying those that a page already shows does no harm.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from xinference_xavier.control.messages import (
    DIGEST_BYTES,
    MAX_KEYS,
    WEIGHTS_TRAIT,
    Cursor,
    Delta,
    Event,
    Joined,
    MemberCleared,
    MemberGone,
    MemberInfo,
    MemberJoined,
    Publication,
    Reply,
    Ticket,
    Update,
    check_keys,
    check_member,
    pack_keys,
    unpack_keys,
)

LOG_KEYS = 64 * MAX_KEYS
"""Keys in a group's log, at most: 8 MiB. A member further behind reads a snapshot."""

EXPIRE_SHARE = 0.9
"""Part of the heartbeat limit after which a silent member goes: sweeping takes the rest."""


@dataclass(slots=True)
class _Member:
    info: MemberInfo
    last_seen: float
    seq: int = 0
    snapshot: _Snapshot | None = None


class _Snapshot(NamedTuple):
    """``version`` at the first page, and the ``keys`` to page through: the latest ``most``."""

    version: int
    most: int
    keys: list[bytes]
    partial: bool


class _Group:
    def __init__(self, log_keys: int, page_keys: int) -> None:
        self.members: dict[int, _Member] = {}
        self.table: dict[bytes, int] = {}
        self.version = 0
        self._log: deque[tuple[int, Event]] = deque()
        self._log_room = log_keys
        self._page_keys = page_keys
        self._sets: dict[int, int] = {}
        # Bits that no longer count and are being swept out of the table; a number is not given
        # away before that is done. _sweeping is the part that the running sweep takes along.
        self._dead = 0
        self._sweep: Iterator[None] | None = None

    # -- members -------------------------------------------------------------------------------

    def admit(self, info: MemberInfo, now: float) -> int:
        for number, member in list(self.members.items()):
            if member.info.name == info.name:
                self.dismiss(number)
        number = 1
        while number in self.members or self._dead >> number & 1:
            number += 1
        self.members[number] = _Member(info, now)
        self._record(MemberJoined(number, info))
        return number

    def dismiss(self, number: int) -> None:
        del self.members[number]
        self._dead |= 1 << number
        self._record(MemberGone(number))

    # -- content -------------------------------------------------------------------------------

    def clear(self, number: int) -> None:
        self._dead |= 1 << number
        self._record(MemberCleared(number))

    def change(self, number: int, publication: Publication) -> None:
        bit = 1 << number
        while self._dead & bit and self.sweep():
            pass  # the actor has swept already; this keeps the core right on its own
        for key in unpack_keys(publication.added):
            self.table[key] = self._shared(self.table.get(key, 0) | bit)
        for key in unpack_keys(publication.removed):
            self._drop(key, bit)
        self._record(Delta(bit, publication.added, publication.removed))

    def holders(self, key: bytes) -> int:
        return self.table.get(key, 0) & ~self._dead

    def sweep(self) -> bool:
        """Do one short step of sweeping dead bits out of the table; False when none is left."""
        if self._sweep is None:
            if not self._dead:
                return False
            self._sweep = self._sweep_steps(self._dead)
        if next(self._sweep, self) is self:
            self._sweep = None
        return bool(self._dead)

    def _sweep_steps(self, dead: int) -> Iterator[None]:
        for position, key in enumerate(list(self.table), 1):
            self._drop(key, dead)
            if position % self._page_keys == 0:
                yield
        # A bit that died again meanwhile (cleared, published, cleared) cannot exist: publishing
        # waits for the sweep. So the bits taken along are clean now.
        self._dead &= ~dead
        self._sets.clear()

    def _shared(self, members: int) -> int:
        return self._sets.setdefault(members, members) if members > 256 else members

    def _drop(self, key: bytes, bits: int) -> None:
        before = self.table.get(key, 0)
        if before & bits:
            if rest := before & ~bits:
                self.table[key] = self._shared(rest)
            else:
                del self.table[key]

    # -- reading -------------------------------------------------------------------------------

    def read(self, number: int, cursor: Cursor | None, most: int) -> Update:
        member = self.members[number]
        if cursor is not None and cursor.page is not None:
            if member.snapshot is not None and member.snapshot.version == cursor.version:
                return self._page(number, member.snapshot, cursor.page)
            cursor = None
        if cursor is None or not self.version - len(self._log) <= cursor.version <= self.version:
            # Who has just failed to read to the end in time gets all the time that there is.
            again = member.snapshot is not None
            member.snapshot = (None if again else self._recent(most)) or self._snapshot(most)
            return self._page(number, member.snapshot, 0)
        member.snapshot = None
        return self._tail(number, cursor.version)

    def _snapshot(self, most: int) -> _Snapshot:
        keys = list(islice(reversed(self.table), most))
        keys.reverse()  # a full mirror drops first what came first
        return _Snapshot(self.version, most, keys, partial=len(keys) < len(self.table))

    def _recent(self, most: int) -> _Snapshot | None:
        """Return what another member pages through, if the log will still follow it at its end.

        After a restart all members read at once: the lists would take more than the table.
        """
        oldest = self.version - len(self._log) // 2
        taken = [member.snapshot for member in self.members.values() if member.snapshot]
        fitting = (one for one in taken if one.version >= oldest and one.most == most)
        return max(fitting, default=None, key=attrgetter("version"))

    def _page(self, number: int, snapshot: _Snapshot, page: int) -> Update:
        version, keys = snapshot.version, snapshot.keys
        events: list[Event] = []
        if page == 0:
            events += [
                MemberJoined(other, entry.info)
                for other, entry in self.members.items()
                if other != number
            ]
        by_holders: dict[int, list[bytes]] = {}
        own = 1 << number
        start = page * self._page_keys
        end = start + self._page_keys
        for key in keys[start:end]:
            if others := self.holders(key) & ~own:
                by_holders.setdefault(others, []).append(key)
        events += [Delta(members, pack_keys(held)) for members, held in by_holders.items()]
        following = page + 1 if end < len(keys) else None
        first = page == 0
        return Update(
            Cursor(version, following),
            tuple(events),
            reset=first,
            partial=first and snapshot.partial,
        )

    def _tail(self, number: int, version: int) -> Update:
        events: list[Event] = []
        room = self._page_keys
        own = 1 << number
        # By index: a deque is quick near its ends, and readers are near the end.
        for index in range(len(self._log) - (self.version - version), len(self._log)):
            weight, event = self._log[index]
            mine = event.members == own if isinstance(event, Delta) else event.number == number
            if not mine:
                if events and weight > room:
                    break
                room -= weight
                events.append(event)
            version += 1
        return Update(Cursor(version), tuple(events))

    def _record(self, event: Event) -> None:
        weight = 1
        if isinstance(event, Delta):
            weight = check_keys(event.added) + check_keys(event.removed)
        self._log.append((weight, event))
        self.version += 1
        self._log_room -= weight
        while self._log_room < 0:
            self._log_room += self._log.popleft()[0]


class DirectoryCore:
    """All groups of one namespace.

    ``heartbeat_s`` is the silence, in seconds, after which a member is gone; ``now`` arguments
    are seconds of one monotonic clock. A read returns at most ``page_keys`` keys (or one larger
    publication), and one step of :meth:`sweep` touches as many. Tickets that are not (or no
    longer) known are answered ``Reply.STALE``; malformed keys raise ``ValueError`` and change
    nothing.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        heartbeat_s: float,
        log_keys: int = LOG_KEYS,
        page_keys: int = MAX_KEYS,
    ) -> None:
        self.incarnation = incarnation
        self.heartbeat_s = heartbeat_s
        self._log_keys = log_keys
        self._page_keys = page_keys
        self._groups: dict[bytes, _Group] = {}

    def join(self, group_id: bytes, info: MemberInfo, now: float) -> Joined:
        """Admit a member; an older life of the same name goes at once.

        Raises ValueError for what is none: every other member would meet it.
        """
        check_member(info)
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group(self._log_keys, self._page_keys)
        number = group.admit(info, now)
        ticket = Ticket(self.incarnation, group_id, number, info.epoch)
        unlike, differing = self._unlike(group_id, info)
        return Joined(ticket, self.heartbeat_s, self._strangers(group_id), unlike, differing)

    def leave(self, ticket: Ticket) -> Reply:
        """Dismiss a member that says goodbye."""
        if self._find(ticket) is None:
            return Reply.STALE
        self._groups[ticket.group].dismiss(ticket.number)
        return Reply.OK

    def touch(self, ticket: Ticket, now: float) -> Reply:
        """Note that a member is alive. Every message does this first."""
        member = self._find(ticket)
        if member is None:
            return Reply.STALE
        member.last_seen = now
        return Reply.OK

    def publish(self, ticket: Ticket, publication: Publication) -> Reply:
        """Apply one numbered change; a repeated one is ignored, a gap asks for everything."""
        member = self._find(ticket)
        if member is None:
            return Reply.STALE
        if not isinstance(publication.seq, int):
            raise ValueError(f"publication {publication.seq!r:.80} has no number")
        keys = check_keys(publication.added) + check_keys(publication.removed)
        if keys > MAX_KEYS or (keys and publication.clear):
            raise ValueError(
                f"a publication of {keys} keys, clear={publication.clear}: at most {MAX_KEYS} "
                "keys are allowed, and none together with clear"
            )
        if publication.seq <= member.seq:
            return Reply.OK
        group = self._groups[ticket.group]
        if publication.clear:
            group.clear(ticket.number)
        elif publication.seq > member.seq + 1:
            return Reply.RESEND
        elif keys:
            group.change(ticket.number, publication)
        member.seq = publication.seq
        return Reply.OK

    def read(
        self, ticket: Ticket, cursor: Cursor | None, most: int = sys.maxsize
    ) -> Update | Reply:
        """Return what happened to the *other* members since ``cursor``.

        For None, or a cursor that the log has left behind, it is what they hold: the ``most`` keys
        that came last.
        """
        if self._find(ticket) is None:
            return Reply.STALE
        return self._groups[ticket.group].read(ticket.number, cursor, most)

    def holders(self, ticket: Ticket, keys: bytes) -> list[int] | Reply:
        """Return the set of other members that hold each key."""
        if self._find(ticket) is None:
            return Reply.STALE
        group = self._groups[ticket.group]
        own = 1 << ticket.number
        return [group.holders(key) & ~own for key in unpack_keys(keys)]

    def expire(self, now: float) -> list[tuple[bytes, MemberInfo]]:
        """Dismiss members that were silent for too long; return their groups and who they were."""
        gone = []
        limit = self.heartbeat_s * EXPIRE_SHARE
        for group_id, group in self._groups.items():
            for number, member in list(group.members.items()):
                if now - member.last_seen > limit:
                    group.dismiss(number)
                    gone.append((group_id, member.info))
        return gone

    def forgive(self, now: float) -> None:
        """Take every member as heard now: the directory itself did not run for a while."""
        for group in self._groups.values():
            for member in group.members.values():
                member.last_seen = now

    def sweep(self) -> bool:
        """Do one short step of forgetting the keys of dead members; False when all is done."""
        more = False
        for group_id, group in list(self._groups.items()):
            if group.sweep():
                more = True
            elif not group.members:
                del self._groups[group_id]
        return more

    def members(self) -> list[tuple[bytes, int, MemberInfo]]:
        """List (group, number, member) of all groups."""
        return [
            (group_id, number, member.info)
            for group_id, group in self._groups.items()
            for number, member in group.members.items()
        ]

    def counts(self) -> dict[str, int]:
        """Count groups, members and keys."""
        groups = self._groups.values()
        return {
            "groups": len(groups),
            "members": sum(len(group.members) for group in groups),
            "keys": sum(len(group.table) for group in groups),
        }

    def _strangers(self, group_id: bytes) -> int:
        """Count the members of other groups that have the same fingerprint."""
        fingerprint = group_id[-DIGEST_BYTES:]
        return sum(
            len(group.members)
            for other, group in self._groups.items()
            if other != group_id and other.endswith(fingerprint)
        )

    def _unlike(self, group_id: bytes, info: MemberInfo) -> tuple[int, tuple[str, ...]]:
        """Count members of other groups with the same admission and weights; name what differs."""
        own = dict(info.traits)
        if WEIGHTS_TRAIT not in own:
            return 0, ()
        count = 0
        differing: set[str] = set()
        for other, group in self._groups.items():
            if other == group_id or other[:DIGEST_BYTES] != group_id[:DIGEST_BYTES]:
                continue
            for member in group.members.values():
                traits = dict(member.info.traits)
                if own[WEIGHTS_TRAIT] == traits.get(WEIGHTS_TRAIT):
                    count += 1
                    differing |= {name for name, _ in own.items() ^ traits.items()}
        return count, tuple(sorted(differing))

    def _find(self, ticket: Ticket) -> _Member | None:
        if ticket.incarnation != self.incarnation:
            return None
        group = self._groups.get(ticket.group)
        member = None if group is None else group.members.get(ticket.number)
        return member if member is not None and member.info.epoch == ticket.epoch else None
