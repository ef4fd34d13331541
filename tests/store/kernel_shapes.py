# SPDX-License-Identifier: Apache-2.0
"""KV caches that a copy kernel can get wrong, beside those of the attention backends."""

from __future__ import annotations

import torch

from tests.store import kvcache


def odd_sizes() -> kvcache.KvCaches:
    """Rows of 63 bytes, the last layer one byte off any word: nothing is aligned."""
    row = kvcache.TOKENS * 3 - 1 + kvcache.TOKENS
    odd = torch.zeros(kvcache.BLOCKS * row + 1, dtype=torch.uint8)[1:]
    return {
        "even": torch.zeros(kvcache.BLOCKS, kvcache.TOKENS, 3, dtype=torch.uint8),
        "odd": odd.as_strided((kvcache.BLOCKS, kvcache.TOKENS, 3), (row, 3, 1)),
    }


def longer_than_a_program() -> kvcache.KvCaches:
    """Spans of 5000 and 20,480 bytes: several programs, the last one partly idle."""
    blocks, tokens = kvcache.BLOCKS, kvcache.TOKENS
    return {
        "long": torch.zeros(blocks, tokens, 640, dtype=torch.bfloat16),
        "short": torch.zeros(blocks, tokens, 156, dtype=torch.bfloat16),
    }


SHAPES = kvcache.SHAPES | {make.__name__: make for make in (odd_sizes, longer_than_a_program)}
