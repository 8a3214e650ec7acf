"""Stream write: each micro-batch of a query is published once, whatever is killed and restarted.

A partition of a query is one publisher, `spark-<query>-<partition>`, and its units are the query's batches. Guarantees:

B1  That a partition of a batch is published whole is recorded with its last rows, in one commit; an attempt that comes
    later, in the same run or after a restart from the checkpoint, publishes nothing.
B2  Of the attempts before that at most one goes on: each fences the ones before it, and publishes all rows again. So
    rows of a batch that was cut off may be published twice; each row's last publish is the one that stays.
B3  The query is known by the id that Spark keeps in its checkpoint, or by the option `writerId`.

B1 rests on Spark's promise that a batch which is run again has the same rows in the same partitions; it breaks where
the number of partitions depends on the size of the cluster. A partition that comes back with another number of rows is
refused (ROWS_DIFFER) rather than taken for done. Removals (`_op`) are applied in the order of the rows, and again when
a batch is run again: they are not part of B1, and need not be, as they are the same twice.

Spark itself refuses outputMode update for data sources in Python, and complete is refused here, as a batch that is all
there is would have to replace the topic: both are what `foreachBatch` is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sow_spark.connection import connect, retried
from sow_spark.errors import SowSourceError, option_error, translated
from sow_spark.options import Writing
from sow_spark.rows import look_up_topic, plan_rows
from sow_spark.writing import Written, log_summary, publish, task_context

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Local properties that Spark sets for the tasks of a micro-batch."""
_WRITER_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,150}")


class StreamPublishingWriter(DataSourceStreamArrowWriter):
    """The writer of a stream; Spark makes a new one for each batch, and for each commit."""

    def __init__(self, writing: Writing, schema: StructType, overwrite: bool) -> None:
        """Raises SowSourceError for what is wrong with options, schema, output mode or topic."""
        if overwrite:
            raise SowSourceError(
                "OPTION_INVALID",
                "outputMode complete would replace the topic by every batch",
                "use foreachBatch: with outputMode update and mode('append') the topic keeps each key's last row, with "
                "outputMode complete and mode('overwrite') just the rows of the last batch",
            )
        if writing.writer_id is not None and not _WRITER_ID.fullmatch(writing.writer_id):
            raise option_error("writerId", f"{writing.writer_id!r} is not 1 to 150 characters of [A-Za-z0-9_.:-]")
        with translated(f"writing to {writing.topic}"), connect(writing.connecting) as client:
            topic = retried(writing.connecting, lambda: look_up_topic(client, writing, schema))
        self._writing = writing
        self._plan = plan_rows(schema, writing, topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition of a batch."""
        task = task_context()
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise SowSourceError(
                "INPUT_UNKNOWN", "Spark does not tell the query and the batch of this task", "run it as micro-batches"
            )
        partition = task.partitionId()
        publisher_id = f"spark-{self._writing.writer_id or query}-{partition}"
        return publish(self._writing, self._plan, iterator, publisher_id, int(batch) + 1, partition)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """The batch is published: tells the figures."""
        log_summary(self._writing, f"batch {batchId}", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """The batch has failed, and is run again when the query is."""
        log_summary(self._writing, f"aborted batch {batchId}", messages)
