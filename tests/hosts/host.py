# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: namespaces that share a kernel and the file system, and nothing else.

A host has its own network, processes, ``/proc``, ``/sys``, ``/dev/shm``, name, and boot id, so
that nothing in it sees a reason to share memory with another host. All of it hangs on one
process, the first in its PID namespace: when that ends, the kernel ends every process of the host
and removes its devices. It ends with the process that made it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

# The first process waits for a word on its input, so that the cable can be plugged in between.
# Segments leave one by one: a lost frame is then one packet, as on a wire.
_FIRST_PROCESS: Final = """
set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /proc/sys/kernel/random/boot_id
hostname "$2"
echo made
read -r _
ip link set lo up
ip address add "$3/24" dev eth0
ip link set eth0 up gso_max_segs 1
echo up
exec sleep infinity
"""


def require_hosts() -> None:
    """Skip the test where the kernel does not let this process make hosts."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here to make hosts with")
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c",
         "mount -t proc proc /proc && ip link add name one type veth peer name other"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"this kernel does not let us make hosts: {tried.stderr.strip()}")


class Host:
    """A host at ``address``; ``cable`` names the other end of its network device, which is here.

    ``folder`` must exist; the host's boot id is kept there.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"host{number}"
        self.address = f"198.51.100.{number}"  # of a net that is reserved for documentation
        self.mac = bytes((2, 0, 0, 0, 0, number))
        self.cable = f"xv{os.getpid() % 0xFFFFFF:x}p{number}"
        identity = folder / f"{self.name}.boot_id"
        identity.write_text(f"{uuid.uuid4()}\n")
        self._process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child",
             "sh", "-c", _FIRST_PROCESS, "sh", str(identity), self.name, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )  # fmt: skip
        try:
            self._expect("made")
            self._first = psutil.Process(self._process.pid).children()[0]
            self._plug_in()
            self._tell("plugged in")
            self._expect("up")
        except BaseException:
            self.close()
            raise

    @property
    def entering(self) -> list[str]:
        """What a command is prefixed with to run it on this host; its directory becomes "/"."""
        return [
            *("nsenter", "--target", str(self._first.pid)),
            *("--net", "--mount", "--pid", "--uts", "--ipc", "--"),
        ]

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Let the calling thread open its sockets on this host, for the length of the block."""
        with open("/proc/thread-self/ns/net") as home:
            with open(f"/proc/{self._first.pid}/ns/net") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def received(self) -> int:
        """Return the bytes that came in at its network device."""
        return self._counter("tx")  # what the other end sent

    def sent(self) -> int:
        """Return the bytes that went out at its network device."""
        return self._counter("rx")

    def set_link(self, state: str) -> None:
        """Set the cable "up" or "down"."""
        _ip("link", "set", self.cable, state)

    def processes(self) -> list[psutil.Process]:
        """Return what runs on it, besides the first process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = os.stat(f"/proc/{self._first.pid}/ns/pid").st_ino
            return [each for each in psutil.process_iter() if _is_in(each, first, self._first.pid)]
        return []

    def close(self) -> None:
        """End everything on it, and remove its cable. Idempotent."""
        # The kernel would do so, too, but later.
        subprocess.run(["ip", "link", "delete", self.cable], check=False, capture_output=True)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _plug_in(self) -> None:
        mac = ":".join(f"{byte:02x}" for byte in self.mac)
        _ip(
            *("link", "add", self.cable, "type", "veth"),
            *("peer", "name", "eth0", "address", mac, "netns", str(self._first.pid)),
        )
        # This machine takes no part in the hosts' network.
        Path(f"/proc/sys/net/ipv6/conf/{self.cable}/disable_ipv6").write_text("1")
        _ip("link", "set", self.cable, "arp", "off", "up")

    def _counter(self, direction: str) -> int:
        return int(Path(f"/sys/class/net/{self.cable}/statistics/{direction}_bytes").read_text())

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        if (line := self._process.stdout.readline().strip()) != word:
            raise RuntimeError(f"{self.name} said {line!r} instead of {word!r}")


def _is_in(process: psutil.Process, namespace: int, first: int) -> bool:
    try:
        inode = os.stat(f"/proc/{process.pid}/ns/pid").st_ino
    except OSError:
        return False
    return inode == namespace and process.pid != first


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _end_with_parent() -> None:
    # SIGTERM is what `unshare` ignores while its child runs.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
