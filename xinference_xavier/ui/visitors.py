# SPDX-License-Identifier: Apache-2.0
"""Tokens that the server does not take, so that an open page does not go on showing them.

Xinference bans an address for an hour after a few wrong tokens. A page refreshes every few
seconds: with a login that has ended, it would lock out the visitor who left it open.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from xinference_xavier.rest import ApiError

Answer = TypeVar("Answer")

REPEAT_S: Final = 300.0
"""After so long a refused token is tried again: an API key may have been enabled."""

REPEAT_WITHOUT_S: Final = 20.0
"""As above, without a token: nobody is banned for that, but each try is a line of the audit log."""

MOST: Final = 1000
"""Refused tokens remembered; the oldest are forgotten."""


class Refused:
    """Remembers which tokens were refused, by their hashes. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def ask(self, token: str, ask: Callable[[], Answer]) -> Answer:
        """Return what ``ask`` does with ``token``; raise again how that token was refused."""
        key = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        with self._lock:
            known = self._refused.get(key)
        repeat_s = REPEAT_S if token else REPEAT_WITHOUT_S
        if known is not None and self._clock() - known[0] < repeat_s:
            raise ApiError(401, known[1])
        try:
            return ask()
        except ApiError as error:
            if error.status == 401:
                with self._lock:
                    self._refused[key] = (self._clock(), str(error))
                    self._refused.move_to_end(key)
                    while len(self._refused) > MOST:
                        self._refused.popitem(last=False)
            raise
