# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.sizes import (
    MAX_BYTES,
    Size,
    SizeError,
    format_size,
    parse_size,
    slot_size,
)

OPTION = "xavier_gpu_cache_bytes"


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (268435456, 268435456),
        (1e9, 10**9),
        ("0", 0),
        ("268435456", 268435456),
        ("256MiB", 256 * 2**20),
        ("512 mib", 512 * 2**20),
        ("  1 GiB ", 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1 B", 1),
        (".5GiB", 2**29),
        ("2.tb", 2 * 10**12),
        ("1TiB", 2**40),
        ("+1MB", 10**6),
        ("0.1 KiB", 102),
        ("1.4 GiB", 1_503_238_553),
        ("1.000001MB", 1_000_001),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_sizes_in_bytes_are_exact(value: object, nbytes: int) -> None:
    assert parse_size(value, option=OPTION) == Size(bytes=nbytes)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "is not a size"),
        (None, "is not a size"),
        ([1], "is not a size"),
        ("", "is not a size"),
        ("MiB", "is not a size"),
        ("12 34", "is not a size"),
        ("1e9", "is not a size"),
        ("1_000", "is not a size"),
        ("0x10", "is not a size"),
        ("٣ MiB", "is not a size"),
        ("nan", "is not a size"),
        ("9" * 100, "is not a size"),
        (-1, "is negative"),
        ("-1 MiB", "is negative"),
        (float("nan"), "is not a finite number"),
        (float("inf"), "is not a finite number"),
        (0.5, "has a fraction of a byte"),
        ("1.5", "has a fraction of a byte"),
        ("1.5 B", "has a fraction of a byte"),
        ("1 QB", "has the unknown unit 'QB'"),
        ("1 M", "has the unknown unit 'M'"),
        ("101%", "is outside 0% to 100%"),
        ("-1%", "is outside 0% to 100%"),
        (MAX_BYTES + 1, f"is more than the largest size, {MAX_BYTES} bytes; give"),
        ("99999999 TiB", "is more than the largest size"),
    ],
)
def test_bad_sizes_are_refused_with_value_and_option(value: object, problem: str) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(value, option=OPTION)
    message = str(caught.value)
    assert message.startswith(f"{OPTION}={value!r} {problem}")
    assert "MiB" in message


@pytest.mark.parametrize(
    ("text", "total", "nbytes"),
    [("10%", 1000, 100), ("12.5 %", 1000, 125), ("0%", 1000, 0), ("100%", 7, 7), ("33%", 10, 3)],
)
def test_percentages_are_shares_rounded_down(text: str, total: int, nbytes: int) -> None:
    assert parse_size(text, option=OPTION).resolve(total) == nbytes


def test_a_size_in_bytes_does_not_depend_on_the_total() -> None:
    assert Size(bytes=5).resolve(1) == 5


@pytest.mark.parametrize("fields", [{}, {"bytes": 1, "percent": 1.0}])
def test_a_size_is_one_of_bytes_and_percent(fields: dict[str, float]) -> None:
    with pytest.raises(SizeError):
        Size(**fields)  # type: ignore[arg-type]  # wrong on purpose


@given(st.integers(0, MAX_BYTES).map(lambda n: Size(bytes=n)))
def test_plain_bytes_read_back_unchanged(size: Size) -> None:
    assert parse_size(size.to_plain(), option=OPTION) == size


@given(st.integers(0, 100_000).map(lambda n: Size(percent=n / 1000)))
def test_plain_percentages_read_back_unchanged(size: Size) -> None:
    assert parse_size(size.to_plain(), option=OPTION) == size


@given(st.integers(0, 2**60), st.integers(0, 100))
def test_a_share_is_never_more_than_its_total(total: int, percent: int) -> None:
    assert 0 <= Size(percent=float(percent)).resolve(total) <= total


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (196608, "192 KiB"),
        (256 * 2**20, "256 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (1_500_000_000, "1.40 GiB"),
        (3 * 2**40, "3 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
    assert str(Size(bytes=nbytes)) == text


@given(st.integers(0, 2**55))
def test_a_shown_size_is_within_a_percent(nbytes: int) -> None:
    shown = parse_size(format_size(nbytes), option=OPTION).resolve(0)
    assert abs(shown - nbytes) <= nbytes / 100


@given(st.integers(1, 2**40))
def test_slots_are_the_smallest_aligned_size_that_holds_a_block(block_bytes: int) -> None:
    slot = slot_size(block_bytes)
    assert slot % 64 == 0
    assert 0 <= slot - block_bytes < 64
