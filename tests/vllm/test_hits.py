# SPDX-License-Identifier: Apache-2.0
"""What a request gets from the store: which blocks are loaded, and that its answer is the same."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from fake_worker import BLOCK, answer_of
from vllm_harness import Engine, Make, keys_of, prompt_of, share


def test_an_engine_without_connector_answers_what_the_oracle_says(make: Make) -> None:
    engine = make(connector=False, blocks=20)
    prompts = [prompt_of(seed, 40 + 9 * seed) for seed in range(6)]
    for prompt in prompts:
        engine.add(prompt, 12)
    engine.run()
    engine.check_answers()
    assert [len(answer) for answer in engine.answers.values()] == [12] * 6
    assert len({tuple(answer) for answer in engine.answers.values()}) == 6


def test_one_wrong_value_in_a_prefix_changes_the_answer(engine: Engine) -> None:
    prompt = prompt_of(1, 70)
    engine.ask(prompt)
    tier, slot, _ = engine.index.acquire(
        keys_of(prompt)[:1], reader=None, request="", now=0, duration=1
    ).rows[0]
    engine.index.reap(now=2)
    generation, content = engine.worker.arenas.read(tier, slot)
    engine.worker.arenas.write(tier, slot, generation, (content[0] + 1, *content[1:]))
    engine.forget_local()
    request_id = engine.add(prompt, 4)
    engine.run()
    assert engine.answers[request_id] != answer_of(prompt, 4)


def test_a_cold_prompt_loads_nothing_and_is_saved(engine: Engine) -> None:
    engine.ask(prompt_of(1, 70))
    assert engine.traffic["lookups_missed"] == {"cold": 1}
    assert engine.traffic["saved_blocks"] == 4
    assert engine.control.published == set(keys_of(prompt_of(1, 70)))
    engine.check_all()


def test_a_local_hit_loads_nothing_and_saves_nothing_again(engine: Engine) -> None:
    engine.ask(prompt_of(1, 70))
    engine.ask(prompt_of(1, 70))
    assert engine.loaded_tokens == 0
    assert +Counter(engine.traffic["hit_tokens"]) == Counter(local=64)
    assert engine.traffic["saved_blocks"] == 4
    engine.check_all()


@pytest.mark.parametrize("late_forward", [False, True])
def test_blocks_that_vllm_evicted_come_back_from_the_own_tiers(
    make: Make, late_forward: bool
) -> None:
    engine = make(device_slots=4, late_forward=late_forward)
    for seed in range(3):
        engine.ask(prompt_of(seed, 70))
    engine.forget_local()
    for seed in range(3):
        engine.ask(prompt_of(seed, 70))
    assert engine.traffic["loaded_tokens"] == {"own_device": 64, "own_host": 128}
    assert len(engine.worker.loads_seen) == 3
    engine.check_all()


def test_a_peers_blocks_are_loaded_and_its_lease_ends(engine: Engine) -> None:
    peer = share(engine, 1, prompt_of(1, 100))
    engine.ask(prompt_of(1, 100))
    assert engine.traffic["loaded_tokens"] == {"peer_device": 96}
    assert [reservation.member for reservation in engine.control.held] == [1]
    assert peer.leases == 0
    engine.check_all()


def test_the_last_token_of_a_full_hit_is_computed_again(engine: Engine) -> None:
    share(engine, 1, prompt_of(1, 64))
    engine.ask(prompt_of(1, 64), 20)
    assert engine.loaded_tokens == 64
    # The block after the prompt is the only one that was computed in full here.
    assert engine.traffic["saved_blocks"] == 1
    engine.check_all()


def test_runs_of_the_own_store_and_two_peers_make_one_load(engine: Engine) -> None:
    prompt = prompt_of(1, 140)
    engine.ask(prompt[:40])
    engine.forget_local()
    share(engine, 1, prompt, 0, 5)
    share(engine, 2, prompt, 5, 8)
    engine.ask(prompt)
    (load,) = engine.worker.loads_seen
    assert [(s.member, len(s.rows)) for s in load.segments] == [(0, 2), (1, 3), (2, 3)]
    assert engine.loaded_tokens == 128
    engine.check_all()


def test_what_a_peer_does_not_grant_is_computed(engine: Engine) -> None:
    prompt = prompt_of(1, 140)
    share(engine, 1, prompt, 0, 5).most_rows = 2
    share(engine, 2, prompt, 5, 8)
    engine.ask(prompt)
    assert engine.loaded_tokens == 32
    engine.check_all()


@pytest.mark.parametrize("reason", ["draining", "closed"])
def test_a_refusal_is_a_miss(engine: Engine, reason: str) -> None:
    share(engine, 1, prompt_of(1, 70)).refuses = reason
    engine.ask(prompt_of(1, 70))
    assert engine.traffic["lookups_missed"] == {"refused": 1}
    engine.check_all()


def test_counts_and_destinations_around_block_edges(make: Make) -> None:
    engine = make(blocks=64, device_slots=4, host_slots=4)
    lengths = (1, 15, 16, 17, 31, 32, 33, 48, 49)
    for seed, (length, local, external) in enumerate(product(lengths, range(4), (0, 1, 2, 4))):
        prompt = prompt_of(seed, length + 80)
        if local:
            engine.ask(prompt[: local * BLOCK + 1], 1)
        engine.side.clear()
        share(engine, 1, prompt, 0, external)
        before, loads = engine.loaded_tokens, len(engine.worker.loads_seen)
        request_id = engine.add(prompt[:length], 2)
        full = length // BLOCK
        # vLLM always computes the prompt's last token, so it never counts the whole prompt.
        expected_local = min(local, (length - 1) // BLOCK)
        expected = max(0, min(external, full) - expected_local)
        engine.until(lambda known=request_id: known in engine.reasons)
        case = f"length {length}, local {local}, external {external}"
        assert engine.loaded_tokens - before == expected * BLOCK, case
        shipped = engine.worker.loads_seen[loads:]
        assert sum(len(s.rows) for load in shipped for s in load.segments) == expected, case
        engine.run()
        engine.check_answers()
        engine.forget_local()
    engine.check_all()


def test_blocks_of_an_answer_are_a_hit_for_the_next_turn(engine: Engine) -> None:
    prompt = prompt_of(1, 30)
    first = engine.ask(prompt, 40)
    engine.forget_local()
    engine.ask(prompt + engine.answers[first] + prompt_of(2, 10))
    # 69 of these 70 tokens have KV: the last one was only sampled.
    assert engine.loaded_tokens == 64
    engine.check_all()


def test_a_salt_names_other_blocks(engine: Engine) -> None:
    engine.ask(prompt_of(1, 70), salt="one")
    engine.forget_local()
    engine.ask(prompt_of(1, 70), salt="two")
    engine.ask(prompt_of(1, 70))
    assert engine.loaded_tokens == 0
    engine.forget_local()
    engine.ask(prompt_of(1, 70), salt="one")
    assert engine.loaded_tokens == 64
    engine.check_all()


@pytest.mark.parametrize(
    "special", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}, {"embeds": True}]
)
def test_requests_that_must_not_read_are_bypassed(engine: Engine, special: dict[str, int]) -> None:
    for _ in range(2):
        engine.ask(prompt_of(1, 70), **special)
        engine.forget_local()
    assert engine.loaded_tokens == 0
    assert sum(engine.traffic["bypassed"].values()) == 2
    assert engine.traffic["lookups_missed"] == {}
    engine.check_all()


def test_a_peers_block_is_saved_at_its_second_hit(engine: Engine) -> None:
    prompt = prompt_of(1, 70)
    share(engine, 1, prompt)
    engine.ask(prompt)
    assert engine.traffic["saved_blocks"] == 0
    engine.forget_local()
    engine.ask(prompt)
    assert engine.traffic["saved_blocks"] == 4
    engine.forget_local()
    engine.ask(prompt)
    assert engine.traffic["loaded_tokens"] == {"peer_device": 128, "own_device": 64}
    engine.check_all()


def test_short_hits_are_declined(make: Make) -> None:
    engine = make(options={"xavier_min_load_tokens": 64})
    share(engine, 1, prompt_of(1, 60))
    share(engine, 1, prompt_of(2, 70))
    engine.ask(prompt_of(1, 60))
    assert engine.traffic["lookups_missed"] == {"short": 1}
    engine.ask(prompt_of(2, 70))
    assert engine.loaded_tokens == 64
    engine.check_all()


def test_a_source_slower_than_prefill_is_declined_and_tried_again(make: Make) -> None:
    engine = make(options={"xavier_min_load_tokens": None})
    engine.worker.load_seconds = 1e6
    engine.ask(prompt_of(100, 250))
    for seed in range(18):
        share(engine, 1, prompt_of(seed, 70))
        engine.ask(prompt_of(seed, 70))
        engine.forget_local()
    # Once to find out, sixteen times not, once to look whether it is still so.
    assert engine.traffic["lookups_missed"] == {"cold": 1, "slow": 16}
    assert engine.loaded_tokens == 2 * 64
    engine.check_all()


def test_a_slow_source_does_not_cost_what_comes_before_it(make: Make) -> None:
    engine = make(options={"xavier_min_load_tokens": None})
    engine.worker.load_seconds = 1e6
    engine.ask(prompt_of(100, 250))
    share(engine, 1, prompt_of(1, 70))
    engine.ask(prompt_of(1, 70))
    assert engine.loaded_tokens == 64
    prompt = prompt_of(2, 140)
    engine.worker.load_seconds = 1e-8
    engine.ask(prompt[:70])
    engine.forget_local()
    share(engine, 1, prompt, 4, 8)
    engine.ask(prompt)
    # Four blocks of its own; the four of the slow member are computed.
    assert engine.loaded_tokens == 64 + 64
    engine.check_all()


def test_a_source_faster_than_prefill_is_used(make: Make) -> None:
    engine = make(options={"xavier_min_load_tokens": None})
    engine.worker.load_seconds = 1e-8
    for seed in range(3):
        share(engine, 1, prompt_of(seed, 70))
        engine.ask(prompt_of(seed, 250))
    assert engine.loaded_tokens == 3 * 64
    assert engine.side.status()["pace"]["prefill_tokens_per_s"] > 0
    engine.check_all()


def test_loads_are_bounded_and_what_is_above_is_computed(engine: Engine) -> None:
    engine.worker.hold_loads = True
    for seed in range(3):
        share(engine, 1, prompt_of(seed, 132))
        engine.add(prompt_of(seed, 132))
    engine.until(lambda: engine.reasons)
    # A quarter of 64 blocks may be in flight, and one load of eight blocks is half of that.
    assert len(engine.worker.loads) == 2
    assert engine.traffic["lookups_missed"] == {"busy": 1}
    engine.worker.hold_loads = False
    engine.check_all()


def test_a_busy_index_is_asked_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ask(prompt_of(1, 70))
    engine.forget_local()
    with monkeypatch.context() as patch:
        patch.setattr(engine.index, "acquire", lambda *args, **kwargs: None)
        patch.setattr(engine.index, "admit", lambda *args, **kwargs: None)
        waiting = engine.add(prompt_of(1, 70))
        engine.steps(6)
        assert engine.answers[waiting] == []
    engine.run()
    assert engine.loaded_tokens == 64
    engine.check_all()


def test_blocks_that_met_a_busy_index_are_saved_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.index, "admit", lambda *args, **kwargs: None)
        request_id = engine.add(prompt_of(1, 70))
        engine.until(lambda: request_id in engine.reasons)
        engine.steps(4)
        assert engine.connector.has_pending_push_work()
    engine.run()
    assert engine.traffic["saved_blocks"] == 4
    engine.check_all()
