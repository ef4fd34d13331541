# SPDX-License-Identifier: Apache-2.0
"""How much memory a model's weights need at least, as far as its files tell.

For a preflight before anything is loaded, so it errs on the small side: numbers of more than two
bytes may be loaded as two, and what the files do not tell counts as nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
LONGEST_HEADER: Final = 100 << 20
"""The format's own limit."""

_BITS: Final = {"BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FLOAT8: Final = "F8"
_WIDEST: Final = 16


def least_weight_bytes(model_path: str | Path) -> int:
    """Return the least bytes that the weights of a model need in memory; 0 where nothing tells.

    ``model_path`` is a directory with safetensors files, of which those that its index names
    count, or a single file (GGUF), which is loaded as it is. Reads headers only.
    """
    path = Path(model_path)
    try:
        if path.is_file():
            return path.stat().st_size
        return sum(map(_tensor_bytes, _weight_files(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Files that cannot be read are for whoever loads them to complain about.
        return 0


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    single = directory / "model.safetensors"
    # Others lie beside it in another form, for other programs.
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path} has no safetensors header")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = (entry for name, entry in header.items() if name != "__metadata__")
    return sum(math.prod(entry["shape"]) * _bits(entry["dtype"]) // 8 for entry in tensors)


def _bits(dtype: str) -> int:
    """Return the bits of a number in memory, for a type as safetensors names it."""
    if dtype.startswith(_FLOAT8):
        return 8
    return _BITS.get(dtype, _WIDEST)
