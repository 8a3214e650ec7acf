"""Lines of exports: an export, and those that have taken its place after its end (rule Q8).

A program with many tasks plans with one export, and may read much later, when that one has ended. Its tasks must then
agree on another one, without talking to each other. Guarantees:

    [1]  A reader, which is one piece of work such as an action of Spark, reads one export of a line: the first one that
         it has read or was given. So it never mixes two instants.
    [2]  A line that was forgotten is not begun again: its readers are refused, because nobody knows what they have
         read. Lines are in memory, like exports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sow_server.engine.catalog.topics import Topic

EXPORTS_KEPT: Final = 2_000
"""Exports whose line is known. The one whose line was used longest ago is forgotten first."""
READERS_MAX: Final = 10_000
"""Readers of one line. Then it is forgotten."""


@dataclass(slots=True, eq=False)
class Line:
    """An export and its successors."""

    owner: str
    topics: Sequence[Topic]
    current: str
    """The id of the last one."""
    readers: dict[str, str] = field(default_factory=dict)
    """The export that each reader reads."""


class ExportLines:
    """Owns the lines. On one thread."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        """Each export of a line leads to the line."""

    def begin(self, export_id: str, owner: str, topics: Sequence[Topic]) -> None:
        """A line with its first export."""
        self._keep(export_id, Line(owner, topics, export_id))

    def of(self, export_id: str) -> Line | None:
        """The line of an export, as long as it is known."""
        line = self._lines.get(export_id)
        if line is not None:
            self._keep(export_id, line)
        return line

    def succeed(self, export_id: str, successor: str, reader: str) -> None:
        """Adds an export to the line of another one, read by `reader`. An unknown line stays unknown [2]."""
        line = self.of(export_id)
        if line is not None:
            line.current = successor
            self._keep(successor, line)
            self.reads(successor, reader)

    def reads(self, export_id: str, reader: str) -> bool:
        """Notes that a reader reads an export. False: it has read another one of the line [1]."""
        line = self.of(export_id)
        if line is None:
            return True  # without a line there is no other export to read
        if reader not in line.readers and len(line.readers) >= READERS_MAX:
            for one in [one for one, known in self._lines.items() if known is line]:
                del self._lines[one]
            return True
        return line.readers.setdefault(reader, export_id) == export_id

    def _keep(self, export_id: str, line: Line) -> None:
        self._lines.pop(export_id, None)
        while len(self._lines) >= EXPORTS_KEPT:
            del self._lines[next(iter(self._lines))]
        self._lines[export_id] = line
