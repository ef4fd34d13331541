# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes the model that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from xinference_xavier import smollm
from xinference_xavier.gguf_model import convert

HEADS, KV_HEADS, HEAD, WIDTH, INNER = 2, 1, 4, 8, 6
TOKENS = ["<none>", "<start>", "<end>", "a", "b", "ab", "1", "2", "12", "Ġ"]
MERGES = ["a b", "1 2"]


def rows(name: int, count: int, width: int = WIDTH) -> NDArray[np.float32]:
    """Return rows that tell their tensor and their number."""
    return np.repeat(np.arange(count, dtype=np.float32) + 100 * name, width).reshape(count, width)


def write(path: Path, architecture: str = "llama", more: str | None = None) -> Path:
    file = GGUFWriter(path, architecture)
    file.add_vocab_size(len(TOKENS))
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(INNER)
    file.add_block_count(1)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_context_length(64)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(5000.0)
    file.add_token_list(TOKENS)
    file.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3))
    file.add_token_merges(MERGES)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(2)
    file.add_chat_template("{{ messages }}")
    for name, data in {
        "token_embd": rows(1, len(TOKENS)),
        "output_norm": rows(2, WIDTH)[:, 0],
        "blk.0.attn_norm": rows(3, WIDTH)[:, 0],
        "blk.0.attn_q": rows(4, HEADS * HEAD),
        "blk.0.attn_k": rows(5, KV_HEADS * HEAD),
        "blk.0.attn_v": rows(6, KV_HEADS * HEAD),
        "blk.0.attn_output": rows(7, WIDTH, HEADS * HEAD),
        "blk.0.ffn_norm": rows(8, WIDTH)[:, 0],
        "blk.0.ffn_gate": rows(9, INNER),
        "blk.0.ffn_up": rows(10, INNER),
        "blk.0.ffn_down": rows(11, WIDTH, INNER),
    }.items():
        file.add_tensor(f"{name}.weight", np.ascontiguousarray(data))
    if more is not None:
        file.add_tensor(more, np.zeros(4, dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    convert(write(place / "model.gguf"), place / "model")
    return place / "model"


def test_every_tensor_is_there_under_the_name_that_vllm_knows(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    numbers = {name: int(data.flat[0]) // 100 for name, data in weights.items()}
    assert numbers == {
        "model.embed_tokens.weight": 1,
        "model.norm.weight": 2,
        f"{layer}input_layernorm.weight": 3,
        f"{layer}self_attn.q_proj.weight": 4,
        f"{layer}self_attn.k_proj.weight": 5,
        f"{layer}self_attn.v_proj.weight": 6,
        f"{layer}self_attn.o_proj.weight": 7,
        f"{layer}post_attention_layernorm.weight": 8,
        f"{layer}mlp.gate_proj.weight": 9,
        f"{layer}mlp.up_proj.weight": 10,
        f"{layer}mlp.down_proj.weight": 11,
    }
    assert {data.dtype for data in weights.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("part", "order"),
    [
        ("q", [0, 2, 1, 3, 4, 6, 5, 7]),
        ("k", [0, 2, 1, 3]),
        ("v", [0, 1, 2, 3]),
    ],
)
def test_rotated_halves_of_each_head_are_put_one_after_the_other(
    folder: Path, part: str, order: list[int]
) -> None:
    weights = load_file(folder / "model.safetensors")
    projection = weights[f"model.layers.0.self_attn.{part}_proj.weight"]
    assert [int(row[0]) % 100 for row in projection] == order


def test_the_configuration_is_the_file_s(folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_digits_stay_single_and_control_tokens_whole(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("<start>ab12 a<end>")
    assert encoded.tokens == ["<start>", "ab", "1", "2", "Ġ", "a", "<end>"]
    assert tokenizer.decode(encoded.ids) == "ab12 a"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == settings["pad_token"] == "<end>"


def test_a_model_of_another_kind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind gemma; only llama"):
        convert(write(tmp_path / "model.gguf", "gemma"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("tensor", ["blk.0.attn_v.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs"])
def test_a_tensor_that_a_plain_llama_has_not_is_refused_before_anything_is_written(
    tmp_path: Path, tensor: str
) -> None:
    with pytest.raises(ValueError, match=f"tensor {tensor} has no place"):
        convert(write(tmp_path / "model.gguf", more=tensor), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm.gguf_file()
    convert(source, tmp_path / "model")
    theirs = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(**theirs, dtype=torch.float32)
    read = other.state_dict()
    assert model.state_dict().keys() == read.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, read[name]), name
    assert model.config.rope_parameters == other.config.rope_parameters
    tokenizer, another = (
        AutoTokenizer.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(**theirs),
    )
    text = "<|im_start|>user\nWho built the Canal du Midi, 240 km long?<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == another(text)["input_ids"]
    assert tokenizer.chat_template == another.chat_template
