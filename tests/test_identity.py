# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.identity import (
    SAMPLE_BYTES,
    SAMPLES,
    IdentityError,
    fingerprint,
    weights_identity,
)

WHOLE = SAMPLES * SAMPLE_BYTES

names = st.text(max_size=6)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["1", "True", "None", "", "a=1", "0"]),
    st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0]),
)
maps = st.dictionaries(names, values, max_size=5)


def typed(fields: dict[str, object]) -> dict[str, tuple[str, str]]:
    """Equality as the fingerprint means it: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return {name: (type(value).__name__, repr(value)) for name, value in fields.items()}


@given(maps, maps)
def test_fingerprints_are_equal_exactly_when_the_fields_are(a, b):
    assert (fingerprint(a) == fingerprint(b)) == (typed(a) == typed(b))


@given(maps, names, values)
def test_any_change_of_one_field_changes_the_fingerprint(fields, name, value):
    changed = {**fields, name: value}
    assert (fingerprint(changed) == fingerprint(fields)) == (typed(changed) == typed(fields))


@given(st.text(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_text_cannot_move_between_a_name_and_its_value(text, cut, other):
    a, b = {text[:cut]: text[cut:]}, {text[:other]: text[other:]}
    assert (fingerprint(a) == fingerprint(b)) == (a == b)


@given(maps)
def test_the_order_of_the_fields_does_not_matter(fields):
    assert fingerprint(dict(reversed(fields.items()))) == fingerprint(fields)


@pytest.mark.parametrize("value", [b"x", [1], 1j, object()])
def test_a_value_that_has_no_encoding_is_refused_by_name(value):
    with pytest.raises(TypeError, match="'dtype'"):
        fingerprint({"dtype": value})


def test_a_fingerprint_has_32_bytes():
    assert len(fingerprint({})) == 32


def write_model(directory: Path, payload: int = 3 * WHOLE) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    (directory / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [payload], "data_offsets": [0, payload]}})
    body = bytes(i * 31 % 251 for i in range(4096)) * (payload // 4096)
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + body
    )
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_copy_elsewhere_with_other_times_has_the_same_identity(model, tmp_path):
    copy = tmp_path / "other" / "place"
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert weights_identity(copy) == weights_identity(str(model))


def test_files_behind_links_count_by_their_content(model, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert weights_identity(linked) == weights_identity(model)


def test_another_process_computes_the_same_identity(model):
    code = (
        "import sys; from xinference_xavier.identity import *;"
        "print(weights_identity(sys.argv[1]), fingerprint({'b': 1, 'a': 'x'}).hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [
        weights_identity(model),
        fingerprint({"a": "x", "b": 1}).hex(),
    ]


def test_a_flipped_byte_in_any_sample_changes_the_identity(model):
    weights = model / "model.safetensors"
    last = weights.stat().st_size - SAMPLE_BYTES
    before = {weights_identity(model)}
    for sample in (0, 1, SAMPLES // 2, SAMPLES - 1):
        for within in (0, SAMPLE_BYTES - 1):
            if sample == 0 and within == 0:
                continue  # The header's length: the file would be refused as cut short.
            offset = last * sample // (SAMPLES - 1) + within
            flip(weights, offset)
            identity = weights_identity(model)
            assert identity not in before
            before.add(identity)


def test_every_byte_of_a_small_file_counts(tmp_path):
    model = write_model(tmp_path / "small", payload=8192)
    before = weights_identity(model)
    flip(model / "model.safetensors", 5000)
    assert weights_identity(model) != before


def test_the_whole_safetensors_header_counts(tmp_path):
    """Bytes of a long header that no sample covers."""
    header = b'{"__metadata__": "' + b"x" * (WHOLE * 2) + b'"}'
    model = write_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    before = weights_identity(model)
    flip(weights, SAMPLE_BYTES + 100)
    assert weights_identity(model) != before


def test_config_size_name_and_number_of_files_change_the_identity(model):
    seen = [weights_identity(model)]
    (model / "config.json").write_text('{"hidden_size": 65}')
    seen.append(weights_identity(model))
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.append(weights_identity(model))
    (model / "model.safetensors").rename(model / "weights.safetensors")
    seen.append(weights_identity(model))
    shutil.copy(model / "weights.safetensors", model / "weights-2.safetensors")
    seen.append(weights_identity(model))
    assert len(set(seen)) == len(seen)


def test_tokenizer_files_and_notes_do_not_count(model):
    before = weights_identity(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("notes")
    assert weights_identity(model) == before


def test_dummy_weights_are_told_apart_by_config_and_seed_only(model):
    seen = [weights_identity(model, load_format="dummy", seed=seed) for seed in (None, 0, 1)]
    (model / "model.safetensors").unlink()
    assert weights_identity(model, load_format="dummy", seed=1) == seen[2]
    (model / "config.json").write_text("{}")
    seen.append(weights_identity(model, load_format="dummy", seed=1))
    assert len(set(seen)) == 4


def test_the_seed_does_not_count_for_real_weights(model):
    assert weights_identity(model, seed=1) == weights_identity(model, seed=2)


def test_a_single_gguf_file_is_a_model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    before = weights_identity(path)
    flip(path, 500)
    assert weights_identity(path) != before


def test_a_directory_with_nothing_but_a_gguf_file_is_a_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert weights_identity(tmp_path) != weights_identity(tmp_path / "model.gguf")


def test_nothing_to_look_at_is_an_error_that_names_the_path(tmp_path, model):
    with pytest.raises(IdentityError, match=r"missing.*neither"):
        weights_identity(tmp_path / "missing")
    (model / "model.safetensors").unlink()
    with pytest.raises(IdentityError, match=r"no weight file.*safetensors.*'auto'"):
        weights_identity(model)
    (model / "config.json").unlink()
    with pytest.raises(IdentityError, match=r"no config\.json"):
        weights_identity(model, load_format="dummy", seed=0)


def test_a_safetensors_file_that_is_cut_short_is_an_error(model):
    (model / "model.safetensors").write_bytes((10**9).to_bytes(8, "little") + b"{}")
    with pytest.raises(IdentityError, match="cut short"):
        weights_identity(model)
