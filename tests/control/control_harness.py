# SPDX-License-Identifier: Apache-2.0
"""Replicas and directories in processes of their own, driven over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from xinference_xavier.control.messages import MemberInfo
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime, Timing, run_directory
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.store.index import SnapshotIndex

FINGERPRINT = b"p" * 32
NAMESPACE = "test-model"
SECRET = "the secret of the tests"

QUICK = Timing(
    heartbeat_s=1.0,
    promise_s=0.4,
    lease_s=0.8,
    renew_s=0.1,
    reap_s=0.05,
    reserve_timeout_s=0.5,
    call_timeout_s=1.0,
    batch_s=0.001,
    retry_min_s=0.02,
    retry_max_s=0.1,
    breaker_min_s=0.1,
    breaker_max_s=0.4,
)
PATIENT = Timing(heartbeat_s=60.0, reap_s=0.05, batch_s=0.001, retry_min_s=0.02, retry_max_s=0.1)
"""For tests in which nobody may be declared dead because the machine is slow."""

# Forked from a server that has torch and xoscar loaded: a new process takes milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "xinference_xavier.control.runtime", "xinference_xavier.store.index"]
)


def key_of(secret: str | None) -> GroupKey:
    return GroupKey(NAMESPACE, secret)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(start: int, end: int) -> list[bytes]:
    return [key(number) for number in range(start, end)]


def eventually(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Return the first true value of ``condition``; fail when it stays false for too long."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {within_s:g} s")
        time.sleep(0.002)
    return value


def fill(index: SnapshotIndex, blocks: list[bytes]) -> list[bytes]:
    """Make ``blocks`` ready in the index, as a finished job would; return what is new."""
    admission = index.admit([(block, number) for number, block in enumerate(blocks)])
    return index.commit(admission.job_id).added if admission.job_id else []


class Replica:
    """An index and a control runtime without an engine: nothing here ever makes a step."""

    def __init__(
        self,
        name: str,
        directory: str | None,
        timing: Timing = QUICK,
        secret: str | None = SECRET,
    ) -> None:
        self.index = SnapshotIndex(device_slots=256, host_slots=8, spare_slots=4)
        self.mirror = Mirror()
        self.closes = 0
        self.runtime = ControlRuntime(
            index=self.index,
            mirror=self.mirror,
            name=name,
            host="127.0.0.1",
            directory=directory,
            key=key_of(secret),
            fingerprint=FINGERPRINT,
            workers=(),
            audit_hook=dict,
            status_hook=lambda: {"thread": threading.current_thread().name},
            clear_hook=self.clear,
            close_hook=self.close,
            limit_hook=self.set_limits,
            withdraw_hook=self.withdraw,
            timing=timing,
        )

    def fill(self, start: int, end: int) -> None:
        self.runtime.publish(fill(self.index, keys(start, end)), [])

    def set_limits(self, device_slots: int | None, host_slots: int | None) -> dict[str, Any]:
        changes = self.index.set_limits(device_slots=device_slots, host_slots=host_slots)
        self.runtime.publish([], changes.removed)
        return {"evicted_blocks": len(changes.removed)}

    def withdraw(self) -> None:
        self.runtime.publish([], self.index.take_removed())

    def clear(self) -> dict[str, Any]:
        epoch = self.index.clear()
        self.runtime.withdraw_all()
        return {"epoch": epoch}

    def close(self, deadline_s: float) -> dict[str, Any]:
        self.closes += 1
        return {"deadline_s": deadline_s, "closes": self.closes, "keys": self.index.close().keys}

    def leases(self) -> int:
        return self.index.counters().leases

    def members(self) -> dict[int, MemberInfo]:
        """Return the other members by number."""
        numbers = [peer["number"] for peer in self.runtime.status()["peers"]]
        infos = {number: self.runtime.member_info(number) for number in numbers}
        return {number: info for number, info in infos.items() if info is not None}

    def sees(self, start: int, end: int) -> int:
        """Return the usable member said to hold all of the keys, 0 if there is none."""
        found = self.mirror.longest(keys(start, end), 0, self.runtime.usable_mask())
        return found[0] if found is not None and found[1] == end - start else 0


def _serve_replica(pipe: Connection, name: str, directory: str, timing: Timing) -> None:
    replica = Replica(name, directory, timing)
    replica.runtime.start()
    pipe.send(replica.runtime.address)
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(replica, method)(*args))


def serve_directory(pipe: Connection, port: int, host: str = "127.0.0.1") -> None:
    run_directory(host, port, pipe.send)


class RemoteProcess:
    """A process that sends its address once it is up and then obeys."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self.pipe.recv()

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args))
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Cluster:
    """Everything that one test starts; all of it ends with the test."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def directory(self, port: int = 0) -> RemoteProcess:
        return self._keep(RemoteProcess(serve_directory, port))

    def remote(self, name: str, directory: str, timing: Timing = QUICK) -> RemoteProcess:
        return self._keep(RemoteProcess(_serve_replica, name, directory, timing))

    def local(
        self,
        name: str,
        directory: str | None,
        timing: Timing = QUICK,
        secret: str | None = SECRET,
    ) -> Replica:
        replica = Replica(name, directory, timing, secret)
        replica.runtime.start()
        self._stack.callback(replica.runtime.close)
        return replica

    def _keep(self, process: RemoteProcess) -> RemoteProcess:
        self._stack.callback(process.kill)
        return process


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


__all__ = ["PATIENT", "QUICK", "Cluster", "Replica", "cluster", "eventually", "key_of", "signal"]
