"""Stream write: each micro-batch of a query is published once, through kills and restarts.

A partition of a query is one publisher, `spark-<query>-<partition>`, and its units are the query's batches. If a column
names the topics of the rows, it is one for each topic (writing [5]). Guarantees:

    [1]  One commit writes the last rows of a partition of a batch and records that the partition is published whole. A
         later attempt, in the same run or after a restart from the checkpoint, publishes nothing.
    [2]  Of the attempts before that at most one continues: each attempt fences the earlier ones, and publishes all rows
         again. So rows of a partition of several requests that was cut off may be published twice; the last publish of
         each row stays. A partition of one request is published once.
    [3]  The query is known by the id that Spark keeps in its checkpoint, or by the option `writerId`.

[1] relies on Spark's promise that a repeated batch has the same rows in the same partitions. The promise does not hold
    where the number of partitions depends on the size of the cluster. A partition that comes back with another number
    of rows is refused (ROWS_DIFFER) rather than taken for finished. Removals (`_op`) are rows as
    any other: they are published in the order of the rows, and are part of the unit.

Spark itself refuses outputMode update for data sources in Python. This module refuses outputMode complete, because each
batch would have to replace the topic. Use `foreachBatch` for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sow_spark.errors import SowSourceError
from sow_spark.options import Writing
from sow_spark.writing import Written, log_summary, publish, target, task_context

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""The local properties that Spark sets for the tasks of a micro-batch."""


class StreamPublishingWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. Spark makes a new one for each batch, and for each commit."""

    def __init__(self, writing: Writing, schema: StructType, overwrite: bool) -> None:
        """Raises SowSourceError for a fault in options, schema, output mode or topic."""
        if overwrite:
            raise SowSourceError(
                "OPTION_INVALID",
                "outputMode complete would replace the topic by every batch",
                "use foreachBatch: with outputMode update and mode('append') the topic keeps each key's last row, with "
                "outputMode complete and mode('overwrite') it keeps only the rows of the last batch",
            )
        self._to = target(writing, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition of a batch."""
        task = task_context()
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise SowSourceError(
                "INPUT_UNKNOWN", "Spark does not tell the query and the batch of this task", "run it as micro-batches"
            )
        partition = task.partitionId()
        publisher_id = f"spark-{self._to.writing.writer_id or query}-{partition}"
        return publish(self._to, iterator, publisher_id, int(batch) + 1, partition)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """The batch is published: logs the figures."""
        log_summary(self._to.writing, f"batch {batchId}", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """The batch has failed. It runs again when the query does."""
        log_summary(self._to.writing, f"aborted batch {batchId}", messages)
