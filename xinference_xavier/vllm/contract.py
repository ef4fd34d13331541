# SPDX-License-Identifier: Apache-2.0
"""Whether the connector still fits the vLLM that loads it (R1).

Versions that were tried are known to fit, see ``tests/compat``. This is for those that somebody
allowed, and for builds that were changed: a hook that vLLM does not have any more is never called,
and one that it calls in another way ends its engine with the first request.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator

from xinference_xavier.installed import UnsupportedVersion, vllm_version


def check_contract(connector: type, base: type, *, own: Collection[str]) -> None:
    """Raise UnsupportedVersion unless ``connector`` and vLLM's ``base`` fit each other.

    All public names of ``connector`` are hooks that vLLM must know, except its ``own``. Any
    process; takes about a millisecond.
    """
    hooks = (name for name in vars(connector) if not name.startswith("_") and name not in own)
    problems = list(_problems(connector, base, hooks))
    if problems:
        raise UnsupportedVersion(
            f"the connector does not fit vLLM {vllm_version()}: {'; '.join(problems)}"
        )


def _problems(connector: type, base: type, hooks: Iterable[str]) -> Iterator[str]:
    missing: frozenset[str] = getattr(connector, "__abstractmethods__", frozenset())
    for name in sorted(missing):
        yield f"vLLM needs {name}, which the connector does not have"
    for name in hooks:
        theirs, ours = getattr(base, name, None), getattr(connector, name)
        if theirs is None:
            yield f"vLLM has no {name}"
        elif callable(theirs) and not _accepts(ours, inspect.signature(theirs)):
            yield (
                f"vLLM calls {name}{inspect.signature(theirs)}, and the connector has "
                f"{name}{inspect.signature(ours)}"
            )


def _accepts(hook: object, called: inspect.Signature) -> bool:
    """Whether a function takes what another does, by position as well as by name."""
    if not callable(hook):
        return False
    ours = inspect.signature(hook)
    named = [p for p in called.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = {p.name: p for p in called.parameters.values() if p.kind is p.KEYWORD_ONLY}
    try:
        ours.bind(*named, **only)
        # The first is the object itself, whatever its name.
        ours.bind(*named[:1], **{p.name: p for p in named[1:]}, **only)
    except TypeError:
        return False
    return True
