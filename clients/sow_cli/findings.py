"""The results of the checks of `sow doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    found: str
    advice: str = ""
    """The advice. Empty: there is nothing to do."""
    cell: str = ""
    """The cell that it is about; empty: there is one, or it is about the way to the server."""
