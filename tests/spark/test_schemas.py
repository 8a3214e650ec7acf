"""The columns that a DataFrame has, on a real server: chosen, of a JSON Schema, and for fields that come later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StringType, StructType

from sow_client import Client
from sow_spark.documents import arrow_schema
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.options import NESTING_MAX
from sow_spark.schemas import infer, layout
from sow_spark.source import SowDataSource
from tests.spark.test_reading import reason_of
from tests.support.servers.server import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "px": {"type": "number", "multipleOf": 0.01}, "more": {"type": "object"}},
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        client.publish_many("orders", [{"id": n, "px": n / 4, "more": {"n": n}} for n in range(20)])
        client.publish("schemas", SCHEMA, key="orders")
        yield client


def read(spark: SparkSession, server: ServerProcess, **options: str) -> DataFrame:
    return spark.read.format("sow").options(server=server.address, retryFor="1s", **options).load("orders")


def names(server: ServerProcess, **options: str) -> str:
    """The inferred schema."""
    return infer(parse_reading({"server": server.address, "topic": "orders", **options})).simpleString()


def test_only_the_chosen_columns_are_read(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    frame = read(spark, server, columns="_key, px")
    assert frame.schema.simpleString() == "struct<_key:string,px:double>"
    assert {tuple(row) for row in frame.collect()} == {(str(n), n / 4) for n in range(20)}
    counted = read(spark, server, columns="_version")
    assert counted.count() == 20


def test_a_choice_of_metadata_needs_no_document(server: ServerProcess, client: Client) -> None:
    client.create_topic("bare", key=["/id"])
    assert names(server, topic="bare", columns="_sequence,_key") == "struct<_sequence:bigint,_key:string>"
    with pytest.raises(SowSourceError, match=r"option columns: there is no column 'qty'; the columns are id, px, more"):
        names(server, columns="id,qty")
    with pytest.raises(SowSourceError, match="there is no column '_key'"):
        names(server, columns="_key", metadata="false")


def test_a_document_that_is_nested_deep_leaves_the_topic_readable(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given a document that is nested as deep as a topic takes / when the schema is inferred / then the deepest part is
    a string. Spark's planner ended with NegativeArraySizeException."""
    client.publish("deep", b'{"id":1,"a":' + b'{"a":' * 250 + b"[true]" + b"}" * 250 + b"}", key="a")
    (row,) = spark.read.format("sow").options(server=server.address, metadata="false").load("deep").collect()
    found, depth = row.a, 0
    while not isinstance(found, str):
        found, depth = found.a, depth + 1
    assert (row.id, depth, found.count("a")) == (1, NESTING_MAX + 1, 250 - NESTING_MAX - 1)


@pytest.mark.parametrize(("kind", "levels"), [(ArrayType, 1), (lambda inner: MapType(StringType(), inner), 2)])
def test_a_schema_that_is_nested_deeper_than_arrow_allows_is_refused(
    kind: Callable[[DataType], DataType], levels: int
) -> None:
    """given the deepest schema, and one that is deeper / then Arrow writes the first, and the other is refused by name:
    tasks ended with "Max recursion depth reached"."""
    deepest: DataType = LongType()
    for _ in range(62 // levels):
        deepest = kind(deepest)
    found = layout(StructType().add("x", deepest), metadata=False)
    schema = arrow_schema(found.schema)
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array([None], schema.field(0).type)], schema=schema)
    with pyarrow.ipc.new_stream(pyarrow.BufferOutputStream(), schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(SowSourceError, match=r"SCHEMA_UNSUPPORTED: column x.* is nested too deep"):
        layout(StructType().add("x", kind(deepest)), metadata=False)


def test_a_load_that_fails_leaves_no_export(server: ServerProcess, client: Client) -> None:
    """With snapshot=load the export was opened first, and stayed for its lease of ten minutes."""
    source = SowDataSource({"server": server.address, "topic": "orders", "snapshot": "load", "columns": "qty"})
    before = server.events("export_opened")
    with pytest.raises(SowSourceError, match="there is no column 'qty'"):
        source.schema()
    assert server.events("export_opened") == before


def test_a_schema_is_made_of_a_json_schema(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """given one as text, in a file, or registered as a record"""
    file = tmp_path / "order.json"
    file.write_text(json.dumps(SCHEMA))
    for source in (json.dumps(SCHEMA), str(file), "topic:schemas/orders"):
        found = names(server, jsonSchema=source, metadata="false")
        assert found == "struct<id:bigint,px:decimal(38,2),more:variant>"
    assert names(server, jsonSchema="topic:schemas/orders", columns="px") == "struct<px:decimal(38,2)>"
    for source, problem in (
        ("topic:schemas", "is not topic:NAME/KEY"),
        ("topic:schemas/none", "topic schemas has no record 'none'"),
        ("nowhere.json", "the file cannot be read"),
    ):
        with pytest.raises(SowSourceError, match=f"option jsonSchema: .*{problem}"):
            names(server, jsonSchema=source)


def test_a_column_for_new_fields_is_part_of_an_inferred_schema(server: ServerProcess, client: Client) -> None:
    found = names(server, newFields="rescue", jsonSchema='{"properties":{"id":{"type":"integer"}}}', metadata="false")
    assert found == "struct<id:bigint,_rescued:string>"


def test_fields_that_come_later_follow_the_policy(spark: SparkSession, server: ServerProcess, client: Client) -> None:
    client.publish_many("late", [{"id": 1}, {"id": 2, "qty": 3}], keys=["a", "b"])
    reader = spark.read.format("sow").options(server=server.address, topic="late")
    assert {tuple(row) for row in reader.schema("id LONG").load().collect()} == {(1,), (2,)}
    rescued = reader.schema("_rescued STRING, id LONG").option("newFields", "rescue").load()
    assert {tuple(row) for row in rescued.collect()} == {(None, 1), ('{"qty":3}', 2)}
    failing = reader.schema("id LONG").option("newFields", "fail").load()
    assert """ROW_MALFORMED: record 'b' of topic late, field /: expected only fields""" in reason_of(failing.collect)


@pytest.mark.long
def test_nested_values_of_all_kinds_are_written_and_read_back(
    spark: SparkSession, server: ServerProcess, client: Client
) -> None:
    """given a frame with structs, maps, arrays, decimals, times and variants / when it is written, and read with the
    same schema / then it is the same, with all digits and the instants"""
    rows = spark.sql(
        """SELECT 'k1' AS _key, 12345678901234567890.123456789BD AS amount,
             TIMESTAMP '2024-01-05 10:11:12.123456+02:00' AS at, TIMESTAMP_NTZ '2024-01-05 10:11:12.5' AS local,
             named_struct('px', 1.5D, 'legs', array(named_struct('q', 1, 'd', 0.10BD), NULL)) AS leg,
             map('a', array(1.5BD), 'b', NULL) AS by_name, parse_json('{"a":[1,2.50,"x",null],"b":{}}') AS v,
             array(parse_json('1'), parse_json('"x"')) AS vs"""
    )
    rows.write.format("sow").options(server=server.address).mode("append").save("nested")
    found = spark.read.format("sow").schema(rows.schema).options(server=server.address).load("nested")
    assert found.schema == rows.schema
    texts = "CAST(v AS STRING) AS v", "CAST(vs[0] AS STRING) AS v0", "variant_get(v, '$.a[1]', 'decimal(5,2)') AS vd"
    kept = ("_key", "amount", "at", "local", "leg", "by_name", *texts)
    (row,) = found.selectExpr(*kept).collect()
    assert [row] == rows.selectExpr(*kept).collect()
    assert row.amount == Decimal("12345678901234567890.123456789")
    assert row["at"].astimezone(UTC) == datetime(2024, 1, 5, 8, 11, 12, 123456, UTC)
    assert (row.leg.legs[0].d, row.by_name["b"], row.vd) == (Decimal("0.10"), None, Decimal("2.50"))
