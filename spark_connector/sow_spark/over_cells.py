"""Reads of several topics over cells (rule C24): the cells of a name space, and the topics of each.

[1]  Only the server of the option `server` names cells and their addresses (rule C11).
[2]  A topic is in one cell. If two cells list it, their placements differ, and the read is refused.
[3]  A cell that is away matters only if it may have a topic of the read: any topic of a pattern, or one of the
     option `topics` that no other cell has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sow_client import Client, SowError, Topic, Unavailable
from sow_spark.connection import connect, retried
from sow_spark.errors import HINTS, SowSourceError
from sow_spark.options import Connecting, Reading

NO_TOPIC: Final = "PATTERN_MATCHES_NOTHING"
"""The reason where a read has no topic."""


@dataclass(frozen=True, slots=True)
class CellOf:
    """A cell with topics of a read."""

    name: str
    """Empty: the server has no placement, or the read needs no other cell."""
    connecting: Connecting
    client: Client
    """It stays in the cell."""
    topics: Sequence[Topic]


def cells_of(connecting: Connecting, client: Client) -> dict[str, tuple[Connecting, Client]]:
    """The connection to each cell, and a client that stays there, by its name; "" for a server without cells. Raises
    SowError."""
    home = client.servers_of("")
    found = {}
    for name, part in client.cells().items():
        servers = part.servers_of("")
        found[name] = (connecting if servers == home else replace(connecting, server=servers)), part
    return found


@contextmanager
def cells_read(reading: Reading, *, journal: bool = False) -> Iterator[list[CellOf]]:
    """The cells that have topics of a read, each with its topics, at least one in all. `journal`: as for `selected`.
    Raises SowError and SowSourceError."""
    with connect(reading.connecting) as client:
        if not reading.several:
            topic = retried(reading.connecting, lambda: client.describe_topic(reading.topic))
            yield [CellOf("", reading.connecting, client, [topic])]
            return
        # An export of the program is in the cell of the option `server`.
        alone = reading.export is not None
        cells = {"": (reading.connecting, client.here)}
        if not alone:
            cells = retried(reading.connecting, lambda: cells_of(reading.connecting, client))
        listed = _listed(reading, cells)
        _check_once(listed, reading)
        chosen = selected([topic for topics in listed.values() for topic in topics], reading, journal=journal)
        cell_of = {topic.name: name for name, topics in listed.items() for topic in topics}
        some = {name: [topic for topic in chosen if cell_of[topic.name] == name] for name in listed}
        yield [CellOf(name, *cells[name], topics) for name, topics in some.items() if topics]


def selected(topics: Iterable[Topic], reading: Reading, *, journal: bool = True) -> list[Topic]:
    """Those of all topics that a read of several takes, at least one. `journal`: a stream, so a pattern leaves out
    topics without a journal. Raises SowSourceError."""
    if reading.topic_pattern is None:
        found = {topic.name: topic for topic in topics}
        if reading.cell and not found.keys().isdisjoint(reading.topics):
            return [found[name] for name in reading.topics if name in found]  # other cells have the others
        if reading.cell:
            raise SowSourceError(NO_TOPIC, f"it has none of {', '.join(reading.topics)}")
        for name in reading.topics:
            if name not in found:
                raise SowSourceError("TOPIC_NOT_FOUND", f"topic {name} is not there", HINTS["TOPIC_NOT_FOUND"])
        return [found[name] for name in reading.topics]
    matches = re.compile(reading.topic_pattern).fullmatch
    chosen = [topic for topic in topics if not topic.name.startswith("_") and matches(topic.name)]
    if journal:
        chosen = [topic for topic in chosen if topic.settings.journal]
    if not chosen:
        what = "topic with a journal" if journal else "topic"
        raise SowSourceError(NO_TOPIC, f"no {what} matches {reading.topic_pattern!r}")
    return chosen


def _listed(reading: Reading, cells: Mapping[str, tuple[Connecting, Client]]) -> dict[str, Sequence[Topic]]:
    """The topics of each that answers, in their order [3]."""

    def listed(name: str) -> list[Topic]:
        return cells[name][1].topics(with_statistics=bool(reading.partitions))

    found: dict[str, Sequence[Topic]] = {}
    away: list[str] = []
    for name in cells:
        try:
            found[name] = listed(name)
        except Unavailable:
            away.append(name)
    names = {topic.name for topics in found.values() for topic in topics}
    if reading.topic_pattern is not None or not names.issuperset(reading.topics):
        for name in away:
            with about(name):
                found[name] = retried(cells[name][0], partial(listed, name))
    return {name: found[name] for name in cells if name in found}


@contextmanager
def about(cell: str) -> Iterator[None]:
    """Adds the name of the cell to the errors of the block; "": as they are."""
    try:
        yield
    except (SowError, SowSourceError) as error:
        if not cell:
            raise
        hint = error.hint if isinstance(error, SowSourceError) else HINTS.get(error.reason, "")
        raise SowSourceError(error.reason, f"the cell {cell}: {error.message}", hint) from None


def _check_once(listed: Mapping[str, Iterable[Topic]], reading: Reading) -> None:
    """Raises SowSourceError for a topic that two cells list [2]."""
    cell_of: dict[str, str] = {}
    for cell, topics in listed.items():
        for topic in topics:
            other = cell_of.setdefault(topic.name, cell)
            if other != cell and (reading.topic_pattern is not None or topic.name in reading.topics):
                raise SowSourceError(
                    "TOPIC_ELSEWHERE",
                    f"the cells {other} and {cell} both have topic {topic.name}: their placements differ",
                    HINTS["TOPIC_ELSEWHERE"],
                )
