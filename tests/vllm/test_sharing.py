# SPDX-License-Identifier: Apache-2.0
"""Two replicas with the real control plane: a directory, two peers, and their leases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from fake_worker import Registry
from vllm_harness import Engine, Make, keys_of, prompt_of

from tests.control.control_harness import cluster, eventually
from xinference_xavier.launch_note import ENVIRONMENT, LaunchNote

PROMPT = prompt_of(1, 100)
PATIENT = {"xavier_lookup_timeout": 10}
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with cluster() as group:
        yield group.directory().address


@pytest.fixture
def pair(make: Make, directory: str) -> tuple[Engine, Engine]:
    registry: Registry = {}
    source, reader = (
        make(name=name, directory=directory, registry=registry, options=PATIENT)
        for name in ("source", "reader")
    )
    eventually(lambda: source.runtime.connected and reader.runtime.connected, WITHIN_S)
    return source, reader


def sees(engine: Engine, prompt: Sequence[int]) -> int:
    """How many of a prompt's blocks the engine believes to be at a peer."""
    found = engine.mirror.longest(keys_of(prompt), 0, engine.runtime.usable_mask())
    return found[1] if found is not None else 0


def ask(engine: Engine, prompt: Sequence[int]) -> None:
    """Run a request; other replicas and the network have their own time."""
    request_id = engine.add(prompt, 8)

    def done() -> bool:
        engine.step()
        return request_id in engine.reasons

    eventually(done, WITHIN_S)
    engine.run()
    engine.check_answers()


def test_an_engine_tells_its_launcher_where_its_peer_is(
    make: Make, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = LaunchNote()
    monkeypatch.setenv(ENVIRONMENT, note.path)
    engine = make(name="told", directory=directory)
    assert note.peer() == engine.runtime.contact.to_text()
    assert note.reason() is None
    note.close()


def test_a_prefix_that_one_replica_computed_is_loaded_by_the_other(
    pair: tuple[Engine, Engine],
) -> None:
    source, reader = pair
    ask(source, PROMPT)
    eventually(lambda: sees(reader, PROMPT) == 6, WITHIN_S)
    # The source makes no step from here on: reserving and releasing need none.
    ask(reader, PROMPT + prompt_of(2, 60))
    assert reader.traffic["loaded_tokens"] == {"peer_device": 96}
    eventually(lambda: source.index.counters().leases == 0, WITHIN_S)
    eventually(lambda: reader.runtime.status()["leases_at_others"] == 0, WITHIN_S)
    for engine in pair:
        engine.check_all()


def test_what_was_reset_is_not_offered_any_more(pair: tuple[Engine, Engine]) -> None:
    source, reader = pair
    ask(source, PROMPT)
    eventually(lambda: sees(reader, PROMPT) == 6, WITHIN_S)
    source.scheduler.reset_connector_cache()
    eventually(lambda: sees(reader, PROMPT) == 0, WITHIN_S)
    ask(reader, PROMPT)
    assert reader.loaded_tokens == 0


def test_an_aborted_reader_leaves_no_lease(pair: tuple[Engine, Engine]) -> None:
    source, reader = pair
    ask(source, PROMPT)
    eventually(lambda: sees(reader, PROMPT) == 6, WITHIN_S)
    reader.abort(reader.add(PROMPT))
    reader.worker.hold_loads = True
    loading = reader.add(PROMPT)

    def held() -> bool:
        reader.step()
        return bool(reader.worker.loads)

    eventually(held, WITHIN_S)
    reader.abort(loading)
    assert source.index.counters().leases == 1
    reader.worker.hold_loads = False
    reader.run()
    eventually(lambda: source.index.counters().leases == 0, WITHIN_S)
    reader.check_all()


def test_a_source_that_leaves_is_forgotten(pair: tuple[Engine, Engine]) -> None:
    source, reader = pair
    ask(source, PROMPT)
    eventually(lambda: sees(reader, PROMPT) == 6, WITHIN_S)
    source.scheduler.shutdown()
    eventually(lambda: sees(reader, PROMPT) == 0, WITHIN_S)
    ask(reader, PROMPT)
    assert reader.loaded_tokens == 0
    reader.check_all()
