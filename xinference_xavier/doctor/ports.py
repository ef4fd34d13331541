# SPDX-License-Identifier: Apache-2.0
"""Who can connect to the actor ports. Whoever can, can run code in the process behind them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import ip_address

import psutil

from xinference_xavier.control.client import unbracketed
from xinference_xavier.doctor.finding import Finding, fail, ok, warn

DANGER = "whoever reaches it can run code in that process"


def port_finding(name: str, address: str, bound: Callable[[int], list[str]]) -> Finding:
    """Judge who reaches ``address`` ("host:port"); ``bound`` gives a port's listeners here."""
    host, _, port = unbracketed(address).rpartition(":")
    if not port.isdecimal():
        return fail(name, f"{address!r} is no address", "set a host and a port")
    listening = bound(int(port)) if _is_here(host) else []
    shown = f"{address}, listening on {', '.join(listening)}" if listening else address
    hosts = listening or [host]
    if any(_is_wildcard(each) for each in hosts):
        return warn(
            name,
            f"{shown}: all networks of that host, and {DANGER}",
            "bind it to one address (xinference -H), on a network that only replicas reach",
        )
    if all(_is_loopback(each) for each in hosts):
        return ok(name, f"{shown}: this host's own processes, of any user")
    return warn(
        name,
        f"{shown}: everybody who is routed there, and {DANGER}",
        "let only the hosts of the cluster through the firewall",
    )


def listeners(port: int) -> list[str]:
    """Return the addresses of this host at which something listens on a TCP port."""
    listening = (
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    )
    return sorted({address.ip for address in listening if address.port == port})


def _is_here(host: str) -> bool:
    if _is_loopback(host) or _is_wildcard(host):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    mine = {item.address for items in psutil.net_if_addrs().values() for item in items}
    return bool(found & mine)


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
