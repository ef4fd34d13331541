# SPDX-License-Identifier: Apache-2.0
"""Whether a replica's bookkeeping is right, and what it has in use: asked for, never by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinference_xavier.store.index import InvariantError, StoreClosed
from xinference_xavier.vllm.parts import Parts


def audit(parts: Parts, requests: Mapping[str, int]) -> dict[str, Any]:
    """Check the index, and count what must be given back when nothing runs; not for the engine.

    ``requests`` are counts of what is kept per request besides the parts' own. Answers
    ``contradiction``, the first thing found wrong or None, and ``in_use``: requests, loads, jobs,
    leases and pins by name, all zero in an idle replica that nobody reads from. The index is
    locked while it is checked, and the engine's thread may wait for it.
    """
    contradiction = None
    index: dict[str, int] = {}
    try:
        parts.index.check_invariants()
        now = parts.index.counters()
    except InvariantError as error:
        contradiction = str(error)
    except StoreClosed:
        pass  # it holds nothing, which closing it has checked
    else:
        index = {
            "leases": now.leases,
            "index_jobs": now.jobs,
            "moving_blocks": now.staging + now.demoting + now.promoting,
            "cleared_blocks": now.zombies,
        }
    control = parts.control.status()
    return {
        "contradiction": contradiction,
        "in_use": {
            **requests,
            **index,
            "lookups": parts.lookups.open,
            "saving_requests": parts.saves.following,
            "store_jobs": parts.saves.jobs,
            "pinned_blocks": parts.saves.pinned,
            "load_jobs": parts.loads.jobs,
            "loaded_requests": len(parts.loaded),
            "quarantined": parts.quarantined,
            "leases_at_others": control["leases_at_others"],
            "calls_in_flight": control["calls_in_flight"],
        },
    }
