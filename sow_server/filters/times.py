"""Times in filters: texts into microseconds since the epoch, and back, in UTC. Pure."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Final

FORM_CHARACTERS_MAX: Final = 1_000
"""A longer form of a time makes null: each of its directives becomes some characters."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# Every instance reads a text in the same way, so it is not left to the version of Python.
_TIME: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,18}))?)?(Z|z|[+-][0-9]{2}:?[0-9]{2})?)?",
)
_DIRECTIVE: Final = re.compile(r"%(.?)", re.DOTALL)


def date_micros(text: str) -> int | None:
    """The microseconds of `2030-01-31`, or of `2030-01-31T12:00:00.5+02:00`; without a zone it is UTC. Digits beyond
    microseconds are cut off. None for any other text, and for a time that the calendar does not have."""
    found = _TIME.fullmatch(text) if len(text) <= 60 else None
    if found is None:
        return None
    year, month, day, hour, minute, second = [int(part or 0) for part in found.groups()[:6]]
    micros = int((found[7] or "0").ljust(6, "0")[:6])
    zone = found[8] or "Z"
    offset = timedelta()
    if zone not in "Zz":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:])) * (-1 if zone[0] == "-" else 1)
    try:
        moment = datetime(year, month, day, hour, minute, second, micros, timezone(offset))
    except ValueError:
        return None
    return (moment - _EPOCH) // _MICROSECOND


def format_time(micros: int | float, form: str) -> str | None:
    """The time of some microseconds in UTC: %Y-%m-%d %H:%M:%S, %f (microseconds), %j (day of the year), %%. None for
    another directive, and for years before 1 and after 9999."""
    if len(form) > FORM_CHARACTERS_MAX or not abs(micros) < 4e17:
        return None
    try:
        moment = _EPOCH + timedelta(microseconds=int(micros // 1))
    except OverflowError:
        return None
    parts = {
        "Y": f"{moment.year:04}",
        "m": f"{moment.month:02}",
        "d": f"{moment.day:02}",
        "H": f"{moment.hour:02}",
        "M": f"{moment.minute:02}",
        "S": f"{moment.second:02}",
        "f": f"{moment.microsecond:06}",
        "j": f"{(moment.date() - date(moment.year, 1, 1)).days + 1:03}",
        "%": "%",
    }
    if any(letter not in parts for letter in _DIRECTIVE.findall(form)):
        return None
    return _DIRECTIVE.sub(lambda directive: parts[directive[1]], form)
