# SPDX-License-Identifier: Apache-2.0
"""Packing of keys and rows."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xoscar.serialization.core import deserialize, serialize

import xinference_xavier.control.actors  # noqa: F401  # tells xoscar how they travel
from xinference_xavier.control.messages import (
    MAX_KEYS,
    Credential,
    LeaseGrant,
    Timing,
    chunks,
    pack_keys,
    pack_rows,
    unpack_keys,
    unpack_rows,
)
from xinference_xavier.store.jobs import Tier


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_keys_survive_packing(keys: list[bytes]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys


@pytest.mark.parametrize(
    ("packed", "message"),
    [(bytes(33), "33 bytes"), (bytes(32 * (MAX_KEYS + 1)), f"at most {MAX_KEYS}")],
)
def test_what_cannot_be_keys_is_refused(packed: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_keys(packed)


def test_rows_survive_packing_and_lose_their_enum() -> None:
    rows = [(Tier.DEVICE, 3, 1 << 40), (Tier.HOST, 0, 7)]
    unpacked = unpack_rows(pack_rows(rows))
    assert unpacked == rows
    assert {type(row[0]) for row in unpacked} == {int}


def test_chunks_are_complete_and_bounded() -> None:
    keys = [bytes([number]) for number in range(10)]
    assert [list(part) for part in chunks(keys, 4)] == [keys[:4], keys[4:8], keys[8:]]
    assert list(chunks([], 4)) == []


def test_a_lease_longer_than_the_heartbeat_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lease_s=8\.0 exceeds heartbeat_s=5\.0"):
        Timing(heartbeat_s=5.0)


@pytest.mark.parametrize(
    "message",
    [
        Credential(bytes(32), (1 << 63) - 1, b"p" * 32),
        LeaseGrant(7, pack_rows([(1, 2, 3)]), (8, 9), missing=True),
        LeaseGrant(0, b""),
    ],
)
def test_the_messages_of_a_lease_travel_as_plain_values(message: object) -> None:
    header, buffers = serialize(message)
    assert type(message).__name__.encode() not in b"".join([pickle.dumps(header), *buffers])
    assert deserialize(header, buffers) == message


def test_a_message_with_fields_too_many_is_refused() -> None:
    header, buffers = serialize(Credential(bytes(32), 1, bytes(32)))
    (first, *rest) = header
    with pytest.raises(TypeError, match="positional arguments"):
        deserialize((first | {}, (*rest[0], 4), *rest[1:]), buffers)
