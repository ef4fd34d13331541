# SPDX-License-Identifier: Apache-2.0
"""Two models in one namespace of one directory: neither ever gets a block of the other.

The models differ in their weights only, so that everything but the fingerprint would fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pair import Config, answers, differences, made, replica_options

from tests.models import make_tiny_llama
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    describe,
    running,
    running_directory,
    wait_idle,
    wait_until,
)
from xinference_xavier.bench.prompts import unique_text
from xinference_xavier.soak import client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG = Config()
DOCUMENTS = [unique_text(number, (5 + number) * BLOCK_TOKENS) for number in range(12)]


def test_the_same_prompts_to_two_models_at_once_are_answered_by_each_from_its_own_blocks(
    tmp_path: Path,
) -> None:
    models = {name: make_tiny_llama(tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    bodies = [client.greedy(document + "?", 8) for document in DOCUMENTS]
    controls = {
        name: made(f"control-{name}", model, tmp_path, 0, CONFIG, None)
        for name, model in models.items()
    }
    with running(list(controls.values())):
        expected = {
            name: answers([control], bodies, clients=1) for name, control in controls.items()
        }
    assert len(differences(expected["a"], expected["b"])) == len(bodies)

    with running_directory(tmp_path / "directory.log") as directory:
        left, right, other = engines = [
            made(name, models[name[0]], tmp_path, core, CONFIG, replica_options(directory, name))
            for core, name in ((0, "a-left"), (1, "a-right"), (0, "b"))
        ]
        with running(engines):
            # First each document at one replica of each model, then all of them at all replicas.
            answers([left, other, right, other], [body for body in bodies for _ in "ab"], clients=8)
            wait_until(lambda: knows(directory, "a-left", "a-right"), "the left one knows")
            found = answers(engines, [body for body in bodies for _ in engines], clients=9)
            for number, engine in enumerate(engines):
                mine = found[number :: len(engines)]
                assert differences(mine, expected[engine.name[0]]) == [], engine.name
            wait_idle(directory, len(engines), timeout_s=60)
            statuses = describe(directory)
    peers = {
        name: {peer["name"] for peer in status["control"]["peers"]}
        for name, status in statuses.items()
    }
    assert peers == {"a-left": {"a-right"}, "a-right": {"a-left"}, "b": set()}
    loaded = {name: from_peers(status) for name, status in statuses.items()}
    assert loaded["a-left"] > 0
    assert loaded["b"] == 0


def knows(directory: str, reader: str, source: str) -> bool:
    """Whether a reader has heard of all that a source has stored."""
    statuses = describe(directory)
    stored = statuses[source]["traffic"]["saved_blocks"]
    return bool(0 < stored <= statuses[reader]["control"]["mirror_blocks"])


def from_peers(status: dict[str, Any]) -> int:
    """Prompt tokens that a replica has loaded from others."""
    tokens = status["traffic"]["loaded_tokens"]
    return int(tokens.get("peer_device", 0) + tokens.get("peer_host", 0))
