# SPDX-License-Identifier: Apache-2.0
"""Old and guessed handles. Those of each transport are tried in its own tests, with its peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from xinference_xavier.store.arena import Arena, ArenaHandle, ArenaUnavailable, MappedArena
from xinference_xavier.store.index import SnapshotIndex

KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def handle() -> Iterator[ArenaHandle]:
    arena = Arena.create(4, 4096, "guessed")
    yield arena.handle()
    arena.close()


def other(value: Any) -> Any:
    # Not 1: a mapping keeps a file descriptor of its own, often the next one.
    return bytes(len(value)) if isinstance(value, bytes) else value + 1000


@pytest.mark.parametrize("part", ["pid", "start_time", "fd", "inode", "nonce", "slots"])
def test_an_arena_is_mapped_by_its_whole_handle_only(handle: ArenaHandle, part: str) -> None:
    wrong = dataclasses.replace(handle, **{part: other(getattr(handle, part))})
    with pytest.raises(ArenaUnavailable):
        MappedArena.open(wrong)
    MappedArena.open(handle).close()


def test_the_handle_of_a_closed_arena_opens_no_later_one_in_its_place() -> None:
    first = Arena.create(4, 4096, "first")
    old = first.handle()
    first.close()
    second = Arena.create(4, 4096, "second")
    # The process, and mostly the number of the file, are the same.
    assert (second.handle().pid, second.handle().fd) == (old.pid, old.fd)
    with pytest.raises(ArenaUnavailable):
        MappedArena.open(old)
    with pytest.raises(ArenaUnavailable):
        MappedArena.open(dataclasses.replace(old, inode=second.handle().inode))
    second.close()


def test_what_one_process_promised_no_other_has() -> None:
    """NIXL reads by address: what it finds there counts only under the promised generation."""
    indices = [SnapshotIndex(device_slots=8, host_slots=4, spare_slots=2) for _ in range(3)]
    promised = []
    for index in indices:
        job = index.admit([(key, number) for number, key in enumerate(KEYS)])
        index.commit(job.job_id)
        promised.append({generation for _, _, _, generation, _ in job.stores})
        index.check_invariants()
    assert all(0 < generation < 2**63 for each in promised for generation in each)
    assert len(set().union(*promised)) == 3 * len(KEYS)
