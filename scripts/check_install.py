# SPDX-License-Identifier: Apache-2.0
"""Fail if the environment lacks a part: an interrupted installation can leave half a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

MODULES = ("torch", "vllm", "xinference", "xoscar", "nixl", "gguf", "gradio", "xinference_xavier")


def main(modules: Sequence[str]) -> None:
    """Import each module; exit with the name of the first that fails and what to do."""
    for name in modules:
        try:
            importlib.import_module(name)
        # Whatever a broken package raises, the answer is the same.
        except Exception as error:
            sys.exit(
                f"{name} is not usable ({error!r}). Remove the folder .venv and run make again."
            )


main(sys.argv[1:] or MODULES)
