"""The data source itself: the interface that Spark calls. Each call goes on to the module that handles it.

Spark runs each of these calls in a short-lived planner process of its own, and pickles the instance from one to the
next. So an instance holds only the options. The modules that do the work are imported inside the methods, because each
of these processes pays for its imports.
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

    from sow_spark.options import Reading

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class SowDataSource(DataSource):
    """Format `sow`."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "sow"

    # ---- reading ----

    _loaded: Reading | None = None
    """The options with the export of `snapshot=load`."""

    def schema(self) -> StructType:
        """The inferred schema, if the user gives none. Spark calls it in `load()`, and keeps the instance."""
        from sow_spark.options import parse_reading
        from sow_spark.schemas import infer

        reading = parse_reading(self.options)
        if reading.is_fixed and reading.export is None:
            from sow_spark.reading import opened_at_load

            reading = self._loaded = opened_at_load(reading)
        return infer(reading)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a snapshot."""
        from sow_spark.options import parse_reading
        from sow_spark.reading import FilteringReader, SnapshotReader

        reading = self._loaded or parse_reading(self.options)
        # Only on request: Spark (4.1 to 4.3) keeps one plan for a loaded DataFrame, that of the filters pushed last,
        # and uses it for every other use of the DataFrame, also without a filter. Rows would be missing.
        kind = FilteringReader if reading.push_filters and _filters_are_pushed() else SnapshotReader
        return kind(reading, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Follows the changes."""
        from sow_spark.options import parse_reading
        from sow_spark.stream_reading import ChangesReader

        return ChangesReader(parse_reading(self.options), schema)

    # ---- writing ----

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Publishes rows, or replaces the topic's content with them."""
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
    """Whether Spark has started this process to push filters down.

    Spark refuses a reader with `pushFilters` while spark.sql.python.filterPushdown.enabled is off, and a data source
    cannot read this setting. But Spark pushes filters in a worker program of its own, which it runs only while the
    setting is on. If a version of Spark gives the program another name, filters are not pushed, and the result is the
    same.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER
