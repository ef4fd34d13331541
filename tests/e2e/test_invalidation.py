# SPDX-License-Identifier: Apache-2.0
"""What must not be used any more is not used: resets, sleep, pauses and new weights (R16).

Real engines, each with vLLM's development routes: ``source`` and ``reader`` share one directory,
``control`` has no connector. The test that changes the weights comes last.
"""

from __future__ import annotations

import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.answers import assert_same_answer, known
from tests.models import make_tiny_llama
from xinference_xavier.bench.engines import (
    SERVED_NAME,
    Engine,
    describe,
    running,
    running_directory,
    wait_idle,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_TOKENS = 32
"""The smallest that vLLM takes on a CPU in every version that is let in."""
OPTIONS = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "1MiB",
    "xavier_cpu_cache_bytes": "16MiB",
    "xavier_verify": "checksum",
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 5,
}
PAUSE_S = 2.0
"""How long a pause that keeps requests is waited for; it may be one that completes later."""

Engines = dict[str, Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_directory(tmp_path_factory.mktemp("directory") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def engines(
    model: Path, directory: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    made = {
        name: Engine(
            name,
            model,
            folder / f"{name}.log",
            core=number % 2,
            kv_blocks=100,
            block_tokens=BLOCK_TOKENS,
            extra=None
            if name == "control"
            else {**OPTIONS, "xavier_directory": directory, "xavier_member": name},
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        for number, name in enumerate(("source", "reader", "control"))
    }
    with running(list(made.values())):
        yield made


def text(subject: str, blocks: int) -> str:
    line = f"{subject} is what this line is about, and the next one too. "
    return (line * (blocks * BLOCK_TOKENS // len(line) + 1))[: blocks * BLOCK_TOKENS]


def loaded(directory: str, member: str) -> int:
    return sum(describe(directory)[member]["traffic"]["loaded_tokens"].values())


def fill(engines: Engines, directory: str, document: str) -> None:
    """Let the source compute a document, and the reader hear of it."""
    before = known(directory, "reader")
    engines["source"].complete(document, max_tokens=1)
    blocks = len(document) // BLOCK_TOKENS
    wait_until(lambda: known(directory, "reader") >= before + blocks, "the reader knows")


def reset(engine: Engine, running_too: bool = False) -> bool:
    """Ask once for a reset of everything; whether vLLM says that it did it."""
    path = "/reset_prefix_cache?reset_external=true"
    if running_too:
        path += "&reset_running_requests=true"
    return bool(engine.post(path, {})["success"])


def until_reset(engine: Engine) -> None:
    # A save in flight has blocks of vLLM in use for some milliseconds.
    wait_until(lambda: reset(engine), f"{engine.name} is reset")


def sleep_and_wake(engine: Engine) -> None:
    engine.post("/sleep?level=1", {})
    engine.post("/wake_up", {})


def pause_and_resume(engine: Engine) -> None:
    engine.post("/pause?mode=wait", {})
    engine.post("/resume", {})


@pytest.mark.parametrize("invalidate", [until_reset, sleep_and_wake, pause_and_resume])
def test_nobody_hits_what_was_cleared(
    engines: Engines, directory: str, invalidate: Callable[[Engine], None]
) -> None:
    document = text(f"A bridge before {invalidate.__name__}", 20)
    fill(engines, directory, document)
    invalidate(engines["source"])
    assert describe(directory)["source"]["store"]["device_blocks"] == 0
    assert describe(directory)["source"]["store"]["host_blocks"] == 0
    before = loaded(directory, "reader")
    answer = engines["reader"].complete(document + "Why?")
    assert (answer.cached_tokens, loaded(directory, "reader")) == (0, before)
    assert_same_answer(answer, engines["control"].complete(document + "Why?"))
    wait_until(lambda: known(directory, "reader") == 0, "the reader forgets the source's blocks")
    # Not even the source itself, whose own tiers had it all.
    own = engines["source"].complete(document + "How?")
    assert own.cached_tokens == len(document)  # from the reader, which computed it just now
    until_reset(engines["reader"])
    until_reset(engines["source"])


def test_sharing_goes_on_after_a_reset(engines: Engines, directory: str) -> None:
    until_reset(engines["source"])
    document = text("A second bridge", 20)
    fill(engines, directory, document)
    answer = engines["reader"].complete(document + "Why?")
    assert answer.cached_tokens == len(document)


def test_storms_of_resets_and_pauses_break_no_request_and_no_engine(
    engines: Engines, directory: str
) -> None:
    documents = [text(f"Storm {number}", 25) for number in range(6)]
    questions = [document + f"Question {n}?" for document in documents for n in range(12)]
    control = {question: engines["control"].complete(question) for question in questions}
    over = threading.Event()
    wrong: list[str] = []

    def ask(work: tuple[int, str]) -> str:
        number, question = work
        engine = engines["source" if number % 2 else "reader"]
        body = {
            "model": SERVED_NAME, "prompt": question, "max_tokens": 8, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        choice = engine.post("/v1/completions", body)["choices"][0]
        ids = choice["token_ids"] or []
        if ids != control[question].token_ids[: len(ids)]:
            wrong.append(question[-30:])
        if choice["finish_reason"] != "abort" and len(ids) != 8:
            wrong.append(f"{len(ids)} tokens, {choice['finish_reason']}")
        return str(choice["finish_reason"])

    def disturb(engine: Engine) -> dict[str, int]:
        done = dict.fromkeys(("reset", "refused", "pause", "late pause"), 0)
        turn = 0
        while not over.is_set():
            turn += 1
            if turn % 3:
                try:
                    done["reset"] += reset(engine, running_too=turn % 3 == 1)
                except urllib.error.HTTPError:
                    # vLLM cannot reset while blocks are used for a load or a save, and says so.
                    done["refused"] += 1
                continue
            mode = ("wait", "keep", "abort")[turn // 3 % 3]
            try:
                engine.post(f"/pause?mode={mode}", {}, timeout=PAUSE_S)
                done["pause"] += 1
            except (TimeoutError, urllib.error.URLError):
                done["late pause"] += 1
            engine.post("/resume", {})
        return done

    with ThreadPoolExecutor(10) as pool:
        disturbers = [pool.submit(disturb, engines[name]) for name in ("source", "reader")]
        try:
            finished = list(pool.map(ask, enumerate(questions * 6), timeout=240))
        finally:
            over.set()
        done = [each.result() for each in disturbers]
    print(done, {reason: finished.count(reason) for reason in set(finished)})
    assert wrong == []
    assert all(each["reset"] and each["pause"] for each in done)
    assert finished.count("length") > len(finished) // 4
    wait_idle(directory)
    for name in ("source", "reader"):
        until_reset(engines[name])
        assert describe(directory)[name]["hook_failures"] == {}
        assert describe(directory)[name]["traffic"]["errors"] == {}
    fill(engines, directory, documents[0])
    answer = engines["reader"].complete(questions[0])
    assert answer.cached_tokens > 0
    assert_same_answer(answer, control[questions[0]])


def test_new_weights_meet_no_block_of_the_old_ones(
    engines: Engines, directory: str, model: Path, tmp_path: Path
) -> None:
    """As the features table says: pause all, change all, resume all. Runs last."""
    document = text("A tower", 20)
    question = document + "How high?"
    fill(engines, directory, document)
    old = engines["reader"].complete(question)
    assert old.cached_tokens == len(document)
    made = make_tiny_llama(tmp_path / "other", seed=1)
    for engine in engines.values():
        engine.post("/pause?mode=abort", {})
    # In place of the old file, not into it: engines may have it mapped.
    shutil.copy(made / "model.safetensors", model / "new")
    (model / "new").rename(model / "model.safetensors")
    for engine in engines.values():
        engine.post("/collective_rpc", {"method": "reload_weights"})
    before = {name: loaded(directory, name) for name in ("source", "reader")}
    for engine in engines.values():
        engine.post("/resume", {})
    answers: dict[str, Any] = {name: engines[name].complete(question) for name in engines}
    assert answers["control"].token_ids != old.token_ids
    assert answers["control"].cached_tokens == answers["source"].cached_tokens == 0
    assert loaded(directory, "source") == before["source"]
    # What the reader found is what the source has just computed.
    for name in ("source", "reader"):
        assert_same_answer(answers[name], answers["control"])
