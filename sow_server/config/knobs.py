"""Every key of the configuration file, from the fields of its sections (sections [1])."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sow.durations import DURATION_MICROS_MAX
from sow_server.config.kinds import Count, Duration, MayBeAbsent, Size, UnlessWord, ValueKind
from sow_server.config.sections import SECTIONS


@dataclass(frozen=True, slots=True)
class Knob:
    """One key of the file: its table, the field it sets, and the default and bounds for the documentation.

    `default` is TOML; it is "" where there is no default, or where it depends on other settings. `bounds` are the
    minimum and the maximum; they are "" where the kind has none.
    """

    table: str
    key: str
    field: str
    kind: ValueKind[object]
    default: str
    bounds: str


def knobs() -> Iterator[Knob]:
    """Every key that a file may have, table by table."""
    for table, section in SECTIONS:
        yield from knobs_of(table, section)


_knobs_of: Final[dict[tuple[str, type], tuple[Knob, ...]]] = {}
"""The results of `knobs_of`: a start asks for the same tables again and again."""


def knobs_of(table: str, section: type) -> tuple[Knob, ...]:
    """The keys of one table."""
    if (table, section) not in _knobs_of:
        _knobs_of[table, section] = tuple(_described(table, section))
    return _knobs_of[table, section]


def _described(table: str, section: type) -> Iterator[Knob]:
    for entry in dataclasses.fields(section):
        kind: ValueKind[object] = entry.metadata["kind"]
        key: str = entry.metadata.get("key") or re.sub("_(micros|bytes)$", "", entry.name)
        none = entry.default is dataclasses.MISSING or (entry.default is None and not isinstance(kind, UnlessWord))
        own = kind.kind if isinstance(kind, (MayBeAbsent, UnlessWord)) else kind
        bounds = ""
        if isinstance(own, (Count, Size, Duration)) and own.high < DURATION_MICROS_MAX:
            bounds = f"{own.show(own.low)} … {own.show(own.high)}"
        yield Knob(table, key, entry.name, kind, "" if none else kind.show(entry.default), bounds)
