# SPDX-License-Identifier: Apache-2.0
"""Random lives of random requests, with every fault at once; long ones in the slow lane."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_worker import BLOCK
from vllm.v1.core.sched.interface import PauseState
from vllm_harness import Engine, Make, prompt_of, share

from xinference_xavier.store.jobs import LoadJob, LoadResult, StoreJob, StoreResult
from xinference_xavier.vllm.metadata import WorkerMeta

LIVES = [
    *((seed, 500) for seed in range(6)),
    *(pytest.param(seed, 5000, marks=pytest.mark.slow) for seed in range(1000, 1010)),
]
"""Seeds, and the operations of each life."""

FAMILIES = 4
LONGEST = 14 * BLOCK
LIVE = 8


class Fuzz:
    """One engine, two peers, and a source of chances."""

    def __init__(self, make: Make, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = make(
            blocks=self.chance.choice([24, 40, 64]),
            device_slots=self.chance.choice([0, 3, 12, 40]),
            host_slots=self.chance.choice([2, 8, 40]),
            late_forward=self.chance.random() < 0.5,
            max_tokens_per_step=self.chance.choice([48, 256]),
            device=self.chance.choice(["cpu", "cuda"]),
        )
        self.operations: list[tuple[int, Callable[[], None]]] = [
            (60, self.step),
            (14, self.add),
            (4, self.abort),
            (3, self.preempt),
            (8, self.copy),
            (3, self.toggle_holds),
            (4, self.toggle_faults),
            (4, self.answers),
            (2, self.peers),
            (3, self.time),
            (2, self.noise),
            (1, self.reset),
            (1, self.pause),
            (2, self.limit),
            (8, self.forget),
        ]
        for number in (1, 2):
            for family in range(FAMILIES):
                share(self.engine, number, prompt_of(family, LONGEST), 0, number * 5)

    def run(self, steps: int) -> None:
        weights = [weight for weight, _ in self.operations]
        actions = [action for _, action in self.operations]
        for action in self.chance.choices(actions, weights, k=steps):
            action()
            self.engine.index.check_invariants()
        self.drain()

    def drain(self) -> None:
        engine = self.engine
        engine.worker.hold_loads = engine.worker.hold_stores = False
        engine.control.answers_at_once = True
        engine.control.answer_all()
        engine.run()
        engine.control.answer_all()
        engine.check_answers()
        errors = engine.traffic["errors"]
        assert set(errors) <= {"unknown store job", "unknown load job"}
        assert engine.side.status()["hook_failures"] == {}
        # Leases that ran out were reaped, or are now.
        for index in (engine.index, *(peer.index for peer in engine.control.peers.values())):
            index.reap(engine.clock() + 1000)
        engine.check_empty(errors=True)
        engine.check_store()
        engine.forget_local()

    # --- operations ------------------------------------------------------------------------------

    def live(self) -> list[str]:
        engine = self.engine
        return [r for r in engine.requests if r not in engine.reasons and r not in engine.aborted]

    def step(self) -> None:
        self.engine.step()

    def add(self) -> None:
        if len(self.live()) >= LIVE:
            return
        family = self.chance.randrange(FAMILIES)
        prompt = prompt_of(family, LONGEST)[: self.chance.randint(1, LONGEST)]
        if self.chance.random() < 0.3:
            prompt = prompt[:-5] + prompt_of(self.chance.randrange(50, 60), 30)
        special = {}
        if self.chance.random() < 0.1:
            special["skip_reading_prefix_cache"] = True
        salt = "salt" if self.chance.random() < 0.1 else None
        self.engine.add(prompt, self.chance.randint(1, 40), salt=salt, **special)

    def abort(self) -> None:
        if live := self.live():
            self.engine.abort(self.chance.choice(live))

    def preempt(self) -> None:
        if running := self.engine.scheduler.running:
            self.engine.preempt(self.chance.choice(running).request_id)

    def copy(self) -> None:
        worker = self.engine.worker
        if self.chance.random() < 0.5:
            worker.run_stores()
        elif worker.loads:
            count = self.chance.randint(1, len(worker.loads))
            worker.run_loads(self.chance.sample(range(len(worker.loads)), count))

    def toggle_holds(self) -> None:
        worker = self.engine.worker
        worker.hold_loads = self.chance.random() < 0.5
        worker.hold_stores = self.chance.random() < 0.5

    def toggle_faults(self) -> None:
        bad = self.chance.choice([0.0, 0.0, 0.1, 0.6])

        def load_fault(job: LoadJob, row: int) -> str | None:
            return "broken" if self.chance.random() < bad else None

        def some(count: int) -> set[int]:
            return {row for row in range(count) if self.chance.random() < bad}

        def store_fault(job: StoreJob) -> tuple[set[int], set[int]]:
            return some(len(job.demotions)), some(len(job.stores))

        self.engine.worker.failed_promotions = some(8)
        self.engine.worker.load_fault = load_fault
        self.engine.worker.store_fault = store_fault

    def answers(self) -> None:
        control = self.engine.control
        if self.chance.random() < 0.5:
            control.answers_at_once = not control.answers_at_once
        control.answer_all()

    def peers(self) -> None:
        peer = self.chance.choice(list(self.engine.control.peers.values()))
        peer.usable = self.chance.random() < 0.8
        peer.refuses = "draining" if self.chance.random() < 0.2 else None
        peer.most_rows = self.chance.choice([None, None, 1, 3])
        if self.chance.random() < 0.1:
            peer.arenas.slots.clear()

    def time(self) -> None:
        self.engine.clock.now += self.chance.choice([0.01, 0.03, 1.0, 3.0])
        self.engine.index.reap(self.engine.clock())

    def noise(self) -> None:
        worker = self.engine.worker
        done = [job for job in worker.loads_seen if job not in [load for load, _ in worker.loads]]
        if done and not self.engine._queue and not worker._loaded:
            job = self.chance.choice(done)
            worker.extra_results = WorkerMeta(
                [StoreResult(10**9)], [LoadResult(job.job_id, job.request_id)]
            )

    def reset(self) -> None:
        if self.chance.random() < 0.5:
            self.engine.scheduler.reset_prefix_cache(reset_connector=True)
        else:
            self.engine.side.clear()

    def pause(self) -> None:
        """Pause for some steps; if that leaves the engine idle, vLLM clears all its caches.

        It ends an engine in which it cannot.
        """
        engine = self.engine
        mode = self.chance.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
        engine.scheduler.set_pause_state(mode)
        for _ in range(self.chance.randint(1, 30)):
            if not engine.busy():
                assert engine.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                )
                break
            engine.step()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def limit(self) -> None:
        """Change the limits of both tiers: mostly to nothing of the device tier, or all of it."""
        device, host = self.engine.index.counters().capacity
        self.engine.side.set_limits(
            self.chance.choice([0, device, device, self.chance.randint(0, device)]),
            self.chance.choice([host, host, host, self.chance.randint(0, host)]),
        )

    def forget(self) -> None:
        """Let vLLM evict what nobody uses."""
        free = self.engine.pool.free_block_queue.get_all_free_blocks()
        self.engine.pool.evict_blocks({block.block_id for block in free})


@pytest.mark.parametrize(("seed", "steps"), LIVES)
def test_random_lives(make: Make, seed: int, steps: int) -> None:
    fuzz = Fuzz(make, seed)
    fuzz.run(steps)
    finished = set(fuzz.engine.reasons) | fuzz.engine.aborted
    assert finished == set(fuzz.engine.requests)


def test_the_fuzz_meets_what_it_is_for(make: Make) -> None:
    """Loads from both kinds of sources, failures, preemptions, resets: else it proves nothing."""
    loaded: set[str] = set()
    failures = preemptions = resets = saved = limited = 0
    for seed in range(100, 112):  # one in three lives has hits of its own device tier
        engine: Engine = (fuzz := Fuzz(make, seed)).engine
        fuzz.run(400)
        loaded |= set(engine.traffic["loaded_tokens"])
        failures += engine.traffic["failed_blocks"]
        resets += engine.traffic["resets"]
        saved += engine.traffic["saved_blocks"]
        limited += engine.index.counters().totals.limit_evictions
        preemptions += sum(request.num_preemptions for request in engine.requests.values())
    assert loaded == {"peer_device", "own_device", "own_host"}
    assert min(failures, preemptions, resets, saved, limited) > 0
