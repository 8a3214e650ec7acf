"""Durations are read and written as rule L1 says."""

from __future__ import annotations

import pytest

from sow.durations import DURATION_MICROS_MAX, DurationError, format_micros, parse_micros

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("0s", 0),
        ("0ns", 0),
        ("0h0m0s", 0),
        ("1us", 1),
        ("2µs", 2),
        ("2\u03bcs", 2),
        ("1ms", 1_000),
        ("30s", 30 * SECOND),
        ("1m", MINUTE),
        ("1h30m", 90 * MINUTE),
        ("1d", DAY),
        ("2w", 14 * DAY),
        ("1w1d1h1m1s1ms1us", 8 * DAY + HOUR + MINUTE + SECOND + 1_001),
        ("30m1h", 90 * MINUTE),
        ("1s1s", 2 * SECOND),
        ("1.5s", 1_500_000),
        (".5s", 500_000),
        ("1.s", SECOND),
        ("0.000001s", 1),
        ("72h3m0.5s", 72 * HOUR + 3 * MINUTE + 500_000),
        ("007s", 7 * SECOND),
        ("9223372036854775807us", DURATION_MICROS_MAX),
    ],
)
def test_a_duration_names_its_units(text: str, micros: int) -> None:
    assert parse_micros(text) == micros


@pytest.mark.parametrize(
    ("text", "micros"), [("1ns", 0), ("999ns", 0), ("1999ns", 1), ("1.9999999us", 1), ("0.3us", 0)]
)
def test_fractions_of_a_microsecond_are_cut_off(text: str, micros: int) -> None:
    assert parse_micros(text) == micros


def test_parts_are_summed_exactly_before_the_remainder_is_cut_off() -> None:
    assert parse_micros("500ns500ns") == 1
    assert parse_micros("0.1us0.9us") == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("30", "'30' misses a unit at position 2; write for example '30s'"),
        ("0", "misses a unit at position 1; write for example '0s'"),
        ("1h30", "'1h30' misses a unit at position 4"),
        ("-1s", "'-1s' is negative"),
        ("+1s", "'+1s' misses a number at position 0"),
        ("1h-30m", "misses a number at position 2"),
        (" 1s", "has a space at position 0; write it without spaces"),
        ("1s ", "has a space at position 2; write it without spaces"),
        ("1 s", "has a space at position 1; write it without spaces"),
        ("1h 30m", "has a space at position 2; write it without spaces"),
        ("s", "misses a number at position 0"),
        (".s", "misses a number at position 0"),
        ("1.2.3s", "misses a unit at position 3"),
        ("1y", "has the unknown unit 'y' at position 1; the units are ns us ms s m h d w"),
        ("1S", "unknown unit 'S'"),
        ("1sec", "unknown unit 'sec'"),
        ("1s;", "unknown unit 's;'"),
        ("1s!", "unknown unit 's!'"),
        ("1e3s", "unknown unit 'e'"),
        ("٣s", "misses a number at position 0"),
        ("never", "misses a number at position 0"),
        ("9223372036854775808us", "is too long"),
        ("9" * 90 + "w", "is too long"),
        ("1" * 5000 + "s", "5001 characters long"),
    ],
)
def test_an_invalid_duration_is_refused_with_its_position(text: str, fault: str) -> None:
    with pytest.raises(DurationError) as caught:
        parse_micros(text)
    assert fault in str(caught.value)


def test_milliseconds_are_written_with_their_unit_and_nothing_after_it() -> None:
    """RabbitMQ 4: its "60000" is "60000ms" here; trailing characters and negatives are refused."""
    assert parse_micros("60000ms") == MINUTE
    for text in ("60000", "60000ms;", "60000ms ", "-60000ms"):
        with pytest.raises(DurationError):
            parse_micros(text)


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0s"),
        (1, "1µs"),
        (2, "2µs"),
        (1_000, "1ms"),
        (1_500, "1.5ms"),
        (999_999, "999.999ms"),
        (SECOND, "1s"),
        (1_500_000, "1.5s"),
        (1_000_001, "1.000001s"),
        (30 * SECOND, "30s"),
        (MINUTE, "1m"),
        (HOUR, "1h"),
        (90 * MINUTE, "1h30m"),
        (72 * HOUR + 3 * MINUTE + 500_000, "3d3m0.5s"),
        (14 * DAY, "14d"),
        (DAY + SECOND, "1d1s"),
        (-1_500_000, "-1.5s"),
    ],
)
def test_a_duration_is_printed_with_the_units_that_are_not_zero(micros: int, text: str) -> None:
    assert format_micros(micros) == text
