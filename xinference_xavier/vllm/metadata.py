# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler side and the workers, inside vLLM's own messages.

All of it is pickled: once per engine step (:class:`ConnectorMeta`, :class:`WorkerMeta`) or once
per start (:class:`Handshake`). Keep it plain and small.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from xinference_xavier.store.jobs import LoadJob, LoadResult, StoreJob, StoreResult
from xinference_xavier.transport.base import WorkerHandle


@dataclass(slots=True)
class ConnectorMeta(KVConnectorMetadata):
    """One step's orders to every worker.

    ``peers`` holds, for each member that a load reads from, its workers' handles by rank. A
    ``step`` that is not 0 is to be reported back: the scheduler side measures its duration.
    """

    stores: list[StoreJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    peers: dict[int, tuple[WorkerHandle, ...]] = field(default_factory=dict)
    step: int = 0


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """What the workers finished since their last report: one result per job and rank."""

    stores: list[StoreResult] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    quarantined: int = 0
    """Staging slots, over all ranks, into which a timed-out transfer may still write."""
    step: int = 0
    """The step that this report ends, if its metadata asked for that."""
    transports: dict[str, int] | None = None
    """How often "transport: reason" refused a peer since the last report; None if it did not."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Join the reports of two ranks."""
        if not isinstance(other, WorkerMeta):
            raise TypeError(f"cannot aggregate {type(other).__name__} into WorkerMeta")
        return WorkerMeta(
            self.stores + other.stores,
            self.loads + other.loads,
            self.quarantined + other.quarantined,
            max(self.step, other.step),
            dict(Counter(self.transports) + Counter(other.transports)) or None,
        )


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What one worker built at start. Sizes in bytes, counts in slots.

    ``device_slots`` and ``host_slots`` are those that the index may use; the staging slots behind
    them in the same arenas are not counted. ``unpinned_reason`` is why copies between GPU and host
    tier are slower than they could be, None where they are not.
    """

    worker: WorkerHandle
    device: str
    device_slots: int
    host_slots: int
    staging_slots: int
    block_bytes: int
    slot_bytes: int
    block_tokens: int
    device_staging_slots: int = 0
    host_pinned: bool = False
    unpinned_reason: str | None = None
