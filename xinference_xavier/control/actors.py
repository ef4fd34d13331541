# SPDX-License-Identifier: Apache-2.0
"""xoscar's decorator with the type that it does not ship."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import xoscar as xo

Method = TypeVar("Method", bound=Callable[..., Any])


def no_lock(method: Method) -> Method:
    """Let an actor's method run beside the others instead of one after the other."""
    marked: Method = xo.no_lock(method)
    return marked
