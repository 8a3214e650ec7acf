"""The notation of sizes: text such as `64MiB` to and from whole bytes.

Owns the one grammar that the configuration file, the command and the clients share. Guarantees:

    [1]  `parse_bytes` accepts only a text that names its unit. A bare number is refused, except `0`.
    [2]  `parse_bytes(format_bytes(n)) == n` for every n from 0 on: printed sizes are exact, never rounded.
"""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]{1,18}))? *([A-Za-z]+)")
_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_KNOWN = "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"


class SizeError(ValueError):
    """The text is not a size; the message names the text and its fault."""


def parse_bytes(text: str) -> int:
    """The bytes of a size such as `64MiB`, `1.5GiB`, `10MB`, `0B`. Raises SizeError."""
    if text == "0":
        return 0
    match = _SIZE.fullmatch(text)
    if match is None or len(text) > 50:
        raise SizeError(f'size "{text[:50]}" is not a number with a unit ({_KNOWN}), such as "64MiB"')
    unit = _UNITS.get(match[3])
    if unit is None:
        raise SizeError(f'size "{text}" has the unknown unit {match[3]!r} (known: {_KNOWN})')
    fraction = match[2] or ""
    scale: int = 10 ** len(fraction)
    size, rest = divmod(int(match[1] + fraction) * unit, scale)
    if rest:
        raise SizeError(f'size "{text}" is not a whole number of bytes')
    return size


def format_bytes(size: int) -> str:
    """A size with the largest binary unit that divides it: `64MiB`, `1000B`, `0B`."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[name] == 0:
            return f"{size // _UNITS[name]}{name}"
    return f"{size}B"
