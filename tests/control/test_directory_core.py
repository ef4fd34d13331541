# SPDX-License-Identifier: Apache-2.0
"""The pure directory, driven against a simple model of what every member must end up seeing."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from xinference_xavier.control.directory import DirectoryCore
from xinference_xavier.control.messages import (
    MAX_KEYS,
    Cursor,
    Delta,
    MemberCleared,
    MemberGone,
    MemberInfo,
    MemberJoined,
    Publication,
    Reply,
    Ticket,
    Update,
    pack_keys,
    unpack_keys,
)
from xinference_xavier.control.mirror import Mirror

GROUP = b"f" * 32
HEARTBEAT_S = 10.0
NAMES = ("a", "b", "c", "d")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


UNIVERSE = [key(number) for number in range(12)]


def info(name: str, epoch: int = 1) -> MemberInfo:
    return MemberInfo(name, epoch, f"{name}:1", "host", 0.0)


def make_core(**options: int) -> DirectoryCore:
    return DirectoryCore(incarnation=7, heartbeat_s=HEARTBEAT_S, **options)


def read(core: DirectoryCore, ticket: Ticket, cursor: Cursor | None = None) -> Update:
    update = core.read(ticket, cursor)
    assert isinstance(update, Update)
    return update


@dataclass
class Replica:
    """A member as a client would behave: it repeats, resends, follows and rejoins."""

    name: str
    ticket: Ticket
    held: set[bytes] = field(default_factory=set)
    seq: int = 0
    cursor: Cursor | None = None
    mirror: Mirror = field(default_factory=Mirror)
    others: dict[int, MemberInfo] = field(default_factory=dict)

    def publish(self, core: DirectoryCore, added: set[bytes], removed: set[bytes]) -> Reply:
        self.held = (self.held - removed) | added
        self.seq += 1
        publication = Publication(self.seq, pack_keys(added), pack_keys(removed))
        reply = core.publish(self.ticket, publication)
        if reply is Reply.RESEND:
            self.seq += 1
            assert core.publish(self.ticket, Publication(self.seq, clear=True)) is Reply.OK
            self.seq += 1
            everything = Publication(self.seq, pack_keys(self.held))
            reply = core.publish(self.ticket, everything)
        return reply

    def poll(self, core: DirectoryCore) -> bool:
        update = core.read(self.ticket, self.cursor)
        if isinstance(update, Reply):
            return False
        if update.reset:
            self.mirror.reset()
            self.others.clear()
        for event in update.events:
            if isinstance(event, MemberJoined):
                self.others[event.number] = event.info
            elif isinstance(event, Delta):
                self.mirror.apply(event.members, event.added, event.removed)
            else:
                list(self.mirror.removing_member(event.number))
                if isinstance(event, MemberGone):
                    # A shared snapshot tells of who is there now, the log after it of who went.
                    self.others.pop(event.number, None)
        moved = update.cursor != self.cursor
        self.cursor = update.cursor
        return moved


class DirectoryMachine(RuleBasedStateMachine):
    """Joins, deaths, gaps, old epochs, resets and restarts in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.epochs = 0
        self.core = make_core(log_keys=12, page_keys=4)
        self.live: dict[str, Replica] = {}
        self.dead: list[Replica] = []

    def join(self, name: str) -> Replica:
        self.epochs += 1
        joined = self.core.join(GROUP, info(name, self.epochs), self.now)
        return Replica(name, joined.ticket)

    @rule(name=st.sampled_from(NAMES))
    def join_or_replace(self, name: str) -> None:
        if name in self.live:
            self.dead.append(self.live[name])
        self.live[name] = self.join(name)

    def pick(self, data: st.DataObject) -> Replica:
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keys=st.sets(st.sampled_from(UNIVERSE)), gone=st.booleans())
    def publish(self, data: st.DataObject, keys: set[bytes], gone: bool) -> None:
        replica = self.pick(data)
        removed = set(data.draw(st.sets(st.sampled_from(UNIVERSE)))) - keys if gone else set()
        assert replica.publish(self.core, keys, removed) is Reply.OK

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keys=st.sets(st.sampled_from(UNIVERSE), min_size=1))
    def lose_a_publication(self, data: st.DataObject, keys: set[bytes]) -> None:
        replica = self.pick(data)
        replica.held |= keys
        replica.seq += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def repeat_a_publication(self, data: st.DataObject) -> None:
        replica = self.pick(data)
        if replica.seq > 1:  # an empty one in place of a lost first one would hide that loss
            # The keys are not held: applied a second time, they would show up.
            again = Publication(replica.seq, pack_keys(set(UNIVERSE) - replica.held))
            repeated = self.core.publish(replica.ticket, Publication(max(1, replica.seq - 1)))
            assert repeated in (Reply.OK, Reply.RESEND)
            if repeated is Reply.OK and replica.publish(self.core, set(), set()) is Reply.OK:
                assert self.core.publish(replica.ticket, again) is Reply.OK

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def withdraw_everything(self, data: st.DataObject) -> None:
        replica = self.pick(data)
        replica.held.clear()
        replica.seq += 1
        assert self.core.publish(replica.ticket, Publication(replica.seq, clear=True)) is Reply.OK

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        replica = self.pick(data)
        assert self.core.leave(replica.ticket) is Reply.OK
        self.dead.append(self.live.pop(replica.name))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def die_silently(self, data: st.DataObject) -> None:
        replica = self.pick(data)
        self.now += HEARTBEAT_S
        for other in self.live.values():
            if other is not replica:
                assert self.core.touch(other.ticket, self.now) is Reply.OK
        assert [member.name for _, member in self.core.expire(self.now)] == [replica.name]
        self.dead.append(self.live.pop(replica.name))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def hear_from_the_dead(self, data: st.DataObject) -> None:
        ghost = data.draw(st.sampled_from(self.dead))
        added = Publication(ghost.seq + 1, pack_keys(UNIVERSE))
        assert self.core.publish(ghost.ticket, added) is Reply.STALE
        assert self.core.read(ghost.ticket, ghost.cursor) is Reply.STALE
        assert self.core.touch(ghost.ticket, self.now) is Reply.STALE
        assert self.core.leave(ghost.ticket) is Reply.STALE
        assert self.core.holders(ghost.ticket, b"") is Reply.STALE

    @rule()
    def restart_the_directory(self) -> None:
        self.core = DirectoryCore(
            incarnation=self.core.incarnation + 1,
            heartbeat_s=HEARTBEAT_S,
            log_keys=12,
            page_keys=4,
        )
        for name, replica in list(self.live.items()):
            assert self.core.touch(replica.ticket, self.now) is Reply.STALE
            self.dead.append(replica)
            again = self.live[name] = self.join(name)
            again.mirror = replica.mirror  # old hints stay until the first answer resets them
            assert again.publish(self.core, replica.held, set()) is Reply.OK

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def poll_once(self, data: st.DataObject) -> None:
        self.pick(data).poll(self.core)

    @rule()
    def sweep_a_step(self) -> None:
        self.core.sweep()

    @rule()
    def settle(self) -> None:
        for replica in self.live.values():
            assert replica.publish(self.core, set(), set()) is Reply.OK  # closes any gap
            assert self.core.publish(replica.ticket, Publication(replica.seq)) is Reply.OK
        for replica in self.live.values():
            while replica.poll(self.core):
                pass
            expected = {
                other.ticket.number: other for other in self.live.values() if other is not replica
            }
            names = {number: member.name for number, member in replica.others.items()}
            assert names == {number: other.name for number, other in expected.items()}
            for block in UNIVERSE:
                mask = sum(1 << n for n, other in expected.items() if block in other.held)
                assert replica.mirror.holders(block) == mask
                assert self.core.holders(replica.ticket, block) == [mask]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.settle()
        while self.core.sweep():
            pass
        held = set().union(*(replica.held for replica in self.live.values()), set())
        assert self.core.counts()["keys"] == len(held)
        assert self.core.counts()["members"] == len(self.live)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestDirectoryMachineForLong(DirectoryMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)


def test_a_silent_member_goes_within_the_heartbeat_limit_and_a_heard_one_stays() -> None:
    core = make_core()
    core.join(GROUP, info("silent"), 0.0)
    heard = core.join(GROUP, info("heard"), 0.0).ticket
    core.touch(heard, HEARTBEAT_S - 1)
    assert core.expire(HEARTBEAT_S / 2) == []
    assert [member.name for _, member in core.expire(HEARTBEAT_S)] == ["silent"]


def test_a_number_is_not_given_away_before_the_old_keys_are_swept() -> None:
    core = make_core(page_keys=2)
    first = core.join(GROUP, info("a"), 0.0).ticket
    core.publish(first, Publication(1, pack_keys(UNIVERSE)))
    core.leave(first)
    assert core.join(GROUP, info("b"), 0.0).ticket.number == 2
    while core.sweep():
        pass
    assert core.join(GROUP, info("c"), 0.0).ticket.number == 1
    assert core.counts()["keys"] == 0


def test_members_of_another_group_see_nothing() -> None:
    core = make_core()
    ours = core.join(GROUP, info("a"), 0.0).ticket
    core.publish(ours, Publication(1, pack_keys(UNIVERSE)))
    theirs = core.join(b"g" * 32, info("a"), 0.0).ticket
    assert read(core, theirs).events == ()
    assert core.touch(ours, 0.0) is Reply.OK  # the same name elsewhere replaces nobody


@pytest.mark.parametrize(
    ("traits", "told"),
    [
        ({"weights": "w", "isa": "avx2", "model": "m"}, (1, ("isa",))),
        ({"weights": "w", "isa": "avx2"}, (1, ("isa", "model"))),
        ({"weights": "other", "isa": "avx2", "model": "m"}, (0, ())),
        ({"isa": "avx2"}, (0, ())),
    ],
)
def test_who_joins_hears_in_what_others_of_the_same_weights_differ(
    traits: dict[str, str], told: tuple[int, tuple[str, ...]]
) -> None:
    core = make_core()
    ours, theirs = (b"a" * 32 + name * 32 for name in (b"f", b"g"))
    known = replace(info("a"), traits=(("weights", "w"), ("isa", "avx512"), ("model", "m")))
    first = core.join(ours, known, 0.0)
    joined = core.join(theirs, replace(info("b"), traits=tuple(traits.items())), 0.0)
    assert (first.unlike, first.differing) == (0, ())
    assert (joined.unlike, joined.differing) == told
    # Who shows another admission may not learn anything.
    stranger = core.join(b"x" * 32 + b"g" * 32, replace(known, name="c"), 0.0)
    assert (stranger.unlike, stranger.differing) == (0, ())


def test_an_empty_group_is_forgotten() -> None:
    core = make_core()
    core.leave(core.join(GROUP, info("a"), 0.0).ticket)
    core.sweep()
    assert core.counts()["groups"] == 0


def test_a_clear_hides_everything_at_once_and_ends_a_gap() -> None:
    core = make_core(page_keys=2)
    source = core.join(GROUP, info("a"), 0.0).ticket
    reader = core.join(GROUP, info("b"), 0.0).ticket
    core.publish(source, Publication(1, pack_keys(UNIVERSE)))
    assert core.publish(source, Publication(3, key(99))) is Reply.RESEND
    assert core.publish(source, Publication(4, clear=True)) is Reply.OK
    assert core.holders(reader, UNIVERSE[0]) == [0]
    assert core.publish(source, Publication(5, UNIVERSE[1])) is Reply.OK
    assert core.holders(reader, pack_keys(UNIVERSE[:2])) == [0, 1 << source.number]


def test_a_late_repetition_of_a_clear_is_ignored() -> None:
    core = make_core()
    source = core.join(GROUP, info("a"), 0.0).ticket
    reader = core.join(GROUP, info("b"), 0.0).ticket
    core.publish(source, Publication(1, clear=True))
    core.publish(source, Publication(2, UNIVERSE[0]))
    assert core.publish(source, Publication(1, clear=True)) is Reply.OK
    assert core.holders(reader, UNIVERSE[0]) == [1 << source.number]


def test_a_lost_page_can_be_read_again() -> None:
    core = make_core(page_keys=5)
    source = core.join(GROUP, info("a"), 0.0).ticket
    core.publish(source, Publication(1, pack_keys(UNIVERSE)))
    reader = core.join(GROUP, info("b"), 0.0).ticket
    first = read(core, reader)
    second = read(core, reader, first.cursor)
    assert read(core, reader, first.cursor) == second
    assert not second.reset
    last = read(core, reader, second.cursor)
    assert last.cursor.page is None
    assert read(core, reader, second.cursor) == last


def test_a_cursor_that_left_the_log_gets_a_snapshot() -> None:
    core = make_core(log_keys=4)
    source = core.join(GROUP, info("a"), 0.0).ticket
    reader = core.join(GROUP, info("b"), 0.0).ticket
    old = read(core, reader).cursor
    for seq in range(1, 8):
        core.publish(source, Publication(seq, key(seq)))
    update = read(core, reader, old)
    assert update.reset
    assert MemberJoined(source.number, info("a")) in update.events


def test_a_cursor_inside_the_log_gets_only_what_is_new_and_never_its_own() -> None:
    core = make_core()
    source = core.join(GROUP, info("a"), 0.0).ticket
    reader = core.join(GROUP, info("b"), 0.0).ticket
    cursor = read(core, reader).cursor
    core.publish(reader, Publication(1, key(1)))
    core.publish(source, Publication(1, key(2)))
    core.publish(source, Publication(2, clear=True))
    update = read(core, reader, cursor)
    number = source.number
    assert update.events == (Delta(1 << number, key(2)), MemberCleared(number))
    assert read(core, reader, update.cursor).events == ()


def test_members_that_read_at_once_share_one_list_of_keys() -> None:
    core = make_core(page_keys=1000)
    source, *readers = (core.join(GROUP, info(name), 0.0).ticket for name in NAMES)
    many = 20_000
    for seq, start in enumerate(range(0, many, 1000), 1):
        packed = pack_keys(key(number) for number in range(start, start + 1000))
        assert core.publish(source, Publication(seq, packed)) is Reply.OK
    tracemalloc.start()
    try:
        first = [read(core, readers[0])]
        alone = tracemalloc.get_traced_memory()[0]
        late = Publication(21, key(many))
        assert core.publish(source, late) is Reply.OK
        first += [read(core, reader) for reader in readers[1:]]
        # A second list of 8 bytes per key would show.
        assert tracemalloc.get_traced_memory()[0] - alone < 8 * many
    finally:
        tracemalloc.stop()
    for reader, update in zip(readers, first, strict=True):
        mirror = Mirror()
        while True:
            for event in update.events:
                if isinstance(event, Delta):
                    mirror.apply(event.members, event.added, event.removed)
            if update.cursor == (update := read(core, reader, update.cursor)).cursor:
                break
        assert len(mirror) == many + 1


def test_a_small_reader_gets_the_latest_keys_and_hears_that_there_are_more() -> None:
    core = make_core(page_keys=2)
    source, reader = (core.join(GROUP, info(name), 0.0).ticket for name in "ab")
    for seq, one in enumerate(UNIVERSE, 1):
        core.publish(source, Publication(seq, one))

    def told(most: int) -> tuple[list[bytes], bool]:
        update = core.read(reader, None, most)
        assert isinstance(update, Update)
        assert update.reset
        partial, found = update.partial, []
        while True:
            for event in update.events:
                if isinstance(event, Delta):
                    found += unpack_keys(event.added)
            if update.cursor.page is None:
                return found, partial
            update = read(core, reader, update.cursor)

    assert told(5) == (UNIVERSE[-5:], True)
    assert told(len(UNIVERSE)) == (UNIVERSE, False)


def test_a_snapshot_leaves_out_what_only_the_reader_holds() -> None:
    core = make_core()
    source = core.join(GROUP, info("a"), 0.0).ticket
    reader = core.join(GROUP, info("b"), 0.0).ticket
    core.publish(source, Publication(1, key(1)))
    core.publish(reader, Publication(1, key(1) + key(2)))
    deltas = [event for event in read(core, reader).events if isinstance(event, Delta)]
    assert deltas == [Delta(1 << source.number, key(1))]


@pytest.mark.parametrize(
    "publication",
    [
        Publication(1, b"short"),
        Publication(1, bytes(32 * (MAX_KEYS + 1))),
        Publication(1, bytes(32 * MAX_KEYS), bytes(32)),
        Publication(1, bytes(32), clear=True),
    ],
)
def test_a_malformed_publication_is_refused_and_changes_nothing(publication: Publication) -> None:
    core = make_core()
    source = core.join(GROUP, info("a"), 0.0).ticket
    with pytest.raises(ValueError, match="key"):
        core.publish(source, publication)
    assert core.publish(source, Publication(1, key(1))) is Reply.OK
    assert core.counts()["keys"] == 1


def test_bookkeeping_stays_below_300_bytes_per_block() -> None:
    blocks = 16 * MAX_KEYS
    core = make_core(log_keys=MAX_KEYS)
    tickets = [core.join(GROUP, info(name), 0.0).ticket for name in NAMES]
    tracemalloc.start()
    try:
        for start in range(0, blocks, MAX_KEYS):
            keys = pack_keys(key(number) for number in range(start, start + MAX_KEYS))
            for ticket in tickets:
                core.publish(ticket, Publication(start // MAX_KEYS + 1, keys))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert core.counts()["keys"] == blocks
    assert used / blocks <= 300
