# SPDX-License-Identifier: Apache-2.0
"""Prompts of exact length: with the byte tokenizer one character is one token."""

from __future__ import annotations

import random
import string


def unique_text(seed: int, length: int) -> str:
    """Return ``length`` characters of random words; those of other seeds share no block."""
    choice = random.Random(seed)
    text = f"{seed} "
    while len(text) < length:
        letters = choice.choices(string.ascii_lowercase, k=choice.randint(2, 9))
        text += "".join(letters) + " "
    return text[:length]
