# SPDX-License-Identifier: Apache-2.0
"""What an engine and whoever launched it tell each other: why it did not start, where its peer is.

vLLM's engine runs in child processes, and when one of them fails its parent only learns "see the
root cause above". So the launcher opens a *note*, an anonymous file that its children find
through an environment variable, and a connector that refuses to start writes its reason there.
One that does start writes how to ask its peer, for a launcher that wants to close it while the
directory does not answer. The launcher gives the engine its group's secret there, because others
can read command lines, and environments find their way into logs. The note has no name in any file
system and ends with the launcher's process (R13). Each of its lines is a kind, a space and a text.

Plain vLLM has no such launcher: without the variable a reason is only raised, as it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

ENVIRONMENT: Final = "XINFERENCE_XAVIER_LAUNCH_NOTE"
"""Environment variable with the note's path, valid as long as the launcher lives."""

LONGEST: Final = 4096
"""Most bytes of a line's text; what is longer is cut."""

REASON: Final = "reason"
PEER: Final = "peer"
SECRET: Final = "secret"
"""Kinds of lines."""

logger = logging.getLogger(__name__)


class LaunchNote:
    """The launcher's end. Any thread; ``close()`` is idempotent."""

    def __init__(self, secret: str | None = None) -> None:
        """``secret`` is the group's, for the engine."""
        self.secret = secret
        self._fd: int | None = os.memfd_create("xinference-xavier-note", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        if secret is not None:
            os.write(self._fd, _line(SECRET, secret))

    def reason(self) -> str | None:
        """Return the first reason that was written, or None: what follows are consequences."""
        return next(iter(self._texts(REASON)), None)

    def peer(self) -> str | None:
        """Return the text about the engine's peer that was written last, or None."""
        return next(reversed(self._texts(PEER)), None)

    def _texts(self, kind: str) -> list[str]:
        """Return the texts of all lines of a kind, in the order in which they were written."""
        if self._fd is None:
            return []
        return _read(self._fd, kind)

    def close(self) -> None:
        """Forget the note."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_reason(reason: str) -> None:
    """Append ``reason`` to the launcher's note, where there is one. Never raises."""
    _append(REASON, reason)


def write_peer(contact: str) -> None:
    """Append how to ask the peer to the launcher's note, where there is one. Never raises."""
    _append(PEER, contact)


def secret() -> str | None:
    """Return the group's secret of the launcher's note; None where there is none.

    Raises OSError when there is a note that cannot be read.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return next(iter(_read(fd, SECRET)), None)
    finally:
        os.close(fd)


def _append(kind: str, text: str) -> None:
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("cannot write the launch note %s: %s", path, error)
        return
    with suppress(OSError):
        os.write(fd, _line(kind, text))
    os.close(fd)


def _line(kind: str, text: str) -> bytes:
    return kind.encode() + b" " + " ".join(text.split()).encode()[:LONGEST] + b"\n"


def _read(fd: int, kind: str) -> list[str]:
    """Return the texts of all lines of a kind, in the order in which they were written."""
    written = os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")
    lines = (line.partition(" ") for line in written.split("\n"))
    return [text for found, _, text in lines if found == kind]


@contextmanager
def reported() -> Iterator[None]:
    """Write the reason of any error that leaves the block to the note, and let it go on."""
    try:
        yield
    except Exception as error:
        write_reason(str(error) or type(error).__name__)
        raise
