# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xinference_xavier.weights import INDEX, least_weight_bytes


def save(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path)


def test_numbers_count_in_the_width_that_they_need_at_least(tmp_path: Path) -> None:
    save(
        tmp_path / "model.safetensors",
        half=torch.zeros(10, 3, dtype=torch.bfloat16),
        full=torch.zeros(5, dtype=torch.float32),
        eight=torch.zeros(7, dtype=torch.float8_e4m3fn),
        packed=torch.zeros(11, dtype=torch.int8),
        scalar=torch.zeros((), dtype=torch.float16),
    )
    assert least_weight_bytes(tmp_path) == 60 + 10 + 7 + 11 + 2


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"part-{number}.safetensors", w=torch.zeros(8, dtype=torch.bfloat16))
    save(tmp_path / "consolidated.safetensors", w=torch.zeros(16, dtype=torch.bfloat16))
    weights = {"a": "part-1.safetensors", "b": "part-2.safetensors", "c": "part-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    assert least_weight_bytes(tmp_path) == 32


def test_the_same_weights_in_another_form_do_not_count_twice(tmp_path: Path) -> None:
    for name in ("model", "consolidated"):
        save(tmp_path / f"{name}.safetensors", w=torch.zeros(8, dtype=torch.bfloat16))
    assert least_weight_bytes(tmp_path) == 16


def test_a_single_file_is_loaded_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 100)
    assert least_weight_bytes(path) == 100


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"w": {}}', None]
)
def test_what_cannot_be_read_tells_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert least_weight_bytes(tmp_path) == 0
    assert least_weight_bytes(tmp_path / "gone") == 0
