# SPDX-License-Identifier: Apache-2.0
"""Arms alternate with plain vLLM, and what is concluded follows from the rounds of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.bench import paired
from xinference_xavier.bench.arms import ArmSettings, Replicas, make_arm
from xinference_xavier.bench.engines import Engine
from xinference_xavier.bench.paired import Contest, judged
from xinference_xavier.bench.report import Report
from xinference_xavier.bench.stats import Verdict

KEYS = ("ttft_p50_s", "tokens_per_s")
NOISE = [1.0, *([0.999, 1.001] * 6)]


def a_round(ttft_s: float, tokens_per_s: float, *errors: str) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": 2, "errors": list(errors)}
    if errors:
        return found
    return found | {
        "ttft_s": [ttft_s, ttft_s],
        "ttft_p50_s": ttft_s,
        "tokens_per_s": tokens_per_s,
    }


def rounds(ttft: float = 1.0, rate: float = 1.0) -> dict[str, list[dict[str, Any]]]:
    """So many times plain vLLM's; the first round is far from all others."""
    plain = [a_round(0.5, 100.0) for _ in NOISE]
    own = [a_round(0.5 * ttft * noise, 100.0 * rate * noise) for noise in NOISE]
    own[0] = a_round(9.0, 1.0)
    return {"plain": plain, "own": own}


@pytest.mark.parametrize(
    ("ttft", "rate", "verdicts"),
    [
        (1.0, 1.0, ("met", "met")),
        (0.5, 2.0, ("met", "met")),
        (1.1, 1.0, ("missed", "met")),
        (1.0, 0.9, ("met", "missed")),
        (1.02, 0.98, ("not resolved", "not resolved")),
    ],
)
def test_higher_times_and_lower_rates_are_worse(
    ttft: float, rate: float, verdicts: tuple[str, str]
) -> None:
    found = judged(rounds(ttft, rate), KEYS)
    assert found["ttft_p50_s"] == pytest.approx(0.5 * ttft, rel=0.01)
    assert found["beside"] == {"ttft_p50_s": 0.5, "tokens_per_s": 100.0}
    versus = found["vs_plain"]
    assert versus["ttft_p50_s"]["middle"] == pytest.approx(ttft, rel=1e-3)
    assert versus["tokens_per_s"]["middle"] == pytest.approx(rate, rel=1e-3)
    assert tuple(versus[key]["verdict"] for key in KEYS) == verdicts
    assert versus["ttft_p50_s"]["pairs"] == 12


def test_nine_rounds_resolve_nothing() -> None:
    few = {side: found[:10] for side, found in rounds().items()}
    assert judged(few, KEYS)["vs_plain"]["ttft_p50_s"]["verdict"] is Verdict.NOT_RESOLVED


def test_an_arm_of_which_a_request_failed_has_missed_its_targets() -> None:
    measured = rounds(0.5, 2.0)
    measured["own"].append(a_round(1, 1, "status 500: broken"))
    measured["plain"].append(a_round(1, 1))
    found = judged(measured, KEYS)
    assert (found["requests"], found["failed"]) == (28, 1)
    assert found["errors"] == ["status 500: broken"]
    assert {versus["verdict"] for versus in found["vs_plain"].values()} == {Verdict.MISSED}
    assert found["vs_plain"]["ttft_p50_s"]["pairs"] == 12


def test_a_failure_in_the_first_round_counts_too() -> None:
    measured = rounds()
    measured["own"][0] = a_round(1, 1, "broken")
    found = judged(measured, KEYS)
    assert found["failed"] == 1
    assert found["vs_plain"]["ttft_p50_s"]["verdict"] is Verdict.MISSED


def test_what_plain_vllm_failed_in_is_not_compared() -> None:
    measured = rounds()
    measured["plain"][1:4] = [a_round(1, 1, "one", "two")] * 3
    found = judged(measured, KEYS)
    assert (found["failed"], found["plain_failed"]) == (0, 6)
    assert found["vs_plain"]["ttft_p50_s"]["pairs"] == 9
    assert found["vs_plain"]["ttft_p50_s"]["verdict"] is Verdict.NOT_RESOLVED


def test_an_arm_that_only_fails_has_no_figures() -> None:
    broken = [a_round(1, 1, *(["broken"] * 2))] * 13
    found = judged({"plain": rounds()["plain"], "own": broken}, KEYS)
    assert found["ttft_p50_s"] is None
    assert found["vs_plain"] == {}
    assert found["failed"] == 26
    assert len(found["errors"]) == paired.SHOWN_ERRORS


class Recording(Replicas):
    """Replicas that write down what is done with them."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__(())
        self.name = name
        self._seen = seen

    def settle(self) -> None:
        self._seen.append(f"{self.name} settles")


def test_sides_alternate_in_who_is_first_and_all_rest_before_each() -> None:
    seen: list[str] = []
    plain, own = Recording("plain", seen), Recording("own", seen)

    def measure(number: int, replicas: Replicas) -> dict[str, Any]:
        assert isinstance(replicas, Recording)
        assert sorted(seen[-2:]) == ["own settles", "plain settles"]
        seen.append(f"{number} {replicas.name}")
        return {"number": number, "of": replicas.name}

    found = Contest(plain, own).rounds(3, measure, Report())
    measured = [line for line in seen if not line.endswith("settles")]
    assert measured == [
        "0 own", "0 plain", "1 plain", "1 own", "2 own", "2 plain", "3 plain", "3 own",
    ]  # fmt: skip
    assert found == {
        side: [{"number": number, "of": side} for number in range(4)] for side in ("plain", "own")
    }


def test_plain_vllm_beside_itself_has_logs_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("start", "wait_ready", "complete", "stop"):
        monkeypatch.setattr(Engine, method, lambda *_, **__: None)
    settings = ArmSettings(tmp_path / "model", tmp_path, 0, 64, replicas=1)
    with paired.beside_plain(make_arm("plain"), settings) as contest:
        (one,), (other,) = contest.plain.engines, contest.own.engines
    assert one.log != other.log
    assert one.port != other.port
    assert one.log.parent.exists()


def test_arms_are_shown_and_drawn_with_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = rounds()
    measured["plain"][1] = a_round(1, 1, "late")
    broken = {"plain": rounds()["plain"], "own": [a_round(1, 1, "no such luck")] * 13}
    arms = {"plain": judged(measured, KEYS), "xavier": judged(broken, KEYS)}
    paired.show(arms, "A title", KEYS, Report())
    shown = capsys.readouterr().out
    assert "A title" in shown
    assert "xavier: no such luck" in shown
    assert "1 requests of plain vLLM beside plain failed" in shown
    assert "0.999 to 1.001" in shown

    picture = tmp_path / "folder" / "ttft.png"
    paired.plot_ttft({"xavier": arms["xavier"]}, picture, "prompt")
    assert not picture.exists(), "there is nothing to draw"
    paired.plot_ttft(arms, picture, "prompt")
    assert picture.read_bytes().startswith(b"\x89PNG")
