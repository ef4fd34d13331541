# SPDX-License-Identifier: Apache-2.0
"""A replica's reports to its worker, from which the worker's metrics are made.

One coroutine for the event loop of the replica's actor process. It asks the engine's peer, which
answers without a step of the engine, and gives the answer to the worker. Each call has a deadline;
one that fails is a report less, and the next one is made in its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import xoscar as xo

from xinference_xavier.control.client import bounded
from xinference_xavier.extension.names import METRICS_SINK, WORKER_UID

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0
TIMEOUT_S: Final = 2.0


async def report_for_ever(
    worker: str, labels: Mapping[str, str], describe: Callable[[], Awaitable[dict[str, Any]]]
) -> None:
    """Report to the worker at that address ("host:port") until cancelled.

    ``describe`` returns the replica's status, within a deadline of its own.
    """
    failing = False
    while True:
        try:
            status = await describe()
            await bounded(_send(worker, labels, status), TIMEOUT_S)
            failing = False
        except Exception as error:
            # Fail open: nobody's request depends on a report.
            logger.log(
                logging.DEBUG if failing else logging.WARNING,
                "%s could not report its metrics to %s: %r",
                dict(labels),
                worker,
                error,
            )
            failing = True
        await asyncio.sleep(INTERVAL_S)


async def _send(worker: str, labels: Mapping[str, str], status: Mapping[str, Any]) -> None:
    ref = await xo.actor_ref(address=worker, uid=WORKER_UID)
    await ref.record_metrics(METRICS_SINK, "report", {"labels": dict(labels), "status": status})
