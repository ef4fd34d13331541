# SPDX-License-Identifier: Apache-2.0
"""Arenas: real budgets, sealed files, and handles that map the right memory or nothing."""

from __future__ import annotations

import dataclasses
import mmap
import os
from pathlib import Path

import pytest
import torch

from xinference_xavier.store import arena as arena_module
from xinference_xavier.store.arena import (
    Arena,
    ArenaError,
    ArenaUnavailable,
    MappedArena,
    process_start_time,
)

SLOTS, SLOT_BYTES = 5, 8192


@pytest.fixture
def arena():
    made = Arena.create(SLOTS, SLOT_BYTES, "test")
    yield made
    made.close()


def mappings(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_new_arena_is_zero_and_has_the_asked_shape(arena: Arena) -> None:
    assert arena.data.shape == (SLOTS, SLOT_BYTES)
    assert arena.meta.shape == (SLOTS, 2)
    assert arena.data.dtype == torch.uint8
    assert arena.meta.dtype == torch.int64
    assert not arena.data.any()
    assert not arena.meta.any()


def test_slots_are_packed_from_a_page_boundary(arena: Arena) -> None:
    assert arena.data.data_ptr() % 4096 == 0
    assert arena.data.stride() == (SLOT_BYTES, 1)


def test_all_pages_are_taken_at_creation() -> None:
    made = Arena.create(64, 65536, "resident")
    taken = os.fstat(made.handle().fd).st_blocks * 512
    made.close()
    assert taken >= 64 * 65536


def test_a_mapping_sees_what_the_owner_writes_later(arena: Arena) -> None:
    mapped = MappedArena.open(arena.handle())
    arena.data[3] = 7
    arena.meta[3, 0] = 41
    assert (mapped.data[3] == 7).all()
    assert not mapped.data[2].any()
    assert mapped.meta[3].tolist() == [41, 0]


def test_nobody_can_resize_or_write_the_file(arena: Arena) -> None:
    fd = os.open(f"/proc/self/fd/{arena.handle().fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1 << 30)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def test_closing_tells_readers_and_withdraws_the_slots(arena: Arena) -> None:
    arena.meta[1, 0] = 9
    mapped = MappedArena.open(arena.handle())
    assert mapped.alive()
    arena.close()
    assert not mapped.alive()
    assert mapped.meta[1, 0] == 0


def test_closing_twice_releases_memory_and_file_once() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = Arena.create(SLOTS, SLOT_BYTES, "once")
    mapped = MappedArena.open(made.handle())
    assert len(mappings("memfd:xavier-once")) == 2
    for _ in range(2):
        made.close()
        mapped.close()
    assert mappings("memfd:xavier-once") == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert not mapped.alive()


def test_memory_in_use_outlives_the_close_of_a_mapping(arena: Arena) -> None:
    arena.data[0] = 5
    mapped = MappedArena.open(arena.handle())
    held = mapped.data
    mapped.close()
    assert (held[0] == 5).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"start_time": 1}, "gone"),
        ({"pid": 2**22 + 1}, "gone"),
        ({"fd": 10**6}, "cannot open"),
        ({"inode": 1}, "another file"),
        ({"slots": SLOTS + 1}, "another file"),
        ({"nonce": bytes(16)}, "header"),
        ({"slots": SLOTS * 2, "slot_bytes": SLOT_BYTES // 2}, "header"),
    ],
)
def test_a_handle_that_is_wrong_in_one_field_maps_nothing(
    arena: Arena, change: dict[str, object], reason: str
) -> None:
    handle = dataclasses.replace(arena.handle(), **change)
    with pytest.raises(ArenaUnavailable, match=reason):
        MappedArena.open(handle)


def test_a_closed_arena_cannot_be_mapped() -> None:
    made = Arena.create(SLOTS, SLOT_BYTES, "closed")
    made.close()
    with pytest.raises(ArenaUnavailable):
        MappedArena.open(made.handle())


def test_more_memory_than_there_is_is_refused_before_it_is_touched() -> None:
    with pytest.raises(ArenaError, match="xavier_cpu_cache_bytes"):
        Arena.create(1 << 40, 65536, "huge")


def test_an_arena_that_cannot_be_populated_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(fd: int, offset: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(arena_module.os, "posix_fallocate", no_memory)
    with pytest.raises(ArenaError, match="Cannot allocate memory"):
        Arena.create(SLOTS, SLOT_BYTES, "failing")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (-1, 64), (1, 0), (1, 100)])
def test_sizes_that_make_no_arena_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        Arena.create(slots, slot_bytes, "bad")


def test_start_time_of_a_process_that_is_gone_is_none() -> None:
    assert process_start_time(2**22 + 1) is None
    assert process_start_time(os.getpid()) == process_start_time(os.getpid())
