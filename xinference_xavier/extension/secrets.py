# SPDX-License-Identifier: Apache-2.0
"""The secret of each launched model: made by its first replica, kept beside the supervisor.

Each replica asks the supervisor as it loads, so it does not matter how it was launched (by hand,
by scale-up, recovery or autostart) or on which worker. A launch argument would reach them as well,
but Xinference logs, stores and shows those. The secret is in memory only; a supervisor that was
restarted is told it again by the replicas that live on.

Coroutines for the event loop of a replica's actor process, the API's, or a command's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from typing import Any, Final

import xoscar as xo

from xinference_xavier.control.client import bounded
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.extension.names import GROUP_SECRET, KEEP_SECRET, NAME, SUPERVISOR_UID

logger = logging.getLogger(__name__)

MOST_SECRETS: Final = 4096

INTERVAL_S: Final = 5.0
TIMEOUT_S: Final = 2.0


class Secrets:
    """What the supervisor's process keeps: the secrets of the models that were heard of last."""

    def __init__(self) -> None:
        self._secrets: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<secrets of {len(self._secrets)} models>"

    def keep(self, model_uid: str, secret: str) -> str:
        """Return the model's secret, which is the first one that was offered for it."""
        kept = self._secrets.setdefault(model_uid, secret)
        self._secrets.move_to_end(model_uid)
        if len(self._secrets) > MOST_SECRETS:
            self._secrets.popitem(last=False)
        return kept

    def get(self, model_uid: str) -> str | None:
        """Return the model's secret, None for one that no replica was loaded of."""
        return self._secrets.get(model_uid)


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return secrets.token_hex(32)


async def agreed_secret(supervisor: Any, model_uid: str, offer: str) -> str:
    """Return the model's secret from the supervisor (an actor's reference): ``offer`` if new."""
    payload = {"model_uid": model_uid, "secret": offer}
    kept: str = await supervisor.call_extension(NAME, KEEP_SECRET, payload)
    return kept


async def model_key(supervisor: Any, model_uid: str) -> GroupKey | None:
    """Return the key of a launched model, from the supervisor; None where no replica was loaded."""
    secret = await supervisor.call_extension(NAME, GROUP_SECRET, {"model_uid": model_uid})
    return None if secret is None else GroupKey(model_uid, secret)


async def key_from(address: str, model_uid: str) -> GroupKey | None:
    """As :func:`model_key`, from the supervisor at that address ("host:port")."""
    return await model_key(await xo.actor_ref(address=address, uid=SUPERVISOR_UID), model_uid)


async def remind_for_ever(address: str, model_uid: str, secret: str) -> None:
    """Tell the supervisor at that address the model's secret, until cancelled."""

    async def tell() -> str:
        supervisor = await xo.actor_ref(address=address, uid=SUPERVISOR_UID)
        return await agreed_secret(supervisor, model_uid, secret)

    differs = False
    while True:
        try:
            kept = await bounded(tell(), TIMEOUT_S)
        except Exception as error:
            # Whatever the supervisor is busy with: nobody's request depends on this.
            logger.debug("the supervisor at %s was not reminded: %r", address, error)
        else:
            if kept != secret and not differs:
                logger.error(
                    "the supervisor at %s was restarted and has a new secret for %s: replicas that "
                    "started since do not share with this one; launch the model again",
                    address,
                    model_uid,
                )
            differs = kept != secret
        await asyncio.sleep(INTERVAL_S)
