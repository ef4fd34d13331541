# SPDX-License-Identifier: Apache-2.0
"""The local copy of the directory: which members are said to hold which block.

Written by the control thread only, read by the engine thread without a lock: every read is one
``dict.get``, which the interpreter makes atomic. What it says is a hint; the source decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from xinference_xavier.control.messages import chunks, unpack_keys

DEFAULT_LIMIT_BYTES = 64 << 20

ENTRY_BYTES = 92
"""One entry of a mirror that only grew, at most: a 32-byte int and 60 bytes of a new table."""

_INT_BYTES = 32
_BUCKET_BYTES = 20
"""Of a ``dict``: 4 of its index, and two thirds of an entry of 24."""

_GROWTH = 3
"""A ``dict`` that is full goes to the next power of two from so many buckets per entry on."""

_STEP = 256
"""Entries touched between two chances for other threads: some 100 us."""

_COMPACT = (1 << 60) - 1
# An entry is found by 60 bits of the key's own hash rather than by the key: an int of 32 bytes
# replaces a bytes object of 80, and vLLM's key objects have that hash cached. Two keys may share
# an entry; the source then simply does not grant the false one.


class Mirror:
    """Bounded map from compact keys to member sets.

    It stays within ``limit_bytes`` but for the moments in which its table is made anew. When it is
    full, the entries learnt longest ago are dropped and ``overflowed`` is set: from then on an
    unknown block may be known to the directory.
    """

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit = _entries_within(limit_bytes)
        if self.limit < 4 * _STEP:
            raise ValueError(f"limit_bytes={limit_bytes} holds fewer than {4 * _STEP} entries")
        self.overflowed = False
        self._members: dict[int, int] = {}
        # Small ints are shared by the interpreter, larger sets are shared here.
        self._sets: dict[int, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._members)

    # -- engine thread -------------------------------------------------------------------------

    def holders(self, key: bytes) -> int:
        """Return the set of members said to hold ``key``."""
        return self._members.get(hash(key) & _COMPACT, 0)

    def longest(
        self, keys: Sequence[bytes], start: int, usable_mask: int
    ) -> tuple[int, int] | None:
        """Find one usable member that holds the longest run of keys from ``start``.

        Returns (member number, blocks), or None when no usable member holds ``keys[start]``.
        Members that hold equally much take turns.
        """
        if start >= len(keys):
            return None
        get = self._members.get
        alive = get(hash(keys[start]) & _COMPACT, 0) & usable_mask
        if not alive:
            return None
        best = alive
        end = start
        for key in keys[start:]:
            alive &= get(hash(key) & _COMPACT, 0)
            if not alive:
                break
            best = alive
            end += 1
        if best & (best - 1):
            self._turn += 1
            for _ in range(self._turn % best.bit_count()):
                best &= best - 1
        return (best & -best).bit_length() - 1, end - start

    # -- control thread ------------------------------------------------------------------------

    def apply(self, members: int, added: bytes, removed: bytes) -> None:
        """Record that ``members`` hold ``added`` and not ``removed`` (keys, concatenated)."""
        for _ in self.applying(members, added, removed):
            pass

    def applying(self, members: int, added: bytes, removed: bytes) -> Iterator[None]:
        """Do :meth:`apply` in short steps, yielding between them.

        Nothing else may be applied before the last step.
        """
        table = self._members
        for part in chunks(unpack_keys(added), _STEP):
            if len(table) + len(part) > self.limit:
                self._shed()
            for key in part:
                compact = hash(key) & _COMPACT
                table[compact] = self._shared(table.get(compact, 0) | members)
            yield
        for number, key in enumerate(unpack_keys(removed), 1):
            self._drop(hash(key) & _COMPACT, members)
            if number % _STEP == 0:
                yield

    def missed(self, number: int, key: bytes) -> None:
        """Record that one member does not hold ``key``; also while other changes are under way.

        The entry stays, if need be for nobody: :meth:`removing_member` may be walking the table.
        """
        compact = hash(key) & _COMPACT
        if before := self._members.get(compact, 0):
            self._members[compact] = self._shared(before & ~(1 << number))

    def removing_member(self, number: int) -> Iterator[None]:
        """Forget everything that was said about one member, in short steps; yield between them.

        Nothing but :meth:`missed` may be applied before the last step, lest the member's next life
        lose entries to the sweep of its last.
        """
        bit = 1 << number
        held = []
        # No copy of all entries first: that alone would take milliseconds.
        for position, (compact, members) in enumerate(self._members.items(), 1):
            if members & bit or not members:
                held.append(compact)
            if position % _STEP == 0:
                yield
        for position, compact in enumerate(held, 1):
            self._drop(compact, bit)
            if position % _STEP == 0:
                yield
        self._sets.clear()

    def reset(self, *, overflowed: bool = False) -> None:
        """Forget everything, for a snapshot from the directory, with more if ``overflowed``."""
        self._members.clear()
        self._sets.clear()
        self.overflowed = overflowed

    def _shared(self, members: int) -> int:
        return self._sets.setdefault(members, members) if members > 256 else members

    def _drop(self, compact: int, members: int) -> None:
        before = self._members.get(compact)
        if before is None:
            return
        if rest := before & ~members:
            if rest != before:
                self._members[compact] = self._shared(rest)
        else:
            del self._members[compact]

    def _shed(self) -> None:
        # A sixteenth at once: a dict finds its oldest entry by walking over the holes before it.
        self.overflowed = True
        surplus = len(self._members) + _STEP - self.limit + self.limit // 16
        for compact in list(islice(self._members, surplus)):
            del self._members[compact]


def _entries_within(limit_bytes: int) -> int:
    """Return how many entries fit, whatever came and went before.

    A table grows by what has come, but is as large as those that are there need at that moment; so
    more entries than a table of some size is made for may suddenly take twice that size.
    """
    most, buckets = 0, 8
    while buckets * _BUCKET_BYTES < limit_bytes:
        room = (limit_bytes - buckets * _BUCKET_BYTES) // _INT_BYTES
        most = max(most, min(buckets // _GROWTH, room))
        buckets *= 2
    return most
