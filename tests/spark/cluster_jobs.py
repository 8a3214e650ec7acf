"""Programs for tests/spark/test_clusters.py: drivers that spark-submit starts, with tasks that fail in every way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession, functions

FAILS: Final = 1
ENDS: Final = 2
DAWDLES: Final = 3
KILLS_EXECUTOR: Final = 4
"""Partitions, and what befalls the first attempt at each. Partition 0 waits, with its first rows through, until the
test has seen it."""
ROWS: Final = "id LONG, text STRING"


def faulty(marks: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Passes rows on. After its first batch the first attempt at some partitions comes to grief."""

    def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition, begun = context.partitionId(), False
        for batch in batches:
            yield batch
            if not begun:
                begun = True
                befall(partition, Path(marks))

    return passed


def befall(partition: int, marks: Path) -> None:
    mark = marks / str(partition)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return  # a later attempt
    if partition == 0:
        while not (marks / "go").exists():
            time.sleep(0.05)
    if partition == FAILS:
        raise ValueError("this task fails")
    if partition == ENDS:
        os._exit(7)
    if partition == DAWDLES:
        while not (marks / "over").exists():  # until Spark kills it, as another attempt was quicker
            time.sleep(0.05)
    if partition == KILLS_EXECUTOR:
        daemon = os.getppid()
        os.kill(int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)


def read(spark: SparkSession, server: str, topic: str, marks: str) -> object:
    """Count and sums of a topic, by tasks that fail."""
    source = spark.read.format("sow").schema(ROWS).option("server", server).option("partitions", 8)
    rows = source.option("batchSize", 500).load(topic).mapInArrow(faulty(marks), ROWS)
    sums = rows.agg(functions.count("id"), functions.sum("id"), functions.sum(functions.crc32(functions.col("text"))))
    return list(sums.collect()[0])


def write(spark: SparkSession, server: str, topic: str, marks: str, records: str, mode: str) -> object:
    """Numbers, published by tasks that fail."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    rows = spark.range(0, int(records), 1, 8).selectExpr("id", "concat('text ', id) AS text")
    sink = rows.mapInArrow(faulty(marks), ROWS).write.format("sow").option("server", server)
    sink.option("write.batchSize", 500).mode(mode).save(topic)
    return int(records)


def versions(spark: SparkSession, server: str, topic: str, folder: str) -> object:
    """One run of examples.spark.dimension, in small batches."""
    from examples.spark.dimension import dimension
    from examples.spark.lake import Source

    columns = "id LONG, text STRING, _publish_time TIMESTAMP, _expire_time TIMESTAMP"
    dimension(spark, Source(server, topic, columns, "versions", records_per_batch=300), folder)
    return None


def captured(spark: SparkSession, server: str, topic: str, folder: str) -> object:
    """One run of examples.spark.capture, in small batches."""
    from examples.spark.capture import capture
    from examples.spark.lake import Source

    columns = "id LONG, text STRING, _version LONG, _expire_time TIMESTAMP"
    capture(spark, Source(server, topic, columns, "capture", records_per_batch=300), folder)
    return None


def state(spark: SparkSession, server: str, topic: str, folder: str) -> object:
    """A state of files of rows, into a topic, until the row with id -1 has come. It notes what each batch wrote."""
    import sow_spark

    files = spark.readStream.schema("id LONG, text STRING, n LONG, _op STRING, _ttl STRING")
    stream = files.option("maxFilesPerTrigger", 1).json(f"{folder}/in")
    changes = sow_spark.state_of_the_world(stream, key="/id", order="n", engine="jvm")
    if topic == "noted":  # with the moments at which it dies

        def note(batch: DataFrame, number: int) -> None:
            rows = [row.asDict() for row in batch.orderBy("_key", "_version", "_op").collect()]
            noted = Path(folder) / "noted"
            noted.mkdir(exist_ok=True)
            (noted / f"{number}-{os.getpid()}").write_text(json.dumps(rows, default=str))
            kill = Path(folder) / f"kill-{number}"
            if kill.exists():
                kill.unlink()
                os.killpg(0, signal.SIGKILL)

        query = sow_spark.start_state(changes, note, checkpoint=f"{folder}/checkpoint", trigger="1s")
    else:
        sink = {"server": server, "topic": topic}
        query = sow_spark.start_state(changes, sink, checkpoint=f"{folder}/checkpoint", trigger="1s")
    while not sow_spark.read_state(spark, f"{folder}/checkpoint").where("id = -1").count():
        assert query.isActive, query.exception()
        time.sleep(0.5)
    sow_spark.stop_state(query)
    state = sow_spark.read_state(spark, f"{folder}/checkpoint").orderBy("_key")
    return [[row["_key"], row["text"], row["n"]] for row in state.collect()]


def connect(spark: SparkSession, folder: str) -> object:
    """Serves Spark Connect until its client is done, and reads the state that it has kept."""
    import sow_spark
    from sow_spark.errors import SowSourceError

    (Path(folder) / "ready").touch()
    while not (Path(folder) / "over").exists():
        time.sleep(0.1)
    checkpoint = f"{folder}/checkpoint"
    state = sow_spark.read_state(spark, checkpoint).orderBy("_key")
    rows = [[row["_key"], row["name"]] for row in state.collect()]
    stream = spark.readStream.schema("id LONG, name STRING, n LONG, _ttl STRING").json(f"{folder}/in")
    refused = ""
    try:
        changes = sow_spark.state_of_the_world(stream, key="/id", order="n", engine="jvm")
        sow_spark.start_state(changes, {"server": "nowhere", "topic": "none"}, checkpoint=checkpoint)
    except SowSourceError as error:
        refused = str(error)
    spark.stop()  # else the threads of the server keep the JVM
    return {"rows": rows, "refused": refused}


def many(spark: SparkSession, server: str, pattern: str) -> object:
    """One job over many topics: the number of records in each."""
    source = spark.read.format("sow").schema("_topic STRING").option("server", server).option("topicPattern", pattern)
    return {row["_topic"]: row["count"] for row in source.load().groupBy("_topic").count().collect()}


def main(name: str, answer: str, *arguments: str) -> None:
    spark = (
        SparkSession.builder.appName(name)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    jobs = {job.__name__: job for job in (read, write, versions, captured, state, connect, many)}
    found = jobs[name](spark, *arguments)
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
