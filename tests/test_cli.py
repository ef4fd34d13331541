# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from xinference_xavier import __version__, cli
from xinference_xavier.features import feature_table
from xinference_xavier.options import Deployment, option_table

COMMANDS = [
    "status",
    "plan",
    "doctor",
    "console",
    "demo",
    "bench",
    "directory",
    "options",
    "features",
]
QWEN = ["plan", "--layers", "24", "--kv-heads", "2", "--head-dim", "64"]


def run(*args: str) -> str:
    result = CliRunner().invoke(cli.main, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def fail(*args: str) -> str:
    result = CliRunner().invoke(cli.main, args)
    assert result.exit_code != 0
    return result.output


def test_help_lists_every_command_with_its_line() -> None:
    output = run("--help")
    for name in COMMANDS:
        line = next(line for line in output.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 3


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "console"])
def test_every_commands_help_begins_with_its_line_in_the_list(name: str) -> None:
    pytest.importorskip("vllm")
    paragraphs = run(name, "--help").split("\n\n")
    assert " ".join(paragraphs[1].split()).startswith(cli.LAZY[name][1].removesuffix("."))


def test_version_is_the_packages() -> None:
    assert __version__ in run("--version")


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys\n"
        "from xinference_xavier.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'xinference', 'xoscar', 'pydantic', 'rich', 'numpy'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "loaded []"


def test_options_json_is_the_option_table() -> None:
    assert json.loads(run("options", "--json")) == {
        "options": option_table(),
        "deployment": option_table(Deployment),
    }


def test_options_are_shown_with_brackets_and_bars_as_they_are() -> None:
    output = run("options")
    assert all(row["name"] in output for row in option_table() + option_table(Deployment))
    assert "off | checksum" in output


@pytest.mark.parametrize("columns", ["60", "109"])
def test_narrow_terminals_get_a_paragraph_per_option(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("options").splitlines()
    assert all(row["name"] in lines for row in option_table() + option_table(Deployment))
    assert "  limits: off | checksum" in lines
    assert max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize(("columns", "width"), [("130", 130), ("", 120), ("wide", 120)])
def test_wide_terminals_and_pipes_get_a_table(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, run("options").splitlines())) == width


def test_features_json_is_the_feature_table() -> None:
    assert json.loads(run("features", "--json")) == {"features": feature_table()}


def test_features_are_shown_as_a_table() -> None:
    output = run("features")
    assert "…" not in output
    assert "refused" in output
    assert "tensor parallelism" in output


@pytest.mark.parametrize(("budget", "blocks"), [("256MiB", 1365), ("8MiB", 42), ("0", 0)])
def test_a_plan_counts_whole_blocks(budget: str, blocks: int) -> None:
    plan = json.loads(run(*QWEN, "--gpu", budget, "--json"))
    assert plan["slot_bytes"] == plan["block_bytes"] == 196608
    assert (plan["gpu_blocks"], plan["gpu_tokens"]) == (blocks, blocks * 16)
    gpu = plan["per_replica"]["gpu"]
    assert gpu["blocks"] * 196608 + gpu["unused_bytes"] == gpu["budget_bytes"]


def test_a_plan_is_written_to_a_file_beside_the_table(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    sizes = ["--dtype", "bfloat16", "--block-size", "16", "--gpu", "256MiB", "--cpu", "4GiB"]
    assert "21,840" in run(*QWEN, *sizes, "--json", str(file))
    plan = json.loads(file.read_text())
    # 4 GiB are 21845 slots: 256 are for staging, and a step of 2048 tokens is 128 spare blocks.
    cpu = 21845 - 256 - 128
    assert [plan[key] for key in ("block_bytes", "gpu_blocks", "gpu_tokens")] == [
        196608,
        1365,
        21840,
    ]
    assert (plan["cpu_blocks"], plan["cpu_tokens"]) == (cpu, cpu * 16)
    assert plan["per_replica"]["cpu"]["reserved_blocks"] == 384


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    assert "cannot write --json=" in fail(*QWEN, "--json", str(tmp_path / "no" / "plan.json"))


def test_a_plan_takes_a_models_own_configuration(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 896}))
    plan = json.loads(run("plan", "--model", str(tmp_path), "--replicas", "3", "--json"))
    assert plan["block_bytes"] == 196608
    assert plan["model"]["source"] == "config"
    assert plan["total"]["gpu"]["tokens"] == 3 * 21840
    half = json.loads(run("plan", "--model", str(tmp_path), "--layers", "12", "--json"))
    assert half["block_bytes"] == 196608 // 2
    assert "all 3" in run("plan", "--model", str(tmp_path), "--replicas", "3")


def test_a_plan_without_a_models_numbers_says_what_to_give(tmp_path: Path) -> None:
    for args in (["--layers", "24"], ["--model", str(tmp_path)]):
        result = CliRunner().invoke(cli.main, ["plan", *args])
        assert result.exit_code == 2
        assert "give --model, or --layers, --kv-heads and --head-dim" in result.output


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--layers", "0", "0 is not in the range x>=1"),
        ("--layers", "10001", "layers=10001: Input should be less than or equal to 10000"),
        ("--gpu", "10%", "--gpu='10%' is a share of some memory"),
        ("--cpu", "-1", "--cpu='-1' is negative"),
    ],
)
def test_a_number_that_no_model_has_is_a_usage_error(option: str, value: str, said: str) -> None:
    result = CliRunner().invoke(cli.main, [*QWEN, option, value])
    assert result.exit_code == 2
    assert said in result.output


def test_a_plans_older_option_names_still_work() -> None:
    old = ["plan", "--layers", "24", "--kv-heads", "2", "--head-size", "64", "--block-tokens", "16"]
    budgets = ["--gpu-cache-bytes", "8MiB", "--cpu-cache-bytes", "1GiB"]
    plan = json.loads(run(*old, *budgets, "--json"))
    assert plan == json.loads(run(*QWEN, "--gpu", "8MiB", "--cpu", "1GiB", "--json"))


@pytest.mark.parametrize(
    ("gpu", "cpu", "said"),
    [
        ("0", "0", "no block fits into either tier"),
        ("1kB", "4GiB", "xavier_gpu_cache_bytes=1000 B is below 1 KV block (196608 bytes)"),
        ("8MiB", "384KiB", "xavier_cpu_cache_bytes=384 KiB is below 3 KV blocks (589824 bytes)"),
    ],
)
def test_a_plan_warns_of_budgets_that_a_launch_refuses(
    capsys: pytest.CaptureFixture[str], gpu: str, cpu: str, said: str
) -> None:
    cli.main([*QWEN, "--gpu", gpu, "--cpu", cpu, "--json"], standalone_mode=False)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["block_bytes"] == 196608
    assert f"a launch would be refused: {said}" in printed.err


@pytest.mark.parametrize("budgets", [("0", "8MiB"), ("8MiB", "0"), ("192KiB", "576KiB")])
def test_a_plan_that_would_be_launched_warns_of_nothing(
    capsys: pytest.CaptureFixture[str], budgets: tuple[str, str]
) -> None:
    cli.main([*QWEN, "--gpu", budgets[0], "--cpu", budgets[1]], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_a_plans_help_says_where_the_numbers_are() -> None:
    output = run("plan", "--help")
    keys = ["num_hidden_layers", "num_key_value_heads", "head_dim", "torch_dtype"]
    assert all(key in output for key in keys)
    assert "CPU build takes 128" in " ".join(output.split())


def test_a_plan_rounds_odd_blocks_up_to_slots() -> None:
    sizes = ["--layers", "1", "--kv-heads", "1", "--head-dim", "3", "--dtype", "fp8"]
    plan = json.loads(run("plan", *sizes, "--block-size", "1", "--json"))
    assert (plan["block_bytes"], plan["slot_bytes"]) == (6, 64)


def test_a_plan_is_shown_as_a_table() -> None:
    output = run(*QWEN)
    assert "192 KiB" in output
    assert "1,365" in output


@pytest.mark.parametrize(
    ("budget", "message"),
    [("-1", "negative"), ("1 QB", "unknown unit"), ("10%", "bytes are needed here")],
)
def test_a_plan_refuses_bad_budgets_naming_the_option(budget: str, message: str) -> None:
    output = fail(*QWEN, "--cpu", budget)
    assert "--cpu=" in output
    assert message in " ".join(output.split())
    # A percentage is no way out here.
    assert "%" not in output.replace(budget, "")


def test_the_directory_command_serves_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, int]] = []

    def run_directory(host: str, port: int, ready: object) -> None:
        served.append((host, port))
        assert callable(ready)
        ready(f"{host}:{port}")

    runtime = types.SimpleNamespace(run_directory=run_directory)
    monkeypatch.setitem(sys.modules, "xinference_xavier.control.runtime", runtime)
    output = run("directory", "--host", "127.0.0.2", "--port", "7")
    run("directory", "--host", "[::1]", "--port", "8")
    assert served == [("127.0.0.2", 7), ("::1", 8)]
    assert output == "Directory ready at 127.0.0.2:7\n"


@pytest.mark.parametrize("host", ["", "http://x", "tcp://127.0.0.1", "h:1", "two words"])
def test_the_directory_command_refuses_what_is_no_host(host: str) -> None:
    result = CliRunner().invoke(cli.main, ["directory", "--host", host])
    assert result.exit_code == 2
    assert f"--host={host!r} is not allowed" in result.output


def test_a_real_directory_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "xinference_xavier.cli", "directory", "--port"]
    with subprocess.Popen(
        [*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as first:
        try:
            assert first.stdout is not None
            ready = first.stdout.readline().split()
            assert ready[:3] == ["Directory", "ready", "at"]
            host, _, port = ready[3].rpartition(":")
            assert host == "127.0.0.1"
            second = subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
            assert second.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
            assert "--port" in second.stderr
            assert "Traceback" not in second.stderr
            first.send_signal(signal.SIGTERM)
            assert first.wait(timeout=30) == 0
        finally:
            first.kill()


def lazy(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setattr(cli, "LAZY", {"later": (target, "Comes later.")})


def test_a_lazy_command_runs_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.argument("word")
    def command(word: str) -> None:
        click.echo(f"said {word}")

    monkeypatch.setitem(sys.modules, "lazily", types.SimpleNamespace(command=command))
    lazy(monkeypatch, "lazily:command")
    assert run("later", "hello") == "said hello\n"


def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lazy(monkeypatch, "no_such_engine.entry:command")
    output = fail("later")
    assert "needs the package no_such_engine" in output
    assert "xinference-xavier[cpu]" in output
    monkeypatch.setattr(cli, "EXTRAS", {"no_such_engine": "ui"})
    assert "install it: pip install 'xinference-xavier[ui]'" in fail("later")


def test_an_error_of_our_own_is_not_taken_for_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lazy(monkeypatch, "xinference_xavier.no_such_module:command")
    with pytest.raises(ModuleNotFoundError):
        CliRunner().invoke(cli.main, ["later"], catch_exceptions=False)
