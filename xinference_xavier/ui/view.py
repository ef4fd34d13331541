# SPDX-License-Identifier: Apache-2.0
"""What the console shows of models, as HTML. Pure functions of the API's answers.

Own markup instead of Gradio's tables and plots: of an HTML element Gradio changes only the nodes
that differ, so a refresh neither flickers nor drops what is selected, and the page's own colours
apply, light or dark. Everything that comes from a server is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from xinference_xavier.schemas import (
    BudgetsResult,
    ClearedModel,
    Link,
    Model,
    Plan,
    PromptTokens,
    Replica,
    TierPlan,
    TierUse,
)
from xinference_xavier.sizes import format_size
from xinference_xavier.ui.history import History, Interval

SOURCES: Final[Mapping[str, str]] = {
    "local": "vLLM's own cache",
    "own_device": "own GPU tier",
    "own_host": "own CPU tier",
    "peer_device": "peers' GPU tier",
    "peer_host": "peers' CPU tier",
}
"""Where prompt tokens can come from (fields of ``PromptTokens``), and how it is called."""

SHORTEST_S: Final = 60.0
"""Seconds that a plot is wide at least, so that it begins with columns and not with blocks."""

_LAUNCH: Final = """client.launch_model("qwen2.5-instruct", model_engine="vLLM", replica=2,
                    enable_xavier=True, xavier_gpu_first=True,
                    xavier_gpu_cache_bytes="256MiB")"""


def nothing_runs() -> str:
    """Say how to get something to look at."""
    return _page(
        '<div class="empty"><h3>No GPU-first model is running</h3>'
        "<p>Launch one from the launch dialog of the web UI (card “Share KV cache between "
        "replicas”), or from Python:</p>"
        f"<pre>{escape(_LAUNCH)}</pre><p>It appears here by itself. The planner, in the next tab, "
        "tells beforehand what a budget holds.</p></div>"
    )


def gone(model_uid: str) -> str:
    """Say that the chosen model is not there."""
    return problem(f"{model_uid} is not running, or is no GPU-first model; choose another one.")


def unknown_visitor(message: str) -> str:
    """Say how to be let in, where the server asks who the visitor is."""
    return problem(
        f"{message}. Whoever is logged in to the server's web UI is known here when the console is "
        "opened from the launch dialog there. An API key shows everything; to clear and to limit "
        "takes a login that may launch models."
    )


def problem(message: str) -> str:
    """Show why there is nothing to show."""
    return _page(f'<div class="empty" role="alert"><h3>Nothing to show</h3>{escape(message)}</div>')


def overview(model: Model, history: History) -> str:
    """Show one model with all of its replicas."""
    name = f" ({escape(model.model_name)})" if model.model_name else ""
    head = (
        f"<h3>{escape(model.model_uid)}{name}</h3>"
        f'<p class="sub">{escape(model.status or "stopped")}; {model.replica} replicas launched, '
        f"{sum(r.state == 'ready' for r in model.replicas)} of them sharing</p>"
    )
    cards = "".join(
        _card(replica, history.of(model.model_uid, replica.replica)) for replica in model.replicas
    )
    if not cards:
        return _page(f"{head}<p>None of its replicas has answered yet.</p>")
    return _page(f'{head}<div class="grid">{cards}</div>{_sharing(model.replicas)}')


def plan(found: Plan) -> str:
    """Show what budgets hold."""
    notes = "".join(f'<p class="bad">{escape(note.message)}</p>' for note in found.errors)
    notes += "".join(f'<p class="warn">{escape(note.message)}</p>' for note in found.warnings)
    if found.slot_bytes is None:
        reason = found.model.reason or "give a model, or layers, KV heads and head dimension"
        head = f"<p>A block's size is not known: {escape(reason)}.</p>"
    else:
        size = format_size(found.slot_bytes)
        head = f"<p>One block is {found.block_tokens:,} tokens and {size}.</p>"
    tiers = (
        ("GPU tier", found.per_replica.gpu, found.total.gpu),
        ("CPU tier", found.per_replica.cpu, found.total.cpu),
    )
    rows = "".join(
        f"<tr><td>{name}</td><td>{_planned(each)}</td><td>{_planned(whole)}</td></tr>"
        for name, each, whole in tiers
    )
    table = (
        f"<table><thead><tr><th></th><th>Each replica</th><th>All {found.replica}</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )
    fits = [
        f"{name} {format_size(size)}"
        for name, size in (("GPU", found.limits.gpu_bytes), ("CPU", found.limits.cpu_bytes))
        if size is not None
    ]
    largest = f"<p>Largest budgets of a replica that fit on the server now: {', '.join(fits)}.</p>"
    return _page(f'<div class="card">{head}{table}{largest if fits else ""}{notes}</div>')


def cleared(result: ClearedModel) -> str:
    """Say what became of clearing a model's stores."""
    done = [replica.replica for replica in result.replicas if replica.cleared]
    failed = {r.replica: r.error for r in result.replicas if not r.cleared}
    return _outcome(f"{result.model_uid}: cleared", done, failed)


def limited(result: BudgetsResult) -> str:
    """Say what became of new limits."""
    done = [
        f"{replica.replica} ({replica.evicted_blocks:,} blocks evicted)"
        for replica in result.replicas
        if replica.applied
    ]
    failed = {r.replica: r.error for r in result.replicas if not r.applied}
    return _outcome(f"{result.model_uid}: limited", done, failed, result.note)


def _page(body: str) -> str:
    return f'<div class="xv">{body}</div>'


# -- a replica -------------------------------------------------------------------------------------


def _card(replica: Replica, intervals: Sequence[Interval]) -> str:
    name = escape(replica.replica)
    parts = [
        f'<div class="row"><h3>{name}</h3>'
        f'<span><span class="state {replica.state}">{replica.state}</span></span></div>'
    ]
    if replica.error:
        parts.append(f'<p class="bad">{escape(replica.error)}</p>')
    if replica.gpu is not None and replica.cpu is not None:
        parts.append(_tiers(replica.gpu, replica.cpu, in_host_memory=replica.device == "cpu"))
    if replica.tokens is not None:
        parts.append(_hits(replica.tokens))
    if replica.state == "ready":
        parts.append(_totals(replica))
        parts.append(_plots(intervals))
    return f'<section class="card" aria-label="{name}">{"".join(parts)}</section>'


def _tiers(gpu: TierUse, cpu: TierUse, *, in_host_memory: bool) -> str:
    keys = {"leased": "leased", "used": "used, not leased", "free": "free"}
    if any(tier.limit_blocks < tier.capacity_blocks for tier in (gpu, cpu)):
        keys["over"] = "above the limit"
    legend = "".join(f'<span class="key {name}"></span>{text}' for name, text in keys.items())
    title = "GPU tier (in host memory)" if in_host_memory else "GPU tier"
    return f'{_tier(title, gpu)}{_tier("CPU tier", cpu)}<div class="legend">{legend}</div>'


def _tier(title: str, tier: TierUse) -> str:
    if not tier.capacity_blocks:
        return f'<div class="row"><b>{title}</b><span>off</span></div>'
    free = max(0, tier.limit_blocks - tier.used_blocks)
    limit = ""
    if tier.limit_blocks != tier.capacity_blocks:
        limit = f", limited to {format_size(tier.limit_bytes)}"
    text = (
        f"{tier.used_blocks:,} of {tier.capacity_blocks:,} blocks "
        f"({format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)}{limit}), "
        f"{tier.leased_blocks:,} leased, {free:,} free"
    )
    parts = {
        "leased": tier.leased_blocks,
        "used": tier.used_blocks - tier.leased_blocks,
        "free": free,
        "over": tier.capacity_blocks - tier.used_blocks - free,
    }
    bar = _bar(parts, tier.capacity_blocks, f"{title}: {text}")
    return f"<div><b>{title}</b> {text}</div>{bar}"


def _hits(tokens: PromptTokens) -> str:
    if not tokens.prompt:
        return "<div>No prompt yet.</div>"
    counts = {name: int(getattr(tokens, name)) for name in SOURCES}
    found = sum(counts.values())
    legend = "".join(
        f'<span class="key {name}"></span>{SOURCES[name]} {_percent(count, tokens.prompt)} '
        for name, count in counts.items()
        if count
    )
    text = (
        f"{_percent(found, tokens.prompt)}: {found:,} of {tokens.prompt:,} prompt tokens were "
        "not computed"
    )
    bar = _bar(counts, tokens.prompt, f"Hit rate {text}")
    return f'<div><b>Hit rate</b> {text}</div>{bar}<div class="legend">{legend}</div>'


def _totals(replica: Replica) -> str:
    rows = {
        "Requests": f"{replica.requests or 0:,}",
        "Blocks saved": f"{replica.saved_blocks or 0:,}",
        "Demotions, GPU to CPU tier": f"{replica.demotions or 0:,}",
        "Evictions": f"{replica.evictions or 0:,}",
        "Blocks not saved": _reasons(replica.skips),
        "Requests that go past the store": _reasons(replica.bypassed),
        "Failed loads": _reasons(replica.load_failures),
        "Transports not used": _reasons(replica.transport_refusals),
    }
    body = "".join(f'<tr><td>{n}</td><td class="n">{text}</td></tr>' for n, text in rows.items())
    return f"<table>{body}</table>"


def _plots(intervals: Sequence[Interval]) -> str:
    if not intervals:
        return ""
    window = _duration(intervals[0].begin)
    rates = [interval.rate for interval in intervals if interval.rate is not None]
    speed = f"last {_speed(rates[-1])}, highest {_speed(max(rates))}" if rates else "no load"
    failures = [interval.failures for interval in intervals]
    return (
        f'<div class="plot"><b>Load speed</b> in the {window}: {speed}'
        f"{_columns(intervals, [i.rate or 0.0 for i in intervals], 'peer_device')}</div>"
        f'<div class="plot"><b>Failed loads</b> in the {window}: {sum(failures):,}'
        f"{_columns(intervals, failures, 'leased')}</div>"
    )


def _columns(intervals: Sequence[Interval], values: Sequence[float], colour: str) -> str:
    """Draw a column per interval, as wide as it was long, the newest at the right."""
    top = max(values)
    if not top:
        return ""
    oldest = max(intervals[0].begin, SHORTEST_S)
    drawn = "".join(
        f'<rect class="{colour}" x="{300 * (1 - interval.begin / oldest):.1f}" '
        f'y="{60 - 58 * value / top:.1f}" height="{58 * value / top:.1f}" '
        f'width="{300 * (interval.begin - interval.end) / oldest:.1f}"/>'
        for interval, value in zip(intervals, values, strict=True)
        if value
    )
    return (
        '<svg viewBox="0 0 300 60" preserveAspectRatio="none" aria-hidden="true">'
        f'<line x1="0" x2="300" y1="60" y2="60"/>{drawn}</svg>'
    )


# -- who reads from whom ---------------------------------------------------------------------------


def _sharing(replicas: Sequence[Replica]) -> str:
    rows = "".join(_link(replica.replica, link) for replica in replicas for link in replica.links)
    if not rows and len(replicas) == 1:
        return (
            '<p class="sub section">It is the only replica: there is nobody to share with, and its '
            "tiers only give back what vLLM itself has evicted.</p>"
        )
    if not rows:
        return '<p class="sub section">No replica has met another one yet.</p>'
    return (
        '<h3 class="section">Who reads from whom</h3><div class="scroll"><table><thead><tr>'
        '<th>Reader</th><th>Source</th><th>Transport</th><th class="n">Loads</th>'
        '<th class="n">Read</th><th class="n">Speed</th><th class="n">Failures</th><th>State</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _link(reader: str, link: Link) -> str:
    names = (reader, link.replica, link.transport or "nothing read yet")
    speed = "" if link.bytes_per_s is None else _speed(link.bytes_per_s)
    numbers = (f"{link.loads:,}", format_size(link.bytes), speed, f"{link.failures:,}")
    state = "ready"
    if not link.usable:
        state = f'<span class="warn">{escape(link.reason or "not met yet")}</span>'
    cells = "".join(f"<td>{escape(name)}</td>" for name in names)
    cells += "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f"<tr>{cells}<td>{state}</td></tr>"


# -- small parts -----------------------------------------------------------------------------------


def _outcome(
    what: str, done: Sequence[str], failed: Mapping[str, str | None], note: str = ""
) -> str:
    parts = [f"<p>{escape(what)} {escape(', '.join(done)) or 'none'}.</p>"]
    parts += [
        f'<p class="bad">{escape(name)}: {escape(error or "no reason given")}</p>'
        for name, error in failed.items()
    ]
    return _page(f'<div role="status">{"".join(parts)}{escape(note)}</div>')


def _planned(tier: TierPlan) -> str:
    if tier.blocks is None or tier.tokens is None:
        size = "unknown" if tier.budget_bytes is None else format_size(tier.budget_bytes)
        return f"{size}, blocks not known"
    kept = f", {tier.reserved_blocks:,} more kept free" if tier.reserved_blocks else ""
    return f"{tier.blocks:,} blocks = {tier.tokens:,} tokens{kept}"


def _bar(parts: Mapping[str, int], whole: int, text: str) -> str:
    pieces = "".join(
        f'<i class="{name}" style="width:{100 * max(0, count) / whole:.3f}%"></i>'
        for name, count in parts.items()
    )
    return f'<div class="bar" role="img" aria-label="{escape(text)}">{pieces}</div>'


def _reasons(counts: Mapping[str, int]) -> str:
    if not sum(counts.values()):
        return "0"
    return "<br>".join(
        f"{escape(reason.replace('_', ' '))}: {count:,}"
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
        if count
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"


def _duration(seconds: float) -> str:
    return f"last {seconds:.0f} s" if seconds < 120 else f"last {seconds / 60:.0f} min"
