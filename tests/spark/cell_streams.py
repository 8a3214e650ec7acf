"""Streams of several topics, without Spark's processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pyspark.sql.types import LongType, StringType, StructField, StructType

from sow_spark.option_parsing import parse_reading
from sow_spark.read_limits import ReadAllAvailable, ReadLimit
from sow_spark.stream_cells import CellsReader
from sow_spark.stream_offsets import Offset
from sow_spark.stream_reading import ChangesReader
from tests.support.servers.cells import TwoCells

SCHEMA = StructType().add("_topic", StringType()).add("id", LongType())
CHANGES = StructType([*SCHEMA, StructField("_op", StringType())])


class Stream:
    """A query, as Spark runs it."""

    readers: ClassVar[list[CellsReader | ChangesReader]] = []
    """Those that have not been stopped."""

    def __init__(self, cells: TwoCells, *, begins: bool = True, **options: str) -> None:
        self._options = {"server": cells.home, "startingFrom": "earliest", "retryFor": "1s", **options}
        self.restart()
        self.at = self.reader.initialOffset() if begins else Offset()

    def lenient(self) -> None:
        """A new run, which goes on after losses."""
        self._options["failOnDataLoss"] = "false"
        self.restart()

    def restart(self) -> None:
        """As from a checkpoint."""
        self.reader = CellsReader(parse_reading(self._options, "stream"), CHANGES)
        self.readers.append(self.reader)

    def rows(self, start: Offset, end: Offset) -> list[tuple[str, int]]:
        return sorted(self.read(self.reader.partitions(start, end)))

    def read(self, parts: Sequence[Any]) -> list[tuple[str, int]]:
        return [
            (row["_topic"], row["id"])
            for part in parts
            for batch in self.reader.read(part)
            for row in batch.to_pylist()
        ]

    def next(self, limit: ReadLimit | None = None) -> list[tuple[str, int]]:
        """The rows of the next micro-batch."""
        start, self.at = self.at, self.reader.latestOffset(self.at, limit or ReadAllAvailable())
        found = self.rows(start, self.at)
        assert self.rows(start, self.at) == found, "whenever it is read"
        self.reader.commit(self.at)
        return found
