"""The parts of a view that are compiled from its definition, as the engine uses them: it knows no expressions.

[1]  A plan is pure. What it gives for a record depends on the record alone, so that a record's share in its group can
     be taken back when the record changes.
[2]  A plan raises nothing about data. A record that cannot be in the view is counted, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.views import ViewDefinition

Row: TypeAlias = tuple[object, ...]
"""The values that a record brings to a view, as its plan has them; empty: none."""
NOTHING: Row = ()


class Entries(NamedTuple):
    """The changes of the values of one MIN or MAX in a group: each value as it is ordered (stored/ordered.py), and the
    key of its record."""

    come: list[tuple[bytes, bytes]]
    gone: list[tuple[bytes, bytes]]


class Share(Protocol):
    """The rows that come to a group in one commit, and those that go."""


class Group(Protocol):
    """A group of records. It changes in place."""

    records: int
    document: bytes
    """The payload of its record in the view; empty: it has none."""
    extremes: list[bytes]
    """The value of each MIN and MAX, as it is ordered; empty: there is none."""
    memory: int
    """About how many bytes it takes."""

    def draw(self) -> bytes:
        """The payload of its record, from its state."""

    def dump(self) -> bytes:
        """Its state."""


class Grouped(NamedTuple):
    """The changes of a view of groups."""

    shares: Mapping[bytes, Share]
    """The shares by the keys of the groups. A group whose records have the same values as before is not among them."""
    ungrouped: int
    """So many more records are in no group."""


class Computed(NamedTuple):
    """The changes of a view with a record for each record: payloads by record key, before and after."""

    gone: Mapping[bytes, bytes]
    come: Mapping[bytes, bytes]
    ungrouped: int


class ViewPlan(Protocol):
    """A definition, compiled for its source."""

    @property
    def per_record(self) -> bool:
        """True if the view has a record for each record (rule V3). Its rows may be as large as records."""

    @property
    def greatest(self) -> Sequence[bool]:
        """For each MIN and MAX: True if it is a MAX."""

    def rows(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[Row]:
        """The rows of records, given by their keys and stored values. For those alone that bring something; the key is
        the last thing in a row."""

    def compute(self, gone: Sequence[Row], come: Sequence[Row]) -> Computed:
        """The changes from the rows of records before a commit to those after it, for a view `per_record`."""

    def divide(self, gone: Sequence[Row], come: Sequence[Row]) -> Grouped:
        """The same for a view of groups."""

    def new(self, key: bytes) -> Group:
        """A group without records."""

    def load(self, key: bytes, row: bytes) -> Group:
        """The group with a state that was dumped."""

    def give(self, group: Group, share: Share) -> Sequence[Entries]:
        """Changes a group by its share, and returns the changes of values for each of `greatest`."""


PlanOf: TypeAlias = Callable[[ViewDefinition, Topic], ViewPlan]
"""Compiles a definition for its source. Raises StoreError EXPRESSION_INVALID or FILTER_INVALID; `field` begins with
`view.`."""
