# SPDX-License-Identifier: Apache-2.0
"""What a replica says of its own bookkeeping, and of what it has in use."""

from __future__ import annotations

from fake_worker import BLOCK
from vllm_harness import Engine, prompt_of, share

PROMPT = prompt_of(1, 6 * BLOCK + 3)


def in_use(engine: Engine) -> dict[str, int]:
    found = engine.side.audit()
    assert found["contradiction"] is None
    return {name: count for name, count in found["in_use"].items() if count}


def test_an_idle_replica_has_nothing_in_use(engine: Engine) -> None:
    assert in_use(engine) == {}
    engine.ask(PROMPT)
    assert in_use(engine) == {}


def test_what_a_load_holds_is_counted_until_its_request_ends(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    request_id = engine.add(PROMPT)
    engine.steps(3)
    loading = in_use(engine)
    assert loading["requests"] == loading["load_jobs"] == loading["leases_at_others"] == 1
    engine.abort(request_id)
    aborted = in_use(engine)
    assert "requests" not in aborted
    assert aborted["load_jobs"] == aborted["leases_at_others"] == 1
    engine.worker.hold_loads = False
    engine.run()
    assert in_use(engine) == {}


def test_what_a_save_holds_is_counted_until_it_is_reported(engine: Engine) -> None:
    engine.worker.hold_stores = True
    engine.add(PROMPT, 1)
    engine.steps(4)
    saving = in_use(engine)
    assert saving["pinned_blocks"] == saving["moving_blocks"] == 6
    assert saving["store_jobs"] == saving["index_jobs"] == 1
    engine.worker.hold_stores = False
    engine.run()
    assert in_use(engine) == {}


def test_leases_of_others_are_in_use_after_a_clear_too(engine: Engine) -> None:
    engine.ask(PROMPT)
    keys = next(iter(engine.requests.values())).block_hashes[:2]
    grant = engine.index.acquire(
        keys, reader="another", request="r", now=engine.clock(), duration=60
    )
    assert in_use(engine) == {"leases": 1}
    engine.side.clear()
    assert in_use(engine) == {"leases": 1, "cleared_blocks": 2}
    engine.index.release(grant.lease_id)
    assert in_use(engine) == {}


def test_a_contradiction_is_named(engine: Engine) -> None:
    engine.ask(PROMPT)
    engine.index._table.leased[0] += 1
    found = engine.side.audit()
    assert "leased" in found["contradiction"]
    engine.index._table.leased[0] -= 1
    assert in_use(engine) == {}


def test_a_closed_store_has_nothing_in_use(engine: Engine) -> None:
    engine.ask(PROMPT)
    engine.side.close(0.0)
    assert in_use(engine) == {}
