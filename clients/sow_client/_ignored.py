"""Warns a caller whose lifetimes have no effect (rule L3), at the caller's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from sow_client._records import Published
from sow_client.errors import LifetimeIgnoredWarning, Refusal

_PACKAGE: Final = f"{Path(__file__).parent}/"


class Place(NamedTuple):
    """A line of a program, as `warnings` wants it."""

    file: str
    line: int
    module: str
    registry: dict[str | tuple[str, type[Warning], int], int]
    """Python's notes about the warnings that the module was shown already."""


def place() -> Place:
    """The caller's line: the innermost one outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    names = frame.f_globals
    return Place(
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__", "<unknown>"),
        names.setdefault("__warningregistry__", {}),
    )


def heed(topic: str, outcomes: Iterable[Published | Refusal]) -> None:
    """Warns if a lifetime of the outcomes has no effect."""
    if any(isinstance(one, Published) and one.ttl_ignored and one.expire_time_micros is not None for one in outcomes):
        warn(topic, place())


def warn(topic: str, at: Place) -> None:
    """Warns that lifetimes of records of a topic have no effect."""
    warnings.warn_explicit(
        f"topic {topic!r} has expiration disabled: lifetimes are stored, and no record expires",
        LifetimeIgnoredWarning,
        at.file,
        at.line,
        at.module,
        at.registry,
    )
