# SPDX-License-Identifier: Apache-2.0
"""Where a replica's group secret comes from.

In Xinference from whoever launched the engine (see ``launch_note``), with plain vLLM from the
environment: the secret itself, or a file with it. Not from an option: vLLM logs its arguments, and
everyone on a host reads command lines.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

from xinference_xavier import launch_note
from xinference_xavier.options import OptionError

VARIABLE: Final = "XINFERENCE_XAVIER_SECRET"
FILE_VARIABLE: Final = "XINFERENCE_XAVIER_SECRET_FILE"

SHORTEST: Final = 16
LONGEST: Final = 1024
"""Characters of a secret; what is shorter can be guessed."""


def group_secret(environment: Mapping[str, str]) -> str | None:
    """Return the secret that this replica shares with its group, or None where nobody gave one.

    Raises :class:`OptionError` naming the variable for a secret that cannot be used.
    """
    try:
        launched = launch_note.secret()
    except OSError as error:
        raise OptionError(
            f"the group's secret cannot be read from the launcher's note ({error}): the engine "
            "must run on the launcher's host, as its user"
        ) from error
    return launched or environment_secret(environment)


def environment_secret(environment: Mapping[str, str]) -> str | None:
    """Return the secret of these variables, or None. Raises as :func:`group_secret`."""
    given, path = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if given is not None and path is not None:
        raise OptionError(f"{VARIABLE} and {FILE_VARIABLE} are both set; leave one of them out")
    if path is not None:
        return _checked(_read(path), f"the file of {FILE_VARIABLE}={path}")
    return None if given is None else _checked(given, VARIABLE)


def _checked(value: str, where: str) -> str:
    secret = value.strip()
    if not SHORTEST <= len(secret) <= LONGEST or not secret.isprintable():
        # Its length only: this text goes to the log.
        raise OptionError(
            f"{where} holds {len(secret)} characters; a secret has {SHORTEST} to {LONGEST}, all "
            "printable (openssl rand -hex 32 makes one)"
        )
    return secret


def _read(path: str) -> str:
    try:
        # Not to wait for who writes into a pipe; checked and read as one file, whatever the path
        # names a moment later.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(f"{FILE_VARIABLE}={path} is no regular file")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise OptionError(
                    f"{FILE_VARIABLE}={path} has mode {stat.S_IMODE(status.st_mode):04o}: its "
                    "group or others may use it; chmod 600 it"
                )
            return file.read(4 * LONGEST + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(f"{FILE_VARIABLE}={path} cannot be read: {reason}") from None
