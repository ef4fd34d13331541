# SPDX-License-Identifier: Apache-2.0
"""The model of the tests with real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xinference_xavier.bench.models import TINY, make_random_llama

TOKEN_BYTES: Final = TINY.token_bytes(4)
"""KV cache of one token in float32."""


def make_tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Write the smallest model that has everything; return ``path``."""
    return make_random_llama(path, TINY, seed=seed)
