# SPDX-License-Identifier: Apache-2.0
"""Engines end with the process that started them. Real processes, no engine."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from xinference_xavier.vllm.orphan import end_with_parent

PARENT = """
import ctypes, multiprocessing, signal, sys, threading
from xinference_xavier.vllm import orphan

def stuck(*_):
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock

def engine(kind):
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: None)
    if kind == "stuck":
        signal.signal(signal.SIGTERM, stuck)
    orphan.END_AFTER_S = 0.1
    if sys.argv[2] == "before":
        print(multiprocessing.current_process().pid, flush=True)
        multiprocessing.parent_process().join()
    orphan.end_with_parent()
    if sys.argv[2] == "after":
        print(multiprocessing.current_process().pid, flush=True)
    while True:
        threading.Event().wait(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    child = context.Process(target=engine, args=(sys.argv[3],))
    child.start()
    child.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("killed", ["before", "after"])
@pytest.mark.parametrize("kind", ["", "stubborn", "stuck"])
def test_an_engine_ends_with_a_parent_that_is_killed(
    tmp_path: Path, method: str, killed: str, kind: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), method, killed, kind],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    engine = os.pidfd_open(int(parent.stdout.readline()))
    ended = select.poll()
    ended.register(engine, select.POLLIN)
    assert ended.poll(0) == []
    parent.kill()
    parent.wait()
    assert ended.poll(20_000) != []
    os.close(engine)


def test_what_no_other_process_started_is_not_watched() -> None:
    assert end_with_parent() is None
