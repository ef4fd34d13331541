# SPDX-License-Identifier: Apache-2.0
"""Ways to reach a directory or a peer: for the runtime, the command line and the extension."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import xoscar as xo

from xinference_xavier.control.directory_actor import DirectoryActor, directory_uid
from xinference_xavier.control.messages import Credential, MemberInfo, Timing
from xinference_xavier.control.trust import GroupKey

PEER_UID = "xinference-xavier-peer"

PEER_METHODS = ("describe", "audit", "clear", "set_limits", "close")
"""What operators may ask of a peer."""

LOOPBACK = "127.0.0.1"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contact:
    """How to ask a peer: its address ("host:port"), and what it wants to see."""

    address: str
    credential: Credential

    def to_text(self) -> str:
        """Return a text, which is secret, for :meth:`from_text`."""
        shown = self.credential
        return f"{self.address} {shown.fingerprint.hex()} {shown.epoch} {shown.proof.hex()}"

    @classmethod
    def from_text(cls, text: str) -> Contact:
        """Return the contact of :meth:`to_text`. Raises ValueError for any other text."""
        address, fingerprint, epoch, proof = text.split(" ")
        shown = Credential(bytes.fromhex(fingerprint), int(epoch), bytes.fromhex(proof))
        return cls(address, shown)


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that is in a directory, for who wants to ask it."""

    number: int
    info: MemberInfo
    contact: Contact


async def bounded(call: Awaitable[T], timeout_s: float) -> T:
    """Await a remote call for at most ``timeout_s`` seconds, whatever the other side does.

    Raises ``TimeoutError`` that names the limit. Unlike ``asyncio.wait_for`` this never waits for
    the call to acknowledge its cancellation, which a hung peer would not do.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.add_done_callback(_retrieve)
            task.cancel()
    if not task.done() or task.cancelled():
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return task.result()


def _retrieve(task: asyncio.Future[Any]) -> None:
    # Nobody waits for it any more; asyncio would log an exception that is never looked at.
    if not task.cancelled():
        task.exception()


def unbracketed(address: str) -> str:
    """Return ``address`` as sockets and xoscar spell it: an IPv6 host without brackets."""
    return address.replace("[", "").replace("]", "")


async def reach(address: str, timeout_s: float) -> None:
    """Check that something accepts connections at ``address``; ``OSError`` if nothing does.

    xoscar opens connections one after the other, so a host that swallows packets would hold up
    every call of this loop. Ask here before letting xoscar try.
    """
    host, _, port = unbracketed(address).rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), timeout_s)
    except TimeoutError:
        raise OSError(f"{address} accepts no connection within {timeout_s:g} s") from None
    writer.close()


async def directory_ref(
    address: str, namespace: str, timing: Timing, *, create: bool = True
) -> xo.ActorRefType[DirectoryActor]:
    """Find the directory of ``namespace`` at ``address``, creating it where it is missing.

    Raises ``xo.ActorNotExist`` if it is missing and ``create`` is False, ``TimeoutError`` or
    ``OSError`` if nothing answers at ``address``.
    """
    address = unbracketed(address)
    uid = directory_uid(namespace)
    limit = timing.call_timeout_s
    await reach(address, limit)
    try:
        return await bounded(xo.actor_ref(address=address, uid=uid), limit)
    except xo.ActorNotExist:
        if not create:
            raise
    # A pool that listens on every address knows itself by the wildcard alone, and refuses to make
    # actors at ``address``; so ask for its main process, and then for a reference that leads there.
    creation = xo.create_actor(
        DirectoryActor,
        timing.heartbeat_s,
        address=address,
        uid=uid,
        allocate_strategy=xo.allocate_strategy.MainPool(),
    )
    with contextlib.suppress(xo.ActorAlreadyExist):  # another member was quicker
        await bounded(creation, limit)
    return await bounded(xo.actor_ref(address=address, uid=uid), limit)


async def directory_members(address: str, key: GroupKey, *, timeout_s: float = 2.0) -> list[Member]:
    """List the members of the key's namespace; empty where no directory exists yet.

    Replicas that have another secret are not in it. Raises ``OSError`` (``TimeoutError`` is one)
    if nothing answers within ``timeout_s`` in all.
    """

    async def call() -> list[Member]:
        timing = Timing(call_timeout_s=timeout_s)
        try:
            ref = await directory_ref(address, key.namespace, timing, create=False)
        except xo.ActorNotExist:
            return []
        return [
            Member(number, info, contact_of(info, fingerprint, key))
            for fingerprint, number, info in await ref.members(key.admission())
        ]

    return await bounded(call(), timeout_s)


def contact_of(info: MemberInfo, fingerprint: bytes, key: GroupKey) -> Contact:
    """Return how to ask a member of a group."""
    return Contact(info.address, key.credential(fingerprint, info.name, info.epoch))


async def peer_call(
    contact: Contact, method: str, *args: Any, timeout_s: float = 5.0
) -> dict[str, Any]:
    """Call one of :data:`PEER_METHODS` of a peer. Raises PermissionError if it refuses us.

    ``close`` takes its own deadline in seconds as an argument; give ``timeout_s`` a little more.
    """
    if method not in PEER_METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(PEER_METHODS)}")

    async def call() -> dict[str, Any]:
        await reach(contact.address, timeout_s)
        ref = await xo.actor_ref(address=unbracketed(contact.address), uid=PEER_UID)
        answer: dict[str, Any] = await getattr(ref, method)(contact.credential, *args)
        return answer

    return await bounded(call(), timeout_s)


def route_address(target: str | None) -> str:
    """Return the local address that reaches ``target`` ("host:port"), for others to reach us.

    Sends nothing: connecting a datagram socket only asks the kernel for the route. Without a
    target nobody else needs to reach us, and the loopback address is returned.
    """
    if target is None:
        return LOOPBACK
    host, _, port = unbracketed(target).rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            local: str = probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"xavier_directory={target!r} gives no local address to advertise ({error}); "
            "set xavier_host"
        ) from error
    return local
