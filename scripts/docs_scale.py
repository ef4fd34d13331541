# SPDX-License-Identifier: Apache-2.0
"""The page on scale: what a large group costs, computed from a recorded `bench directory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from docs_reference import table

from xinference_xavier.control.directory import LOG_KEYS

RECORD: Final = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "directory.json"

REPLICAS: Final = 64
BLOCKS: Final = 1_000_000
"""Of each replica, all different: what replicas share is counted once and costs less."""

BLOCK_TOKENS: Final = 16
STORED: Final = (50, 300, 1000)
"""New blocks per second and replica; each pushes an old one out of a full store."""

PAGE: Final = """
# Scale

What {replicas} replicas with {blocks:,} blocks each cost their directory and each other, computed
from the constants that `xinference-xavier bench directory` measured. The record is
[directory.json](benchmarks/directory.json), of {where}. A block is {block_tokens} tokens; no two
replicas hold the same one, which is the worst case.
{disturbed}
## Memory

{memory}

A block is some 100 KiB of KV cache, so the directory's entry is a thousandth of it or less. A
mirror is bounded: with its default limit it knows the {mirror_blocks:,} blocks learnt last, which
is {mirror_share:.1%} of this group's. For blocks that it does not know it asks the directory, once
per request and without waiting: that request is computed, the next one with the same prefix is
loaded. To know all of them, a mirror would take {mirror_all}.

A replica that joins reads as many keys as its mirror holds, the latest ones, at {snapshot:,.0f}
keys per second as measured: {snapshot_s:,.0f} s, in which it already shares what it has read. The
directory's log, {log_keys:,} keys, must not be left behind meanwhile: up to {snapshot_changes:,.0f}
changes per second it is not. Beyond that the reading begins again, and what has been read is used
until then. While it reads, the directory keeps a list of the keys for it, {snapshot_list}.

## Changes

A full store tells of one block that came and one that went for each block that it takes. The
directory enters both and sends them to the {others} other replicas, {bytes_per_change:.0f} bytes
each.

{changes}

The directory's processor time depends on how many keys a publication has. The first number is for
publications of {many_keys:,} keys, the second one for {few_keys}. Replicas publish what has
gathered since their last publication was answered, so publications grow with the load, and the
second number turns into the first.

One core carries {capacity_few:,.0f} to {capacity_many:,.0f} new blocks per second and replica,
{tokens_few:,.0f} to {tokens_many:,.0f} tokens per second of prefill that nobody has seen. {shard}

## Lookups

| | us |
| --- | --- |
| a prefix of 275 blocks in a mirror of {largest:,} blocks | {longest:,.0f} |
| the same from the directory, there and back, with {cell_members} members | {holders:,.0f} |
| a full hit on the engine's thread while changes stream in, {thread_blocks:,} blocks | {hit:,.0f} |
| a miss of the first block there | {miss:,.1f} |

None of them depends on the number of replicas: members are bits of one number.
"""


def scale_page() -> str:
    """Return the page. Raises OSError without the record."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    machine = record["machine"]
    directory = max(record["directory_memory"], key=lambda item: int(item["members"]))
    mirror = max(record["mirrors"], key=lambda item: int(item["blocks"]))
    bounded = record["mirror_bounded"]
    cell = max(record["cells"], key=lambda item: (int(item["blocks"]), int(item["members"])))
    thread = max(record["engine_thread"], key=lambda item: int(item["blocks"]))
    reading = sorted(record["reading"], key=lambda item: int(item["keys_per_publication"]))
    few, many = reading[0], reading[-1]
    everything = REPLICAS * BLOCKS
    others = everything - BLOCKS
    capacities = [1e6 / (2 * REPLICAS * _cost_us(item)) for item in (few, many)]
    enough = capacities[0] >= STORED[-1]
    return PAGE.format(
        replicas=REPLICAS,
        blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        where=f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}",
        disturbed=(
            "\n!!! warning\n    Other work kept that machine busy: times and rates are worse than "
            "those of a quiet one.\n    Sizes are not concerned.\n"
            if machine["disturbed"]
            else ""
        ),
        memory=table(
            [
                {
                    "where": "directory, one process",
                    "bytes per block": f"{directory['bytes_per_block']:.0f}",
                    "blocks": f"{everything:,}",
                    "in all": _size(everything * directory["bytes_per_block"]),
                },
                {
                    "where": "mirror, in each replica",
                    "bytes per block": f"{bounded['bytes_per_block']:.0f}",
                    "blocks": f"{bounded['blocks']:,}",
                    "in all": _size(bounded["mib"] * 2**20),
                },
            ]
        ),
        mirror_blocks=bounded["blocks"],
        mirror_share=bounded["blocks"] / others,
        mirror_all=_size(others * mirror["bytes_per_block"]),
        snapshot=cell["snapshot_keys_per_s"],
        snapshot_s=bounded["blocks"] / cell["snapshot_keys_per_s"],
        log_keys=LOG_KEYS,
        # A list that another reader had made may be half a log old.
        snapshot_changes=LOG_KEYS / 2 * cell["snapshot_keys_per_s"] / bounded["blocks"],
        snapshot_list=_size(bounded["blocks"] * 8),
        others=REPLICAS - 1,
        bytes_per_change=few["bytes_per_change"],
        changes=table(
            [_changes(stored, few, many, mirror["apply_us_per_block"]) for stored in STORED]
        ),
        few_keys=few["keys_per_publication"],
        many_keys=many["keys_per_publication"],
        capacity_few=capacities[0],
        capacity_many=capacities[1],
        tokens_few=capacities[0] * BLOCK_TOKENS,
        tokens_many=capacities[1] * BLOCK_TOKENS,
        shard=(
            "So one process suffices, and the directory is not sharded."
            if enough
            else "Where that is not enough, give each part of the replicas a namespace of its own: "
            "the directory is not sharded, since its memory fits into one host and fewer members "
            "need fewer messages."
        ),
        largest=mirror["blocks"],
        longest=mirror["longest_us"],
        cell_members=cell["members"],
        holders=cell["holders_us"]["middle"],
        thread_blocks=thread["blocks"],
        hit=thread["streaming"]["hits"]["us"]["middle"],
        miss=thread["streaming"]["misses"]["us"]["middle"],
    )


def _cost_us(reading: Mapping[str, Any]) -> float:
    """Return the directory's time for one change: entered once, sent to all others."""
    published, read = reading["publish_us_per_change"], reading["read_us_per_change"]
    return float(published + (REPLICAS - 1) * read)


def _changes(
    stored: int, few: Mapping[str, Any], many: Mapping[str, Any], apply_us: float
) -> dict[str, str]:
    changes = 2 * REPLICAS * stored
    sent = changes * (REPLICAS - 1)
    shares = [changes * _cost_us(item) / 1e6 for item in (many, few)]
    return {
        "new blocks per second and replica": f"{stored:,}",
        "changes per second": f"{changes:,}",
        "megabytes per second from the directory": f"{sent * few['bytes_per_change'] / 1e6:,.0f}",
        "megabytes per second to each replica": f"{changes * few['bytes_per_change'] / 1e6:.1f}",
        "cores of the directory": f"{shares[0]:.2f} to {shares[1]:.2f}",
        "of one core in each replica": f"{changes * apply_us / 1e6:.0%}",
    }


def _size(count: float) -> str:
    unit = "GiB" if count >= 2**30 else "MiB"
    return f"{count / (2**30 if unit == 'GiB' else 2**20):,.1f} {unit}"
