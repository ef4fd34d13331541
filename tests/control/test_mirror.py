# SPDX-License-Identifier: Apache-2.0
"""The local copy of the directory, as the engine thread reads it."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.control.messages import pack_keys
from xinference_xavier.control.mirror import ENTRY_BYTES, Mirror

ALL = (1 << 10) - 1


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


KEYS = [key(number) for number in range(8)]


def mirror_of(**held: range) -> Mirror:
    mirror = Mirror()
    for member, numbers in held.items():
        mirror.apply(1 << int(member[1:]), pack_keys(KEYS[number] for number in numbers), b"")
    return mirror


def test_the_member_with_the_longest_run_wins() -> None:
    mirror = mirror_of(m1=range(3), m2=range(6), m3=range(1, 8))
    assert mirror.longest(KEYS, 0, ALL) == (2, 6)
    assert mirror.longest(KEYS, 1, ALL) == (3, 7)
    assert mirror.longest(KEYS, 7, ALL) == (3, 1)


def test_only_usable_members_count() -> None:
    mirror = mirror_of(m1=range(3), m2=range(6))
    assert mirror.longest(KEYS, 0, 1 << 1) == (1, 3)
    assert mirror.longest(KEYS, 0, 1 << 4) is None
    assert mirror.longest(KEYS, 4, 1 << 1) is None


@pytest.mark.parametrize("start", [0, 8, 9])
def test_unknown_blocks_and_ends_are_misses(start: int) -> None:
    mirror = mirror_of(m1=range(1, 8))
    assert mirror.longest(KEYS, start, ALL) is None


def test_members_that_hold_equally_much_take_turns() -> None:
    mirror = mirror_of(m1=range(4), m5=range(4), m9=range(4), m2=range(2))
    chosen = [mirror.longest(KEYS, 0, ALL) for _ in range(6)]
    assert {found for found in chosen if found} == {(1, 4), (5, 4), (9, 4)}
    assert chosen[:3] == chosen[3:]


@given(
    st.dictionaries(st.integers(1, 9), st.sets(st.integers(0, 7)), max_size=4),
    st.integers(0, 7),
    st.integers(0, ALL),
)
def test_longest_agrees_with_a_simple_search(
    held: dict[int, set[int]], start: int, usable: int
) -> None:
    mirror = Mirror()
    for member, numbers in held.items():
        mirror.apply(1 << member, pack_keys(KEYS[number] for number in numbers), b"")
    runs = {}
    for member, numbers in held.items():
        end = start
        while end in numbers:
            end += 1
        if usable >> member & 1 and end > start:
            runs[member] = end - start
    found = mirror.longest(KEYS, start, usable)
    if not runs:
        assert found is None
    else:
        assert found is not None
        assert found[1] == max(runs.values()) == runs[found[0]]


def test_a_removed_block_stays_with_its_other_holders() -> None:
    mirror = mirror_of(m1=range(2), m300=range(2))
    mirror.apply(1 << 300, b"", KEYS[0])
    mirror.apply(1 << 1, b"", KEYS[1])
    assert mirror.holders(KEYS[0]) == 1 << 1
    assert mirror.holders(KEYS[1]) == 1 << 300
    mirror.apply(1 << 1, b"", KEYS[0])
    assert len(mirror) == 1


def test_a_member_is_forgotten_everywhere_and_in_steps() -> None:
    many = [key(number) for number in range(3000)]
    mirror = Mirror()
    mirror.apply(1 << 1, pack_keys(many), b"")
    mirror.apply(1 << 2, pack_keys(many[:10]), b"")
    assert sum(1 for _ in mirror.removing_member(1)) > 10
    assert len(mirror) == 10
    assert mirror.holders(many[0]) == 1 << 2


def test_what_is_missed_during_a_sweep_is_forgotten_as_well() -> None:
    many = [key(number) for number in range(3000)]
    mirror = Mirror()
    mirror.apply(1 << 1, pack_keys(many), b"")
    mirror.apply(1 << 2, pack_keys(many[1000:]), b"")
    for step, _ in enumerate(mirror.removing_member(1)):
        mirror.missed(2, many[-1 - step])
        mirror.missed(1, many[step])
    missed = step + 1
    assert missed > 10
    assert not any(map(mirror.holders, many[:1000] + many[-missed:]))
    assert all(mirror.holders(kept) == 1 << 2 for kept in many[1000:-missed])
    for _ in mirror.removing_member(2):
        pass
    assert len(mirror) == 0


def test_a_missed_block_can_come_back() -> None:
    mirror = mirror_of(m1=range(2))
    mirror.missed(1, KEYS[0])
    mirror.missed(1, key(9999))
    assert mirror.holders(KEYS[0]) == 0
    mirror.apply(1 << 1, KEYS[0], b"")
    assert mirror.holders(KEYS[0]) == 1 << 1
    mirror.missed(1, KEYS[0])
    mirror.apply(1 << 1, b"", KEYS[0] + KEYS[1])
    assert len(mirror) == 0


def test_beyond_its_limit_the_oldest_go_and_it_says_so() -> None:
    mirror = Mirror(limit_bytes=200_000)
    full = mirror.limit
    mirror.apply(1 << 1, pack_keys(key(number) for number in range(full)), b"")
    assert (len(mirror), mirror.overflowed) == (full, False)
    mirror.apply(1 << 1, key(full), b"")
    assert mirror.overflowed
    assert len(mirror) <= mirror.limit
    assert mirror.holders(key(0)) == 0
    assert mirror.holders(key(full)) == 1 << 1
    mirror.reset()
    assert (len(mirror), mirror.overflowed) == (0, False)


def test_a_limit_below_one_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes=1 "):
        Mirror(limit_bytes=1)


@pytest.mark.parametrize("entries", [44_000, 65_536])
def test_an_entry_takes_at_most_its_share_of_the_limit(entries: int) -> None:
    mirror = Mirror()
    tracemalloc.start()
    try:
        for start in range(0, entries, 4000):
            numbers = range(start, min(start + 4000, entries))
            mirror.apply(1 << 12, pack_keys(key(number) for number in numbers), b"")
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(mirror) == entries
    assert used / entries <= ENTRY_BYTES


@pytest.mark.parametrize("limit_bytes", [200_000, 500_000, 1 << 20, 1_500_000])
def test_what_comes_and_goes_stays_within_the_limit(limit_bytes: int) -> None:
    mirror = Mirror(limit_bytes)
    tracemalloc.start()
    try:
        most = 0
        for start in range(0, 8 * mirror.limit, 500):
            mirror.apply(1, pack_keys(key(number) for number in range(start, start + 500)), b"")
            most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert mirror.overflowed
    assert limit_bytes / 3 < most <= limit_bytes
