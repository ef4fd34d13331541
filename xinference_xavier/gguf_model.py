# SPDX-License-Identifier: Apache-2.0
"""A Llama model with a byte-level BPE tokenizer out of a GGUF file, as vLLM reads models.

transformers can read such a file as well, but goes through its long metadata four times, imports
compilers and leaves a folder for them among the temporary files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGUFReader

_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of tensors, in GGUF and in transformers."""


def convert(source: Path, target: Path) -> None:
    """Write the model in ``source`` to the new directory ``target``, in float32.

    Raises ValueError or KeyError, naming what is not there, for a file of another kind.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    file = GGUFReader(source)
    if (kind := _value(file, "general.architecture")) != "llama":
        raise ValueError(f"{source} is a model of the kind {kind}; only llama is read")
    config = _config(file)
    weights = _weights(file, config)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(file, target)


def _value(file: GGUFReader, name: str) -> Any:
    """Return one entry of the metadata as a Python value."""
    return file.fields[name].contents()


def _config(file: GGUFReader) -> dict[str, Any]:
    def of_model(name: str) -> Any:
        return _value(file, f"llama.{name}")

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "vocab_size": of_model("vocab_size"),
        "hidden_size": of_model("embedding_length"),
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": of_model("attention.head_count"),
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": of_model("attention.layer_norm_rms_epsilon"),
        "rope_theta": of_model("rope.freq_base"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in file.tensors),
        "bos_token_id": _value(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(file, "tokenizer.ggml.eos_token_id"),
    }


def _weights(file: GGUFReader, config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    from gguf import dequantize

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in file.tensors:
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _WHOLE:
            weights[_WHOLE[tensor.name]] = data
            continue
        match tensor.name.split("."):
            case ["blk", layer, part, "weight"] if part in _OF_LAYER:
                pass
            case _:
                raise ValueError(f"the tensor {tensor.name} has no place in a plain Llama model")
        if part in heads:
            data = _halves(data, heads[part])
        weights[f"model.layers.{layer}.{_OF_LAYER[part]}.weight"] = data
    return weights


def _halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return a projection's rows with each head's two rotated halves one after the other.

    In GGUF a head has the pairs that are rotated together side by side.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(file: GGUFReader, target: Path) -> None:
    from gguf import TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = _value(file, "tokenizer.ggml.tokens")
    kinds = _value(file, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _value(file, "tokenizer.ggml.merges")]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [name for name, kind in zip(names, kinds, strict=True) if kind == TokenType.CONTROL]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[_value(file, "tokenizer.ggml.bos_token_id")],
        "eos_token": names[_value(file, "tokenizer.ggml.eos_token_id")],
        "pad_token": names[_value(file, "tokenizer.ggml.padding_token_id")],
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (target / "chat_template.jinja").write_text(_value(file, "tokenizer.chat_template"))
