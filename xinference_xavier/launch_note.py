# SPDX-License-Identifier: Apache-2.0
"""What an engine tells whoever launched it: why it did not start, and where its peer is.

vLLM's engine runs in child processes, and when one of them fails its parent only learns "see the
root cause above". So the launcher opens a *note*, an anonymous file that its children find
through an environment variable, and a connector that refuses to start writes its reason there.
One that does start writes the address of its peer, for a launcher that wants to close it while
the directory does not answer. The note has no name in any file system and ends with the
launcher's process (R13). Each of its lines is a kind, a space and a text.

The engine must end with that process too, even with one that was killed: vLLM's engine process
does not notice, and would go on as a member of the group beside the replica that takes its place.

Plain vLLM has no such launcher: without the variable a reason is only raised, as it was, and
nothing is watched.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

ENVIRONMENT: Final = "XINFERENCE_XAVIER_LAUNCH_NOTE"
"""Environment variable with the note's path, valid as long as the launcher lives."""

LONGEST: Final = 4096
"""Most bytes of a line's text; what is longer is cut."""

REASON: Final = "reason"
PEER: Final = "peer"
"""Kinds of lines."""

END_AFTER_S: Final = 10.0
"""How long an engine that lost its launcher may take to end by itself, in seconds."""

logger = logging.getLogger(__name__)


class LaunchNote:
    """The launcher's end. Any thread; ``close()`` is idempotent."""

    def __init__(self) -> None:
        self._fd: int | None = os.memfd_create("xinference-xavier-note", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def reason(self) -> str | None:
        """Return the first reason that was written, or None: what follows are consequences."""
        return next(iter(self._texts(REASON)), None)

    def peer(self) -> str | None:
        """Return the address ("host:port") of the engine's peer that was written last, or None."""
        return next(reversed(self._texts(PEER)), None)

    def _texts(self, kind: str) -> list[str]:
        """Return the texts of all lines of a kind, in the order in which they were written."""
        if self._fd is None:
            return []
        written = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode("utf-8", "replace")
        lines = (line.partition(" ") for line in written.split("\n"))
        return [text for found, _, text in lines if found == kind]

    def close(self) -> None:
        """Forget the note."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_reason(reason: str) -> None:
    """Append ``reason`` to the launcher's note, where there is one. Never raises."""
    _append(REASON, reason)


def write_peer(address: str) -> None:
    """Append the peer's address to the launcher's note, where there is one. Never raises."""
    _append(PEER, address)


def _append(kind: str, text: str) -> None:
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return
    line = kind.encode() + b" " + " ".join(text.split()).encode()[:LONGEST] + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("cannot write the launch note %s: %s", path, error)
        return
    with suppress(OSError):
        os.write(fd, line)
    os.close(fd)


@contextmanager
def reported() -> Iterator[None]:
    """Write the reason of any error that leaves the block to the note, and let it go on."""
    try:
        yield
    except Exception as error:
        write_reason(str(error) or type(error).__name__)
        raise


def end_with_launcher() -> threading.Thread | None:
    """End this process soon after its launcher's, however that one ends. Any thread.

    Returns the watching thread, or None without a launcher: then nothing is watched. For the
    engine's process, whose own children end with it.
    """
    path = os.environ.get(ENVIRONMENT, "")
    parts = path.split("/")
    if parts[:2] != ["", "proc"] or not parts[2].isdecimal() or int(parts[2]) == os.getpid():
        return None
    launcher = int(parts[2])
    try:
        process = os.pidfd_open(launcher)
        # The number may be somebody else's by now; the note is not.
        os.stat(path)
    except OSError as error:
        logger.warning("cannot watch the launcher, process %d: %s", launcher, error)
        return None
    watcher = threading.Thread(
        target=_end_after, args=(launcher, process), name="xavier-launcher", daemon=True
    )
    watcher.start()
    return watcher


def _end_after(launcher: int, process: int) -> None:
    end = select.poll()
    end.register(process, select.POLLIN)
    end.poll()
    logger.warning("The launcher, process %d, has ended; so does this engine", launcher)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)
