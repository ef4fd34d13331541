# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from xinference_xavier import cli
from xinference_xavier.options import STOCK_OPTIONS, Deployment, XavierOptions, split_options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_pages_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_the_readme_shows_an_extra_config_that_is_accepted() -> None:
    config = json.loads(re.search(r"--kv-transfer-config '(\{.*?\})'", README, re.DOTALL)[1])
    options, deployment = split_options(config["kv_connector_extra_config"])
    assert options.xavier_gpu_first
    assert deployment.xavier_directory == "127.0.0.1:9990"
    assert config["kv_role"] == "kv_both"


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")), ids=str
)
def test_pages_name_only_options_that_exist(page: Path) -> None:
    valid = {*XavierOptions.model_fields, *Deployment.model_fields, *STOCK_OPTIONS}
    named = set(re.findall(r"\bxavier_[a-z_]+(?=[`=\" ])", page.read_text(encoding="utf-8")))
    assert named <= valid


def test_the_readme_names_only_commands_that_exist() -> None:
    named = set(re.findall(r"^xinference-xavier (\w+)", README, re.MULTILINE))
    assert {"directory", "plan"} <= named <= {*cli.LAZY, *cli.main.commands}


def test_links_of_the_readme_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["lighthouses.txt", "canals.txt"])
def test_demo_documents_are_long_prose(name: str) -> None:
    text = resources.files("xinference_xavier").joinpath("data", name).read_text(encoding="utf-8")
    words = text.split()
    assert 1700 <= len(words) <= 2200
    # Prose repeats small words, but hardly any run of eight words.
    runs = {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
    assert len(runs) == len(words) - 7
