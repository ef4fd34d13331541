# SPDX-License-Identifier: Apache-2.0
"""Xinference's own supervisor while replicas are removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_replica_that_is_removed_gets_no_new_requests_while_it_ends_those_it_has(
    tmp_path: Path,
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.extension.removal"],
        env={**os.environ, "XINFERENCE_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "left": [2, 1],
        "routed meanwhile": {"m-rep1": ["m-rep0", "m-rep2"], "m-rep0": ["m-rep2"]},
        "model": [1, "READY"],
        "routed": ["m-rep2"],
        "unexpected": [],
        # As in stock Xinference.
        "last": 0,
        "routed to the last": ["m-rep2"],
        "still routed with a whole model": ["m-rep0", "m-rep1"],
    }
