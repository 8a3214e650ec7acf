"""Durations round-trip, add up, and never fail in any other way than by `DurationError`."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sow.durations import DURATION_MICROS_MAX, DurationError, format_micros, parse_micros

_MICROS = {"us": 1, "µs": 1, "ms": 1_000, "s": 10**6, "m": 60 * 10**6, "h": 3_600 * 10**6, "d": 86_400 * 10**6}


@given(st.integers(0, DURATION_MICROS_MAX))
@example(0)
@example(DURATION_MICROS_MAX)
def test_printed_durations_read_back_as_the_same(micros: int) -> None:
    assert parse_micros(format_micros(micros)) == micros


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(_MICROS))), min_size=1, max_size=8))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in parts)
    assert parse_micros(text) == sum(count * _MICROS[unit] for count, unit in parts)


@given(st.integers(0, 10**6), st.text("0123456789", min_size=1, max_size=20), st.sampled_from(sorted(_MICROS)))
def test_a_fraction_is_exact_to_the_microsecond_and_rounds_down(whole: int, fraction: str, unit: str) -> None:
    exact = int(f"{whole}{fraction}") * _MICROS[unit] // 10 ** len(fraction)
    assert parse_micros(f"{whole}.{fraction}{unit}") == exact


@given(st.text(max_size=120) | st.text("0123456789.nuµmshdw-+ ", max_size=120))
def test_any_text_is_a_duration_or_a_duration_error(text: str) -> None:
    try:
        micros = parse_micros(text)
    except DurationError:
        return
    assert 0 <= micros <= DURATION_MICROS_MAX


@given(st.text("0123456789", min_size=1, max_size=30))
def test_a_bare_number_is_always_refused(text: str) -> None:
    with pytest.raises(DurationError, match="misses a unit"):
        parse_micros(text)
