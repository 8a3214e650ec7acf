"""The data source itself: the interface that Spark calls. Each call goes on to the module that handles it.

Spark runs each of these calls in a short-lived planner process of its own, and pickles the instance from one to the
next. So an instance holds only the options. The modules that do the work are imported inside the methods, because each
of these processes pays for its imports.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )

    from sow_spark.options import Reading

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


class SowDataSource(DataSource):
    """Format `sow`: topics as DataFrames and streams, both ways.

        spark.read.format("sow").option("server", "ldn:7450,nyc:7450").load("orders")
        rows.write.format("sow").option("ttl", "1h").mode("append").save("orders")
        spark.readStream.format("sow").option("startingFrom", "earliest").load("orders")

    Options, with their defaults. docs/spark.md explains them. Upper and lower case are the same. With `read.` or
    `write.` in front an option counts in that direction only. An option without effect is refused.

    For every use:
        server = 127.0.0.1:7450     HOST or HOST:PORT; several instances with commas: the first that serves is used
        topic                       the topic; `path`, the argument of load() and save(), is another name for it
        tlsCa, tlsCertificate, tlsKey, tlsServerName
                                    PEM files for TLS, and the name in the server's certificate
        tokenFile                   a file with the token to show; only its owner may read it
        timeout = 30s               bound of a call that has one answer
        connectTimeout = 5s         time to wait for a connection
        retryFor = 60s              time to wait for a server that cannot be reached; 0s: none

    Reading (pushFilters, snapshot, export and lease: not a stream):
        topics                      in place of topic: several, with commas; they may be in several cells
        topicPattern                in place of topic: all whose whole names match this regular expression
        filter                      only records that match, in the language of docs/filters.md
        parameters                  the values of the names in filter, as a JSON object
        pushFilters = auto          Spark's filters are pushed, too: auto (where that is right), true, false
        columns                     the columns to read, of an inferred schema, with commas
        snapshot = first-read       once the snapshot has ended, the next action takes another one; load: never
        export                      the id of an export that the program has opened itself
        partitions                  approximate number of partitions
        inferRecords = 1000         records in the sample for inferring a schema
        jsonSchema                  makes the schema: a JSON Schema, a file with one, or topic:NAME/KEY
        metadata = true             metadata columns of an inferred schema: true, changes, false
        newFields = ignore          fields that the schema lacks: ignore, fail, rescue (in the column _rescued)
        payload                     columns (of json documents), or one column: string, binary
        mode = FAILFAST             documents that do not fit: FAILFAST, PERMISSIVE (null), DROPMALFORMED (left out)
        lease = 10m                 time for which a snapshot stays open while no task reads from it
        batchSize                   approximate number of records per Arrow batch

    Reading a stream:
        startingFrom = latest       earliest, latest, a time, or a bookmark
        maxRecordsPerTrigger, maxBytesPerTrigger
                                    bounds of a micro-batch, in entries and bytes of the journal
        failOnDataLoss = true       false: a query whose changes are gone goes on with the earliest one
        pinName                     the durable subscription that keeps the journal for the query
        pinLease = 1h               time for which it keeps the journal after the query has stopped

    Writing:
        topicColumn                 in place of topic: the column with the topic of each row; not for an overwrite
        mode = publish              publish: a row replaces the record of its key; delta: it is merged into it
        ttl                         lifetime of every row: 30s, never
        ttlColumn                   column with the row's lifetime
        expireTimeColumn            column with the row's expire time
        keyColumn = _key            column with the key, on a topic without key fields
        payload = columns           string, binary: the one remaining column is the payload
        nulls = omit                write: a null is null in the document, and not left out
        onBadRow = fail             drop: rows that cannot be records are counted and left out
        onDelete = delete           rows whose _op is delete or expire: delete, ignore, fail
        durability                  fsync, buffered, replicated; not for an overwrite
        batchSize = 2000            rows per request; not for an overwrite
        lease = 10m                 of an overwrite: time for which its rows are kept while no task stages any
        writerId                    of a stream: its name to the server; Spark adds queryName and checkpointLocation
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "sow"

    # ---- reading ----

    _inferred = False
    """True if Spark has asked for the schema, because the user gives none."""
    _loaded: tuple[Reading, ...] = ()
    """The options with each export of `snapshot=load`."""

    def schema(self) -> StructType:
        """The inferred schema, if the user gives none. Spark calls it in `load()`, and keeps the instance. It is not
        known yet whether a snapshot or a stream is read."""
        from sow_spark.option_parsing import parse_reading
        from sow_spark.schemas import infer

        reading = parse_reading(self.options)
        schema = infer(reading)
        self._inferred = True
        if reading.is_fixed and reading.export is None:
            from sow_spark.reading import opened_at_load

            self._loaded = opened_at_load(reading)  # last, so that a load that fails leaves no export
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a snapshot."""
        from sow_spark.option_parsing import parse_reading
        from sow_spark.reading import FilteringReader, SnapshotReader
        from sow_spark.schemas import check_given

        reading = parse_reading(self.options, "snapshot")
        if not self._inferred:
            check_given(reading)
        # Spark (4.1 to 4.3) keeps one plan for a loaded DataFrame, that of the filters pushed last, and uses it for
        # every other use of the DataFrame, also without a filter. Rows would be missing, and neither the planner nor a
        # task can tell for which use it works. So filters are pushed there only on request. If Spark's setting is off,
        # Spark refuses a reader that takes filters, and names the setting: so a request never goes unheeded.
        push = reading.push_filters
        if push is None:
            push = plans_each_use() and _filters_are_pushed()
        kind = FilteringReader if push else SnapshotReader
        return kind(reading, schema, self._loaded)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Follows the changes."""
        from sow_spark.errors import SowSourceError
        from sow_spark.option_parsing import parse_reading
        from sow_spark.schemas import check_given
        from sow_spark.stream_reading import ChangesReader

        try:
            reading = parse_reading(self.options, "stream")
        except SowSourceError:
            if self._loaded:  # `snapshot` is refused here, but not where the schema was inferred
                from sow_spark.reading import closed

                closed(self._loaded)
            raise
        if not self._inferred:
            check_given(reading)
        if reading.several:
            from sow_spark.stream_cells import CellsReader

            return CellsReader(reading, schema)
        return ChangesReader(reading, schema)

    # ---- writing ----

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Publishes rows, or replaces the topic's content with them."""
        from sow_spark.option_parsing import parse_writing

        writing = parse_writing(self.options, "overwrite" if overwrite else "append")
        if overwrite:
            from sow_spark.overwriting import OverwritingWriter

            return OverwritingWriter(writing, schema)
        from sow_spark.writing import PublishingWriter

        return PublishingWriter(writing, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  # Spark's name
        """Publishes each micro-batch once."""
        from sow_spark.option_parsing import parse_writing
        from sow_spark.stream_writing import StreamPublishingWriter

        return StreamPublishingWriter(parse_writing(self.options, "stream"), schema, overwrite)


def plans_each_use() -> bool:
    """True if this Spark plans each use of a DataFrame by itself, so that pushed filters are those of that use.

    Spark does so since it pushes limits: the change that added `pushLimit` moved the plan from the DataFrame to the
    scan.
    """
    return hasattr(DataSourceReader, "pushLimit")


def _filters_are_pushed() -> bool:
    """True if Spark has started this process to push filters down.

    Spark refuses a reader with `pushFilters` while spark.sql.python.filterPushdown.enabled is off, and a data source
    cannot read this setting. But Spark pushes filters in a worker program of its own, which it runs only while the
    setting is on. If a version of Spark gives the program another name, `auto` pushes none, and the result is the same.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER
