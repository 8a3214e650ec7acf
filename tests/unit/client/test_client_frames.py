"""Answers as tables of Arrow, pandas and polars, and frames as documents."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import InvalidArgument, RecordBatch, _frame_rows, _frames
from tests.support.fakes.called_server import Server, footer, header, loop, script, server
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures

NEVER = 2**63 - 1
NAN = float("nan")
STAMP = datetime(2030, 1, 1, tzinfo=UTC)


def columns(*payloads: bytes, keys_only: bool = False) -> types_pb2.RecordColumns:
    count = len(payloads)
    return types_pb2.RecordColumns(
        key=[f"k{number}" for number in range(count)],
        payload=[] if keys_only else payloads,
        version=range(11, 11 + count),
        publish_time_micros=[1_000_000] * count,
        expire_time_micros=[NEVER if number else 2_000_000 for number in range(count)],
        sequence=range(count),
        origin=[number % 2 for number in range(count)],
        origins=["nyc", "ldn"],
    )


def table(*payloads: bytes, metadata: Any = (), schema: Any = None) -> Any:
    half = len(payloads) // 2
    batches = [RecordBatch("orders", columns(*part)) for part in (payloads[:half], payloads[half:]) if part]
    return _frames.to_arrow(batches, schema, metadata)


def fields(*documents: str) -> dict[str, tuple[str, list[Any]]]:
    """Type and values of each column of documents in JSON."""
    made = table(*[document.encode() for document in documents])
    return {name: (str(made[name].type), made[name].to_pylist()) for name in made.column_names}


# ---- answers as tables ----


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (['{"a":1}', '{"a":2,"b":"x"}'], {"a": ("int64", [1, 2]), "b": ("string", [None, "x"])}),
        (['{"a":1}', '{"a":2.5}'], {"a": ("double", [1.0, 2.5])}),
        (['{"a":true}', '{"a":null}'], {"a": ("bool", [True, None])}),
        (
            ['{"a":{"b":[1]}}', '{"a":{"c":"x"}}'],
            {
                "a": (
                    "struct<b: list<item: int64>, c: string>",
                    [{"b": [1], "c": None}, {"b": None, "c": "x"}],
                )
            },
        ),
        # A text that looks like a time stays text, at any depth.
        (['{"a":"2026-01-31"}', '{"a":"x"}'], {"a": ("string", ["2026-01-31", "x"])}),
        (['{"a":"2026-01-31T12:00:00Z"}'], {"a": ("string", ["2026-01-31T12:00:00Z"])}),
        (['{"a":[{"b":"2026-01-31"}]}'], {"a": ("list<item: struct<b: string>>", [[{"b": "2026-01-31"}]])}),
        # White space of any kind.
        (['{\n "a":\r\n 1}', ' {"a":2}\n'], {"a": ("int64", [1, 2])}),
        # A whole number that no float has.
        (['{"a":12345678901234567890}'], {"a": ("uint64", [12345678901234567890])}),
        (['{"a":1}', '{"a":-12345678901234567890}'], {"a": ("string", ["1", "-12345678901234567890"])}),
        (['{"a":9007199254740993,"b":12345678901234567890}', '{"a":0.5}'],
         {"a": ("string", ["9007199254740993", "0.5"]), "b": ("uint64", [12345678901234567890, None])}),
        (['{"a":0.1234567890123456789}'], {"a": ("double", [0.12345678901234568])}),
        (['{"a":1e400}', '{"a":1}'], {"a": ("string", ["1E+400", "1"])}),
        # Several types in one field.
        (['{"a":"x","b":1}', '{"a":{"c":null},"b":2}'], {"a": ("string", ["x", '{"c":null}']), "b": ("int64", [1, 2])}),
        (['{"a":true}', '{"a":1}'], {"a": ("string", ["true", "1"])}),
        (['{"a":1,"a":2}'], {"a": ("int64", [2])}),  # the last one counts (rule K2)
        (["{}", "{}"], {}),
    ],
)  # fmt: skip
def test_fields_become_columns_and_no_value_changes(documents: list[str], expected: object) -> None:
    """See _frames [2]."""
    assert fields(*documents) == expected


def test_many_documents_are_read_as_few_are() -> None:
    """The first ones tell which texts are no times; the others may still differ."""
    first = [b'{"id":1,"at":"2026-01-31","n":1}'] * 3_000
    made = table(*first, b'{"n":0.5,"late":"2026-01-31","id":12345678901234567890}', b'{"late":"x"}')
    assert made.column_names == ["id", "at", "n", "late"]
    assert [str(kind) for kind in made.schema.types] == ["uint64", "string", "double", "string"]
    assert made["late"].to_pylist()[-2:] == ["2026-01-31", "x"]
    made = table(*first, b'{"n":0.5,"late":"2026-01-31"}')
    assert made.column_names == ["id", "at", "n", "late"]
    assert [str(kind) for kind in made.schema.types] == ["int64", "string", "double", "string"]
    assert made["late"].to_pylist()[-2:] == [None, "2026-01-31"]


def test_documents_without_fields_still_count() -> None:
    assert table(b"{}", b"{}").num_rows == 2


def test_metadata_are_columns_with_an_underscore() -> None:
    made = table(
        b'{"a":1}', b'{"a":2}', metadata=["key", "expire_time", "publish_time", "version", "origin", "sequence"]
    )
    assert made.column_names == ["_key", "_expire_time", "_publish_time", "_version", "_origin", "_sequence", "a"]
    one = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    # Each half is a batch of one record.
    assert made["_key"].to_pylist() == ["k0", "k0"]
    assert made["_expire_time"].to_pylist() == [one + timedelta(seconds=1)] * 2
    assert made["_publish_time"].to_pylist() == [one, one]
    assert made["_version"].to_pylist() == [11, 11]
    assert made["_origin"].to_pylist() == ["nyc", "nyc"]
    both = _frames.to_arrow([RecordBatch("orders", columns(b"{}", b"{}"))], None, ["expire_time", "origin"])
    assert both["_expire_time"].to_pylist() == [one + timedelta(seconds=1), None]
    assert both["_origin"].to_pylist() == ["nyc", "ldn"]


@pytest.mark.parametrize("metadata", ["key", ["keys"], ["_key"]])
def test_other_metadata_are_refused(metadata: Any) -> None:
    with pytest.raises(InvalidArgument, match="metadata"):
        table(b"{}", metadata=metadata)


def test_a_field_of_the_name_of_a_metadata_column_is_not_hidden() -> None:
    with pytest.raises(InvalidArgument, match="leave 'key' out of metadata"):
        table(b'{"_key":1}', metadata=["key"])
    assert table(b'{"_key":1}')["_key"].to_pylist() == [1]


def test_other_payloads_are_one_column_and_keys_alone_none() -> None:
    assert table(b"8=FIX", b"{not json")["payload"].to_pylist() == [b"8=FIX", b"{not json"]
    assert table(b"{not json", b"8=FIX")["payload"].to_pylist() == [b"{not json", b"8=FIX"]
    keys = _frames.to_arrow([RecordBatch("orders", columns(b"", b"", keys_only=True))], None, ["key"])
    assert keys.to_pydict() == {"_key": ["k0", "k1"]}
    assert _frames.to_arrow([], None, ["key"]).to_pydict() == {"_key": []}


def test_a_schema_names_the_fields_and_their_types() -> None:
    schema = pa.schema([("at", pa.timestamp("us")), ("price", pa.float64()), ("missing", pa.int64())])
    made = table(b'{"at":"2026-01-31 12:00:00","price":1,"other":true}', schema=schema)
    assert made.schema == schema
    assert made["price"].to_pylist() == [1.0]
    assert _frames.to_arrow([], schema, ()).schema == schema
    slow = table(b'{"a":1,"a":2,"b":"x"}', schema=pa.schema([("a", pa.int32())]))
    assert slow.to_pydict() == {"a": [2]}
    with pytest.raises(InvalidArgument, match="the field 'b' has values that are not int64"):
        table(b'{"b":"x"}', schema=pa.schema([("b", pa.int64())]))
    with pytest.raises(InvalidArgument, match=r"a dict is not a pyarrow\.Schema"):
        table(b"{}", schema={"b": "int"})


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(_frames, "import_module", missing)
    with pytest.raises(ImportError, match=r"pyarrow is missing; install sow\[arrow\]"):
        table(b"{}")
    with pytest.raises(ImportError, match=r"polars is missing; install sow\[polars\]"):
        _frames.to_polars(None)


def test_pandas_rounds_no_whole_number_of_which_some_are_missing() -> None:
    frame = _frames.to_pandas(table(b'{"a":9007199254740993,"b":1,"c":true}', b'{"b":2}'))
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {"a": "Int64", "b": "int64", "c": "boolean"}
    assert frame["a"][0] == 9007199254740993


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars"])
def test_both_clients_make_tables(server: Server, kind: str) -> None:
    result = server.client.query("orders")
    call = server.begin(lambda: getattr(result, f"to_{kind}")(metadata=["key", "version"]))
    answer = sow_pb2.QueryResponse(batch=columns(b'{"a":1}', b'{"a":2}'))
    server.stream("Query", header(), answer, answer, footer(4))
    made = call.result(SECONDS_MAX)
    assert type(made) in {pa.Table, pd.DataFrame, pl.DataFrame}
    assert list(made["a"].to_pylist() if kind == "arrow" else made["a"]) == [1, 2, 1, 2]
    assert list(made.column_names if kind == "arrow" else made.columns) == ["_key", "_version", "a"]


# ---- frames as documents ----

MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)
DATA: dict[str, list[Any]] = {"id": [1, 2], "price": [9.5, 2.0], "name": ["a", None], "at": [MOMENT, MOMENT]}


def documents(frame: object, **arguments: Any) -> list[Any]:
    return [json.loads(row.payload) for row in rows(frame, **arguments)]


def rows(frame: object, **arguments: Any) -> list[_frame_rows.Row]:
    chosen: dict[str, Any] = {"key": None, "ttl_column": None, "expire_time_column": None, "nan": "refuse"}
    return list(_frame_rows.rows(frame, **(chosen | arguments)))


@pytest.mark.parametrize(
    "frame", [pd.DataFrame(DATA), pl.DataFrame(DATA), pa.table(DATA), pa.RecordBatch.from_pydict(DATA)]
)
def test_a_row_becomes_a_document(frame: object) -> None:
    at = "2026-01-31T12:00:00Z"
    assert documents(frame) == [
        {"id": 1, "price": 9.5, "name": "a", "at": at},
        {"id": 2, "price": 2.0, "name": None, "at": at},
    ]


def test_types_of_columns_have_their_form_in_json() -> None:
    frame = pa.table({
        "decimal": pa.array([Decimal("1.10")]),
        "date": pa.array([MOMENT.date()]),
        "bytes": pa.array([b"ab"]),
        "list": pa.array([[{"a": 1}]]),
        "category": pa.array(["x"]).dictionary_encode(),
        "nanos": pa.array([MOMENT], pa.timestamp("ns", "UTC")),
        "deep": pa.array([[{"at": MOMENT}]], pa.list_(pa.struct([("at", pa.timestamp("ns", "UTC"))]))),
    })  # fmt: skip
    (row,) = rows(frame)
    assert row.payload == (
        b'{"decimal":1.10,"date":"2026-01-31","bytes":"YWI=","list":[{"a":1}],"category":"x",'
        b'"nanos":"2026-01-31T12:00:00Z","deep":[{"at":"2026-01-31T12:00:00Z"}]}'
    )


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [1.0, NAN]}),
        pd.DataFrame({"a": pd.Series(["x", NAN], dtype=object)}),
        pl.DataFrame({"a": [1.0, NAN]}),
        pa.table({"a": [1.0, NAN]}),
        pa.table({"a": pa.array([1.0, NAN], pa.float32())}),
    ],
)
def test_nan_is_refused_with_its_path_and_row_unless_it_is_to_be_null(frame: object) -> None:
    """See _frame_rows [1]: pandas, polars and Arrow all write null."""
    with pytest.raises(InvalidArgument, match="row 1: /a is NaN or infinite") as caught:
        rows(frame)
    assert caught.value.details == {"field": "frame", "path": "/a", "row": "1"}
    assert documents(frame, nan="null")[1] == {"a": None}


@pytest.mark.parametrize("nan", ["refuse", "null"])
def test_infinities_and_what_is_deep_inside_are_refused_in_any_case(nan: str) -> None:
    for frame, path in ((pd.DataFrame({"a": [1.0, -float("inf")]}), "/a"), (pa.table({"a": [[1.0], [NAN]]}), "/a[0]")):
        with pytest.raises(InvalidArgument, match="row 1") as caught:
            rows(frame, nan=nan)
        assert (caught.value.details["path"], caught.value.details["row"]) == (path, "1")


def test_a_missing_value_of_pandas_is_null() -> None:
    frame = pd.DataFrame(
        {"n": pd.array([1, None], "Int64"), "t": pd.to_datetime(["2026-01-31", None]), "o": ["x", None]}
    )
    assert documents(frame)[1] == {"n": None, "t": None, "o": None}


def test_keys_and_lifetimes_come_from_columns() -> None:
    frame = pa.table({
        "_key": ["x", "y"], "_version": [1, 2], "a": ["LH", "BA"], "b": [400, 1], "ttl": ["30s", None],
        "until": pa.array([None, MOMENT], pa.timestamp("us", "UTC")),
    })  # fmt: skip
    (first, second) = rows(frame, key="_key", ttl_column="ttl", expire_time_column="until")
    assert first == (b'{"a":"LH","b":400}', "x", "30s", None)
    assert second == (b'{"a":"BA","b":1}', "y", None, MOMENT)
    assert [row.key for row in rows(frame, key=["a", "b"])] == [("LH", 400), ("BA", 1)]
    assert documents(frame.select(["a", "_key"])) == [{"a": "LH"}, {"a": "BA"}]


@pytest.mark.parametrize(
    ("frame", "arguments", "message"),
    [
        (pa.table({"a": [1]}), {"key": "b"}, "frame: has no column 'b'"),
        (pa.table({"a": [1]}), {"ttl_column": "b"}, "frame: has no column 'b'"),
        (pa.table({"a": ["1s"]}), {"ttl_column": "a", "expire_time_column": "a"}, "expire_time_column"),
        (pa.table({"a": [1], "k": [None]}), {"key": "k"}, "row 0: key: is null"),
        (pa.table([[1], [2]], names=["a", "a"]), {}, "several columns of one name"),
        (pd.DataFrame({7: [1]}), {}, "column 1 of 1 has the name 7, which is no text"),
        (pd.DataFrame({"a": [1, "x"]}), {}, "the column 'a' has values of several types"),
        (pa.table({"a": pa.array([1], pa.timestamp("ns"))}), {}, "times finer than microseconds"),
        (
            pa.table({"a": pa.array([[({"b": 1}, 2)]], pa.map_(pa.struct([("b", pa.int64())]), pa.int64()))}),
            {},
            "row 0: /a has no form in JSON",
        ),
        (pa.table({"a": [1]}), {"nan": "drop"}, "nan"),
    ],
)
def test_a_frame_that_cannot_be_published_is_refused(frame: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        rows(frame, **arguments)


def test_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a list is no frame of pandas or polars"):
        rows([{"a": 1}])


@pytest.mark.parametrize(
    "document", ['{"a":9007199254740993}', '{"a":[9007199254740993]}', '{"a":{"b":9007199254740993}}']
)
def test_no_whole_number_beside_floats_is_rounded(document: str) -> None:
    """Story: only those of 19 digits and more were looked for."""
    kind, values = fields(document, document.replace("9007199254740993", "0.5"))["a"]
    assert kind == "string"
    assert "9007199254740993" in values[0]


def test_a_schema_cuts_no_number() -> None:
    with pytest.raises(InvalidArgument, match=r"1\.5 is no whole number"):
        table(b'{"a":1.5}', schema=pa.schema([("a", pa.int64())]))


@pytest.mark.parametrize("value", [[1.5, NAN], {"b": NAN}, np.array([1.5, NAN])])
@pytest.mark.parametrize("nan", ["refuse", "null"])
def test_nan_inside_objects_of_pandas_is_refused(value: object, nan: str) -> None:
    """Story: it was published as null without being asked to."""
    with pytest.raises(InvalidArgument, match=r"row 1: /a(\[1\]|/b) is NaN"):
        rows(pd.DataFrame({"a": [None, value]}), nan=nan)


def test_a_decimal_that_is_nan_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="row 0: /a is NaN"):
        rows(pd.DataFrame({"a": [Decimal("NaN")]}))


def test_nan_deep_inside_a_later_row_is_refused_before_the_first_row() -> None:
    """Story: the rows before it had been sent."""
    with pytest.raises(InvalidArgument, match=r"row 1: /a\[0\] is NaN"):
        _frame_rows.rows(
            pa.table({"a": [[1.0], [NAN]]}), key=None, ttl_column=None, expire_time_column=None, nan="refuse"
        )


def test_objects_of_python_in_polars_are_refused() -> None:
    """Story: their addresses in memory were published."""
    with pytest.raises(InvalidArgument, match="objects of Python"):
        rows(pl.DataFrame({"a": pl.Series([object()], dtype=pl.Object)}))


def test_a_series_is_no_frame() -> None:
    with pytest.raises(TypeError, match="a Series is no frame"):
        rows(pd.Series([1]))


# ---- what frames have that JSON has not ----


def test_maps_are_objects() -> None:
    """Story: `sow publish` made objects of the maps of a Parquet file, and `publish_frame` lists of pairs."""
    maps = pa.table({"m": pa.array([{"a": 1}, None, {}], pa.map_(pa.string(), pa.int64()))})
    assert [json.loads(row.payload) for row in published(maps)] == [{"m": {"a": 1}}, {"m": None}, {"m": {}}]
    twice = pa.table({"m": pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))})
    with pytest.raises(InvalidArgument, match="row 1: /m has no form in JSON"):
        published(twice)


def test_periods_are_texts_and_no_ordinals() -> None:
    """Story: the month 2024-01 was published as 648."""
    months = pd.Series(pd.period_range("2024-01", periods=2, freq="M"))
    months[1] = pd.NaT
    assert [json.loads(row.payload) for row in published(pd.DataFrame({"month": months}))] == [
        {"month": "2024-01"},
        {"month": None},
    ]


def test_values_that_only_their_program_knows_are_refused() -> None:
    """Story: a BIT of DuckDB was published as the base64 of its bytes inside, a period in a table as a number."""
    bits = pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "bit", "DuckDB"), pa.array([b"\x04"], pa.binary()))
    period = pa.array(pd.Series(pd.period_range("2024-01", periods=1, freq="M")))
    inside = pa.StructArray.from_arrays([bits], names=["x"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), bits)
    unknown = pa.schema([pa.field("u", pa.int64(), metadata={b"ARROW:extension:name": b"mine"})])
    for one, name in (
        (pa.table({"c": bits}), "arrow.opaque"),
        (pa.table({"c": period}), "pandas.period"),
        (pa.table({"c": inside}), "arrow.opaque"),
        (pa.table({"c": lists}), "arrow.opaque"),
        (pa.table([pa.array([1])], schema=unknown), "mine"),
    ):
        with pytest.raises(InvalidArgument, match=f"has the type {name}, whose values sow does not know"):
            published(one)


def published(frame: object, **options: Any) -> list[_frame_rows.Row]:
    chosen: dict[str, Any] = {"key": None, "ttl_column": None, "expire_time_column": None, "nan": "refuse"}
    return list(_frame_rows.rows(frame, **(chosen | options)))


def test_whole_records_beside_their_columns_are_not_dropped() -> None:
    """`_payload` of an exported file has records that the other columns do not keep."""
    with pytest.raises(InvalidArgument, match="the column '_payload' has whole records"):
        published(pa.table({"a": [1, 2], "_payload": [None, '{"a":2,"b":null}']}))
    nothing = pa.table({"a": [1], "_payload": pa.nulls(1, pa.string())})
    assert [row.payload for row in published(nothing)] == [b'{"a":1}']


SCHEMA: list[tuple[str, Any, object, object]] = [
    ("a", pa.dictionary(pa.int32(), pa.string()), "x", "x"),
    ("b", pa.float16(), 1.5, 1.5),
    ("c", pa.map_(pa.string(), pa.int64()), {"k": 1}, [("k", 1)]),
    ("d", pa.decimal256(50, 2), 12.5, Decimal("12.50")),
    ("e", pa.large_list(pa.int64()), [1, 2], [1, 2]),
    ("f", pa.list_(pa.int64(), 2), [1, 2], [1, 2]),
    ("g", pa.map_(pa.int32(), pa.timestamp("us", "UTC")), {"7": STAMP.isoformat()}, [(7, STAMP)]),
    ("h", pa.uuid(), "5aac7e05-36cb-421b-bb06-00097fdafb21", UUID("5aac7e05-36cb-421b-bb06-00097fdafb21")),
    ("i", pa.timestamp("us", "UTC"), STAMP.isoformat(), STAMP),
    ("j", pa.duration("us"), 5, timedelta(microseconds=5)),
    ("k", pa.list_view(pa.int64()), [1], [1]),
    ("l", pa.binary(2), "ab", b"ab"),
]


def test_a_schema_may_have_types_that_the_json_reader_of_arrow_lacks() -> None:
    """Story: a dictionary, a float16 or a map ended `to_arrow` with an error of Arrow."""
    document = {name: value for name, _, value, _ in SCHEMA}
    schema = pa.schema([(name, kind) for name, kind, _, _ in SCHEMA])
    made = table(json.dumps(document).encode(), b"{}", schema=schema)
    assert made.schema == schema
    assert made.to_pylist() == [{name: read for name, _, _, read in SCHEMA}, dict.fromkeys(schema.names)]
    assert list(_frames.to_pandas(made)) == schema.names
    assert _frames.to_polars(made).columns == schema.names
    for name, kind, _, _ in SCHEMA:
        alone = table(json.dumps(document).encode(), schema=pa.schema([(name, kind)]))
        assert alone.schema.field(name).type == kind, name
    for kind, wrong in ((pa.float16(), "x"), (pa.uuid(), "x"), (pa.map_(pa.string(), pa.int64()), 1)):
        with pytest.raises(InvalidArgument, match="the field 'a' has values that are not"):
            table(json.dumps({"a": wrong}).encode(), schema=pa.schema([("a", kind)]))


def test_a_type_that_polars_does_not_hold_is_refused_and_no_panic() -> None:
    """`from_arrow` of polars ends with a panic, which is no Exception, at a decimal of 256 bits."""
    large = pa.table({"d": pa.array([Decimal(10) ** 45], pa.decimal256(50, 2))})
    with pytest.raises(InvalidArgument, match="polars has no type for the field 'd'"):
        _frames.to_polars(large)
