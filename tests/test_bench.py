# SPDX-License-Identifier: Apache-2.0
"""The measurements run with tiny sizes, and their judgements follow from what was measured.

Nothing here asserts a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from click.testing import CliRunner

from xinference_xavier import cli
from xinference_xavier.bench import builtin, cold, sharing, store, warm, warm_result
from xinference_xavier.bench.blocks import BLOCK_BYTES
from xinference_xavier.bench.bookkeeping import resident_bytes_per_block
from xinference_xavier.bench.engines import (
    Completion,
    EngineError,
    running_directory,
    wait_ended,
)
from xinference_xavier.bench.models import QWEN_KV
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.bench.record import Record, RecordMismatch
from xinference_xavier.bench.report import Report, shown
from xinference_xavier.bench.stats import Interval, Verdict
from xinference_xavier.transport.base import TransportUnavailable
from xinference_xavier.transport.select import Transports


def bench(tmp_path: Path, *args: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    file = tmp_path / "result.json"
    result = CliRunner().invoke(
        cli.main, ["bench", *args, "--json", str(file)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["benchmark"] == args[0]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["versions"]["torch"]
    return found


def refused(*args: str) -> str:
    result = CliRunner().invoke(cli.main, ["bench", *args])
    assert result.exit_code == 2
    return result.output


# --- the store ----------------------------------------------------------------------------------

SMALL_STORE = (
    "store", "--histories", "100,300", "--batch", "4", "--rounds", "2", "--arena-bytes", "2MiB",
)  # fmt: skip


def test_the_store_is_measured_per_history_and_share_of_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "TIERED", "no_such_package.store")
    found = bench(tmp_path, *SMALL_STORE)
    cells = found["cells"]
    assert [(cell["history"], cell["leased"]) for cell in cells] == [
        (history, leased) for history in (100, 300) for leased in store.LEASED
    ]
    for cell in cells:
        assert cell["us_per_block"] > 0
        assert cell["floor_us"] > 0
        assert cell["ratio_to_floor"]["pairs"] == 2
        assert cell["verdict"] == "not resolved"
    assert found["flatness"] >= 1
    assert found["flatness_interval"]["middle"] == found["flatness"]
    assert found["flatness_verdict"] == "not resolved"
    assert found["resident_bytes_per_block"] >= 0
    assert {"us_per_block", "floor_us", "ratio_to_floor"} <= set(found)
    assert "no_such_package" in found["builtin_skipped"]
    assert found["speedup_vs_builtin"] is None
    # The counts of the reference run, whose blocks are staged again.
    counts = ("device_blocks", "host_blocks", "demotions")
    assert [tuple(row[name] for name in counts) for row in found["replay"]] == [
        (1365, 26452, 26452),
        (42, 27775, 27775),
    ]


def test_an_interrupted_measurement_goes_on_with_the_arms_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "TIERED", "no_such_package.store")
    monkeypatch.setattr(store, "REPLAY_BLOCKS", 200)
    kept = str(tmp_path / "kept.json")

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    resident = store.resident_bytes_per_block
    monkeypatch.setattr(store, "resident_bytes_per_block", interrupt)
    CliRunner().invoke(cli.main, ["bench", *SMALL_STORE, "--resume", kept])
    arms = json.loads(Path(kept).read_text())["arms"]
    assert set(arms) == {"history 100", "history 300", "replay 256 MiB", "replay 8 MiB"}

    monkeypatch.setattr(store, "resident_bytes_per_block", resident)
    monkeypatch.setattr(store, "_cells", interrupt)
    plots = tmp_path / "plots"
    found = bench(tmp_path, *SMALL_STORE, "--resume", kept, "--plots", str(plots))
    assert found["cells"] == arms["history 100"] + arms["history 300"]
    assert found["replay"] == [arms["replay 256 MiB"], arms["replay 8 MiB"]]
    for name in ("store-cost.png", "store-ratio.png"):
        assert (plots / name).read_bytes().startswith(b"\x89PNG")

    other = CliRunner().invoke(cli.main, ["bench", *SMALL_STORE, "--rounds", "3", "--resume", kept])
    assert other.exit_code == 1
    assert "rounds=2, not 3" in other.output
    assert "another --resume file" in other.output


@pytest.mark.parametrize("text", ["", "[]", '{"arms": {}}', '{"settings": 1, "arms": 2}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(text)
    with pytest.raises(RecordMismatch, match="no record of a measurement"):
        Record(kept, {})
    assert kept.read_text() == text


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(store, "run", pytest.fail)
    result = CliRunner().invoke(cli.main, ["bench", *SMALL_STORE, "--plots", str(tmp_path / "p")])
    assert result.exit_code == 1
    assert "xinference-xavier[bench]" in result.output


def test_the_bookkeeping_of_a_block_is_measured_in_a_process_of_its_own() -> None:
    # Below is what the table's arrays alone take, above a few fixed costs and the target.
    assert 80 < resident_bytes_per_block(50_000) < 400


def test_the_built_in_store_demotes_every_block_that_it_is_compared_with() -> None:
    pytest.importorskip(builtin.TIERED)
    cache = store.Cache.make(8)
    theirs = builtin.BuiltinStore(cache.layers, BLOCK_BYTES, 8)
    before = theirs.demotions
    theirs.admit(range(5), threads=1)
    assert theirs.demotions - before == 5


def test_a_leased_share_is_what_its_name_says() -> None:
    settings = store.Settings(rounds=2, batch=4, arena_bytes=16 * BLOCK_BYTES)
    measured = store._Bench(settings)
    try:
        index, keys = store._history(measured, 4000)
        shares = []
        for leased in store.LEASED:
            store._lease(index, keys, leased, settings.batch)
            found = index.counters()
            shares.append(found.leased_blocks / (found.device_blocks + found.host_blocks))
            measured.admit(index)
    finally:
        measured.close()
    none, half, most = shares
    assert none == 0
    assert 0.4 < half < 0.6
    assert 0.95 < most < 1


def test_a_batch_that_the_arenas_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="twice as many"):
        store._Bench(store.Settings(batch=9, arena_bytes=16 * BLOCK_BYTES))


# --- transfers ------------------------------------------------------------------------------------


def test_transports_are_measured_per_number_of_blocks(tmp_path: Path) -> None:
    found = bench(
        tmp_path,
        "transfer", "--counts", "1,3,1000000", "--rounds", "2", "--arena-bytes", "2MiB",
    )  # fmt: skip
    done = {name for name in ("shm", "nixl", "xoscar") if name not in found["skipped"]}
    assert {"shm", "xoscar"} <= done
    assert {(row["transport"], row["blocks"]) for row in found["rows"]} == {
        (name, count) for name in done for count in (1, 3)
    }
    for row in found["rows"]:
        assert row["gb_per_s"] > 0
        assert row["floor"] == ("raw" if row["transport"] == "nixl" else "memcpy")
        assert row["verdict"] is None, "fewer blocks than the target speaks of"
    one = found["one_block"]
    assert one["ratio"]["pairs"] == 50
    assert min(one["empty_us"], one["lease_us"], one["read_us"]) > 0


def test_a_transport_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**_: object) -> Transports:
        raise TransportUnavailable("nothing works here")

    monkeypatch.setattr(Transports, "start", none)
    args = ("transfer", "--counts", "1", "--rounds", "2", "--arena-bytes", "2MiB")
    found = bench(tmp_path, *args, "--transports", "xoscar")
    assert found["skipped"] == {"xoscar": "nothing works here"}
    assert found["one_block"] is None
    assert found["rows"] == []


# --- warm and cold, from made-up answers ----------------------------------------------------------


def answer(ttft_s: float, cached: int, tokens: tuple[int, ...] = (1, 2)) -> Completion:
    return Completion(list(tokens), [-0.5] * len(tokens), cached, ttft_s, ttft_s)


READER = {
    "sources": {"xavier-0": {"transport": "shm", "nbytes": 4_000_000, "seconds": 0.002}},
    "traffic": {"lookups_missed": {}, "loads_failed": {}},
}
COUNTERS = {"xavier-0": {}, "xavier-1": READER}
PREFIX = 1600
PAIRS = 10


def judged(*arms: str, **measured: list[Any]) -> dict[str, Any]:
    return warm_result.judged(
        arms or warm.ARMS, measured, dict.fromkeys(measured, COUNTERS), QWEN_KV.token_bytes(4)
    )


def pairs(remote_s: float, *, remote_cached: int = PREFIX, remote_token: int = 2) -> list[Any]:
    return [
        warm_result.Pair(
            PREFIX,
            cold=answer(2.0, 0),
            local=answer(0.1, PREFIX, (number, 2)),
            remote=answer(remote_s, remote_cached, (number, remote_token)),
            own_local=answer(0.11, PREFIX),
        )
        for number in range(PAIRS + 1)
    ]


def test_a_load_is_what_the_remote_hit_costs_above_the_local_one() -> None:
    found = judged(xavier=pairs(0.14))
    xavier = found["arms"]["xavier"]
    assert xavier["loaded_bytes"] == PREFIX * 24 * 2 * 2 * 64 * 4
    assert xavier["load_mb_per_s"] == pytest.approx(PREFIX * 24_576 / 0.04 / 1e6)
    assert xavier["verdict"] is Verdict.MET
    assert xavier["outputs_equal"]
    assert xavier["full_hits"] == found["pairs"] == 10
    assert xavier["copy_mb_per_s"] == pytest.approx(2000)
    assert found["another_prefix_differs"]


def test_a_slow_load_misses_the_floor() -> None:
    xavier = judged(xavier=pairs(0.3))["arms"]["xavier"]
    assert xavier["load_mb_per_s"] < warm_result.FLOOR_MB_PER_S
    assert xavier["verdict"] is Verdict.MISSED


def test_a_prefix_that_was_computed_again_is_no_load() -> None:
    xavier = judged(xavier=pairs(0.1, remote_cached=PREFIX - 16))["arms"]["xavier"]
    assert xavier["full_hits"] == 0
    assert xavier["load_mb_per_s"] is None
    assert xavier["verdict"] is Verdict.NOT_RESOLVED
    assert not xavier["outputs_equal"]


def test_another_token_is_another_output() -> None:
    xavier = judged(xavier=pairs(0.14, remote_token=3))["arms"]["xavier"]
    assert not xavier["outputs_equal"]


def test_equal_tokens_need_equal_log_probabilities() -> None:
    one = Completion([5], [-1.0], 0, 0.1)
    assert warm_result.same_answer(one, Completion([5], [-1.0009], 0, 0.1))
    assert not warm_result.same_answer(one, Completion([5], [-1.002], 0, 0.1))


def test_answers_that_ignore_the_prefix_are_told() -> None:
    same = [
        warm_result.Pair(
            PREFIX, answer(2.0, 0), answer(0.1, PREFIX), answer(0.2, PREFIX), answer(0, 0)
        )
        for _ in range(3)
    ]
    assert not judged(xavier=same)["another_prefix_differs"]


def test_only_the_chosen_arms_are_reported() -> None:
    found = judged(
        "cold", "local", local=[warm_result.Pair(PREFIX, p.cold, p.local) for p in pairs(1)]
    )
    assert list(found["arms"]) == ["cold", "local"]


def test_a_load_of_ours_is_compared_with_that_of_another_arm() -> None:
    # Above plain vLLM's local hit of 0.1 s: 40 ms against 0.8 s, each with a little noise.
    ours, theirs = pairs(0.14), pairs(0.9)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one.remote = answer(0.14 + number % 2 * 1e-3, PREFIX, (number, 2))
        other.remote = answer(0.9 + number % 3 * 1e-2, PREFIX, (number, 2))
    found = judged(xavier=ours, builtin=theirs, lmcache=theirs, nixl=theirs)
    rows = {(row["than"], row["of"]): row for row in found["comparisons"]}
    assert set(rows) == {
        (name, of)
        for name in ("builtin", "lmcache", "nixl")
        for of in ("above_local_s", "above_own_local_s")
    }
    row = rows["builtin", "above_local_s"]
    assert row["ratio"]["low"] < 0.0405 / 0.81 < row["ratio"]["high"]
    assert row["limit"] == 0.1
    assert row["verdict"] is Verdict.MET
    assert rows["nixl", "above_local_s"]["verdict"] is None
    reverse = judged(xavier=theirs, lmcache=ours)["comparisons"][0]
    assert reverse["verdict"] is Verdict.MISSED


def test_an_arm_without_a_full_hit_is_compared_with_nothing() -> None:
    row = judged(xavier=pairs(0.14), builtin=pairs(0.9, remote_cached=0))["comparisons"][0]
    assert row["ratio"] is None
    assert row["verdict"] is Verdict.NOT_RESOLVED


def test_arms_measured_by_an_earlier_run_are_judged_alike(tmp_path: Path) -> None:
    settings = warm.Settings(tmp_path, 0, ("cold", "local", "xavier"), (PREFIX,), PAIRS)
    kept = tmp_path / "kept.json"
    Record(kept, warm._fixed(settings, [PREFIX])).arm(
        "xavier",
        lambda: {"pairs": [[asdict(pair) for pair in pairs(0.14)]], "counters": [COUNTERS]},
    )
    (length,) = warm.run(settings, Report(), kept)["lengths"]
    assert length == judged("cold", "local", "xavier", xavier=pairs(0.14))


def fail_to_start(*names: str) -> Callable[..., dict[str, Any]]:
    """Return what measures all arms but these."""

    def measure(_: Any, lengths: list[int], arm: Any, report: Report) -> dict[str, Any]:
        name = arm.name if arm else "local"
        if name in names:
            raise EngineError(f"{name}-0 did not start:\n[core] out of memory")
        found = [asdict(pair) for pair in pairs(0.14)]
        if arm is None:
            found = [pair | {"remote": None, "own_local": None} for pair in found]
        return {"pairs": [found] * len(lengths), "counters": [COUNTERS] * len(lengths)}

    return measure


def test_an_arm_that_does_not_start_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_measure", fail_to_start("nixl"))
    arms = {name: Mock(chunk_tokens=16, note=None) for name in ("nixl", "xavier")}
    for name, arm in arms.items():
        arm.name = name
    monkeypatch.setattr(warm, "make_arm", arms.__getitem__)
    kept = str(tmp_path / "kept.json")
    args = ("warm", "--tokens", str(PREFIX), "--pairs", "10", "--resume", kept)
    with_nixl = (*args, "--arms", "cold,nixl,xavier")
    file = tmp_path / "result.json"
    result = CliRunner().invoke(cli.main, ["bench", *with_nixl, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "NOT MEASURED: nixl. EngineError: nixl-0 did not start" in result.stdout
    assert "[core] out of memory" in result.stdout
    found = json.loads(file.read_text())
    assert set(found["failed"]) == {"nixl"}
    assert list(found["lengths"][0]["arms"]) == ["cold", "xavier"]

    # What failed is tried again, and only that.
    monkeypatch.setattr(warm, "_measure", fail_to_start("xavier"))
    found = bench(tmp_path, *with_nixl)
    assert found["failed"] == {}
    assert list(found["lengths"][0]["arms"]) == ["cold", "nixl", "xavier"]

    # The controls are measured even when nothing that shares is.
    monkeypatch.setattr(warm, "_measure", fail_to_start("xavier"))
    found = bench(tmp_path, *args[:-2], "--arms", "cold,local,xavier")
    assert set(found["failed"]) == {"xavier"}
    assert list(found["lengths"][0]["arms"]) == ["cold", "local"]


def test_prefixes_are_whole_chunks() -> None:
    settings = warm.Settings(Path("unused"), 0, tokens=(10, 1100, 4400))
    assert settings.prefixes(16) == [16, 1088, 4400]
    assert settings.prefixes(256) == [256, 1024, 4352]


def test_every_arm_of_a_cold_pair_has_every_place() -> None:
    orders = [cold._order(number) for number in range(6)]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == sorted(cold.ARMS) for order in orders)


def test_the_first_pair_is_apart() -> None:
    measured = pairs(0.14)
    measured[0].remote = answer(9.0, PREFIX)
    xavier = judged(xavier=measured)["arms"]["xavier"]
    assert xavier["first_ttft_s"] == 9.0
    assert max(xavier["ttft_s"]) == 0.14


def test_questions_leave_the_same_tail_and_share_no_block() -> None:
    assert len({len(text) for text in warm.QUESTIONS}) == 1
    assert len(set(warm.HAND_OFF_QUESTIONS)) == len(warm.QUESTIONS)


def test_no_load_time_at_all_is_no_rate() -> None:
    assert warm_result.megabytes_per_s(1_000_000, -0.1) is None
    assert warm_result.floor_verdict(50_000_000, Interval(-0.2, -0.1, -0.05, 10)) is Verdict.MET


@pytest.mark.parametrize(
    ("factor", "verdict", "slower"),
    [(1.0, Verdict.MET, False), (1.015, Verdict.MET, True), (1.05, Verdict.MISSED, True)],
)
def test_cold_prefill_is_judged_by_the_paired_ratio(
    factor: float, verdict: Verdict, slower: bool
) -> None:
    plain = [9.0, *(4.0 + 0.1 * number for number in range(12))]
    noise = [1.0, *([0.999, 1.001] * 6)]
    ours = [value * factor * n for value, n in zip(plain, noise, strict=True)]
    status = {
        "traffic": {"saved_blocks": 13 * 137},
        "store": {"totals": {"demotions": 7}},
    }
    settings = cold.Settings(Path("unused"), core=0)
    control = [value * n for value, n in zip(plain, reversed(noise), strict=True)]
    times = {"plain": plain, "control": control, "xavier": ours}
    found = cold._result(settings, times, status)
    assert found["ratio"]["middle"] == pytest.approx(factor, rel=1e-3)
    assert found["verdict"] is verdict
    assert found["slower_beyond_noise"] is slower
    assert found["noise_ratio"]["low"] < 1 < found["noise_ratio"]["high"]
    assert found["saved_blocks"] == found["savable_blocks"]
    assert found["arms"]["plain"]["first_ttft_s"] == 9.0


ABANDONED = """
import os, signal
from pathlib import Path
from xinference_xavier.bench.engines import Engine

class Sleeper(Engine):
    def command(self):
        return ["sleep", "600"]

engine = Sleeper("sleeper", Path("unused"), Path(os.devnull), core=0)
engine.start()
print(engine.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_engines_end_with_the_process_that_measures() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not wait_ended([psutil.Process(int(killed.stdout))], timeout_s=20)


def test_a_directory_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (
        pytest.raises(EngineError, match="no such module"),
        running_directory(tmp_path / "log"),
    ):
        pytest.fail("it does not listen")


def test_engines_rest_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "REST_S", 1e-3)

    class Spinning:
        used = iter([5.0, 6.0, 7.0, 7.0, 8.0])

        def cpu_seconds(self, *, main_threads: bool) -> float:
            return next(self.used)

    engine = Spinning()
    sharing.rest([engine])
    assert next(engine.used) == 8.0

    helper = iter([1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(sharing, "cpu_seconds", lambda _: next(helper))
    sharing.rest([], helpers=[7])
    assert next(helper) == 3.0


# --- what they share ----------------------------------------------------------------------------


def test_the_model_s_kv_cache_is_as_large_as_the_reference_model_s() -> None:
    assert QWEN_KV.token_bytes(4) == 24_576
    assert BLOCK_BYTES == 196_608


def test_a_process_that_nobody_has_reaped_has_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    running = subprocess.Popen(["sleep", "60"])
    try:
        runs = psutil.Process(running.pid)
        assert wait_ended([psutil.Process(ended.pid), runs], timeout_s=0) == [runs]
    finally:
        running.kill()
        running.wait()
        ended.wait()


def test_prompts_have_their_length_and_share_no_block() -> None:
    texts = [unique_text(seed, 333) for seed in range(200)]
    assert {len(text) for text in texts} == {333}
    assert all(text.isascii() for text in texts)
    assert len({text[:16] for text in texts}) == 200
    assert unique_text(7, 50) == unique_text(7, 50)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (27817, "27,817"), (1234.5, "1,234"), (0.01234, "0.0123")],
)
def test_values_are_shown_as_people_read_them(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("store", "--histories", "1000,zero"), "no list of numbers"),
        (("store", "--histories", "0"), "no list of numbers"),
        (("store", "--arena-bytes", "10%"), "no number of bytes"),
        (("store", "--arena-bytes", "2 bananas"), "bananas"),
        (("store", "--rounds", "1"), "x>=2"),
        (("transfer", "--transports", "shm,tcp"), "'tcp' is not one of"),
        (("warm", "--arms", "cold,warm"), "'warm' is not one of"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(args: tuple[str, ...], message: str) -> None:
    assert message in refused(*args)


# --- with real engines ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_prefix_is_measured_on_real_engines(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "warm", "--tiny", "--tokens", "320", "--pairs", "2", "--logs", str(tmp_path)
    )
    (length,) = found["lengths"]
    assert list(length["arms"]) == ["cold", "local", "xavier"]
    assert length["tokens"] == 320
    assert length["another_prefix_differs"]
    assert length["arms"]["local"]["full_hits"] == 2
    xavier = length["arms"]["xavier"]
    assert xavier["transport"] == "shm"
    assert xavier["loads_failed"] == {}
    # A busy machine may answer a lookup too late, which is a miss and no mistake.
    assert xavier["full_hits"] + sum(xavier["missed"].values()) >= 2
    assert xavier["outputs_equal"] or xavier["full_hits"] == 0


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_cold_prefill_is_measured_on_real_engines(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "cold", "--tiny", "--tokens", "320", "--pairs", "2", "--logs", str(tmp_path)
    )
    assert set(found["arms"]) == {"plain", "control", "xavier"}
    assert found["saved_blocks"] == found["savable_blocks"] == 60
    assert found["verdict"] == "not resolved"
