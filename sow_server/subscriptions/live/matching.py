"""Finds the filters that a change may concern, without evaluating each of them.

[1]  `VersionMatcher.holds` is the whole filter: a filter that the index finds is still evaluated.
[2]  `FieldIndex.candidates` has every entry whose filter can hold for a document (bounds [1]).
[3]  A subscriber that has come from another instance may have any record. It is told of each change what holds here
     now: the record is in focus, or it is not (rule F8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import BURY
from sow_server.engine.values.fields import Entry, Kind, entries
from sow_server.filters.bounds import bounds_of
from sow_server.filters.cost import ELEMENT, Cost, cost_of
from sow_server.filters.tree import Field, Metadata, MetadataName, Path
from sow_server.subscriptions.changes import UNKNOWN, Change, Version
from sow_server.subscriptions.request import ViewFilter

POINTS_MAX: Final = 1000
"""A filter with more points than this is evaluated for every change: the index entries would cost too much memory."""
_KEY: Final = Metadata(MetadataName.KEY)

T = TypeVar("T")


class VersionMatcher:
    """A filter for versions of records; without a filter everything matches."""

    __slots__ = (
        "_fixed",
        "_matches",
        "_uses_metadata",
        "constant",
        "cost",
        "elsewhere",
        "filter",
        "granted",
        "uses_payload",
    )

    def __init__(self, record_filter: ViewFilter | None, *, elsewhere: bool = False) -> None:
        """`elsewhere`: the subscriber has come from another instance ([3])."""
        self.filter = record_filter
        self.elsewhere = elsewhere
        self.granted: VersionMatcher | None = None
        """Matches the versions that the subscriber may see, whatever it asks for; None: all."""
        if record_filter is None:
            self.constant: bool | None = True
            self.cost = Cost()
            self.uses_payload = False
            return
        predicate = record_filter.predicate
        self.constant = predicate.constant
        self._matches = predicate.matches
        self.uses_payload = predicate.uses_payload
        self.cost = Cost() if predicate.constant is not None else cost_of(record_filter.tree)
        """The cost of one evaluation, without decoding the payload."""
        self._uses_metadata = record_filter.uses_metadata
        self._fixed = record_filter.fixed_meta
        if record_filter.granted is not None:
            self.granted = VersionMatcher(record_filter.granted)
            self.elsewhere = False  # it was never told of records that it may not see, and must not be told now
            self.cost = self.cost.plus(self.granted.cost)

    @property
    def text(self) -> str:
        """Equal for filters with the same effect; blank if everything matches. Subscribers share frames only if they
        may see the same rows: a record that leaves their view has a reason."""
        text = "\n\n" if self.elsewhere else ""
        if self.filter is None:
            return text
        return self.filter.text + text if self.granted is None else f"{self.filter.text}\n{self.granted.text}"

    def holds(self, version: Version) -> bool:
        """True if the record matches."""
        if self.constant is not None:
            return self.constant
        return self._matches(
            version.document if self.uses_payload else None, version.meta if self._uses_metadata else self._fixed
        )

    def holds_stored(self, key: bytes, value: bytes) -> bool:
        """True if a live record matches, by its key and stored value. From any thread."""
        if self.constant is not None:
            return self.constant
        assert self.filter is not None, "one that is not constant has a filter"
        return self.filter.matches(key, value)

    def of_payloads(self, topic: Topic) -> Callable[[bytes], bool] | None:
        """A function that returns True if a payload matches, for a filter that looks at nothing but payloads. None: the
        filter looks at more, or always says the same."""
        if self.constant is not None or not self.uses_payload or self._uses_metadata:
            return None
        matches, decode, fixed = self._matches, topic.format.decode, self._fixed
        return lambda payload: matches(decode(payload), fixed)

    def held_before(self, change: Change) -> bool:
        """True if the record that a put replaced matched. A record that the journal has discarded counts as a match
        (rule J1)."""
        if self.elsewhere:
            return True
        before = change.before
        if before is None or self.constant is False:
            return False
        if before is UNKNOWN:
            return self.granted is None  # a subscriber that may not see all rows must not hear of one that it never saw
        return self.holds(before)

    def held(self, change: Change) -> bool:
        """True if a record that is removed may have been in focus."""
        return self.elsewhere or (change.kind != BURY and self.holds(change))

    def permits(self, version: Version) -> bool:
        """True if the subscriber may see a version at all."""
        return self.granted is None or self.granted.holds(version)

    def points(self, key_paths: Iterable[tuple[str, ...]]) -> tuple[Field, tuple[Entry, ...]] | None:
        """A field, and the only values of it with which the filter can hold; None if the filter does not tell."""
        if self.filter is None or self.elsewhere:
            return None
        best: tuple[Field, tuple[Entry, ...]] | None = None
        for field, bounds in bounds_of(self.filter.tree, tuple(key_paths)).items():
            if not (isinstance(field, Path) or field == _KEY):
                continue
            for bound in bounds:
                if len(bound) > POINTS_MAX or not all(interval.is_point for interval in bound):
                    continue
                if best is None or len(bound) < len(best[1]):
                    found: list[Entry] = []
                    for interval in bound:
                        assert interval.low is not None, "a point has its value at both ends"
                        found.append((interval.kind, interval.low))
                    best = field, tuple(found)
        return best


class FieldIndex(Generic[T]):
    """Finds the entries that wait for the value of a field."""

    def __init__(self) -> None:
        self._tables: dict[Field, dict[Entry, list[T]]] = {}
        self._asked: list[tuple[Path | None, dict[Entry, list[T]]]] = []

    def __bool__(self) -> bool:
        return bool(self._tables)

    def add(self, field: Field, points: Iterable[Entry], waiting: T) -> None:
        """Adds an entry that waits for a value among `points`."""
        for point in points:
            self._tables.setdefault(field, {}).setdefault(point, []).append(waiting)
        self._rebuild()

    def remove(self, field: Field, points: Iterable[Entry], waiting: T) -> None:
        """Removes an entry."""
        for point in points:
            table = self._tables[field]
            table[point].remove(waiting)
            if not table[point]:
                del table[point]
            if not table:
                del self._tables[field]
        self._rebuild()

    @property
    def lookup_nanos(self) -> int:
        """The time to look up one element of an array."""
        return ELEMENT * len(self._asked)

    def _rebuild(self) -> None:
        self._asked = [(field if isinstance(field, Path) else None, table) for field, table in self._tables.items()]

    def candidates(self, version: Version) -> list[T]:
        """The entries that wait for a value of this record, each once."""
        found: dict[T, None] = {}
        for path, table in self._asked:
            have: list[Entry] = (
                [(Kind.TEXT, version.key.decode())] if path is None else entries(version.document, path.steps)
            )
            for entry in have:
                waiting = table.get(entry)
                if waiting is not None:
                    # Several points may have found the same entry.
                    found.update(dict.fromkeys(waiting))
        return list(found)
