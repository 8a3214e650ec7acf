"""Fields of a request in which no record that it reads has a value: perhaps mistyped names (rule Q10).

[1]  It looks at records that are read anyway, and reads none. Once each field has been seen, which mostly is at the
     first record, it looks at no more; nor does it after LOOKED_AT_MAX records.
[2]  It tells nothing to a caller that may see only some rows: the others would show in it (rule A4). A hidden field is
     not looked for: in the tree of a filter it is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Decode, Projection
from sow_server.engine.stored import payloads
from sow_server.engine.values.fields import Steps, value_at
from sow_server.engine.values.model import MessageType
from sow_server.filters import Filter, print_path
from sow_server.filters.restriction import hides
from sow_server.filters.tree import Expression, Function, FunctionCall, IsNull, Path, children
from sow_server.filters.values import is_null
from sow_server.query.filtering import RecordFilter
from sow_server.query.ordering import Order

LOOKED_AT_MAX: Final = 10_000
LOOKED_AT_ONCE: Final = 64


class AbsentFields:
    """Owns the fields of one request that no record has shown yet. For one thread at a time."""

    def __init__(
        self,
        topic: Topic,
        given: RecordFilter | None,
        order: Order | None = None,
        projection: Projection | None = None,
        aggregated: Sequence[Expression] = (),
    ) -> None:
        """Looks for the fields of the filter, of the order, of the fields to return or to leave out, and of what is
        grouped and aggregated."""
        self._format: Final = topic.format
        self._whole: Final = order is not None or projection is not None or bool(aggregated)
        """True if fields are looked for that a decoder for the filter alone leaves out."""
        wanted: list[Steps] = []
        if given is not None:
            # A part that decides nothing is not read.
            wanted += filter(frozenset(given.predicate.paths).__contains__, _needed(given.tree))
        if order is not None:
            wanted += [term.field.steps for term in order.terms if isinstance(term.field, Path)]
        for tree in aggregated:
            wanted += _needed(tree)
        if projection is not None:
            named: Iterable[Steps] = (*projection.include, *projection.exclude)
            if topic.settings.message_type is MessageType.FIX:  # the tag 055 is 55, also where it is selected
                named = [(str(tag).lstrip("0") or "0", *rest) for tag, *rest in named]
            wanted += [steps for steps in named if not hides(projection.hidden, steps)]
        restricted = given is not None and given.granted is not None
        self._unseen = [] if restricted else list(dict.fromkeys(wanted))
        self._left = LOOKED_AT_MAX
        self.looks = bool(self._unseen)
        """True if it has to look at more records."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields, as paths; none while no record has been looked at."""
        return tuple(map(print_path, self._unseen)) if self._left < LOOKED_AT_MAX else ()

    def read(self, decode: Decode | None, values: Sequence[bytes]) -> list[dict[str, object]]:
        """The documents of stored values, after a look at them. `decode`: reads the filter's fields; None: it has
        none."""
        if decode is None or self._whole:
            decode = self._format.decode
        documents = list(map(decode, payloads(values)))
        seen = documents[: self._left]
        self._left -= len(seen)
        for steps in tuple(self._unseen):
            for document in seen:
                if steps[0] in document and not _is_missing(value_at(document, steps)):
                    self._unseen.remove(steps)
                    break
        self.looks = bool(self._unseen) and self._left > 0
        return documents

    def look(self, values: Sequence[bytes]) -> None:
        """Looks at stored values that no filter judges, until there is nothing to look for."""
        start, size = 0, 1  # mostly one is enough
        while start < len(values) and self.looks:
            self.read(None, values[start : start + size])
            start, size = start + size, min(2 * size, LOOKED_AT_ONCE)


def _is_missing(value: object) -> bool:
    """An empty array is null to a filter, but its name is right."""
    return value != [] and is_null(value)


def _needed(expression: Filter) -> list[Steps]:
    """The fields that a filter reads, but for those of which it asks whether they are there."""
    match expression:
        case Path(steps):
            return [steps]
        case IsNull() | FunctionCall(Function.COALESCE, _):
            return []
        case _:
            return [steps for child in children(expression) for steps in _needed(child)]
