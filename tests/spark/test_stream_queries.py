"""Changes as streams: queries of Spark, on a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import IntegerType

import sow_spark
from sow_client import Client, Durable
from sow_spark.stream_offsets import sequence_of
from tests.support.servers.server import ServerProcess, until

MICRO_BATCHES_HAVE_LIMITS = hasattr(DataSourceStreamReader, "getDefaultReadLimit")
"""Not with PySpark 4.1: a run with `availableNow` takes one micro-batch there, as docs/spark.md says."""


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


def publish(client: Client, topic: str, *numbers: int) -> None:
    for number in numbers:
        client.publish(topic, {"n": number}, key=f"k{number % 3}")


def test_a_query_reads_several_topics_with_an_inferred_schema(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("i.a", {"n": 1, "name": "x"}, key="k")
    client.publish("i.b", {"n": 2.5}, key="k")
    source = spark.readStream.format("sow").option("server", server.address).option("topics", "i.a,i.b")
    frame = source.option("startingFrom", "earliest").load()
    assert frame.columns[:3] == ["n", "name", "_topic"]
    rows: list[tuple[object, ...]] = []
    writer = frame.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.select("_topic", "n", "name").collect()))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    finished(writer.trigger(availableNow=True).start())
    assert sorted(map(tuple, rows)) == [("i.a", 1.0, "x"), ("i.b", 2.5, None)]


def started(spark: SparkSession, server: ServerProcess, folder: Path, schema: str, **options: str) -> Any:
    """A writer into an ordered table in memory."""
    source = spark.readStream.format("sow").schema(schema).options(server=server.address, retryFor="60s", **options)
    return source.load().writeStream.option("checkpointLocation", str(folder / "checkpoint"))


def finished(query: StreamingQuery) -> None:
    assert query.awaitTermination(120), "the query has not ended in time"


def test_a_query_goes_on_where_it_stopped(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a limit of one change / when a query runs, and runs again after more changes / then each change comes once,
    and the progress has the head of the journal and the lag; with PySpark 4.1 the end of the micro-batch"""
    seen: list[tuple[object, ...]] = []

    def collect(batch: Any, _: int) -> None:
        seen.extend(tuple(row) for row in batch.orderBy("_sequence").collect())

    schema = "n LONG, _key STRING, _op STRING, _sequence LONG"
    publish(client, "q1", 1, 2)
    head = sequence_of(client.plan_changes("q1", start="latest").head)
    writer = started(spark, server, tmp_path, schema, topic="q1", startingFrom="earliest", maxRecordsPerTrigger="1")

    def runs() -> list[dict[str, Any]]:
        """Runs to the end; returns the offsets of the progress."""
        found: list[dict[str, Any]] = []
        for _ in range(1 if MICRO_BATCHES_HAVE_LIMITS else 2):
            query = writer.foreachBatch(collect).trigger(availableNow=True).start()
            finished(query)
            told = [json.loads(one.json) for one in query.recentProgress if one["numInputRows"]]
            found += [one["sources"][0]["latestOffset"] for one in told]
        return found

    told = runs()
    assert [row[:3] for row in seen] == [(1, "k1", "put"), (2, "k2", "put")]
    if MICRO_BATCHES_HAVE_LIMITS:
        assert [(one["sequence"], one["recordsBehind"]) for one in told] == [(head, 1), (head, 0)]
    else:
        assert [one["sequence"] for one in told] == [row[3] for row in seen]
    client.sow_delete("q1", keys=["k1"])
    publish(client, "q1", 5)
    runs()
    assert [row[:3] for row in seen[2:]] == [(1, "k1", "delete"), (5, "k2", "put")]


def pins(client: Client, topic: str) -> list[Durable]:
    return [one for one in client.durables(topic) if one.pin]


@pytest.mark.parametrize(
    "end", [*("stop", "for good"), *[pytest.param(end, marks=pytest.mark.long) for end in ("failure", "available now")]]
)
def test_a_pin_stays_for_its_lease_after_its_query_unless_that_has_ended_for_good(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path, end: str
) -> None:
    """J18, stream_pins [3]. A query goes on from its checkpoint after a stop and a failure, so the journal is kept for
    it. While it runs the pin is renewed; afterwards nobody renews it."""
    topic = f"pinned.{end.replace(' ', '.')}"
    publish(client, topic, 1)
    options = {"topic": topic, "startingFrom": "earliest", "pinLease": "3s"}
    fails = threading.Event()

    def take(batch: DataFrame, _: int) -> None:
        batch.collect()
        if fails.is_set():
            raise ValueError("as asked")

    writer = started(spark, server, tmp_path, "n LONG", **options).foreachBatch(take)
    query = writer.trigger(availableNow=True).start() if end == "available now" else writer.start()
    until(lambda: pins(client, topic), 60, "the pin")
    (pin,) = pins(client, topic)
    assert (pin.settings.idle_ttl, pin.reader[:7]) == ("3s", "Spark 4")
    until(lambda: query.lastProgress, 60, "a micro-batch")
    if end == "available now":
        finished(query)
    elif end == "failure":
        fails.set()
        publish(client, topic, 2)
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(60)
    else:
        until(lambda: pins(client, topic)[0].last_use_time > pin.last_use_time, 60, "a renewal")
        if end == "stop":
            query.stop()
    if end == "for good":
        removed = sow_spark.stop_for_good(query, {**options, "server": server.address})
        assert (removed, pins(client, topic), query.isActive) == ([f"{topic}/{pin.name}"], [], False)
        return
    assert pins(client, topic), "it has not ended with the query"
    until(lambda: not pins(client, topic), 60, "the end of the lease")


@pytest.mark.long
def test_a_query_lives_through_a_restart_of_the_server(spark: SparkSession, tmp_path: Path) -> None:
    numbers: list[int] = []
    with ServerProcess(tmp_path / "server") as own:
        with own.client() as client:
            publish(client, "t", 1, 2)

        def collect(batch: Any, number: int) -> None:
            numbers.extend(row.n for row in batch.collect())
            if number == 0:
                own.kill9()
                own.start()
                with own.client() as client:
                    publish(client, "t", 3)

        writer = started(spark, own, tmp_path, "n LONG", topic="t", startingFrom="earliest")
        query = writer.foreachBatch(collect).start()
        try:
            while len(numbers) < 3 and query.isActive:
                query.processAllAvailable()
        finally:
            query.stop()
        assert query.exception() is None
    assert numbers == [1, 2, 3]


def test_a_query_with_a_wrong_filter_does_not_start(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    publish(client, "q3", 1)
    writer = started(spark, server, tmp_path, "n LONG", topic="q3", filter="/n = ", startingFrom="earliest")
    query = writer.format("noop").trigger(availableNow=True).start()
    with pytest.raises(Exception, match="SowSourceError: FILTER_INVALID: checking the filter, topic q3"):
        query.awaitTermination(60)
    assert client.durables("q3") == []


@pytest.mark.long
def test_a_stream_tells_an_inferred_schema_from_a_given_one(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given an option about the inferred schema / then it counts where Spark asks for the schema, and is refused beside
    a given one."""
    publish(client, "q4", 1)
    source = spark.readStream.format("sow").options(server=server.address, topic="q4", startingFrom="earliest")
    shaped = source.option("jsonSchema", '{"properties":{"n":{"type":"integer","format":"int32"}}}')
    rows: list[int] = []

    def run(frame: DataFrame, name: str) -> None:
        writer = frame.writeStream.option("checkpointLocation", str(tmp_path / name))
        query = writer.foreachBatch(lambda batch, _: rows.extend(row.n for row in batch.collect()))
        finished(query.trigger(availableNow=True).start())

    inferred = shaped.load()
    assert inferred.schema["n"].dataType == IntegerType()
    run(inferred, "inferred")
    assert rows == [1]
    with pytest.raises(Exception, match="OPTION_INVALID: option jsonSchema: and a given schema exclude each other"):
        run(shaped.schema("n LONG").load(), "given")


@pytest.mark.long
def test_a_query_shows_one_readable_line_when_changes_are_lost(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    publish(client, "q2", 1)
    bookmark = f"{'0' * 12}.1"
    writer = started(spark, server, tmp_path, "n LONG", topic="q2", startingFrom=bookmark)
    query = writer.format("noop").trigger(availableNow=True).start()
    with pytest.raises(Exception, match="SowSourceError: ") as failed:
        query.awaitTermination(60)
    line = next(line for line in str(failed.value).splitlines() if "SowSourceError: " in line)
    assert "DATA_LOST: changes of topic q2 after" in line
