# SPDX-License-Identifier: Apache-2.0
"""What has to be equal before replicas may use each other's KV blocks.

:func:`weights_identity` tells from a model's files whether two replicas run the same weights;
:func:`fingerprint` turns that and everything else that shapes KV bytes into one 32-byte value.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from hashlib import _Hash

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""JSON files that shape the tokens of a prompt, not the KV of given tokens: not looked at."""

SAMPLES = 64
"""Evenly spaced samples per weight file, the first and the last bytes included."""

SAMPLE_BYTES = 4096
"""Length of a sample. A file of at most SAMPLES * SAMPLE_BYTES (256 KiB) is read whole."""

_HEADER_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class IdentityError(ValueError):
    """The identity of the weights cannot be told from these files."""


def weights_identity(
    model_path: str | Path, *, load_format: str = "auto", seed: int | None = None
) -> str:
    """Return a hex digest that is equal for equal weights, wherever and whenever they were stored.

    ``model_path`` is a model's directory, or a single weight file (GGUF). Looked at are, directly
    in that directory: every JSON file but the tokenizer's (TOKENIZER_FILES), and of every weight
    file (WEIGHT_SUFFIXES) its name, size, safetensors header and SAMPLES evenly spaced samples.
    Nothing else: no path, no time stamp, no owner. It reads some 300 KiB per weight file, so it
    tells apart models, revisions, quantizations and trained weights, not weights that somebody
    edited in a few chosen bytes.

    With ``load_format`` "dummy" the weights are made from ``seed``: then the JSON files and the
    seed count, and weight files do not. In all other cases ``seed`` does not count.

    Raises IdentityError when there is nothing to look at, or a safetensors file is cut short.
    """
    path = Path(model_path)
    digest = hashlib.sha256(b"xinference-xavier weights 1\0")
    if path.is_file():
        _add_text(digest, "single file")
        _add_weights(digest, path)
        return digest.hexdigest()
    if not path.is_dir():
        raise IdentityError(f"model path {str(path)!r} is neither a directory nor a file")
    files = sorted((entry for entry in path.iterdir() if entry.is_file()), key=lambda f: f.name)
    configs = [f for f in files if f.suffix == ".json" and f.name not in TOKENIZER_FILES]
    for config in configs:
        _add_text(digest, "config")
        _add_text(digest, config.name)
        _add_bytes(digest, config.read_bytes())
    if load_format == "dummy":
        if not configs:
            raise IdentityError(f"model directory {str(path)!r} has no config.json")
        _add_text(digest, "dummy weights")
        _add_text(digest, repr(seed))
        return digest.hexdigest()
    weights = [f for f in files if f.suffix in WEIGHT_SUFFIXES]
    if not weights:
        raise IdentityError(
            f"model directory {str(path)!r} has no weight file ({', '.join(WEIGHT_SUFFIXES)}); "
            f"load_format is {load_format!r}"
        )
    for weight in weights:
        _add_text(digest, "weights")
        _add_weights(digest, weight)
    return digest.hexdigest()


def fingerprint(fields: Mapping[str, str | int | float | bool | None]) -> bytes:
    """Return the SHA-256 (32 bytes) of ``fields``, whatever their order.

    The encoding is injective: every name and value carries its type and length, so that any
    difference in one name, type or value gives other bytes to hash, and no two neighbours can be
    read as one. 1, 1.0, True and "1" are all different, and so are 0.0 and -0.0.

    Raises TypeError for a value of another type.
    """
    digest = hashlib.sha256(b"xinference-xavier fingerprint 1\0")
    for name in sorted(fields):
        _add_text(digest, name)
        tag, value = _encode(name, fields[name])
        digest.update(tag)
        _add_bytes(digest, value)
    return digest.digest()


def traits(fields: Mapping[str, str | int | float | bool | None]) -> tuple[tuple[str, str], ...]:
    """Return (name, short digest) of each of a fingerprint's ``fields``.

    Who has those of two replicas can tell in what they differ, not what they are.
    """
    return tuple((name, fingerprint({name: fields[name]}).hex()[:16]) for name in sorted(fields))


def _encode(name: str, value: object) -> tuple[bytes, bytes]:
    """A one-byte type tag and the value's bytes. bool stands before int, which it is one of."""
    if value is None:
        return b"n", b""
    if isinstance(value, bool):
        return b"b", b"1" if value else b"0"
    if isinstance(value, int):
        return b"i", b"%d" % value
    if isinstance(value, float):
        return b"f", struct.pack(">d", value)
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    raise TypeError(
        f"field {name!r} is a {type(value).__name__}, not a str, int, float, bool or None"
    )


def _add_bytes(digest: _Hash, data: bytes) -> None:
    digest.update(struct.pack(">Q", len(data)))
    digest.update(data)


def _add_text(digest: _Hash, text: str) -> None:
    _add_bytes(digest, text.encode("utf-8", "surrogatepass"))


def _add_weights(digest: _Hash, path: Path) -> None:
    size = path.stat().st_size
    _add_text(digest, path.name)
    _add_text(digest, str(size))
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            _add_header(digest, file, path, size)
        for offset, length in _samples(size):
            file.seek(offset)
            _add_bytes(digest, file.read(length))


def _add_header(digest: _Hash, file: BinaryIO, path: Path, size: int) -> None:
    """The length and JSON of a safetensors header: names, dtypes and shapes of all tensors."""
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    if _HEADER_LENGTH_BYTES + length > size:
        raise IdentityError(
            f"weight file {str(path)!r} is cut short: its header of {length} bytes does not fit "
            f"into its {size} bytes"
        )
    digest.update(struct.pack(">Q", length))
    while length:
        part = file.read(min(length, _READ_BYTES))
        if not part:
            raise IdentityError(f"weight file {str(path)!r} became shorter while it was read")
        digest.update(part)
        length -= len(part)


def _samples(size: int) -> list[tuple[int, int]]:
    """Offset and length of each sample of a file of ``size`` bytes."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    return [(last * index // (SAMPLES - 1), SAMPLE_BYTES) for index in range(SAMPLES)]
