# SPDX-License-Identifier: Apache-2.0
"""Says of each of the demo's five parts whether it is so, and if not, why. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xinference_xavier.demo.answers import Answer, compare
from xinference_xavier.demo.replicas import Served

LEAST_TOKENS: Final = 1500
"""A shared document has at least so many."""

MOST_COMPUTED: Final = 0.1
"""At most this share of a prompt is computed where its document is said to be loaded."""

EMPTY: Final = (
    "device_lru",
    "host_lru",
    "global_lru",
    "keys",
    "leases",
    "readers",
    "jobs",
    "staging",
    "demoting",
    "zombies",
    "leased_blocks",
    "used_slots",
    "pinned_blocks",
    "load_jobs",
    "quarantined",
)
"""Counters of a closed store that must be zero."""

DRAINED: Final = ("leases", "jobs", "staging", "demoting", "zombies", "leased_blocks")
"""Counters of a drained store that must be zero before it is cleared: clearing hides a leak."""


@dataclass(frozen=True)
class Part:
    """One of the five: what was seen, and what is wrong with it."""

    title: str
    shown: str
    """What was seen, in a few words for the table."""
    facts: Mapping[str, Any]
    """What was seen, as plain values for JSON."""
    problems: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True)
class Shutdown:
    """What was found after the model was terminated, and after the server was stopped."""

    replicas: Sequence[str]
    reports: Sequence[Mapping[str, Any]]
    """Final reports of closed replicas: ``replica`` and its ``counters``."""
    arenas_seen: int
    """Pieces of our memory that were there while the replicas ran."""
    left: Sequence[str]
    """Holders of our memory, processes and files that should be gone, for people."""


def judge_sharing(
    cold: Served, remote: Served, local: Served, *, transport: str | None = None
) -> Part:
    """Part 1. ``transport`` is the one that was asked for, None for any."""
    problems = []
    if cold.answer.prompt_tokens < LEAST_TOKENS:
        problems.append(f"the prompt has only {cold.answer.prompt_tokens} tokens")
    if cold.answer.cached_tokens:
        problems.append(f"{cold.answer.cached_tokens} tokens were cached before the first request")
    if remote.replica == cold.replica:
        problems.append("both requests were served by one replica")
    problems += _hit_problems("remote hit", remote, source="peer_")
    if local.replica != remote.replica or local.loaded_tokens:
        problems.append("the request for comparison was no local hit")
    problems += _cached_problems("local hit", local.answer)
    source = remote.sources.get(cold.replica, {})
    used = source.get("transport")
    if used is None:
        problems.append(f"{remote.replica} loaded nothing from {cold.replica}")
    elif transport is not None and used != transport:
        problems.append(f"the transport was {used}, not {transport}")
    extra_s = remote.answer.ttft_s - local.answer.ttft_s
    rate = source.get("mb_per_s")
    shown = (
        f"TTFT cold {cold.answer.ttft_s:.2f} s, remote hit {remote.answer.ttft_s:.2f} s, local hit "
        f"{local.answer.ttft_s:.2f} s; {remote.loaded_tokens} tokens of {cold.replica} "
        f"({_tiers(remote)}) by {used}" + (f" at {rate:.0f} MB/s" if rate else "")
    )
    facts = {
        "cold": cold.to_dict(),
        "remote_hit": remote.to_dict(),
        "local_hit": local.to_dict(),
        "source": cold.replica,
        "transport": used,
        "load_mb_per_s": rate,
        "end_to_end_mb_per_s": source["bytes"] / extra_s / 1e6 if source and extra_s > 0 else None,
    }
    return Part("a prefix of the other replica is loaded", shown, facts, problems)


def judge_answers(remote: Served, control: Answer, other: Answer) -> Part:
    """Part 2. ``control`` answers the same prompt without Xavier, ``other`` another document."""
    problems = _verify_problems("remote hit", remote)
    same = compare(remote.answer, control)
    if not same.equal:
        problems.append(f"the answer is not the control's: {same.difference}")
    if control.cached_tokens != remote.answer.cached_tokens:
        problems.append(
            f"the control's local hit has {control.cached_tokens} tokens, the remote hit "
            f"{remote.answer.cached_tokens}"
        )
    different = compare(remote.answer, other)
    if different.equal:
        problems.append("another document gives the same answer")
    shown = (
        f"{remote.verified_tokens} of {remote.loaded_tokens} loaded tokens have the published "
        f"checksums; {same.tokens} of {len(control.tokens)} answer tokens are the control's, log "
        f"probabilities within {same.worst:.1g}; with another document {different.tokens} are"
    )
    facts = {
        "verified_tokens": remote.verified_tokens,
        "comparison": same.to_dict(),
        "control": control.to_dict(),
        "other_document": other.to_dict(),
    }
    return Part("the bytes and the answer are the same", shown, facts, problems)


def judge_overflow(demotions: int, hit: Served, control: Answer) -> Part:
    """Part 3. ``demotions`` were made by the source of ``hit`` before it."""
    problems = []
    if demotions <= 0:
        problems.append(
            "nothing was demoted: the device tier holds everything; lower --gpu-cache-bytes"
        )
    tokens = hit.loaded.get("peer_host", 0) + hit.loaded.get("own_host", 0)
    if not tokens:
        problems.append("the later hit was not served from the CPU tier")
    problems += _hit_problems("later hit", hit, source="peer_")
    problems += _verify_problems("later hit", hit)
    same = compare(hit.answer, control)
    if not same.equal:
        problems.append(f"its answer is not the control's: {same.difference}")
    shown = (
        f"{demotions} blocks demoted; a later hit of {hit.loaded_tokens} tokens, {tokens} of them "
        f"from the CPU tier, {hit.verified_tokens} with the published checksums"
    )
    facts = {
        "demotions": demotions,
        "cpu_tier_tokens": tokens,
        "hit": hit.to_dict(),
        "comparison": same.to_dict(),
        "control": control.to_dict(),
    }
    return Part("what overflows goes to the CPU tier", shown, facts, problems)


def judge_restore(hit: Served, control: Answer) -> Part:
    """Part 4: a prefix that vLLM's own cache had evicted."""
    problems = _hit_problems("restored hit", hit, source="own_")
    problems += _verify_problems("restored hit", hit)
    same = compare(hit.answer, control)
    if not same.equal:
        problems.append(f"its answer is not the control's: {same.difference}")
    shown = (
        f"{hit.loaded_tokens} tokens that vLLM had evicted on {hit.replica} restored from its "
        f"own tiers ({_tiers(hit)}), TTFT {hit.answer.ttft_s:.2f} s"
    )
    facts = {"hit": hit.to_dict(), "comparison": same.to_dict(), "control": control.to_dict()}
    return Part("what vLLM evicts is restored", shown, facts, problems)


def judge_shutdown(seen: Shutdown) -> Part:
    """Part 5."""
    problems = [f"{name} gave no final counters" for name in _unreported(seen)]
    for report in seen.reports:
        counters = report["counters"]
        for name in EMPTY:
            if counters.get(name) != 0:
                problems.append(f"{report['replica']} closed with {name} = {counters.get(name)}")
        if not counters.get("drained"):
            problems.append(f"{report['replica']} closed before its work was done")
            continue
        problems += [
            f"{report['replica']} was drained, and cleared with {name} = {value}"
            for name, value in _of_drained(counters).items()
            if value != 0
        ]
    if not seen.arenas_seen:
        problems.append("our memory was never seen, so its absence proves nothing")
    problems += [f"left behind: {what}" for what in seen.left]
    after = [report["counters"].get(name) for report in seen.reports for name in EMPTY]
    before = [n for report in seen.reports for n in _of_drained(report["counters"]).values()]
    shown = (
        f"{after.count(0)} of {len(seen.replicas) * len(EMPTY)} final counters are zero, and of "
        f"leases and copies {before.count(0)} of {len(seen.replicas) * len(DRAINED)} were before "
        f"the stores were cleared; {seen.arenas_seen} arenas were there; left behind (holders of "
        f"them, processes, files): {len(seen.left)}"
    )
    facts = {
        "final_counters": {report["replica"]: report["counters"] for report in seen.reports},
        "arenas_seen": seen.arenas_seen,
        "left": list(seen.left),
    }
    return Part("a clean shutdown", shown, facts, problems)


def _unreported(seen: Shutdown) -> list[str]:
    reported = {report["replica"] for report in seen.reports}
    return [name for name in seen.replicas if name not in reported]


def _of_drained(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a store said of its leases and copies just before it was cleared."""
    reached = counters.get("reached") or {}
    return {name: reached.get(name) for name in DRAINED}


def _hit_problems(what: str, hit: Served, *, source: str) -> list[str]:
    problems = _cached_problems(what, hit.answer)
    wrong = {name: tokens for name, tokens in hit.loaded.items() if not name.startswith(source)}
    if wrong:
        problems.append(f"the {what} came from elsewhere too: {wrong}")
    if hit.loaded_tokens < LEAST_TOKENS:
        problems.append(
            f"only {hit.loaded_tokens} tokens of the {what} were loaded (one reader may lease a "
            "quarter of the store)"
        )
    if hit.load_failures:
        problems.append(f"loads of the {what} failed: {hit.load_failures}")
    return problems


def _cached_problems(what: str, answer: Answer) -> list[str]:
    computed = answer.prompt_tokens - answer.cached_tokens
    if computed <= MOST_COMPUTED * answer.prompt_tokens:
        return []
    return [f"{computed} of {answer.prompt_tokens} tokens of the {what} were computed"]


def _verify_problems(what: str, hit: Served) -> list[str]:
    if hit.verified_tokens == hit.loaded_tokens and not hit.load_failures:
        return []
    return [
        f"of the {hit.loaded_tokens} loaded tokens of the {what} only {hit.verified_tokens} have "
        f"the published checksums; failures: {hit.load_failures}"
    ]


def _tiers(hit: Served) -> str:
    """Return the tiers that a hit was loaded from, in words."""
    shares: dict[str, int] = {}
    for source, tokens in hit.loaded.items():
        tier = "CPU" if source.endswith("host") else "device"
        shares[tier] = shares.get(tier, 0) + tokens
    return ", ".join(f"{tier} tier {tokens}" for tier, tokens in sorted(shares.items()))
