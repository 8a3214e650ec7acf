"""The data source itself: what Spark calls, handed on to the module that does it.

Spark runs each of these in a short-lived planner process of its own, and pickles the instance from one to the next: an
instance holds the options and nothing else. The modules that do the work are imported where they are needed, as every
one of these processes pays for its imports.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class SowDataSource(DataSource):
    """Format `sow`."""

    @classmethod
    def name(cls) -> str:
        """What `format(...)` takes."""
        return "sow"

    # ---- reading ----

    def schema(self) -> StructType:
        """The schema that is inferred where the user gives none."""
        from sow_spark.options import parse_reading
        from sow_spark.schemas import infer

        return infer(parse_reading(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a snapshot."""
        from sow_spark.options import parse_reading
        from sow_spark.reading import FilteringReader, SnapshotReader

        reading = parse_reading(self.options)
        # Not by itself: Spark (4.1 to 4.3) keeps one plan for a DataFrame that was loaded, that of the last filters it
        # has pushed, and gives it to every other use of it, also without a filter: rows would be missing.
        kind = FilteringReader if reading.push_filters and _filters_are_pushed() else SnapshotReader
        return kind(reading, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Follows the changes."""
        from sow_spark.options import parse_reading
        from sow_spark.stream_reading import ChangesReader

        return ChangesReader(parse_reading(self.options), schema)

    # ---- writing ----

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Publishes rows, or replaces the topic's content by them."""
        from sow_spark.options import parse_writing

        writing = parse_writing(self.options)
        if overwrite:
            from sow_spark.overwriting import OverwritingWriter

            return OverwritingWriter(writing, schema)
        from sow_spark.writing import PublishingWriter

        return PublishingWriter(writing, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  # Spark's name
        """Publishes each micro-batch once."""
        from sow_spark.options import parse_writing
        from sow_spark.stream_writing import StreamPublishingWriter

        return StreamPublishingWriter(parse_writing(self.options), schema, overwrite)


def _filters_are_pushed() -> bool:
    """Whether this process was started by Spark to push filters down.

    A reader that has `pushFilters` is refused while spark.sql.python.filterPushdown.enabled is off, and nothing tells a
    data source how that is set. But Spark pushes filters in a worker program of its own, which it runs only while the
    setting is on. Should a version of Spark name it otherwise, filters are not pushed, and the result is the same.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER
