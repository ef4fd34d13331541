# SPDX-License-Identifier: Apache-2.0
"""The parts of a scheduler side, and how they are put together once the workers are known."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from xinference_xavier import launch_note
from xinference_xavier.control.mirror import Mirror
from xinference_xavier.control.runtime import ControlRuntime
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.identity import fingerprint, traits
from xinference_xavier.options import Deployment, XavierOptions
from xinference_xavier.sizes import format_size
from xinference_xavier.store.index import SnapshotIndex
from xinference_xavier.tiers import spare_slots
from xinference_xavier.vllm.compat import Blocks
from xinference_xavier.vllm.counters import Counters
from xinference_xavier.vllm.identity import group_fields
from xinference_xavier.vllm.loads import Loaded, Loads
from xinference_xavier.vllm.lookup import Lookups
from xinference_xavier.vllm.metadata import Handshake
from xinference_xavier.vllm.pace import Pace
from xinference_xavier.vllm.saves import Saves

if TYPE_CHECKING:
    from vllm.config import VllmConfig

START_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Parts:
    """What exists once the workers are known."""

    index: SnapshotIndex
    control: ControlRuntime
    lookups: Lookups
    loads: Loads
    saves: Saves
    shape: dict[str, Any]
    publishing: threading.Lock
    """Held from a change of the index to what the directory hears of it."""
    quarantined: int = 0
    watch_quarantine_until: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    """How often "transport: reason" kept workers from using a transport for a peer."""
    loaded: dict[str, Loaded] = field(default_factory=dict)
    """Loads that ended, until vLLM schedules the request."""

    @property
    def summary(self) -> str:
        """Return the tiers in words, for the log."""
        shape = self.shape
        tokens = (shape["device_slots"] + shape["host_slots"]) * shape["block_tokens"]
        return (
            f"{shape['device_slots']} device blocks (in {shape['device']} memory), "
            f"{shape['host_slots']} host blocks of {format_size(shape['slot_bytes'])} per rank, "
            f"{tokens} tokens; peer address {self.control.address}"
        )


def assemble(
    *,
    config: VllmConfig,
    options: XavierOptions,
    deployment: Deployment,
    secret: str | None,
    ranks: Sequence[Handshake],
    blocks: Blocks,
    pace: Pace,
    counters: Counters,
    status: Callable[[], dict[str, Any]],
    audit: Callable[[], dict[str, Any]],
    clear: Callable[[], dict[str, Any]],
    close: Callable[[float], dict[str, Any]],
    limit: Callable[[int | None, int | None], dict[str, Any]],
    withdraw: Callable[[], None],
) -> Parts:
    """Make the parts for these workers, and start the control thread with the six hooks.

    Called once, on the engine's thread, before the first request. Raises OptionError or
    RuntimeError, which fail the launch.
    """
    block_tokens = config.cache_config.block_size
    device_slots = min(rank.device_slots for rank in ranks)
    host_slots = min(rank.host_slots for rank in ranks)
    step_blocks = -(-config.scheduler_config.max_num_batched_tokens // block_tokens)
    spare = spare_slots(host_slots, step_blocks)
    index = SnapshotIndex(device_slots=device_slots, host_slots=host_slots, spare_slots=spare)
    mirror = Mirror()
    fields = group_fields(config, ranks, options)
    control = ControlRuntime(
        index=index,
        mirror=mirror,
        name=deployment.xavier_member,
        host=deployment.xavier_host,
        directory=deployment.xavier_directory,
        key=GroupKey(deployment.xavier_namespace, secret),
        fingerprint=fingerprint(fields),
        traits=traits(fields),
        workers=tuple(rank.worker for rank in ranks),
        status_hook=status,
        audit_hook=audit,
        clear_hook=clear,
        close_hook=close,
        limit_hook=limit,
        withdraw_hook=withdraw,
    )
    lookups = Lookups(
        index=index,
        control=control,
        mirror=mirror,
        blocks=blocks,
        block_tokens=block_tokens,
        lookup_timeout_s=options.xavier_lookup_timeout,
        min_load_tokens=options.xavier_min_load_tokens,
        pace=pace,
        counters=counters,
    )
    loads = Loads(
        index=index,
        control=control,
        lookups=lookups,
        ranks=len(ranks),
        pool_blocks=blocks.total,
        block_tokens=block_tokens,
        timeout_s=options.xavier_load_timeout,
        # Where the device tier is host memory, a move would gain nothing.
        promote=any(rank.device != "cpu" for rank in ranks),
        pace=pace,
        counters=counters,
    )
    publishing = threading.Lock()
    saves = Saves(
        index=index,
        blocks=blocks,
        block_tokens=block_tokens,
        ranks=len(ranks),
        publish=control.publish,
        publishing=publishing,
        counters=counters,
    )
    shape = {
        "device": ranks[0].device,
        "ranks": len(ranks),
        "block_bytes": ranks[0].block_bytes,
        "slot_bytes": ranks[0].slot_bytes,
        "block_tokens": block_tokens,
        "device_slots": device_slots,
        "host_slots": host_slots - spare,
        "spare_slots": spare,
        "staging_slots": min(rank.staging_slots for rank in ranks),
        "device_staging_slots": min(rank.device_staging_slots for rank in ranks),
        "host_pinned": all(rank.host_pinned for rank in ranks),
        "unpinned_reason": next((r.unpinned_reason for r in ranks if r.unpinned_reason), None),
    }
    control.start(START_TIMEOUT_S)
    launch_note.write_peer(control.contact.to_text())
    return Parts(index, control, lookups, loads, saves, shape, publishing)
