# SPDX-License-Identifier: Apache-2.0
"""A replica's status as its peer describes it, as far as the metrics read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xinference_xavier.vllm.counters import Durations


def status(
    *,
    loads: int = 1,
    seconds: Sequence[float] = (0.01,),
    bypassed: dict[str, int] | None = None,
    device_blocks: int = 3,
) -> dict[str, Any]:
    """A ready replica, every metric of which has at least one series."""
    spent = Durations()
    for each in seconds:
        spent.add(each)
    totals = ("demotions", "promotions", "granted", "reaped", "evictions", "drops", "arrival_drops")
    return {
        "state": "ready",
        "store": {
            "slot_bytes": 100,
            "ranks": 2,
            "capacity": [4, 8],
            "limits": [4, 6],
            "leased": [1, 0],
            "device_blocks": device_blocks,
            "host_blocks": 2,
            "leases": 1,
            "totals": {**dict.fromkeys(totals, 1), "limit_evictions": 0},
        },
        "traffic": {
            "requests": 3,
            "prompt_tokens": 1000,
            "hits": {"local": 1, "peer_device": 1},
            "hit_tokens": {"local": 100, "peer_device": 640},
            "bypassed": {"multimodal": 1} if bypassed is None else bypassed,
            "lookups_missed": {"cold": 1},
            "loads": loads,
            "load_bytes": {"shm": 4000},
            "load_seconds": {"shm": spent.to_dict()},
            "loads_failed": {"timeout": 1},
            "failed_blocks": 2,
            "saved_blocks": 7,
            "saves_skipped": {"host_leased": 1},
            "saves_failed": {"checksum": 1, "CudaError: at 0x7f01": 1, "CudaError: at 0x7f02": 2},
            "resets": 0,
            "errors": {"admit": 1},
        },
        "transport_refusals": {"nixl: no path to 10.0.0.2:7": 1, "nixl: timeout": 2},
        "hook_failures": {"get_finished": 1},
    }
