"""Streams into topics: each batch once, whatever is cut off and run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sow_client import Client
from tests.support.servers.server import ServerProcess

CONFIG = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ServerProcess(tmp_path / "server", CONFIG) as server, server.client() as client:
        client.address = server.address  # type: ignore[attr-defined]  # for `run`
        yield client


def lines(folder: Path, name: str, ids: range) -> None:
    """A file, which is a partition of a batch."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"id": at}) + "\n" for at in ids))


def files(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream with a batch for all the files that are new, and a partition for each."""
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))
    return spark.readStream.schema("id long").json(str(folder))


def run(frame: DataFrame, server: str, checkpoint: Path, **options: str) -> None:
    """Runs a query until it has had everything."""
    mode = options.pop("outputMode", "append")
    query = (
        frame.writeStream.format("sow")
        .outputMode(mode)
        .options(server=server, topic="orders", checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def entries(client: Client) -> int:
    return client.plan_changes("orders", start="earliest").entries


def failing_without(go: Path, victim: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function that fails behind a certain row, until `go` is there."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if victim in batch.column(0).to_pylist() and not go.exists():
                yield batch
                raise ValueError("broken")
            yield batch

    return fail


def test_a_batch_that_was_published_but_not_recorded_by_spark_is_not_published_again(
    spark: SparkSession, client: Client, tmp_path: Path
) -> None:
    """given a query that was killed after a batch and before Spark took note of that / when it is run again, also with
    newer rows / then no row of that batch is published twice, and those of the next one are (P6)"""
    server = client.address  # type: ignore[attr-defined]  # the fixture sets it
    lines(tmp_path / "in", "a.json", range(1000))
    lines(tmp_path / "in", "b.json", range(1000, 1500))
    frame = files(spark, tmp_path / "in")
    run(frame, server, tmp_path / "checkpoint")
    assert (client.count("orders"), entries(client)) == (1500, 1500)

    # As a kill between the two leaves it: the batch is planned, and not committed.
    for left in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        left.unlink()
    lines(tmp_path / "in", "c.json", range(1500, 1700))
    run(frame, server, tmp_path / "checkpoint")
    assert (client.count("orders"), entries(client)) == (1700, 1700)

    # Under another name it is another writer, which has published nothing yet.
    for left in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        left.unlink()
    run(frame, server, tmp_path / "checkpoint", writerId="again")
    assert entries(client) == 1900


def test_a_failed_batch_publishes_only_its_unfinished_partitions_again(
    spark: SparkSession, client: Client, tmp_path: Path
) -> None:
    """given a batch in which one partition of two fails behind half of its rows / when the query is run again / then
    all rows are there, and those of the finished partition were published once"""
    server = client.address  # type: ignore[attr-defined]  # the fixture sets it
    lines(tmp_path / "in", "a.json", range(1000))
    lines(tmp_path / "in", "b.json", range(1000, 4000))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
    try:
        frame = files(spark, tmp_path / "in").mapInArrow(failing_without(tmp_path / "go", 2500), "id long")
        with pytest.raises(PySparkException):
            run(frame, server, tmp_path / "checkpoint")
        (tmp_path / "go").touch()
        run(frame, server, tmp_path / "checkpoint")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert client.count("orders") == 4000
    versions: dict[str, int] = {}
    for change in client.read_changes(
        "orders",
        client.plan_changes("orders", start="earliest").start,
        client.plan_changes("orders", start="latest").end,
        columns=("key",),
    ):
        text = bytes(change.keys)
        at = 0
        for end in memoryview(bytes(change.key_offsets)).cast("I")[1:]:
            key = text[at:end].decode()
            versions[key] = versions.get(key, 0) + 1
            at = end
    assert {key for key, count in versions.items() if count > 1} <= {str(at) for at in range(1000, 4000)}
    assert len(versions) == 4000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputMode": "complete"}, "outputMode complete would replace the topic by every batch; use foreachBatch"),
        ({"writerId": "a b"}, "option writerId: 'a b' is not"),
    ],
)
def test_invalid_options_of_a_stream_are_refused(
    spark: SparkSession, client: Client, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    """given an output mode or a name that makes no sense / when the query runs / then the error says what to do"""
    lines(tmp_path / "in", "a.json", range(10))
    frame = files(spark, tmp_path / "in")
    frame = frame.groupBy("id").count() if "outputMode" in options else frame
    with pytest.raises(PySparkException) as caught:
        run(frame, client.address, tmp_path / "checkpoint", **options)  # type: ignore[attr-defined]  # the fixture sets it
    assert said in str(caught.value), str(caught.value)
