"""The bounds of what instances tell each other, and of what they store of each other.

One definition for two places: the checks of messages (`sow_replication.checks`), and the rows that are read at the
start (`engine/replicas`). No bound is narrower than what an instance of any release may send: a link between two sound
instances must never break here. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from sow_peering import InstanceIdentity

ID_CHARACTERS_MAX: Final = 100
"""The bound of the name, the id, the epoch and the cluster of an instance."""
PATTERN_BYTES_MAX: Final = 64 << 10
"""The bound of the pattern of a link's topics. RE2 bounds the memory that such a pattern may need."""
FILTER_BYTES_MAX: Final = 64 << 10
"""The bound of the filter of a link, as of every filter."""
NUMBER_MAX: Final = 2**53
"""The bound of sequences, and of times in microseconds (up to the year 2255): programs that read JSON keep these
exactly."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def text_fault(text: str, bytes_max: int, *, empty: bool = False) -> str:
    """The fault of a name, an id or a pattern; empty: it has none. `empty`: whether it may be empty."""
    if not text:
        return "" if empty else "is empty"
    if len(text) > bytes_max or len(text.encode()) > bytes_max:
        return f"is longer than {bytes_max} bytes"
    return "has a control character" if _CONTROL.search(text) else ""


def number_fault(number: int, low: int = 0, high: int = NUMBER_MAX) -> str:
    """The fault of a number; empty: it has none."""
    return "" if low <= number <= high else f"{number} is not between {low} and {high}"


def identity_fault(identity: InstanceIdentity) -> str:
    """The fault of an identity, with the name of the field; empty: it has none."""
    for field, text in zip(InstanceIdentity._fields, identity, strict=True):
        if fault := text_fault(text, ID_CHARACTERS_MAX):
            return f"{field} {fault}"
    return ""
