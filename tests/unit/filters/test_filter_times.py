"""DATE_MICROS and FORMAT_TIME (docs/filters.md)."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta, timezone

import pytest

from sow_server.filters.times import date_micros, format_time

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros_of(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970-01-01", EPOCH),
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31T12:34", datetime(2030, 1, 31, 12, 34, tzinfo=UTC)),
        ("2030-01-31 12:34:56.5Z", datetime(2030, 1, 31, 12, 34, 56, 500_000, tzinfo=UTC)),
        ("2030-01-31T12:34:56,123456789z", datetime(2030, 1, 31, 12, 34, 56, 123_456, tzinfo=UTC)),
        ("2030-01-31T12:00:00+02:00", datetime(2030, 1, 31, 10, tzinfo=UTC)),
        ("2030-01-31T12:00:00-0530", datetime(2030, 1, 31, 17, 30, tzinfo=UTC)),
        ("0001-01-01T00:00:00+23:59", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=23, minutes=59)))),
        ("1969-12-31T23:59:59.999999", EPOCH - timedelta(microseconds=1)),
    ],
)
def test_a_time_in_a_text_has_its_microseconds(text: str, moment: datetime) -> None:
    assert date_micros(text) == micros_of(moment)


@pytest.mark.parametrize(
    "text",
    ["", "x", "2030", "2030-1-1", "2030-02-30", "0000-01-01", "2030-01-31T", "2030-01-31T24:00", "2030-01-31T12:00:60",
     " 2030-01-31", "2030-01-31\n", "2030-01-31T12:00+24:00", "\uff12030-01-31", "2030-01-31T12:00:00." + "1" * 99],
)  # fmt: skip
def test_any_other_text_is_null(text: str) -> None:
    assert date_micros(text) is None


def test_a_time_becomes_a_text_and_is_read_again() -> None:
    for _ in range(500):
        micros = random.randrange(
            micros_of(datetime(1, 1, 1, tzinfo=UTC)), micros_of(datetime(9999, 12, 31, tzinfo=UTC))
        )
        text = format_time(micros, "%Y-%m-%dT%H:%M:%S.%fZ")
        assert text is not None
        assert date_micros(text) == micros


@pytest.mark.parametrize(
    ("micros", "form", "text"),
    [
        (0, "%Y-%m-%d %H:%M:%S.%f %j %%", "1970-01-01 00:00:00.000000 001 %"),
        (-1, "%Y-%m-%d", "1969-12-31"),
        (-0.5, "%Y", "1969"),
        (951_782_400_000_000.9, "%m/%d", "02/29"),
        (0, "", ""),
        (0, "%", None),
        (0, "%Q", None),
        (0, "%Y" * 501, None),
        (10**18, "%Y", None),
        (-(10**18), "%Y", None),
        (float("inf"), "%Y", None),
        (3 * 10**17, "%Y", None),
    ],
)
def test_the_form_of_a_time(micros: float, form: str, text: str | None) -> None:
    assert format_time(micros, form) == text
