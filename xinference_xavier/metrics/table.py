# SPDX-License-Identifier: Apache-2.0
"""Every metric: its name, type, labels, meaning, and where a replica's status has it.

A status is what ``SchedulerSide.status`` returns, or the part of it that
``SchedulerSide.measured`` does: plain values, the same before and after JSON. Nothing here imports
vLLM, Xinference or a metrics library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, TypeAlias

SOURCES: Final = ("local", "own_device", "own_host", "peer_device", "peer_host")
"""Where prompt tokens come from that are not computed: vLLM's own prefix cache, this replica's
tiers, those of another one."""

TIERS: Final = ("device", "host")

USAGE: Final = "xavier"
"""Key of a request's prompt tokens by source, in what the engine returns with its answer."""

LOAD_SECONDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of the buckets of load times, in seconds; what takes longer is in one more."""


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Status: TypeAlias = Mapping[str, Any]

Spread: TypeAlias = Mapping[str, Any]
"""A histogram's value: ``counts``, one per bucket of LOAD_SECONDS and one for the rest, and
``sum`` in seconds."""

Labels: TypeAlias = tuple[str, ...]
Value: TypeAlias = int | float | Spread
Read: TypeAlias = Callable[[Status], Iterable[tuple[Labels, Value]]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. ``name`` gets each exporter's prefix, ``labels`` come after its own labels."""

    name: str
    kind: Kind
    labels: Labels
    help: str
    read: Read

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names under which Prometheus keeps it, without prefix."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))

    @property
    def from_start(self) -> tuple[Labels, ...]:
        """Return the labels of the series that are there, as 0, before anything happened."""
        if self.labels == ("source",):
            return tuple((source,) for source in SOURCES)
        return () if self.labels else ((),)


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric's value at one instant, for one set of label values."""

    metric: Metric
    labels: Labels
    value: Value


def samples(status: Status) -> Iterator[Sample]:
    """Return what a replica's status says, by the table; nothing while it starts or is closed."""
    if status.get("state") != "ready":
        return
    for metric in METRICS:
        for labels, value in metric.read(status):
            yield Sample(metric, labels, value)


def cumulative(spread: Spread) -> dict[float, int]:
    """Return a histogram's counts as Prometheus shows them: all up to each bucket's end."""
    return dict(zip((*LOAD_SECONDS, float("inf")), accumulate(spread["counts"]), strict=True))


def metric_table() -> list[dict[str, str]]:
    """Return the table for the documentation."""
    return [
        {
            "name": metric.name,
            "type": str(metric.kind),
            "labels": ", ".join(f"`{label}`" for label in metric.labels),
            "meaning": metric.help,
        }
        for metric in METRICS
    ]


def _traffic(name: str) -> Read:
    return lambda status: [((), status["traffic"][name])]


def _traffic_by(name: str) -> Read:
    return lambda status: _by_key(status["traffic"][name])


def _by_key(values: Mapping[str, Value]) -> list[tuple[Labels, Value]]:
    return [((key,), value) for key, value in values.items()]


def _total(name: str) -> Read:
    return lambda status: [((), status["store"]["totals"][name])]


def _tier_bytes(blocks: Callable[[Status], tuple[int, int]]) -> Read:
    """Read the two tiers' numbers of blocks from the store's status, in bytes over all ranks."""

    def read(status: Status) -> list[tuple[Labels, Value]]:
        store = status["store"]
        device, host = blocks(store)
        block_bytes = store["slot_bytes"] * store["ranks"]
        return _by_key(dict(zip(TIERS, (device * block_bytes, host * block_bytes), strict=True)))

    return read


def _by_kind(counts: Mapping[str, int]) -> list[tuple[Labels, Value]]:
    """Read counts whose keys are "kind: text": the texts name addresses, and are ever new."""
    found: dict[str, int] = {}
    for line, count in counts.items():
        kind = line.partition(":")[0]
        found[kind] = found.get(kind, 0) + count
    return _by_key(found)


def evictions(store: Status) -> dict[str, int]:
    """Return how many blocks a replica's ``store`` lost, by reason, clears aside."""
    totals = store["totals"]
    return {
        "evicted": totals["evictions"],
        "dropped": totals["drops"],
        "no_room": totals["arrival_drops"],
        "limit": totals["limit_evictions"],
    }


def _errors(status: Status) -> list[tuple[Labels, Value]]:
    found = dict(status["hook_failures"])
    for where, count in status["traffic"]["errors"].items():
        found[where] = found.get(where, 0) + count
    return _by_key(found)


METRICS: Final = (
    Metric(
        "xavier_capacity_bytes",
        Kind.GAUGE,
        ("tier",),
        "Bytes of the blocks that a tier has room for, allocated at start",
        _tier_bytes(lambda store: store["capacity"]),
    ),
    Metric(
        "xavier_limit_bytes",
        Kind.GAUGE,
        ("tier",),
        "Part of the capacity that may be used now",
        _tier_bytes(lambda store: store["limits"]),
    ),
    Metric(
        "xavier_used_bytes",
        Kind.GAUGE,
        ("tier",),
        "Bytes of the blocks that can be loaded from a tier",
        _tier_bytes(lambda store: (store["device_blocks"], store["host_blocks"])),
    ),
    Metric(
        "xavier_leased_bytes",
        Kind.GAUGE,
        ("tier",),
        "Part of the used bytes that somebody reads now, or is promised",
        _tier_bytes(lambda store: store["leased"]),
    ),
    Metric(
        "xavier_leases",
        Kind.GAUGE,
        (),
        "Leases on blocks of this replica, its own included",
        lambda status: [((), status["store"]["leases"])],
    ),
    Metric(
        "xavier_requests_total",
        Kind.COUNTER,
        (),
        "Requests that vLLM handed to the connector",
        _traffic("requests"),
    ),
    Metric(
        "xavier_bypassed_total",
        Kind.COUNTER,
        ("reason",),
        "Requests that are not looked up; they are neither hits nor misses",
        _traffic_by("bypassed"),
    ),
    Metric(
        "xavier_prompt_tokens_total",
        Kind.COUNTER,
        (),
        "Prompt tokens of the requests that were looked up, counted when each starts to run",
        _traffic("prompt_tokens"),
    ),
    Metric(
        "xavier_hits_total",
        Kind.COUNTER,
        ("source",),
        "Requests that got prompt tokens from a source; one request may have several",
        _traffic_by("hits"),
    ),
    Metric(
        "xavier_hit_tokens_total",
        Kind.COUNTER,
        ("source",),
        "Prompt tokens that came from a source instead of being computed",
        _traffic_by("hit_tokens"),
    ),
    Metric(
        "xavier_not_loaded_total",
        Kind.COUNTER,
        ("reason",),
        "Lookups after which nothing was loaded: `cold` (nobody holds what follows the part that "
        "vLLM has itself), `late`, `refused`, `busy`, `short` or `slow`",
        _traffic_by("lookups_missed"),
    ),
    Metric(
        "xavier_loads_total",
        Kind.COUNTER,
        (),
        "Loads that ended, whatever their outcome",
        _traffic("loads"),
    ),
    Metric(
        "xavier_load_failures_total",
        Kind.COUNTER,
        ("reason",),
        "Parts of loads, each from one source, that failed or were not begun",
        _traffic_by("loads_failed"),
    ),
    Metric(
        "xavier_recomputed_blocks_total",
        Kind.COUNTER,
        (),
        "Blocks that a load did not bring and vLLM computes",
        _traffic("failed_blocks"),
    ),
    Metric(
        "xavier_load_bytes_total",
        Kind.COUNTER,
        ("transport",),
        "Bytes read for loads, over all ranks",
        _traffic_by("load_bytes"),
    ),
    Metric(
        "xavier_load_seconds",
        Kind.HISTOGRAM,
        ("transport",),
        "How long reading one source's part of a load took",
        _traffic_by("load_seconds"),
    ),
    Metric(
        "xavier_transport_refusals_total",
        Kind.COUNTER,
        ("transport",),
        "How often a transport could not be used for a peer",
        lambda status: _by_kind(status["transport_refusals"]),
    ),
    Metric(
        "xavier_saved_blocks_total",
        Kind.COUNTER,
        (),
        "Blocks copied into the store",
        _traffic("saved_blocks"),
    ),
    Metric(
        "xavier_save_skips_total",
        Kind.COUNTER,
        ("reason",),
        "Blocks that were not copied into the store",
        _traffic_by("saves_skipped"),
    ),
    Metric(
        "xavier_save_failures_total",
        Kind.COUNTER,
        ("reason",),
        "Blocks whose copy into the store failed",
        lambda status: _by_kind(status["traffic"]["saves_failed"]),
    ),
    Metric(
        "xavier_demotions_total",
        Kind.COUNTER,
        (),
        "Blocks moved from the device tier to the host tier",
        _total("demotions"),
    ),
    Metric(
        "xavier_promotions_total",
        Kind.COUNTER,
        (),
        "Blocks moved from the host tier back to the device tier",
        _total("promotions"),
    ),
    Metric(
        "xavier_evictions_total",
        Kind.COUNTER,
        ("reason",),
        "Blocks that are gone: `evicted` from the host tier for others, `dropped` from the device "
        "tier for want of room in the host tier, `no_room`: copied to the host tier when all of it "
        "was leased, or `limit`: a tier's limit was lowered",
        lambda status: _by_key(evictions(status["store"])),
    ),
    Metric(
        "xavier_leased_blocks_total",
        Kind.COUNTER,
        (),
        "Blocks leased so far, once per lease",
        _total("granted"),
    ),
    Metric(
        "xavier_lease_reaps_total",
        Kind.COUNTER,
        (),
        "Leases that ran out because their reader neither renewed nor ended them",
        _total("reaped"),
    ),
    Metric(
        "xavier_clears_total",
        Kind.COUNTER,
        (),
        "How often this replica's tiers were emptied",
        _traffic("resets"),
    ),
    Metric(
        "xavier_errors_total",
        Kind.COUNTER,
        ("where",),
        "Exceptions of ours that were caught; the request went on without the store",
        _errors,
    ),
)
