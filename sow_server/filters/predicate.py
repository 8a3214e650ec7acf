"""A compiled filter, and the metadata of a record that it can read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sow_server.filters.tree import Step


class Meta(NamedTuple):
    """The metadata of a record that a filter can read. Times are in microseconds since the epoch."""

    key: str
    version: int
    publish_time_micros: int
    expire_time_micros: int | None
    """None: never."""
    topic: str
    now_micros: int
    """The same for the whole request."""
    sequence: int = 0
    """The sequence of the change that made the record what it is, in the journal of this instance."""
    origin: str = ""
    """The name of the instance that wrote it."""
    size: int = 0
    """The size of its payload, in bytes."""


Matcher = Callable[[object, Meta], bool]
Rows = Callable[[Iterable[object], Iterable[Meta], Callable[[tuple[object, ...]], None]], None]
"""From documents and their metadata to a row of values for each, which it gives to its last argument."""
KeyedRows = Callable[[Iterable[object], Iterable[Meta], Iterable[bytes], Callable[[tuple[object, ...]], None]], None]
"""As `Rows`, from the keys of the records, too: a row ends with its record's key, and not every record has one."""


@dataclass(frozen=True, slots=True)
class Predicate:
    """A compiled filter. Loops call `matches` directly, which saves a call per record."""

    matches: Matcher
    """A function that is True if a record matches, by its decoded payload (a dict; anything else has no fields) and its
    metadata."""
    paths: tuple[tuple[Step, ...], ...]
    """The fields it reads, in the order of the filter; a decoder may leave out the others."""
    uses_payload: bool
    """True if the payload is read. If not, the document may be any object."""
    constant: bool | None
    """The answer for every record; None if it depends on the record."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The top-level fields it reads, each once."""
        return tuple(dict.fromkeys(str(steps[0]) for steps in self.paths))

    def __call__(self, document: object, meta: Meta) -> bool:
        return self.matches(document, meta)
