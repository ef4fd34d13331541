# SPDX-License-Identifier: Apache-2.0
"""Servers beside the engines that an arm needs, as child processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from xinference_xavier.bench.engines import end_with_parent, wait_ended

END_S = 10.0


@contextlib.contextmanager
def helper_process(
    command: Sequence[str], log: Path, *, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the end of the block, with its children; what it says goes to ``log``.

    ``stdout`` may be ``subprocess.PIPE``, to read what it prints.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output if stdout is None else stdout,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        yield process
    finally:
        children = _children(process)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
        for child in wait_ended(children, END_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if process.stdout is not None:
            process.stdout.close()


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
