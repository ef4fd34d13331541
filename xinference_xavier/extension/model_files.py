# SPDX-License-Identifier: Apache-2.0
"""Where the files of a model lie that Xinference knows by name, if they lie on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from xinference_xavier.planner import UnknownBlock
from xinference_xavier.schemas import PlanRequest


async def model_directory(supervisor: Any, request: PlanRequest) -> Path:
    """Return the directory of the model that a launch names; nothing is downloaded.

    Raises :class:`UnknownBlock` saying why there is none.
    """
    name = request.model_name
    try:
        family = await supervisor.get_model_registration("LLM", name)
    except ValueError:
        raise UnknownBlock(f"Xinference has no model {name!r}") from None
    specs = [spec for spec in family.model_specs if _matches(spec, request)]
    if not specs:
        raise UnknownBlock(f"{name} has no such format, size or quantization")
    # Several specs may differ only in the hub they come from, and share one cache.
    places = [path for spec in specs for path in _places(family.model_name, spec)]
    # On a thread: they may lie on a file system of the network.
    if (path := await asyncio.to_thread(_first_directory, places)) is not None:
        return path
    raise UnknownBlock(f"{name} is not on the server's host, or not downloaded yet")


def _first_directory(places: Iterable[Path]) -> Path | None:
    return next((path for path in places if path.is_dir()), None)


def _matches(spec: Any, request: PlanRequest) -> bool:
    wanted = {
        "model_format": request.model_format,
        "model_size_in_billions": request.model_size_in_billions,
        "quantization": request.quantization,
    }
    return all(
        value is None or _plain(value) == _plain(getattr(spec, name))
        for name, value in wanted.items()
    )


def _plain(value: object) -> str:
    """Return a size or a name as Xinference writes it: 0.5 is ``0_5`` there."""
    return str(value).replace(".", "_")


def _places(name: str, spec: Any) -> list[Path]:
    # Loads all of Xinference, which the API's process has done long ago.
    from xinference.model.llm.cache_manager import LLMCacheManager

    cached = Path(LLMCacheManager.get_cache_dir_for_spec(name, spec))
    uri = urlparse(spec.model_uri or "")
    return [Path(unquote(uri.path)), cached] if uri.scheme == "file" else [cached]
