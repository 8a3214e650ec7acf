"""Snapshots as DataFrames, on a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DoubleType, LongType, StringType, StructType

from sow_client import Client, PackedRecords, SowError
from sow_spark import SowDataSource, reading
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.reading import SnapshotReader
from sow_spark.schemas import layout
from tests.support.servers.server import ServerProcess, until

ORDERS = 3_000
SCHEMA = "id LONG, symbol STRING, price DOUBLE, day DATE, leg STRUCT<px: DOUBLE, tags: ARRAY<STRING>>, _key STRING"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        with client.publisher("orders") as publisher:
            for number in range(ORDERS):
                publisher.publish(order(number))
        client.publish("texts", "é".encode(), key="a")
        yield client


def order(number: int) -> dict[str, object]:
    return {
        "id": number,
        "symbol": f"S{number % 7}",
        "price": number / 4,
        "day": "2024-01-05",
        "leg": {"px": 1, "tags": ["a", None]},
        "note": None,
    }


def read(spark: SparkSession, server: ServerProcess, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("sow").options(server=server.address, retryFor="1s", **options)
    return (reader if schema is None else reader.schema(schema)).load()


@contextmanager
def pushing(spark: SparkSession, setting: str) -> Iterator[None]:
    """With Spark's setting as given."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", setting)
    try:
        yield
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def reason_of(frame_of: object) -> str:
    """The last line of what Spark shows, which is ours."""
    with pytest.raises(PySparkException) as failed:
        frame_of()  # type: ignore[operator]  # a lambda
    return next(line for line in str(failed.value).splitlines() if "SowSourceError: " in line)


def test_every_record_comes_once_from_any_number_of_partitions(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    frame = read(spark, server, SCHEMA, topic="orders", partitions="4")
    rows = frame.orderBy("id").collect()
    assert [row.id for row in rows] == list(range(ORDERS))
    assert rows[5].asDict(recursive=True) == {
        "id": 5,
        "symbol": "S5",
        "price": 1.25,
        "day": datetime(2024, 1, 5, tzinfo=UTC).date(),
        "leg": {"px": 1.0, "tags": ["a", None]},
        "_key": "5",
    }
    assert frame.rdd.getNumPartitions() > 1


def test_a_schema_is_inferred_and_has_the_metadata(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    frame = read(spark, server, topic="orders")
    assert frame.schema.simpleString() == (
        "struct<id:bigint,symbol:string,price:double,day:string,leg:struct<px:bigint,tags:array<string>>,note:string,"
        "_key:string,_version:bigint,_publish_time:timestamp,_expire_time:timestamp,_origin:string>"
    )
    row = frame.where("id = 17").first()
    record = client.get("orders", "17")
    assert row is not None
    assert record is not None
    assert (row["_key"], row["_version"], row["_expire_time"]) == ("17", record.version, None)


@pytest.mark.parametrize("pushed", ["true", "false"])
def test_filters_give_the_same_with_and_without_push_down(
    spark: SparkSession, server: ServerProcess, client: Client, pushed: str
) -> None:
    with pushing(spark, pushed):
        options = {"filter": "/id < 100 OR /id >= 200", "pushFilters": pushed}
        frame = read(spark, server, SCHEMA, topic="orders", **options)
        condition = "symbol = 'S3' AND price > 12.5 AND leg.px = 1 AND _key LIKE '%5' AND NOT id IN (10, 20)"
        found = [row.id for row in frame.where(condition).orderBy("id").collect()]
    assert found == [n for n in range(ORDERS) if not 100 <= n < 200 and n % 7 == 3 and n > 50 and n % 10 == 5]


def test_push_filters_is_refused_while_spark_pushes_none(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """It went unheeded: a query that was meant to read ten records read all of them."""
    with pushing(spark, "false"):
        for condition in ("id = 17", "true"):
            frame = read(spark, server, SCHEMA, topic="orders", pushFilters="true").where(condition)
            with pytest.raises(PySparkException, match=r"'spark\.sql\.python\.filterPushdown\.enabled' is false"):
                frame.count()
        assert read(spark, server, SCHEMA, topic="orders", pushFilters="auto").where("id = 17").count() == 1
    with pushing(spark, "true"):
        assert read(spark, server, SCHEMA, topic="orders", pushFilters="true").count() == ORDERS


def test_a_value_of_a_users_reaches_the_filter_as_a_value(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Also beside Spark's own filters, which are text of the same filter."""
    given = {"symbol": "S3' OR true OR '", "ids": [3, 10, 17, 11]}
    with pushing(spark, "true"):
        options = {"filter": "/symbol != :symbol AND /id IN :ids", "parameters": json.dumps(given)}
        frame = read(spark, server, SCHEMA, topic="orders", pushFilters="true", **options)
        assert sorted(row.id for row in frame.where("symbol = 'S3'").collect()) == [3, 10, 17]
        frame = read(spark, server, SCHEMA, topic="orders", filter="/symbol = :symbol", parameters=json.dumps(given))
        assert "FILTER_INVALID" in reason_of(frame.count)  # `ids` is in no filter


def test_a_frame_that_is_used_with_several_filters_has_all_rows_of_each(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given a DataFrame that was loaded once, and Spark's setting on / when it is used with one filter, with another,
    with both, and with none / then no row is missing

    Spark keeps the plan of the filters that it has pushed last, and reads by it whatever the DataFrame is used for.
    """
    with pushing(spark, "true"):
        frame = read(spark, server, "id LONG", topic="orders")
        low, high = frame.where("id < 10"), frame.where(f"id >= {ORDERS - 10}")
        assert low.count() == 10
        assert frame.count() == ORDERS
        assert low.union(high).count() == 20
        assert high.count() == 10


def test_a_count_by_metadata_or_without_columns_reads_no_document(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given a schema without fields of the document / then the rows are counted, and a document that fits no schema
    does no harm, because none is read"""
    for schema in (StructType(), StructType().add("_version", LongType())):
        frame = spark.read.format("sow").options(server=server.address).schema(schema).load("orders")
        assert frame.count() == ORDERS
        reader = SnapshotReader(parse_reading({"server": server.address, "topic": "orders"}), schema)
        (first, *_) = reader.partitions()
        assert sum(batch.num_rows for batch in reader.read(first)) > 0
        assert "payload" not in Decoder(layout(schema, metadata=True), "columns", "FAILFAST").columns


def test_fields_of_large_documents_that_the_schema_leaves_out_are_not_sent(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given large documents, of which the schema has two fields / then only these two come, with the same values"""
    with client.publisher("wide") as publisher:
        for number in range(50):
            publisher.publish(order(number) | {"pad": "x" * 1_000}, key=str(number))
    came: list[bytes] = []
    decode = Decoder.decode

    def noted(self: Decoder, packed: PackedRecords) -> pa.RecordBatch:
        came.extend(packed.payloads.splitlines())
        return decode(self, packed)

    monkeypatch.setattr(Decoder, "decode", noted)
    schema = StructType().add("price", DoubleType()).add("symbol", StringType()).add("_key", StringType())
    reader = SnapshotReader(parse_reading({"server": server.address, "topic": "wide"}), schema)
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(rows, key=lambda row: row["price"]) == [
        {"price": number / 4, "symbol": f"S{number % 7}", "_key": str(number)} for number in range(50)
    ]
    assert [set(json.loads(line)) for line in came] == [{"price", "symbol"}] * 50


def test_payloads_come_whole_from_other_topics(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    assert [tuple(row)[:2] for row in read(spark, server, topic="texts").collect()] == [("é".encode(), "a")]
    assert [tuple(row) for row in read(spark, server, "payload STRING", topic="texts").collect()] == [("é",)]


def test_several_actions_see_one_cut_by_an_export_of_the_programs_own(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    client.publish("cut", {"n": 1}, key="a")
    export = client.open_export("cut")
    client.publish("cut", {"n": 2}, key="b")
    for _ in range(2):
        frame = read(spark, server, "n LONG", topic="cut", export=export.id)
        assert [row.n for row in frame.collect()] == [1]
    client.close_export(export.id)
    shown = reason_of(lambda: read(spark, server, "n LONG", topic="cut", export=export.id).collect())
    assert "SowSourceError: EXPORT_NOT_FOUND: opening a snapshot of topic cut" in shown


def test_a_topic_without_records(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    client.create_topic("empty", key=["/id"])
    assert read(spark, server, "id LONG", topic="empty").count() == 0
    assert "SCHEMA_UNKNOWN: topic empty has no records" in reason_of(lambda: read(spark, server, topic="empty"))


def test_errors_say_everything_in_one_line(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    shown = reason_of(lambda: read(spark, server, topic="nowhere"))
    assert "TOPIC_NOT_FOUND: looking at topic nowhere" in shown
    shown = reason_of(lambda: read(spark, server, "id LONG", topic="orders", filter="/id = ").count())
    assert "FILTER_INVALID: opening a snapshot of topic orders" in shown
    shown = reason_of(lambda: read(spark, server, "symbol INT, id LONG", topic="orders").collect())
    assert """ROW_MALFORMED: record '0' of topic orders, field /symbol: expected int, found "S0"; correct""" in shown
    assert "did you mean partitions?" in reason_of(lambda: read(spark, server, topic="orders", partition="3"))


def test_modes_of_misfits(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    client.publish_many("odd", [{"a": 1}, {"a": "x"}, {"a": 3}], keys=["1", "2", "3"])
    permissive = read(spark, server, "a LONG, _key STRING", topic="odd", mode="PERMISSIVE")
    assert {tuple(row) for row in permissive.collect()} == {(1, "1"), (None, "2"), (3, "3")}
    assert {tuple(row) for row in permissive.where("a IS NULL").collect()} == {(None, "2")}
    dropped = read(spark, server, "a LONG, _key STRING", topic="odd", mode="DROPMALFORMED")
    assert {tuple(row) for row in dropped.collect()} == {(1, "1"), (3, "3")}


def test_records_that_a_pushed_filter_excludes_are_not_even_read(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    client.publish_many("mixed", [{"a": 1}, {"a": "x"}], keys=["1", "2"])
    with pushing(spark, "true"):
        frame = read(spark, server, "a LONG, _key STRING", topic="mixed", pushFilters="true")
        assert frame.where("_key = '1'").count() == 1
    with pushing(spark, "false"):
        frame = read(spark, server, "a LONG, _key STRING", topic="mixed").where("_key = '1'")
        assert "ROW_MALFORMED: record '2'" in reason_of(frame.count)


def test_a_server_that_is_killed_fails_the_job_and_a_new_load_works(spark: SparkSession, tmp_path: Path) -> None:
    """Never a part of a snapshot that is called the whole."""
    with ServerProcess(tmp_path) as own:
        with own.client() as client:
            client.publish_many("t", [{"n": n} for n in range(100)], keys=[str(n) for n in range(100)])
        frame = read(spark, own, "n LONG", topic="t", partitions="2")
        assert frame.count() == 100
        frame = read(spark, own, "n LONG", topic="t", partitions="2")
        frame.explain()  # the snapshot is open now
        assert frame.rdd.getNumPartitions() >= 1
        own.kill9()
        own.start()
        shown = reason_of(frame.collect)
        assert "EXPORT_NOT_FOUND" in shown
        assert "run the action again on a newly loaded DataFrame" in shown
        assert read(spark, own, "n LONG", topic="t").count() == 100


# ---- the instant of a DataFrame (Q8) ----


def newest_export(server: ServerProcess) -> str:
    return str(server.events("export_opened")[-1]["export"])


def test_a_frame_whose_snapshot_has_ended_takes_a_new_one_with_its_next_action(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Q8. All tasks of an action read the same new snapshot, also if it has another number of parts."""
    client.publish_many("later", [{"n": n} for n in range(300)], keys=[str(n) for n in range(300)])
    frame = read(spark, server, "n LONG", topic="later", partitions="3")
    assert frame.count() == 300
    first = newest_export(server)
    client.publish_many("later", [{"n": n} for n in range(300, 900)], keys=[str(n) for n in range(300, 900)])
    assert frame.count() == 300, "the snapshot is open"
    client.close_export(first)
    joined = frame.join(frame.withColumnRenamed("n", "m"), frame.n == frame.n % 1 + frame.n).selectExpr("n", "m")
    assert frame.agg({"n": "max"}).first()[0] == 899  # type: ignore[index]  # an aggregate has a row
    second = newest_export(server)
    client.publish("later", {"n": 900}, key="900")
    assert joined.where("n = m").count() == 900, "both sides read the second one"
    assert newest_export(server) == second != first
    client.close_export(second)
    client.sow_delete("later", filter="/n > 4")
    assert sorted(row.n for row in frame.collect()) == list(range(5))


def test_a_frame_of_an_empty_topic_shows_records_that_came_after_its_snapshot_ended(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    client.create_topic("filling", key=["/id"])
    frame = read(spark, server, "id LONG", topic="filling")
    assert frame.count() == 0
    client.publish_many("filling", [{"id": n} for n in range(7)])
    client.close_export(newest_export(server))
    assert frame.count() == 7


def test_a_frame_of_one_instant_never_shows_another_one(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Q8, snapshot=load: with an inferred schema the instant is that of `load()`."""
    client.publish("fixed", {"n": 1}, key="a")
    frame = read(spark, server, topic="fixed", snapshot="load")
    client.publish("fixed", {"n": 2}, key="b")
    assert [row.n for row in frame.collect()] == [1]
    client.close_export(newest_export(server))
    assert "EXPORT_NOT_FOUND" in reason_of(frame.collect)


@contextmanager
def written(server: ServerProcess, source: str, behind: str, first: int) -> Iterator[None]:
    """A record of `source`, and after its answer one of `behind`, over and over."""
    stop = threading.Event()

    def write() -> None:
        with server.client() as other:
            number = first
            while not stop.is_set():
                for topic in (source, behind):
                    other.publish(topic, {"id": number, "symbol": f"S{number % 7}"}, durability="buffered")
                number += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        stop.set()
        writing.join()


def test_all_topics_of_a_frame_are_of_one_instant(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """Q6, Q8. given a topic, its view, which changes in the same commits, and a topic that gets a record after each of
    the first / when actions read them in several partitions, while it is written / then all are of one instant, also
    after the end of the snapshot, in which each action shows a later one; and so are two frames of one export, joined
    """
    for name in ("one.source", "one.behind"):
        client.create_topic(name, key=["/id"])
        client.publish_many(name, [{"id": number, "symbol": f"S{number % 7}"} for number in range(900)])
    client.create_view("one.counts", source="one.source", group_by=["/symbol"], select={"records": "COUNT(*)"})
    schema = "symbol STRING, records LONG, _topic STRING"
    with written(server, "one.source", "one.behind", 900):
        frame = read(spark, server, schema, topicPattern="one[.].+", partitions="6")
        assert frame.rdd.getNumPartitions() > 3
        shown = 0
        for _ in range(4):
            counts = frame.selectExpr("_topic", "coalesce(records, 1) AS records").groupBy("_topic").sum("records")
            found = {row["_topic"]: row["sum(records)"] for row in counts.collect()}
            assert found["one.counts"] == found["one.source"]
            assert found["one.source"] - found["one.behind"] in (0, 1)
            assert found["one.source"] > shown
            shown = found["one.source"]
            client.close_export(newest_export(server))

        export = client.open_export(["one.source", "one.counts"])
        one, other = (read(spark, server, schema, topic=name, export=export.id) for name in export.topics)
        joined = one.groupBy("symbol").count().join(other, "symbol").where("count = records")
        assert joined.count() == 7
        client.close_export(export.id)


def test_a_frame_of_several_topics_shows_one_instant_until_its_snapshot_has_ended(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Q8. given a frame of a pattern / when its snapshot has ended, and a topic comes / then the next action takes
    another snapshot of all topics that the frame had"""
    for name in ("both.a", "both.b"):
        client.publish(name, {"n": 1}, key="1")
    frame = read(spark, server, topicPattern="both[.].")
    assert frame.schema["_topic"].dataType == StringType()
    assert sorted((row["_topic"], row.n) for row in frame.collect()) == [("both.a", 1), ("both.b", 1)]
    for name in ("both.a", "both.b", "both.c"):
        client.publish(name, {"n": 2}, key="2")
    assert sorted((row["_topic"], row.n) for row in frame.collect()) == [("both.a", 1), ("both.b", 1)]
    client.close_export(newest_export(server))
    later = [("both.a", 1), ("both.a", 2), ("both.b", 1), ("both.b", 2)]
    assert sorted((row["_topic"], row.n) for row in frame.collect()) == later


def test_a_frame_of_several_topics_may_show_one_instant_for_ever(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Q8, snapshot=load, with the schema of all topics."""
    client.publish("ever.a", {"n": 1}, key="1")
    client.publish("ever.b", {"m": 1}, key="1")
    frame = read(spark, server, topicPattern="ever[.].", snapshot="load")
    for name in ("ever.a", "ever.b", "ever.c"):
        client.publish(name, {"n": 2, "m": 2}, key="2")
    assert sorted((row["_topic"], row.n, row.m) for row in frame.collect()) == [
        ("ever.a", 1, None),
        ("ever.b", None, 1),
    ]
    client.delete_topic("ever.a")
    assert "TOPIC_DELETED" in reason_of(frame.collect)


def test_an_action_does_not_go_on_with_another_snapshot(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8. given two tasks of one action / when the snapshot ends between them / then the second one fails, and
    another action reads a new snapshot; without an action, as for an RDD, there is none"""
    client.publish_many("torn", [{"n": n} for n in range(300)], keys=[str(n) for n in range(300)])
    options = parse_reading({"server": server.address, "topic": "torn", "partitions": "2"})
    reader = SnapshotReader(options, StructType().add("n", LongType()))
    one, two = reader.partitions()
    monkeypatch.setattr(reading, "_reader", lambda: "execution 1")
    assert sum(batch.num_rows for batch in reader.read(one)) > 0
    client.close_export(one.export_id)  # type: ignore[attr-defined]  # its own class
    client.publish("torn", {"n": 300}, key="300")
    for again in (one, two):
        with pytest.raises(SowSourceError, match="EXPORT_NOT_FOUND"):
            list(reader.read(again))
    monkeypatch.setattr(reading, "_reader", lambda: None)
    with pytest.raises(SowSourceError, match="EXPORT_NOT_FOUND"):
        list(reader.read(two))
    monkeypatch.setattr(reading, "_reader", lambda: "execution 2")
    assert sum(batch.num_rows for part in (two, one) for batch in reader.read(part)) == 301


def test_a_snapshot_of_which_spark_has_read_a_part_ends_soon(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Q6, Q8. Spark ends the Python worker of a task that has enough rows. So the reading is broken off, and the idle
    lease counts instead of the lease."""
    with client.publisher("fat") as publisher:
        for number in range(1_000):
            publisher.publish({"n": number, "pad": "x" * 20_000}, key=str(number))
    export = client.open_export("fat", parts=1, lease="10m", idle_lease="1s")
    client.renew_export(export.id)  # else it might end before Spark reads it
    frame = read(spark, server, "n LONG, pad STRING", topic="fat", export=export.id, batchSize="10")
    assert len(frame.take(1)) == 1
    until(lambda: export.id in ended_exports(server), 60, "the end of the export")


def ended_exports(server: ServerProcess) -> set[str]:
    return {str(event["export"]) for event in server.events("export_ended")}


# ---- the reader itself, without Spark ----


def rows_of(reader: SnapshotReader) -> list[dict[str, object]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_no_record_twice_or_missing_while_publishing_goes_on(server: ServerProcess, client: Client) -> None:
    keys = [str(n) for n in range(2_000)]
    client.publish_many("busy", [{"n": 0}] * len(keys), keys=keys)
    over = threading.Event()

    def publishing() -> None:
        round_ = 0
        with server.client() as own:
            while not over.is_set():
                round_ += 1
                own.publish_many("busy", [{"n": round_}] * len(keys), keys=keys)
                own.publish("busy", {"n": round_}, key=f"new-{round_}")

    thread = threading.Thread(target=publishing)
    thread.start()
    try:
        options = parse_reading({"server": server.address, "topic": "busy", "partitions": "5", "batchSize": "100"})
        for _ in range(5):
            schema = StructType().add("n", LongType()).add("_key", StringType())
            found = [row["_key"] for row in rows_of(SnapshotReader(options, schema))]
            assert len(found) == len(set(found))
            assert set(found) >= set(keys)
    finally:
        over.set()
        thread.join()


def test_a_lease_that_has_ended_is_an_error_not_an_end(server: ServerProcess, client: Client) -> None:
    options = parse_reading({"server": server.address, "topic": "orders", "retryFor": "0s"})
    reader = SnapshotReader(options, StructType().add("id", LongType()))
    part = reader.partitions()[0]
    client.close_export(part.export_id)  # type: ignore[attr-defined]  # as the end of its lease would
    with pytest.raises(SowSourceError, match=r"EXPORT_NOT_FOUND.*longer lease"):
        list(reader.read(part))


def test_a_server_that_is_killed_in_mid_read_is_an_error_not_an_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as own:
        with own.client() as client:
            numbers = range(20_000)
            client.publish_many("t", [{"n": n, "text": "x" * 500} for n in numbers], keys=[str(n) for n in numbers])
        options = parse_reading({"server": own.address, "topic": "t", "partitions": "1", "batchSize": "100"})
        reader = SnapshotReader(options, StructType().add("n", LongType()))
        rows = reader.read(reader.partitions()[0])
        next(rows)
        own.kill9()
        own.start()
        with pytest.raises(SowSourceError, match=r"EXPORT_NOT_FOUND: reading part 0 of a snapshot of topic t"):
            list(rows)


def test_a_server_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as own:
        with own.client() as client:
            client.publish("t", {"n": 1}, key="a")
        own.kill9()
        timer = threading.Timer(0.5, own.start)
        timer.start()
        options = parse_reading({"server": own.address, "topic": "t"})
        assert rows_of(SnapshotReader(options, StructType().add("n", LongType()))) == [{"n": 1}]
        timer.join()
        own.kill9()
        hasty = parse_reading({"server": own.address, "topic": "t", "retryFor": "0s", "connectTimeout": "100ms"})
        with pytest.raises(SowSourceError, match=r"UNREACHABLE: opening a snapshot of topic t.*executors"):
            SnapshotReader(hasty, StructType().add("n", LongType())).partitions()


def test_the_tasks_of_a_job_use_the_instance_of_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    """F2. The first address has no server; later it has one, without the export and without the records."""
    topics = '[topics.orders]\nkey = ["/id"]\n'
    with (
        ServerProcess(tmp_path / "a", topics) as a,
        ServerProcess(tmp_path / "b", topics) as b,
        b.client() as client,
    ):
        a.kill9()
        both = f"{a.address},{b.address}"
        rows = spark.range(100).selectExpr("id")
        rows.write.format("sow").options(server=both, retryFor="1s").mode("append").save("orders")
        assert client.count("orders") == 100
        found = spark.read.format("sow").options(server=both, retryFor="1s").load("orders")
        assert found.count() == 100

        reader = SnapshotReader(parse_reading({"topic": "orders", "server": both}), StructType().add("id", LongType()))
        parts = reader.partitions()
        assert {part.connecting.server for part in parts} == {b.address}  # type: ignore[attr-defined]  # its own class
        a.start()
        assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 100
        alone = spark.read.format("sow").schema("id LONG").options(server=both, retryFor="1s").load("orders")
        assert alone.count() == 0, "another job begins at the first that serves"


# ---- options that do not fit, as Spark finds them ----


def test_a_snapshot_tells_an_inferred_schema_from_a_given_one(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given an option about the inferred schema / then it counts where Spark asks for the schema, also in SQL, and is
    refused beside a given one"""
    sow = {"server": server.address, "topic": "orders", "jsonSchema": '{"properties":{"id":{"type":"integer"}}}'}
    source = spark.read.format("sow").options(**sow)
    assert source.load().selectExpr("count(id)").first() == (ORDERS,)
    options = ", ".join(f"{name} '{value}'" for name, value in sow.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW shaped USING sow OPTIONS ({options})")
    assert spark.sql("SELECT count(id) FROM shaped").first() == (ORDERS,)
    shown = reason_of(lambda: source.schema("id LONG").load().collect())
    assert "OPTION_INVALID: option jsonSchema: and a given schema exclude each other" in shown


def test_an_option_of_streams_is_refused_by_a_snapshot_in_spark(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    shown = reason_of(lambda: read(spark, server, topic="orders", startingFrom="earliest").collect())
    assert "OPTION_INVALID: option startingFrom: counts only in a stream (readStream)" in shown


def test_options_of_json_documents_are_refused_for_other_topics(server: ServerProcess, client: Client) -> None:
    """Nobody has said `payload`: the topic tells."""
    given = {"server": server.address, "topic": "texts"}
    for name, value in (("jsonSchema", "{}"), ("inferRecords", "5"), ("newFields", "fail"), ("mode", "PERMISSIVE")):
        with pytest.raises(SowSourceError, match=f"option {name}: has no effect with topic texts of type binary"):
            SowDataSource({**given, name: value}).schema()
    for name, value in (("newFields", "fail"), ("mode", "PERMISSIVE")):
        reader = SowDataSource({**given, name: value}).reader(StructType().add("payload", BinaryType()))
        with pytest.raises(SowSourceError, match=f"option {name}: has no effect with topic texts of type binary"):
            reader.partitions()


def test_new_fields_are_found_by_a_schema_of_metadata(server: ServerProcess, client: Client) -> None:
    """With newFields=fail and no field of the document in the schema, no document was looked at."""
    source = SowDataSource({"server": server.address, "topic": "orders", "newFields": "fail"})
    reader = source.reader(StructType().add("_key", StringType()))
    (first, *_) = reader.partitions()
    with pytest.raises(SowSourceError, match="ROW_MALFORMED: record '0' of topic orders, field /"):
        list(reader.read(first))


def test_a_load_that_fails_leaves_no_export(server: ServerProcess, client: Client, opened_exports: list[str]) -> None:
    """given snapshot=load and no schema, so that Spark's `load()` opens an export / when the schema cannot be inferred,
    or a stream is read and not a snapshot / then no export stays for its lease of ten minutes"""
    client.create_topic("hollow", key=["/id"], exist_ok=True)
    given = {"server": server.address, "snapshot": "load"}
    with pytest.raises(SowSourceError, match="SCHEMA_UNKNOWN"):
        SowDataSource({**given, "topic": "hollow"}).schema()
    assert opened_exports == []
    source = SowDataSource({**given, "topic": "orders"})
    schema = source.schema()
    (export,) = opened_exports
    with pytest.raises(SowSourceError, match="option snapshot: counts only in a snapshot"):
        source.streamReader(schema)
    with pytest.raises(SowError) as gone:
        client.renew_export(export)
    assert gone.value.reason == "EXPORT_NOT_FOUND"


def test_metadata_of_changes_is_in_a_snapshot_too(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """The tasks asked the server for operations, which records do not have."""
    frame = read(spark, server, "_op STRING, _reason STRING, _sequence LONG, id LONG", topic="orders")
    rows = frame.where("id < 3").collect()
    assert {(row["_op"], row["_reason"]) for row in rows} == {("put", None)}
    assert len({row["_sequence"] for row in rows}) == 3
