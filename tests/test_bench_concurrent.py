# SPDX-License-Identifier: Apache-2.0
"""Many requests share a few prefixes, and their answers are compared with plain vLLM's."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.stub_completions import CACHED, StubCompletions
from xinference_xavier import cli
from xinference_xavier.bench import concurrent
from xinference_xavier.bench.arms import Replicas, make_arm
from xinference_xavier.bench.arms.xavier import XavierReplicas
from xinference_xavier.bench.concurrent import HOST_TIER, PREFIXES, Round, Settings, workload
from xinference_xavier.bench.engines import Completion, EngineError
from xinference_xavier.bench.load import Ask
from xinference_xavier.bench.models import TINY
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report

SETTINGS = Settings(Path("unused"), 0, tokens=64)


@pytest.mark.parametrize("concurrency", [16, 32])
def test_every_prefix_is_asked_about_equally_often(concurrency: int) -> None:
    asked = workload(SETTINGS, 1, concurrency)
    assert asked == workload(SETTINGS, 1, concurrency)
    assert len({ask.prompt for ask in asked.asks}) == len(asked.asks) == 3 * concurrency
    begun = Counter(ask.prompt[: SETTINGS.tokens] for ask in asked.asks)
    assert begun == dict.fromkeys(asked.prefixes, len(asked.asks) // PREFIXES)


def test_no_prefix_of_another_round_comes_again() -> None:
    rounds = [workload(SETTINGS, number, 16).prefixes for number in range(12)]
    assert len({prefix[:16] for prefixes in rounds for prefix in prefixes}) == 12 * PREFIXES


def test_budgets_hold_every_prefix_and_the_small_device_tier_no_round() -> None:
    settings = Settings(Path("unused"), 0)
    large, small = (
        concurrent._arm_settings(settings, Path("model"), name) for name in ("xavier", HOST_TIER)
    )
    assert large.gpu_cache_bytes == "256MiB"
    per_round = PREFIXES * settings.tokens * settings.shape.token_bytes(4)
    assert int(small.gpu_cache_bytes) < per_round
    for arm in (small, large):
        assert int(arm.cpu_cache_bytes) >= per_round * (settings.rounds + 2)
        assert arm.replicas == 2
    assert concurrent._arm_settings(settings, Path("model"), "plain").replicas == 1


def test_a_round_counts_the_requests_whose_prefix_was_known() -> None:
    asks = [Ask(f"prompt {number}", 4) for number in range(6)]

    async def run(prefix_tokens: int) -> dict[str, Any]:
        async with StubCompletions().running() as stub, asyncio.timeout(60):
            return await concurrent.load(stub.url, Round([], asks), 3, prefix_tokens)

    found = asyncio.run(run(CACHED))
    assert (found["requests"], found["errors"], found["full_hits"]) == (6, [], 6)
    assert min(found[key] for key in concurrent.KEYS) > 0
    assert len(set(found["answers"])) == 1
    json.dumps(found, allow_nan=False)
    assert asyncio.run(run(CACHED + 1))["full_hits"] == 0


def test_a_failed_request_fails_the_round() -> None:
    async def run() -> dict[str, Any]:
        async with StubCompletions().running() as stub, asyncio.timeout(60):
            asks = [Ask("prompt", 4), Ask("refuse", 4)]
            return await concurrent.load(stub.url, Round([], asks), 2, CACHED)

    found = asyncio.run(run())
    assert found == {"requests": 2, "errors": ["status 503: too busy"]}


class Recording:
    """An engine that answers with what it was asked."""

    def __init__(self, seen: list[str], name: str) -> None:
        self._seen = seen
        self._name = name

    def stream(self, prompt: str, max_tokens: int) -> Completion:
        self._seen.append(f"{self._name} answers")
        return Completion([len(prompt), max_tokens], [], 0, 0.1, 0.1)


class RecordingReplicas(Replicas):
    def __init__(self) -> None:
        self.seen: list[str] = []
        engines: Any = [Recording(self.seen, "first"), Recording(self.seen, "last")]
        super().__init__(engines)

    def settle(self) -> None:
        self.seen.append("settle")

    def share(self, prefixes: Sequence[str]) -> None:
        self.seen += ["share"] * len(prefixes)


def test_first_answers_come_one_by_one_from_a_replica_that_computed_nothing() -> None:
    replicas = RecordingReplicas()
    asked = workload(SETTINGS, 0, 16)
    answers = concurrent._first_answers(replicas, asked)
    assert replicas.seen == ["share"] * PREFIXES + ["settle", "last answers"] * PREFIXES
    assert answers == [[SETTINGS.tokens + concurrent.QUESTION, concurrent.ANSWER]] * PREFIXES


class Source:
    """A first engine whose blocks the other one hears of some time after they are computed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.computed: list[str] = []

    def complete(self, prompt: str, max_tokens: int) -> None:
        self.computed.append(prompt)


def test_prefixes_are_shared_when_the_reader_knows_all_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, reader = Source("xavier-0"), Source("xavier-1")
    engines: Any = [source, reader]
    replicas = XavierReplicas(engines, "a directory")
    known = iter([100, 103, 107, 108, 109])
    monkeypatch.setattr(
        replicas, "describe", lambda: {"xavier-1": {"control": {"mirror_blocks": next(known)}}}
    )
    monkeypatch.setattr(replicas, "settle", lambda: None)
    replicas.share(["a" * 64, "b" * 70])
    assert source.computed == ["a" * 64, "b" * 70]
    assert not reader.computed
    assert next(known) == 109, "it waited for eight blocks more, and no longer"


def an_arm(own: list[int], plain: list[int], *, answers: tuple[int, int] = (1, 1)) -> Any:
    def rounds(answer: int) -> list[dict[str, Any]]:
        each = {
            "requests": 2, "errors": [], "ttft_s": [0.2, 0.3], "ttft_p50_s": 0.25,
            "ttft_p95_s": 0.3, "tpot_p95_s": 0.02, "tokens_per_s": 50.0, "full_hits": 2,
            "answers": [7, answer],
        }  # fmt: skip
        return [each] * 3

    return {
        "first": {"own": [own], "plain": [plain]},
        "rounds": {"own": rounds(answers[0]), "plain": rounds(answers[1])},
        "counters": {},
    }


def test_first_answers_must_be_those_of_all_plain_engines() -> None:
    found = concurrent.judged(
        {
            "plain": an_arm([1, 2], [1, 2]),
            "xavier": an_arm([1, 2], [1, 2]),
            "builtin": an_arm([1, 3], [1, 2]),
            "lmcache": an_arm([1, 3], [1, 3]),
        }
    )
    equal = {name: arm["first_answers_equal"] for name, arm in found.items()}
    assert equal == {"plain": True, "xavier": True, "builtin": False, "lmcache": False}


def test_answers_under_load_are_compared_with_those_of_the_plain_engine_beside() -> None:
    found = concurrent.judged({"xavier": an_arm([1], [1], answers=(1, 2))})["xavier"]
    assert (found["answers"], found["answers_equal"], found["full_hits"]) == (4, 2, 4)


def test_arms_of_an_earlier_run_are_judged_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(tmp_path, 0, ("plain", HOST_TIER), rounds=2, shape=TINY)
    fixed = asdict(settings)
    del fixed["folder"], fixed["arms"], fixed["concurrency"]
    record = Record(tmp_path / "kept.json", fixed)
    for name, answer in (("plain", 2), (HOST_TIER, 3)):
        for level in settings.concurrency:
            record.arm(f"{name}, {level} at once", lambda answer=answer: an_arm([answer], [2]))
    found = concurrent.run(settings, Report(), tmp_path / "kept.json")
    assert [level["concurrency"] for level in found["levels"]] == [16, 32]
    for level in found["levels"]:
        assert list(level["arms"]) == ["plain", HOST_TIER]
    concurrent.show(found, Report())
    shown = " ".join(capsys.readouterr().out.split())
    assert "plain: first answers equal; under load 4 of 4 answers are plain vLLM's" in shown
    assert "xavier-cpu: first answers NOT EQUAL" in shown
    concurrent.plot(found, tmp_path)
    for level in (16, 32):
        picture = tmp_path / f"concurrent-{level}-ttft.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_cannot_be_measured_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: object, name: str, __: object, concurrency: int, ___: object) -> Any:
        if name == HOST_TIER or concurrency == 32:
            raise EngineError("no such luck")
        return an_arm([1], [1])

    monkeypatch.setattr(concurrent, "_measure", measure)
    settings = Settings(tmp_path, 0, ("plain", HOST_TIER))
    found = concurrent.run(settings, Report())
    (level,) = found["levels"]
    assert (level["concurrency"], list(level["arms"])) == (16, ["plain"])
    assert list(found["failed"]) == [
        "xavier-cpu, 16 at once", "plain, 32 at once", "xavier-cpu, 32 at once",
    ]  # fmt: skip
    concurrent.show(found, Report())
    assert "NOT MEASURED: plain, 32 at once" in capsys.readouterr().out
    with pytest.raises(EngineError, match="no such luck"):
        concurrent.run(Settings(tmp_path, 0, (HOST_TIER,)), Report())


def test_every_arm_that_can_be_chosen_can_be_made() -> None:
    for name in concurrent.ARMS:
        made = make_arm(concurrent.arm_of(name))
        assert name.startswith(made.name)
    result = CliRunner().invoke(cli.main, ["bench", "concurrent", "--arms", "cold"])
    assert result.exit_code == 2
    assert "is not one of plain, xavier, xavier-cpu, builtin, lmcache" in result.output


@pytest.mark.slow
@pytest.mark.e2e
def test_it_is_measured_on_real_engines(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    args = ["bench", "concurrent", "--tiny", "--rounds", "2", "--tokens", "128"]
    args += ["--concurrency", "16", "--arms", HOST_TIER]
    args += ["--logs", str(tmp_path), "--json", str(file)]
    result = CliRunner().invoke(cli.main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (level,) = json.loads(file.read_text())["levels"]
    arm = level["arms"][HOST_TIER]
    assert (arm["requests"], arm["failed"], arm["plain_failed"]) == (3 * 48, 0, 0)
    assert arm["first_answers_equal"]
    assert set(arm["vs_plain"]) == set(concurrent.KEYS)
    statuses = list(arm["counters"].values())
    # More blocks than the device tier has: the rest is in the host tier, and is loaded from there.
    assert sum(status["store"]["totals"]["demotions"] for status in statuses) > 0
