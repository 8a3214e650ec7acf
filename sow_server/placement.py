"""The placement of topics in cells: its file, and the cell of each topic (rules C1 to C3). Pure, but for that file.

[1]  A placement is the same wherever its content is the same: the digest is made of the values, not of the text.
[2]  A decision is remembered, and forgotten with its placement: a topic costs one look-up.
[3]  A topic that is on its way here counts as one of the cell that it leaves, until this cell has all of it (rule C16).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from sow_server.config import Config, ConfigError
from sow_server.config.file import TableReader, parse_text, read_text
from sow_server.config.kinds import INSTANCE_KIND, Address, Count, Pattern, Texts, ValueKind, quoted, split_address
from sow_server.config.toml_places import TomlPlaces
from sow_server.engine.catalog.topics import UNDELIVERED, check_name
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.patterns import matcher

T = TypeVar("T")

VERSION_MAX: Final = 2**53
"""Every language reads a whole number up to here as the same one."""
CELLS_MAX: Final = 256
PATTERNS_MAX: Final = 10_000
SERVERS_CHARACTERS_MAX: Final = 2_000
"""Characters of the addresses of one cell: they travel in the trailers of a refusal, which have 8 KiB."""
SERVERS_TOLD_MAX: Final = 3
"""Addresses in the sentence of a refusal; its details have all."""
DECISIONS_KEPT: Final = 100_000
"""With more topics, a list of all decides about each one anew, which takes 0.1 ms for 100 patterns."""
SERVERS_MAX: Final = 100
"""Addresses of a cell: clients refuse longer lists."""
_KEYS: Final = ("version", "default", "cells", "topics")


@dataclass(frozen=True, slots=True)
class PlacedTopics:
    """Topics that one entry of the file places: those whose whole name its pattern matches."""

    pattern: str
    cell: str
    matches: Callable[[str], bool] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """All of a placement file (rule C1)."""

    version: int
    default: str
    cells: Mapping[str, tuple[str, ...]]
    """The addresses of each cell, in the order of the file."""
    topics: tuple[PlacedTopics, ...]
    text: str = field(compare=False, repr=False)
    """That of the file."""

    def cell_of(self, topic: str) -> str:
        """The cell of a topic, which need not exist: that of the first pattern that matches."""
        return next((placed.cell for placed in self.topics if placed.matches(topic)), self.default)

    @property
    def digest(self) -> str:
        """SHA-256 of the values ([1]), in hexadecimal digits."""
        values = {
            "version": self.version,
            "default": self.default,
            "cells": {name: list(servers) for name, servers in self.cells.items()},
            "topics": [[placed.pattern, placed.cell] for placed in self.topics],
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_Used: TypeAlias = tuple[Placement, dict[str, str | None]]


class Places:
    """The placement in force, as one cell sees it. Replaced on the event loop, asked on any thread."""

    def __init__(self, cell: str, file: Path, placement: Placement) -> None:
        """`file`: where the placement stands. Raises ValueError if it has no such cell."""
        self.cell: Final = cell
        self.file: Final = file
        self.held: Mapping[str, str] = MappingProxyType({})
        """Topics that are on their way here, each with the cell that it leaves ([3])."""
        self.use(placement)

    def check(self, placement: Placement) -> None:
        """Raises ValueError if a placement has no cell of this name."""
        if self.cell not in placement.cells:
            raise ValueError(f"[cells] has no {quoted(self.cell)}, the name of this cell in [placement] cell")

    def use(self, placement: Placement, held: Mapping[str, str] | None = None) -> None:
        """Takes a placement into use. `held`: in the place of those that are held now ([3]). Raises ValueError as
        `check`."""
        self.check(placement)
        if held is not None:
            self.held = held
        self.digest = placement.digest
        self._used: _Used = placement, {}
        """In one piece, and with its decisions: another thread remembers none of the placement before ([2])."""

    @property
    def placement(self) -> Placement:
        """The placement in force."""
        return self._used[0]

    def elsewhere(self, topic: str) -> str | None:
        """The cell of a topic; None: it is this one. Raises StoreError TOPIC_NAME_INVALID."""
        return self._decide(self._used, topic)

    def _decide(self, used: _Used, topic: str) -> str | None:
        placement, decided = used
        try:
            return decided[topic]
        except KeyError:
            pass
        if topic == UNDELIVERED:
            return None  # each cell has its own
        check_name(topic)  # first: no pattern runs over a name that no topic can have, and none is remembered
        cell = placement.cell_of(topic)
        if cell == self.cell:
            cell = self.held.get(topic, cell)
        if len(decided) >= DECISIONS_KEPT:
            decided.clear()
        found = decided[topic] = None if cell == self.cell else cell
        return found

    def refusal(self, topic: str) -> StoreError | None:
        """The refusal of a request for a topic (rule C2); None: the topic is placed in this cell. Raises StoreError
        TOPIC_NAME_INVALID."""
        used = self._used
        cell = self._decide(used, topic)
        if cell is None:
            return None
        placement, _ = used
        servers = placement.cells.get(cell, ())  # a cell that a held topic leaves may have gone
        told = ",".join(servers[:SERVERS_TOLD_MAX]) + (",…" if len(servers) > SERVERS_TOLD_MAX else "")
        return StoreError(
            Reason.TOPIC_ELSEWHERE,
            f"topic: {topic!r} lives in the cell {cell} at {told}, and this is the cell {self.cell}; give your client "
            "the servers of that cell, or update it: newer ones go there by themselves",
            field="topic",
            details={
                "topic": topic,
                "cell": cell,
                "servers": ",".join(servers),
                "from_cell": self.cell,
                "placement_version": str(placement.version),
            },
        )


def configured_places(config: Config) -> Places | None:
    """The placement of a configuration; None: it has none. Raises ConfigError."""
    path = config.placement.file
    if path is None:
        return None
    placement = load_placement(path)
    try:
        return Places(config.placement.cell, path, placement)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_placement(path: Path) -> Placement:
    """The placement file at a path. Raises ConfigError that names the file and the line or the key."""
    return placement_of(path, read_text(path))


def placement_of(path: Path, text: str) -> Placement:
    """The placement of a text. `path`: the file that it is of, or is to be of. Raises ConfigError as
    `load_placement`."""
    return _File(path, text).read()


def replace_file(path: Path, text: str, *, mode: int | None = None) -> None:
    """Puts a text in the place of a file, on disk, as a whole or not at all. `mode`: that of the file; None: as it was.
    Raises OSError."""
    path = path.resolve()  # the file that a link leads to
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")  # cells of one machine share a file
    if mode is None and path.exists():
        mode = path.stat().st_mode & 0o777
    with open(draft, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    draft.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class _File:
    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._tables = parse_text(path, text)
        self._places = TomlPlaces(path, text)
        self._reader = self._reader_at(None)

    def read(self) -> Placement:
        for name, value in self._tables.items():
            if name not in _KEYS:
                raise self._reader.unknown_key("", name, value, list(_KEYS))
        version = self._value("version", Count(1, VERSION_MAX))
        cells = self._cells()
        default = self._value("default", INSTANCE_KIND)
        if default not in cells:
            raise self._reader.error("", "default", f"{quoted(default)} is none of [cells]")
        return Placement(version, default, MappingProxyType(cells), self._topics(cells), self._text)

    def _value(self, key: str, kind: ValueKind[T]) -> T:
        if key not in self._tables:
            raise self._reader.error("", key, "is missing")
        return self._read("", key, self._tables[key], kind, self._reader)

    def _read(self, table: str, key: str, value: object, kind: ValueKind[T], reader: TableReader) -> T:
        try:
            return kind.read(value, self._path.parent)
        except ValueError as error:
            raise reader.error(table, key, str(error)) from None

    def _cells(self) -> dict[str, tuple[str, ...]]:
        reader = self._reader_at(self._places.line("cells"))
        found = self._tables.get("cells")
        if not isinstance(found, dict) or not found:
            raise reader.error("", "cells", "expected the table [cells] with the addresses of each cell")
        if len(found) > CELLS_MAX:
            raise reader.error("", "cells", f"{len(found)} cells are more than the limit of {CELLS_MAX}")
        cells: dict[str, tuple[str, ...]] = {}
        taken: dict[tuple[str, int], str] = {}
        for name, value in found.items():
            self._read("cells", name, name, INSTANCE_KIND, reader)
            servers = self._read("cells", name, value, Texts('addresses such as ["10.0.0.1:7450"]'), reader)
            if not servers:
                raise reader.error("cells", name, "has no address")
            if len(servers) > SERVERS_MAX:
                message = f"{len(servers)} addresses are more than the limit of {SERVERS_MAX}"
                raise reader.error("cells", name, message)
            if sum(map(len, servers)) > SERVERS_CHARACTERS_MAX:
                message = f"its addresses have more than {SERVERS_CHARACTERS_MAX} characters"
                raise reader.error("cells", name, message)
            for server in servers:
                address = self._read("cells", name, server, Address(), reader)
                host, port = split_address(address)
                if not port:
                    raise reader.error("cells", name, f"{quoted(server)} names no port")
                place = host.lower(), port
                if (other := taken.get(place)) is not None:
                    twice = "twice" if other == name else f"in {quoted(other)}, too"
                    raise reader.error("cells", name, f"{quoted(server)} occurs {twice}")
                taken[place] = name
            cells[name] = servers
        return cells

    def _topics(self, cells: Mapping[str, tuple[str, ...]]) -> tuple[PlacedTopics, ...]:
        found = self._tables.get("topics", [])
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise self._reader.error("", "topics", "expected tables, each under the heading [[topics]]")
        if len(found) > PATTERNS_MAX:
            raise self._reader.error("", "topics", f"{len(found)} are more than the limit of {PATTERNS_MAX}")
        return tuple(self._placed(index, entry, cells) for index, entry in enumerate(found))

    def _placed(self, index: int, entry: dict[str, object], cells: Mapping[str, tuple[str, ...]]) -> PlacedTopics:
        table = f"topics[{index}]"
        reader = self._reader_at(self._places.line("topics", index))
        for key, value in entry.items():
            if key not in ("pattern", "cell"):
                raise reader.unknown_key(table, key, value, ["pattern", "cell"])
        for key in ("pattern", "cell"):
            if key not in entry:
                raise reader.error(table, key, "is missing")
        pattern = self._read(table, "pattern", entry["pattern"], Pattern(), reader)
        cell = self._read(table, "cell", entry["cell"], INSTANCE_KIND, reader)
        if cell not in cells:
            raise reader.error(table, "cell", f"{quoted(cell)} is none of [cells]")
        return PlacedTopics(pattern, cell, matcher(pattern))

    def _reader_at(self, line: int | None) -> TableReader:
        source = str(self._path) if line is None else f"{self._path}:{line}"
        return TableReader(source, self._path.absolute().parent, is_configuration=False)
