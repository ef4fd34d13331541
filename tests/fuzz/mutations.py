# SPDX-License-Identifier: Apache-2.0
"""Messages that are nearly right: valid ones, a part of which was exchanged for something else."""

from __future__ import annotations

import copy
import dataclasses
import math
from enum import Enum
from typing import Any

from hypothesis import strategies as st

HUGE = 10**18

numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1, 2**63, -(2**63), HUGE, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0]),
)

leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(max_size=40),
    st.binary(max_size=100),
    st.sampled_from([b"\0" * 32, b"\0" * 33, b"k" * 96, "x" * 96, b"\xff" * 999]),
)

junk = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=8), st.integers(0, 3)), inner, max_size=4),
    ),
    max_leaves=8,
)
"""Whatever can be sent: numbers of every size, texts, bytes, and containers of them."""


def parts(value: Any) -> list[Any]:
    """Return the names under which :func:`exchanged` finds the parts of a value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [item.name for item in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list | tuple) and not isinstance(value, Enum):
        return list(range(len(value)))
    return []


def exchanged(value: Any, part: Any, new: Any) -> Any:
    """Return a copy of a value with one part exchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        object.__setattr__(made, part, new)  # frozen ones, too: whoever sends can make any
        return made
    if isinstance(value, dict):
        return {**value, part: new}
    items = list(value)
    items[part] = new
    return type(value)(items) if type(value) in (list, tuple) else items


@st.composite
def mutated(draw: st.DrawFn, value: Any, replacement: st.SearchStrategy[Any] = junk) -> Any:
    """Draw the value with one part of it, at any depth, exchanged; seldom the value as it is."""
    names = parts(value)
    if not names or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.just(value), replacement, replacement))
    name = draw(st.sampled_from(names))
    inner = getattr(value, name) if dataclasses.is_dataclass(value) else value[name]
    return exchanged(value, name, draw(mutated(inner, replacement)))
