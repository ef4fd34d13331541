# SPDX-License-Identifier: Apache-2.0
"""The demo as a newcomer runs it: a real Xinference, two real replicas of SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_demo_shows_all_five_parts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("xinference-xavier")
    arguments = ["--json", str(tmp_path / "demo.json"), "--keep-logs", str(tmp_path / "logs")]
    # Sockets are made in there: pytest's own folder is too deep.
    with tempfile.TemporaryDirectory(prefix="demo-") as scratch:
        # Its output is not captured: with it, and the logs, a failure here explains itself.
        ended = subprocess.run(
            [command, "demo", *arguments], env={**os.environ, "TMPDIR": scratch}, check=False
        )
        left = os.listdir(scratch)
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["failed"] == []
    assert ended.returncode == 0
    assert result["ok"] is True
    assert result["outputs_identical"] is True
    assert result["clean_shutdown"] is True
    assert result["loaded_tokens"] >= 1500
    assert result["loaded_from"]["tokens"] == {"peer_device": result["loaded_tokens"]}
    assert result["transport"] == "shm"
    assert result["load_mb_per_s"] > 0
    assert result["demotions"] > 0
    assert result["cpu_tier_hits"] > 0
    assert result["restored_tokens"] >= 1500
    for name in ("cold_ttft_s", "remote_hit_ttft_s", "local_hit_ttft_s"):
        assert result[name] > 0
    assert len(result["parts"][4]["final_counters"]) == 2
    assert left == []
    assert (tmp_path / "logs" / "xinference.log").stat().st_size > 0
