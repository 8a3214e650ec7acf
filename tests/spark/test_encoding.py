"""Rows as JSON documents, against a naive encoder that goes value by value, and against Spark's own conventions."""

from __future__ import annotations

import base64
import json
import math
import random
import string
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from sow_spark import encoding
from sow_spark.encoding import check_schema, documents
from sow_spark.errors import SowSourceError

INT_OF_WIDTH = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
Draw = Callable[[random.Random], object]
"""A value of one type, by chance."""

CHARACTERS = string.ascii_letters + '"\\/\b\f\n\r\t\x00\x1f\x7f é€𝄞,:{}[]'


def _integer(bits: int) -> Draw:
    def draw(rng: random.Random) -> object:
        return rng.choice([0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), rng.getrandbits(bits - 1)])

    return draw


def _string(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.choice([0, 1, 3, 10])))


def _double(rng: random.Random) -> float:
    any_bits: float = struct.unpack("<d", rng.randbytes(8))[0]
    common = [0.0, -0.0, 1.0, -17.0, 0.1, 1e7, 1e16, 1e21, 1e22, 5e-324, math.inf, -math.inf, math.nan]
    return rng.choice([*common, any_bits, rng.random() * 1000, float(rng.randrange(10**12))])


def _single(rng: random.Random) -> float:
    return float(struct.unpack("<f", rng.randbytes(4))[0]) if rng.random() < 0.5 else rng.choice([0.0, 1.0, 0.1, -2.5])


def _moment(rng: random.Random) -> datetime:
    epoch = datetime(1970, 1, 1)  # noqa: DTZ001  # for a column without a zone
    micros = rng.choice([0, 1, 1_000, 86_400_000_000, -1, -62_135_596_800_000_000, 253_402_300_799_999_999])
    return epoch + timedelta(microseconds=rng.choice([micros, rng.randrange(2**50)]))


def _decimal(rng: random.Random) -> Decimal:
    return Decimal(rng.choice([0, 1, -150, rng.getrandbits(60), 10**20])).scaleb(-3)


SCALARS: list[tuple[pa.DataType, Draw]] = [
    *[(pa.type_for_alias(name), _integer(bits)) for name, bits in INT_OF_WIDTH.items()],
    (pa.bool_(), lambda rng: rng.random() < 0.5),
    (pa.string(), _string),
    (pa.float64(), _double),
    (pa.float32(), _single),
    (pa.date32(), lambda rng: _moment(rng).date()),
    (pa.timestamp("us"), _moment),
    (pa.timestamp("us", "UTC"), lambda rng: _moment(rng).replace(tzinfo=UTC)),
    (pa.decimal128(38, 3), _decimal),
    (pa.binary(), lambda rng: rng.randbytes(rng.randrange(5))),
    (pa.null(), lambda rng: None),
    (pa.duration("us"), lambda rng: timedelta(microseconds=rng.randrange(-(2**45), 2**45))),
    (pa.time64("ns"), lambda rng: time(rng.randrange(24), rng.randrange(60), 1, rng.choice([0, 5, 120_000]))),
]


def any_type(rng: random.Random, depth: int = 0) -> tuple[pa.DataType, Draw]:
    kind = rng.randrange(8)
    if depth > 2 or kind < 5:
        return rng.choice(SCALARS)
    if kind == 5:
        inner, draw = any_type(rng, depth + 1)
        return pa.list_(inner), lambda rng: [maybe(rng, draw) for _ in range(rng.randrange(4))]
    if kind == 6:
        value, draw_value = any_type(rng, depth + 1)
        key, draw_key = rng.choice([SCALARS[4], SCALARS[5], SCALARS[3]])
        return pa.map_(key, value), lambda rng: list(
            {draw_key(rng): maybe(rng, draw_value) for _ in range(rng.randrange(4))}.items()
        )
    named = [(_string(rng) + str(index), any_type(rng, depth + 1)) for index in range(rng.randrange(4))]
    return pa.struct([pa.field(name, type_) for name, (type_, _) in named]), lambda rng: {
        name: maybe(rng, draw) for name, (_, draw) in named
    }


def maybe(rng: random.Random, draw: Draw) -> object:
    return None if rng.random() < 0.3 else draw(rng)


def naive(value: object, kind: pa.DataType, write_nulls: bool) -> object:
    """The value as `json.loads` gives it; numbers as their texts."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        assert isinstance(value, dict)
        members = {field.name: naive(value[field.name], field.type, write_nulls) for field in kind}
        return {name: member for name, member in members.items() if member is not None or write_nulls}
    if pa.types.is_map(kind):
        assert isinstance(value, list)
        return {
            str(json.dumps(key) if isinstance(key, bool) else key): naive(item, kind.item_type, write_nulls)
            for key, item in value
        }
    if pa.types.is_list(kind):
        assert isinstance(value, list)
        return [naive(item, kind.value_type, write_nulls) for item in value]
    return scalar(value, kind)


def scalar(value: object, kind: pa.DataType) -> object:
    match value:
        case bool() | str():
            return value
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case float():
            return ("float", struct.pack("<f" if pa.types.is_float32(kind) else "<d", value))
        case int():
            return ("int", value)
        case Decimal():
            return ("decimal", value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            digits = "milliseconds" if value.microsecond % 1000 == 0 else "microseconds"
            return value.replace(tzinfo=None).isoformat(timespec=digits) + ("Z" if value.tzinfo else "")
        case date() | time():
            return value.isoformat()
        case timedelta():
            whole = abs(value)
            hours, rest = divmod(whole.seconds, 3600)
            fraction = f".{whole.microseconds:06}".rstrip("0") if whole.microseconds else ""
            sign = "-" if value < timedelta() else ""
            clock = f"{hours:02}:{rest // 60:02}:{rest % 60:02}{fraction}"
            return f"INTERVAL '{sign}{whole.days} {clock}' DAY TO SECOND"
    raise AssertionError(value)


def read_back(found: object, kind: pa.DataType) -> object:
    """The parsed document in the form of `naive`: a number under the type of its column."""
    if pa.types.is_struct(kind) and isinstance(found, dict):
        return {name: read_back(member, kind.field(name).type) for name, member in found.items()}
    if pa.types.is_map(kind) and isinstance(found, dict):
        return {name: read_back(member, kind.item_type) for name, member in found.items()}
    if pa.types.is_list(kind) and isinstance(found, list):
        return [read_back(item, kind.value_type) for item in found]
    if isinstance(found, Number):
        text = found.text
        if pa.types.is_floating(kind):
            assert "." in text or "e" in text, f"{text} would be inferred as an integer"
            return ("float", struct.pack("<f" if pa.types.is_float32(kind) else "<d", float(text)))
        return ("decimal", Decimal(text)) if pa.types.is_decimal(kind) else ("int", int(text))
    return found


class Number:
    """A number's text, as it stands in the document."""

    def __init__(self, text: str) -> None:
        self.text = text


def test_documents_equal_those_of_a_naive_encoder(seed: int) -> None:
    """given batches of generated types, with nulls, sliced / when encoded / then each row reads back as it was"""
    rng = random.Random(seed)
    for _ in range(150):
        columns = [(_string(rng) + str(index), any_type(rng)) for index in range(rng.randrange(1, 6))]
        rows = rng.randrange(12)
        never_null = rng.random() < 0.5
        data = {
            name: pa.array([draw(rng) if never_null else maybe(rng, draw) for _ in range(rows)], type_)
            for name, (type_, draw) in columns
        }
        batch = pa.RecordBatch.from_pydict(data)
        start = rng.randrange(rows + 1)
        batch = batch.slice(start, rng.randrange(rows - start + 1))
        row_type = pa.struct(list(batch.schema))
        for write_nulls in (False, True):
            found = documents(batch, write_nulls=write_nulls)
            assert len(found) == batch.num_rows
            values = batch.to_pylist()
            for text, row in zip(found, values, strict=True):
                parsed = json.loads(text, parse_int=Number, parse_float=Number)
                expected = naive(row, row_type, write_nulls)
                assert read_back(parsed, row_type) == expected, (text, row)


def test_documents_do_not_depend_on_their_batch(seed: int) -> None:
    """given rows of many kinds / when encoded together and one by one / then the texts are the same (encoding [3])"""
    rng = random.Random(seed)
    batch = pa.RecordBatch.from_pydict(
        {
            str(index): pa.array([maybe(rng, draw) for _ in range(40)], kind)
            for index, (kind, draw) in enumerate(SCALARS)
        }
    )
    together = documents(batch)
    assert together == [documents(batch.slice(row, 1))[0] for row in range(40)]


def test_large_batches_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """given rows of 100 bytes and one of 100,000 / when a piece may have 4 KiB / then nothing changes (encoding [4])"""
    batch = pa.RecordBatch.from_pydict({"id": list(range(200)), "text": ["x" * 100] * 199 + ["y" * 100_000]})
    whole = documents(batch)
    monkeypatch.setattr(encoding, "PIECE_BYTES", 4096)
    assert len(list(encoding.pieces(batch))) > 5
    assert documents(batch) == whole


def test_the_texts_are_those_of_to_json() -> None:
    """given one row of each convention / when encoded / then it is the text that Spark's to_json writes"""
    batch = pa.RecordBatch.from_pydict(
        {
            "name": ['a "b"\n'],
            "whole": pa.array([3.0]),
            "short": pa.array([0.1], pa.float32()),
            "price": pa.array([Decimal("12.50")]),
            "day": pa.array([date(2026, 1, 31)]),
            "at": pa.array([datetime(2026, 1, 31, 12, tzinfo=UTC)], pa.timestamp("us", "America/New_York")),
            "raw": pa.array([b"\x00\xff"]),
            "none": pa.nulls(1),
            "items": pa.array([[{"n": 1, "m": None}, None]], pa.list_(pa.struct({"n": pa.int64(), "m": pa.int64()}))),
            "by": pa.array([[("k", None)]], pa.map_(pa.string(), pa.int64())),
            "nothing": pa.array([{}], pa.struct([])),
        }
    )
    assert documents(batch)[0].decode() == (
        '{"name":"a \\"b\\"\\n","whole":3.0,"short":0.1,"price":12.50,"day":"2026-01-31",'
        '"at":"2026-01-31T12:00:00.000Z","raw":"AP8=","items":[{"n":1},null],"by":{"k":null},"nothing":{}}'
    )


def test_dictionaries_and_large_types_are_encoded_as_plain_values() -> None:
    """given dictionary-encoded, large and fixed-size columns / when encoded / then the kind of storage does not show"""
    batch = pa.RecordBatch.from_pydict(
        {
            "d": pa.array(["x", None, "x"]).dictionary_encode(),
            "s": pa.array(["a", "b", "c"], pa.large_string()),
            "l": pa.array([[1], None, []], pa.large_list(pa.int8())),
            "f": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2)),
        }
    )
    assert documents(batch) == [
        b'{"d":"x","s":"a","l":[1],"f":[1,2]}',
        b'{"s":"b","f":[3,4]}',
        b'{"d":"x","s":"c","l":[]}',
    ]


def test_bytes_that_are_not_utf8_are_passed_on() -> None:
    """given strings that are not UTF-8 / when encoded / then nothing fails: the server refuses them (encoding [1])"""
    broken = pa.array([b'\xff"', b"\xfe"], pa.binary()).view(pa.string())
    assert documents(pa.RecordBatch.from_pydict({"s": broken})) == [b'{"s":"\xff\\""}', b'{"s":"\xfe"}']


@pytest.mark.parametrize(
    "kind",
    [pa.map_(pa.struct({"a": pa.int64()}), pa.int64()), pa.list_(pa.month_day_nano_interval())],
    ids=str,
)
def test_types_without_a_json_form_are_refused_by_name(kind: pa.DataType) -> None:
    """given a column that JSON has no form for / when the schema is checked / then the error names the column"""
    with pytest.raises(SowSourceError) as caught:
        check_schema(pa.schema({"good": pa.int64(), "odd": kind}))
    assert caught.value.reason == "SCHEMA_UNSUPPORTED"
    assert "column odd" in caught.value.message


def test_columns_that_encode_pass_the_check() -> None:
    """given every scalar type / when the schema is checked / then nothing is raised"""
    check_schema(pa.schema([(str(index), kind) for index, (kind, _) in enumerate(SCALARS)]))
