# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM, no Xinference: real engines that share blocks through one directory.

``source`` and ``reader`` choose their transport themselves (shared memory on one host), ``remote``
is forced to NIXL, ``control`` has no connector. All answers are greedy; float32 on CPU.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.answers import assert_same_answer, known
from tests.arenas import own_arenas
from tests.models import TOKEN_BYTES, make_tiny_llama
from xinference_xavier.bench.engines import (
    SERVED_NAME,
    Engine,
    describe,
    running_directory,
    wait_ended,
    wait_until,
)
from xinference_xavier.demo.leftovers import holders
from xinference_xavier.metrics.table import SOURCES

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 32
"""The smallest that vLLM takes on a CPU in every version that is let in."""
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
DEVICE_BLOCKS = 128
KV_BLOCKS = 100
OPTIONS = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": DEVICE_BLOCKS * BLOCK_BYTES,
    "xavier_cpu_cache_bytes": "64MiB",
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 5,
}

Engines = dict[str, Engine]


def text(subject: str, characters: int) -> str:
    """Return ``characters`` characters (= tokens) that only ``subject`` has."""
    line = f"{subject} is what this line is about, and the next one too. "
    return (line * (characters // len(line) + 1))[:characters]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_directory(tmp_path_factory.mktemp("directory") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def engines(directory: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    model = make_tiny_llama(folder / "model")
    transports = {"source": "auto", "reader": "auto", "remote": "nixl", "control": None}
    made = {
        name: Engine(
            name,
            model,
            folder / f"{name}.log",
            core=number % 2,
            kv_blocks=KV_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # for the route that resets
            extra=transport
            and {
                **OPTIONS,
                "xavier_directory": directory,
                "xavier_member": name,
                "xavier_transport": transport,
            },
        )
        for number, (name, transport) in enumerate(transports.items())
    }
    try:
        for engine in made.values():
            engine.start()
        for engine in made.values():
            engine.wait_ready()
        for engine in made.values():
            engine.complete("warm up")
        yield made
    finally:
        for engine in made.values():
            engine.stop()


def stored(directory: str, member: str) -> int:
    return int(describe(directory)[member]["traffic"]["saved_blocks"])


def fill(engine: Engine, directory: str, reader: str, document: str) -> None:
    """Let ``engine`` compute a document and ``reader`` hear of its blocks."""
    before = known(directory, reader)
    engine.complete(document, max_tokens=1)
    blocks = len(document) // BLOCK_TOKENS
    wait_until(
        lambda: known(directory, reader) >= before + blocks,
        f"{reader} knows {blocks} more blocks",
    )


def own_share(directory: str, member: str) -> dict[str, Any]:
    loaded: dict[str, Any] = describe(directory)[member]["traffic"]["loaded_tokens"]
    return loaded


@pytest.mark.parametrize(("reader", "transport"), [("reader", "shm"), ("remote", "nixl")])
def test_a_prefix_of_another_replica_is_loaded_and_the_answer_is_the_control_s(
    engines: Engines, directory: str, reader: str, transport: str
) -> None:
    document = text(f"A bridge for {reader}", 25 * BLOCK_TOKENS)
    question = document + "How long is it?"
    fill(engines["source"], directory, reader, document)
    remote = engines[reader].complete(question)
    engines["control"].complete(document, max_tokens=1)
    control = engines["control"].complete(question)
    assert remote.cached_tokens == control.cached_tokens == len(document)
    assert_same_answer(remote, control)
    status = describe(directory)[reader]
    assert status["sources"]["source"]["transport"] == transport
    assert status["traffic"]["verified_blocks"] >= 25
    assert status["traffic"]["loads_failed"] == {}


def test_another_document_gives_another_answer(engines: Engines) -> None:
    answers = {
        tuple(engines["control"].complete(text(subject, 800)).token_ids)
        for subject in ("A river", "A mountain")
    }
    assert len(answers) == 2


def test_a_salt_is_never_crossed(engines: Engines, directory: str) -> None:
    document = text("A secret", 15 * BLOCK_TOKENS)
    fill(engines["source"], directory, "reader", document)
    answer = engines["reader"].complete(document + "?", cache_salt="another tenant")
    assert answer.cached_tokens == 0


def test_an_evicted_prefix_is_restored_from_the_replica_s_own_tiers(
    engines: Engines, directory: str
) -> None:
    reader = engines["reader"]
    document = text("A lighthouse", 20 * BLOCK_TOKENS)
    first = reader.complete(document + "Who built it?")
    for number in range(KV_BLOCKS // 30 + 2):
        # Together these are larger than vLLM's own cache, and than the device tier.
        reader.complete(text(f"Filler {number}", 45 * BLOCK_TOKENS), max_tokens=1)
    before = own_share(directory, "reader")
    again = reader.complete(document + "Who built it?")
    loaded = own_share(directory, "reader")
    restored = sum(loaded.values()) - sum(before.values())
    assert restored > 0
    assert again.cached_tokens >= restored
    assert_same_answer(again, first)


def test_overflow_moves_blocks_to_the_host_tier_and_they_are_served_from_it(
    engines: Engines, directory: str
) -> None:
    source, reader = engines["source"], engines["reader"]
    document = text("An old castle", 25 * BLOCK_TOKENS)
    fill(source, directory, "reader", document)
    for number in range(DEVICE_BLOCKS // 30 + 2):
        source.complete(text(f"Overflow {number}", 45 * BLOCK_TOKENS), max_tokens=1)
    assert describe(directory)["source"]["store"]["totals"]["demotions"] > 0
    before = own_share(directory, "reader").get("peer_host", 0)
    remote = reader.complete(document + "Who lives there?")
    assert own_share(directory, "reader")["peer_host"] - before > 0
    control = engines["control"]
    control.complete(document, max_tokens=1)
    assert_same_answer(remote, control.complete(document + "Who lives there?"))


def test_prompt_logprobs_bypass_the_store(engines: Engines, directory: str) -> None:
    document = text("A quiet lake", 10 * BLOCK_TOKENS)
    fill(engines["source"], directory, "reader", document)
    answer = engines["reader"].complete(document + "?", prompt_logprobs=1)
    assert answer.cached_tokens == 0
    bypassed = describe(directory)["reader"]["traffic"]["bypassed"]
    assert bypassed["prompt log probabilities"] == 1


def test_an_answer_and_the_metrics_tell_where_its_prompt_came_from(
    engines: Engines, directory: str
) -> None:
    document = text("A garden", 15 * BLOCK_TOKENS)
    fill(engines["source"], directory, "reader", document)
    before = shown(engines["reader"])
    body = {"model": SERVED_NAME, "prompt": document + "?", "max_tokens": 2, "ignore_eos": True}
    sources = engines["reader"].post("/v1/completions", body)["kv_transfer_params"]["xavier"]
    assert sources == {**dict.fromkeys(SOURCES, 0), "peer_device": len(document)}
    source = frozenset({("source", "peer_device")})
    # What the API server shows comes with the engine's steps, the last of which may be under way.
    wait_until(
        lambda: (
            grown(before, engines["reader"], "xavier_hit_tokens_total", source) == len(document)
        ),
        "the hit shows in the metrics",
    )
    assert grown(before, engines["reader"], "xavier_prompt_tokens_total") == len(document) + 1
    assert grown(before, engines["reader"], "xavier_loads_total") == 1
    shm = frozenset({("transport", "shm")})
    assert grown(before, engines["reader"], "xavier_load_bytes_total", shm) == 15 * BLOCK_BYTES
    assert grown(before, engines["reader"], "xavier_load_seconds_count", shm) == 1
    store = describe(directory)["reader"]["store"]
    device = frozenset({("tier", "device")})
    now = shown(engines["reader"])
    assert now["xavier_capacity_bytes", device] == DEVICE_BLOCKS * store["slot_bytes"]
    assert now["xavier_used_bytes", device] == store["device_blocks"] * store["slot_bytes"]
    assert ("xavier_loads_total", frozenset()) not in shown(engines["control"])
    # Two answers to one prompt: both numbers are those of one of them.
    pair = engines["reader"].post("/v1/completions", {**body, "n": 2})
    cached = pair["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert sum(pair["kv_transfer_params"]["xavier"].values()) == cached == len(document)


Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]


def shown(engine: Engine) -> Shown:
    """Our series at the engine's metrics endpoint, without vLLM's own labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {}
    for family in families:
        for sample in family.samples:
            labels = {*sample.labels.items()} - {("engine", "0"), ("model_name", SERVED_NAME)}
            found[sample.name.removeprefix("vllm:"), frozenset(labels)] = sample.value
    return {key: value for key, value in found.items() if key[0].startswith("xavier_")}


def grown(
    before: Shown, engine: Engine, name: str, labels: frozenset[tuple[str, str]] = frozenset()
) -> float:
    return shown(engine).get((name, labels), 0) - before.get((name, labels), 0)


def test_nobody_hits_what_a_reset_cleared(engines: Engines, directory: str) -> None:
    source, reader = engines["source"], engines["reader"]
    document = text("A ferry", 15 * BLOCK_TOKENS)
    fill(source, directory, "reader", document)
    # A save in flight has blocks of vLLM in use for some milliseconds.
    reset = "/reset_prefix_cache?reset_external=true"
    wait_until(lambda: bool(source.post(reset, {})["success"]), "the source is reset")
    before = own_share(directory, "reader")
    answer = reader.complete(document + "Where to?")
    assert (answer.cached_tokens, own_share(directory, "reader")) == (0, before)
    assert_same_answer(answer, engines["control"].complete(document + "Where to?"))


def test_leases_pins_and_jobs_are_zero_when_nothing_runs(engines: Engines, directory: str) -> None:
    for name, status in describe(directory).items():
        assert status["store"]["leases"] == 0, name
        assert status["store"]["jobs"] == 0, name
        assert status["pinned_blocks"] == 0, name
        assert status["load_jobs"] == 0, name
        assert status["quarantined"] == 0, name
        assert status["hook_failures"] == {}, name
        assert status["traffic"]["errors"] == {}, name


def test_the_others_go_on_without_a_replica_that_is_killed(
    engines: Engines, directory: str
) -> None:
    """The last that uses ``source``."""
    source, reader = engines["source"], engines["reader"]
    document = text("A volcano", 15 * BLOCK_TOKENS)
    fill(source, directory, "reader", document)
    everything = source.processes()
    [worker] = [process for process in everything if "memfd:xavier-" in maps(process.pid)]
    arenas = own_arenas(worker.pid)
    assert len(holders(arenas)) > 1
    worker.kill()

    def out_of_the_directory() -> bool:
        with suppress(Exception):  # as long as it is in there, it is asked too
            return set(describe(directory)) == {"reader", "remote"}
        return False

    wait_until(out_of_the_directory, "the dead replica is out of the directory", 60)
    wait_until(lambda: not holders(arenas), "nobody maps its memory", 60)
    assert wait_ended(everything, 60) == []
    answer = reader.complete(document + "How high is it?")
    assert answer.cached_tokens == 0
    assert_same_answer(answer, engines["control"].complete(document + "How high is it?"))


def test_nothing_is_left_after_the_end(engines: Engines, directory: str) -> None:
    """Runs last of those that use the engines: it stops them."""
    names = ("source", "reader", "remote")
    processes = [process for name in names for process in engines[name].processes()]
    assert any("memfd:xavier-" in maps(process.pid) for process in processes)
    for name in names:
        engines[name].stop()
    assert wait_ended(processes, 10) == []
    assert not list(Path("/dev/shm").glob("*xavier*"))


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_a_budget_below_one_block_fails_the_launch_with_the_reason(
    tmp_path: Path, directory: str
) -> None:
    engine = Engine(
        "tiny budget",
        make_tiny_llama(tmp_path / "model"),
        tmp_path / "log",
        core=0,
        block_tokens=BLOCK_TOKENS,
        extra={**OPTIONS, "xavier_gpu_cache_bytes": BLOCK_BYTES - 1},
    )
    engine.start()
    try:
        log = engine.wait_failed()
    finally:
        engine.stop()
    assert "is below one KV block of this model" in log
    assert "xavier_gpu_cache_bytes" in log
