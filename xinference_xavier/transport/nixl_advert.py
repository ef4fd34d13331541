# SPDX-License-Identifier: Apache-2.0
"""The document with which a worker tells peers how NIXL reaches its slots.

JSON of a few KiB, the same for as long as the worker lives. What a peer sends is checked here, in
form; whether the memory is really registered, NIXL finds out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.nixl_agent import Region
from xinference_xavier.transport.nixl_path import PathHints

META_BYTES = 16
"""One row of ``meta``."""

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TierRegions:
    """A tier in registered memory: where its slots and its meta rows are."""

    data: Region
    meta: Region


@dataclass(frozen=True, slots=True)
class Advert:
    """What a worker tells about itself. ``agent`` is NIXL's own metadata."""

    agent: bytes
    slot_bytes: int
    tiers: dict[Tier, TierRegions]
    path: PathHints

    def encode(self) -> bytes:
        """Return the document."""

        def region(item: Region) -> list[object]:
            return [item.kind, item.device, item.address, item.nbytes]

        document = {
            "format": FORMAT,
            "agent": base64.b64encode(self.agent).decode(),
            "slot_bytes": self.slot_bytes,
            "tiers": {
                str(int(tier)): [region(regions.data), region(regions.meta)]
                for tier, regions in self.tiers.items()
            },
            "path": asdict(self.path),
        }
        return json.dumps(document).encode()


def decode(blob: bytes) -> Advert:
    """Parse a peer's document. Raises :class:`TransportUnavailable` for anything unexpected."""
    try:
        document = json.loads(blob)
        if document["format"] != FORMAT:
            raise TransportUnavailable(
                f"the peer's NIXL metadata has format {document['format']}, ours {FORMAT}"
            )
        tiers = {
            Tier(int(key)): TierRegions(_region(data), _region(meta))
            for key, (data, meta) in document["tiers"].items()
        }
        slot_bytes = _whole(document["slot_bytes"])
        if not slot_bytes:
            raise ValueError("slots of 0 bytes")
        agent = base64.b64decode(document["agent"], validate=True)
        advert = Advert(agent, slot_bytes, tiers, _path(document["path"]))
        for tier, regions in tiers.items():
            slots, rest = divmod(regions.data.nbytes, slot_bytes)
            if rest or regions.meta.nbytes != slots * META_BYTES:
                raise ValueError(f"{tier.name} data and meta differ in their number of slots")
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as exc:  # fmt: skip
        raise TransportUnavailable(f"the peer's NIXL metadata is malformed: {exc!r}") from exc
    return advert


def _path(item: Mapping[str, object]) -> PathHints:
    token = str(item["token"])
    bytes.fromhex(token)
    return PathHints(_whole(item["pid"], 31), _whole(item["address"]), token, bool(item["rdma"]))


def _region(item: Sequence[object]) -> Region:
    kind, device, address, nbytes = item
    region = Region(str(kind), _whole(device, 31), _whole(address), _whole(nbytes))
    _whole(region.address + region.nbytes)
    return region


def _whole(value: object, bits: int = 63) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ValueError(f"{value!r:.40} is not a number of {bits} bits")
    return value
