# SPDX-License-Identifier: Apache-2.0
"""What makes each of the demo's five parts fail, how it is shown, and what the command returns."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from xinference_xavier.cli import main
from xinference_xavier.demo import main as demo
from xinference_xavier.demo.answers import Answer, Token
from xinference_xavier.demo.judge import (
    DRAINED,
    EMPTY,
    Part,
    Shutdown,
    judge_answers,
    judge_overflow,
    judge_restore,
    judge_sharing,
    judge_shutdown,
)
from xinference_xavier.demo.replicas import Replicas, Served, ask
from xinference_xavier.demo.report import outcome, show
from xinference_xavier.demo.server import DemoError
from xinference_xavier.store.index import SnapshotIndex

KEYS = (
    "cold_ttft_s", "remote_hit_ttft_s", "local_hit_ttft_s", "loaded_tokens", "transport",
    "load_mb_per_s", "outputs_identical", "demotions", "cpu_tier_hits", "restored_tokens",
    "clean_shutdown", "ok",
)  # fmt: skip


def answer(text: str = "A lamp", cached: int = 0, ttft: float = 0.25) -> Answer:
    tokens = tuple(Token(word, -0.5, (-0.5, -2.0)) for word in text.split())
    return Answer(tokens, 1680, cached, ttft, ttft + 1)


def status(**changes: Any) -> dict[str, Any]:
    traffic = {"requests": 1, "loaded_tokens": {}, "loads_failed": {}, "verified_blocks": 0}
    return {
        "store": {"block_tokens": 16},
        "traffic": {**traffic, **changes},
        "sources": changes.get("sources", {}),
    }


def served(
    replica: str,
    text: str = "A lamp",
    *,
    loaded: dict[str, int] | None = None,
    failed: dict[str, int] | None = None,
    verified: int | None = None,
    ttft: float = 0.25,
    cached: int | None = None,
    transport: str = "shm",
) -> Served:
    """Return what ``replica`` answered after it loaded so many tokens, all of them verified."""
    loaded = loaded or {}
    tokens = sum(loaded.values())
    source = "own" if any(name.startswith("own") for name in loaded) else "m-rep0"
    read = {"transport": transport, "nbytes": tokens * 46080, "seconds": 0.05}
    after = status(
        requests=2,
        loaded_tokens=loaded,
        loads_failed=failed or {},
        verified_blocks=tokens // 16 if verified is None else verified,
        sources={source: read} if tokens else {},
    )
    found = answer(text, cached=tokens if cached is None else cached, ttft=ttft)
    return Served(replica, found, status(), after)


COLD = served("m-rep0", ttft=8.0)
REMOTE = served("m-rep1", loaded={"peer_device": 1664})
LOCAL = served("m-rep1", cached=1664, ttft=0.2)
OVERFLOW = served("m-rep1", "Some water", loaded={"peer_device": 64, "peer_host": 1600})
RESTORED = served("m-rep0", loaded={"own_device": 1664})
CONTROL = answer(cached=1664)
REACHED = {**dict.fromkeys(DRAINED, 0), "device_blocks": 42, "host_blocks": 7}
CLOSED = {**dict.fromkeys(EMPTY, 0), "state": "closed", "drained": True, "reached": REACHED}
SHUTDOWN = Shutdown(
    ["m-rep0", "m-rep1"],
    [{"replica": name, "counters": CLOSED} for name in ("m-rep0", "m-rep1")],
    arenas_seen=4,
    left=[],
)


def parts() -> list[Part]:
    return [
        judge_sharing(COLD, REMOTE, LOCAL),
        judge_answers(REMOTE, CONTROL, OVERFLOW.answer),
        judge_overflow(85, OVERFLOW, answer("Some water", cached=1664)),
        judge_restore(RESTORED, CONTROL),
        judge_shutdown(SHUTDOWN),
    ]


def test_all_five_are_so_when_everything_is_as_it_should_be() -> None:
    assert [part.problems for part in parts()] == [[]] * 5


@pytest.mark.parametrize(
    ("cold", "remote", "local", "problem"),
    [
        (served("m-rep0", cached=16), REMOTE, LOCAL, "16 tokens were cached"),
        (served("m-rep1"), REMOTE, LOCAL, "served by one replica"),
        (COLD, served("m-rep1"), LOCAL, "1680 of 1680 tokens of the remote hit were computed"),
        (COLD, served("m-rep1", loaded={"peer_device": 1488}), LOCAL, "only 1488 tokens"),
        (COLD, served("m-rep1", loaded={"own_device": 1664}), LOCAL, "came from elsewhere"),
        (
            COLD,
            served("m-rep1", loaded={"peer_host": 1664}, failed={"checksum": 1}),
            LOCAL,
            "failed: {'checksum': 1}",
        ),
        (COLD, REMOTE, served("m-rep0", cached=1664), "no local hit"),
        (COLD, REMOTE, served("m-rep1", cached=160), "of the local hit were computed"),
    ],
)
def test_sharing_is_not_so(cold: Served, remote: Served, local: Served, problem: str) -> None:
    part = judge_sharing(cold, remote, local)
    assert not part.ok
    assert any(problem in text for text in part.problems), part.problems


def test_another_transport_than_the_one_asked_for_is_a_problem() -> None:
    assert judge_sharing(COLD, REMOTE, LOCAL, transport="shm").ok
    assert judge_sharing(COLD, REMOTE, LOCAL, transport="nixl").problems == [
        "the transport was shm, not nixl"
    ]


@pytest.mark.parametrize(
    ("remote", "control", "other", "problem"),
    [
        (REMOTE, answer("A light", cached=1664), answer("Some water"), "not the control's"),
        (REMOTE, answer(cached=1648), answer("Some water"), "local hit has 1648 tokens"),
        (REMOTE, CONTROL, answer(), "another document gives the same answer"),
        (
            served("m-rep1", loaded={"peer_device": 1664}, verified=103),
            CONTROL,
            answer("Some water"),
            "only 1648 have the published checksums",
        ),
    ],
)
def test_the_answer_is_not_the_same(
    remote: Served, control: Answer, other: Answer, problem: str
) -> None:
    part = judge_answers(remote, control, other)
    assert any(problem in text for text in part.problems), part.problems


def test_an_overflow_without_demotions_or_from_the_device_tier_alone_is_not_so() -> None:
    control = answer("Some water", cached=1664)
    assert "nothing was demoted" in judge_overflow(0, OVERFLOW, control).problems[0]
    device = served("m-rep1", "Some water", loaded={"peer_device": 1664})
    assert judge_overflow(85, device, control).problems == [
        "the later hit was not served from the CPU tier"
    ]
    assert not judge_overflow(85, OVERFLOW, answer("Some wine", cached=1664)).ok


def test_a_restore_from_the_other_replica_is_not_so() -> None:
    remote = served("m-rep0", loaded={"peer_host": 1664})
    assert "came from elsewhere" in judge_restore(remote, CONTROL).problems[0]
    assert not judge_restore(served("m-rep0"), CONTROL).ok


@pytest.mark.parametrize("counter", EMPTY)
def test_a_counter_that_is_not_zero_after_close_is_a_problem(counter: str) -> None:
    report = {"replica": "m-rep0", "counters": {**CLOSED, counter: 2}}
    part = judge_shutdown(replace(SHUTDOWN, reports=[report, SHUTDOWN.reports[1]]))
    assert part.problems == [f"m-rep0 closed with {counter} = 2"]


@pytest.mark.parametrize("counter", DRAINED)
def test_what_a_drained_store_still_held_before_it_was_cleared_is_a_problem(counter: str) -> None:
    leaky = {**CLOSED, "reached": {**REACHED, counter: 3}}
    reports = [SHUTDOWN.reports[0], {"replica": "m-rep1", "counters": leaky}]
    part = judge_shutdown(replace(SHUTDOWN, reports=reports))
    assert part.problems == [f"m-rep1 was drained, and cleared with {counter} = 3"]
    assert "of leases and copies 11 of 12 were" in part.shown


def test_a_drained_store_that_does_not_say_what_it_held_is_a_problem() -> None:
    silent = {name: CLOSED[name] for name in CLOSED if name != "reached"}
    reports = [SHUTDOWN.reports[0], {"replica": "m-rep1", "counters": silent}]
    problems = judge_shutdown(replace(SHUTDOWN, reports=reports)).problems
    assert problems == [f"m-rep1 was drained, and cleared with {name} = None" for name in DRAINED]


def test_the_counters_of_a_real_store_are_judged_and_a_leaked_lease_fails() -> None:
    def closed(*, leak: bool) -> dict[str, Any]:
        index = SnapshotIndex(device_slots=2, host_slots=2, spare_slots=1)
        key = bytes(32)
        index.commit(index.admit([(key, 0)]).job_id)
        grant = index.acquire([key], reader="m-rep1", request="r", now=0.0, duration=9.0)
        if not leak:
            index.release(grant.lease_id)
        others = {"pinned_blocks": 0, "load_jobs": 0, "quarantined": 0, "drained": True}
        return {**others, **asdict(index.close())}

    def judged(counters: dict[str, Any]) -> Part:
        reports = [SHUTDOWN.reports[1], {"replica": "m-rep0", "counters": counters}]
        return judge_shutdown(replace(SHUTDOWN, reports=reports))

    assert judged(closed(leak=False)).problems == []
    assert judged(closed(leak=True)).problems == [
        "m-rep0 was drained, and cleared with leases = 1",
        "m-rep0 was drained, and cleared with leased_blocks = 1",
    ]


def test_missing_counters_missing_reports_and_leftovers_are_problems() -> None:
    incomplete = {name: CLOSED[name] for name in CLOSED if name not in ("leases", "drained")}
    seen = replace(
        SHUTDOWN,
        reports=[{"replica": "m-rep0", "counters": incomplete}],
        arenas_seen=0,
        left=["process 7 vllm"],
    )
    assert judge_shutdown(seen).problems == [
        "m-rep1 gave no final counters",
        "m-rep0 closed with leases = None",
        "m-rep0 closed before its work was done",
        "our memory was never seen, so its absence proves nothing",
        "left behind: process 7 vllm",
    ]


def test_the_json_has_the_promised_keys_and_names_what_failed() -> None:
    good = parts()
    result = outcome(good, {"engine": {"block_size": 16}, "seconds": 1.0})
    assert json.loads(json.dumps(result)) == result
    assert set(KEYS) <= set(result)
    assert result["ok"] is True
    assert result["failed"] == []
    assert (result["loaded_tokens"], result["transport"]) == (1664, "shm")
    assert (result["demotions"], result["cpu_tier_hits"]) == (85, 100)
    assert result["load_mb_per_s"] == pytest.approx(1533.5, abs=0.1)
    bad = [*good[:3], judge_restore(RESTORED, answer("A light", cached=1664)), good[4]]
    result = outcome(bad, {"engine": {"block_size": 16}})
    assert result["ok"] is False
    assert result["outputs_identical"] is False
    assert result["failed"] == ["4: what vLLM evicts is restored"]


def test_the_table_shows_each_part_and_why_one_is_not_so() -> None:
    console = Console(file=io.StringIO(), width=120)
    bad = judge_overflow(0, OVERFLOW, answer("Some water", cached=1664))
    show(console, [*parts()[:2], bad, *parts()[3:]])
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert text.count("│ yes") == 4
    assert text.count("│ NO") == 1
    assert "nothing was demoted" in text
    assert "global_lru" in text


class FakeServer:
    """Takes the place of Xinference."""

    stopped = 0

    def __init__(self, keep_logs: Path | None) -> None:
        self.keep_logs = keep_logs

    def tail(self) -> str:
        return "its last line"

    def stop(self) -> None:
        FakeServer.stopped += 1


def run_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, story: Any, *arguments: str
) -> Result:
    (tmp_path / "config.json").write_text("{}")
    FakeServer.stopped = 0
    monkeypatch.setattr(demo, "Server", FakeServer)
    monkeypatch.setattr(demo.story, "run", story)
    json_file = ["--json", str(tmp_path / "out.json")]
    return CliRunner().invoke(main, ["demo", "--model-dir", str(tmp_path), *json_file, *arguments])


def told(found: list[Part]) -> Any:
    return lambda server, settings, step: (found, {"engine": {"block_size": 16}})


def test_the_command_succeeds_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_demo(monkeypatch, tmp_path, told(parts()))
    assert result.exit_code == 0, result.output
    assert "All five parts are so" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is True
    assert FakeServer.stopped == 1


def test_the_command_fails_and_says_which_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = judge_overflow(0, OVERFLOW, answer("Some water", cached=1664))
    result = run_demo(monkeypatch, tmp_path, told([*parts()[:2], bad, *parts()[3:]]))
    assert result.exit_code == 1
    assert "not as it should be: 3: what overflows goes to the CPU tier" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is False


def test_a_demo_that_cannot_go_on_tells_why_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def story(*_: object) -> None:
        raise DemoError("no replica")

    result = run_demo(monkeypatch, tmp_path, story)
    assert result.exit_code == 1
    assert "no replica" in result.output
    assert "its last line" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is False
    assert FakeServer.stopped == 1


def test_a_server_that_refuses_or_dies_is_told_like_that_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def story(*_: object) -> None:
        raise ConnectionError("connection refused")

    result = run_demo(monkeypatch, tmp_path, story)
    assert result.exit_code == 1
    assert "connection refused" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is False


def test_a_stream_that_breaks_is_told() -> None:
    class Broken:
        def generate(self, prompt: str, generate_config: dict[str, Any]) -> Any:
            yield {"choices": []}
            raise Exception("the engine died")

    with pytest.raises(DemoError, match="a request failed: the engine died"):
        ask(Broken(), "Who are you?")


def test_ctrl_c_ends_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def story(*_: object) -> None:
        raise KeyboardInterrupt

    assert run_demo(monkeypatch, tmp_path, story).exit_code != 0
    assert FakeServer.stopped == 1


def test_a_bad_size_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_demo(monkeypatch, tmp_path, told(parts()), "--gpu-cache-bytes", "many")
    assert result.exit_code == 2
    assert "xavier_gpu_cache_bytes" in result.output
    assert FakeServer.stopped == 0


class FakeModel:
    """Two replicas that are served in turn; ``skips`` is which turns are skipped."""

    def __init__(self, skips: tuple[int, ...] = ()) -> None:
        self.requests = {"m-rep0": 0, "m-rep1": 0}
        self.prompts: list[tuple[str, str]] = []
        self._skips = skips
        self._turn = 0

    def generate(self, prompt: str, generate_config: dict[str, Any]) -> Any:
        if generate_config["temperature"] != 0:
            raise ValueError("not greedy")
        if len(self.prompts) in self._skips:
            self._turn += 1
        name = sorted(self.requests)[self._turn % 2]
        self._turn += 1
        self.requests[name] += 1
        self.prompts.append((name, prompt))
        logprobs = {"tokens": ["A"], "token_logprobs": [-0.1], "top_logprobs": [{"A": -0.1}]}
        return [{"choices": [{"logprobs": logprobs}], "usage": {"prompt_tokens": 1}}]

    def statuses(self) -> dict[str, Any]:
        return {name: status(requests=count) for name, count in self.requests.items()}


@pytest.mark.parametrize("order", [["m-rep0", "m-rep1"], ["m-rep1", "m-rep1", "m-rep0"]])
def test_the_chosen_replica_answers_whoever_is_next(order: list[str]) -> None:
    model = FakeModel()
    replicas = Replicas(model, model.statuses)
    for name in order:
        assert replicas.ask(name, "Who are you?").replica == name
    asked = [name for name, prompt in model.prompts if prompt == "Who are you?"]
    assert asked == order


def test_an_answer_of_the_wrong_replica_is_an_error() -> None:
    model = FakeModel(skips=(3,))
    replicas = Replicas(model, model.statuses)
    replicas.ask("m-rep1", "first")
    with pytest.raises(DemoError, match="not served in turn"):
        replicas.ask("m-rep1", "second")
