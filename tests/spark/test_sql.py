"""Topics in SQL: temporary views, INSERT INTO, and tables, as docs/spark.md describes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sow_client import Client
from tests.spark.test_reading import reason_of
from tests.support.servers.server import ServerProcess


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        client.publish_many("orders", [{"id": n, "px": n / 4} for n in range(20)])
        client.create_topic("copy", key=["/id"], exist_ok=True)
        yield client


@pytest.fixture(autouse=True)
def own_names(spark: SparkSession) -> Iterator[None]:
    yield
    for name in ("v", "w"):
        spark.catalog.dropTempView(name)
    spark.catalog.dropGlobalTempView("g")
    spark.sql("DROP TABLE IF EXISTS t")


def test_a_view_is_read_by_sql_and_by_table(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """with an inferred schema, with chosen columns, and with a given schema"""
    options = f"server '{server.address}', topic 'orders'"
    spark.sql(f"CREATE TEMPORARY VIEW v USING sow OPTIONS ({options}, columns 'id,px')")
    assert spark.sql("SELECT sum(px) AS px FROM v WHERE id < 10").first() == (11.25,)
    assert spark.table("v").columns == ["id", "px"]
    spark.sql(f"CREATE GLOBAL TEMPORARY VIEW g (id LONG) USING sow OPTIONS ({options}, filter '/id >= 15')")
    assert {row.id for row in spark.table("global_temp.g").collect()} == set(range(15, 20))


def test_rows_are_inserted_into_a_view_with_options_for_both_directions(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    spark.sql(
        f"""CREATE TEMPORARY VIEW v (id LONG, px DOUBLE) USING sow OPTIONS (
            server '{server.address}', topic 'copy', read.filter '/id < 100', write.ttl '1h',
            write.lease '2m', write.batchSize '10')"""
    )
    spark.sql("INSERT INTO v VALUES (1, 0.5), (100, 1.5)")
    spark.range(2, 3).selectExpr("id", "2.5D AS px").write.insertInto("v")
    assert {record.key: record.data["px"] for record in client.query("copy")} == {"1": 0.5, "100": 1.5, "2": 2.5}
    assert all(record.expire_time is not None for record in client.query("copy"))
    assert {row.id for row in spark.table("v").collect()} == {1, 2}
    spark.sql("INSERT OVERWRITE v SELECT id, id * 1.0D FROM range(7, 9)")
    assert {record.key for record in client.query("copy")} == {"7", "8"}


def test_rows_are_updated_and_deleted_by_inserts(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    """given records with three fields / when parts of them, and rows with an _op, are inserted into views / then only
    these fields change, and those records are gone"""
    client.publish_many("copy", [{"id": at, "px": at / 2, "note": "kept"} for at in range(200, 204)])
    options = f"server '{server.address}', topic 'copy', read.filter '/id >= 200'"
    spark.sql(f"CREATE TEMPORARY VIEW v (id LONG, px DOUBLE) USING sow OPTIONS ({options}, write.mode 'delta')")
    spark.sql("INSERT INTO v SELECT id, px + 1 FROM v WHERE id < 202")
    spark.sql(f"CREATE TEMPORARY VIEW w (id LONG, _op STRING) USING sow OPTIONS ({options})")
    spark.sql("INSERT INTO w SELECT id, 'delete' FROM v WHERE px > 101")
    left = [record.data for record in client.query("copy", "/id >= 200")]
    assert left == [{"id": at, "px": at / 2 + (at < 202), "note": "kept"} for at in (200, 201, 202)]


def test_a_view_for_reading_only_refuses_rows_and_says_why(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    options = f"server '{server.address}', topic 'orders'"
    spark.sql(f"CREATE TEMPORARY VIEW v (id LONG) USING sow OPTIONS ({options}, filter '/id < 5')")
    assert "option filter: is one of reading, not of writing" in reason_of(
        lambda: spark.sql("INSERT INTO v VALUES (1)")
    )
    spark.sql(f"CREATE TEMPORARY VIEW w USING sow OPTIONS ({options})")
    with pytest.raises(PySparkException, match="Cannot find data for the output column `_key`"):
        spark.sql("INSERT INTO w (id, px) VALUES (1, 0.5)")


@pytest.mark.long
def test_a_table_of_the_catalog_gets_its_options_from_each_query(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """Spark keeps the columns of such a table, but does not hand its options to a data source in Python."""
    spark.sql(f"CREATE TABLE t (id LONG, px DOUBLE) USING sow OPTIONS (server '{server.address}', topic 'orders')")
    assert "option topic: is missing" in reason_of(lambda: spark.table("t").count())
    assert spark.sql(f"SELECT * FROM t WITH (server = '{server.address}', topic = 'orders')").count() == 20
    assert spark.read.options(server=server.address, topic="orders").table("t").count() == 20


@pytest.mark.long
def test_views_of_all_topics_stand_in_for_a_catalog(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    for topic in client.topics():
        if topic.name == "orders":
            frame = spark.read.format("sow").option("server", server.address).load(topic.name)
            frame.createOrReplaceTempView(f"`{topic.name}`")
    assert spark.sql("SELECT count(*) FROM `orders`").first() == (20,)
    spark.catalog.dropTempView("orders")
