"""The limits of a micro-batch for PySpark 4.1, which has none: the classes of later versions, where they are used."""

from __future__ import annotations

from dataclasses import dataclass


class ReadLimit:
    """A limit."""


@dataclass
class ReadAllAvailable(ReadLimit):
    """None."""


@dataclass
class ReadMaxRows(ReadLimit):
    """Entries."""

    max_rows: int


@dataclass
class ReadMaxBytes(ReadLimit):
    """Bytes."""

    max_bytes: int
