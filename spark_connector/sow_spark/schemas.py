"""The columns of a DataFrame of a topic, the source of each, and the inference of a schema.

Guarantees:

    [1]  A `Layout` knows the source of every column. Otherwise it is not made, and an error names the column.
    [2]  Inference is a function of the sample alone: `merged` is commutative and associative up to the order of fields.
    [3]  Every document of the sample fits the schema inferred from it, by the rules of `sow_spark.converting`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from sow_spark.connection import connect, retried
from sow_spark.errors import HINTS, SowSourceError, option_error, translated
from sow_spark.option_parsing import check_form_options
from sow_spark.options import NESTING_MAX, NewFields, PayloadForm, Reading

if TYPE_CHECKING:
    from sow_client import Client, Topic

PAYLOAD: Final = "payload"
"""The column for whole payloads."""
RESCUED: Final = "_rescued"
"""The column for fields that the schema lacks, as a JSON object (`newFields=rescue`)."""
RECORD_COLUMNS: Final[Mapping[str, DataType]] = {
    "_key": StringType(),
    "_version": LongType(),
    "_publish_time": TimestampType(),
    "_expire_time": TimestampType(),
    "_origin": StringType(),
}
"""Metadata of a record. `_expire_time` is null for a record that never expires."""
CHANGE_COLUMNS: Final[Mapping[str, DataType]] = {
    "_op": StringType(),
    "_reason": StringType(),
    "_sequence": LongType(),
}
"""Metadata of a change: its kind ("put", "delete" or "expire"), its cause (mostly null), its position in the
journal."""
SHOWN_MAX: Final = 100
"""Characters of a name that an error shows."""
TOPIC_COLUMN: Final = "_topic"
METADATA_COLUMNS: Final[Mapping[str, DataType]] = {TOPIC_COLUMN: StringType(), **RECORD_COLUMNS, **CHANGE_COLUMNS}
_NULLABLE: Final = frozenset({"_expire_time", "_reason"})
_LEVELS_MAX: Final = 63
"""Arrow's format has 64 levels at most; a map and a variant take two."""
DECIMAL_DIGITS_MAX: Final = 38
_LONG_DIGITS: Final = 20  # the digits of a long, as Spark counts them when it meets a decimal


# ---- the sources of columns ----


@dataclass(frozen=True)  # no slots: StructType has a cached hash that pickling by slots does not restore
class Layout:
    """The columns of a DataFrame, by their source."""

    schema: StructType
    """All columns, in order."""
    metadata: tuple[str, ...]
    """Names of the columns filled with the record's metadata."""
    fields: StructType
    """Columns filled from the payload: fields of the document, or the one column `payload`."""
    new_fields: NewFields = "ignore"
    """The treatment of other fields of a document. With `rescue` there is a column for them."""

    @property
    def has_op(self) -> bool:
        """True if rows show the difference between a delete and a put."""
        return "_op" in self.metadata


def layout(schema: StructType, *, metadata: bool, new_fields: NewFields = "ignore") -> Layout:
    """The sources of the columns of `schema`. Without `metadata` all columns are fields of the payload, but for the
    column of `new_fields`.

    Raises SowSourceError (SCHEMA_UNSUPPORTED).
    """
    fields: list[StructField] = []
    filled: list[str] = []
    if new_fields == "rescue" and (RESCUED not in schema.names or schema[RESCUED].dataType != StringType()):
        raise unsupported(RESCUED, "is missing, or is no string", "newFields=rescue needs it in a given schema")
    for field in schema.fields:
        if new_fields == "rescue" and field.name == RESCUED:
            continue
        expected = METADATA_COLUMNS.get(field.name) if metadata else None
        if expected is None:
            _check_supported(field.dataType, field.name)
            fields.append(field)
            continue
        if field.dataType != expected:
            raise unsupported(
                field.name,
                f"is filled with metadata, which is {expected.simpleString()}, not {field.dataType.simpleString()}",
                "to read a field of the payload with that name, give metadata=false",
            )
        if field.name in _NULLABLE and not field.nullable:
            raise unsupported(field.name, "can be null: it must be nullable")
        filled.append(field.name)
    return Layout(schema, tuple(filled), StructType(fields), new_fields)


def unsupported(column: str, problem: str, hint: str = "") -> SowSourceError:
    """The error for a column that cannot be read."""
    return SowSourceError("SCHEMA_UNSUPPORTED", f"column {column} {problem}", hint)


_SCALARS: Final = (
    StringType,
    BinaryType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
    NullType,
    VariantType,
)


def _check_supported(kind: DataType, name: str, levels: int = 1) -> None:
    """`levels`: those of Arrow, down to this type."""
    if levels > _LEVELS_MAX:
        raise unsupported(f"{name[:SHOWN_MAX]}…", "is nested too deep", "read a column above it as string or variant")
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check_supported(field.dataType, f"{name}.{field.name}", levels + 1)
    elif isinstance(kind, ArrayType):
        _check_supported(kind.elementType, f"{name}[]", levels + 1)
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise unsupported(name, f"has keys of type {kind.keyType.simpleString()}; those of JSON are strings")
        _check_supported(kind.valueType, f"{name}{{}}", levels + 2)
    elif not isinstance(kind, _SCALARS):
        raise unsupported(name, f"has the type {kind.simpleString()}, which is not read", "read it as string")


def check_form(found: Layout, form: PayloadForm) -> None:
    """Refuses a schema that a payload of this form cannot fill. Raises SowSourceError (SCHEMA_UNSUPPORTED)."""
    if form == "columns":
        return
    for field in found.fields.fields:
        if field.name != PAYLOAD:
            raise unsupported(
                field.name, f"is neither metadata nor {PAYLOAD}", f"with payload={form} there is no other column"
            )
        wanted = StringType if form == "string" else BinaryType
        if not isinstance(field.dataType, wanted):
            raise unsupported(
                field.name, f"has the type {field.dataType.simpleString()}", f"payload={form} makes a {form}"
            )


def form_of(reading: Reading, found: Layout, message_type: str) -> PayloadForm:
    """The form in which payloads become columns: by the option, else by the topic's message type and the schema."""
    form = reading.payload
    if form is None:
        kinds = {field.name: field.dataType for field in found.fields.fields}
        if message_type == "json":
            form = "columns"
        else:
            form = "string" if isinstance(kinds.get(PAYLOAD), StringType) else "binary"
    if form == "columns" and message_type != "json":
        raise SowSourceError(
            "OPTION_INVALID",
            f"option payload: columns are made of json documents, and {reading.topic} has {message_type}",
            "give payload=string or payload=binary",
        )
    check_form_options(reading.given, form, f"topic {reading.topic} of type {message_type}")
    check_form(found, form)
    return form


# ---- inference ----


def infer(reading: Reading) -> StructType:
    """The schema of a topic, with the metadata columns. If payloads become columns, it is made of the option
    `jsonSchema`, or inferred from sample records.

    Raises SowSourceError if the topic is unknown, or there is no sample (SCHEMA_UNKNOWN).
    """
    if reading.columns and reading.metadata != "false" and METADATA_COLUMNS.keys() >= set(reading.columns):
        return _chosen(with_metadata([], reading, changes=True), reading)  # no document is needed for these
    with translated(f"looking at {reading.named}"), connect(reading.connecting) as client:
        topics = topics_read(client, reading)
        documents = all(topic.settings.message_type == "json" for topic in topics)
        form = reading.payload or ("columns" if documents else "binary")
        for topic in topics:
            if reading.payload is None and topic.settings.message_type != "json":
                check_form_options(reading.given, form, f"topic {topic.name} of type {topic.settings.message_type}")
        if form != "columns":
            fields = [StructField(PAYLOAD, StringType() if form == "string" else BinaryType())]
        elif reading.json_schema is not None:
            fields = _registered(client, reading, reading.json_schema)
        else:
            fields = _sampled(client, topics, reading)
    if reading.new_fields == "rescue" and form == "columns":
        fields = [*(field for field in fields if field.name != RESCUED), StructField(RESCUED, StringType())]
    return _chosen(with_metadata(fields, reading, changes=bool(reading.columns)), reading)


def topics_read(client: Client, reading: Reading) -> list[Topic]:
    """The topics that a snapshot reads, at least one. Raises SowError and SowSourceError."""
    if reading.several:
        return retried(reading.connecting, lambda: selected(client.here.topics(), reading, journal=False))
    return [retried(reading.connecting, lambda: client.describe_topic(reading.topic))]


def selected(topics: Iterable[Topic], reading: Reading, *, journal: bool = True) -> list[Topic]:
    """Those of all topics that a read of several takes, at least one. `journal`: a stream, so a pattern leaves out
    topics without a journal. Raises SowSourceError."""
    if reading.topic_pattern is None:
        found = {topic.name: topic for topic in topics}
        for name in reading.topics:
            if name not in found:
                raise SowSourceError("TOPIC_NOT_FOUND", f"topic {name} is not there", HINTS["TOPIC_NOT_FOUND"])
        return [found[name] for name in reading.topics]
    matches = re.compile(reading.topic_pattern).fullmatch
    chosen = [topic for topic in topics if not topic.name.startswith("_") and matches(topic.name)]
    if journal:
        chosen = [topic for topic in chosen if topic.settings.journal]
    if not chosen:
        what = "topic with a journal" if journal else "topic"
        raise SowSourceError("PATTERN_MATCHES_NOTHING", f"no {what} matches {reading.topic_pattern!r}")
    return chosen


def _chosen(schema: StructType, reading: Reading) -> StructType:
    """The columns of the option `columns`. Raises SowSourceError (OPTION_INVALID)."""
    if not reading.columns:
        return schema
    for name in reading.columns:
        if name not in schema.names:
            raise option_error("columns", f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
    return StructType([schema[name] for name in reading.columns])


def check_given(reading: Reading) -> None:
    """Refuses options about an inferred schema beside a given one. Raises SowSourceError (OPTION_INVALID)."""
    for name in ("columns", "jsonSchema", "inferRecords"):
        if name in reading.given:
            raise option_error(name, "and a given schema exclude each other: only the columns of the schema are read")
    if reading.metadata == "changes":
        raise option_error("metadata", "changes and a given schema exclude each other: name the columns in the schema")


def _registered(client: Client, reading: Reading, source: str) -> list[StructField]:
    """The fields of a JSON Schema: a text, the path of a file, or the record `topic:NAME/KEY`."""
    from sow_spark.json_schemas import columns_of

    if source.lstrip().startswith("{"):
        text = source
    elif source.startswith("topic:"):
        name, slash, key = source.removeprefix("topic:").partition("/")
        if not (name and slash and key):
            raise option_error("jsonSchema", f"{source!r} is not topic:NAME/KEY")
        record = retried(reading.connecting, lambda: client.get(name, key))
        if record is None:
            raise option_error("jsonSchema", f"topic {name} has no record {key!r}")
        text = record.payload.decode(errors="replace")
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise option_error("jsonSchema", f"the file cannot be read: {error}") from None
    return columns_of(text).fields


def with_metadata(fields: Iterable[StructField], reading: Reading, *, changes: bool = False) -> StructType:
    """Fields of a payload, and the requested metadata columns, with `changes` all of them. A metadata column wins over
    a field of the same name."""
    if reading.metadata == "false":
        return StructType(list(fields))
    everything = changes or reading.metadata == "changes"
    added = {**METADATA_COLUMNS} if everything else {TOPIC_COLUMN: StringType(), **RECORD_COLUMNS}
    if not (changes or reading.several):
        del added[TOPIC_COLUMN]
    schema = StructType([field for field in fields if field.name not in METADATA_COLUMNS])
    for name, kind in added.items():
        schema.add(StructField(name, kind, nullable=name in _NULLABLE))
    return schema


def _sampled(client: Client, topics: Sequence[Topic], reading: Reading) -> list[StructField]:
    payloads: list[bytes] = []
    for topic in topics:
        if topic.settings.message_type != "json":
            raise SowSourceError(
                "OPTION_INVALID",
                f"option payload: columns are made of json documents, and {topic.name} has "
                f"{topic.settings.message_type}",
                "give payload=string or payload=binary",
            )
        payloads += retried(reading.connecting, lambda name=topic.name: _sample(client, name, reading))  # type: ignore[misc]  # a lambda's default argument
    if not payloads:
        problem = "has no record that matches the option filter" if reading.filter else "has no records"
        raise SowSourceError(
            "SCHEMA_UNKNOWN",
            f"{reading.named} {problem}, so there is nothing to infer a schema from",
            'give one: spark.read.schema("id LONG, …")',
        )
    return inferred(payloads).fields


def _sample(client: Client, topic: str, reading: Reading) -> list[bytes]:
    batches = client.query(topic, reading.filter or None, reading.parameters, top_n=reading.infer_records).batches()
    return [payload for batch in batches for payload in batch.payloads]


def inferred(payloads: Iterable[bytes]) -> StructType:
    """The schema that all these json documents fit, as Spark's JSON source infers it: a field that is always null is a
    string, and fields that are always `{}` are left out. An object or array that is nested too deep is a string. Fields
    are in the order of their first appearance."""
    seen: _Seen = {}
    for payload in payloads:
        document = json.loads(payload, parse_int=_number, parse_float=_Float)
        if isinstance(document, dict):
            seen = _merged_fields(seen, _fields_of(document))
    finished = _finished(seen)
    return finished if isinstance(finished, StructType) else StructType()


class _Float(str):
    """A number with a fraction or an exponent."""

    __slots__ = ()


class _Digits(str):
    """A whole number."""

    __slots__ = ()


def _number(text: str) -> _Digits:
    return _Digits(text)


# A type that is being inferred. A struct is a dict from names, an array a list of one; a null is None.
_Seen: TypeAlias = "dict[str, _Kind]"
_Kind: TypeAlias = "DataType | _Seen | list[_Kind] | None"


def _kind_of(value: object, depth: int = 0) -> _Kind:
    match value:
        case dict() | list() if depth > NESTING_MAX:
            return StringType()
        case None:
            return None
        case bool():
            return BooleanType()
        case _Digits():
            return _integer_kind(value)
        case _Float():
            return DoubleType() if isfinite(float(value)) else StringType()
        case str():
            return StringType()
        case dict():
            return _fields_of(value, depth + 1)
        case list():
            element: _Kind = None
            for item in value:
                element = merged(element, _kind_of(item, depth + 1))
            return [element]
    raise AssertionError(f"JSON has no {type(value).__name__}")


def _integer_kind(text: str) -> DataType:
    digits = len(text.lstrip("-"))
    if digits <= 18 or (digits == 19 and -(2**63) <= int(text) < 2**63):
        return LongType()
    if digits <= DECIMAL_DIGITS_MAX:
        return DecimalType(digits, 0)
    return DoubleType() if isfinite(float(text)) else StringType()


def _fields_of(document: dict[str, object], depth: int = 0) -> _Seen:
    return {name: _kind_of(value, depth) for name, value in document.items()}


def _merged_fields(one: _Seen, other: _Seen) -> _Seen:
    result = dict(one)
    for name, kind in other.items():
        result[name] = merged(result[name], kind) if name in result else kind
    return result


def merged(one: _Kind, other: _Kind) -> _Kind:
    """The type that values of both types fit."""
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        return _merged_fields(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return [merged(one[0], other[0])]
    if isinstance(one, DataType) and isinstance(other, DataType):
        kinds = {type(one), type(other)}
        if kinds <= {LongType, DecimalType}:
            return DecimalType(max(_digits(one), _digits(other)), 0)
        if kinds <= {LongType, DecimalType, DoubleType}:
            return DoubleType()
    return StringType()


def _digits(kind: DataType) -> int:
    return kind.precision if isinstance(kind, DecimalType) else _LONG_DIGITS


def _finished(kind: _Kind) -> DataType | None:
    """The type in Spark's terms. None for an object without fields."""
    if kind is None:
        return StringType()
    if isinstance(kind, DataType):
        return kind
    if isinstance(kind, list):
        element = _finished(kind[0])
        return None if element is None else ArrayType(element)
    fields = [(name, _finished(inner)) for name, inner in kind.items()]
    found = [StructField(name, inner) for name, inner in fields if inner is not None]
    return StructType(found) if found else None
