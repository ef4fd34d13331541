# SPDX-License-Identifier: Apache-2.0
"""NIXL's agent, reduced to what the transport needs, with its two traps closed.

* The wrapper class of NIXL fixes the progress thread's delay to zero, and such a thread spins on
  a core for ever, also when nothing is transferred. So the bindings are used directly, with a
  delay: the thread then sleeps on UCX's event descriptor and the delay is only its longest sleep.
* Releasing a handle, and invalidating the remote agent, "succeed" while a transfer is running and
  do *not* stop it: the bytes still arrive later. So a transfer counts as ended only in the states
  of :meth:`Transfer.poll`; nothing here releases a running one except :meth:`Agent.close`, which
  destroys the UCX worker and with it every transfer.

``nixl`` is imported with the first agent, on the thread that makes it: plug-ins loaded late on a
helper thread can fail for lack of static TLS.
"""

from __future__ import annotations

import enum
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.store.threads import ALLOWED_CPUS
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.nixl_path import operator_chose

BACKEND = "UCX"
PROGRESS_SLEEP_US = 10_000
"""Longest sleep of the progress thread. Events wake it at once; an idle agent costs no CPU."""

DRAM, VRAM = "DRAM", "VRAM"


class NixlError(Exception):
    """A call into NIXL failed. Nothing was posted by it."""


@dataclass(frozen=True, slots=True)
class Region:
    """One registered piece of memory: kind (DRAM or VRAM), device index, address, bytes."""

    kind: str
    device: int
    address: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """Describe a tensor. Raises ValueError when it is not contiguous."""
        if not tensor.is_contiguous():
            raise ValueError(f"NIXL needs contiguous memory, got strides {tensor.stride()}")
        return cls(
            kind=VRAM if tensor.is_cuda else DRAM,
            device=max(tensor.get_device(), 0),
            address=tensor.data_ptr(),
            nbytes=tensor.numel() * tensor.element_size(),
        )


class State(enum.Enum):
    """What is known about a posted transfer."""

    RUNNING = enum.auto()
    DONE = enum.auto()
    DISCONNECTED = enum.auto()
    """The peer is gone; UCX closed the endpoint, so nothing arrives any more."""
    UNKNOWN = enum.auto()
    """Some part failed. Other parts may still run, and NIXL has no way to tell."""


class Transfer:
    """One posted READ. Used by one thread at a time; keep its agent open while it is RUNNING."""

    __slots__ = ("_agent", "_handle", "error", "state")

    def __init__(self, agent: Agent, handle: int) -> None:
        self._agent = agent
        self._handle: int | None = handle
        self.state = State.RUNNING
        self.error = ""

    def poll(self) -> State:
        """Ask NIXL, without blocking. A handle is released as soon as its end is certain."""
        if self.state is State.RUNNING and self._handle is not None:
            self._settle(self._agent.status(self._handle))
        return self.state

    def post(self) -> State:
        """Start it. A transfer from the same host may be complete when this returns."""
        if self._handle is not None:
            self._settle(self._agent.post(self._handle))
        return self.state

    def release(self) -> None:
        """Free the handle of a transfer that is not RUNNING, or whose agent ends next."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._agent.release(handle)

    def _settle(self, outcome: tuple[State, str]) -> None:
        self.state, self.error = outcome
        if self.state in (State.DONE, State.DISCONNECTED):
            self.release()


class Agent:
    """One NIXL agent with the UCX backend, safe for calls from several threads.

    Raises :class:`TransportUnavailable` when NIXL or its UCX plug-in is missing or does not start.
    """

    def __init__(self, name: str) -> None:
        self._nb = _bindings()
        self._errors: tuple[type[BaseException], ...] = tuple(
            value
            for key, value in vars(self._nb).items()
            if key.startswith("nixl") and key.endswith("Error") and isinstance(value, type)
        )
        config = self._nb.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_SLEEP_US
        config.useListenThread = False
        config.syncMode = self._nb.NIXL_THREAD_SYNC_RW
        try:
            with _all_cpus():
                self._raw: Any = self._nb.nixlAgent(name, config)
                plugins = self._raw.getAvailPlugins()
                if BACKEND not in plugins:
                    raise TransportUnavailable(
                        f"NIXL has no {BACKEND} plug-in (it has: {', '.join(plugins) or 'none'})"
                    )
                self._backends = [self._raw.createBackend(BACKEND, _backend_options())]
        except self._errors as exc:
            raise TransportUnavailable(f"NIXL's {BACKEND} backend does not start: {exc}") from exc
        self._registered: list[Any] = []

    # -- memory and peers

    def register(self, region: Region) -> None:
        """Register memory for local and remote access until :meth:`close`."""
        descriptors = self._nb.nixlRegDList(
            self._kind(region), [(region.address, region.nbytes, region.device, "")]
        )
        self._call("register memory", self._raw.registerMem, descriptors, self._backends)
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory."""
        return bytes(self._call("export metadata", self._raw.getLocalMD))

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return its agent name. Does not connect yet."""
        name = self._call("load a peer's metadata", self._raw.loadRemoteMD, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer. Only when none of its transfers is RUNNING."""
        self._call("remove a peer", self._raw.invalidateRemoteMD, name)

    # -- transfers

    def prepare(self, peer: str | None, region: Region, unit: int) -> int:
        """Prepare a region as a list of ``unit``-byte descriptors; ``peer`` None means our side."""
        rows = np.array(
            [[region.address, unit, region.device, unit, region.nbytes // unit]], dtype=np.uint64
        )
        return int(
            self._call(
                "prepare descriptors",
                self._raw.prepXferDlist,
                self._nb.NIXL_INIT_AGENT if peer is None else peer,
                self._kind(region),
                rows,
                self._backends,
            )
        )

    def release_prepared(self, prepared: int) -> None:
        """Free a list of :meth:`prepare`."""
        self._call("release descriptors", self._raw.releasedDlistH, prepared)

    def read(
        self,
        local: int,
        local_rows: npt.NDArray[np.int32],
        remote: int,
        remote_rows: npt.NDArray[np.int32],
    ) -> Transfer:
        """Make (not post) a READ of rows of a peer's prepared list into rows of ours."""
        handle = self._call(
            "make a transfer",
            self._raw.makeXferReq,
            self._nb.NIXL_READ,
            local,
            local_rows,
            remote,
            remote_rows,
            "",
            self._backends,
        )
        return Transfer(self, int(handle))

    def post(self, handle: int) -> tuple[State, str]:
        """Post a transfer. After an error here parts of it may be under way: UNKNOWN."""
        return self._state(self._raw.postXferReq, handle, b"")

    def status(self, handle: int) -> tuple[State, str]:
        """The state of a posted transfer."""
        return self._state(self._raw.getXferStatus, handle)

    def release(self, handle: int) -> None:
        """Free a transfer handle (this does not stop the transfer, whatever it returns)."""
        self._call("release a transfer", self._raw.releaseXferReq, handle)

    def close(self, running: Sequence[Transfer] = ()) -> None:
        """Deregister and destroy the agent: ends the transfers still ``running``. Idempotent.

        Nothing can write into our memory any more when this returns. Every step is tried; the
        first error is raised at the end.
        """
        if self._raw is None:
            return
        first: NixlError | None = None
        steps: list[Callable[[], object]] = [transfer.release for transfer in running]
        steps += [partial(self._deregister, item) for item in self._registered]
        for step in steps:
            try:
                step()
            except NixlError as exc:
                first = first or exc
        self._registered.clear()
        self._raw = None
        if first is not None:
            raise first

    def _deregister(self, descriptors: Any) -> None:
        self._call("deregister memory", self._raw.deregisterMem, descriptors, self._backends)

    def _kind(self, region: Region) -> Any:
        return self._nb.VRAM_SEG if region.kind == VRAM else self._nb.DRAM_SEG

    def _call(self, what: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except self._errors as exc:
            raise NixlError(f"NIXL could not {what}: {exc}") from exc

    def _state(self, function: Any, *args: Any) -> tuple[State, str]:
        try:
            status = function(*args)
        except self._nb.nixlRemoteDisconnectError as exc:
            return State.DISCONNECTED, str(exc)
        except self._errors as exc:
            return State.UNKNOWN, str(exc)
        if status == self._nb.NIXL_SUCCESS:
            return State.DONE, ""
        if status == self._nb.NIXL_IN_PROG:
            return State.RUNNING, ""
        return State.UNKNOWN, str(status)


def _backend_options() -> dict[str, str]:
    """Let UCX refuse what it could only emulate (see ``nixl_path``)."""
    return {} if operator_chose() else {"engine_config": "PROTO_EMULATION_ENABLE=n"}


def _bindings() -> Any:
    try:
        return importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as exc:
        raise TransportUnavailable(f"NIXL is not installed or does not load: {exc}") from exc


@contextmanager
def _all_cpus() -> Iterator[None]:
    """Widen the thread's CPU mask for a while: the progress thread started inside inherits it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALLOWED_CPUS)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
