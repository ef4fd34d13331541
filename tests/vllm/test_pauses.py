# SPDX-License-Identifier: Apache-2.0
"""A paused engine: vLLM clears its caches when it is idle, and must be able to (R16)."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus
from vllm_harness import Engine, prompt_of, share

PROMPT = prompt_of(1, 100)


@pytest.mark.parametrize("mode", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_never_meets_an_idle_engine_with_blocks_in_use(
    engine: Engine, mode: PauseState
) -> None:
    """vLLM clears its cache once a paused engine is idle, and ends it if it cannot.

    Under a pause that waits, 0.32 lets what was loaded run; else it stays until the pause ends.
    """
    share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    loading = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    engine.scheduler.set_pause_state(mode)
    engine.worker.hold_loads = False
    engine.steps(20)
    if mode is PauseState.PAUSED_NEW and hasattr(engine.scheduler, "kv_holding_waiting"):
        assert engine.status_of(loading) is RequestStatus.FINISHED_LENGTH_CAPPED
    else:
        assert engine.status_of(loading) is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert engine.busy()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.check_all()


def test_a_pause_that_aborts_leaves_an_idle_engine(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.worker.hold_loads = True
    loading = engine.add(PROMPT)
    engine.until(lambda: engine.worker.loads)
    engine.abort(loading)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.worker.hold_loads = False
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.check_all()
