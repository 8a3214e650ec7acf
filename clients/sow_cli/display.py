"""Values for people: times, sizes, counts, and text that may hold anything.

Pure functions. The other formats carry exact values for machines, so brevity wins over precision here. Settings, and
values that are compared with them, are shown exactly, in the notation of the options.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from sow.durations import format_micros
from sow.sizes import format_bytes

# Control characters in data would move the cursor or colour the terminal of its reader.
_CONTROL_CODES: Final = (*range(0x20), *range(0x7F, 0xA0))
# Bidirectional overrides can make a line read as another one.
_BIDIRECTIONAL_CODES: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL: Final = {
    **{code: f"\\x{code:02x}" for code in _CONTROL_CODES},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    **{code: f"\\u{code:04x}" for code in _BIDIRECTIONAL_CODES},
}
# JSON's notation: a document stays the same document. Line ends and tabs belong to the formats.
_CONTROL_IN_FORMATS: Final = {
    code: f"\\u{code:04x}" for code in (*_CONTROL_CODES, *_BIDIRECTIONAL_CODES) if code not in (ord("\n"), ord("\t"))
}
NOT_SET: Final = "-"
"""Shown for a value that is not set or absent. `never` and `unlimited` are values, and are spelled out."""
UNKNOWN: Final = "unknown"
"""Shown for a value that the server does not remember."""
_TABLE_TEXT_MAX: Final = 2_000
_DAY_MICROS: Final = 86_400_000_000


def safe(text: str) -> str:
    """`text` on one line; characters that a terminal would act upon are escaped."""
    return text if text.isprintable() else text.translate(_CONTROL)


def safe_lines(text: str) -> str:
    """`text` line by line as it stands, each line safe."""
    return "\n".join([safe(line) for line in text.split("\n")])


def safe_output(data: bytes) -> bytes:
    """JSON or CSV for a terminal: characters that a terminal would act upon become `\\u001b` and the like, except line
    ends and tabs."""
    return data.decode("utf-8", "backslashreplace").translate(_CONTROL_IN_FORMATS).encode()


def safe_bytes(data: bytes, length_max: int = _TABLE_TEXT_MAX) -> str:
    """The beginning of `data` as text; bytes that are not UTF-8 or not printable are escaped."""
    text = safe(data[:length_max].decode("utf-8", "backslashreplace"))
    return text + "…" if len(data) > length_max else text


def duration(micros: int) -> str:
    """A length of time with about three digits: `850ms`, `12.3s`, `4m05s`, `3h20m`, `2d4h`. Not for parsing."""
    if micros < 1_000:
        return f"{micros}µs"
    if micros < 1_000_000:
        return f"{micros / 1_000:.3g}ms" if micros < 999_500 else "1s"
    seconds = micros / 1_000_000
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


def expires(expire_time_micros: int | None, now_micros: int, *, acts: bool = True) -> str:
    """`in 12.3s`, `12.3s ago`, or `never`; `never (off)` for a stamp that the topic does not act on."""
    if expire_time_micros is None:
        return "never"
    if not acts:
        return "never (off)"
    left = expire_time_micros - now_micros
    return f"in {duration(left)}" if left >= 0 else f"{duration(-left)} ago"


def expire_time(expire_time_micros: int | None, now_micros: int, *, acts: bool = True) -> str:
    """An expire time in full: `2030-03-17T17:46:40.123Z  (in 12.3s)`, or `never`."""
    if expire_time_micros is None:
        return "never"
    remark = expires(expire_time_micros, now_micros) if acts else "without effect: the topic has expiration disabled"
    return f"{instant(expire_time_micros)}  ({remark})"


def instant(micros: int) -> str:
    """A time of ISO 8601 in UTC to the millisecond, as options take it: `2030-03-17T17:46:40.123Z`. The raw number when
    the calendar has no such year."""
    try:
        time = datetime.fromtimestamp(micros // 1_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{micros}µs"
    # isoformat, because strftime costs ten times as much, and a table has a time in every row.
    return f"{time.replace(tzinfo=None).isoformat()}.{micros // 1_000 % 1_000:03}Z"


def short_instant(micros: int, now_micros: int) -> str:
    """A time in UTC: without the date if that is today's."""
    text = instant(micros)
    return text[11:] if micros // _DAY_MICROS == now_micros // _DAY_MICROS else text


def size(byte_count: int) -> str:
    """Bytes with a binary unit and about three digits: `512 B`, `1.4 MiB`."""
    if byte_count < 1_024:
        return f"{byte_count} B"
    amount = float(byte_count)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1_024
        if amount < 1_023.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1_024:.1f} TiB"


def exact_size(byte_count: int) -> str:
    """Bytes in the largest exact binary unit: `256MiB`, `1500B`, as a size option takes them."""
    return format_bytes(byte_count)


def exact_duration(length: timedelta) -> str:
    """A length of time to the microsecond, in the notation of options: `7d`, `1h30m`."""
    return format_micros(length // timedelta(microseconds=1))


def count(number: int) -> str:
    """A whole number in groups of three."""
    return f"{number:,}"


def counted(number: int, one: str) -> str:
    """A number of things: `1 topic`, `2,000 topics`."""
    return f"1 {one}" if number == 1 else f"{number:,} {one}s"


def records(number: int) -> str:
    """`1 record`, `2,000 records`."""
    return counted(number, "record")
