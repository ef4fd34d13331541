# SPDX-License-Identifier: Apache-2.0
"""The fault table: which faults strike at which boundary, and what must be seen then.

A boundary and a fault are either a :class:`Cell`, which is run on real engines, or have a reason
why they make no sense together. Plain data: nothing of an engine is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tests.faults.switch import Strike

FAULTS: Final = (
    "raise",
    "hang",
    "slow",
    "short data",
    "wrong bytes",
    "wrong epoch",
    "wrong generation",
)

Transport = Literal["shm", "nixl", "xoscar"]

Check = Literal["stored before", "stored under it", "waits"]
"""Whether documents are stored before the fault is on, or while it is. ``waits``: the one request
that the fault holds is answered when it ends, others meanwhile."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """``point`` is where `boundaries` wraps it, in ``place``'s processes; loads go over
    ``transport``."""

    name: str
    place: str
    point: str
    transport: Transport = "shm"


@dataclass(frozen=True, slots=True)
class Cell:
    """What to do, and what must be seen.

    ``asked`` is the number of requests, each about a document of its own. ``counted`` is the number
    that grows, as "member: path in its status", or "" where nothing failed. ``opens`` tells whether
    the source's breaker opens. ``also`` are faults without which the boundary is not crossed.
    """

    boundary: Boundary
    fault: str
    counted: str = ""
    asked: int = 2
    opens: bool = False
    check: Check = "stored before"
    also: tuple[Strike, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.boundary.name} x {self.fault}"

    @property
    def strikes(self) -> tuple[Strike, ...]:
        return (Strike(self.boundary.place, self.boundary.point, self.fault), *self.also)


JOIN: Final = Boundary("directory: join", "directory", "directory.join")
PUBLISH: Final = Boundary("directory: register", "directory", "directory.publish")
POLL: Final = Boundary("directory: poll", "directory", "directory.poll")
INTRODUCE: Final = Boundary("peer: introduce", "source", "peer.introduce")
RESERVE: Final = Boundary("peer: reserve", "source", "peer.reserve")
RENEW: Final = Boundary("peer: renew", "source", "peer.renew")
RELEASE: Final = Boundary("peer: release", "source", "peer.release")
SHM_CONNECT: Final = Boundary("shm: map", "reader", "shm.connect")
SHM_READ: Final = Boundary("shm: read", "reader", "shm.read")
NIXL_CONNECT: Final = Boundary("nixl: connect", "reader", "nixl.connect", "nixl")
NIXL_READ: Final = Boundary("nixl: read", "reader", "nixl.read", "nixl")
NIXL_TRANSFER: Final = Boundary("nixl: read", "reader", "nixl.transfer", "nixl")
XOSCAR_CONNECT: Final = Boundary("xoscar: connect", "source", "xoscar.connect", "xoscar")
XOSCAR_READ: Final = Boundary("xoscar: read", "source", "xoscar.read", "xoscar")
LOAD_COPY: Final = Boundary("copy into KV blocks", "reader", "copy.load")
STORE_COPY: Final = Boundary("copy into the store", "source", "copy.store")
DEMOTION: Final = Boundary("demotion", "source", "copy.demote")
LOAD_MARK: Final = Boundary("mark before a load", "reader", "fence.mark")
STORE_MARK: Final = Boundary("mark before a store", "source", "fence.mark")
LOAD_AFTER: Final = Boundary("wait for a load's mark", "reader", "fence.after")
STORE_AFTER: Final = Boundary("wait for a store's mark", "source", "fence.after")
LOAD_FENCE: Final = Boundary("fence of a load", "reader", "fence.wait")
STORE_FENCE: Final = Boundary("fence of a store", "source", "fence.wait")
COMMIT: Final = Boundary("commit", "source", "index.commit")
ANNOUNCE: Final = Boundary("publication", "source", "control.publish")

TO_OPEN: Final = 4
"""Requests that three failures and one more take: the last one meets an open breaker."""

DIRECTORY_FAILED: Final = "reader: control.directory_failures"
REJOINED: Final = "reader: control.joins"
RESERVE_FAILED: Final = "reader: control.counters.reserve failed"
FAILED: Final = "reader: traffic.loads_failed."

_RENAMED: Final = Strike("directory", "directory.poll", "wrong epoch")
_REFUSED: Final = Strike("source", "peer.reserve", "raise")


def _join(fault: str, counted: str) -> Cell:
    # Nobody joins unless the directory has forgotten somebody.
    return Cell(JOIN, fault, counted, also=(_RENAMED,))


def _introduce(fault: str, counted: str) -> Cell:
    # A peer that was met is met again only once its breaker has opened.
    return Cell(INTRODUCE, fault, counted, asked=TO_OPEN, opens=True, also=(_REFUSED,))


def _read(boundary: Boundary, fault: str, reason: str, *, opens: bool = True) -> Cell:
    counted = f"{FAILED}{reason}" if reason else ""
    return Cell(boundary, fault, counted, asked=TO_OPEN if opens else 2, opens=opens)


def _store(boundary: Boundary, fault: str, reason: str) -> Cell:
    counted = f"source: {reason}" if reason else ""
    return Cell(boundary, fault, counted, check="stored under it")


CELLS: Final = (
    _join("raise", DIRECTORY_FAILED),
    _join("hang", DIRECTORY_FAILED),
    _join("slow", REJOINED),
    _join("short data", DIRECTORY_FAILED),
    Cell(PUBLISH, "raise", "source: control.directory_failures", check="stored under it"),
    Cell(PUBLISH, "hang", "source: control.directory_failures", check="stored under it"),
    Cell(PUBLISH, "slow", check="stored under it"),
    Cell(PUBLISH, "short data", check="stored under it"),
    Cell(PUBLISH, "wrong bytes", check="stored under it"),
    Cell(PUBLISH, "wrong epoch", "source: control.joins", check="stored under it"),
    Cell(POLL, "raise", DIRECTORY_FAILED, check="stored under it"),
    Cell(POLL, "hang", DIRECTORY_FAILED, check="stored under it"),
    Cell(POLL, "slow", check="stored under it"),
    Cell(POLL, "short data", REJOINED, check="stored under it"),
    Cell(POLL, "wrong bytes", check="stored under it"),
    Cell(POLL, "wrong epoch", REJOINED, check="stored under it"),
    _introduce("raise", RESERVE_FAILED),
    _introduce("hang", RESERVE_FAILED),
    _introduce("slow", RESERVE_FAILED),
    _introduce("short data", RESERVE_FAILED),
    _introduce("wrong epoch", RESERVE_FAILED),
    Cell(RESERVE, "raise", RESERVE_FAILED, asked=TO_OPEN, opens=True),
    Cell(RESERVE, "hang", RESERVE_FAILED, asked=TO_OPEN, opens=True),
    Cell(RESERVE, "slow"),
    Cell(RESERVE, "short data", RESERVE_FAILED, asked=TO_OPEN, opens=True),
    _read(RESERVE, "wrong bytes", "generation"),
    Cell(RESERVE, "wrong epoch", RESERVE_FAILED),
    _read(RESERVE, "wrong generation", "generation"),
    Cell(RENEW, "raise", "reader: control.counters.renewals failed"),
    Cell(RENEW, "hang", "reader: control.counters.renewals failed"),
    Cell(RENEW, "slow"),
    Cell(RENEW, "short data", "reader: control.counters.renewals failed"),
    Cell(RENEW, "wrong epoch", "reader: control.counters.lost"),
    Cell(RELEASE, "raise", "reader: control.counters.releases failed"),
    Cell(RELEASE, "hang", "reader: control.counters.releases failed"),
    Cell(RELEASE, "slow"),
    Cell(RELEASE, "wrong epoch"),
    _read(SHM_CONNECT, "raise", "transfer"),
    _read(SHM_CONNECT, "hang", "timeout"),
    _read(SHM_CONNECT, "slow", "", opens=False),
    _read(SHM_READ, "raise", "transfer"),
    _read(SHM_READ, "short data", "transfer"),
    _read(SHM_READ, "wrong bytes", "checksum"),
    _read(SHM_READ, "wrong generation", "generation"),
    _read(NIXL_CONNECT, "raise", "transfer"),
    _read(NIXL_CONNECT, "hang", "timeout"),
    _read(NIXL_CONNECT, "slow", "", opens=False),
    _read(NIXL_READ, "raise", "transfer"),
    _read(NIXL_TRANSFER, "hang", "timeout"),
    _read(NIXL_READ, "slow", "", opens=False),
    _read(NIXL_READ, "short data", "transfer"),
    _read(NIXL_READ, "wrong bytes", "checksum"),
    _read(NIXL_READ, "wrong generation", "generation"),
    _read(XOSCAR_CONNECT, "raise", "unavailable"),
    _read(XOSCAR_CONNECT, "hang", "unavailable"),
    _read(XOSCAR_CONNECT, "slow", "", opens=False),
    _read(XOSCAR_READ, "raise", "transfer"),
    _read(XOSCAR_READ, "hang", "timeout"),
    _read(XOSCAR_READ, "slow", "", opens=False),
    _read(XOSCAR_READ, "short data", "transfer"),
    _read(XOSCAR_READ, "wrong bytes", "checksum"),
    _read(XOSCAR_READ, "wrong generation", "generation"),
    _read(LOAD_COPY, "raise", "transfer"),
    Cell(LOAD_COPY, "hang", check="waits"),
    _read(LOAD_COPY, "slow", "", opens=False),
    _read(LOAD_COPY, "short data", "checksum"),
    _read(LOAD_COPY, "wrong bytes", "checksum"),
    _store(STORE_COPY, "raise", "traffic.saves_failed.InjectedFault: copy.store"),
    _store(STORE_COPY, "hang", ""),
    _store(STORE_COPY, "slow", ""),
    _store(STORE_COPY, "short data", "traffic.saves_failed.checksum"),
    _store(STORE_COPY, "wrong bytes", "traffic.saves_failed.checksum"),
    _store(DEMOTION, "raise", "traffic.saves_failed.InjectedFault: copy.demote"),
    _store(DEMOTION, "hang", ""),
    _store(DEMOTION, "slow", ""),
    _store(DEMOTION, "short data", "traffic.saves_failed.checksum"),
    _store(DEMOTION, "wrong bytes", "traffic.saves_failed.checksum"),
    _read(LOAD_MARK, "raise", "not started", opens=False),
    _store(STORE_MARK, "raise", "traffic.saves_failed.not started"),
    _read(LOAD_AFTER, "raise", "transfer"),
    _store(STORE_AFTER, "raise", "traffic.saves_failed.InjectedFault: fence.after"),
    _read(LOAD_FENCE, "raise", "transfer"),
    Cell(LOAD_FENCE, "hang", check="waits"),
    _read(LOAD_FENCE, "slow", "", opens=False),
    _store(STORE_FENCE, "raise", "traffic.saves_failed.InjectedFault: fence.wait"),
    _store(STORE_FENCE, "hang", ""),
    _store(STORE_FENCE, "slow", ""),
    _store(COMMIT, "raise", "traffic.errors.commit"),
    _store(COMMIT, "wrong epoch", ""),
    _store(ANNOUNCE, "raise", "traffic.errors.publish"),
)

REPRESENTATIVES: Final = (
    "peer: reserve x hang",
    "shm: read x wrong bytes",
    "commit x raise",
)
"""Cells that run with every change."""

_MEMORY: Final = "a mapping is memory, which neither waits nor ends early"
_CALL: Final = "the answer carries no such thing"
_NO_DATA: Final = "brings no data"
_BYTES: Final = "copies bytes, whatever they mean"
_BOOKKEEPING: Final = "bookkeeping in this process's memory, which waits for nobody"

_BY_BOUNDARY: Final[dict[str, dict[str, str]]] = {
    JOIN.name: dict.fromkeys(("wrong bytes", "wrong epoch", "wrong generation"), _CALL),
    PUBLISH.name: {"wrong generation": _CALL},
    POLL.name: {"wrong generation": _CALL},
    INTRODUCE.name: {
        "wrong bytes": "the handle names memory; reading it is the transports' part",
        "wrong generation": _CALL,
    },
    RENEW.name: dict.fromkeys(("wrong bytes", "wrong generation"), _CALL),
    RELEASE.name: dict.fromkeys(("short data", "wrong bytes", "wrong generation"), _CALL),
    SHM_READ.name: {**dict.fromkeys(("hang", "slow"), _MEMORY), "wrong epoch": _CALL},
    NIXL_READ.name: {"wrong epoch": _CALL},
    XOSCAR_READ.name: {"wrong epoch": _CALL},
    **{
        boundary.name: dict.fromkeys(
            ("short data", "wrong bytes", "wrong epoch", "wrong generation"), _NO_DATA
        )
        for boundary in (SHM_CONNECT, NIXL_CONNECT, XOSCAR_CONNECT, LOAD_FENCE, STORE_FENCE)
    },
    **{
        boundary.name: dict.fromkeys(("wrong epoch", "wrong generation"), _BYTES)
        for boundary in (LOAD_COPY, STORE_COPY, DEMOTION)
    },
    **{
        boundary.name: {
            **dict.fromkeys(("hang", "slow"), "only notes a point in a stream"),
            **dict.fromkeys(
                ("short data", "wrong bytes", "wrong epoch", "wrong generation"), _NO_DATA
            ),
        }
        for boundary in (LOAD_MARK, STORE_MARK, LOAD_AFTER, STORE_AFTER)
    },
    **{
        boundary.name: {
            **dict.fromkeys(("hang", "slow"), _BOOKKEEPING),
            **dict.fromkeys(("short data", "wrong bytes", "wrong generation"), _NO_DATA),
        }
        for boundary in (COMMIT, ANNOUNCE)
    },
}

SKIPPED: Final[dict[tuple[str, str], str]] = {
    (boundary, fault): reason
    for boundary, reasons in _BY_BOUNDARY.items()
    for fault, reason in reasons.items()
} | {(ANNOUNCE.name, "wrong epoch"): "the directory: register x wrong epoch"}
"""Why a boundary and a fault make no sense together."""

BOUNDARIES: Final = tuple(dict.fromkeys(cell.boundary.name for cell in CELLS))
