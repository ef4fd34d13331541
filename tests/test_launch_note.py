# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xinference_xavier.launch_note import (
    ENVIRONMENT,
    LONGEST,
    LaunchNote,
    reported,
    write_peer,
    write_reason,
)


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch):
    note = LaunchNote()
    monkeypatch.setenv(ENVIRONMENT, note.path)
    yield note
    note.close()


def test_a_child_process_leaves_its_reason_with_the_launcher(note: LaunchNote) -> None:
    code = (
        "from xinference_xavier.launch_note import reported\n"
        "with reported():\n    raise ValueError('block of\\n192 KiB')"
    )
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=root)
    assert b"ValueError" in ended.stderr
    assert note.reason() == "block of 192 KiB"


def test_the_first_of_several_reasons_counts(note: LaunchNote) -> None:
    write_reason("the cause")
    write_reason("a consequence")
    assert note.reason() == "the cause"


def test_the_peers_address_is_no_reason_and_a_reason_no_address(note: LaunchNote) -> None:
    write_peer("10.0.0.1:7")
    assert note.reason() is None
    write_reason("peer 10.0.0.9:9 is not there")
    assert note.reason() == "peer 10.0.0.9:9 is not there"
    assert note.peer() == "10.0.0.1:7"


def test_the_last_of_several_addresses_counts(note: LaunchNote) -> None:
    assert note.peer() is None
    write_peer("10.0.0.1:7")
    write_peer("10.0.0.1:8")
    assert note.peer() == "10.0.0.1:8"


def test_an_address_is_found_after_a_long_reason(note: LaunchNote) -> None:
    write_reason("x" * (2 * LONGEST))
    write_peer("10.0.0.1:7")
    assert note.peer() == "10.0.0.1:7"


def test_a_good_start_leaves_no_reason(note: LaunchNote) -> None:
    with reported():
        pass
    assert note.reason() is None


def test_an_error_without_text_is_told_by_its_name(note: LaunchNote) -> None:
    with pytest.raises(KeyboardInterrupt), reported():
        raise KeyboardInterrupt
    assert note.reason() is None
    with pytest.raises(MemoryError), reported():
        raise MemoryError
    assert note.reason() == "MemoryError"


def test_a_long_reason_is_cut(note: LaunchNote) -> None:
    write_reason("x" * (2 * LONGEST))
    assert note.reason() == "x" * LONGEST


def test_without_a_launcher_the_error_is_only_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ValueError, match="as it was"), reported():
        raise ValueError("as it was")


def test_a_launcher_that_is_gone_is_no_error(note: LaunchNote) -> None:
    note.close()
    write_reason("nobody listens")
    assert note.reason() is None


def test_closing_twice_closes_one_descriptor(note: LaunchNote) -> None:
    note.close()
    other = os.memfd_create("other")
    note.close()
    os.fstat(other)
    os.close(other)
