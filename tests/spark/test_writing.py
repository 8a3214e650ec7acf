"""Writing from Spark: lifetimes, keys, deltas, bad rows, attempts that fail or live on, and servers that die."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.types import IntegerType, StructField, StructType

from sow_client import Client
from sow_spark import writing as writing_module
from sow_spark.errors import SowSourceError
from sow_spark.options import Connecting, Writing
from sow_spark.overwriting import OverwritingWriter, Staged
from sow_spark.rows import BadRow, TopicFacts, plan_rows
from sow_spark.writing import BadRows, Target, Written, publish
from tests.support.servers.server import ServerProcess, until

CONFIG = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.plain]
expiration = "1h"
[topics.packed]
key = ["/id"]
message_type = "msgpack"
"""


@pytest.fixture(scope="module")
def writable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("writable"), CONFIG) as process:
        yield process


@pytest.fixture
def client(writable: ServerProcess) -> Iterator[Client]:
    """Of a server without records."""
    with writable.client() as client:
        for topic in ("orders", "plain"):
            client.sow_delete(topic, all=True)
        yield client


def save(frame: DataFrame, server: ServerProcess, topic: str, mode: str = "append", **options: str) -> None:
    frame.write.format("sow").options(server=server.address, topic=topic, **options).mode(mode).save()


def contents(client: Client, topic: str) -> dict[str, object]:
    return {record.key: json.loads(record.payload) for record in client.query(topic)}


def entries(client: Client, topic: str) -> int:
    """How many changes of the topic there have been."""
    return client.plan_changes(topic, start="earliest").entries


# ---- append ----


def test_rows_are_published_with_their_lifetimes(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given a ttl for all and a column of some / when appended / then the row's own wins (L2)"""
    frame = spark.createDataFrame([(1, "1h"), (2, None), (3, "never")], "id int, life string")
    save(frame, writable, "orders", ttl="10m", ttlColumn="life")
    assert contents(client, "orders") == {"1": {"id": 1}, "2": {"id": 2}, "3": {"id": 3}}
    lives = {
        record.key: record.expire_time and record.expire_time - record.publish_time for record in client.query("orders")
    }
    assert lives == {"1": timedelta(hours=1), "2": timedelta(minutes=10), "3": None}


def test_a_row_keeps_its_own_expire_time(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given an expireTimeColumn / when appended on a topic with keys of the rows / then records expire at that time"""
    moment = datetime(2035, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    frame = spark.createDataFrame([("a", moment, 1), ("b", None, 2)], "k string, e timestamp, v int")
    save(frame, writable, "plain", keyColumn="k", expireTimeColumn="e")
    assert contents(client, "plain") == {"a": {"v": 1}, "b": {"v": 2}}
    kept, defaulted = client.get("plain", "a"), client.get("plain", "b")
    assert kept is not None
    assert defaulted is not None
    assert defaulted.expire_time is not None
    assert kept.expire_time == moment
    assert defaulted.expire_time - defaulted.publish_time == timedelta(hours=1)


def test_every_type_is_written_as_to_json_writes_it(
    spark: SparkSession, writable: ServerProcess, client: Client
) -> None:
    """given one column of each type / when appended / then the document is that of Spark's to_json"""
    frame = spark.range(1).select(
        F.lit("x").alias("_key"),
        F.col("id"),
        F.lit(1.5).alias("d"),
        F.lit(0.1).cast("float").alias("f"),
        F.lit('"ü"\n').alias("s"),
        F.lit(Decimal("12.50")).alias("m"),
        F.lit(date(2026, 1, 31)).alias("day"),
        F.lit(datetime(2026, 1, 31, 12, tzinfo=UTC)).alias("at"),
        F.lit(b"\x00\xff").alias("b"),
        F.expr("array(1, null)").alias("a"),
        F.expr("map('k', named_struct('x', 1.0, 'y', cast(null as int)))").alias("mp"),
        F.expr("interval '1 02:03:04' day to second").alias("i"),
        F.lit(None).alias("n"),
    )
    save(frame, writable, "plain")
    ours = client.get("plain", "x")
    assert ours is not None
    theirs = frame.drop("_key").select(F.to_json(F.struct("*"))).first()
    assert theirs is not None
    assert ours.payload.decode() == theirs[0]


def test_deltas_are_merged(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given records / when rows are appended with mode=delta / then null columns are left as they were (P2)"""
    client.publish("orders", {"id": 1, "a": 1, "b": {"c": 2}})
    frame = spark.createDataFrame([(1, None, (5,)), (2, 7, None)], "id int, a int, b struct<d:int>")
    frame.write.format("sow").options(server=writable.address, topic="orders", mode="delta").mode("append").save()
    assert contents(client, "orders") == {"1": {"id": 1, "a": 1, "b": {"c": 2, "d": 5}}, "2": {"id": 2, "a": 7}}


def test_documents_of_other_types_are_written_as_they_are(
    spark: SparkSession, writable: ServerProcess, client: Client
) -> None:
    """given documents in msgpack / when appended with payload=binary / then they are the payloads"""
    frame = spark.createDataFrame([(b"\x81\xa2id\x07",)], "value binary")
    save(frame, writable, "packed", payload="binary")
    found = client.get("packed", "7")
    assert found is not None
    assert found.payload == b"\x81\xa2id\x07"


def test_removals_of_a_stream_of_changes_are_applied_in_order(
    spark: SparkSession, writable: ServerProcess, client: Client
) -> None:
    """given puts and removals of the same keys / when appended / then the last one of each key stands"""
    client.publish("orders", {"id": 4})
    rows = [(1, "put"), (2, "put"), (1, "delete"), (3, "put"), (3, "expire"), (3, "put"), (4, "delete")]
    save(spark.createDataFrame(rows, "id int, _op string").coalesce(1), writable, "orders")
    assert sorted(contents(client, "orders")) == ["2", "3"]


# ---- bad rows ----


def test_bad_rows_fail_the_job_and_are_shown(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given 3 rows of 10 without a key / when appended / then the error has count, rows, reason, and what to do"""
    frame = spark.range(10).select(F.when(F.col("id") % 4 != 1, F.col("id")).alias("id"), F.lit("x").alias("v"))
    with pytest.raises(PySparkException) as caught:
        save(frame.coalesce(1), writable, "orders")
    said = str(caught.value)
    assert "KEY_FIELD_MISSING: 3 rows of partition 0 cannot be written to orders: row 1: key field /id" in said
    assert '{"v":"x"}' in said
    assert "onBadRow=drop" in said


def test_bad_rows_can_be_dropped(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given rows without a key, or with NaN / when appended with onBadRow=drop / then the others are there, and the job
    succeeds"""
    frame = spark.range(3000).select(
        F.when(F.col("id") % 4 != 1, F.col("id")).alias("id"),
        F.when(F.col("id") % 4 == 2, F.lit(float("nan"))).otherwise(1.5).alias("price"),
    )
    save(frame, writable, "orders", onBadRow="drop")
    assert client.count("orders", "/price = 1.5") == client.count("orders") == 1500


@pytest.mark.parametrize(
    ("topic", "options", "said"),
    [
        ("nowhere", {}, "TOPIC_NOT_FOUND: writing to nowhere"),
        ("orders", {"keyColumn": "id"}, "OPTION_INVALID: option keyColumn"),
        ("orders", {"tll": "1s"}, "did you mean ttl?"),
        ("packed", {}, "OPTION_INVALID: option payload: topic packed holds msgpack"),
    ],
)
def test_invalid_writes_are_refused_before_a_task_runs(
    spark: SparkSession, writable: ServerProcess, topic: str, options: dict[str, str], said: str
) -> None:
    """given a wrong topic or option / when appended / then the job does not start, and says which"""
    with pytest.raises(PySparkException) as caught:
        save(spark.range(1), writable, topic, **options)
    assert said in str(caught.value)


# ---- attempts ----


def failing_once() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function that gives half of its rows in the first attempt. Made here, as a cluster has not got this module."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            if rows > 15_000 and task.attemptNumber() == 0:
                raise ValueError("half of the rows")
            yield batch

    return fail


def test_a_task_that_fails_half_way_is_retried_whole(
    spark: SparkSession, writable: ServerProcess, client: Client
) -> None:
    """given a task whose rows end early, as its input fails / when Spark retries it / then no row is missing

    The writer sees nothing but an end of its rows. Had it taken that for the end, the retry would find the work done.
    """
    frame = spark.range(0, 30_000, 1, 2).mapInArrow(failing_once(), "id long")
    save(frame.coalesce(1), writable, "orders", durability="buffered")
    assert client.count("orders") == 30_000


def plan_and_writing(server: ServerProcess, **options: object) -> Callable[..., Written]:
    """Publishes numbers, without Spark, as attempts at one partition."""
    writing = Writing(Connecting(server.address), "orders", **options)  # type: ignore[arg-type]  # keywords of several types
    schema = StructType([StructField("id", IntegerType())])
    to = Target(writing, schema, plan_rows(schema, writing, TopicFacts("json", keyed=True)))

    def attempt(rows: Iterator[list[int | None]], *, unit: int = 1, name: str) -> Written:
        batches = (pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int32())}) for ids in rows)
        return publish(to, batches, name, unit, 0)

    return attempt


def test_a_newer_attempt_fences_the_older_one(
    writable: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given an attempt that has published half / when another publishes all, in another order / then the first fails,
    every row is there, and a third one changes nothing"""
    monkeypatch.setattr(writing_module, "require_whole_input", lambda: None)
    attempt = plan_and_writing(writable, batch_size=100)
    second: list[Written] = []

    def rows_of_first() -> Iterator[list[int]]:
        yield from ([at] for at in range(500))
        second.append(attempt(iter([list(range(999, -1, -1))]), name="speculation"))
        yield from ([at] for at in range(500, 1_000))

    with pytest.raises(SowSourceError) as caught:
        attempt(rows_of_first(), name="speculation")
    assert caught.value.reason == "PUBLISHER_FENCED"
    assert second == [Written(0, 1_000)]
    assert client.count("orders") == 1_000
    before = entries(client, "orders")
    third = attempt(iter([list(range(500)), list(range(500, 1_000))]), name="speculation")
    assert third == Written(0, 1_000, again=True)
    assert entries(client, "orders") == before


def test_a_unit_that_comes_back_with_other_rows_is_not_taken_for_done(
    writable: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given a finished unit of 3 rows / when it is written again with 4 / then it is an error: rows would be missing"""
    monkeypatch.setattr(writing_module, "require_whole_input", lambda: None)
    attempt = plan_and_writing(writable)
    assert attempt(iter([[1, 2, 3]]), name="shrunk", unit=7).rows == 3
    with pytest.raises(SowSourceError) as caught:
        attempt(iter([[1, 2, 3, 4]]), name="shrunk", unit=7)
    assert caught.value.reason == "ROWS_DIFFER"
    assert attempt(iter([[4]]), name="shrunk", unit=8).rows == 1
    with pytest.raises(SowSourceError, match="ROWS_DIFFER"):
        attempt(iter([[5, 6]]), name="shrunk", unit=2)  # counted anew, as by another checkpoint
    assert attempt(iter([]), name="empty").rows == 0
    with pytest.raises(SowSourceError, match="ROWS_DIFFER"):
        attempt(iter([[7]]), name="empty")


def test_a_bad_row_among_many_can_be_dropped(
    writable: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given a row without a key, and thousands behind it / when it is dropped / then the partition is finished"""
    monkeypatch.setattr(writing_module, "require_whole_input", lambda: None)
    attempt = plan_and_writing(writable, on_bad_row="drop")
    written = attempt(iter([[None], list(range(5_000))]), name="dropped")
    assert (written.rows, written.bad, client.count("orders")) == (5_000, 1, 5_000)
    assert client.open_publisher("dropped", unit=1).unit_done


def test_bad_rows_of_two_threads_are_all_counted() -> None:
    bad = BadRows()
    one = [BadRow(0, "KEY_REQUIRED", "", "")]

    def add() -> None:
        for _ in range(20_000):
            bad.add(one)
            bad.add([])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad.count == 80_000


def test_an_input_that_was_cut_finishes_nothing(writable: ServerProcess, client: Client) -> None:
    """given an attempt that cannot see whether it has all rows / when it ends / then its unit is not finished"""
    attempt = plan_and_writing(writable)
    with pytest.raises(SowSourceError):
        attempt(iter([[1, 2, 3]]), name="cut")
    assert not client.open_publisher("cut", unit=1).unit_done


def waiting_half_way(go: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen = threading.Event()  # never set: only to wait on
        for number, batch in enumerate(batches):
            while number == 5 and not go.exists():
                seen.wait(0.02)
            yield batch

    return wait


@contextmanager
def meanwhile(act: Callable[[], None], go: Path) -> Iterator[None]:
    """Acts in a thread while the block runs, then lets the functions go on that wait for `go`. The block is what uses
    Spark: outside the main thread it knows no session, and so no data source."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # the test's thread raises it
            failed.append(error)
        finally:
            go.touch()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.fault
def test_a_write_goes_on_after_the_server_was_killed(spark: SparkSession, tmp_path: Path) -> None:
    """given a write that is half done / when the server is killed and restarted / then it ends, with every row once"""
    with ServerProcess(tmp_path / "server", CONFIG) as server:
        go = tmp_path / "go"

        def kill() -> None:
            with server.client() as client:
                until(lambda: client.count("orders"), 60, "the first rows")
            server.kill9()
            server.start()

        frame = spark.range(0, 80_000, 1, 1).mapInArrow(waiting_half_way(go), "id long").coalesce(1)
        with meanwhile(kill, go):
            save(frame, server, "orders", batchSize="500")
        with server.client() as client:
            assert client.count("orders") == 80_000
            assert entries(client, "orders") == 80_000


# ---- overwrite ----


def test_overwrite_replaces_the_content(spark: SparkSession, writable: ServerProcess, client: Client) -> None:
    """given records / when overwritten by others / then only these are there; by none: the topic is empty"""
    client.publish_many("orders", [{"id": at, "old": True} for at in range(10)])
    frame = spark.range(5, 3000).select("id", F.lit("1h").alias("life"))
    save(frame, writable, "orders", "overwrite", ttlColumn="life")
    found = contents(client, "orders")
    assert len(found) == 2995
    assert found["5"] == {"id": 5}
    assert all(record.expire_time is not None for record in client.query("orders", top_n=5))
    save(frame.limit(0), writable, "orders", "overwrite", ttlColumn="life")
    assert client.count("orders") == 0


def test_an_overwrite_that_fails_leaves_the_topic_as_it_was(
    spark: SparkSession, writable: ServerProcess, client: Client
) -> None:
    """given records / when an overwrite fails in a task, and when rows are bad / then nothing has changed (overwriting
    [1])"""
    client.publish("orders", {"id": "kept"})
    before = entries(client, "orders")
    frame = spark.range(0, 2000, 1, 2).select(
        "id", F.expr("if(id = 1500, raise_error('broken'), 1)").cast("int").alias("v")
    )
    with pytest.raises(PySparkException):
        save(frame, writable, "orders", "overwrite")
    bad = spark.range(10).select(F.when(F.col("id") != 5, F.col("id")).alias("id"))
    with pytest.raises(PySparkException) as caught:
        save(bad, writable, "orders", "overwrite")
    assert "KEY_FIELD_MISSING: 1 row of partition" in str(caught.value)
    assert contents(client, "orders") == {"kept": {"id": "kept"}}
    assert entries(client, "orders") == before
    assert [load for load in client.loads("orders") if load.phase == "staging"] == []


def test_an_overwrite_without_the_word_of_a_task_is_not_committed(writable: ServerProcess, client: Client) -> None:
    """given a commit in which a task's message is missing / then nothing is replaced: its rows would be"""
    client.publish("orders", {"id": "kept"})
    schema = StructType([StructField("id", IntegerType())])
    writer = OverwritingWriter(Writing(Connecting(writable.address), "orders"), schema)
    with pytest.raises(SowSourceError, match="INPUT_CUT"):
        writer.commit([Staged(0, 0), None])
    writer.abort([])
    assert contents(client, "orders") == {"kept": {"id": "kept"}}


def test_changes_by_others_during_an_overwrite_stay(
    spark: SparkSession, writable: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given an overwrite under way / when others publish / then their records win over loaded ones, and stay
    (overwriting [4])"""
    client.publish_many("orders", [{"id": 1, "by": "old"}, {"id": 99_999, "by": "old"}])
    go = tmp_path / "go"

    def publish_others() -> None:
        until(
            lambda: any(load.phase == "staging" and load.figures.staged for load in client.loads("orders")),
            60,
            "rows to be staged",
        )
        client.publish_many("orders", [{"id": 1, "by": "other"}, {"id": 100_000, "by": "other"}])

    frame = spark.range(0, 80_000, 1, 1).mapInArrow(waiting_half_way(go), "id long").coalesce(1)
    with meanwhile(publish_others, go):
        save(frame, writable, "orders", "overwrite")
    assert client.count("orders") == 80_001
    found = client.get_many("orders", ["1", "100000", "99999"])
    assert {record.key: json.loads(record.payload)["by"] for record in found} == {"1": "other", "100000": "other"}


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ("id int", {"mode": "delta"}, "delta and overwrite exclude each other"),
        ("id int, _op string", {}, "an overwrite takes records, not changes"),
    ],
)
def test_overwrites_that_make_no_sense_are_refused(
    spark: SparkSession, writable: ServerProcess, schema: str, options: dict[str, str], said: str
) -> None:
    """given a delta, or changes / when overwriting / then it is refused before anything is opened"""
    with pytest.raises(PySparkException) as caught:
        spark.createDataFrame([], schema).write.format("sow").mode("overwrite").options(
            server=writable.address, topic="orders", **options
        ).save()
    assert said in str(caught.value)
