# SPDX-License-Identifier: Apache-2.0
"""Wraps the functions at each boundary of the product so that faults can strike there.

A wrapped function raises, hangs until the fault is turned off, is slow, or gives what an
``Alteration`` of its point makes of the real outcome. Installed once per process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tests.faults.switch import SLOW_S, InjectedFault, Switch

Alteration = Callable[..., Any]
"""Takes the original function and its arguments; returns (or awaits to) the altered outcome."""

Alterations = Mapping[str, Alteration]


def wrap(
    owner: type[Any],
    name: str,
    point: str,
    alterations: Alterations | None = None,
    *,
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
) -> None:
    """Let faults strike at ``owner.name`` where ``applies`` to the call."""
    original = getattr(owner, name)
    switch = Switch.of_process()
    altered = alterations or {}

    def enter(kind: str | None) -> Callable[..., Any]:
        if kind in altered:
            return functools.partial(altered[kind], original)
        if kind == "raise":
            raise InjectedFault(point)
        return original

    @functools.wraps(original)
    def crossing(*args: Any, **kwargs: Any) -> Any:
        kind = switch.strike(point) if applies(*args, **kwargs) else None
        if kind == "hang" and kind not in altered:
            switch.wait_for_end(point)
        if kind == "slow":
            time.sleep(SLOW_S)
        return enter(kind)(*args, **kwargs)

    @functools.wraps(original)
    async def async_crossing(*args: Any, **kwargs: Any) -> Any:
        kind = switch.strike(point) if applies(*args, **kwargs) else None
        while kind == "hang" and switch.kind(point):
            await asyncio.sleep(0.01)
        if kind == "slow":
            await asyncio.sleep(SLOW_S)
        return await enter(kind)(*args, **kwargs)

    # functools.wraps keeps the mark with which xoscar runs a method beside the others.
    setattr(owner, name, async_crossing if inspect.iscoroutinefunction(original) else crossing)


# -- the directory's process -----------------------------------------------------------------------


def install_directory() -> None:
    from xinference_xavier.control import messages
    from xinference_xavier.control.directory_actor import DirectoryActor
    from xinference_xavier.control.messages import Delta, Publication, Reply, Update

    async def stale(original: Any, *args: Any) -> Any:
        return Reply.STALE

    async def nothing(original: Any, *args: Any) -> Any:
        return None

    def republish(change: Callable[[bytes], bytes]) -> Alteration:
        async def publish(original: Any, self: Any, ticket: Any, publication: Publication) -> Any:
            added = change(publication.added)
            return await original(self, ticket, dataclasses.replace(publication, added=added))

        return publish

    def repoll(change: Callable[[bytes], bytes]) -> Alteration:
        async def poll(original: Any, *args: Any) -> Any:
            update = await original(*args)
            if not isinstance(update, Update):
                return update
            events = tuple(
                dataclasses.replace(event, added=change(event.added))
                if isinstance(event, Delta)
                else event
                for event in update.events
            )
            return dataclasses.replace(update, events=events)

        return poll

    def flipped(keys: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in keys)

    def cut(keys: bytes) -> bytes:
        return keys[:-5]

    def half(keys: bytes) -> bytes:
        return messages.pack_keys(messages.unpack_keys(keys)[::2])

    wrap(DirectoryActor, "join", "directory.join", {"short data": nothing})
    wrap(
        DirectoryActor,
        "publish",
        "directory.publish",
        {"short data": republish(half), "wrong bytes": republish(flipped), "wrong epoch": stale},
    )
    wrap(
        DirectoryActor,
        "poll",
        "directory.poll",
        {"short data": repoll(cut), "wrong bytes": repoll(flipped), "wrong epoch": stale},
    )


# -- an engine's processes -------------------------------------------------------------------------


def install_engine() -> None:
    from xinference_xavier.control import runtime
    from xinference_xavier.control.messages import Timing

    # Shorter, so that breakers and leases end within a test.
    runtime.Timing = functools.partial(  # type: ignore[assignment,misc]
        Timing, breaker_min_s=0.3, breaker_max_s=1.0, retry_max_s=0.5, call_timeout_s=1.0
    )
    _wrap_peer()
    _wrap_publication()
    _wrap_copies()
    _wrap_connecting()
    _wrap_shm()
    _wrap_nixl()
    _wrap_xoscar()


def _wrap_peer() -> None:
    from xinference_xavier.control.messages import Credential, Row, pack_rows, unpack_rows
    from xinference_xavier.control.peer import PeerActor

    async def no_workers(original: Any, *args: Any) -> Any:
        return ()

    def other_rows(change: Callable[[bytes], bytes]) -> Alteration:
        async def reserve(original: Any, *args: Any) -> Any:
            grant = await original(*args)
            return dataclasses.replace(grant, rows=change(grant.rows))

        return reserve

    def each(change: Callable[[Row], Iterable[int]]) -> Callable[[bytes], bytes]:
        return lambda rows: pack_rows([tuple(change(row)) for row in unpack_rows(rows)])

    async def of_another_epoch(original: Any, self: Any, shown: Credential, *args: Any) -> Any:
        return await original(self, dataclasses.replace(shown, epoch=shown.epoch + 1), *args)

    async def none_of_them(original: Any, *args: Any) -> Any:
        await original(*args)
        return []

    wrap(
        PeerActor,
        "introduce",
        "peer.introduce",
        {"short data": no_workers, "wrong epoch": of_another_epoch},
    )
    wrap(
        PeerActor,
        "reserve",
        "peer.reserve",
        {
            "short data": other_rows(lambda rows: rows[:-8]),
            "wrong bytes": other_rows(each(lambda row: (row[0], row[1] ^ 1, row[2]))),
            "wrong epoch": of_another_epoch,
            "wrong generation": other_rows(each(lambda row: (row[0], row[1], row[2] + 1))),
        },
    )
    wrap(
        PeerActor,
        "renew",
        "peer.renew",
        {"short data": none_of_them, "wrong epoch": of_another_epoch},
    )
    wrap(PeerActor, "release", "peer.release", {"wrong epoch": of_another_epoch})


def _wrap_publication() -> None:
    from xinference_xavier.control.runtime import ControlRuntime
    from xinference_xavier.store.index import SnapshotIndex

    def outdated(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.clear()
        return original(self, *args, **kwargs)

    wrap(SnapshotIndex, "commit", "index.commit", {"wrong epoch": outdated})
    wrap(ControlRuntime, "publish", "control.publish")


def _wrap_copies() -> None:
    from xinference_xavier.store.device import CpuDevice

    def fewer(*places: int) -> Alteration:
        def copy(original: Any, *args: Any) -> Any:
            shorter = list(args)
            for place in places:
                shorter[place] = args[place][: len(args[place]) // 2]
            return original(*shorter)

        return copy

    def flip_slot(original: Any, self: Any, *args: Any) -> Any:
        original(self, *args)
        data, slots = args[-2], args[-1]
        data[int(slots[0]), 0] ^= 1

    def flip_block(
        original: Any, self: Any, data: torch.Tensor, slots: Any, block_ids: Any
    ) -> None:
        original(self, data, slots, block_ids)
        for band in self._bands:
            band._blocks[int(block_ids[0]), 0, 0] ^= 1

    def into_arena(self: Any, block_ids: Any, data: torch.Tensor, slots: Any) -> bool:
        # Not where checksums are taken: there a fault is a mere failure to see one.
        return threading.current_thread().name == "xavier-copy" and len(data) > 16

    wrap(
        CpuDevice,
        "gather",
        "copy.store",
        {"short data": fewer(1, 3), "wrong bytes": flip_slot},
        applies=into_arena,
    )
    wrap(
        CpuDevice,
        "scatter",
        "copy.load",
        {"short data": fewer(2, 3), "wrong bytes": flip_block},
    )
    wrap(CpuDevice, "move", "copy.demote", {"short data": fewer(2, 4), "wrong bytes": flip_slot})
    wrap(CpuDevice, "mark", "fence.mark")
    wrap(CpuDevice, "after", "fence.after")
    wrap(CpuDevice, "fence", "fence.wait")


def _wrap_connecting() -> None:
    """Let loads open their connections anew where a fault waits for that."""
    from xinference_xavier.transport.loader import LoadEngine

    switch = Switch.of_process()
    submit = LoadEngine.submit

    def disconnected(self: Any, *args: Any) -> Any:
        if any(point.endswith(".connect") for point in switch.points()):
            for link in list(self._links._links.values()):
                self._links._retire(link)
        return submit(self, *args)

    LoadEngine.submit = disconnected  # type: ignore[method-assign]


def _wrap_shm() -> None:
    from xinference_xavier.transport.base import SlotView
    from xinference_xavier.transport.shm import ShmConnection, ShmTransport

    def seen(change: Callable[[torch.Tensor, torch.Tensor], SlotView]) -> Alteration:
        def view(original: Any, self: Any) -> Any:
            real = original(self)
            return None if real is None else change(real.data, real.meta)

        return view

    def flipped(data: torch.Tensor, meta: torch.Tensor) -> SlotView:
        copy = data.clone()
        copy[:, 0] ^= 1
        return SlotView(copy, meta)

    wrap(ShmTransport, "connect", "shm.connect")
    wrap(
        ShmConnection,
        "view",
        "shm.read",
        {
            "short data": seen(lambda data, meta: SlotView(data[:1], meta[:1])),
            "wrong bytes": seen(flipped),
            "wrong generation": seen(lambda data, meta: SlotView(data, meta + 1)),
        },
    )


def _wrap_nixl() -> None:
    from xinference_xavier.transport.nixl import NixlTransport
    from xinference_xavier.transport.nixl_agent import State, Transfer

    def flipped(original: Any, self: Any, *args: Any) -> Any:
        meta = original(self, *args)
        into, staging = args[2], args[4]
        self._views[into].data[staging[0], 0] ^= 1
        return meta

    def running(original: Any, self: Any) -> Any:
        original(self)
        return State.RUNNING

    wrap(NixlTransport, "connect", "nixl.connect")
    wrap(
        NixlTransport,
        "_fetch",
        "nixl.read",
        {
            "short data": lambda original, *args: original(*args)[:-1],
            "wrong bytes": flipped,
            "wrong generation": lambda original, *args: original(*args) + 1,
        },
    )
    # A transfer that runs on and on: its end is known when the fault is over.
    wrap(Transfer, "post", "nixl.transfer", {"hang": running})
    wrap(Transfer, "poll", "nixl.transfer", {"hang": running})


def _wrap_xoscar() -> None:
    from xinference_xavier.transport.base import SlotView
    from xinference_xavier.transport.xoscar import SlotServer

    async def cut(original: Any, *args: Any) -> Any:
        return (await original(*args))[:-1]

    def from_other_views(change: Callable[[SlotView], SlotView]) -> Alteration:
        async def push(original: Any, self: Any, *args: Any) -> Any:
            views, self._views = (
                self._views,
                {tier: change(view) for tier, view in self._views.items()},
            )
            try:
                return await original(self, *args)
            finally:
                self._views = views

        return push

    class Damaged:
        """Data whose slots are damaged as they are taken; to copy all of them takes too long."""

        is_cuda = False

        def __init__(self, data: torch.Tensor) -> None:
            self._data = data

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, slots: slice) -> torch.Tensor:
            taken = self._data[slots].clone()
            taken[:, 0] ^= 1
            return taken

    def flipped(view: SlotView) -> Any:
        return SlotView(Damaged(view.data), view.meta)  # type: ignore[arg-type]

    wrap(SlotServer, "describe", "xoscar.connect")
    wrap(
        SlotServer,
        "push",
        "xoscar.read",
        {
            "short data": cut,
            "wrong bytes": from_other_views(flipped),
            "wrong generation": from_other_views(lambda view: SlotView(view.data, view.meta + 1)),
        },
    )
