# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them: bytes, "256MiB", "1.5 GB", "10%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

MAX_BYTES: Final = 2**63 - 1
"""The largest size: what an int64 holds."""

SLOT_ALIGNMENT: Final = 64
"""Slots of a tier start at multiples of this many bytes."""

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_UNITS: Final[dict[str, int]] = {
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)},
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)},
}
_UNIT_NAMES: Final = ", ".join((*_DECIMAL, *_BINARY))
_PATTERN: Final = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*(?P<unit>[^\W\d_]+|%)?"
)
# Longer than any number that fits; keeps an absurd string out of big-number arithmetic.
_MAX_TEXT: Final = 64


class SizeError(ValueError):
    """A value that is no size. The message names the option, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share of some memory that is known only later.

    Exactly one of the two is set: ``bytes`` (0 to :data:`MAX_BYTES`) or ``percent`` (0 to 100).
    """

    bytes: int | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.percent is None):
            raise SizeError("a Size is either a number of bytes or a percentage")

    def resolve(self, total: int) -> int:
        """Return the size in bytes, where ``total`` (bytes) is what a percentage is a share of."""
        if self.bytes is not None:
            return self.bytes
        return int(total * Fraction(str(self.percent)) / 100)

    def __str__(self) -> str:
        """Return the size for people: ``256 MiB`` or ``10%``."""
        if self.bytes is not None:
            return format_size(self.bytes)
        return f"{_plain(self.percent)}%"

    def to_plain(self) -> int | str:
        """Return what :func:`parse_size` reads back unchanged: bytes, or ``"10%"``."""
        return self.bytes if self.bytes is not None else str(self)


class _Problem(ValueError):
    """What is wrong with a value; :func:`parse_size` makes the whole message of it."""


def parse_size(value: object, *, option: str, percent: bool = True) -> Size:
    """Read a size from an int (bytes) or a string; ``option`` is named in the error.

    Units are case-insensitive: B, kB, MB, GB, TB are powers of 1000 and KiB, MiB, GiB, TiB powers
    of 1024. A fraction of a larger unit is rounded down to whole bytes ("1.4 GiB", as errors show
    sizes); a fraction of a byte is refused. ``"10%"`` is a share, resolved later; without
    ``percent`` it is refused. Raises :class:`SizeError`.
    """
    try:
        return _parsed(value, percent)
    except _Problem as problem:
        units, example = _UNIT_NAMES, '"256MiB" or "1.5 GB"'
        if percent:
            units, example = f"{units}, %", '"256MiB", "1.5 GB" or "10%"'
        raise SizeError(
            f"{option}={value!r} {problem}; give whole bytes of 0 or more, or a number with a "
            f"unit ({units}), such as 268435456, {example}"
        ) from None


def _parsed(value: object, percent: bool) -> Size:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Problem("is not a size")
    if isinstance(value, str):
        return _parse_text(value.strip(), percent)
    if not math.isfinite(value):
        raise _Problem("is not a finite number of bytes")
    # Command lines turn "1e9" into a float: whole ones are as good as ints.
    if value != int(value):
        raise _Problem("has a fraction of a byte")
    return _checked(int(value))


def _parse_text(text: str, percent: bool) -> Size:
    match = _PATTERN.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise _Problem("is not a size")
    number, unit = Fraction(match["number"]), match["unit"] or "B"
    if unit == "%":
        if not percent:
            raise _Problem("is a share of some memory, and bytes are needed here")
        if not 0 <= number <= 100:
            raise _Problem("is outside 0% to 100%")
        return Size(percent=float(number))
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise _Problem(f"has the unknown unit {unit!r}")
    if scale == 1 and number.denominator != 1:
        raise _Problem("has a fraction of a byte")
    return _checked(math.floor(number * scale))


def _checked(nbytes: int) -> Size:
    if nbytes < 0:
        raise _Problem("is negative")
    if nbytes > MAX_BYTES:
        raise _Problem(f"is more than the largest size, {MAX_BYTES} bytes")
    return Size(bytes=nbytes)


def slot_size(block_bytes: int) -> int:
    """Return the bytes of a slot that holds a block: ``block_bytes`` rounded up."""
    return -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def format_size(n: int) -> str:
    """Return ``n`` bytes (0 or more) for people, in binary units: ``256 MiB``, ``1.40 GiB``."""
    unit, scale = "B", 1
    for power, name in enumerate(_BINARY, start=1):
        # From 1023.995 of the smaller unit on, two decimals would show 1024.00.
        if n * 200 < 1024**power * 200 - 1024 ** (power - 1):
            break
        unit, scale = name, 1024**power
    if n % scale == 0:
        return f"{n // scale} {unit}"
    return f"{n / scale:.2f} {unit}"


def _plain(number: float | None) -> str:
    """Return a float without exponent or trailing zeros."""
    return f"{number:.12f}".rstrip("0").rstrip(".")
