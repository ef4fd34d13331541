# SPDX-License-Identifier: Apache-2.0
"""From what a replica says of itself to what the API says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from xinference_xavier.metrics.table import evictions
from xinference_xavier.schemas import DescribedReplica, Link, PromptTokens, TierUse

OWN_STORE: Final = "own"
"""A replica's name for its own store among the sources of its loads."""

_STATES: Final = {"ready", "starting", "closed"}


def described(name: str, address: str, status: Mapping[str, Any]) -> DescribedReplica:
    """Return a replica that answered with ``status`` (see ``SchedulerSide.status``)."""
    state = status.get("state")
    replica = DescribedReplica(
        replica=name,
        address=address,
        state=state if state in _STATES else "starting",
        status=dict(status),
    )
    if state != "ready":
        return replica
    store, traffic = status["store"], status["traffic"]
    totals = store["totals"]
    gpu, cpu = tiers(store)
    return replica.model_copy(
        update={
            "device": store["device"],
            "block_tokens": store["block_tokens"],
            "block_bytes": _block_bytes(store),
            "gpu": gpu,
            "cpu": cpu,
            "requests": traffic["requests"],
            "tokens": _tokens(traffic),
            "bypassed": dict(traffic["bypassed"]),
            "saved_blocks": traffic["saved_blocks"],
            "demotions": totals["demotions"],
            "evictions": sum(evictions(store).values()),
            "skips": dict(traffic["saves_skipped"]),
            "load_failures": dict(traffic["loads_failed"]),
            "links": _links(status),
            "transport_refusals": dict(status["transport_refusals"]),
        }
    )


def unreachable(name: str, address: str, error: str) -> DescribedReplica:
    """Return a replica that is in the directory and does not answer."""
    return DescribedReplica(replica=name, address=address, state="unreachable", error=error)


def missing(name: str) -> DescribedReplica:
    """Return a replica that gets requests and is not in the directory."""
    return DescribedReplica(
        replica=name, address=None, state="missing", error="it is not in the directory"
    )


def tiers(store: Mapping[str, Any]) -> tuple[TierUse, TierUse]:
    """Return the GPU and the CPU tier of a ready replica's ``store``."""
    size = _block_bytes(store)
    gpu, cpu = (
        _tier(
            store[f"{tier}_slots"],
            store["limits"][number],
            store[f"{tier}_blocks"],
            store["leased"][number],
            size,
        )
        for number, tier in enumerate(("device", "host"))
    )
    return gpu, cpu


def _tier(capacity: int, limit: int, used: int, leased: int, size: int) -> TierUse:
    return TierUse(
        capacity_blocks=capacity,
        limit_blocks=limit,
        used_blocks=used,
        leased_blocks=leased,
        capacity_bytes=capacity * size,
        limit_bytes=limit * size,
        used_bytes=used * size,
        leased_bytes=leased * size,
    )


def _block_bytes(store: Mapping[str, Any]) -> int:
    return int(store["slot_bytes"] * store["ranks"])


def _tokens(traffic: Mapping[str, Any]) -> PromptTokens:
    by_source = {
        name: traffic["hit_tokens"].get(name, 0)
        for name in PromptTokens.model_fields
        if name != "prompt"
    }
    return PromptTokens(prompt=traffic["prompt_tokens"], **by_source)


def _links(status: Mapping[str, Any]) -> list[Link]:
    """Return a link per other replica that is known, or was once read from."""
    sources, peers = status["sources"], status["control"]["peers"]
    states = {peer["name"]: peer for peer in peers}
    links = []
    for name in sorted({*states, *sources} - {OWN_STORE}):
        peer, source = states.get(name, {}), sources.get(name, {})
        transport, seconds = source.get("transport"), source.get("seconds", 0.0)
        nbytes = source.get("nbytes", 0)
        links.append(
            Link(
                replica=name,
                transport=None if transport == "none" else transport,
                usable=bool(peer.get("met")) and peer.get("breaker") != "open",
                reason=peer.get("reason") if peer else "it left the group",
                loads=source.get("loads", 0),
                failures=source.get("failures", 0),
                blocks=source.get("blocks", 0),
                bytes=nbytes,
                seconds=seconds,
                bytes_per_s=nbytes / seconds if seconds else None,
            )
        )
    return links
