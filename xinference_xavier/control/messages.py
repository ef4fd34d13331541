# SPDX-License-Identifier: Apache-2.0
"""What directory, peers and replicas say to each other: plain data, no behaviour.

Keys are vLLM block hashes of exactly ``KEY_BYTES`` bytes. They travel concatenated in one
``bytes``, at most ``MAX_KEYS`` per message. A set of members is an int whose bit ``n`` stands for
member number ``n``; numbers start at 1, so bit 0 (the reader's own store) is never set.

This module imports nothing heavy: the directory runs in processes that have no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from struct import iter_unpack
from typing import TYPE_CHECKING, TypeVar

from xinference_xavier.store.records import KEY_BYTES

if TYPE_CHECKING:
    from xinference_xavier.transport.base import WorkerHandle

T = TypeVar("T")

MAX_KEYS = 4096
"""Keys in one message, at most: 128 KiB, some milliseconds of work on any side."""

DIGEST_BYTES = 32
"""Length of a fingerprint, and of what is made from a group's secret."""

NAME_CHARACTERS = 1024
"""Longest name, of a member or a request, and longest address."""

MAX_TRAITS = 64
TRAIT_CHARACTERS = 64
"""Most traits of a member, and longest name and digest of one."""

WEIGHTS_TRAIT = "weights"
"""The trait that tells whether two replicas run the same weights."""

Row = tuple[int, int, int]
"""Tier, slot, generation of one leased block."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Every duration of the control plane, in seconds. Tests make them short.

    A lease never outlives ``heartbeat_s``, and the reader counts it from before it asked.
    """

    heartbeat_s: float = 10.0
    """A member that is silent for this long is gone, with all its blocks."""
    promise_s: float = 2.0
    """Life of a grant that nothing was allocated for yet; never renewed."""
    lease_s: float = 8.0
    """Life that every renewal of a held grant asks for."""
    renew_s: float = 2.0
    reap_s: float = 0.5
    reserve_timeout_s: float = 1.0
    call_timeout_s: float = 2.0
    batch_s: float = 0.005
    retry_min_s: float = 0.1
    retry_max_s: float = 2.0
    breaker_min_s: float = 1.0
    breaker_max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.lease_s > self.heartbeat_s:
            raise ValueError(
                f"lease_s={self.lease_s} exceeds heartbeat_s={self.heartbeat_s}: a dead reader's "
                "lease must end before its membership is forgotten"
            )


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One replica as the others see it.

    ``name`` is stable over restarts, ``epoch`` (63 random bits) is not: it is new for every
    process, and again after the member was declared dead. ``started`` is in seconds of the
    member's wall clock, for display only. ``workers`` is empty on the way through the directory
    (which would need torch to read it); the runtime asks the peer itself. ``traits`` are names and
    digests of what the fingerprint is made of.
    """

    name: str
    epoch: int
    address: str
    host_id: str
    started: float
    workers: tuple[WorkerHandle, ...] = ()
    traits: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a member shows with every message to the directory after it joined.

    ``group`` is its admission and its fingerprint, see :func:`group_id`.
    """

    incarnation: int
    group: bytes = field(repr=False)
    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Credential:
    """What a member wants to see with every call: its group's fingerprint, its epoch, and a proof.

    ``proof`` (32 bytes) is made from the group's secret, see ``trust``.
    """

    fingerprint: bytes
    epoch: int
    proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to a join. ``heartbeat_s`` is the directory's, whoever created it.

    ``strangers`` counts members with the same fingerprint that showed another admission: of the
    same model, but with another secret. ``unlike`` counts members with the same admission and the
    same weights, but another fingerprint; ``differing`` names the traits in which they differ.
    """

    ticket: Ticket
    heartbeat_s: float
    strangers: int = 0
    unlike: int = 0
    differing: tuple[str, ...] = ()


class Reply(Enum):
    """Answer to a publication. No ``StrEnum``: xoscar sends those as plain strings."""

    OK = "ok"
    STALE = "stale"
    """The directory does not know this ticket (any more): join again with a new epoch."""
    RESEND = "resend"
    """A publication is missing: clear, and send everything again."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One numbered change of what a member holds.

    ``seq`` counts from 1 after a join. ``clear`` withdraws everything first, carries no keys, and
    is accepted after a gap.
    """

    seq: int
    added: bytes = b""
    removed: bytes = b""
    clear: bool = False


@dataclass(frozen=True, slots=True)
class MemberJoined:
    number: int
    info: MemberInfo


@dataclass(frozen=True, slots=True)
class MemberGone:
    number: int


@dataclass(frozen=True, slots=True)
class MemberCleared:
    number: int


@dataclass(frozen=True, slots=True)
class Delta:
    """``members`` (a set) now hold ``added`` and no longer hold ``removed``."""

    members: int
    added: bytes = b""
    removed: bytes = b""


Event = MemberJoined | MemberGone | MemberCleared | Delta


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a member has read: log ``version``, and ``page`` while it still reads a snapshot."""

    version: int
    page: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Answer to a poll: events in order; ``reset`` means forget everything first.

    ``partial``, beside ``reset``: there are more keys than were asked for.
    """

    cursor: Cursor
    events: tuple[Event, ...] = ()
    reset: bool = False
    partial: bool = False


class Refused(Enum):
    """Why a peer granted nothing, apart from not holding the first block."""

    FINGERPRINT = "wrong fingerprint"
    EPOCH = "stale epoch"
    SECRET = "wrong secret"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """``rows`` (see :func:`pack_rows`) of the leased prefix; no rows and lease 0 for a miss.

    The source leases a few hundred blocks at a time: ``lease_id`` is the lease on the first rows,
    ``further`` are those on the rest. ``missing`` says that the first key not granted is not here
    at all; otherwise it may be: beyond the reader's share, or on its way between the tiers.
    """

    lease_id: int
    rows: bytes
    further: tuple[int, ...] = ()
    missing: bool = False


def group_id(admission: bytes, fingerprint: bytes) -> bytes:
    """Return what names a group at its directory; ``ValueError`` unless both have 32 bytes."""
    if len(admission) != DIGEST_BYTES or len(fingerprint) != DIGEST_BYTES:
        raise ValueError(
            f"an admission of {len(admission)} bytes and a fingerprint of {len(fingerprint)}: both "
            f"have {DIGEST_BYTES}"
        )
    return admission + fingerprint


def check_member(info: object) -> None:
    """Raise ``ValueError`` unless ``info`` is a :class:`MemberInfo` that every member can use."""
    good = isinstance(info, MemberInfo) and (
        all(_is_name(text) for text in (info.name, info.address, info.host_id))
        and isinstance(info.epoch, int)
        and 0 <= info.epoch < 1 << 63
        and isinstance(info.started, int | float)
        and info.workers == ()
        and _are_traits(info.traits)
    )
    if not good:
        raise ValueError(f"no member: {info!r:.200}")


def _is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= NAME_CHARACTERS


def _are_traits(traits: object) -> bool:
    return (
        isinstance(traits, tuple)
        and len(traits) <= MAX_TRAITS
        and all(isinstance(trait, tuple) and len(trait) == 2 for trait in traits)
        and all(isinstance(text, str) and len(text) <= TRAIT_CHARACTERS for text in chain(*traits))
    )


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Concatenate keys for one message."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """Split what :func:`pack_keys` made; ``ValueError`` on odd or oversized input."""
    check_keys(packed)
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def check_keys(packed: bytes) -> int:
    """Return the number of keys in ``packed``; ``ValueError`` if they cannot be keys."""
    if not isinstance(packed, bytes):
        raise ValueError(f"keys of type {type(packed).__name__}")
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise ValueError(f"{len(packed)} bytes of keys are not a multiple of {KEY_BYTES}")
    if count > MAX_KEYS:
        raise ValueError(f"{count} keys in one message, at most {MAX_KEYS} are allowed")
    return count


def chunks(items: Sequence[T], size: int = MAX_KEYS) -> Iterator[Sequence[T]]:
    """Cut a sequence into pieces, of as many keys as go into a message by default."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def pack_rows(rows: Iterable[Sequence[int]]) -> bytes:
    """Pack rows as int64 triples; enum tiers would otherwise pickle one by one."""
    return array("q", chain.from_iterable(rows)).tobytes()


def unpack_rows(packed: bytes) -> list[Row]:
    """Undo :func:`pack_rows`."""
    return list(iter_unpack("=qqq", packed))
