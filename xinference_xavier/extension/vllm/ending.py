# SPDX-License-Identifier: Apache-2.0
"""How a replica's process ends: after its requests when it is stopped, with its engine else."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from xinference_xavier.extension.vllm import group
from xinference_xavier.options import Deployment

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S: Final = 1
"""How often a replica looks whether its engine is alive: at a flag in its own process."""

DRAIN_TIMEOUT_S: Final = 30.0
"""How long a replica that is stopped lets the requests go on that it has."""

QUIET_S: Final = 0.5
"""A replica that had no request for so long has none on its way any more."""

SUPERVISOR_TIMEOUT_S: Final = 2.0


def finish_requests(
    engine: Any,
    deployment: Deployment,
    on_loop: Callable[[Coroutine[Any, Any, None], float], None],
) -> None:
    """Let a replica that is being stopped have no new requests, and end those that it has.

    Stock Xinference would end them with the engine. Runs on a thread, for a limited time;
    ``on_loop`` runs a coroutine on the actor's loop within so many seconds.
    """
    try:
        on_loop(group.send_no_more(deployment), SUPERVISOR_TIMEOUT_S)
    except Exception as error:
        # Fail open: then the worker refuses what comes, as in stock Xinference.
        logger.warning("%s may still be sent requests: %r", deployment.xavier_member, error)
    drain(engine, str(deployment.xavier_member))


def drain(engine: Any, replica: str) -> None:
    """Wait until a vLLM engine has had no request for a while, or for :data:`DRAIN_TIMEOUT_S`.

    For a while, because one may be on its way from before. Returns at once for a dead engine.
    """
    now = time.monotonic()
    deadline, busy_at = now + DRAIN_TIMEOUT_S, now
    while now - busy_at < QUIET_S and not engine.errored:
        running = engine.output_processor.get_num_unfinished_requests()
        if now > deadline:
            logger.warning(
                "%s has %d requests left after %g s, which end with the engine",
                replica,
                running,
                DRAIN_TIMEOUT_S,
            )
            return
        if running:
            busy_at = now
        time.sleep(QUIET_S / 10)
        now = time.monotonic()


async def end_with_engine(
    replica: str, check: Callable[[int], Awaitable[None]], stopping: Callable[[], bool]
) -> None:
    """End this process as soon as ``check`` finds its engine dead: the worker makes a new one.

    ``check`` is Xinference's own, which looks every so many seconds. It waits for a RuntimeError,
    which vLLM's EngineDeadError is not; without this, a replica without an engine would fail its
    share of the requests for ever. A replica that is ``stopping`` ends its engine itself, and the
    process when all else is done.
    """
    try:
        await check(HEALTH_INTERVAL_S)
    except Exception as error:
        if stopping():
            return
        logger.error("The engine of %s died: %r", replica, error)
        os._exit(1)
