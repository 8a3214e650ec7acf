"""JSON Schemas as columns (`sow_spark.json_schemas`)."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampType,
    VariantType,
)

from sow_spark.errors import SowSourceError
from sow_spark.json_schemas import columns_of
from sow_spark.options import NESTING_MAX

PRICE = StructType().add("px", DoubleType())


def kind_of(schema: object, **root: object) -> DataType:
    """The type of a field with this schema."""
    return columns_of(json.dumps({"type": "object", "properties": {"x": schema}, **root}))["x"].dataType


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "boolean"}, BooleanType()),
        ({"type": "integer", "minimum": 0}, LongType()),
        ({"type": "integer", "format": "int32"}, IntegerType()),
        ({"type": "number"}, DoubleType()),
        ({"type": "number", "multipleOf": 0.01}, DecimalType(38, 2)),
        ({"type": "number", "multipleOf": 1e-5}, DecimalType(38, 5)),
        ({"type": "number", "multipleOf": 0.5}, DoubleType()),
        ({"type": "number", "multipleOf": 10}, DoubleType()),
        ({"type": "string", "maxLength": 3}, StringType()),
        ({"type": "string", "format": "date"}, DateType()),
        ({"type": "string", "format": "date-time"}, TimestampType()),
        ({"type": "string", "format": "email"}, StringType()),
        ({"type": "string", "contentEncoding": "base64"}, BinaryType()),
        ({"type": "null"}, NullType()),
        ({"type": ["string", "null"]}, StringType()),
        ({"type": ["integer", "number"]}, DoubleType()),
        ({"type": ["integer", "string"]}, VariantType()),
        ({"enum": ["a", "b", None]}, StringType()),
        ({"enum": ["a", 1]}, VariantType()),
        ({"const": 1}, LongType()),
        ({"type": "array", "items": {"type": "integer"}}, ArrayType(LongType())),
        ({"type": "array"}, ArrayType(VariantType())),
        ({"type": "object", "properties": {"px": {"type": "number"}}, "required": ["px"]}, PRICE),
        ({"properties": {"px": {"type": "number"}}}, PRICE),
        ({"type": "object", "additionalProperties": {"type": "number"}}, MapType(StringType(), DoubleType())),
        ({"type": "object"}, VariantType()),
        ({}, VariantType()),
        (True, VariantType()),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, LongType()),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, VariantType()),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, LongType()),
    ],
    ids=str,
)
def test_types(schema: object, kind: DataType) -> None:
    assert kind_of(schema) == kind


def test_references_into_the_schema_are_followed_and_one_to_itself_is_a_variant() -> None:
    defined = {
        "a/b~": {"type": "object", "properties": {"px": {"type": "number"}}},
        "node": {"type": "object", "properties": {"id": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}},
    }
    assert kind_of({"$ref": "#/$defs/a~1b~0"}, **{"$defs": defined}) == PRICE
    node = StructType().add("id", LongType()).add("next", VariantType())
    assert kind_of({"$ref": "#/$defs/node"}, **{"$defs": defined}) == node
    both = {"allOf": [{"$ref": "#/$defs/a~1b~0"}, {"properties": {"qty": {"type": "integer"}}}]}
    assert kind_of(both, **{"$defs": defined}) == StructType().add("px", DoubleType()).add("qty", LongType())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "OPTION_INVALID: option jsonSchema: is not JSON"),
        ("[]", "OPTION_INVALID: option jsonSchema: is no JSON object"),
        ('{"type":"string"}', "SCHEMA_UNSUPPORTED: the JSON Schema describes string"),
        ('{"properties":{"x":{"type":"text"}}}', "option jsonSchema: 'text' is no type"),
        ('{"properties":{"x":{"$ref":"#/none"}}}', "there is nothing at #/none"),
        ('{"properties":{"x":{"$ref":"https://a/b"}}}', "SCHEMA_UNSUPPORTED: the JSON Schema refers to https://a/b"),
        ('{"properties":{"x":{"type":"number","multipleOf":"a"}}}', "multipleOf is 'a'"),
        (
            '{"properties":{"x":{"multipleOf":1e9999999999999999999}}}',
            "OPTION_INVALID: option jsonSchema: is nested too",
        ),
        (
            '{"properties":' + '{"x":' * 100_000 + "{}" + "}" * 100_001,
            "OPTION_INVALID: option jsonSchema: is nested too",
        ),
    ],
)
def test_faults_are_named(text: str, problem: str) -> None:
    with pytest.raises(SowSourceError) as error:
        columns_of(text)
    assert problem in str(error.value)


def test_a_schema_that_grows_with_each_reference_is_refused() -> None:
    """Twenty definitions, each of which has the next one twice, were a million columns, and the planner never ended."""
    twice = {f"d{n}": {"properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}} for n in range(40)}
    with pytest.raises(SowSourceError, match=r"SCHEMA_UNSUPPORTED: .* more than 10,000 parts"):
        kind_of({"$ref": "#/$defs/d0"}, **{"$defs": {**twice, "d40": {}}})


def test_a_value_that_is_nested_too_deep_for_a_column_is_a_variant() -> None:
    inner: object = {"type": "integer"}
    for _ in range(NESTING_MAX - 1):
        inner = {"type": "array", "items": inner}
    depth, kind = 0, kind_of(inner)
    while isinstance(kind, ArrayType):
        depth, kind = depth + 1, kind.elementType
    assert (depth, kind) == (NESTING_MAX - 1, LongType())
    for _ in range(100):
        inner = {"type": "array", "items": inner}
    assert "variant" in kind_of(inner).simpleString()


def test_each_column_is_nullable_in_the_order_of_the_schema() -> None:
    text = '{"type":"object","required":["b"],"properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'
    assert columns_of(text).simpleString() == "struct<b:string,a:bigint>"
    assert all(field.nullable for field in columns_of(text).fields)
