# SPDX-License-Identifier: Apache-2.0
"""What the cables of the hosts end in: carries Ethernet frames between them, or does not.

Each direction between two hosts can be cut, slowed, or made to lose frames, while all others
stay healthy. Lost frames are chosen by a seeded generator.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.hosts.host import Host

# Of linux/if_packet.h; Python has no names for them.
_SOL_PACKET: Final = 263
_PACKET_VNET_HDR: Final = 15
_PACKET_IGNORE_OUTGOING: Final = 23

_EVERY_PROTOCOL: Final = socket.htons(3)
# A frame comes behind a header in which the kernel notes that its checksum is still to be made,
# which a veth leaves to a network card. The same header tells it so again on the way out.
_NOTE_BYTES: Final = 10
_LARGEST: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the frames of one direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of frames that are dropped."""
    spared_bytes: int = 0
    """What still passes before it begins."""


CUT: Final = Fault(loss=1.0)


class Hub:
    """Connects hosts. One daemon thread carries the frames."""

    def __init__(self, hosts: Sequence[Host], *, seed: int = 1) -> None:
        self._hosts = tuple(hosts)
        self._random = random.Random(seed)
        self._faults: dict[tuple[Host, Host], Fault] = {}
        self._spared: dict[tuple[Host, Host], int] = {}
        self._late: list[tuple[float, int, socket.socket, bytes]] = []
        self._order = itertools.count()
        self._ports = {host: _port(host.cable) for host in hosts}
        self._alarm, self._bell = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def between(self, sender: Host, receiver: Host, fault: Fault) -> Iterator[None]:
        """Give one direction a fault, for the length of the block."""
        self._spared[sender, receiver] = fault.spared_bytes
        self._faults[sender, receiver] = fault
        try:
            yield
        finally:
            del self._faults[sender, receiver]

    def began(self, sender: Host, receiver: Host) -> bool:
        """Return whether the fault of a direction has nothing to spare any more."""
        return self._spared[sender, receiver] <= 0

    def late(self) -> int:
        """Return how many frames are being held up."""
        return len(self._late)

    def close(self) -> None:
        """Carry no more frames."""
        self._bell.close()
        self._thread.join()
        self._alarm.close()
        for port in self._ports.values():
            port.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            for host, port in self._ports.items():
                selector.register(port, selectors.EVENT_READ, host)
            while True:
                for key, _ in selector.select(self._pause()):
                    if key.data is None:
                        return
                    self._take(key.data)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, port, frame = heapq.heappop(self._late)
                    _send(port, frame)

    def _pause(self) -> float | None:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else None

    def _take(self, sender: Host) -> None:
        try:
            frame = self._ports[sender].recv(_LARGEST)
        except OSError:  # its cable was just unplugged
            return
        target = frame[_NOTE_BYTES : _NOTE_BYTES + 6]
        for receiver, port in self._ports.items():
            # Everybody gets what is for a group; a host's own frames go to it alone.
            if receiver is sender or (receiver.mac != target and not target[0] & 1):
                continue
            fault = self._fault(sender, receiver, len(frame))
            if fault is None:
                _send(port, frame)
            elif self._random.random() >= fault.loss:
                due = time.monotonic() + fault.delay_s
                heapq.heappush(self._late, (due, next(self._order), port, frame))

    def _fault(self, sender: Host, receiver: Host, nbytes: int) -> Fault | None:
        fault = self._faults.get((sender, receiver))
        if fault is not None and self._spared[sender, receiver] > 0:
            self._spared[sender, receiver] -= nbytes
            return None
        return fault


def _port(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    port.bind((device, socket.ntohs(_EVERY_PROTOCOL)))
    port.setblocking(False)
    return port


def _send(port: socket.socket, frame: bytes) -> None:
    # A wire has no place to keep what nobody takes, nor one to go to when it is unplugged.
    with contextlib.suppress(OSError):
        port.send(frame)
