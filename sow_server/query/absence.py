"""Fields of a filter in which no record that a query reads has a value: perhaps mistyped names (rule Q10).

[1]  It looks at records that are judged anyway, and reads none. Once each field has been seen, which mostly is at
     the first record, it looks at no more; nor does it after LOOKED_AT_MAX records.
[2]  It tells nothing to a caller that may see only some rows: the others would show in it (rule A4). A hidden field
     is null in the tree, so it is none of the filter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.fields import Step, value_at
from sow_server.filters import Filter, print_path
from sow_server.filters.tree import Function, FunctionCall, IsNull, Path, children
from sow_server.filters.values import is_null
from sow_server.query.filtering import RecordFilter
from sow_server.query.sieve import Sieve

LOOKED_AT_MAX: Final = 10_000


class AbsentFields:
    """Owns the fields of one query that no record has shown yet."""

    def __init__(self, topic: Topic, given: RecordFilter) -> None:
        wanted = {} if given.granted is not None else dict.fromkeys(_needed(given.tree))
        self._unseen: list[tuple[Step, ...]] = list(wanted)
        self._left = LOOKED_AT_MAX
        self._looked = False
        self._topic = topic

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields, as paths."""
        return tuple([print_path(steps) for steps in self._unseen]) if self._looked else ()

    def looking(self, sieve: Sieve) -> Sieve:
        """The sieve that also looks for the fields."""
        if not self._unseen:
            return sieve

        def look_and_judge(keys: Sequence[bytes], values: Sequence[bytes]) -> Sequence[bool]:
            if self._unseen and self._left > 0:
                self._look(values[: self._left])
            return sieve(keys, values)

        return look_and_judge

    def _look(self, values: Sequence[bytes]) -> None:
        decode = self._topic.format.decode
        self._left -= len(values)
        self._looked = self._looked or bool(values)
        for value in values:
            document = decode(value[HEADER_BYTES:])
            self._unseen = [steps for steps in self._unseen if is_null(value_at(document, steps))]
            if not self._unseen:
                return


def _needed(expression: Filter) -> list[tuple[Step, ...]]:
    """The fields that a filter reads, but for those of which it asks whether they are there."""
    match expression:
        case Path(steps):
            return [steps]
        case IsNull() | FunctionCall(Function.COALESCE, _):
            return []
        case _:
            return [steps for child in children(expression) for steps in _needed(child)]
