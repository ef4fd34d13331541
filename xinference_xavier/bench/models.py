# SPDX-License-Identifier: Apache-2.0
"""Models of random weights for measurements and tests: a Llama with a byte-level tokenizer.

One ASCII character is one token, so that prompts have exactly the length that is asked for.
Deterministic: the same arguments give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's size and speed depend on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    positions: int

    def token_bytes(self, element_bytes: int) -> int:
        """Return the bytes of KV cache per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * element_bytes


TINY: Final = Shape(2, 4, 2, 32, 64, 128, 8192)

QWEN_KV: Final = Shape(24, 8, 2, 64, 512, 2048, 32768)
"""The KV cache of Qwen2.5-0.5B, 24,576 bytes per token in float32, with a smaller hidden size.

Loads cost the same as with the real model, and prefill is about four times cheaper: what saving
blocks costs shows up four times as large.
"""


def make_random_llama(path: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write a model directory that vLLM and transformers load; return ``path``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    vocabulary["<eos>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", model_max_length=shape.positions
    )
    fast.chat_template = CHAT_TEMPLATE
    path.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(path)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        eos_token_id=vocabulary["<eos>"],
        bos_token_id=None,
        tie_word_embeddings=False,
        # Large enough that answers depend on the prompt instead of repeating one token.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path, safe_serialization=True)
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": vocabulary["<eos>"]}))
    return path
