"""The columns of a DataFrame: the schemas that a topic can fill, and the one that its documents make."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.schemas import check_form, form_of, inferred, layout


def refusal(schema: StructType, *, rescue: bool = False) -> str:
    """Why a schema is refused."""
    with pytest.raises(SowSourceError) as caught:
        layout(schema, metadata=True, new_fields="rescue" if rescue else "ignore")
    assert caught.value.reason == "SCHEMA_UNSUPPORTED"
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("_version", StringType(), "column _version is filled with metadata, which is bigint, not string"),
        ("x", MapType(LongType(), LongType()), "column x has keys of type bigint; those of JSON are strings"),
        ("x", ArrayType(DayTimeIntervalType()), "column x[] has the type interval day to second, which is not read"),
    ],
)
def test_a_column_that_no_document_fills_is_refused_by_name(name: str, kind: DataType, problem: str) -> None:
    assert refusal(StructType().add(name, kind)) == problem


def test_a_column_of_metadata_has_the_type_of_the_field_where_there_is_no_metadata() -> None:
    found = layout(StructType().add("_version", StringType()), metadata=False)
    assert (found.metadata, found.fields.names) == ((), ["_version"])


def test_metadata_that_may_be_missing_needs_a_nullable_column() -> None:
    given = StructType([StructField("_reason", StringType(), nullable=False)])
    assert refusal(given) == "column _reason can be null: it must be nullable"
    assert layout(StructType([StructField("_key", StringType(), nullable=False)]), metadata=True).metadata == ("_key",)


@pytest.mark.parametrize("given", [StructType().add("x", LongType()), StructType().add("_rescued", LongType())])
def test_rescued_fields_need_their_column(given: StructType) -> None:
    assert refusal(given, rescue=True) == "column _rescued is missing, or is no string"
    assert not layout(StructType().add("_rescued", StringType()), metadata=True, new_fields="rescue").fields.names


@pytest.mark.parametrize(
    ("form", "kind", "name", "problem"),
    [
        ("string", StringType(), "other", "column other is neither metadata nor payload"),
        ("string", BinaryType(), "payload", "column payload has the type binary"),
        ("binary", StringType(), "payload", "column payload has the type string"),
    ],
)
def test_a_payload_of_one_column_has_its_type(form: str, kind: DataType, name: str, problem: str) -> None:
    found = layout(StructType().add("_key", StringType()).add(name, kind), metadata=True)
    with pytest.raises(SowSourceError) as caught:
        check_form(found, form)  # type: ignore[arg-type]  # one of the forms
    assert caught.value.message == problem
    check_form(found, "columns")


def test_the_form_of_a_payload_follows_from_option_type_and_schema() -> None:
    def form(message_type: str, kind: DataType, **options: str) -> str:
        reading = parse_reading({"server": "a:1", "topic": "orders", **options})
        return form_of(reading, layout(StructType().add("payload", kind), metadata=True), message_type)

    assert form("json", LongType()) == "columns"
    assert form("msgpack", StringType()) == "string"
    assert form("msgpack", BinaryType()) == "binary"
    assert form("json", BinaryType(), payload="binary") == "binary"
    with pytest.raises(SowSourceError, match="columns are made of json documents, and orders has msgpack"):
        form("msgpack", StringType(), payload="columns")


@pytest.mark.parametrize(
    ("documents", "kind"),
    [
        (["9223372036854775807"], "bigint"),
        (["9223372036854775808"], "decimal(19,0)"),
        (["9" * 38], "decimal(38,0)"),
        (["9" * 39], "double"),
        (["9" * 310], "string"),
        (["1.5"], "double"),
        (["1e400"], "string"),
        (["1", "9" * 25], "decimal(25,0)"),
        (["1", "9" * 19], "decimal(20,0)"),
        (["9" * 25, "1", "9" * 38], "decimal(38,0)"),
        (["1", "1.5"], "double"),
        (["9" * 25, "0.5"], "double"),
        (["1", '"a"'], "string"),
        (["1", "true"], "string"),
        (["true", "null"], "boolean"),
        (["[1]", "[1.5]", "[]"], "array<double>"),
        (["[1]", "{}"], "string"),
        (['{"a":1}', '{"b":null}'], "struct<a:bigint,b:string>"),
    ],
)
def test_a_field_has_the_type_that_all_its_values_fit(documents: list[str], kind: str) -> None:
    found = inferred([b'{"x":%b}' % text.encode() for text in documents])
    assert found["x"].dataType.simpleString() == kind


def test_documents_that_are_no_objects_and_fields_without_content_make_no_column() -> None:
    assert inferred([b"[1]", b'{"a":{},"b":[{}]}', b"5"]) == StructType()
    assert inferred([]) == StructType()
    assert inferred([b'{"x":1}', b"7"]) == StructType().add("x", LongType())


def test_decimals_of_an_inferred_schema_stay_within_those_of_spark() -> None:
    kinds = {type(field.dataType) for field in inferred([b'{"a":%d,"b":1}' % 10**37, b'{"b":0.5}'])}
    assert kinds == {DecimalType, DoubleType}
