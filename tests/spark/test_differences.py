"""`sow_spark.diff`: the differences between a table and a topic, at one instant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession

import sow_spark
from sow_client import Client, SowError
from sow_spark.errors import SowSourceError
from tests.support.servers.server import ServerProcess

CONFIG = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.quiet]
key = ["/id"]
journal = false
"""
SCHEMA = "id long, price double, tags array<string>, _key string, _expire_time timestamp"
Row = tuple[int, float | None, list[str] | None, str, datetime | None]


@pytest.fixture(scope="module")
def server(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), CONFIG) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        client.sow_delete("orders", filter="TRUE")
        client.publish_many("orders", [{"id": at, "price": at / 2, "tags": ["a", str(at)]} for at in range(10)])
        yield client


def rows(*more: Row, without: tuple[int, ...] = ()) -> list[Row]:
    """Those of the topic, without some of them, and others."""
    left = [at for at in range(10) if at not in without]
    return [*((at, at / 2, ["a", str(at)], str(at), None) for at in left), *more]


def table(spark: SparkSession, found: list[Row]) -> DataFrame:
    return spark.createDataFrame(found, SCHEMA)


def told(found: sow_spark.Differences) -> dict[str, tuple[str, list[str] | None]]:
    collected = found.rows.select("_key", "difference", "columns").collect()
    assert len({row[0] for row in collected}) == len(collected), "one row of a key"
    return {row[0]: (row[1], row[2]) for row in collected}


def position(client: Client) -> str:
    return client.plan_changes("orders", start="latest").start


def test_each_kind_of_difference_is_told_once(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """given a table that lacks a row, has one too many, other values and a key twice / when it is compared / then these
    are the differences, with the names of the columns and the values of both sides"""
    lake = table(
        spark,
        rows(
            (2, 99.0, ["a", "2"], "2", None),
            (3, None, [], "3", None),
            (77, 1.0, None, "77", None),
            (5, 2.5, ["a", "5"], "5", None),
            without=(1, 2, 3),
        ),
    )
    with sow_spark.diff(lake, "orders", options={"server": server.address}) as found:
        assert told(found) == {
            "1": ("missing", None),
            "2": ("different", ["price"]),
            "3": ("different", ["price", "tags"]),
            "5": ("repeated", []),
            "77": ("extra", None),
        }
        assert found.counts() == {"missing": 1, "different": 2, "repeated": 1, "extra": 1}
        (two,) = found.rows.where("_key = '2'").collect()
        assert (two["lake"]["price"], two["topic"]["price"]) == (99.0, 1.0)
        client.sow_delete("orders", keys=["0"])
        assert len(told(found)) == 5, "it is of one instant"


def test_keys_that_changed_since_the_position_are_left_out(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given a table up to a position / when records change after it / then only a fault of the table is a difference,
    and without the position the changes are, too"""
    lake, at = table(spark, rows((2, 99.0, ["a", "2"], "2", None), without=(2,))), position(client)
    client.publish("orders", {"id": 4, "price": 0.0})
    client.publish("orders", {"id": 500})
    client.sow_delete("orders", keys=["6"])
    options = {"server": server.address, "partitions": "2", "lease": "1m"}
    with sow_spark.diff(lake, "orders", options=options, position=at) as found:
        assert (told(found), found.unsettled) == ({"2": ("different", ["price"])}, 3)
        assert found.bookmark == position(client)
    with sow_spark.diff(lake, "orders", options=options) as found:
        assert set(told(found)) == {"2", "4", "500", "6"}


def test_a_row_that_waits_for_its_expiry_is_no_difference(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given rows whose expire time has just passed, or long ago / when compared with a topic that has neither / then
    the first waits for the capture, and the second is one too many"""
    now = datetime.now(UTC)
    lake = table(
        spark,
        rows((80, 1.0, None, "80", now - timedelta(seconds=5)), (81, 1.0, None, "81", now - timedelta(minutes=5))),
    )
    with sow_spark.diff(lake, "orders", options={"server": server.address}) as found:
        assert told(found) == {"81": ("extra", None)}
    with sow_spark.diff(lake, "orders", options={"server": server.address}, expiry_lag="1h") as found:
        assert told(found) == {}


def test_other_keys_columns_and_filters(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """given a table without `_key` / when compared by a field, by one column, and with a part of the topic / then only
    these count"""
    lake = table(spark, rows()).where("id >= 5").select("id", "price").withColumnRenamed("price", "cost")
    options = {"server": server.address, "filter": "/id >= 4"}
    with sow_spark.diff(lake, "orders", options=options, on=["id"], columns=[]) as found:
        assert [(row["id"], row["difference"]) for row in found.rows.collect()] == [(4, "missing")]
    with sow_spark.diff(lake, "orders", options=options, on=["id"]) as found:
        assert found.counts() == {"missing": 1, "different": 5}, "the topic has no field of this name"


def test_columns_may_have_any_name(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """As a column of the key `columns` showed the names of other columns; others ended in an error of Spark."""
    names = ["lake", "topic", "columns", "difference", "copies", "there", "a.b", "a`b", "lake_0"]
    client.create_topic("named")
    client.publish("named", dict.fromkeys(names, 1) | {"v": 2}, key="a")
    ones = (1,) * len(names)
    lake = spark.createDataFrame([(*ones, 3, "a")], [*(f"c{at}" for at in range(len(names))), "v", "_key"])
    lake = lake.toDF(*names, "v", "_key")
    options = {"server": server.address}
    with sow_spark.diff(lake, "named", on=names, options=options) as found:
        assert [tuple(row) for row in found.rows.collect()] == [(*ones, "different", ["v"], (3,), (2,))]
    with sow_spark.diff(lake, "named", options=options) as found:
        assert [tuple(row) for row in found.rows.collect()] == [("a", "different", ["v"], (*ones, 3), (*ones, 2))]


def test_keys_that_are_null_meet(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """given records and rows without a field of the key / when compared by it / then null is a key like others. A row
    was `extra`, and its record `missing`."""
    client.create_topic("nulls")
    for key, document in {"a": {"id": 1, "v": 1}, "b": {"v": 2}, "c": {"id": 3, "v": 3}}.items():
        client.publish("nulls", document, key=key)
    lake = spark.createDataFrame([(1, 1), (None, 5), (4, 4)], "id LONG, v LONG")
    with sow_spark.diff(lake, "nulls", on=["id"], options={"server": server.address}) as found:
        assert {row["id"]: (row["difference"], row["columns"]) for row in found.rows.collect()} == {
            None: ("different", ["v"]),
            3: ("missing", None),
            4: ("extra", None),
        }


def test_mistakes_are_told_before_anything_is_read(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    lake, at = table(spark, rows()), position(client)
    to = {"server": server.address}

    def reason(frame: DataFrame, topic: str = "orders", **keywords: object) -> str:
        with pytest.raises(SowSourceError) as refused:
            sow_spark.diff(frame, topic, **{"options": to, **keywords})  # type: ignore[arg-type]  # keywords of several types
        return refused.value.reason

    assert reason(lake, on=["nothing"]) == "SCHEMA_UNSUPPORTED"
    assert reason(lake, on=[]) == "SCHEMA_UNSUPPORTED"
    assert reason(lake, columns=["nothing"]) == "SCHEMA_UNSUPPORTED"
    assert reason(lake.selectExpr("*", "map('a', 1) AS m")) == "SCHEMA_UNSUPPORTED"
    assert reason(lake.selectExpr("*", "array(parse_json('1')) AS v")) == "SCHEMA_UNSUPPORTED"
    assert reason(lake.drop("_key"), on=["id"], position=at) == "SCHEMA_UNSUPPORTED"
    for option in ("export", "metadata", "columns", "snapshot", "READ.topic", "startingFrom"):
        assert reason(lake, options={**to, option: "false"}) == "OPTION_INVALID"
    assert reason(lake, expiry_lag="soon") == "OPTION_INVALID"
    assert reason(lake, "nowhere") == "TOPIC_NOT_FOUND"
    assert reason(lake, "quiet", position=at) == "NO_JOURNAL"
    assert reason(lake, position="nonsense") == "BOOKMARK_MALFORMED"


def test_a_comparison_that_fails_leaves_no_export(
    spark: SparkSession, server: ServerProcess, client: Client, opened_exports: list[str]
) -> None:
    """The server has room for a bounded number of exports, and each held its lease of ten minutes."""
    with pytest.raises(SowSourceError):
        sow_spark.diff(table(spark, rows()), "orders", options={"server": server.address}, position="nonsense")
    (export,) = opened_exports
    with pytest.raises(SowError) as gone:
        client.renew_export(export)
    assert gone.value.reason == "EXPORT_NOT_FOUND"


def test_more_changes_than_the_driver_holds_are_refused(
    spark: SparkSession, server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = position(client)
    client.publish_many("orders", [{"id": 1}, {"id": 2}, {"id": 1}])
    monkeypatch.setattr("sow_spark.differences.CHANGES_MAX", 2)
    with pytest.raises(SowSourceError) as refused:
        sow_spark.diff(table(spark, rows()), "orders", options={"server": server.address}, position=at)
    assert "3 changes" in refused.value.message


def test_the_comparison_is_imported_when_it_is_used() -> None:
    """Every process that Spark starts for a plan imports `sow_spark`."""
    program = "import sys, sow_spark as s; assert 'sow_spark.differences' not in sys.modules; s.diff; s.Differences"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError):
        _ = sow_spark.nothing
