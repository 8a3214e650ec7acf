"""An exported file is published as the same records: keys, payloads, also the types of values, and expire times."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from math import inf, nan
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_cli import packing
from sow_cli.exporting import RecordFile
from sow_cli.inputs import opened
from sow_cli.lines import BadLine, Item, base64_payload, document, record_form
from sow_cli.output import Format
from sow_cli.refused import RowReader
from sow_cli.row_records import Reading, RecordMaker, Target
from sow_cli.rows import NEVER_MICROS, BatchColumns, RecordForm
from sow_cli.sources import buffered
from sow_client import MessageTypeName, PayloadForm
from tests.support.oracles.examples import examples

FORMATS = {
    "ndjson": Format.NDJSON,
    "json": Format.JSON,
    "csv": Format.CSV,
    "csv.gz": Format.CSV,
    "ndjson.zst": Format.NDJSON,
    "parquet": Format.PARQUET,
    "arrow": Format.ARROW,
}
WORDS = [
    *(
        "\x00",
        "a|b",
        "a\\\\b",
        "a;b\tc",
        " ",
        "\ufeff",
        "\u2028",
        "+1",
        "01",
        "1.0",
        "-0",
        "TRUE",
        "NaN",
        '"',
        "'",
        "{",
        "[1",
    ),
    *("", "x", "a,b", 'say "x"', "two\nlines", "\r", "\r\n", "007", "-1.5e3", "12", "true", "null", "[1]", '{"a":1}'),
]
NAMES = [
    "a",
    "b",
    "c d",
    "",
    "/a",
    "/a/b",
    "_key",
    "_payload",
    "payload",
    "@key",
    'q"',
    "a,b",
    "_expire_time",
    "[",
    "é",
    "two\nlines",
    "\r",
    "\x00",
    " ",
    ";",
    "_version",
    "_expire_time_micros",
    "__index_level_0__",
    "\ufeff",
]
texts = st.sampled_from(WORDS) | st.text(max_size=4)
numbers = (
    st.integers(-3, 3)
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), -(2**63) - 1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0**53, 1e22])
)
scalars = st.none() | st.booleans() | texts | numbers
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "", "/a", "_key"]), inner, max_size=2)
    ),
    max_leaves=5,
)
objects = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)
alike = st.lists(  # records with the same fields, as they mostly are
    st.fixed_dictionaries({"a": st.integers() | st.floats(-9, 9)}, optional={"b": texts, "c": st.booleans()}),
    max_size=6,
)
spellings = st.sampled_from(  # numbers as other programs write them
    [b"1E5", b"1.10", b"-0", b"1e400", b"0.10000000000000000001", b"123456789.123456789123", b"1e-400", b"2.50e+0"]
)
spelled = st.tuples(st.sampled_from(["a", "b"]), spellings, st.booleans()).map(
    lambda one: b'{ "%s" :%s}' % (one[0].encode(), b"[%s]" % one[1] if one[2] else one[1])
)
packed_values = st.recursive(
    st.none()
    | st.booleans()
    | texts
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=3)
    | st.sampled_from([msgspec.msgpack.Ext(5, b"x"), datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=5,
)
tags = st.sampled_from([b"35", b"55", b"44", b"58", b"x"])
flat = st.lists(
    st.tuples(tags, st.sampled_from([b"", b"D", b"9.50", b"a=b", b"\xff\xfe", b'"', b"1,2", b"\r", b"\n"])),
    min_size=1,
    max_size=5,
).map(lambda fields: b"".join([name + b"=" + value + b"\x01" for name, value in fields]))

DATA = [b"", b"95=3\x0196=a\x01b\x0155=x\x01", b"55=x\x0195=1\x0196=\x01\x01", b"\x0155=x\x01"]

PAYLOADS = {
    "json": (st.lists(objects | scalars | st.lists(scalars, max_size=2), max_size=6) | alike).map(
        lambda some: [msgspec.json.encode(one) for one in some]
    )
    | st.lists(spelled, max_size=4),
    "msgpack": st.lists(
        (st.dictionaries(st.sampled_from(NAMES), packed_values, max_size=4) | packed_values).map(msgspec.msgpack.encode)
        | st.just(b"\x81\x01\xa1x"),  # a map whose key is a number
        max_size=6,
    ),
    "fix": st.lists(flat | flat.map(lambda one: one[:-1]) | st.sampled_from(DATA), max_size=6),
    "nvfix": st.lists(flat | st.just(b""), max_size=6),
    "binary": st.lists(st.binary(max_size=6), max_size=6),
}


class Kept(NamedTuple):
    """A record as it matters."""

    key: str | None
    payload: object
    expire_time_micros: int | None


def typed(value: object) -> object:
    """A value that equals another one only if the types do, too."""
    if isinstance(value, dict):
        return {name: typed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    if isinstance(value, Decimal):
        return value  # 1.10 is 1.1
    if isinstance(value, msgspec.msgpack.Ext):
        return (value.code, value.data)
    return (type(value), repr(value))


def of(message_type: MessageTypeName, payload: bytes) -> object:
    if message_type == "json":
        return typed(json.loads(payload, parse_float=Decimal))
    if message_type == "msgpack":
        return typed(msgspec.msgpack.decode(payload, strict=False))
    return payload


def written(kind: str, form: RecordForm, batches: Sequence[BatchColumns], *, lossy: bool = False) -> bytes:
    sink = io.BytesIO()
    with packing.packed(sink, f"a.{kind}") as inside:
        file = RecordFile(FORMATS[kind], form, inside, keeps_all=not lossy)
        for batch in batches if file.looks else ():
            file.look(batch.payloads)
        for batch in batches:
            file.write(batch)
        file.close()
    return sink.getvalue()


def read(kind: str, message_type: MessageTypeName, separator: str, data: bytes) -> list[Kept | BadLine]:
    is_json = message_type == "json"
    record = record_form(PayloadForm(message_type, separator), with_key=True, stamps=True, absent=NEVER_MICROS)
    file = buffered(io.BytesIO(data))
    parse = document if is_json else base64_payload
    reading = Reading(record=record, stamps=True)
    source = opened(file, f"a.{kind}", parse, reading, Target(message_type, separator), size=None)
    return [
        Kept(one.key, of(message_type, one.data), one.expire_time_micros) if isinstance(one, Item) else one
        for chunk, _ in source
        for one in chunk
        if one is not None
    ]


@pytest.mark.slow
@pytest.mark.parametrize("message_type", PAYLOADS)
@settings(max_examples=examples(400, share=16))
@given(data=st.data())
def test_an_export_published_again_is_the_same_content(message_type: MessageTypeName, data: st.DataObject) -> None:
    payloads = data.draw(PAYLOADS[message_type])
    some = len(payloads)
    stamps = data.draw(st.lists(st.sampled_from([0, 7, NEVER_MICROS]), min_size=some, max_size=some))
    keys = data.draw(st.lists(texts, min_size=some, max_size=some))
    cut = data.draw(st.integers(0, some))

    def batch(part: slice) -> BatchColumns:
        numbers = array("q", [7] * len(payloads[part]))
        origins = ["x"] * len(numbers)
        return BatchColumns(keys[part], numbers, numbers, stamps[part], origins, numbers, payloads[part])

    separator = data.draw(st.sampled_from("\x01|")) if message_type in ("fix", "nvfix") else "\x01"
    payloads = [one.replace(b"\x01", separator.encode()) for one in payloads] if separator == "|" else payloads
    batches = [batch(slice(0, cut)), batch(slice(cut, some))]
    form = RecordForm("t", message_type=message_type, fix_separator=separator)

    exported = {kind: written(kind, form, batches) for kind in FORMATS}

    expected = [
        Kept(key, of(message_type, payload), stamp) for key, payload, stamp in zip(keys, payloads, stamps, strict=True)
    ]
    for kind, file in exported.items():
        assert read(kind, message_type, separator, file) == expected, kind
    kind = data.draw(st.sampled_from(["csv", "parquet", "arrow"]))
    lossy = read(kind, message_type, separator, written(kind, form, batches, lossy=True))
    assert len(lossy) == some, kind
    for one, key, stamp in zip(lossy, keys, stamps, strict=True):
        # The columns of fix may be no payload of fix, which is told.
        assert isinstance(one, BadLine) or (one.key, one.expire_time_micros) == (key, stamp), kind
        assert message_type == "fix" or not isinstance(one, BadLine), one


def numbered(payloads: Sequence[bytes]) -> BatchColumns:
    """Records whose keys are their numbers."""
    sevens = array("q", [7] * len(payloads))
    keys = list(map(str, range(len(payloads))))
    return BatchColumns(keys, sevens, sevens, list(sevens), ["x"] * len(payloads), sevens, payloads)


@pytest.mark.parametrize("message_type", ["json", "msgpack"])
@settings(max_examples=examples(200))
@given(data=st.data())
def test_a_row_in_the_file_of_errors_is_the_same_record(message_type: MessageTypeName, data: st.DataObject) -> None:
    """The other values of a row that is refused for one of them are published as what they are, once it is mended."""
    form = RecordForm("t", message_type=message_type)
    kind = data.draw(st.sampled_from(["csv", "parquet", "arrow"]))
    file = written(kind, form, [numbered(data.draw(PAYLOADS[message_type]))], lossy=data.draw(st.booleans()))
    rows: list[tuple[RecordMaker, Sequence[object]]] = []

    def noted(maker: RecordMaker, values: Sequence[object]) -> Item:
        rows.append((maker, values))
        return maker.record(values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordMaker, "outcome", noted)
        expected = read(kind, message_type, "\x01", file)
    again = RowReader(Reading(stamps=True), Target(message_type))

    found = [again(msgspec.json.encode(maker.kept(values, {}))) for maker, values in rows]

    assert [Kept(one.key, of(message_type, one.data), one.expire_time_micros) for one in found] == expected


BEYOND_JSON: dict[str, list[dict[str, object]]] = {
    "infinity": [{"a": inf}, {}, {}, {}],
    "floats": [{"a": nan}, {"a": -inf}, {"a": 1.5}],
    "lists": [{"a": [[nan, inf]]}, {"a": [[-inf], []]}],
    "objects": [{"a": {"b": {"a": inf}}}, {"a": {"b": {"a": 0.5}}}],
    "objects in lists": [{"a": [{"b": nan}, {"b": -inf}]}, {}],
    "bytes": [{"a": b"\xff\x00"}, {"a": b""}],
    "bytes inside": [{"a": [b"", b"x"], "b": {"a": b"x"}}],
    "unsigned": [{"a": 2**64 - 1}, {"a": 0}],
    "times": [{"a": datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)}, {"a": datetime(1, 1, 1, tzinfo=UTC)}],
    "times inside": [{"a": {"b": [datetime(1969, 12, 31, 23, 59, 59, 1, UTC)]}}],
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("documents", BEYOND_JSON.values(), ids=BEYOND_JSON)
def test_columns_of_msgpack_keep_values_that_json_lacks(kind: str, documents: list[dict[str, object]]) -> None:
    """Story: a lossy export with an infinity was refused, and bytes and times came back as texts."""
    payloads = list(map(msgspec.msgpack.encode, documents))
    form = RecordForm("t", message_type="msgpack")

    found = read(kind, "msgpack", "\x01", written(kind, form, [numbered(payloads)], lossy=True))

    assert found == [Kept(str(number), of("msgpack", one), 7) for number, one in enumerate(payloads)]


@pytest.mark.parametrize("message_type", ["json", "nvfix"])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_other_types_refuse_what_they_cannot_say(message_type: MessageTypeName, kind: str) -> None:
    payloads = list(map(msgspec.msgpack.encode, [{"a": inf}, {"a": 1.5}]))
    file = written(kind, RecordForm("t", message_type="msgpack"), [numbered(payloads)], lossy=True)

    refused, other = read(kind, message_type, "|", file)

    assert isinstance(refused, BadLine)
    assert refused.message.startswith("column a: inf is no number of ")
    assert isinstance(other, Kept)
