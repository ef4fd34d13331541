# SPDX-License-Identifier: Apache-2.0
"""Doubly linked lists threaded through slot numbers: the LRU orders and the free lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter


class Rings:
    """Several disjoint ordered lists over the ids ``0 .. ids-1``; each id is in at most one.

    Every list is a ring through its own sentinel (``ids + ring``), so that no operation has a
    special case for an end. Front is the least recently used end, back the most recently used.
    All operations are O(1) per id. Nothing is checked: removing an id that is not in that ring
    corrupts it, so the owner must know where each id is.

    The links are Python lists which share one int object per id: 16 bytes per id, and faster to
    follow than an ``array``, which makes a new int for each access.
    """

    def __init__(self, names: Sequence[int], rings: int) -> None:
        """``names`` are the ids ``0 .. n-1`` as int objects, shared with other ``Rings``."""
        self.ids = len(names)
        sentinels = [self.ids + ring for ring in range(rings)]
        self.following: list[int] = [*names, *sentinels]
        self.preceding: list[int] = [*names, *sentinels]
        self.sizes = [0] * rings

    def sentinel(self, ring: int) -> int:
        """The node before the first and after the last id of ``ring``."""
        return self.ids + ring

    def first(self, ring: int) -> int | None:
        """The id at the front, or None."""
        node = self.following[self.ids + ring]
        return node if node < self.ids else None

    def first_of(self, ring: int, most: int) -> list[int]:
        """The ids at the front, at most ``most``, front to back."""
        following = self.following
        found = []
        node = following[self.ids + ring]
        while most > 0 and node < self.ids:
            found.append(node)
            node = following[node]
            most -= 1
        return found

    def pop(self, ring: int, most: int) -> list[int]:
        """Take ids off the front, at most ``most``; returns them front to back."""
        taken = self.first_of(ring, most)
        if taken:
            sentinel = self.ids + ring
            after = self.following[taken[-1]]
            self.following[sentinel] = after
            self.preceding[after] = sentinel
            self.sizes[ring] -= len(taken)
        return taken

    def insert_after(self, ring: int, node: int, new: int) -> None:
        """Put ``new`` behind ``node``, which is in ``ring`` or is its sentinel."""
        following, preceding = self.following, self.preceding
        after = following[node]
        following[node] = preceding[after] = new
        preceding[new] = node
        following[new] = after
        self.sizes[ring] += 1

    def extend(self, ring: int, news: Sequence[int]) -> None:
        """Put all of ``news`` at the back, in their order."""
        self._insert_all(ring, self.preceding[self.ids + ring], news)

    def extend_front(self, ring: int, news: Sequence[int]) -> None:
        """Put all of ``news`` at the front, in their order."""
        self._insert_all(ring, self.ids + ring, news)

    def remove(self, ring: int, node: int) -> None:
        """Take ``node`` out of ``ring``."""
        before, after = self.preceding[node], self.following[node]
        self.following[before] = after
        self.preceding[after] = before
        self.sizes[ring] -= 1

    def remove_all(self, ring: int, nodes: Sequence[int]) -> None:
        """Take every one of ``nodes`` (all different) out of ``ring``."""
        following, preceding = self.following, self.preceding
        if _lead_along(preceding, nodes):
            # The blocks of a prefix, its end used least recently: what links them stays behind.
            nodes_before, nodes_after = preceding[nodes[-1]], following[nodes[0]]
            following[nodes_before] = nodes_after
            preceding[nodes_after] = nodes_before
        else:
            for node in nodes:
                before, after = preceding[node], following[node]
                following[before] = after
                preceding[after] = before
        self.sizes[ring] -= len(nodes)

    def replace_all(self, nodes: Sequence[int], news: Sequence[int]) -> None:
        """Put each of ``news``, which are in no ring, at the place of its node, which leaves."""
        following, preceding = self.following, self.preceding
        for node, new in zip(nodes, news, strict=True):
            before, after = preceding[node], following[node]
            preceding[new] = before
            following[new] = after
            following[before] = preceding[after] = new

    def splice(self, source: int, target: int) -> None:
        """Move everything in ring ``source`` to the back of ring ``target``, in its order."""
        if not self.sizes[source]:
            return
        following, preceding = self.following, self.preceding
        start, end = self.ids + source, self.ids + target
        head, tail, last = following[start], preceding[start], preceding[end]
        following[last], preceding[head] = head, last
        following[tail], preceding[end] = end, tail
        self.sizes[target] += self.sizes[source]
        self.reset(source)

    def reset(self, ring: int) -> None:
        """Forget what is in ``ring``."""
        sentinel = self.ids + ring
        self.following[sentinel] = self.preceding[sentinel] = sentinel
        self.sizes[ring] = 0

    def _insert_all(self, ring: int, last: int, news: Sequence[int]) -> None:
        following, preceding = self.following, self.preceding
        after = following[last]
        for new in news:
            following[last] = new
            preceding[new] = last
            last = new
        following[last] = after
        preceding[after] = last
        self.sizes[ring] += len(news)

    def walk(self, ring: int) -> Iterator[int]:
        """All ids of ``ring``, front to back. The ring must not change meanwhile."""
        node = self.following[self.ids + ring]
        while node < self.ids:
            yield node
            node = self.following[node]


def _lead_along(links: list[int], nodes: Sequence[int]) -> bool:
    """Whether ``links`` lead through all of ``nodes`` (more than two), in their order."""
    return (
        len(nodes) > 2
        and links[nodes[0]] == nodes[1]
        and itemgetter(*nodes[:-1])(links) == tuple(nodes[1:])
    )
