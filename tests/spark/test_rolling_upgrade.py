"""A streaming query runs while three instances are stopped and started one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.test_rolling_upgrade import State, rolled

RESTARTS_MAX = 20


class Stream:
    """A query that keeps the last number of each key; it is started again from its checkpoint when it fails."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self.seen: State = {}
        self.restarts = 0

    def begin(self, servers: str) -> None:
        self._servers = servers
        self._query = self._start()

    def _start(self) -> StreamingQuery:
        changes = self._spark.readStream.format("sow").options(server=self._servers, startingFrom="earliest")
        rows = changes.schema("id STRING, n LONG").load("orders")
        writing = rows.writeStream.option("checkpointLocation", str(self._checkpoint)).foreachBatch(self._take)
        return writing.start()

    def _take(self, batch: DataFrame, number: int) -> None:
        for row in batch.collect():
            self.seen[row["id"]] = max(self.seen.get(row["id"], 0), row["n"])

    def end(self, state: State) -> None:
        """Reads up to the end, and compares."""
        while True:
            try:
                self._query.processAllAvailable()
                break
            except PySparkException:
                self.restarts += 1
                assert self.restarts < RESTARTS_MAX, "it does not go on"
                self._query = self._start()
        self._query.stop()
        print(f"{self.restarts} restarts of the query")
        assert self.seen == state


@pytest.mark.long
def test_a_streaming_query_misses_nothing_while_instances_are_upgraded(spark: SparkSession, tmp_path: Path) -> None:
    """P5, R14, F1."""
    stream = Stream(spark, tmp_path / "checkpoint")
    rolled(tmp_path, begins=stream.begin, ends=stream.end)
