# SPDX-License-Identifier: Apache-2.0
"""What peers say about their memory: whatever it is, it is used as it should be, or refused.

Handles come out of xoscar messages, and are opened on load threads: all that may come out of that
is :class:`TransportUnavailable`, which is counted with its reason.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import junk, mutated
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransportUnavailable, WorkerHandle
from xinference_xavier.transport.handles import check_handles
from xinference_xavier.transport.nixl_advert import Advert, TierRegions, decode
from xinference_xavier.transport.nixl_agent import Region
from xinference_xavier.transport.nixl_path import PathHints
from xinference_xavier.transport.shm import ShmTransport, host_id

SLOTS = 4
SLOT_BYTES = 128

ADVERT = Advert(
    agent=b"agent",
    slot_bytes=SLOT_BYTES,
    tiers={
        tier: TierRegions(
            Region("DRAM", 0, 1 << 40, SLOTS * SLOT_BYTES), Region("DRAM", 0, 1 << 41, SLOTS * 16)
        )
        for tier in Tier
    },
    path=PathHints(pid=1, address=1 << 40, token="ab" * 8, rdma=False),
)
DOCUMENT = json.loads(ADVERT.encode())


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena.create(SLOTS, SLOT_BYTES, "fuzzed")
    yield made
    made.close()


def handle_of(arena: Arena) -> WorkerHandle:
    return WorkerHandle(0, host_id(), "layout", dict.fromkeys(Tier, arena.handle()))


def connect(handle: Any, tier: Tier = Tier.HOST) -> bool:
    """Open a path by shared memory; whether that worked, and then it is the right memory."""
    try:
        connection = ShmTransport().connect(handle, tier)
    except TransportUnavailable:
        return False
    view = connection.view()
    assert view is not None
    assert (tuple(view.data.shape), view.data.dtype) == ((SLOTS, SLOT_BYTES), torch.uint8)
    assert (tuple(view.meta.shape), view.meta.dtype) == ((SLOTS, 2), torch.int64)
    connection.close()
    return True


def test_the_unchanged_handle_works(arena: Arena) -> None:
    [handle] = check_handles((handle_of(arena),))
    assert connect(handle)


@in_both_lanes(few=100, many=20_000)
@given(data=st.data())
def test_a_changed_handle_maps_the_arena_that_was_meant_or_nothing(data: st.DataObject) -> None:
    with contextlib.closing(Arena.create(SLOTS, SLOT_BYTES, "fuzzed")) as arena:
        changed = data.draw(mutated((handle_of(arena),)))
        try:
            handles = check_handles(changed)
        except ValueError:
            return
        for handle in handles:
            for tier in handle.arenas:
                connect(handle, tier)


@in_both_lanes(few=100, many=50_000)
@given(blob=st.one_of(st.binary(), mutated(DOCUMENT, junk).map(repr).map(str.encode)))
def test_bytes_that_are_no_advert_are_refused(blob: bytes) -> None:
    with pytest.raises(TransportUnavailable):
        decode(blob)


@in_both_lanes(few=100, many=50_000)
@given(document=mutated(DOCUMENT))
def test_a_changed_advert_names_whole_slots_or_is_refused(document: Any) -> None:
    with contextlib.suppress(TypeError, ValueError):  # JSON has no bytes
        blob = json.dumps(document).encode()
        try:
            advert = decode(blob)
        except TransportUnavailable:
            return
        assert advert.slot_bytes > 0
        for regions in advert.tiers.values():
            for region in (regions.data, regions.meta):
                assert 0 <= region.address < 1 << 63
                assert 0 <= region.address + region.nbytes < 1 << 63
            assert regions.data.nbytes == regions.meta.nbytes // 16 * advert.slot_bytes
