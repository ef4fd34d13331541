# SPDX-License-Identifier: Apache-2.0
"""``xo.copy_to`` from a peer's arena into our staging slots: the reference path and fallback.

Every worker runs an actor pool with one actor, which copies the slots that a reader asks for into
the reader's buffer refs and then returns their meta rows. Two schemes exist. ``tcp`` is xoscar's
plain socket: it needs no NIXL, costs nothing while idle, and is the fallback that is left when
NIXL is missing or broken. ``nixl`` makes xoscar itself use NIXL; it is there to compare with and
proven by tests, but not what ``xavier_transport=xoscar`` starts: xoscar keeps a progress thread
spinning on a core per connection, on both sides, and overlapping buffers end its process.

Slots in a GPU's memory are copied into host memory first, on a thread of their own, and travel from
there: slower than any other way, and the one that always is.

When can a failed copy no longer write? Incoming bytes find their place only through the buffer of
a ref, and the NIXL channel holds on to the buffers that it has registered. So the buffers of a
fetch are objects of their own (views of the staging slots), we drop ours when the fetch ends, and
the slots are quarantined until the last of those objects is gone.

Threads: the pool's loop runs in the daemon thread "xavier-xoscar"; fetches wait in any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import importlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xoscar as xo

from xinference_xavier.store.device import Device
from xinference_xavier.store.jobs import Tier
from xinference_xavier.store.threads import start_thread
from xinference_xavier.transport.base import (
    CLOSE_S,
    Connection,
    SlotView,
    TransferFailed,
    TransferTimeout,
    Transport,
    TransportUnavailable,
    WorkerHandle,
)
from xinference_xavier.transport.staging import peer_rows, require_staging, staging_rows

logger = logging.getLogger(__name__)

ACTOR_UID = "xinference-xavier-slots"
START_LIMIT_S = 20.0
CONNECT_LIMIT_S = 2.0

MOST_SLOTS = 1 << 16
"""Slots in one push, at most: more than any reader has for staging."""

Scheme = Literal["tcp", "nixl"]
Run = tuple[int, int]
"""First slot and number of slots."""

T = TypeVar("T")


class SlotServer(xo.Actor):  # type: ignore[misc]  # xoscar ships no types
    """Copies slots of its process into a reader's buffers. Methods run concurrently.

    Both want to see the nonce of the tier's arena, which only its handle tells: an address may be
    guessed, or be that of another worker by now.
    """

    def __init__(
        self,
        views: dict[Tier, SlotView],
        nonces: Mapping[Tier, bytes],
        slot_bytes: int,
        bounce: Bounce | None,
    ) -> None:
        super().__init__()
        self._views = views
        self._nonces = nonces
        self._slot_bytes = slot_bytes
        self._bounce = bounce

    @xo.no_lock  # type: ignore[untyped-decorator]  # as above
    async def describe(self, tier: int, nonce: bytes) -> tuple[int, int]:
        """Return the bytes of a slot and the number of slots of a tier, 0 where it is not here."""
        view = self._views.get(Tier(tier))
        if view is None:
            return self._slot_bytes, 0
        self._check(Tier(tier), nonce)
        return self._slot_bytes, len(view.data)

    @xo.no_lock  # type: ignore[untyped-decorator]  # as above
    async def push(
        self, tier: int, nonce: bytes, runs: list[Run], refs: list[Any]
    ) -> npt.NDArray[np.int64]:
        """Copy run ``i`` into ``refs[i]``; then return the meta rows, int64 ``[slots, 2]``."""
        self._check(Tier(tier), nonce)
        view = self._views[Tier(tier)]
        slots = _slots(runs, len(view.data))
        if len(refs) != len(runs):
            raise ValueError(f"{len(refs)} buffers for {len(runs)} runs")
        data = view.data
        if self._bounce is not None and data.is_cuda:
            data = await asyncio.wrap_future(self._bounce.start(data, slots))
            ends = itertools.accumulate(count for _, count in runs)
            runs = [(end - count, count) for (_, count), end in zip(runs, ends, strict=True)]
        buffers, seen = [], set[int]()
        for first, count in runs:
            rows = data[first : first + count].view(-1)
            # xoscar's NIXL channel registers each buffer, and the process dies of a segmentation
            # fault when it drops registrations that overlap.
            repeated = not seen.isdisjoint(range(first, first + count))
            buffers.append((rows.clone() if repeated else rows).numpy())
            seen.update(range(first, first + count))
        await xo.copy_to(buffers, refs)
        return view.meta[slots].numpy()

    def _check(self, tier: Tier, nonce: bytes) -> None:
        if not hmac.compare_digest(self._nonces[tier], nonce):
            raise ValueError(f"the {tier.name} tier here is not the one that was announced")


class Bounce:
    """Copies slots out of a GPU's memory, on one thread ``xavier-bounce``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "xavier-bounce")

    def start(
        self, data: torch.Tensor, slots: Sequence[int]
    ) -> concurrent.futures.Future[torch.Tensor]:
        """Return what will be the slots one after the other, uint8 ``[len(slots), slot_bytes]``."""
        return self._thread.submit(self._copy, data, np.array(slots, dtype=np.int64))

    def close(self) -> None:
        """Wait for a copy that runs; afterwards the arena may go."""
        self._thread.shutdown(cancel_futures=True)

    def _copy(self, data: torch.Tensor, slots: npt.NDArray[np.int64]) -> torch.Tensor:
        rows = torch.empty((len(slots), data.shape[1]), dtype=torch.uint8)
        try:
            self._device.move(data, slots, rows, np.arange(len(slots), dtype=np.int64))
        finally:
            self._device.fence()
        return rows


class _Landing:
    """Where the bytes of one fetch land: buffers that nothing but this fetch refers to."""

    def __init__(self, staging: frozenset[int], buffers: list[npt.NDArray[np.uint8]]) -> None:
        self.staging = staging
        self.buffers = buffers
        self._watch = [weakref.ref(buffer) for buffer in buffers]

    def abandon(self) -> None:
        """Drop our references. Later messages for these buffers find nothing."""
        self.buffers.clear()

    def reachable(self) -> bool:
        """Whether somebody can still write: xoscar holds a buffer."""
        return any(ref() is not None for ref in self._watch)


class XoscarTransport(Transport):
    """Owns the pool of this worker. ``host`` is the address that peers reach us at.

    ``views`` are our own arenas, ``nonces`` those of their handles. ``staging`` is a range of slots
    of the host tier, the only memory that is written. ``device`` copies from the GPU, for a KV
    cache that is on one. Raises :class:`TransportUnavailable` when the pool does not start.
    """

    name: ClassVar[str] = "xoscar"

    def __init__(
        self,
        *,
        views: Mapping[Tier, SlotView],
        nonces: Mapping[Tier, bytes],
        slot_bytes: int,
        staging: range,
        host: str,
        device: Device | None = None,
        scheme: Scheme = "tcp",
    ) -> None:
        self._views = {tier: view for tier, view in views.items() if len(view.data)}
        require_staging(self._views, {Tier.HOST: staging}, slot_bytes)
        if scheme == "nixl":
            _load_nixl()
        self._nonces = dict(nonces)
        self._slot_bytes = slot_bytes
        self._staging = staging
        self._bind = f"nixl://{host}:0" if scheme == "nixl" else f"{host}:0"
        self._bounce = Bounce(device) if device is not None else None
        self._lock = threading.Lock()
        self._overdue: list[_Landing] = []
        self._closed = False
        self._stop_s = CLOSE_S
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._thread = start_thread(self._serve, "xavier-xoscar")
        try:
            self.address = self._started.result(START_LIMIT_S)
        except Exception as exc:  # whatever keeps a pool from starting: the transport is optional
            self.close()
            raise TransportUnavailable(f"no xoscar pool at {self._bind}: {exc!r}") from exc

    def connect(
        self, peer: WorkerHandle, tier: Tier, *, deadline: float = math.inf
    ) -> XoscarConnection:
        """Ask the peer's actor what it holds, for at most :data:`CONNECT_LIMIT_S`."""
        if peer.xoscar is None:
            raise TransportUnavailable("the peer has no xoscar pool")
        limit = min(deadline, time.monotonic() + CONNECT_LIMIT_S)
        try:
            nonce = peer.arenas[tier].nonce
            ref, slot_bytes, slots = self._call(_describe(peer.xoscar, tier, nonce), limit)
        except Exception as exc:  # any error of the peer or on the way makes it unavailable
            raise TransportUnavailable(f"no answer from {peer.xoscar}: {_told(exc)}") from exc
        if slot_bytes != self._slot_bytes:
            raise TransportUnavailable(
                f"the peer's slots have {slot_bytes} bytes, ours {self._slot_bytes}"
            )
        if not slots:
            raise TransportUnavailable(f"the peer does not offer its {tier.name} tier")
        return XoscarConnection(self, ref, tier, nonce, slots)

    def quarantined(self, tier: Tier) -> frozenset[int]:
        """Host slots whose buffers xoscar still holds after a fetch that failed."""
        if tier is not Tier.HOST:
            return frozenset()
        with self._lock:
            self._overdue = [landing for landing in self._overdue if landing.reachable()]
            return frozenset().union(*(landing.staging for landing in self._overdue))

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Stop the pool: running fetches fail, and peers reach us no more.

        What arrives late is written into buffers that keep their memory, which is never a GPU's.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            self._stop_s = deadline_s
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning("the xoscar pool at %s did not stop in time", self._bind)
        if self._bounce is not None:
            self._bounce.close()
        # The actor shares this dict: with it the arenas' memory is let go.
        self._views.clear()
        return True

    # -- the loop's thread

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run_pool())
        finally:
            self._loop.close()

    async def _run_pool(self) -> None:
        try:
            pool = await xo.create_actor_pool(
                self._bind, n_process=0, enable_internal_addresses=[False]
            )
            address = pool.external_address
            await xo.create_actor(
                SlotServer,
                self._views,
                self._nonces,
                self._slot_bytes,
                self._bounce,
                address=address,
                uid=ACTOR_UID,
            )
        except Exception as exc:  # reported by the constructor
            self._started.set_exception(exc)
            return
        self._started.set_result(address)
        await self._stop.wait()
        # A hung peer may keep any of these from ending: each gets its time, and then we go.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        stop = asyncio.ensure_future(pool.stop())
        await asyncio.wait({stop}, timeout=self._stop_s / 3)
        for call in calls:
            call.cancel()
        await asyncio.wait({*calls, stop}, timeout=self._stop_s / 3)

    # -- the fetching threads

    def _call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine on the loop. Raises TransferTimeout at the deadline, or its error."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise TransferFailed("the xoscar transport is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        concurrent.futures.wait([future], timeout=max(deadline - time.monotonic(), 0.0))
        if not future.done():
            future.cancel()
            raise TransferTimeout("the xoscar call did not end in time")
        return future.result()

    def _fetch(
        self,
        ref: Any,
        tier: Tier,
        nonce: bytes,
        theirs: npt.NDArray[np.int32],
        ours: npt.NDArray[np.int32],
        deadline: float,
    ) -> torch.Tensor:
        """Fetch the peer's slots ``theirs`` into rows ``ours`` of the staging range."""
        if self._closed:
            raise TransferFailed("the xoscar transport is closed")
        order = np.argsort(theirs, kind="stable")
        runs = _runs(theirs[order], ours[order])
        landing = self._landing(ours[order], [count for _, count in runs])
        try:
            pushed = self._call(_push(ref, self.address, tier, nonce, runs, landing), deadline)
        except BaseException:
            landing.abandon()
            with self._lock:
                self._overdue.append(landing)
            raise
        landing.abandon()
        meta = torch.empty((len(theirs), 2), dtype=torch.int64)
        meta[torch.from_numpy(order)] = torch.from_numpy(np.array(pushed))
        return meta

    def _landing(self, rows: npt.NDArray[np.int32], counts: list[int]) -> _Landing:
        """Make a buffer for each run of staging rows."""
        staging = rows.astype(np.int64) + self._staging.start
        ends = np.cumsum(counts)
        host = self._views[Tier.HOST].data
        buffers = [
            host[staging[end - count] : staging[end - count] + count].view(-1).numpy()
            for end, count in zip(ends, counts, strict=True)
        ]
        return _Landing(frozenset(staging.tolist()), buffers)


class XoscarConnection(Connection):
    """The path to one peer's actor, for one tier of ``slots`` slots."""

    transport: ClassVar[str] = XoscarTransport.name

    def __init__(
        self, owner: XoscarTransport, ref: Any, tier: Tier, nonce: bytes, slots: int
    ) -> None:
        self._owner = owner
        self._ref = ref
        self._tier = tier
        self._nonce = nonce
        self._slots = slots
        self._open = True

    def view(self) -> SlotView | None:
        return None

    def fetch(
        self, slots: Sequence[int], staging: Sequence[int], *, deadline: float
    ) -> torch.Tensor:
        if not self._open:
            raise TransferFailed("the connection is closed")
        if not len(slots):
            return torch.empty((0, 2), dtype=torch.int64)
        theirs = peer_rows(slots, self._slots, self._tier)
        ours = staging_rows(slots, staging, self._owner._staging)
        try:
            return self._owner._fetch(self._ref, self._tier, self._nonce, theirs, ours, deadline)
        except TransferFailed:
            raise
        except (OSError, xo.ServerClosed, xo.SendMessageFailed) as exc:
            self._open = False
            raise TransferFailed(f"the peer is gone: {exc!r}") from exc
        except Exception as exc:  # the peer's actor raised; xoscar re-raises any type here
            raise TransferFailed(f"the peer failed: {_told(exc)}") from exc

    def alive(self) -> bool:
        """False once a call has met a closed connection."""
        return self._open and not self._owner._closed

    def close(self) -> None:
        self._open = False


async def _describe(address: str, tier: Tier, nonce: bytes) -> tuple[Any, int, int]:
    ref = await xo.actor_ref(address=address, uid=ACTOR_UID)
    slot_bytes, slots = await ref.describe(int(tier), nonce)
    return ref, slot_bytes, slots


async def _push(
    ref: Any, address: str, tier: Tier, nonce: bytes, runs: list[Run], landing: _Landing
) -> npt.NDArray[np.int64]:
    # The refs find the buffers through weak references; only the landing keeps them.
    refs = [xo.buffer_ref(address, buffer) for buffer in landing.buffers]
    pushed: npt.NDArray[np.int64] = await ref.push(int(tier), nonce, runs, refs)
    return pushed


def _slots(runs: Sequence[Run], among: int) -> list[int]:
    """Return the slots of runs. Raises ValueError, before any is listed, if one is not ``among``
    the tier's, or they are too many."""
    outside = any(first < 0 or count < 1 or first + count > among for first, count in runs)
    if not runs or outside or sum(count for _, count in runs) > MOST_SLOTS:
        raise ValueError(f"runs {runs!r:.200} are not up to {MOST_SLOTS} slots among {among}")
    return [slot for first, count in runs for slot in range(first, first + count)]


def _told(error: BaseException) -> str:
    """Return an error's type and text; ``repr`` of one that came from a peer has no text."""
    return f"{type(error).__name__}: {error}"


def _runs(slots: npt.NDArray[np.int32], staging: npt.NDArray[np.int32]) -> list[Run]:
    """Join rows that are neighbours on both sides; ``slots`` is sorted."""
    cuts = np.flatnonzero((np.diff(slots) != 1) | (np.diff(staging) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(slots)]
    return [(int(slots[a]), b - a) for a, b in itertools.pairwise(bounds)]


def _load_nixl() -> None:
    """Load NIXL here, on the caller's thread, before the loop's thread needs it."""
    try:
        importlib.import_module("nixl")
    except (ImportError, OSError) as exc:
        raise TransportUnavailable(f"NIXL is not installed or does not load: {exc}") from exc
