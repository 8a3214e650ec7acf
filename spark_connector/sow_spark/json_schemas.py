"""A JSON Schema as the columns of a DataFrame.

| JSON Schema | column |
|---|---|
| `boolean` | boolean |
| `integer`; with `format` `int32` | long; int |
| `number`; with `multipleOf` 0.1, 0.01, … | double; decimal(38, 1), decimal(38, 2), … |
| `string`; with `format` `date`, `date-time`; with `contentEncoding` `base64` | string; date, timestamp; binary |
| `object` with `properties`; with `additionalProperties` alone | struct; map from strings |
| `array` with `items` | array |
| `null` | void |
| everything else: no type, several types, an object or array without a description, a reference to itself | variant |

    [1]  A schema says which documents are valid, and a column what can be read. So each column is nullable, whatever is
         `required`, and limits such as `maximum` are not checked.
    [2]  `null` among the types of a value is left out. `integer` and `number` together are a number.
    [3]  A value that is nested too deep for a column is a variant, too.
    [4]  The work is bounded, whatever the references: definitions that refer to each other twice would otherwise double
         at each level. A schema may come from a topic, so from anybody who may publish there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final, TypeAlias

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
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from sow_spark.errors import SowSourceError, option_error
from sow_spark.options import NESTING_MAX

DECIMAL_DIGITS: Final = 38
PARTS_MAX: Final = 10_000
_Schema: TypeAlias = Mapping[str, object]
_COMBINED: Final = ("anyOf", "oneOf")


def columns_of(text: str) -> StructType:
    """The columns of a JSON Schema of objects. Raises SowSourceError: OPTION_INVALID, SCHEMA_UNSUPPORTED."""
    try:
        schema = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise option_error("jsonSchema", f"is not JSON: {error}") from None
    except (RecursionError, InvalidOperation):
        raise option_error("jsonSchema", "is nested too deep, or has a number out of range") from None
    if not isinstance(schema, dict):
        raise option_error("jsonSchema", "is no JSON object")
    found = _Reader(schema).kind(schema, ())
    if not isinstance(found, StructType):
        raise SowSourceError(
            "SCHEMA_UNSUPPORTED",
            f"the JSON Schema describes {found.simpleString()}, not an object with properties",
            "give a schema of whole documents",
        )
    return found


class _Reader:
    """Reads the parts of one JSON Schema."""

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._parts = 0
        self._depth = 0

    def kind(self, schema: object, within: tuple[str, ...]) -> DataType:
        """The type of a value. `within`: the references that lead to it."""
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise SowSourceError(
                "SCHEMA_UNSUPPORTED",
                f"the JSON Schema has more than {PARTS_MAX:,} parts, if its references are followed",
                "give a schema of the columns that you need",
            )
        if not isinstance(schema, dict) or self._depth > NESTING_MAX:
            return VariantType()  # true: anything
        self._depth += 1
        try:
            return self._of_schema(schema, within)
        finally:
            self._depth -= 1

    def _of_schema(self, schema: _Schema, within: tuple[str, ...]) -> DataType:
        if isinstance(reference := schema.get("$ref"), str):
            if reference in within:
                return VariantType()  # a column has no type that has itself in it
            return self.kind(self._resolved(reference), (*within, reference))
        if isinstance(every := schema.get("allOf"), list):
            return self._joined([{name: value for name, value in schema.items() if name != "allOf"}, *every], within)
        for name in _COMBINED:
            if isinstance(some := schema.get(name), list):
                return self._one_of(some, within)
        return self._plain(schema, within)

    def _plain(self, schema: _Schema, within: tuple[str, ...]) -> DataType:
        names = _types(schema)
        if len(names) != 1:
            return VariantType()
        form = schema.get("format")
        match next(iter(names)):
            case "boolean":
                return BooleanType()
            case "integer":
                return IntegerType() if form == "int32" else LongType()
            case "number":
                return _number(schema)
            case "string":
                if schema.get("contentEncoding") == "base64":
                    return BinaryType()
                return {"date": DateType(), "date-time": TimestampType()}.get(str(form), StringType())
            case "array":
                return ArrayType(self.kind(schema.get("items", True), within))
            case "object":
                return self._object(schema, within)
            case "null":
                return NullType()
            case other:
                raise option_error("jsonSchema", f"{other!r} is no type of JSON Schema")

    def _object(self, schema: _Schema, within: tuple[str, ...]) -> DataType:
        properties = schema.get("properties")
        if isinstance(properties, dict) and properties:
            return StructType([StructField(name, self.kind(inner, within)) for name, inner in properties.items()])
        if isinstance(others := schema.get("additionalProperties"), dict):
            return MapType(StringType(), self.kind(others, within))
        return VariantType()

    def _joined(self, parts: Sequence[object], within: tuple[str, ...]) -> DataType:
        """All of them hold: the fields of all objects, or the one type that is named."""
        kinds = [kind for kind in (self.kind(part, within) for part in parts) if not isinstance(kind, VariantType)]
        if kinds and all(isinstance(kind, StructType) for kind in kinds):
            fields = {field.name: field for kind in kinds if isinstance(kind, StructType) for field in kind.fields}
            return StructType(list(fields.values()))
        return kinds[0] if len(kinds) == 1 else VariantType()

    def _one_of(self, parts: Sequence[object], within: tuple[str, ...]) -> DataType:
        kinds = [kind for kind in (self.kind(part, within) for part in parts) if not isinstance(kind, NullType)]
        return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else VariantType()

    def _resolved(self, reference: str) -> object:
        found: object = self._root
        steps = reference.removeprefix("#").split("/")
        if not reference.startswith("#") or steps[0]:
            raise SowSourceError(
                "SCHEMA_UNSUPPORTED",
                f"the JSON Schema refers to {reference}",
                "only references into itself are followed",
            )
        for step in steps[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise option_error("jsonSchema", f"there is nothing at {reference}")
            found = found[name]
        return found


def _types(schema: _Schema) -> set[str]:
    """The types of a value, without null [2]."""
    given = schema.get("type")
    if given is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        names = {_type_of(value) for value in values} if isinstance(values, list) else set()
        if not names and "properties" in schema:
            names = {"object"}
    else:
        names = {str(name) for name in given} if isinstance(given, list) else {str(given)}
    if len(names) > 1:
        names.discard("null")
    if names == {"integer", "number"}:
        return {"number"}
    return names


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case Decimal():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _number(schema: _Schema) -> DataType:
    step = schema.get("multipleOf")
    try:
        sign, digits, exponent = Decimal(str(step)).normalize().as_tuple() if step is not None else (0, (), 0)
    except InvalidOperation:
        raise option_error("jsonSchema", f"multipleOf is {step!r}") from None
    if sign == 0 and digits == (1,) and isinstance(exponent, int) and -DECIMAL_DIGITS <= exponent < 0:
        return DecimalType(DECIMAL_DIGITS, -exponent)
    return DoubleType()
