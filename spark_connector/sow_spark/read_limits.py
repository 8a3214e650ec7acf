"""The limits of a micro-batch and the mark of AvailableNow: those of PySpark, and stand-ins for PySpark 4.1, which has
none and never passes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows", "SupportsTriggerAvailableNow"]

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.1
    if not TYPE_CHECKING:

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

        SupportsTriggerAvailableNow = object
