# SPDX-License-Identifier: Apache-2.0
"""The compiled copy: what it moves and refuses, and the fences that generations need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kvcache import Cache, array, heads_first

from xinference_xavier.store import device as device_module
from xinference_xavier.store import streaming
from xinference_xavier.store.streaming import LINE, Pieces, host_machine, program, stream, streamer

ROWS, COUNT = 5, 3


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Let the copy be compiled again."""
    streamer.cache_clear()
    yield
    streamer.cache_clear()


def memory(seed: int, nbytes: int = 2 * LINE) -> torch.Tensor:
    """Return uint8 ``[ROWS, COUNT, nbytes]``: torch aligns what it allocates to cache lines."""
    values = np.random.default_rng(seed).integers(0, 256, (ROWS, COUNT, nbytes), dtype=np.uint8)
    return torch.empty(values.shape, dtype=torch.uint8).copy_(torch.from_numpy(values))


def pieces(data: torch.Tensor) -> Pieces:
    return Pieces(data.data_ptr(), data.stride(0), data.stride(1), len(data))


def copy(target: Pieces, to: np.ndarray, source: Pieces, at: np.ndarray, nbytes: int) -> bool:
    return stream(target, to, source, at, count=COUNT, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", [LINE, 2 * LINE, 64 * LINE])
def test_the_given_rows_are_copied_and_nothing_else(nbytes: int) -> None:
    source, target = memory(1, nbytes), memory(2, nbytes)
    expected, before = target.clone(), source.clone()
    expected[[4, 0, 2]] = source[[1, 1, 3]]
    assert copy(pieces(target), array(4, 0, 2), pieces(source), array(1, 1, 3), nbytes)
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def test_pieces_may_lie_in_descending_order() -> None:
    source, target = memory(1), memory(2)
    last = Pieces(target[:, -1].data_ptr(), target.stride(0), -target.stride(1), ROWS)
    assert copy(last, array(3), pieces(source), array(0), 2 * LINE)
    assert torch.equal(target[3], source[0].flip(0))


@pytest.mark.parametrize(("to", "at"), [(ROWS, 0), (0, ROWS), (-1, 0), (0, -1)])
def test_a_row_that_does_not_exist_is_refused_before_anything_is_written(to: int, at: int) -> None:
    source, target = memory(1), memory(2)
    before = target.clone()
    with pytest.raises(IndexError, match="not all of 2 rows exist"):
        copy(pieces(target), array(1, to), pieces(source), array(1, at), 2 * LINE)
    assert torch.equal(target, before)


def test_lists_of_different_lengths_are_refused() -> None:
    data = memory(1)
    with pytest.raises(ValueError, match="1 rows to 2"):
        copy(pieces(data), array(1, 2), pieces(data), array(1), 2 * LINE)


@pytest.mark.parametrize("part", ["start", "row", "pitch"])
@pytest.mark.parametrize("off", [8, 32])
def test_parts_of_cache_lines_are_left_to_others(part: str, off: int) -> None:
    source, target = memory(1), memory(2)
    before = target.clone()
    odd = pieces(target)
    odd = odd._replace(**{part: getattr(odd, part) + off})
    assert not copy(odd, array(1), pieces(source), array(0), LINE)
    assert not copy(pieces(target), array(1), pieces(source), array(0), LINE + off)
    assert torch.equal(target, before)


def test_all_stores_pass_the_caches_between_two_fences() -> None:
    """Without the first fence a reader could see new bytes under the old generation, without the
    second one the new generation over old bytes."""
    code = [line.split() for line in host_machine().emit_assembly(program()).splitlines()]
    names = [words[0] for words in code if words and words[0][0].isalpha()]
    first, last = names.index("sfence"), len(names) - 1 - names[::-1].index("sfence")
    assert names.count("sfence") == 2
    stores = [at for at, name in enumerate(names) if "movnt" in name]
    assert stores
    assert first < stores[0]
    assert stores[-1] < last
    assert not [name for name in names[first:last] if name in ("ret", "retq", "call", "callq")]


def test_blocks_are_copied_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(heads_first()).randomize(1)
    data = torch.zeros((4, cache.layout.slot_bytes), dtype=torch.uint8)
    monkeypatch.setattr(device_module, "runs", None)  # which the other way needs
    cache.device.gather(array(5, 2), data, array(0, 3))
    cache.device.move(data, array(3), data, array(1))
    cache.device.scatter(data, array(1), array(6))
    assert cache.block(6) == cache.block(2)


@pytest.mark.usefixtures("forgotten")
def test_without_llvmlite_numpy_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert streamer() is None
    assert "copies with numpy" in caplog.text
    cache = Cache(heads_first()).randomize(1)
    data = torch.zeros((4, cache.layout.slot_bytes), dtype=torch.uint8)
    cache.device.gather(array(5, 2), data, array(0, 3))
    cache.device.move(data, array(3), data, array(1))
    cache.device.scatter(data, array(1), array(6))
    assert cache.block(6) == cache.block(2)


def test_a_process_that_may_not_make_code_copies_with_numpy() -> None:
    refuse, refuse_exec_gain = 65, 1  # prctl: PR_SET_MDWE
    program = f"""
import ctypes, sys
from xinference_xavier.store.streaming import streamer
if ctypes.CDLL(None).prctl({refuse}, {refuse_exec_gain}, 0, 0, 0):
    sys.exit(77)
assert streamer() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel cannot refuse a process to make code")
    assert done.returncode == 0, done.stderr
    assert "copies with numpy" in done.stderr


@pytest.mark.usefixtures("forgotten")
def test_another_cpu_copies_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.platform, "machine", lambda: "aarch64")
    data = memory(1)
    assert not copy(pieces(data), array(1), pieces(data), array(0), 2 * LINE)
