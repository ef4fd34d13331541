# SPDX-License-Identifier: Apache-2.0
"""The measurement of the directory runs with tiny sizes; nothing here asserts a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xinference_xavier import cli
from xinference_xavier.bench import directory, directory_memory, lookups
from xinference_xavier.bench.engines import running_directory
from xinference_xavier.bench.lookup_peers import running_peers
from xinference_xavier.control.mirror import DEFAULT_LIMIT_BYTES, ENTRY_BYTES

SMALL = ("--blocks", "6000", "--members", "2,3", "--most", "10000", "--rounds", "2")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("directory")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(lookups, "REQUESTS", 4)
    file = folder / "result.json"
    args = [*SMALL, "--json", str(file), "--plots", str(folder / "plots")]
    kept = ["--resume", str(folder / "kept.json")]
    result = CliRunner().invoke(
        cli.main, ["bench", "directory", *args, *kept], catch_exceptions=False
    )
    monkeypatch.undo()
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found, folder


def test_rates_are_measured_per_number_of_blocks_and_members(measured) -> None:
    found, _ = measured
    assert found["benchmark"] == "directory"
    assert [(cell["blocks"], cell["members"]) for cell in found["cells"]] == [(6000, 2), (6000, 3)]
    for cell in found["cells"]:
        assert cell["registers_per_s"] > 0
        assert cell["snapshot_keys_per_s"] > 0
        for name in ("deltas_per_s", "holders_us", "longest_us"):
            assert cell[name]["middle"] > 0
            assert cell[name]["pairs"] == 2


def test_lookups_are_measured_with_and_without_a_stream_of_changes(measured) -> None:
    found, _ = measured
    [thread] = found["engine_thread"]
    assert thread["keys"] == 275
    assert thread["streamed_keys_per_s"] > 0
    for arm in ("quiet", "streaming"):
        for what in ("hits", "misses", "releases"):
            times = thread[arm][what]
            assert 0 < times["us"]["middle"] <= times["worst_us"]
            assert times["p95_us"] <= times["p99_us"] <= times["worst_us"]
    # Two rounds resolve nothing.
    assert found["hit_verdict"] == found["miss_verdict"] == "not resolved"


def test_memory_is_measured_for_each_size(measured) -> None:
    found, _ = measured
    assert [item["members"] for item in found["directory_memory"]] == [2, 3]
    assert [item["blocks"] for item in found["mirrors"]] == [6000, 10_000]
    assert [item["keys_per_publication"] for item in found["reading"]] == [16, 256, 4096]
    # A key is in each change that is sent, once.
    assert all(32 < item["bytes_per_change"] < 64 for item in found["reading"])


def test_the_results_are_drawn(measured) -> None:
    _, folder = measured
    drawn = {file.name for file in (folder / "plots").iterdir()}
    assert drawn == {"directory-registers.png", "directory-deltas.png", "directory-lookup.png"}


def test_a_finished_measurement_is_taken_from_its_record(
    measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, folder = measured
    for name in ("_cell", "directory_memory", "mirror_memory", "reading_costs"):
        monkeypatch.setattr(directory, name, pytest.fail)
    monkeypatch.setattr(lookups, "measure", pytest.fail)
    file = tmp_path / "again.json"
    args = [*SMALL, "--resume", str(folder / "kept.json"), "--json", str(file)]
    result = CliRunner().invoke(cli.main, ["bench", "directory", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    again = json.loads(file.read_text())
    assert {**again, "machine": None} == {**found, "machine": None}


def test_a_mirror_is_bounded_and_says_how_much_it_keeps() -> None:
    limit = 5000
    found = directory_memory._mirror(20_000, limit * ENTRY_BYTES)
    assert found["told"] == 20_000
    assert 0 < found["blocks"] <= limit
    assert directory_memory._mirror(1000, DEFAULT_LIMIT_BYTES)["blocks"] == 1000


def test_a_directory_that_lost_blocks_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_memory, "packed_keys", lambda what, count: bytes(32 * count))
    with pytest.raises(RuntimeError, match="has 1 of 5000 blocks"):
        directory_memory._directory(5000, 2)


def test_a_hit_that_finds_less_than_everything_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        running_directory(tmp_path / "log") as address,
        running_peers(address, 2),
        lookups._Replica(address, 6000, 2) as replica,
    ):
        # Not yet known: that there are peers.
        request = lookups._Request("one", lookups.prefix(0))
        monkeypatch.setattr(replica._control._group, "usable", 0)
        with pytest.raises(RuntimeError, match="92 of 275 blocks were found"):
            replica._hit(request)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--blocks", "5000", "at least 5500"), ("--members", "1,2", "at least 2")],
)
def test_sizes_that_measure_nothing_are_refused(option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(cli.main, ["bench", "directory", option, value])
    assert result.exit_code == 2
    assert message in result.output


def test_the_worst_of_several_verdicts_is_told() -> None:
    assert directory._worst(["met", "met"]) == "met"
    assert directory._worst(["met", "not resolved"]) == "not resolved"
    assert directory._worst(["not resolved", "missed", "met"]) == "missed"
