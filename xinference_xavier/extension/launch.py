# SPDX-License-Identifier: Apache-2.0
"""From what a user asks for to what stock Xinference may see: pure functions over plain mappings.

Stock Xinference would take ``enable_xavier`` for its built-in Xavier and hand unknown keys to
vLLM. So a GPU-first launch is rewritten: our options become one text, :data:`CARRIER`, which
every stock path (placement, recovery, scale-up, autostart) passes on to the model class as it is.
Text, because Xinference's views blank out values whose name contains "token", also inside
mappings, and a launch copied from such a view must still work.

A payload without ``xavier_gpu_first`` is not looked at, except to tell that one of our own
options needs it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from xinference_xavier.features import check_launch
from xinference_xavier.options import STOCK_OPTIONS, OptionError, XavierOptions

CARRIER: Final = "xavier_gpu_first_options"
"""The launch argument that carries our options, as JSON text of ``XavierOptions.to_mapping()``."""

SWITCH: Final = "xavier_gpu_first"
STOCK_SWITCH: Final = "enable_xavier"

SHARED_WITH_STOCK: Final = frozenset({"xavier_gpu_cache_bytes", *STOCK_OPTIONS})
"""Names that stock Xinference takes too: without GPU-first they are its business."""

OURS_ALONE: Final = frozenset(XavierOptions.model_fields) - SHARED_WITH_STOCK

NEARLY: Final = 0.85
"""From this similarity on, an unknown name is taken for a misspelt one of ours."""

ONE_DEVICE: Final = "each replica has one device, and more replicas do the same as more devices"


@dataclass(frozen=True)
class Launch:
    """A translated GPU-first launch: options, number of replicas, and the body for stock."""

    options: XavierOptions
    replicas: int
    payload: dict[str, Any]


def translate(payload: Mapping[str, Any]) -> Launch | Mapping[str, Any]:
    """Return a :class:`Launch`, or for any other launch the payload for stock Xinference.

    Raises :class:`OptionError` with everything that is wrong, separated by ``"; "``.
    """
    if CARRIER in payload:
        carried = read_carrier(payload[CARRIER]).to_mapping()
        rest = {name: value for name, value in payload.items() if name != CARRIER}
        payload = {STOCK_SWITCH: True, **carried, **rest}
    ours = {name: value for name, value in payload.items() if name.startswith("xavier_")}
    if SWITCH not in ours:
        _refuse_orphans(ours)
        return payload
    if not XavierOptions.from_mapping({SWITCH: ours[SWITCH]}).xavier_gpu_first:
        return {name: value for name, value in payload.items() if name not in OURS_ALONE}
    problems = [*_switch_problems(payload), *launch_problems(payload)]
    options = None
    try:
        options = XavierOptions.from_mapping(
            {name: ours[name] for name in ours if not _is_stock_default(name, ours[name])}
        )
    except OptionError as error:
        problems.insert(0, str(error))
    if options is None or problems:
        raise OptionError("; ".join(problems))
    stock = {
        name: value for name, value in payload.items() if name not in ours and name != STOCK_SWITCH
    }
    stock[CARRIER] = write_carrier(options)
    return Launch(options, _whole(payload.get("replica")) or 1, stock)


def with_default(launch: Launch, name: str, value: object) -> Launch:
    """Return ``launch`` with a stock launch argument set where the user gave none."""
    if launch.payload.get(name) is not None:
        return launch
    return replace(launch, payload={**launch.payload, name: value})


def write_carrier(options: XavierOptions) -> str:
    """Return the value of :data:`CARRIER`."""
    return json.dumps(options.to_mapping(), sort_keys=True)


def read_carrier(value: object) -> XavierOptions:
    """Return the options of a :data:`CARRIER`. Raises :class:`OptionError`."""
    try:
        values = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        values = None
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{CARRIER}={value!r} is not what a GPU-first launch leaves there; "
            f"give {STOCK_SWITCH}=true, {SWITCH}=true and the xavier_ options instead"
        )
    return XavierOptions.from_mapping({**values, SWITCH: True})


def launch_problems(config: Mapping[str, Any]) -> list[str]:
    """Return why a launch with these arguments cannot be GPU-first, for people.

    ``config`` holds a launch's arguments, or what reached a model's class of them. The table in
    ``features`` knows what cannot work; here is what depends on several arguments, or on how
    Xinference writes them.
    """
    # What begins with xavier_ is for XavierOptions to refuse.
    problems = check_launch(
        {name: _plain(value) for name, value in config.items() if not name.startswith("xavier_")}
    )
    engine, kind = config.get("model_engine"), config.get("model_type")
    if engine is not None and str(engine).lower() != "vllm":
        problems.append(f"model_engine={engine!r} is not supported with {SWITCH}; use vLLM")
    if kind is not None and str(kind).lower() != "llm":
        problems.append(f"model_type={kind!r} is not supported with {SWITCH}; use LLM")
    return problems + _device_problems(config)


def _switch_problems(payload: Mapping[str, Any]) -> list[str]:
    try:
        enabled = XavierOptions.from_mapping({SWITCH: payload.get(STOCK_SWITCH)}).xavier_gpu_first
    except OptionError:
        return [f"{STOCK_SWITCH}={payload[STOCK_SWITCH]!r} is not allowed; allowed: true or false"]
    if enabled:
        return []
    return [f"{SWITCH}=true needs {STOCK_SWITCH}=true; set it, or leave {SWITCH} out"]


def _refuse_orphans(ours: Mapping[str, Any]) -> None:
    """Refuse our own options without the switch, and what is nearly the name of one."""
    for name in sorted(set(ours) - SHARED_WITH_STOCK - OURS_ALONE):
        if nearest := difflib.get_close_matches(name.lower(), OURS_ALONE, n=1, cutoff=NEARLY):
            raise OptionError(f"unknown option {name}: did you mean {nearest[0]}?")
    orphans = sorted(OURS_ALONE.intersection(ours))
    if orphans:
        raise OptionError(
            f"{', '.join(orphans)}: only for {SWITCH}=true; set it together with "
            f"{STOCK_SWITCH}=true, or leave {'it' if len(orphans) == 1 else 'them'} out"
        )


def _is_stock_default(name: str, value: object) -> bool:
    return value is None and name in STOCK_OPTIONS


def _device_problems(config: Mapping[str, Any]) -> list[str]:
    n_gpu, indices = config.get("n_gpu"), config.get("gpu_idx")
    replicas = _whole(config.get("replica")) or 1
    problems = []
    if (_whole(n_gpu) or 0) > 1:
        problems.append(f"n_gpu={n_gpu} is not supported with {SWITCH}: {ONE_DEVICE}; set it to 1")
    if isinstance(indices, list) and len(indices) > replicas:
        problems.append(
            f"gpu_idx={indices} is not supported with {SWITCH} and replica={replicas}: "
            f"{ONE_DEVICE}; give one index per replica"
        )
    return problems


def _whole(value: object) -> int | None:
    """Return a whole number given as such or as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _plain(value: object) -> object:
    """Return False for the text "false", which a command line or a form may send."""
    is_no = isinstance(value, str) and value.strip().lower() in ("false", "0", "none", "")
    return False if is_no else value
