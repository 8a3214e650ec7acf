"""The aggregates of an expression, collected while it is parsed: `SUM(/px) / COUNT(*)` becomes an expression over two
fields of a group, and two aggregates. Pure.

[1]  In the tree, the path of a field of the group stands in place of each aggregate. Equal aggregates share one.
[2]  The parser builds from the left and from the inside. So the fields of an aggregate's argument are those that were
     found behind its own position when it is complete.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from sow_server.filters.tree import Expression, Path

KEY_BYTES_MAX: Final = 1024
"""A record whose key of its group is longer is in no group."""
LONG: Final[dict[str, object]] = {}
"""Stands for a longer text, and for an object: a value that is not null, and that nothing is compared with."""


class AggregateFunction(enum.Enum):
    COUNT = "COUNT"
    COUNT_DISTINCT = "COUNT(DISTINCT …)"
    SUM = "SUM"
    AVG = "AVG"
    MIN = "MIN"
    MAX = "MAX"


AGGREGATES: Final = {each.value: each for each in AggregateFunction if each is not AggregateFunction.COUNT_DISTINCT}
"""Those with the syntax of a function."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A function of all records of a group."""

    function: AggregateFunction
    argument: Expression | None
    """None: COUNT(*)."""


def bounded(value: object) -> object:
    """A value that was computed: rows of a thousand texts of a megabyte do not fit into memory."""
    return LONG if is_long(value) else value


def is_long(value: object) -> bool:
    """True for a text that no aggregate compares and no group has as its key."""
    return type(value) is str and len(value) > KEY_BYTES_MAX


def place_of(number: int) -> str:
    """The name of the field of a group that holds the value of an aggregate [1]. No name of a caller begins so."""
    return f"\0{number}"


class AggregateCalls:
    """Owns the aggregates of the expressions of one request, and the fields of the text that is being parsed."""

    def __init__(self) -> None:
        self.found: Final[dict[Aggregate, int]] = {}
        """The aggregates by number."""
        self._fields: list[tuple[int, Expression]] = []
        self._places: list[int] = []
        """The positions of the aggregates of this text."""

    def field(self, node: Expression, position: int) -> None:
        """Called for each part that depends on the record."""
        self._fields.append((position, node))

    def aggregate(self, function: AggregateFunction, argument: Expression | None, position: int) -> Path | int:
        """Called for each aggregate: the field that stands for it, or the position of an aggregate in it."""
        if self._places and self._places[-1] > position:
            return self._places[-1]
        self._places.append(position)
        self._fields = [field for field in self._fields if field[0] < position]  # [2]
        number = self.found.setdefault(Aggregate(function, argument), len(self.found))
        return Path((place_of(number),))

    @property
    def first(self) -> int:
        """The position of the first aggregate of the text; -1: it has none."""
        return min(self._places, default=-1)

    def take_outside(self) -> list[tuple[int, Expression]]:
        """The fields of the text that stand in no aggregate, with their positions. The next text begins."""
        outside, self._fields, self._places = self._fields, [], []
        return outside
