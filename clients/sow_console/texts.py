"""Values for people: times, sizes, counts. Pure; the JSON twin of each page has the exact values."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
    "us": timedelta(microseconds=1),
    "µs": timedelta(microseconds=1),
}
_LENGTH_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|µs|d|h|m|s)")
_MICROSECOND: Final = timedelta(microseconds=1)


def micros(moment: datetime) -> int:
    """Microseconds since the epoch."""
    return (moment - EPOCH) // _MICROSECOND


def count(number: float) -> str:
    """`1,234,567`."""
    return f"{number:,.0f}"


def rate(per_second: float) -> str:
    """`0`, `0.4/s`, `1,200/s`."""
    if not per_second:
        return "0"
    return f"{per_second:.1f}/s" if per_second < 9.95 else f"{per_second:,.0f}/s"


def size(byte_count: int) -> str:
    """`512 B`, `1.4 MiB`."""
    if byte_count < 1_024:
        return f"{byte_count} B"
    amount = float(byte_count)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1_024
        if amount < 1_023.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1_024:.1f} TiB"


def duration(length: timedelta) -> str:
    """A length of time with two or three digits: `0`, `3ms`, `12.3s`, `4m05s`, `3h20m`, `2d4h`."""
    if length < timedelta(0):
        return "-" + duration(-length)
    seconds = length.total_seconds()
    if not seconds:
        return "0"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{whole_seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h"


def length(text: str) -> timedelta | None:
    """The length of time that the server writes so, such as `1h30m` or `1.5s`; None: it is none."""
    parts = _LENGTH_PART.findall(text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        return None
    return sum((float(number) * _UNITS[unit] for number, unit in parts), timedelta(0))


def exact(moment: datetime) -> str:
    """`2026-11-24 16:12:41.123456Z`."""
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(' ', 'microseconds')}Z"


def relative(moment: datetime, now: datetime) -> str:
    """`12.3s ago`, `in 4m05s`."""
    left = moment - now
    if abs(left) < timedelta(milliseconds=1):
        return "now"
    return f"in {duration(left)}" if left > timedelta(0) else f"{duration(-left)} ago"


def scalar(value: object) -> str:
    """A value of a result: a number exactly, unless it has more than 24 characters."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "true", False: "false"}[value]
    if isinstance(value, int):
        shown = f"{value:,}"
        return shown if len(shown) <= 24 else f"{Decimal(value):.5e}"
    return f"{value:,}" if isinstance(value, float) else str(value)
