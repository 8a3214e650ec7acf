"""The placement of topics in cells, as a server tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias

from sow.v1 import admin_pb2
from sow_client._records import datetime_of

CellTrouble: TypeAlias = Literal["DIFFERS", "UNREACHABLE"]
"""The kinds of trouble with the placement of a cell."""
_TROUBLE: Final[Mapping[int, CellTrouble]] = {
    admin_pb2.CellProblem.KIND_DIFFERS: "DIFFERS",
    admin_pb2.CellProblem.KIND_UNREACHABLE: "UNREACHABLE",
}


@dataclass(frozen=True, slots=True)
class PlacedTopics:
    """Topics that a pattern of the placement places."""

    pattern: str
    """A regular expression for the whole name of a topic."""
    cell: str


@dataclass(frozen=True, slots=True)
class Stray:
    """A topic that exists in a cell and is placed in another one. Rule: C5."""

    topic: str
    cell: str
    """The cell that it is placed in."""
    records: int
    """Its live records in the cell that was asked."""
    last_change: datetime | None
    """The time of its last change there; None: its journal does not tell it."""


@dataclass(frozen=True, slots=True)
class CellProblem:
    """Trouble with the placement of a cell. Rule: C7."""

    cell: str
    kind: CellTrouble
    since: datetime
    message: str


@dataclass(frozen=True, slots=True)
class PreparedPlacement:
    """A placement that a server keeps, and takes into use by itself once it may. Rule: C16."""

    version: int
    digest: str
    since: datetime
    topics: tuple[str, ...]
    """The topics that move with it."""
    message: str
    """The reason why it is not in force yet, for people."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of topics in cells, as far as the caller may know it. Rule: C8."""

    cell: str
    """The cell of the server; empty: it has no placement, and the rest is empty, too."""
    version: int = 0
    digest: str = ""
    """Equal at all servers that have the same placement."""
    cells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The addresses of each cell, by its name."""
    topic_cell: str = ""
    """The cell of the topic that was asked for; empty: none was, or the caller has no grant on it."""
    default: str = ""
    """The cell of topics that no pattern names. As all that follows, for callers with `observe` alone."""
    topics: tuple[PlacedTopics, ...] = ()
    """The first that matches counts."""
    strays: tuple[Stray, ...] = ()
    problems: tuple[CellProblem, ...] = ()
    copy: Stray | None = None
    """The topic that was asked for, as it is stored in the cell of the server, wherever it is placed; None: it does not
    exist there."""
    prepared: PreparedPlacement | None = None
    """The placement that waits there; None: none does."""
    text: str = field(default="", repr=False)
    """That of the placement file. For callers with `operator` alone."""


@dataclass(frozen=True, slots=True)
class PlacementReloaded:
    """The outcome of a reload of the placement. Rule: C4."""

    version: int
    digest: str
    changed: bool
    ended_calls: int
    """Calls that were ended, because their topics live in another cell now."""
    prepared: bool = False
    """Another placement waits."""


def placement(message: admin_pb2.GetPlacementResponse) -> Placement:
    """The placement of a message."""
    return Placement(
        message.cell,
        message.version,
        message.digest,
        {cell.name: tuple(cell.servers) for cell in message.cells},
        message.topic_cell,
        message.default_cell,
        tuple(PlacedTopics(placed.pattern, placed.cell) for placed in message.topics),
        tuple(map(_stray, message.strays)),
        tuple(
            CellProblem(problem.cell, _TROUBLE[problem.kind], datetime_of(problem.since_micros), problem.message)
            for problem in message.problems
            if problem.kind in _TROUBLE
        ),
        _stray(message.copy) if message.HasField("copy") else None,
        _prepared(message.prepared) if message.HasField("prepared") else None,
        message.text,
    )


def _prepared(message: admin_pb2.PreparedPlacement) -> PreparedPlacement:
    since = datetime_of(message.since_micros)
    return PreparedPlacement(message.version, message.digest, since, tuple(message.topics), message.message)


def _stray(message: admin_pb2.Stray) -> Stray:
    last = datetime_of(message.last_change_micros) if message.last_change_micros else None
    return Stray(message.topic, message.cell, message.records, last)


def reloaded(message: admin_pb2.ReloadPlacementResponse) -> PlacementReloaded:
    """The outcome that a message tells."""
    return PlacementReloaded(message.version, message.digest, message.changed, message.ended_calls, message.prepared)
