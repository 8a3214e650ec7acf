"""Tables that other programs have written: each value is published as what it was, or its row is refused.

The files were written by DuckDB 2.0.1: `COPY … TO` and `to_arrow_table()`.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc, parquet

from sow_cli.command import sow
from sow_client import Client, MessageTypeName, PayloadForm
from tests.support.servers.server import ServerProcess

FILES = Path(__file__).parent / "files"
NANOS = 1_704_164_645_678_901_234


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("others")) as made:
        yield made
        assert not made.faults()


@pytest.fixture
def topic(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    with server.client() as client:
        client.create_topic("table", key=["/id"])
        yield "table"
        client.delete_topic("table", force=True)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def run(server: ServerProcess, *arguments: object) -> Result:
    return CliRunner().invoke(sow, ["--server", server.address, *map(str, arguments)])


def published(server: ServerProcess, client: Client, topic: str, file: Path, *options: str) -> list[dict[str, Any]]:
    result = run(server, "publish", topic, file, *options)
    assert result.exit_code == 0, result.output
    return [json.loads(one.payload, parse_float=Decimal) for one in client.query(topic)]


def arrow_file(table: pa.Table, path: Path) -> Path:
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def test_duckdb(server: ServerProcess, client: Client, topic: str) -> None:
    (row,) = published(server, client, topic, FILES / "duckdb.arrow")
    same = {
        "id": 1,
        "huge": 2**127 - 1,
        "dec": Decimal("12.345678901234567890123456789012345678"),
        "tod": "12:34:56.789012",
        "en": "b",
        "day": "2024-02-29",
        "f32": Decimal("1.5"),
        "dbl": Decimal("0.1"),
    }
    nested = {"ns": "2024-01-02T03:04:05.678901234", "zoned": "2024-01-02T01:04:05.500000Z", "bin": "/wA="}
    assert row == same | nested | {"iv": [1, 2, 3_000_000_000], "nested": [{"a": 1, "b": [1, 2]}, {}]}
    (row,) = published(server, client, topic, FILES / "duckdb.csv.gz")
    assert {name: row[name] for name in same} == same
    assert row["ns"] == "2024-01-02 03:04:05.678901234"


POLARS = {
    "id": [1, 2],
    "category": pl.Series(["a", "b"], dtype=pl.Categorical),
    "enum": pl.Series(["x", "y"], dtype=pl.Enum(["x", "y"])),
    "time": [time(1, 2, 3, 4), None],
    "length": [timedelta(days=1, microseconds=5), None],
    "zoned": pl.Series(["2024-07-02 03:04:05"] * 2).str.to_datetime(time_zone="Europe/Berlin"),
    "decimal": [Decimal("1.10"), Decimal("2.25")],
    "struct": [{"a": 1, "b": [{"c": "x"}]}, None],
    "array": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2)),
    "bytes": [b"\xff", None],
    "large": pl.Series([2**64 - 1, 0], dtype=pl.UInt64),
}
WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    "parquet": pl.DataFrame.write_parquet,
    "arrow": pl.DataFrame.write_ipc,
    "stream.arrow": pl.DataFrame.write_ipc_stream,
    "zstd.feather": lambda frame, path: frame.write_ipc(path, compression="zstd"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_polars(server: ServerProcess, client: Client, topic: str, tmp_path: Path, kind: str) -> None:
    """All rows with a Categorical were refused in files of Arrow."""
    WRITERS[kind](pl.DataFrame(POLARS), tmp_path / f"a.{kind}")
    first, second = published(server, client, topic, tmp_path / f"a.{kind}")
    assert first == {
        "id": 1,
        "category": "a",
        "enum": "x",
        "time": "01:02:03.000004",
        "length": "P1DT0.000005S",
        "zoned": "2024-07-02T03:04:05+02:00",
        "decimal": Decimal("1.10"),
        "struct": {"a": 1, "b": [{"c": "x"}]},
        "array": [1, 2],
        "bytes": "/w==",
        "large": 2**64 - 1,
    }
    assert second.keys() == {"id", "category", "enum", "zoned", "decimal", "array", "large"}


def test_csv_of_polars_for_excel(server: ServerProcess, client: Client, topic: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"id": [1, 2], "text": ['a;"b"', "é\nf"], "n": [1.5, None]})
    frame.write_csv(tmp_path / "a.csv", include_bom=True, separator=";", line_terminator="\r\n", decimal_comma=True)
    assert published(server, client, topic, tmp_path / "a.csv") == [
        {"id": 1, "text": 'a;"b"', "n": "1,5"},
        {"id": 2, "text": "é\nf"},
    ]


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_pandas(server: ServerProcess, client: Client, topic: str, tmp_path: Path, kind: str) -> None:
    frame = pd.DataFrame(
        {
            "id": [1, 2],
            "stamp": pd.to_datetime(["2024-01-02 03:04:05.678901234", None]),
            "zoned": pd.to_datetime(["2024-01-02T03:04:05Z"] * 2).tz_convert("America/New_York"),
            "length": pd.to_timedelta(["1 days 00:00:00.000000001", "2h"]),
            "category": pd.Categorical(["a", None]),
            "whole": pd.array([2**62 + 1, None], dtype="Int64"),
            "flag": pd.array([True, None], dtype="boolean"),
        }
    )
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        arrow_file(pa.Table.from_pandas(frame), path)
    else:
        getattr(frame, f"to_{kind}")(path)
    assert published(server, client, topic, path) == [
        {
            "id": 1,
            "stamp": "2024-01-02T03:04:05.678901234",
            "zoned": "2024-01-01T22:04:05-05:00",
            "length": "PT86400.000000001S",
            "category": "a",
            "whole": 2**62 + 1,
            "flag": True,
        },
        {"id": 2, "zoned": "2024-01-01T22:04:05-05:00", "length": "PT7200S"},
    ]


def test_the_index_that_pandas_writes_into_csv_is_named(server: ServerProcess, topic: str, tmp_path: Path) -> None:
    pd.DataFrame({"id": [1]}).to_csv(tmp_path / "a.csv")
    result = run(server, "publish", topic, tmp_path / "a.csv")
    assert (result.exit_code, "column 1 of 2 has no name; if it is the index of pandas" in result.stderr) == (2, True)


STRUCT = pa.struct([("t", pa.timestamp("ns")), ("m", pa.map_(pa.string(), pa.int8()))])
ODD = {
    "decimal256": (pa.array([Decimal("123456789012345678901234567890123456789012345.12")], pa.decimal256(60, 2)), None),
    "time32": (pa.array([3723], pa.time32("s")), "01:02:03"),
    "time64": (pa.array([3_723_000_000_001], pa.time64("ns")), "01:02:03.000000001"),
    "seconds": (pa.array([90_061], pa.duration("s")), "P1DT3661S"),
    "nanos": (pa.array([-1], pa.duration("ns")), "-PT0.000000001S"),
    "zoned": (pa.array([-1], pa.timestamp("ns", "America/New_York")), "1969-12-31T18:59:59.999999999-05:00"),
    "list": (pa.array([[NANOS, None]], pa.list_(pa.timestamp("ns"))), ["2024-01-02T03:04:05.678901234", None]),
    "map": (
        pa.array([[("a", NANOS)]], pa.map_(pa.string(), pa.timestamp("ns"))),
        {"a": "2024-01-02T03:04:05.678901234"},
    ),
    "decimal names": (pa.array([[(Decimal("1.5"), 1)]], pa.map_(pa.decimal128(5, 1), pa.int8())), {"1.5": 1}),
    "bool names": (pa.array([[(True, 1)]], pa.map_(pa.bool_(), pa.int8())), {"true": 1}),
    "time names": (
        pa.array([[(NANOS, 1)]], pa.map_(pa.timestamp("ns", "UTC"), pa.int8())),
        {"2024-01-02T03:04:05.678901234Z": 1},
    ),
    "structs": (
        pa.array([[{"t": NANOS, "m": [("k", 1)]}, None]], pa.list_(STRUCT)),
        [{"t": "2024-01-02T03:04:05.678901234", "m": {"k": 1}}, None],
    ),
    "half": (pa.array([np.float16(1.5)], pa.float16()), Decimal("1.5")),
    "dictionary": (pa.array(["x"], pa.large_string()).dictionary_encode(), "x"),
    "stamps": (pa.array([NANOS], pa.timestamp("ns")).dictionary_encode(), "2024-01-02T03:04:05.678901234"),
    "view": (pa.array(["view"], pa.string_view()), "view"),
    "list view": (pa.array([[1, 2]], pa.list_view(pa.int32())), [1, 2]),
    "fixed": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
    "runs": (pa.RunEndEncodedArray.from_arrays([1], ["r"]), "r"),
    "date64": (pa.array([1_704_153_600_000], pa.date64()), "2024-01-02"),
    "uuid": (pa.array([b"0123456789abcdef"], pa.uuid()), "30313233-3435-3637-3839-616263646566"),
    "union": (
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([5])]),
        5,
    ),
}


def test_each_type_of_arrow(server: ServerProcess, client: Client, topic: str, tmp_path: Path) -> None:
    """Times finer than microseconds were refused, all of a file with nanoseconds."""
    table = pa.table({"id": [1]} | {name: column for name, (column, _) in ODD.items()})
    (row,) = published(server, client, topic, arrow_file(table, tmp_path / "a.arrow"))
    expected = {name: value for name, (_, value) in ODD.items()}
    expected |= {"id": 1, "decimal256": Decimal("123456789012345678901234567890123456789012345.12")}
    assert row == expected
    for name, (column, value) in ODD.items():
        try:
            parquet.write_table(pa.table({"id": [1], name: column}), tmp_path / "a.parquet")
        except pa.ArrowNotImplementedError:
            continue  # Parquet has no runs and no unions
        (row,) = published(server, client, topic, tmp_path / "a.parquet")
        assert row == {"id": 1, name: expected[name]}, (name, value)


def test_row_groups_and_batches(server: ServerProcess, client: Client, topic: str, tmp_path: Path) -> None:
    """A dictionary of texts changes from batch to batch of a stream."""
    words = [f"w{n % 7}" for n in range(30)]
    chunks = pa.chunked_array([pa.array(words[n : n + 3]).dictionary_encode() for n in range(0, 30, 3)])
    table = pa.table({"id": list(range(30)), "word": chunks})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    expected = list(enumerate(words))
    for name in ("a.parquet", "a.arrow"):
        rows = published(server, client, topic, tmp_path / name)
        assert sorted((row["id"], row["word"]) for row in rows) == expected


def test_lines_of_others(server: ServerProcess, client: Client, topic: str, tmp_path: Path) -> None:
    """CRLF, and members and frames that were put behind each other."""
    some = [b'{"id":1,"a":"x\\r\\n"}\r\n', b'{"id":2}\r\n', b"\r\n", b'{"id":3}']
    expected: list[object] = [{"id": 1, "a": "x\r\n"}, {"id": 2}, {"id": 3}]
    packed = {
        "a.ndjson": b"".join(some),
        "b.ndjson.gz": b"".join(map(gzip.compress, some)),
        "c.ndjson.zst": b"".join(pa.compress(one, "zstd", asbytes=True) for one in some),
        "d.jsonl": b"\xef\xbb\xbf" + b"".join(some),
    }
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        assert published(server, client, topic, tmp_path / name) == expected, name
        client.sow_delete(topic, all=True)


def test_a_feather_file_of_version_1_is_refused_in_a_sentence(
    server: ServerProcess, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(16) + b"FEA1")
    result = run(server, "publish", topic, tmp_path / "a.feather")
    assert (result.exit_code, "a Feather file of version 1" in result.stderr) == (2, True)


def test_an_infinite_time_is_refused_and_the_others_are_published(
    server: ServerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """DuckDB and PostgreSQL have such times: the largest number of microseconds."""
    sink = io.BytesIO()
    parquet.write_table(pa.table({"id": [1, 2], "at": pa.array([2**63 - 1, 0], pa.timestamp("us"))}), sink)
    (tmp_path / "a.parquet").write_bytes(sink.getvalue())
    result = run(server, "publish", topic, tmp_path / "a.parquet")
    assert (result.exit_code, "record 1: PAYLOAD_MALFORMED: column at: " in result.stderr) == (1, True)
    assert [one.key for one in client.query(topic)] == ["2"]


def latin(text: bytes) -> pa.Array:
    """A column of texts with one that is no UTF-8, as programs write it that do not check."""
    offsets = np.array([0, len(text)], dtype=np.int32).tobytes()
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


@pytest.mark.parametrize(
    ("column", "told", "kept"),
    [
        (latin(b"M\xfcller"), "a text is no UTF-8", ("TfxsbGVy", "base64")),
        (pa.StructArray.from_arrays([latin(b"\xff")], names=["a"]), "a text is no UTF-8", ('{"a": "\\udcff"}', "json")),
        (
            pa.array([[({"a": 1}, 2)]], pa.map_(pa.struct([("a", pa.int64())]), pa.int64())),
            "column b: a map has keys that are no texts",
            ("[({'a': 1}, 2)]", "json"),
        ),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_value_that_cannot_be_read_is_kept(
    server: ServerProcess, topic: str, tmp_path: Path, kind: str, column: pa.Array, told: str, kept: tuple[str, str]
) -> None:
    """Story: each of them ended the command with a traceback."""
    table = pa.table({"id": [1], "b": column})
    file = tmp_path / f"a.{kind}"
    if kind == "arrow":
        arrow_file(table, file)
    else:
        parquet.write_table(table, file)
    bad = tmp_path / "bad.ndjson"
    for input_file, errors in ((file, bad), (bad, tmp_path / "twice.ndjson")):
        result = run(server, "publish", topic, input_file, "--errors", errors)
        assert (result.exit_code, json.loads(result.stdout)["refused"]) == (1, 1)
        line = json.loads(errors.read_text())
        assert (line["row"]["b"], line["types"]["b"]) == kept
        assert input_file is bad or told in line["message"]


@pytest.mark.parametrize("column", [[0], [{"at": [0]}]])
def test_times_of_an_unknown_zone_are_refused_before_the_first_record(
    server: ServerProcess, topic: str, tmp_path: Path, column: list[object]
) -> None:
    """Story: a traceback, on a small image without a database of time zones also for Europe/Berlin."""
    kind = pa.timestamp("us", "Mars/Phobos")
    at = pa.array(column, kind if column == [0] else pa.struct([("at", pa.list_(kind))]))
    parquet.write_table(pa.table({"id": [1], "at": at}), tmp_path / "a.parquet")
    result = run(server, "publish", topic, tmp_path / "a.parquet")
    assert (result.exit_code, "the column at has times of the zone Mars/Phobos" in result.stderr) == (2, True)


BEYOND_JSON = {
    "_key": ["a", "b"],
    "x": [float("inf"), float("nan")],
    "list": [[1.5, float("-inf")], []],
    "structs": [[{"x": float("nan"), "raw": b"\x00\xff"}], [{"x": None, "raw": b""}]],
    "raw": [b"\xff", None],
    "large": pl.Series([2**64 - 1, 0], dtype=pl.UInt64),
    "zoned": pl.Series(["2024-07-02 03:04:05.000001"] * 2).str.to_datetime(time_zone="Europe/Berlin"),
    "fine": pl.Series([NANOS, -1], dtype=pl.Datetime("ns", "America/New_York")),
    "local": pl.Series(["2024-07-02 03:04:05", None]).str.to_datetime(),
    "day": [date(2024, 2, 29), None],
    "cost": [Decimal("1.50"), Decimal("2.00")],
}
ZONED = datetime(2024, 7, 2, 1, 4, 5, 1, UTC)
OF_MSGPACK = [
    {
        "x": float("inf"),
        "list": [1.5, float("-inf")],
        "structs": [{"x": float("nan"), "raw": b"\x00\xff"}],
        "raw": b"\xff",
        "large": 2**64 - 1,
        "zoned": ZONED,
        "fine": "2024-01-02T03:04:05.678901234Z",
        "local": "2024-07-02T03:04:05",
        "day": "2024-02-29",
        "cost": 1.5,
    },
    {
        "x": float("nan"),
        "list": [],
        "structs": [{"raw": b""}],
        "large": 0,
        "zoned": ZONED,
        "fine": "1969-12-31T23:59:59.999999999Z",
        "cost": 2.0,
    },
]


@pytest.mark.parametrize("command", [["publish"], ["load", "--force"]], ids=["publish", "load"])
@pytest.mark.parametrize("kind", WRITERS)
def test_values_that_messagepack_has_and_json_lacks(
    server: ServerProcess, client: Client, tmp_path: Path, kind: str, command: list[str]
) -> None:
    """Story: a row went through JSON on its way. Infinities were refused, and bytes and times were texts."""
    topic = f"packed-{command[0]}-{kind}"
    client.create_topic(topic, message_type="msgpack")
    frame = pl.DataFrame(BEYOND_JSON)
    WRITERS[kind](frame, tmp_path / f"a.{kind}")
    result = run(server, *command, topic, tmp_path / f"a.{kind}")
    assert result.exit_code == 0, result.output

    found = [one.data for one in client.query(topic)]

    for one in found:
        assert isinstance(one["fine"], msgspec.msgpack.Ext), "an instant, with its nanoseconds"
        one["fine"] = PayloadForm.plain(one["fine"])
    assert repr(found) == repr(OF_MSGPACK)


@pytest.mark.parametrize("message_type", ["json", "nvfix"])
def test_other_types_refuse_numbers_that_are_not_finite(
    server: ServerProcess, client: Client, tmp_path: Path, message_type: MessageTypeName
) -> None:
    topic = f"finite-{message_type}"
    client.create_topic(topic, message_type=message_type)
    columns = {"_key": ["a", "b", "c"], "x": [[1.0, float("inf")], [1.0], [float("nan")]]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    result = run(server, "publish", topic, tmp_path / "a.parquet")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[:2] == [
        "record 1: PAYLOAD_MALFORMED: column x: inf is no number of JSON",
        "record 3: PAYLOAD_MALFORMED: column x: nan is no number of JSON",
    ]
    assert [one.key for one in client.query(topic)] == ["b"]


def test_a_key_field_of_messagepack_has_a_text_or_a_number(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """Times with a zone are no keys (rule K5), and floats have the texts of rule K4."""
    client.create_topic("moments", key=["/at"], message_type="msgpack")
    columns = {"at": pa.array([0], pa.timestamp("us", tz="UTC"))}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    result = run(server, "publish", "moments", tmp_path / "a.parquet")
    assert (result.exit_code, "record 1: KEY_FIELD_NOT_SCALAR: key field /at" in result.stderr) == (1, True)
    parquet.write_table(pa.table({"at": [float("inf")]}), tmp_path / "b.parquet")
    assert run(server, "publish", "moments", tmp_path / "b.parquet").exit_code == 0
    assert [one.key for one in client.query("moments")] == ["inf"]


def test_csv_of_numbers_that_are_not_finite(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """CSV has no such numbers, whatever the type of the topic: a text, or refused by its column and its row."""
    client.create_topic("packed-csv", key=["/id"], message_type="msgpack")
    (tmp_path / "a.csv").write_text("id,x\n1,inf\n2,1.5\n")
    assert run(server, "publish", "packed-csv", tmp_path / "a.csv").exit_code == 0
    assert [one.data for one in client.query("packed-csv")] == [{"id": 1, "x": "inf"}, {"id": 2, "x": "1.5"}]
    client.sow_delete("packed-csv", all=True)
    result = run(server, "publish", "packed-csv", tmp_path / "a.csv", "--types", "x=number")
    assert (result.exit_code, "record 1: PAYLOAD_MALFORMED: column x: 'inf' is not a number" in result.stderr) == (
        1,
        True,
    )
    assert [one.data for one in client.query("packed-csv")] == [{"id": 2, "x": 1.5}]


def test_rows_of_messagepack_are_kept_and_mended(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """What JSON does not give back is MessagePack in base64 in the file of --errors."""
    client.create_topic("mended", message_type="msgpack")
    frame = pl.DataFrame(BEYOND_JSON).with_columns(_key=pl.Series([None, "b"], dtype=pl.String))
    frame.write_parquet(tmp_path / "a.parquet")
    bad = tmp_path / "bad.ndjson"
    assert run(server, "publish", "mended", tmp_path / "a.parquet", "--errors", bad).exit_code == 1
    line = json.loads(bad.read_text())
    assert line["types"] == dict.fromkeys(("x", "list", "structs", "raw", "zoned", "fine"), "msgpack")
    assert (line["row"]["x"], line["row"]["large"], line["row"]["local"]) == (
        "y3/wAAAAAAAA",
        2**64 - 1,
        "2024-07-02T03:04:05",
    )
    again = run(server, "publish", "mended", bad)
    assert (again.exit_code, "column _key is empty" in again.stderr) == (1, True)

    line["row"]["_key"] = "a"
    bad.write_text(json.dumps(line))
    assert run(server, "publish", "mended", bad).exit_code == 0

    found = [one.data for one in client.query("mended")]
    for one in found:
        one["fine"] = PayloadForm.plain(one["fine"])
    assert repr(found) == repr(OF_MSGPACK)
    line["row"] |= {"x": "gA=", "raw": "text"}
    del line["types"]["raw"]
    bad.write_text(json.dumps(line))
    wrong = run(server, "publish", "mended", bad)
    assert (wrong.exit_code, "column x: 'gA=' is not MessagePack in base64" in wrong.stderr) == (1, True)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.txt"])
@pytest.mark.parametrize("message_type", ["msgpack", "nvfix"])
def test_key_field_of_payloads_that_are_not_json(
    server: ServerProcess, client: Client, tmp_path: Path, message_type: MessageTypeName, name: str
) -> None:
    """Story: it was looked for as in JSON, and all records were refused as malformed."""
    topic = f"key-field-{message_type}-{name}"
    client.create_topic(topic, message_type=message_type)
    form = PayloadForm(message_type)
    documents: list[dict[str, Any]] = [{"k": "a", "n": 1}, {"n": 2}, {"k": "c", "n": 3}]
    payloads = [base64.b64encode(form.encode(one)).decode() for one in documents]
    if name == "a.csv":
        (tmp_path / name).write_text("k,n\na,1\n,2\nc,3\n")
    elif name == "a.parquet":
        parquet.write_table(pa.table({"k": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n".join(payloads))
    options = ("--key-field", "k", "--errors", tmp_path / "bad.ndjson")

    result = run(server, "publish", topic, tmp_path / name, *options)

    assert (result.exit_code, "2: KEY_FIELD_MISSING: field k is missing" in result.stderr) == (1, True), result.output
    found = [(one.key, one.payload) for one in client.query(topic)]
    assert found == [(str(one["k"]), form.encode(one)) for one in documents if "k" in one]
    line = json.loads((tmp_path / "bad.ndjson").read_text())
    if name == "a.txt":
        line["payload"] = base64.b64encode(form.encode({"k": "b"})).decode()
    else:
        line["row"]["k"] = "b"
    (tmp_path / "mended.ndjson").write_text(json.dumps(line))
    assert run(server, "publish", topic, tmp_path / "mended.ndjson", "--key-field", "k").exit_code == 0
    assert [one.key for one in client.query(topic)] == ["a", "b", "c"]


def test_key_field_of_values_of_messagepack(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    client.create_topic("key-field", message_type="msgpack")
    documents: list[dict[str, Any]] = [
        {"a": {"k": k}} for k in (float("-inf"), 1.0, True, 2**64 - 1, b"x", datetime(2024, 1, 1, tzinfo=UTC))
    ]
    (tmp_path / "a.txt").write_bytes(b"\n".join([base64.b64encode(msgspec.msgpack.encode(one)) for one in documents]))
    result = run(server, "publish", "key-field", tmp_path / "a.txt", "--key-field", "/a/k")
    assert result.stderr.splitlines()[:2] == [
        f"line {line}: KEY_FIELD_NOT_SCALAR: field /a/k is no text, number or boolean" for line in (5, 6)
    ]
    assert {one.key for one in client.query("key-field")} == {"-inf", "1", "true", str(2**64 - 1)}
