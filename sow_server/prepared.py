"""A placement that waits at a server until other cells have it (rule C16), and its file in the data directory.

[1]  It is on disk before it is answered, and a start finds it: what it holds back stays held back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from sow_server.config import ConfigError
from sow_server.placement import Placement, Places, placement_of, replace_file, sync_directory

FILE: Final = "PREPARED"
TOPICS_MAX: Final = 1_000
SOURCES_MAX: Final = 1_000
_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class Prepared:
    """A placement that waits."""

    placement: Placement
    leaves: Mapping[str, str]
    """The topics that move, each with the cell that it leaves."""
    sources: tuple[str, ...]
    """Names of the instances of these cells."""
    since_micros: int

    def held(self, cell: str) -> Mapping[str, str]:
        """The topics that come to a cell, each with the one that it leaves."""
        return MappingProxyType(
            {topic: left for topic, left in self.leaves.items() if self.placement.cell_of(topic) == cell}
        )

    def wanted(self, places: Places) -> Placement:
        """The placement that the cells which the topics leave must have: this one, or a later one that is in force."""
        return places.placement if places.placement.version >= self.placement.version else self.placement

    def is_over(self, in_force: Placement, cell: str) -> bool:
        """True if a cell has nothing to wait for: the placement in force is as new, and places none of the topics
        there."""
        if in_force.version < self.placement.version:
            return False
        return all(in_force.cell_of(topic) != cell for topic in self.held(cell))


class PreparedFile:
    """Owns the file. From any thread, one call at a time."""

    def __init__(self, data_dir: Path, placement_file: Path) -> None:
        self._path = data_dir / FILE
        self._placement_file = placement_file

    def load(self) -> Prepared | None:
        """The placement that waits; None: none does. Raises ConfigError if the file is damaged."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error
        try:
            found = json.loads(text)
            return Prepared(
                placement_of(self._placement_file, found["placement"]),
                MappingProxyType({str(topic): str(cell) for topic, cell in found["leaves"].items()}),
                tuple(map(str, found["sources"])),
                int(found["since_micros"]),
            )
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from error

    def hold(self, places: Places) -> None:
        """Holds the topics back that are on their way to a cell. Raises ConfigError as `load`."""
        prepared = self.load()
        if prepared is not None:
            places.use(places.placement, prepared.held(places.cell))

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._path}: the placement that was prepared here cannot be read ({error}). If no topic is moving to "
            "this cell, or all of it has arrived, remove the file"
        )

    def save(self, prepared: Prepared) -> None:
        """Writes it, on disk. Raises OSError."""
        content = {
            "placement": prepared.placement.text,
            "leaves": dict(prepared.leaves),
            "sources": prepared.sources,
            "since_micros": prepared.since_micros,
        }
        replace_file(self._path, json.dumps(content), mode=_MODE)

    def remove(self) -> None:
        """Removes it, on disk. Raises OSError."""
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)
