# SPDX-License-Identifier: Apache-2.0
"""New prompts meet answers that are being written, and what that costs follows from the pieces."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.stub_completions import StubCompletions
from xinference_xavier import cli
from xinference_xavier.bench import interleaved
from xinference_xavier.bench.arms import make_arm
from xinference_xavier.bench.engines import EngineError
from xinference_xavier.bench.interleaved import Round, Settings, figures, workload
from xinference_xavier.bench.load import Ask, Reply
from xinference_xavier.bench.models import TINY
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record
from xinference_xavier.bench.report import Report

SETTINGS = Settings(Path("unused"), 0, tokens=256)


def test_no_prompt_ever_comes_again() -> None:
    asked = [workload(SETTINGS, number) for number in range(3)]
    assert asked == [workload(SETTINGS, number) for number in range(3)]
    texts = [ask.prompt for each in asked for ask in (*each.streams, *each.prompts)]
    texts += [unique_text(seed, SETTINGS.tokens) for seed in range(interleaved.CALIBRATIONS)]
    assert len({text[:16] for text in texts}) == len(texts) == 3 * 12 + 5
    assert {len(ask.prompt) for each in asked for ask in each.prompts} == {256}
    assert [len(asked[0].streams), len(asked[0].prompts)] == [4, 8]


def test_a_round_is_measured_while_answers_are_written() -> None:
    asked = Round(
        [Ask(f"stream {number}", 1_000_000) for number in range(2)],
        [Ask(f"prompt {number}", 4) for number in range(3)],
    )

    async def run() -> dict[str, Any]:
        stub = StubCompletions()
        async with stub.running(), asyncio.timeout(60):
            found = await interleaved.load(stub.url, asked, 0.01)
            await stub.wait_cut_off(2)
        assert stub.prompts[2:] == ["prompt 0", "prompt 1", "prompt 2"]
        return found

    found = asyncio.run(run())
    assert (found["requests"], found["errors"]) == (5, [])
    assert len(found["ttft_s"]) == 3
    assert min(found[key] for key in interleaved.KEYS) > 0
    # What the server's sums grew by between its two readings.
    assert (found["engine_ttft_s"], found["engine_prefill_s"]) == (5.0, 4.0)
    json.dumps(found, allow_nan=False)


def test_a_stream_that_failed_fails_the_round() -> None:
    async def run() -> dict[str, Any]:
        async with StubCompletions().running() as stub, asyncio.timeout(60):
            return await interleaved.load(
                stub.url, Round([Ask("refuse", 9)], [Ask("prompt", 2)]), 0.01
            )

    found = asyncio.run(run())
    assert found["errors"] == ["status 503: too busy"]
    assert "ttft_p50_s" not in found


def test_only_what_came_in_the_round_s_time_counts() -> None:
    stream = Reply(0.0, times=[1.0, 2.0, 2.5, 3.0, 9.0], counts=[1] * 5)
    reply = Reply(2.1, times=[2.6, 2.8], counts=[1, 3])
    found = figures([stream], [reply], 2.0, 4.0)
    assert found["tokens_per_s"] == pytest.approx((3 + 4) / 2.0)
    assert found["gap_p99_s"] == 0.5
    assert found["ttft_p50_s"] == pytest.approx(0.5)


def test_waiting_is_what_plain_engines_did_not_spend_computing() -> None:
    def plain(ttft_s: float, prefill_s: float) -> dict[str, float]:
        return {"engine_ttft_s": ttft_s, "engine_prefill_s": prefill_s}

    first = plain(100.0, 1.0)
    found = interleaved.queueing_share([[first, plain(4.0, 3.0)], [first, plain(4.0, 2.0)]])
    assert found == pytest.approx(3 / 8)
    assert interleaved.queueing_share([[first, plain(0.0, 0.0)]]) is None


def kept(settings: Settings, file: Path) -> None:
    """Write what an earlier run has measured."""
    fixed = asdict(settings)
    del fixed["folder"], fixed["arms"]
    each = {
        "requests": 3, "errors": [], "ttft_s": [0.2, 0.3], "ttft_p50_s": 0.25,
        "ttft_p95_s": 0.3, "tokens_per_s": 50.0, "gap_p99_s": 0.1,
        "engine_ttft_s": 1.0, "engine_prefill_s": 0.4,
    }  # fmt: skip
    record = Record(file, fixed)
    record.arm("one prompt alone", lambda: 0.2)
    for name in settings.arms:
        rounds = {"plain": [each] * 3, "own": [each] * 3}
        record.arm(name, lambda rounds=rounds: {"rounds": rounds, "counters": {}})


def test_arms_of_an_earlier_run_are_judged_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(tmp_path, 0, ("plain", "xavier"), rounds=2, shape=TINY)
    kept(settings, tmp_path / "kept.json")
    found = interleaved.run(settings, Report(), tmp_path / "kept.json")
    assert found["stagger_s"] == pytest.approx(0.3)
    assert found["queueing_share"] == pytest.approx(0.6)
    for arm in found["arms"].values():
        assert {key: arm[key] for key in interleaved.KEYS} == arm["beside"]
        assert arm["failed"] == 0
    interleaved.show(found, Report())
    shown = " ".join(capsys.readouterr().out.split())
    assert "With plain vLLM 60% of the time to first token were waiting: this machine" in shown
    interleaved.plot(found, tmp_path)
    assert (tmp_path / "interleaved-ttft.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_cannot_be_measured_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise EngineError("no such luck")

    monkeypatch.setattr(interleaved, "_measure", broken)
    kept(Settings(tmp_path, 0, ("plain",), rounds=2), tmp_path / "kept.json")
    settings = Settings(tmp_path, 0, ("plain", "xavier"), rounds=2)
    found = interleaved.run(settings, Report(), tmp_path / "kept.json")
    assert list(found["arms"]) == ["plain"]
    assert found["failed"] == {"xavier": "EngineError: no such luck"}
    interleaved.show(found, Report())
    assert "NOT MEASURED: xavier. EngineError: no such luck" in capsys.readouterr().out
    with pytest.raises(EngineError, match="no such luck"):
        interleaved.run(
            Settings(tmp_path, 0, ("xavier",), rounds=2), Report(), tmp_path / "kept.json"
        )


def test_every_arm_that_can_be_chosen_can_be_made() -> None:
    assert [make_arm(name).name for name in interleaved.ARMS] == list(interleaved.ARMS)
    result = CliRunner().invoke(cli.main, ["bench", "interleaved", "--arms", "nixl"])
    assert result.exit_code == 2
    assert "is not one of plain, xavier, builtin, lmcache" in result.output


@pytest.mark.slow
@pytest.mark.e2e
def test_it_is_measured_on_real_engines(tmp_path: Path) -> None:
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    args = ["bench", "interleaved", "--tiny", "--rounds", "2", "--streams", "2", "--prompts", "4"]
    args += ["--logs", str(tmp_path), "--json", str(file), "--plots", str(plots)]
    result = CliRunner().invoke(cli.main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert list(found["arms"]) == ["plain", "xavier"]
    for arm in found["arms"].values():
        # Three rounds of two answers being written and four prompts.
        assert (arm["requests"], arm["failed"], arm["plain_failed"]) == (18, 0, 0)
        assert set(arm["vs_plain"]) == set(interleaved.KEYS)
    assert 0 <= found["queueing_share"] < 1
    (status,) = found["arms"]["xavier"]["counters"].values()
    # Every prompt has been saved, so that it was no plain engine that was measured.
    assert status["traffic"]["saved_blocks"] >= 3 * 4 * 512 // 16
    assert (plots / "interleaved-ttft.png").exists()
