"""The notation of durations: text such as `1h30m` to and from whole microseconds (rule L1).

Owns the one grammar that the configuration file, the command and the clients share. Guarantees:

    [1]  `parse_micros` accepts only a text that names its unit. A bare number, a sign or a space is refused.
         Zero is `0s`.
    [2]  `parse_micros(format_micros(n)) == n` for every n from 0 to `DURATION_MICROS_MAX`.
    [3]  A sum is exact. The remainder below a microsecond is cut off once, from the whole.
"""

from __future__ import annotations

import re

DURATION_MICROS_MAX = (1 << 63) - 1
"""The longest duration, in microseconds: the largest int64 on the wire."""

_TEXT_LENGTH_MAX = 100  # Bounds the work and the length of the error; no sensible duration comes near it.

_NANOS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek mu, which keyboards and Go also produce
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60 * 1_000_000_000,
    "h": 3_600 * 1_000_000_000,
    "d": 86_400 * 1_000_000_000,
    "w": 7 * 86_400 * 1_000_000_000,
}
_UNITS = "ns us ms s m h d w"
# [0-9], not \d, which also accepts digits of other scripts.
_NUMBER = re.compile(r"([0-9]*)(?:\.([0-9]*))?")
_UNIT = re.compile(r"[^0-9.\s+-]*")


class DurationError(ValueError):
    """The text is not a duration; the message names the text and the position of the fault."""


def parse_micros(text: str) -> int:
    """Return the microseconds that `text` names, such as `30s`, `1h30m`, `1.5s`, `2w` (rule L1).

    Units: ns, us (or µs), ms, s, m, h, d, w, in any order and also repeated. Raises `DurationError`.
    """
    if len(text) > _TEXT_LENGTH_MAX:
        raise DurationError(
            f"duration {text[:20]!r}… is {len(text)} characters long, at most {_TEXT_LENGTH_MAX} are read"
        )
    if not text:
        raise DurationError("duration '' is empty; write for example '30s', and zero as '0s'")
    if text[0] == "-":
        raise DurationError(f"duration {text!r} is negative")
    # Sum of whole / 10**scale nanoseconds, kept as one integer over a common power of ten [3].
    whole, scale, position = 0, 0, 0
    while position < len(text):
        number = _NUMBER.match(text, position)
        assert number is not None, "every part of the pattern is optional"
        digits, fraction = number[1], number[2] or ""
        if not digits and not fraction:
            raise _error(text, position, "misses a number")
        position = number.end()
        unit = _UNIT.match(text, position)
        assert unit is not None, "the pattern may match nothing"
        nanos = _NANOS.get(unit[0])
        if nanos is None:
            if unit[0]:
                raise _error(text, position, f"has the unknown unit {unit[0]!r}", f"; the units are {_UNITS}")
            hint = f"; write for example '{text}s'" if position == len(text) else ""
            raise _error(text, position, "misses a unit", hint)
        position = unit.end()
        if len(fraction) > scale:
            whole *= 10 ** (len(fraction) - scale)
            scale = len(fraction)
        whole += int(digits + fraction) * nanos * 10 ** (scale - len(fraction))
    micros: int = whole // (1_000 * 10**scale)  # typeshed types int ** int as Any: the exponent might be negative
    if micros > DURATION_MICROS_MAX:
        raise DurationError(f"duration {text!r} is too long: more than {DURATION_MICROS_MAX} microseconds")
    return micros


def format_micros(micros: int) -> str:
    """Return `micros` microseconds with all units that are not zero: `7d`, `1h30m`, `3d3m0.5s`, `1.5ms`, `2µs`, `0s`
    (rule L1).

    A negative duration, such as a difference of clocks, gets a leading `-`. Rule L1 refuses it on input.
    """
    if micros < 0:
        return "-" + format_micros(-micros)
    if micros == 0:
        return "0s"
    if micros < 1_000:
        return f"{micros}µs"
    if micros < 1_000_000:
        return f"{_decimal(micros, 1_000)}ms"
    minutes, rest = divmod(micros, 60_000_000)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{count}{unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "m")) if count]
    return "".join([*parts, f"{_decimal(rest, 1_000_000)}s"] if rest else parts)


def _decimal(count: int, unit: int) -> str:
    whole, rest = divmod(count, unit)
    if rest == 0:
        return str(whole)
    return f"{whole}.{rest:0{len(str(unit)) - 1}d}".rstrip("0")


def _error(text: str, position: int, fault: str, hint: str = "") -> DurationError:
    if text[position : position + 1].isspace():
        fault, hint = "has a space", "; write it without spaces"
    return DurationError(f"duration {text!r} {fault} at position {position}{hint}")
