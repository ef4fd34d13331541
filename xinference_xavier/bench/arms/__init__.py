# SPDX-License-Identifier: Apache-2.0
"""Ways of sharing a prefix cache between replicas, to be measured side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from xinference_xavier.bench.arms.base import Arm, ArmSettings, ArmUnavailable, PlainArm, Replicas
from xinference_xavier.bench.arms.builtin import BuiltinArm
from xinference_xavier.bench.arms.lmcache import LmcacheArm
from xinference_xavier.bench.arms.nixl import NixlArm
from xinference_xavier.bench.arms.xavier import XavierArm

_ARMS: Final[dict[str, Callable[[], Arm]]] = {
    "plain": PlainArm,
    "xavier": XavierArm,
    "builtin": BuiltinArm,
    "lmcache": LmcacheArm,
    "nixl": NixlArm,
}

__all__ = ["Arm", "ArmSettings", "ArmUnavailable", "Replicas", "make_arm"]


def make_arm(name: str) -> Arm:
    """Return the arm of that name. Raises KeyError where there is none."""
    return _ARMS[name]()
