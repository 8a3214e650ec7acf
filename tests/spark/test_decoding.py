"""Packed records into Arrow batches: the table of `sow_spark.decoding`, and that the fast way never differs."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import accumulate

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    VariantVal,
)

from sow_client import PackedRecords
from sow_spark import documents
from sow_spark.converting import Misfit
from sow_spark.decoding import Decoder
from sow_spark.documents import arrow_schema
from sow_spark.encoding import documents as encoded
from sow_spark.errors import SowSourceError
from sow_spark.options import NewFields, ParseMode
from sow_spark.schemas import inferred, layout
from tests.support.oracles.examples import examples


def packed(documents: Sequence[bytes], *, lines: bool = True) -> PackedRecords:
    """As the server sends them."""
    payloads = [document + b"\n" if lines else document for document in documents]
    keys = [f"k{index}".encode() for index in range(len(documents))]
    count = len(documents)
    return PackedRecords(
        count=count,
        payloads=b"".join(payloads),
        payload_offsets=offsets(payloads),
        keys=b"".join(keys),
        key_offsets=offsets(keys),
        versions=struct.pack(f"<{count}q", *range(10, 10 + count)),
        publish_times=struct.pack(f"<{count}q", *[1_700_000_000_000_000 + index for index in range(count)]),
        expire_times=struct.pack(f"<{count}q", *[2**63 - 1 if index % 2 else 5 for index in range(count)]),
        sequences=struct.pack(f"<{count}q", *range(count)),
        origins=struct.pack(f"<{count}H", *[index % 2 for index in range(count)]),
        origin_names=("here", "there"),
        ops=bytes([1 + 2 * (index % 2) for index in range(count)]),
        reasons=bytes([index % 3 for index in range(count)]),
    )


def offsets(values: Sequence[bytes]) -> bytes:
    """Where each begins, and the last one ends."""
    return struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, values), initial=0))


def decoded(schema: StructType, *documents: str, mode: ParseMode = "FAILFAST") -> list[dict[str, object]]:
    """The rows of these documents."""
    rows: list[dict[str, object]] = (
        Decoder(layout(schema, metadata=True), "columns", mode)
        .decode(packed([document.encode() for document in documents]))
        .to_pylist()
    )
    return rows


def value(kind: DataType, text: str, mode: ParseMode = "FAILFAST") -> object:
    """The value in a column of the type."""
    return decoded(StructType().add("x", kind), f'{{"x":{text}}}', mode=mode)[0]["x"]


MOMENT = datetime(2024, 1, 5, 10, 11, 12, 123456, UTC)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (BooleanType(), "true", True),
        (ByteType(), "-128", -128),
        (ShortType(), "32767", 32767),
        (IntegerType(), "2147483647", 2147483647),
        (LongType(), "9223372036854775807", 9223372036854775807),
        (LongType(), "-9223372036854775808", -9223372036854775808),
        (DoubleType(), "1", 1.0),
        (DoubleType(), "-0", -0.0),
        (DoubleType(), "1e-400", 0.0),
        (DoubleType(), '"Infinity"', math.inf),
        (DoubleType(), '"-INF"', -math.inf),
        (FloatType(), "0.1", struct.unpack("f", struct.pack("f", 0.1))[0]),
        # Rounded once: by way of a double it would be 1.0000002384185791.
        (FloatType(), "1.00000017881393432617187499", 1.0000001192092896),
        (DecimalType(10, 2), "1.25", Decimal("1.25")),
        (DecimalType(10, 2), '"1.25"', Decimal("1.25")),
        (DecimalType(10, 2), "1.250", Decimal("1.25")),
        (DecimalType(10, 2), "1e2", Decimal("100.00")),
        (DecimalType(10, 2), "-0.01", Decimal("-0.01")),
        (DecimalType(38, 0), "9" * 38, Decimal("9" * 38)),
        (StringType(), '"é😀\\u0000\\n"', "é😀\0\n"),
        (StringType(), "1.50", "1.50"),
        (StringType(), "true", "true"),
        (StringType(), '{"a": [1.0, null, "é"]}', '{"a":[1.0,null,"é"]}'),
        (BinaryType(), json.dumps(base64.b64encode(b"\x00\xffabc").decode()), b"\x00\xffabc"),
        (DateType(), '"2024-02-29"', date(2024, 2, 29)),
        (FloatType(), '"-INF"', -math.inf),
        (DecimalType(10, 2), "0e5", Decimal("0.00")),
        (TimestampType(), '"2024-01-05T05:41:12.123456-04:30"', MOMENT),
        (TimestampType(), '"2024-01-05T10:11:12.123456Z"', MOMENT),
        (TimestampType(), '"2024-01-05T10:11:12.123456789Z"', MOMENT),
        (TimestampType(), '"2024-01-05T12:11:12.123456+02:00"', MOMENT),
        (TimestampType(), '"2024-01-05 10:11:12.123456"', MOMENT),
        (TimestampType(), '"2024-01-05"', datetime(2024, 1, 5, tzinfo=UTC)),
        (TimestampType(), "1700000000", datetime.fromtimestamp(1_700_000_000, UTC)),
        (TimestampNTZType(), '"2024-01-05T10:11:12.123456"', MOMENT.replace(tzinfo=None)),
        (TimestampNTZType(), '"2024-01-05T10:11"', datetime(2024, 1, 5, 10, 11, tzinfo=UTC).replace(tzinfo=None)),
        (NullType(), "null", None),
        (ArrayType(LongType()), "[1,null]", [1, None]),
        (MapType(StringType(), LongType()), '{"a":1,"b":null}', [("a", 1), ("b", None)]),
        (StructType().add("a", LongType()).add("b", DateType()), '{"a":1,"c":2}', {"a": 1, "b": None}),
        (ArrayType(StructType().add("a", BinaryType())), '[{"a":"YWJj"},null]', [{"a": b"abc"}, None]),
        (MapType(StringType(), ArrayType(DateType())), '{"a":["2024-02-29"]}', [("a", [date(2024, 2, 29)])]),
    ],
    ids=str,
)
def test_a_value_that_fits_its_type_is_read_exactly(kind: DataType, text: str, expected: object) -> None:
    assert value(kind, text) == expected
    assert value(kind, "null") is None
    # Beside a value that does not fit, a document is read field by field.
    beside = decoded(StructType().add("x", kind).add("y", LongType()), f'{{"x":{text},"y":"odd"}}', mode="PERMISSIVE")
    assert beside == [{"x": expected, "y": None}]


def test_not_a_number_is_read_as_to_json_writes_it() -> None:
    found = value(DoubleType(), '"NaN"')
    assert isinstance(found, float)
    assert math.isnan(found)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (BooleanType(), "1"),
        (ByteType(), "128"),
        (LongType(), "1.0"),
        (LongType(), '"1"'),
        (LongType(), "9223372036854775808"),
        (DoubleType(), "1e400"),
        (DoubleType(), '"1.5"'),
        (FloatType(), "1e39"),
        (DecimalType(10, 2), "1.255"),
        (DecimalType(10, 2), "123456789"),
        (DecimalType(10, 2), '"NaN"'),
        (StringType(), '"\\ud800"'),
        (BinaryType(), '"not base64!"'),
        (BinaryType(), '"é"'),
        (DateType(), '"2023-02-29"'),
        (DateType(), '"2024-1-5"'),
        (DateType(), "20240105"),
        (BooleanType(), '"true"'),
        (BinaryType(), "5"),
        (TimestampType(), "1.5"),
        (TimestampType(), '"2024-01-05T24:00:00Z"'),
        (TimestampType(), '"yesterday"'),
        (TimestampNTZType(), '"2024-01-05T10:11:12Z"'),
        (NullType(), "1"),
        (ArrayType(LongType()), '{"a":1}'),
        (StructType().add("a", LongType()), "[]"),
        (MapType(StringType(), LongType()), "[1]"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_fails_or_is_null_or_drops_its_row(kind: DataType, text: str) -> None:
    with pytest.raises(Misfit) as misfit:
        value(kind, text)
    assert misfit.value.path == "/x"
    assert value(kind, text, "PERMISSIVE") is None
    schema = StructType().add("x", kind).add("_key", StringType())
    assert decoded(schema, '{"x":null}', f'{{"x":{text}}}', "{}", mode="DROPMALFORMED") == [
        {"x": None, "_key": "k0"},
        {"x": None, "_key": "k2"},
    ]


def test_a_misfit_names_row_path_value_and_type() -> None:
    schema = StructType().add("legs", ArrayType(StructType().add("px", DoubleType())))
    with pytest.raises(Misfit) as misfit:
        decoded(schema, "{}", '{"legs":[{"px":1},{"px":"dear"}]}')
    assert misfit.value.row == 1
    assert str(misfit.value) == 'field /legs[]/px: expected double, found "dear"'


@pytest.mark.parametrize(
    ("document", "found"), [("[1,null]", "[1,null]"), ('"a"', '"a"'), ('{"x":', "Expecting value")]
)
def test_what_is_no_document_is_shown(document: str, found: str) -> None:
    with pytest.raises(Misfit, match="the document: expected a JSON object") as misfit:
        decoded(StructType().add("x", LongType()), document)
    assert found in misfit.value.found


def test_a_name_with_half_a_character_is_no_text() -> None:
    with pytest.raises(Misfit, match="field /x: expected names that are text"):
        value(MapType(StringType(), LongType()), '{"\\ud800":1}')


def test_permissive_keeps_the_fields_that_fit() -> None:
    schema = StructType().add("s", StructType().add("a", LongType()).add("b", LongType(), nullable=False))
    assert decoded(schema, '{"s":{"a":"x","b":1}}', mode="PERMISSIVE") == [{"s": {"a": None, "b": 1}}]
    assert decoded(schema, '{"s":{"a":1,"b":"x"}}', mode="PERMISSIVE") == [{"s": None}]


@pytest.mark.parametrize("document", ['{"x":null}', "{}", '{"x":"no"}'])
def test_a_column_that_must_not_be_null_is_checked(document: str) -> None:
    schema = StructType().add("x", LongType(), nullable=False)
    for mode in ("FAILFAST", "PERMISSIVE"):
        with pytest.raises(Misfit, match="/x"):
            decoded(schema, '{"x":1}', document, mode=mode)
    assert decoded(schema, '{"x":1}', document, mode="DROPMALFORMED") == [{"x": 1}]


def test_documents_may_have_line_feeds_inside() -> None:
    schema = StructType().add("x", LongType()).add("y", StringType())
    assert decoded(schema, '{\n"x":\n1}', '{"y":"a\\nb"}\n') == [{"x": 1, "y": None}, {"x": None, "y": "a\nb"}]


def test_one_odd_document_does_not_change_the_others_of_a_large_batch() -> None:
    schema = StructType().add("x", LongType()).add("_key", StringType())
    documents = [f'{{"x":{index}}}' for index in range(2_345)]
    documents[1_234] = '{"x":1,"x":2}'
    documents[1_777] = '{"x":"no"}'
    rows = decoded(schema, *documents, mode="PERMISSIVE")
    assert [row["x"] for row in rows] == [*range(1_234), 2, *range(1_235, 1_777), None, *range(1_778, 2_345)]
    kept = decoded(schema, *documents, mode="DROPMALFORMED")
    assert [row["_key"] for row in kept] == [f"k{index}" for index in range(2_345) if index != 1_777]


def test_metadata_columns_are_filled_in_any_order() -> None:
    schema = (
        StructType()
        .add("_origin", StringType())
        .add("_expire_time", TimestampType())
        .add("_op", StringType())
        .add("_reason", StringType())
        .add("_publish_time", TimestampType())
        .add("_sequence", LongType())
        .add("_version", LongType(), nullable=False)
        .add("_key", StringType())
    )
    decoder = Decoder(layout(schema, metadata=True), "columns", "FAILFAST", changes=True)
    assert set(decoder.columns) == {"origin", "expire_time", "op", "publish_time", "sequence", "version", "key"}
    assert decoder.decode(packed([b"{}", b"{}"])).to_pylist() == [
        {
            "_origin": "here",
            "_expire_time": datetime(1970, 1, 1, 0, 0, 0, 5, UTC),
            "_op": "put",
            "_reason": None,
            "_publish_time": datetime.fromtimestamp(1_700_000_000, UTC),
            "_sequence": 0,
            "_version": 10,
            "_key": "k0",
        },
        {
            "_origin": "there",
            "_expire_time": None,
            "_op": "delete",
            "_reason": "touched",
            "_publish_time": datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=1),
            "_sequence": 1,
            "_version": 11,
            "_key": "k1",
        },
    ]


def test_payloads_as_one_column() -> None:
    binary = StructType().add("payload", BinaryType())
    decoder = Decoder(layout(binary, metadata=True), "binary", "FAILFAST")
    assert decoder.decode(packed([b"\xff", b""], lines=False)).to_pylist() == [{"payload": b"\xff"}, {"payload": b""}]
    text = layout(StructType().add("payload", StringType()).add("_key", StringType()), metadata=True)
    sent = packed(["é".encode(), b"\xff", b""], lines=False)
    with pytest.raises(Misfit) as misfit:
        Decoder(text, "string", "FAILFAST").decode(sent)
    assert misfit.value.row == 1
    rows = Decoder(text, "string", "PERMISSIVE").decode(sent).to_pylist()
    assert [row["payload"] for row in rows] == ["é", None, ""]
    rows = Decoder(text, "string", "DROPMALFORMED").decode(sent).to_pylist()
    assert [row["_key"] for row in rows] == ["k0", "k2"]


# ---- the fast way gives the same as the careful one ----

SCALARS: list[DataType] = [
    BooleanType(),
    ByteType(),
    ShortType(),
    IntegerType(),
    LongType(),
    FloatType(),
    DoubleType(),
    DecimalType(10, 2),
    DecimalType(38, 10),
    StringType(),
    BinaryType(),
    DateType(),
    TimestampType(),
    TimestampNTZType(),
    NullType(),
]
NAMES = st.sampled_from(["a", "b", "c d", "é"])


def structs(kinds: st.SearchStrategy[DataType]) -> st.SearchStrategy[StructType]:
    """Structs of a few fields, some of which must not be null."""
    columns = st.tuples(kinds, st.sampled_from([True, True, False]))
    fields = st.dictionaries(NAMES, columns, min_size=1, max_size=3)
    return fields.map(lambda chosen: StructType([column(name, *chosen[name]) for name in chosen]))


def column(name: str, kind: DataType, nullable: bool) -> StructField:
    """A column; void is always nullable."""
    return StructField(name, kind, nullable or isinstance(kind, NullType))


TYPES: st.SearchStrategy[DataType] = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        structs(inner),
        inner.map(ArrayType),
        inner.map(lambda kind: ArrayType(kind, containsNull=isinstance(kind, NullType))),
        st.builds(MapType, st.just(StringType()), inner),
    ),
    max_leaves=4,
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-200, 200).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9).map(str),
    st.sampled_from(["-0", "-0.0", "1e2", "1E-400", "1e400", "3.5e38", "1.00", "0.000", "1e39", "16777217"]),
)
TIMES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["2024-02-29", "2023-02-29", "0000-01-01", "9999-12-31", "1969-12-31", "2024-1-5", ""]),
        st.sampled_from(["", "T", " ", "t"]),
        st.sampled_from(["", "10", "10:11", "23:59:59", "24:00:00", "10:11:60", "10:11:12.5", "10:11:12.123456789"]),
        st.sampled_from(["", "Z", "z", "+02:00", "-0230", "+02", "+24:00", "-23:59", "+00:60"]),
    ),
)
TEXTS = st.one_of(
    TIMES,
    st.text(max_size=5),
    st.sampled_from(["NaN", "Infinity", "-INF", "1.5", "+1.5", ".5", "5.", "1e2", "abc", "true", "null", " 1", "1_0"]),
    st.binary(max_size=4).map(lambda data: base64.b64encode(data).decode()),
).map(json.dumps)
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.sampled_from(["null", "true", "false", '"\\ud800"'])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(st.tuples(NAMES.map(json.dumps), inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"
        ),
    ),
    max_leaves=5,
)


def fitting(kind: DataType) -> st.SearchStrategy[str]:
    """Values that often fit the type."""
    match kind:
        case StructType():
            parts = [st.tuples(st.just(json.dumps(field.name)), near(field.dataType)) for field in kind.fields]
            return st.tuples(*parts).map(lambda pairs: "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}")
        case ArrayType():
            return st.lists(near(kind.elementType), max_size=3).map(lambda items: f"[{','.join(items)}]")
        case MapType():
            return st.dictionaries(NAMES.map(json.dumps), near(kind.valueType), max_size=3).map(
                lambda pairs: "{" + ",".join(f"{name}:{value}" for name, value in pairs.items()) + "}"
            )
        case BooleanType():
            return st.sampled_from(["true", "false"])
        case ByteType() | ShortType() | IntegerType() | LongType():
            return st.integers(-128, 127).map(str)
        case FloatType() | DoubleType() | DecimalType():
            return NUMBERS
        case DateType() | TimestampType() | TimestampNTZType():
            return TIMES.map(json.dumps)
        case BinaryType():
            return st.binary(max_size=4).map(lambda data: json.dumps(base64.b64encode(data).decode()))
        case NullType():
            return st.just("null")
    return st.text(max_size=5).map(json.dumps)


def near(kind: DataType) -> st.SearchStrategy[str]:
    """Mostly values that fit."""
    return st.one_of(fitting(kind), fitting(kind), fitting(kind), st.just("null"), VALUES)


@st.composite
def tables(draw: st.DrawFn) -> tuple[StructType, list[bytes]]:
    """A schema, and documents that fit it more or less."""
    schema = draw(structs(TYPES))
    documents = draw(st.lists(st.one_of(fitting(schema), fitting(schema)), min_size=1, max_size=4))
    return schema, [document.encode() for document in documents]


def outcome(decoder: Decoder, sent: PackedRecords) -> object:
    """The batch, or where it fails."""
    try:
        batch = decoder.decode(sent)
    except Misfit as misfit:
        return str(misfit), misfit.row
    assert batch.schema.equals(decoder.schema)
    batch.validate(full=True)
    # As text: NaN equals NaN, -0.0 differs from 0.0, and Python has no year 0.
    return [column.to_string(window=1_000) for column in batch.columns]


FAR_DAYS = [-(2**31), -719_529, -719_528, -719_162, -1, 0, 2_932_896, 2_932_897, 2**31 - 1]
FAR_MICROS = [
    -(2**63),
    -719_528 * 86_400_000_000 - 1,
    -719_528 * 86_400_000_000,
    -1,
    2_932_897 * 86_400_000_000,
    2**63 - 1,
]


@pytest.mark.parametrize(
    ("kind", "numbers", "texts"),
    [
        (DateType(), FAR_DAYS, ["-5877641-06-23", "-0001-12-31", "0000-01-01", "0001-01-01", "1969-12-31"]),
        (
            TimestampType(),
            FAR_MICROS,
            ["-290308-12-21T19:59:05.224192Z", "-0001-12-31T23:59:59.999999Z", "0000-01-01T00:00:00.000Z"],
        ),
        (TimestampNTZType(), FAR_MICROS, ["-290308-12-21T19:59:05.224192"]),
    ],
)
def test_times_of_all_years_are_written_and_read_back(kind: DataType, numbers: list[int], texts: list[str]) -> None:
    """The farthest times were written as Arrow's `<value out of range: …>`, and those after the year 9999 could not be
    read. Spark's to_json writes a sign."""
    schema = StructType().add("x", kind)
    target = arrow_schema(schema).field(0).type
    width = pa.int32() if isinstance(kind, DateType) else pa.int64()
    column = pa.array([*numbers, None], width).view(target)
    sent = encoded(pa.RecordBatch.from_arrays([column], ["x"]))
    assert [json.loads(text)["x"] for text in sent[: len(texts)]] == texts
    assert encoded(pa.RecordBatch.from_arrays([column[-2:]], ["x"])) == sent[-2:], "whatever the rest of the batch is"
    found = Decoder(layout(schema, metadata=False), "columns", "FAILFAST").decode(packed(sent))
    assert found.column("x").view(width).to_pylist() == [*numbers, None]


@pytest.mark.parametrize("text", ["+294248-01-01T00:00:00Z", "-290309-01-01T00:00:00Z"])
@pytest.mark.parametrize("kind", [TimestampType(), TimestampNTZType()])
def test_a_time_that_no_timestamp_holds_does_not_fit(kind: DataType, text: str) -> None:
    with pytest.raises(Misfit):
        value(kind, json.dumps(text.removesuffix("Z")))


@pytest.mark.parametrize("text", ["+5881580-07-12", "-5877641-06-22", "10000-01-01", "+999-01-01"])
def test_a_day_that_no_date_holds_does_not_fit(text: str) -> None:
    with pytest.raises(Misfit):
        value(DateType(), json.dumps(text))


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
@pytest.mark.parametrize("policy", ["ignore", "fail", "rescue"])
def test_a_removal_without_a_document_has_null_fields(mode: ParseMode, policy: NewFields) -> None:
    """given a removal that tells its key alone, among documents / when decoded in any mode / then its fields are null.
    FAILFAST failed the stream, and DROPMALFORMED lost the removal (sow_spark/documents [4])."""
    schema = StructType().add("_key", StringType()).add("x", LongType()).add("_rescued", StringType())
    schema = schema if policy == "rescue" else StructType(schema.fields[:2])
    decoder = Decoder(layout(schema, metadata=True, new_fields=policy), "columns", mode)
    rows = decoder.decode(packed([b'{"x":1}', b"", b'{"x":3}'])).to_pylist()
    assert [(row["_key"], row["x"]) for row in rows] == [("k0", 1), ("k1", None), ("k2", 3)]
    assert all(row.get("_rescued") is None for row in rows)
    required = StructType().add("x", LongType(), nullable=False)
    if mode != "DROPMALFORMED":
        with pytest.raises(Misfit):
            Decoder(layout(required, metadata=True), "columns", mode).decode(packed([b""]))


def test_a_removed_record_that_does_not_fit_does_no_harm_where_only_puts_are_read() -> None:
    """given a put, the removal of a record that does not fit, and two puts, the last of which does not fit / when only
    puts are read / then the last one alone is told, with its row among all changes. A stream failed at the removal of
    the very record that somebody had to remove."""
    schema = StructType().add("x", LongType()).add("_key", StringType()).add("_version", LongType())
    sent = packed([b'{"x":1}', b'{"x":"no"}', b'{"x":3}', b'{"x":"odd"}', b'{"x":"bad"}'])  # puts and deletes in turn
    decoder = Decoder(layout(schema, metadata=True), "columns", "FAILFAST", changes=True)
    with pytest.raises(Misfit) as found:
        decoder.decode(sent)
    assert (found.value.row, found.value.found) == (4, '"bad"')
    lenient = Decoder(layout(schema, metadata=True), "columns", "DROPMALFORMED", changes=True)
    assert [tuple(row.values()) for row in lenient.decode(sent).to_pylist()] == [(1, "k0", 10), (3, "k2", 12)]


@settings(max_examples=examples(50))
@given(tables(), st.sampled_from(["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]))
def test_fast_decoding_equals_careful_decoding(table: tuple[StructType, list[bytes]], mode: ParseMode) -> None:
    schema, documents = table
    sent = packed(documents)
    decoder = Decoder(layout(schema, metadata=False), "columns", mode)
    careful = Decoder(layout(schema, metadata=False), "columns", mode)
    assert careful._documents is not None
    careful._documents._fast = None
    assert outcome(decoder, sent) == outcome(careful, sent)


@given(st.lists(st.lists(st.tuples(NAMES.map(json.dumps), VALUES), max_size=4), min_size=1, max_size=5))
def test_every_document_of_the_sample_fits_the_inferred_schema(pairs: list[list[tuple[str, str]]]) -> None:
    documents = [("{" + ",".join(f"{name}:{text}" for name, text in one) + "}").encode() for one in pairs]
    documents = [document for document in documents if b"ud800" not in document]
    schema = inferred(documents)
    rows = Decoder(layout(schema, metadata=False), "columns", "FAILFAST").decode(packed(documents))
    assert rows.num_rows == len(documents)


def test_a_pyspark_that_cannot_be_told_the_zone_of_times_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: PySpark 4.1 has no such argument, and nothing could be read with it."""
    schema = StructType().add("at", TimestampType()).add("n", LongType())
    wanted = documents.arrow_schema(schema)

    def of_4_1(schema: StructType, timestamp_utc: bool = True) -> pa.Schema:
        return wanted

    monkeypatch.setattr(documents, "to_arrow_schema", of_4_1)
    assert documents.arrow_schema(schema) == wanted
    assert wanted.field("at").type == pa.timestamp("us", "UTC")


# ---- variants ----


@pytest.mark.parametrize(
    "text",
    ["1", "-1.10", "true", '"é\\n"', "{}", "[]", '{"a":[1,null,{"b":"x"}],"c":1.5}', "12345678901234567890123", "1e3"],
)
def test_a_variant_is_any_value_and_is_written_as_it_was_read(text: str) -> None:
    schema = StructType().add("x", VariantType()).add("list", ArrayType(VariantType()))
    batch = Decoder(layout(schema, metadata=True), "columns", "FAILFAST").decode(
        packed([f'{{"x":{text},"list":[{text},null]}}'.encode()])
    )
    (row,) = batch.to_pylist()
    made = VariantVal(row["x"]["value"], row["x"]["metadata"])
    assert json.loads(made.toJson()) == json.loads(text)
    (written,) = encoded(batch)
    assert json.loads(written) == {"x": json.loads(text), "list": [json.loads(text), None]}


def test_null_is_no_variant_and_neither_is_an_infinity_or_half_a_character() -> None:
    assert value(VariantType(), "null") is None
    for text in ("1e400", '[{"a":-1e999}]', '"\\ud800"'):
        with pytest.raises(Misfit, match="expected variant"):
            value(VariantType(), text)
        assert value(VariantType(), text, "PERMISSIVE") is None


# ---- fields that the schema lacks ----

ORDER = (
    StructType()
    .add("id", LongType())
    .add("leg", StructType().add("px", DoubleType()))
    .add("legs", ArrayType(StructType().add("px", DoubleType())))
    .add("by_name", MapType(StringType(), StructType().add("px", DoubleType())))
)
PLAIN = StructType(ORDER.fields[:3])


def with_others(schema: StructType, policy: NewFields, *documents: str, mode: str = "FAILFAST") -> list[object]:
    """The rows of these documents; with `rescue` the other fields, row by row."""
    schema = StructType(list(schema.fields))
    if policy == "rescue":
        schema = schema.add("_rescued", StringType())
    found = Decoder(layout(schema, metadata=True, new_fields=policy), "columns", mode).decode(  # type: ignore[arg-type]  # one of its words
        packed([document.encode() for document in documents])
    )
    rows: list[object] = (found.column("_rescued") if policy == "rescue" else found).to_pylist()
    return rows


@pytest.mark.parametrize("schema", [ORDER, PLAIN], ids=["the careful way", "the fast way"])
def test_fields_that_the_schema_lacks_are_kept_in_a_column_of_their_own(schema: StructType) -> None:
    assert with_others(schema, "rescue", '{"id":1,"leg":{"px":1}}', '{"id":2}') == [None, None]
    assert with_others(
        schema,
        "rescue",
        '{"id":1}',
        '{"new":1.50,"id":2,"leg":{"px":1,"qty":[1, 2]}}',
        '{"legs":[{"px":1},{"px":2,"qty":3}],"_key":"k"}',
    ) == [None, '{"new":1.50,"leg":{"qty":[1,2]}}', '{"legs":[{"px":1},{"px":2,"qty":3}],"_key":"k"}']
    assert with_others(StructType(), "rescue", '{"a":1}', "{}") == ['{"a":1}', None]
    assert with_others(ORDER, "rescue", '{"by_name":{"a":{"px":1,"qty":2}}}') == ['{"by_name":{"a":{"px":1,"qty":2}}}']


@pytest.mark.parametrize("schema", [ORDER, PLAIN], ids=["the careful way", "the fast way"])
def test_a_document_with_fields_that_the_schema_lacks_does_not_fit(schema: StructType) -> None:
    documents = ('{"id":1,"leg":{"px":1}}', '{"id":2,"leg":{"qty":3}}')
    assert len(with_others(schema, "ignore", *documents)) == 2
    assert len(with_others(schema, "fail", documents[0])) == 1
    for mode in ("FAILFAST", "PERMISSIVE"):
        with pytest.raises(Misfit, match="expected only fields that the schema has, found") as misfit:
            with_others(schema, "fail", *documents, mode=mode)
        assert (misfit.value.row, misfit.value.found) == (1, '{"leg":{"qty":3}}')
    assert len(with_others(schema, "fail", *documents, mode="DROPMALFORMED")) == 1


@given(st.lists(st.sampled_from(["id", "leg", "legs", "new", "_rescued", "IDs"]), unique=True), VALUES, VALUES)
def test_whether_the_fast_way_was_taken_makes_no_difference_to_what_is_rescued(
    names: list[str], one: str, other: str
) -> None:
    document = "{" + ",".join([f'"{name}":{one if index % 2 else other}' for index, name in enumerate(names)]) + "}"
    schema = StructType([StructField(name, StringType()) for name in ("id", "leg", "legs")])
    (rescued,) = with_others(schema, "rescue", document, mode="PERMISSIVE")
    found = {} if rescued is None else json.loads(str(rescued))
    assert set(found) == set(names) - {"id", "leg", "legs"}


def test_all_fields_come_from_the_server_where_new_ones_matter() -> None:
    for policy, fields in (("ignore", ("id",)), ("fail", ())):
        found = layout(StructType().add("id", LongType()), metadata=True, new_fields=policy)  # type: ignore[arg-type]  # one of its words
        assert Decoder(found, "columns", "FAILFAST").fields == fields


def test_the_column_for_new_fields_is_there_and_a_string() -> None:
    for schema in (StructType().add("id", LongType()), StructType().add("_rescued", LongType())):
        with pytest.raises(SowSourceError, match="column _rescued is missing, or is no string"):
            layout(schema, metadata=True, new_fields="rescue")
