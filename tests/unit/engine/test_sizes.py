"""The notation of sizes (sizes [1], [2])."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow.sizes import SizeError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("0B", 0), ("1500B", 1500), ("64MiB", 64 * 2**20), ("1.5GiB", 3 * 2**29), ("10MB", 10_000_000)],
)
def test_a_size_names_its_unit_and_zero_needs_none(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "1", "00", "64", "64MiBs", "-1B", "1.3B", "MiB", "1e3B", "64 QiB", "1B\n"])
def test_an_invalid_size_is_refused_and_shown(text: str) -> None:
    with pytest.raises(SizeError) as refused:
        parse_bytes(text)
    assert f'size "{text}"' in str(refused.value)


@given(st.integers(0, 2**63))
def test_printed_sizes_are_exact(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size
