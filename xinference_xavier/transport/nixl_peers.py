# SPDX-License-Identifier: Apache-2.0
"""The remote agents that our NIXL agent knows: loaded once, forgotten after the last user.

Loading and forgetting, in which NIXL may talk to the peer, is serialised by a lock of its own, so
that nobody who only counts users waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.nixl_advert import META_BYTES, Advert, TierRegions
from xinference_xavier.transport.nixl_agent import Agent, NixlError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A peer's tier as descriptor lists of the agent, and how many slots it has."""

    data: int
    meta: int
    slots: int


@dataclass(slots=True)
class Peer:
    """One remote agent. ``users``: open connections, running fetches and overdue transfers.

    ``broken`` tells why nothing is read from it any more.
    """

    key: bytes
    name: str
    tiers: dict[Tier, Prepared] = field(default_factory=dict)
    lists: list[int] = field(default_factory=list)
    users: int = 0
    broken: str | None = None


class Peers:
    """The peers of one agent. Thread-safe."""

    def __init__(self, agent: Agent, slot_bytes: int) -> None:
        self._agent = agent
        self._slot_bytes = slot_bytes
        # Held while NIXL loads or forgets a peer. Taken before `_lock` where both are.
        self._wiring = threading.Lock()
        self._lock = threading.Lock()
        self._known: dict[bytes, Peer] = {}
        self._closed = False

    def enter(self, advert: Advert, tier: Tier, *, deadline: float) -> Peer:
        """Return the peer of an advert with one user more, and that tier of it prepared.

        Raises :class:`TransportUnavailable`.
        """
        left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._wiring.acquire(timeout=left):
            raise TransportUnavailable("NIXL was still busy with another peer")
        try:
            self._forget_unused()
            peer = self._loaded(advert)
            try:
                if tier not in peer.tiers:
                    self._prepare(peer, tier, advert.tiers[tier])
            except NixlError:
                self.leave(peer)
                self._forget_unused()
                raise
            return peer
        except NixlError as exc:
            raise TransportUnavailable(str(exc)) from exc
        finally:
            self._wiring.release()

    def retain(self, peer: Peer) -> None:
        """Count one user more."""
        with self._lock:
            peer.users += 1

    def leave(self, peer: Peer) -> None:
        """Count one user less."""
        with self._lock:
            peer.users -= 1

    def tidy(self) -> None:
        """Forget peers without users now, or leave it to whoever is wiring or comes next."""
        with self._lock:
            unused = any(peer.users == 0 for peer in self._known.values())
        if unused and self._wiring.acquire(blocking=False):
            try:
                self._forget_unused()
            finally:
                self._wiring.release()

    def close(self) -> None:
        """Forget all peers, and load no more. Waits for a peer that is being loaded."""
        with self._wiring:
            with self._lock:
                self._closed = True
                known, self._known = list(self._known.values()), {}
            for peer in known:
                self._forget(peer)

    def _forget_unused(self) -> None:
        """Let NIXL forget peers without users; ``_wiring`` is held."""
        with self._lock:
            unused = [peer for peer in self._known.values() if peer.users == 0]
            for peer in unused:
                del self._known[peer.key]
        for peer in unused:
            self._forget(peer)

    def _loaded(self, advert: Advert) -> Peer:
        """Return the peer of an advert with one user more; ``_wiring`` is held."""
        with self._lock:
            if self._closed:
                raise TransportUnavailable("the NIXL transport is closed")
            peer = self._known.get(advert.agent)
            if peer is not None:
                if peer.broken is not None:
                    raise TransportUnavailable(f"the peer's agent failed: {peer.broken}")
                peer.users += 1
                return peer
        peer = Peer(advert.agent, self._agent.add_peer(advert.agent), users=1)
        with self._lock:
            self._known[advert.agent] = peer
        return peer

    def _prepare(self, peer: Peer, tier: Tier, regions: TierRegions) -> None:
        """Prepare a tier: only one that is asked for, since ours may lack the means for others."""
        data = self._agent.prepare(peer.name, regions.data, self._slot_bytes)
        peer.lists.append(data)
        meta = self._agent.prepare(peer.name, regions.meta, META_BYTES)
        peer.lists.append(meta)
        peer.tiers[tier] = Prepared(data, meta, regions.data.nbytes // self._slot_bytes)

    def _forget(self, peer: Peer) -> None:
        """Release what NIXL holds of a peer none of whose transfers is running."""
        steps = [partial(self._agent.release_prepared, prepared) for prepared in peer.lists]
        steps.append(partial(self._agent.remove_peer, peer.name))
        peer.lists.clear()
        peer.tiers.clear()
        for step in steps:
            try:
                step()
            except NixlError as exc:
                logger.warning("forgetting NIXL peer %s: %s", peer.name, exc)
