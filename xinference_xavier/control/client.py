# SPDX-License-Identifier: Apache-2.0
"""Ways to reach a directory or a peer: for the runtime, the command line and the extension."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any, TypeVar

import xoscar as xo

from xinference_xavier.control.directory_actor import DirectoryActor, directory_uid
from xinference_xavier.control.messages import MemberInfo, Timing

PEER_UID = "xinference-xavier-peer"

PEER_METHODS = ("describe", "clear", "set_limits", "close")
"""What operators may ask of a peer."""

LOOPBACK = "127.0.0.1"

T = TypeVar("T")


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
    try:
        return await bounded(
            xo.create_actor(DirectoryActor, timing.heartbeat_s, address=address, uid=uid), limit
        )
    except xo.ActorAlreadyExist:  # another member was quicker
        return await bounded(xo.actor_ref(address=address, uid=uid), limit)


async def directory_members(
    address: str, namespace: str, *, timeout_s: float = 2.0
) -> list[tuple[bytes, int, MemberInfo]]:
    """List (fingerprint, number, member) of a namespace; empty where no directory exists yet.

    Raises ``OSError`` (``TimeoutError`` is one) if nothing answers within ``timeout_s`` in all.
    """

    async def call() -> list[tuple[bytes, int, MemberInfo]]:
        timing = Timing(call_timeout_s=timeout_s)
        try:
            ref = await directory_ref(address, namespace, timing, create=False)
        except xo.ActorNotExist:
            return []
        members: list[tuple[bytes, int, MemberInfo]] = await ref.members()
        return members

    return await bounded(call(), timeout_s)


async def peer_call(
    address: str, method: str, *args: Any, timeout_s: float = 5.0
) -> dict[str, Any]:
    """Call ``describe``, ``clear``, ``set_limits`` or ``close`` of the peer at ``address``.

    ``close`` takes its own deadline in seconds as an argument; give ``timeout_s`` a little more.
    """
    if method not in PEER_METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(PEER_METHODS)}")

    async def call() -> dict[str, Any]:
        await reach(address, timeout_s)
        ref = await xo.actor_ref(address=unbracketed(address), uid=PEER_UID)
        answer: dict[str, Any] = await getattr(ref, method)(*args)
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
