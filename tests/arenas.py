# SPDX-License-Identifier: Apache-2.0
"""Whose memory a process has mapped."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path

from xinference_xavier.demo.leftovers import ARENA, File, files_of


def own_arenas(pid: int) -> set[File]:
    """Return the arenas that a process made: those of others it opens for reading only."""
    written = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            # The link's mode tells how the file was opened. A mapping keeps it open, too.
            if entry.lstat().st_mode & stat.S_IWUSR:
                written.add(entry.stat().st_ino)
    return {file for file in files_of([pid], ARENA) if file.inode in written}
