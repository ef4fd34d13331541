# SPDX-License-Identifier: Apache-2.0
"""What the console shows of the API's answers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.stub_api import MIB, a_link, a_model, a_replica, a_tier
from xinference_xavier.planner import make_plan
from xinference_xavier.schemas import (
    BudgetsResult,
    ClearedModel,
    ClearedReplica,
    DescribedReplica,
    LimitedReplica,
    Model,
    PlannedModel,
    PlanRequest,
    PromptTokens,
    Replica,
)
from xinference_xavier.ui import view
from xinference_xavier.ui.history import History

EVIL = "</div><script>x</script>\"'&`${1}{{2}}"
VOID = {"br", "rect", "line"}


class Tags(HTMLParser):
    """Checks that markup is well formed; keeps its tags and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(html: str) -> str:
    """Return the text of well-formed markup."""
    return Tags(html).text


def a_summary(*replicas: DescribedReplica, **more: Any) -> Model:
    found = a_model(*replicas)
    summaries = [Replica(**replica.model_dump(exclude={"status"})) for replica in replicas]
    values = {**found.model_dump(exclude={"closed", "replicas"}), "replicas": summaries}
    return Model(**{**values, **more})


def overview(*replicas: DescribedReplica, history: History | None = None) -> str:
    return view.overview(a_summary(*replicas), history or History())


def widths(html: str, name: str) -> list[float]:
    """Return the widths of the bars' pieces of one kind, in percent."""
    return [float(n) for n in re.findall(rf'<i class="{name}" style="width:([\d.]+)%">', html)]


def test_both_tiers_are_bars_of_what_is_leased_used_and_free() -> None:
    gpu = a_tier(50).model_copy(update={"leased_blocks": 10})
    html = overview(a_replica("m-rep0", gpu=gpu, cpu=a_tier(25, 200, 150)))
    text = shown(html)
    assert "50 of 100 blocks (50 MiB of 100 MiB), 10 leased, 50 free" in text
    assert "25 of 200 blocks (25 MiB of 200 MiB, limited to 150 MiB), 0 leased, 125 free" in text
    assert widths(html, "leased") == [10, 0]
    assert widths(html, "used") == [40, 12.5]
    assert widths(html, "free") == [50, 62.5]
    assert widths(html, "over") == [0, 25]
    assert "above the limit" in text


def test_a_tier_that_holds_more_than_its_new_limit_has_nothing_free() -> None:
    html = overview(a_replica("m-rep0", gpu=a_tier(90, 100, 50)))
    assert "90 leased" not in html
    assert ", 0 leased, 0 free" in shown(html)
    assert widths(html, "over")[0] == 10


def test_a_tier_without_memory_is_off() -> None:
    html = overview(a_replica("m-rep0", cpu=a_tier(0, 0)))
    assert "CPU tieroff" in shown(html)


@pytest.mark.parametrize(("device", "title"), [("cpu", "in host memory"), ("cuda", "GPU tier")])
def test_a_gpu_tier_in_host_memory_says_so(device: str, title: str) -> None:
    text = shown(overview(a_replica("m-rep0", device=device)))
    assert title in text
    assert ("in host memory" in text) == (device == "cpu")


def test_the_hit_rate_is_shown_by_source() -> None:
    html = overview(a_replica("m-rep0"))
    text = shown(html)
    assert "55.0 %: 550 of 1,000 prompt tokens were not computed" in text
    for part in ("vLLM's own cache 10.0 %", "own GPU tier 2.0 %", "own CPU tier 3.0 %"):
        assert part in text
    assert "peers' GPU tier 40.0 %" in text
    assert "peers' CPU tier" not in text
    assert widths(html, "peer_device") == [40]


def test_before_the_first_prompt_there_is_no_rate() -> None:
    nothing = PromptTokens(prompt=0, local=0, own_device=0, own_host=0, peer_device=0, peer_host=0)
    assert "No prompt yet." in shown(overview(a_replica("m-rep0", tokens=nothing)))


def test_totals_and_reasons_are_told() -> None:
    replica = a_replica(
        "m-rep0",
        demotions=3,
        evictions=1234,
        skips={"host_leased": 2, "full": 7, "never": 0},
        load_failures={"timeout": 1},
    )
    html = overview(replica)
    assert '<td>Evictions</td><td class="n">1,234</td>' in html
    assert '<td class="n">full: 7<br>host leased: 2</td>' in html
    assert "timeout: 1" in html
    assert "never" not in html


def test_speed_and_failures_are_plotted_once_there_is_something() -> None:
    history = History()
    loads = [(0, 0, 0), (10, 0.01, 0), (10, 0.01, 2)]
    assert "<svg" not in overview(a_replica("m-rep0"), history=history)
    for at, (mib, seconds, failures) in enumerate(loads):
        link = a_link("m-rep1", bytes=mib * MIB, seconds=seconds)
        replica = a_replica("m-rep0", link, load_failures={"lost": failures})
        history.add([a_summary(replica)], 30.0 * at)
    html = overview(a_replica("m-rep0"), history=history)
    assert "Load speed in the last 60 s: last 1,049 MB/s, highest 1,049 MB/s" in shown(html)
    assert "Failed loads in the last 60 s: 2" in shown(html)
    assert '<rect class="peer_device" x="0.0" y="2.0" height="58.0" width="150.0"/>' in html
    assert '<rect class="leased" x="150.0" y="2.0" height="58.0" width="150.0"/>' in html


def test_who_reads_from_whom_is_told_with_transport_and_reason() -> None:
    text = shown(
        overview(
            a_replica("m-rep0", a_link("m-rep1")),
            a_replica(
                "m-rep1",
                a_link("m-rep0", transport=None, bytes_per_s=None, usable=False, reason="too slow"),
            ),
        )
    )
    assert "m-rep0m-rep1shm330 MiB3,000 MB/s0ready" in text
    assert "m-rep1m-rep0nothing read yet330 MiB0too slow" in text


def test_without_links_it_says_why() -> None:
    assert "the only replica" in shown(overview(a_replica("m-rep0")))
    two = overview(a_replica("m-rep0"), a_replica("m-rep1"))
    assert "No replica has met another one yet" in shown(two)
    assert "None of its replicas has answered yet" in shown(overview())


@pytest.mark.parametrize("state", ["starting", "unreachable", "missing"])
def test_a_replica_of_which_nothing_is_known_is_named_with_its_state(state: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ["address", "device", "block_tokens", "block_bytes", "gpu", "cpu", "requests", "tokens"]
    )
    html = overview(a_replica("m-rep0", state=state, error="no answer within 3 s", **nothing))
    assert f'<span class="state {state}">{state}</span>' in html
    assert "no answer within 3 s" in shown(html)


def test_what_a_server_says_is_never_markup() -> None:
    replica = a_replica(
        EVIL,
        a_link(EVIL, transport=EVIL, usable=False, reason=EVIL),
        error=EVIL,
        skips={EVIL: 1},
        load_failures={EVIL: 1},
        bypassed={EVIL: 1},
        transport_refusals={EVIL: 1},
    )
    model = a_summary(replica, model_uid=EVIL, model_name=EVIL, status=EVIL)
    failed = ClearedReplica(replica=EVIL, address=None, cleared=False, error=EVIL)
    planned = make_plan(
        PlanRequest(xavier_gpu_cache_bytes=EVIL),
        model=PlannedModel(source="unknown", reason=EVIL),
        block_bytes=None,
        block_tokens=16,
    )
    for html in (
        view.overview(model, History()),
        view.cleared(ClearedModel(model_uid=EVIL, complete=False, replicas=[failed])),
        view.plan(planned),
        view.problem(EVIL),
        view.unknown_visitor(EVIL),
        view.gone(EVIL),
    ):
        page = Tags(html)
        assert "script" not in page.tags
        assert "<script>x</script>" in page.text


def test_a_plan_tells_blocks_and_tokens_of_one_and_all() -> None:
    request = PlanRequest(replica=2, xavier_gpu_cache_bytes="256MiB", xavier_cpu_cache_bytes=0)
    planned = make_plan(
        request, model=PlannedModel(source="numbers"), block_bytes=196608, block_tokens=16
    )
    text = shown(view.plan(planned))
    assert "One block is 16 tokens and 192 KiB." in text
    assert "1,365 blocks = 21,840 tokens" in text
    assert "2,730 blocks = 43,680 tokens" in text
    assert "Largest budgets" not in text


def test_a_plan_without_a_block_tells_why_and_shows_refusals() -> None:
    request = PlanRequest(xavier_gpu_cache_bytes="1 parsec")
    model = PlannedModel(source="unknown", reason="not downloaded yet")
    planned = make_plan(request, model=model, block_bytes=None, block_tokens=16)
    html = view.plan(planned)
    assert "A block's size is not known: not downloaded yet." in shown(html)
    assert "unknown unit" in shown(html)
    assert 'class="bad"' in html


def test_outcomes_name_who_did_and_who_did_not() -> None:
    done = ClearedReplica(replica="m-rep0", address="a", cleared=True, error=None)
    lost = ClearedReplica(replica="m-rep1", address="a", cleared=False, error="no answer")
    text = shown(view.cleared(ClearedModel(model_uid="m", complete=False, replicas=[done, lost])))
    assert text == "m: cleared m-rep0.m-rep1: no answer"
    limit = LimitedReplica(
        replica="m-rep0",
        address="a",
        applied=True,
        error=None,
        evicted_blocks=1200,
        gpu=None,
        cpu=None,
    )
    text = shown(view.limited(BudgetsResult(model_uid="m", complete=True, replicas=[limit])))
    assert text.startswith("m: limited m-rep0 (1,200 blocks evicted).")
    assert "no memory is returned" in text


def test_an_empty_cluster_says_how_to_launch() -> None:
    text = shown(view.nothing_runs())
    assert "enable_xavier=True, xavier_gpu_first=True" in text
