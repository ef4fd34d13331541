# SPDX-License-Identifier: Apache-2.0
"""Whether NIXL reaches a peer's memory without the peer's help.

UCX reads directly over RDMA, and on one host with the kernel's cross-memory attach (CMA). Where it
has nothing but sockets it emulates a READ: the *source* sends the bytes. Besides being slow, that
endangers the source: when it is stalled, or the network is cut, while a reader vanishes, UCX may
abort the source's process as it goes on ("Fatal: unexpected error: Endpoint timeout", seen with UCX
in NIXL 1.5.1). No setting of UCX changes that: sending the answer fails, and there that is fatal. A
reader must not be able to take a serving worker down, so such peers are left to the xoscar
transport, unless ``UCX_TLS`` is set: then the choice of transports is the operator's.

There are two guards. :func:`obstacle` predicts the path before anything is sent. And our agents
have UCX's emulation switched off (``nixl_agent``), so that a READ for which UCX finds no direct
path fails with the peer's first slot: a GPU's memory needs GPUDirect RDMA, or CUDA IPC on one host,
and only UCX can tell whether it has that.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class PathHints:
    """What a worker tells peers so that they can predict the path. Plain data.

    ``pid`` as seen by itself, the ``address`` of a random ``token`` (hex) in its memory, and
    whether it has RDMA devices.
    """

    pid: int
    address: int
    token: str
    rdma: bool


class PathProbe:
    """This worker's hints, and the memory that they point at: keep it while they are in use."""

    def __init__(self) -> None:
        token = os.urandom(16)
        self._memory = ctypes.create_string_buffer(token, len(token))
        address = ctypes.addressof(self._memory)
        self.hints = PathHints(os.getpid(), address, token.hex(), _has_rdma())


def operator_chose() -> bool:
    """Whether the operator has chosen UCX's transports, and with them what is emulated."""
    return "UCX_TLS" in os.environ


def obstacle(ours: PathHints, theirs: PathHints) -> str | None:
    """Return why READs from that peer would be emulated, or None when they are direct."""
    if operator_chose() or (ours.rdma and theirs.rdma):
        return None
    refusal = _cma_refusal(theirs)
    if refusal is None:
        return None
    return (
        f"UCX has only sockets to this peer (no RDMA device on both sides, and no access to its "
        f"memory: {refusal}); UCX_TLS can allow NIXL over them, but then readers that vanish may "
        "abort the source's process"
    )


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _cma_refusal(peer: PathHints) -> str | None:
    """Read the peer's token as UCX's CMA transport would, and compare it.

    The comparison matters: in another container or on another host the pid is somebody else's.
    """
    token = bytes.fromhex(peer.token)
    buffer = ctypes.create_string_buffer(len(token))
    local = _Span(ctypes.addressof(buffer), len(token))
    remote = _Span(peer.address, len(token))
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    count = read(
        ctypes.c_int(peer.pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    if count < 0:
        return os.strerror(ctypes.get_errno())
    return None if buffer.raw == token else "it is not the process of that number here"
