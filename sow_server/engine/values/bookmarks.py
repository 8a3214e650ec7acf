"""Bookmarks: a position in the journal of one instance, and the positions of others that belong to it. Pure.

4f9d2c01aa37.1200                                             a position in this journal
4f9d2c01aa37.1200;t=1763974343000000;a81b0c22d9e4.977;h=c0ffee00aa11.5
                  │                  │                └ held: a subscriber has come from there, and has this
                  │                  └ marks: this journal up to 1200 has everything of that one up to 977
                  └ every record with an expire time up to then is over in this journal up to 1200
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.values.errors import Reason, StoreError

PARTS_MAX: Final = 32
"""Other instances that a bookmark tells positions of."""
HELD_MAX: Final = 8
"""Other instances that a subscriber has come from, one after the other, without any of them having caught up."""
CHARACTERS_MAX: Final = 2000
"""A bookmark with the most parts is shorter."""
_POSITION: Final = re.compile(r"([0-9a-f]{12})\.(0|[1-9][0-9]{0,18})")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_HIGHEST: Final = 2**63 - 1


class Position(NamedTuple):
    """A sequence in the journal of an epoch."""

    epoch: str
    sequence: int

    @property
    def text(self) -> str:
        """As in a bookmark."""
        return f"{self.epoch}.{self.sequence}"


class Marks(NamedTuple):
    """The state of other instances that belongs to a position of this journal, or to an earlier one (rule F6)."""

    swept_micros: int
    """Every record with an expire time up to here is over."""
    sources: tuple[Position, ...]
    """Everything that these instances send up to their positions has been applied."""

    @property
    def text(self) -> str:
        """As in a bookmark, with the semicolon in front. "": no position is known, so it says nothing elsewhere."""
        if not self.sources:
            return ""
        return "".join([f";t={self.swept_micros}", *[f";{position.text}" for position in self.sources]])


class Bookmark(NamedTuple):
    """A bookmark in its parts."""

    at: Position
    marks: Marks | None = None
    held: tuple[Position, ...] = ()


def held_text(held: tuple[Position, ...]) -> str:
    """The positions that a subscriber has come from, as in a bookmark, with the semicolon in front; "": none."""
    return f";h={','.join([position.text for position in held])}" if held else ""


def parse(text: str, field: str = "bookmark") -> Bookmark:
    """The parts of a bookmark. Raises StoreError BOOKMARK_MALFORMED, which names the field and the place."""
    try:
        return _parsed(text)
    except _Wrong as wrong:
        raise StoreError(
            Reason.BOOKMARK_MALFORMED,
            f"{field}: {text[:80]!r} is no bookmark: at character {wrong.place + 1}, {wrong.why}",
            field=field,
            details={"position": str(wrong.place)},
        ) from None


class _Wrong(Exception):
    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place
        self.why = why


def _parsed(text: str) -> Bookmark:
    if len(text) > CHARACTERS_MAX:
        raise _Wrong(CHARACTERS_MAX, f"it has more than {CHARACTERS_MAX} characters")
    first, *rest = text.split(";")
    at = _position(first, 0)
    swept: int | None = None
    sources: list[Position] = []
    held: list[Position] = []
    place = len(first) + 1
    for part in rest:
        if part.startswith("t=") and swept is None and not sources and not held:
            swept = _number(part[2:], place + 2)
        elif part.startswith("h=") and not held:
            inner = place + 2
            for one in part[2:].split(","):
                held.append(_position(one, inner))
                inner += len(one) + 1
        elif swept is None or held:
            raise _Wrong(place, "no time, position or holding is expected here")
        else:
            sources.append(_position(part, place))
        place += len(part) + 1
    if len(sources) > PARTS_MAX or len(held) > HELD_MAX:
        raise _Wrong(len(first), f"it has more than {PARTS_MAX} positions, or holds more than {HELD_MAX}")
    return Bookmark(at, None if swept is None else Marks(swept, tuple(sources)), tuple(held))


def _position(part: str, place: int) -> Position:
    found = _POSITION.fullmatch(part)
    if found is None or int(found[2]) > _HIGHEST:
        raise _Wrong(place, "a position looks like 0d4c5b7e8f90.17")
    return Position(found[1], int(found[2]))


def _number(part: str, place: int) -> int:
    if _NUMBER.fullmatch(part) is None or int(part) > _HIGHEST:
        raise _Wrong(place, "a time is a number of microseconds")
    return int(part)


@dataclass(frozen=True, slots=True)
class Instance:
    """The instance that the data are of, since they were made or restored."""

    id: str
    name: str
    epoch: str
    """The epoch of the journal: a position is valid in the epoch in which it was given out."""
    authoritative: bool
    """The data of this epoch were restored, and are to be adopted unchanged (rule J14)."""

    def bookmark(self, sequence: int) -> str:
        """A position in this store's journal, as clients see it (rule J14)."""
        return f"{self.epoch}.{sequence}"
