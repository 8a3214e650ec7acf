"""The pipelines of examples/spark between a topic and a lake: each change once, whatever is cut off and run again."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader

from examples.flights import extract, read_flights
from examples.spark import capture as capturing
from examples.spark import days, lake
from examples.spark.backfill import backfill
from examples.spark.capture import capture, flights
from examples.spark.days import last_of_each_key
from examples.spark.dimension import dimension, table_at
from examples.spark.enrich_table import enrich_table, load_planes
from examples.spark.load_departures import create
from examples.spark.load_flights import KEY
from sow_client import Client
from tests.support.servers.server import DYNAMIC, ServerProcess

FLIGHTS = 1_000

Table = dict[str, tuple[int, float | None]]
"""Version and delay of each flight."""


@pytest.fixture(scope="module")
def server(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), DYNAMIC) as process:
        yield process


@pytest.fixture(scope="module")
def client(spark: SparkSession, server: ServerProcess) -> Iterator[Client]:
    """The topics have the first flights of the year."""
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # as examples.spark.session does
    with server.client() as client:
        client.create_topic("flights", key=[f"/{name}" for name in KEY], expiration="enabled")
        create(client)
        documents = [flight.document for flight in read_flights(FLIGHTS)]
        client.publish_many("flights", documents, ttl="1h")
        client.publish_many("departures", documents, ttl="1h")
        yield client
    spark.conf.unset("spark.sql.parquet.outputTimestampType")


def served(client: Client, topic: str = "flights") -> Table:
    return {one.key: (one.version, fields(one.data).get("dep_delay")) for one in client.query(topic)}


def fields(document: object) -> dict[str, Any]:
    assert isinstance(document, dict)
    return document


def rows_of(folder: Path, *columns: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(folder).to_pyarrow_table(columns=list(columns)).to_pylist()
    return found


def captured(folder: Path) -> Table:
    rows = rows_of(folder, "_key", "_version", "dep_delay")
    found = {row["_key"]: (row["_version"], row["dep_delay"]) for row in rows}
    assert len(found) == len(rows), "one row of a key"
    return found


def change(client: Client, delay: int, topic: str = "flights") -> None:
    """Delays some flights twice, deletes one, lets one expire, adds one, and one that is gone again."""
    records = {one.key: fields(one.data) for one in client.query(topic)}
    keys = sorted(records)
    for late in (delay, delay + 1):
        client.publish_many(topic, [records[key] | {"dep_delay": late} for key in keys[:20]], ttl="1h")
    client.sow_delete(topic, keys=[keys[-1]])
    client.publish(topic, records[keys[-2]], ttl="1us")
    new = records[keys[0]] | {"carrier": "XX", "dep_delay": delay}
    client.publish_many(topic, [new | {"flight": delay}, new | {"flight": 0}])
    gone = next(one.key for one in client.query(topic, "/carrier = 'XX' AND /flight = 0"))
    client.sow_delete(topic, keys=[gone])
    assert keys[-2] not in {one.key for one in client.query(topic)}


# ---- capture ----


def test_a_batch_that_runs_twice_changes_nothing(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given puts, deletes and expiries, and a driver that dies before the commit of their batch, and one that dies
    right after it / when others run / then the table is the topic, and each change was merged once"""
    folder, source = tmp_path / "table", flights(server.address)
    capture(spark, source, str(folder))
    before = captured(folder)
    assert before == served(client)
    assert DeltaTable(folder).count() == len(before), "the files of the first snapshot have statistics; it was 0"
    change(client, 300)

    def die_first(table: DeltaTable, rows: pa.Table, commit: CommitProperties) -> None:
        raise RuntimeError("killed")

    def die_last(table: DeltaTable, rows: pa.Table, commit: CommitProperties) -> None:
        lake.merge_last(table, rows, commit)
        raise RuntimeError("killed")

    for died, left in ((die_first, before), (die_last, served(client))):
        monkeypatch.setattr(capturing, "merge_last", died)
        with pytest.raises(PySparkException):
            capture(spark, source, str(folder))
        assert captured(folder) == left
    version = DeltaTable(folder).version()
    monkeypatch.setattr(capturing, "merge_last", lake.merge_last)
    capture(spark, source, str(folder))
    assert (DeltaTable(folder).version(), captured(folder)) == (version, served(client))

    expires = {row["_key"]: row["_expire_time"] for row in rows_of(folder, "_key", "_expire_time")}
    assert expires == {one.key: one.expire_time for one in client.query("flights")}


def test_of_two_drivers_one_commits(tmp_path: Path) -> None:
    """given two drivers with the same batch / when both merge / then one fails, and the table has the batch once"""
    kinds = pa.schema([("_key", pa.string()), ("_sequence", pa.int64())])
    DeltaTable.create(tmp_path, kinds)
    one, other = DeltaTable(tmp_path), DeltaTable(tmp_path)
    rows = pa.table({"_key": ["a"], "_sequence": [7], "_op": ["put"]})
    lake.merge_last(one, rows, lake.at("epoch", 7))
    with pytest.raises(CommitFailedError):
        lake.merge_last(other, rows, lake.at("epoch", 7))
    assert DeltaTable(tmp_path).transaction_version("epoch") == 7
    assert rows_of(tmp_path, "_key", "_sequence") == [{"_key": "a", "_sequence": 7}]


@pytest.mark.long
def test_of_two_drivers_that_begin_a_table_one_makes_its_rows(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a driver that takes a snapshot for a new table / when another one begins the table and merges changes
    meanwhile / then the first one leaves the table as it is. It set the rows and the position back to its snapshot. The
    other driver ran on behind that, and the changes in between were never in the table."""
    folder, source = str(tmp_path / "table"), flights(server.address)

    def overtaken(records: DataFrame) -> DataFrame:
        capture(spark, source, folder)
        change(client, 400)
        capture(spark, source, folder)
        return records

    lake.begin(spark, source, folder, overtaken)
    assert captured(Path(folder)) == served(client)


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(DataSourceStreamReader, "getDefaultReadLimit"), reason="with PySpark 4.1 a run takes one micro-batch"
)
def test_a_run_does_not_go_on_with_a_table_that_was_replaced(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a run that takes several batches / when the table is made anew with an older position after the first one /
    then the run ends, and merges no batch whose predecessor is missing"""
    folder, source = str(tmp_path / "table"), dataclasses.replace(flights(server.address), records_per_batch=10)
    capture(spark, source, folder)
    journal, before = lake.position(source, folder)
    change(client, 500)
    merged = 0

    def merge(table: DeltaTable, rows: pa.Table, commit: CommitProperties) -> None:
        nonlocal merged
        merged += 1
        lake.merge_last(table, rows, commit)
        shutil.rmtree(folder)
        row = pa.table({"_key": ["a"], "_op": ["put"]})
        lake.merge_last(DeltaTable.create(folder, row.drop(["_op"]).schema), row, lake.at(journal, before))

    with pytest.raises(PySparkException, match=f"was at .*, and is now at {before}"):
        lake.follow(spark, source, folder, last_of_each_key, merge)
    assert merged == 1
    assert lake.position(source, folder) == (journal, before)


def test_a_table_of_another_journal_is_refused(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given the table of another server / when captured into / then it is refused, rather than filled with two"""
    DeltaTable.create(tmp_path, pa.schema([("_key", pa.string())]))
    row = pa.table({"_key": ["a"], "_op": ["put"]})
    lake.merge_last(DeltaTable(tmp_path), row, lake.at("another", 7))
    with pytest.raises(LookupError, match="of another journal"):
        capture(spark, flights(server.address), str(tmp_path))


def test_a_topic_that_was_made_again_is_not_merged_into_the_rows_of_the_former_one(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a captured table / when the topic is deleted and made again with nothing written in between, so that the
    position of the table is the beginning of the new topic / then the table is refused. Its rows stayed for ever."""

    def make(*carriers: str) -> None:
        client.create_topic("remade", key=[f"/{name}" for name in KEY], expiration="enabled")
        documents = [fields(one.data) for one in client.query("flights", top_n=3)]
        client.publish_many("remade", [one | {"carrier": carrier} for one in documents for carrier in carriers])

    make("A", "B")
    source = flights(server.address, "remade")
    capture(spark, source, str(tmp_path / "table"))
    assert len(captured(tmp_path / "table")) == 6
    client.delete_topic("remade")
    make("C")
    with pytest.raises(LookupError, match="the topic was made again"):
        capture(spark, source, str(tmp_path / "table"))


# ---- the other pipelines ----


@pytest.mark.long
def test_partitions_by_day_are_the_table_for_every_reader(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given the changes in Parquet by day / when more come / then the last of each key is the topic, for Spark, and for
    a reader that knows nothing of Spark; one day is read from its own files"""
    days.follow_days(spark, server.address, str(tmp_path))
    change(client, 100, "departures")
    days.follow_days(spark, server.address, str(tmp_path))
    now = served(client, "departures")
    table = days.table(spark, str(tmp_path))
    assert {row[0]: (row[1], row[2]) for row in table.select("_key", "_version", "dep_delay").collect()} == now

    last: dict[str, tuple[int, str, int, float | None]] = {}
    files = sorted((tmp_path / "changes").rglob("*.parquet"))
    assert {file.parent.name for file in files} == {"date=2013-01-01", "date=2013-01-02"}
    for file in files:
        assert pq.read_schema(file).field("_publish_time").type == pa.timestamp("us", "UTC"), "no 96 bits"
        for row in pq.read_table(file, columns=["_key", "_sequence", "_op", "_version", "dep_delay"]).to_pylist():
            key, *values = row.values()
            last[key] = max(last.get(key, (0, "", 0, None)), tuple(values))
    assert {key: (version, delay) for key, (_, op, version, delay) in last.items() if op == "put"} == now

    shutil.rmtree(tmp_path / "changes" / "date=2013-01-01")
    one = table.where("date = '2013-01-02'")
    assert {row[0] for row in one.select("_key").collect()} == {key for key in now if key.startswith("2013|1|2|")}


def test_a_backfill_keeps_the_rest_of_each_lifetime(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a table with rows that expire later, never, and long ago / when a topic is filled from it / then it has the
    first two, with their expire times, and nothing else"""
    folder = tmp_path / "table"
    lake.begin(spark, flights(server.address), str(folder))
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    DeltaTable(folder).update({"_expire_time": "NULL"}, predicate="carrier = 'AA'")
    DeltaTable(folder).update(new_values={"_expire_time": past}, predicate="carrier = 'UA'")
    client.create_topic("restored", key=[f"/{name}" for name in KEY], expiration="enabled", default_ttl="1s")
    client.publish("restored", {"carrier": "ZZ", "flight": 1, "origin": "JFK"}, ttl="1h")
    backfill(spark, server.address, str(folder), "restored")
    expected = {one.key: one.expire_time for one in client.query("flights", "/carrier <> 'UA'")}
    expected |= {key: None for key in expected if key.startswith("AA|")}
    assert {one.key: one.expire_time for one in client.query("restored")} == expected
    for one in client.query("flights", "/carrier <> 'UA'", top_n=50):
        restored = client.get("restored", one.key)
        assert restored is not None
        there = {name: value for name, value in fields(one.data).items() if value is not None}
        assert fields(restored.data) | {"time_hour": there["time_hour"]} == there  # a time is written in Spark's form


@pytest.mark.long
def test_the_enriched_table_has_the_plane_of_each_flight(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given flights and planes / when both change / then a changed flight has the new plane, and others have theirs"""
    folder = tmp_path / "table"
    load_planes(spark, client, server.address, str(extract(tmp_path, "planes.csv")))
    source = lake.Source(server.address, "flights", flights(server.address).columns, "enriched")

    def makers() -> dict[str, str | None]:
        return {row["_key"]: row["manufacturer"] for row in rows_of(folder, "_key", "manufacturer")}

    enrich_table(spark, source, str(folder))
    planes = {one.key: fields(one.data)["manufacturer"] for one in client.query("planes")}
    expected = {one.key: planes.get(fields(one.data).get("tailnum", "")) for one in client.query("flights")}
    assert makers() == expected
    assert {"BOEING", None} <= set(expected.values())

    flown, *_ = (one for one in client.query("flights", "/carrier = 'UA'") if expected[one.key] == "BOEING")
    plane = fields(flown.data)["tailnum"]
    client.publish("planes", {"tailnum": plane, "manufacturer": "TOYS"})
    client.publish("flights", fields(flown.data), ttl="1h")
    enrich_table(spark, source, str(folder))
    assert makers() == expected | {flown.key: "TOYS"}


@pytest.mark.long
def test_the_dimension_has_every_version_and_its_validity(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """given a table of versions / when records change, also twice within a batch / then it gives the topic before and
    after, and the cause of each end"""
    folder = tmp_path / "table"
    source = lake.Source(server.address, "flights", flights(server.address).columns, "versions")
    dimension(spark, source, str(folder))
    moments = [moment(client)]
    change(client, 400)
    dimension(spark, source, str(folder))
    moments.append(moment(client))
    rows = lake.frame(spark, str(folder)).cache()
    for at, now in moments:
        found = table_at(rows, at).select("_key", "_version", "dep_delay").collect()
        assert len(found) == len(now), "one version of a key at a time"
        assert {row[0]: (row[1], row[2]) for row in found} == now
    ended = {row[0]: row[1] for row in rows.where("valid_to IS NOT NULL").groupBy("ended_by").count().collect()}
    # 20 flights twice and one that expires are put again; two are deleted.
    assert ended == {"put": 41, "delete": 2, "expire": 1}
    assert rows.where("valid_to IS NOT NULL AND (valid_until IS NULL OR valid_to <= valid_from)").count() == 0
    rows.unpersist()


def moment(client: Client) -> tuple[int, Table]:
    """The last sequence, and the topic at that time."""
    result = client.query("flights")
    now = {one.key: (one.version, fields(one.data).get("dep_delay")) for one in result}
    assert result.header is not None
    return int(result.header.bookmark.rpartition(".")[2]), now
