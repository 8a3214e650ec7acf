"""The files that `sow publish` reads: JSON, CSV, Parquet and Arrow; and the report about bad records."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from sow_cli.cell_values import CONVERT
from sow_cli.lines import BadLine, Item
from sow_cli.row_records import Reading, RecordMaker, Target
from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS, Row

__all__ = ["client"]  # a fixture


def stored(client: FakeClient, topic: str = "orders") -> dict[str, object]:
    return {key: json.loads(row.payload) for key, row in client.tables[topic].rows.items()}


# ---- JSON ----


@pytest.mark.parametrize("layout", [b'[{"id":1},{"id":2,"x":[1,\n{}]}]', b' [\n{"id":1}\n,\n{"id":2,"x":[1,{}]}\n]\n'])
def test_a_json_array_is_its_documents(client: FakeClient, tmp_path: Path, layout: bytes) -> None:
    client.add("orders")
    file = tmp_path / "orders.json"
    file.write_bytes(layout)

    assert run(client, "publish", "orders", str(file)).exit_code == 0
    assert stored(client) == {"1": {"id": 1}, "2": {"id": 2, "x": [1, {}]}}
    if layout.startswith(b"["):
        assert run(client, "publish", "orders", stdin=layout.replace(b"2", b"3")).exit_code == 0
        assert "3" in stored(client), "a pipe that begins with [ is an array, too"


def test_a_json_file_may_hold_one_document_or_lines(client: FakeClient, tmp_path: Path) -> None:
    client.add("orders")
    file = tmp_path / "orders.json"
    for content in (b'{\n  "id": 1\n}\n', b'{"id":2}\n\n{"id":3}\n'):
        file.write_bytes(content)
        assert run(client, "publish", "orders", str(file)).exit_code == 0
    assert list(stored(client)) == ["1", "2", "3"]


def test_lines_in_a_json_file_are_read_line_by_line(client: FakeClient, tmp_path: Path) -> None:
    """Story: they were read whole, up to 1 GiB."""
    client.add("orders")
    file = tmp_path / "orders.json"
    file.write_bytes(b'{"id":1}\nnonsense\n{"id":3}')
    assert run(client, "publish", "orders", str(file)).stderr.startswith("line 2: PAYLOAD_MALFORMED")
    assert list(stored(client)) == ["1", "3"]


def test_a_bad_document_of_an_array_is_reported_with_its_number(client: FakeClient) -> None:
    client.add("orders")
    result = run(client, "publish", "orders", stdin=b'[{"id":1},{"no":1},{"id":3}]')
    assert result.exit_code == 1
    assert result.stderr.startswith("record 2: KEY_FIELD_MISSING: ")
    assert run(client, "publish", "orders", stdin=b'[{"id":1},').exit_code == 2


DEEP = "[" * 3_000 + "]" * 3_000


def test_an_array_that_is_nested_too_deeply_is_wrong_usage(client: FakeClient) -> None:
    client.add("orders")
    result = run(client, "publish", "orders", stdin=b'[{"id":1,"a":%s}]' % DEEP.encode())
    assert (result.exit_code, "or nested too deeply" in result.stderr) == (2, True)


@pytest.mark.parametrize("last", [DEEP, "[" * 3_000])
@pytest.mark.parametrize("options", [(), ("--types", "a=json")])
def test_a_cell_that_is_nested_too_deeply_is_a_bad_record(
    client: FakeClient, tmp_path: Path, options: tuple[str, ...], last: str
) -> None:
    """Story: the command ended with a RecursionError, and published nothing."""
    client.add("orders")
    errors = tmp_path / "bad.ndjson"
    told = published(client, f"id,a\n1,[2]\n2,{last}\n", *options, "--errors", str(errors), code=1)
    assert told.startswith(f"record 2: PAYLOAD_MALFORMED: column a: '{last[:40]}' is nested too deeply; ")
    assert list(stored(client)) == ["1"]
    assert "is nested too deeply" in run(client, "publish", "orders", str(errors)).stderr


@pytest.mark.slow
def test_a_cell_at_the_edge_of_what_is_nested_too_deeply_is_a_record_or_a_bad_one() -> None:
    """Story of the mistake: a row of a table for a MessagePack topic is read twice, the second time further down in the
    calls. A cell that was just not too deep there ended the command with a RecursionError."""
    maker = RecordMaker(["a"], Reading(), Target("msgpack"))
    outcomes: list[Item | BadLine | None] = []
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        try:
            cell = CONVERT["json"]("[" * depth + "]" * depth)
        except ValueError:
            break
        outcomes.append(maker.outcome([cell]))
    assert isinstance(outcomes[0], Item)
    assert all("nested too deeply" in str(one) for one in outcomes if isinstance(one, BadLine))


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ('{"ID":1}', "  hint: it has /ID; are the key fields of the topic right?"),
        ('{"idd":1}', "  hint: it has /idd; are the key fields of the topic right?"),
        ('{"id":null,"ids":1}', ""),
        ('{"no":1}', ""),
    ],
)
def test_a_key_field_that_is_mistyped_tells_the_field_that_is_there(
    client: FakeClient, document: str, told: str
) -> None:
    """Of 336,776 records all were refused, as the topic was created with /orgin, and nothing said so."""
    client.add("orders")
    result = run(client, "publish", "orders", stdin=f"{document}\n{document}\n".encode())
    assert [line for line in result.stderr.splitlines() if "hint" in line] == ([told] if told else [])


# ---- CSV ----


def published(client: FakeClient, text: str, *options: str, code: int = 0) -> str:
    result = run(client, "publish", "orders", "--as", "csv", *options, stdin=text.encode())
    assert result.exit_code == code, result.output
    return result.stderr


def test_the_first_line_of_csv_names_the_fields_and_the_rows_tell_their_types(client: FakeClient) -> None:
    client.add("orders")
    published(
        client,
        "\ufeffid,price,zip,ok,note,list,/at/bid,none\r\n"
        '1,9.50,01234,true,"a,""b""","[1,2]",7,\r\n'
        "\r\n"
        '2,1e3,99999,false,"two\nlines","{""x"":1}",8,\r\n',
    )
    assert client.tables["orders"].rows["1"].payload == (
        b'{"id":1,"price":9.50,"zip":"01234","ok":true,"note":"a,\\"b\\"","list":[1,2],"at":{"bid":7}}'
    )
    second = {
        "id": 2,
        "price": 1e3,
        "zip": "99999",
        "ok": False,
        "note": "two\nlines",
        "list": {"x": 1},
        "at": {"bid": 8},
    }
    assert stored(client)["2"] == second


def test_types_of_columns_can_be_given(client: FakeClient) -> None:
    client.add("orders")
    published(client, "id,zip,n\n1,12345,7\n", "--types", "zip=text,n=int")
    assert stored(client)["1"] == {"id": 1, "zip": "12345", "n": 7}
    published(client, "id,zip\n2,12345\n", "--types", "text")
    assert stored(client)["2"] == {"id": "2", "zip": "12345"}
    assert "none of text" in published(client, "id\n", "--types", "id=date", code=2)
    assert "no column 'zap'; it has id, zip" in published(client, "id,zip\n2,1\n", "--types", "zap=text", code=2)


def test_the_type_of_all_columns_is_none_of_metadata(client: FakeClient) -> None:
    """Story: a key `x` was no number, and a cell that is no field made its record bad."""
    client.add("orders")
    published(client, "_version,n,id,_origin\n-,7,1,x\n", "--types", "int")
    assert stored(client)["1"] == {"n": 7, "id": 1}


def test_cells_that_do_not_fit_are_bad_records_and_the_others_are_published(client: FakeClient) -> None:
    client.add("orders")
    many = "".join(f"{number},1\n" for number in range(1_000))
    told = published(client, f"id,price\n{many}a,2\n1001,n/a\n1002\n1003,3\n", code=1)
    empty = "and an empty cell is no value"
    assert told.splitlines() == [
        f"record 1001: PAYLOAD_MALFORMED: column id: 'a' is not a number; --types id=text keeps it, {empty}",
        f"record 1002: PAYLOAD_MALFORMED: column price: 'n/a' is not a number; --types price=text keeps it, {empty}",
        "record 1003: PAYLOAD_MALFORMED: has 1 cell where the first line has 2",
    ]
    assert len(stored(client)) == 1_001


def test_a_quotation_mark_that_is_not_closed_takes_further_lines_and_is_told(client: FakeClient) -> None:
    """`',' expected after '"'` was all that was told of the six lines that such a mark took."""
    client.add("orders")
    told = published(client, 'id,note\n1,"one\n2,two\n3,"three"\n4,"f"our\n5,five\n', code=1)
    open_mark = "the row has 3 lines: are the quotation marks of its first one closed?"
    assert told.splitlines() == [
        f"record 1: PAYLOAD_MALFORMED: no CSV: ',' expected after '\"'; {open_mark}",
        "record 2: PAYLOAD_MALFORMED: no CSV: ',' expected after '\"'",
    ]
    assert list(stored(client)) == ["5"]


def test_other_separators_and_names(client: FakeClient, tmp_path: Path) -> None:
    client.add("orders")
    published(client, "id;price\n1;2\n", "--delimiter", ";")
    (tmp_path / "more.tsv").write_text("id\tprice\n2\t3\n")
    (tmp_path / "more.csv").write_text("id,price\n3,4\n")
    assert run(client, "publish", "orders", str(tmp_path / "more.tsv"), str(tmp_path / "more.csv")).exit_code == 0
    assert stored(client) == {"1": {"id": 1, "price": 2}, "2": {"id": 2, "price": 3}, "3": {"id": 3, "price": 4}}


@pytest.mark.parametrize("text", ["id,\n1,2\n", "id,id\n1,2\n", "id,/a//b\n1,2\n", '"id\n'])
def test_a_first_line_that_names_no_fields_is_wrong_usage(client: FakeClient, text: str) -> None:
    client.add("orders")
    published(client, text, code=2)


def test_what_a_query_writes_as_csv_is_read_as_the_same_records(client: FakeClient) -> None:
    table = client.add("sessions", key=(), expiration="enabled")
    document = b'{"page":"/","at":{"x":1},"_key":"odd","/a":1}'
    table.rows["alice"] = Row(document, 1, NOW_MICROS + 1, 1)
    table.rows["bob"] = Row(b'{"page":"/b"}', 1, None, 2)
    target = client.add("copy", key=(), expiration="enabled")

    text = run(client, "query", "sessions", "--format", "csv").stdout_bytes
    result = run(client, "publish", "copy", "--as", "csv", "--records", "--ttl", "never", stdin=text)

    assert result.exit_code == 0, result.output
    assert stored(client, "copy") == stored(client, "sessions")
    assert {key: row.expire_time_micros for key, row in target.rows.items()} == {"alice": NOW_MICROS + 1, "bob": None}


@pytest.mark.parametrize("message_type", ["binary", "fix", "nvfix", "msgpack"])
def test_payloads_of_every_type_come_back_from_csv(client: FakeClient, message_type: str) -> None:
    payload = {
        "binary": b"\x89PNG\n\x00",
        "fix": b"35=D\x0155=IBM\x01",
        "nvfix": b"sym=IBM\x01px=1.50\x01",
        "msgpack": msgspec.msgpack.encode({"a": 1, "b": [1, "x"]}),
    }[message_type]
    client.add("source", key=(), message_type=message_type).rows["a"] = Row(payload, 1, None, 1)
    target = client.add("copy", key=(), message_type=message_type)

    text = run(client, "query", "source", "--format", "csv").stdout_bytes
    assert run(client, "publish", "copy", "--as", "csv", stdin=text).exit_code == 0
    assert target.rows["a"].payload == payload


def test_a_key_field_gives_rows_their_keys(client: FakeClient) -> None:
    client.add("orders", key=())
    published(client, "symbol,price\nIBM,1\n,2\n", "--key-field", "symbol", code=1)
    assert stored(client) == {"IBM": {"symbol": "IBM", "price": 1}}


# ---- Parquet and Arrow ----

TABLE: Mapping[str, object] = {
    "id": [1, 2],
    "price": pa.array([9.5, None]),
    "at": pa.array([{"bid": 1}, None]),
    "day": pa.array([datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None]),
    "cost": pa.array([Decimal("1.10"), None]),
    "raw": pa.array([b"hi", None]),
    "_version": [7, 8],
    "_expire_time": pa.array([datetime(2030, 3, 17, 18, tzinfo=UTC), None]),
}
DOCUMENTS = {
    "1": {"id": 1, "price": 9.5, "at": {"bid": 1}, "day": "2026-01-02T03:04:05Z", "cost": 1.1, "raw": "aGk="},
    "2": {"id": 2},
}


def written(kind: str) -> bytes:
    table = pa.table(TABLE)
    sink = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink)
    else:
        with (ipc.new_stream if kind == "stream" else ipc.new_file)(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_columns_of_parquet_and_arrow_are_fields(client: FakeClient, tmp_path: Path, kind: str) -> None:
    table = client.add("orders", expiration="enabled")
    data = written(kind)
    file = tmp_path / f"orders.{'parquet' if kind == 'parquet' else 'arrow'}"
    file.write_bytes(data)

    for options in (["--no-records"], ["--ttl", "never"]):
        assert run(client, "publish", "orders", str(file), *options).exit_code == 0
        assert stored(client) == DOCUMENTS
        assert {row.expire_time_micros for row in table.rows.values()} == {None}
    for options in ([], ["--records"], ["--records", "--ttl", "never"]):
        result = run(client, "publish", "orders", "--as", file.suffix[1:], *options, stdin=data)
        assert result.exit_code == 0, result.output
        assert [row.expire_time_micros for row in table.rows.values()] == [1_900_000_800_000_000, None]


def test_numbers_that_json_does_not_have_are_bad_records(client: FakeClient, tmp_path: Path) -> None:
    client.add("orders")
    table = pa.table({"id": [1, 2, 3], "x": [float("nan"), float("inf"), 1.0], "y": [[1.0], [1.0], [float("nan")]]})
    parquet.write_table(table, tmp_path / "odd.parquet")
    result = run(client, "publish", "orders", str(tmp_path / "odd.parquet"))
    assert result.stderr.splitlines()[:3] == [
        "record 1: PAYLOAD_MALFORMED: column x: nan is no number of JSON",
        "record 2: PAYLOAD_MALFORMED: column x: inf is no number of JSON",
        "record 3: PAYLOAD_MALFORMED: column y: nan is no number of JSON",
    ]
    assert stored(client) == {}


def test_integers_that_messagepack_does_not_have_are_bad_records(client: FakeClient, tmp_path: Path) -> None:
    """Story: a traceback, and none of the records was there."""
    client.add("packed", message_type="msgpack", key=())
    numbers = pa.array([2**64 - 1, 2**64, 10**30], pa.decimal128(38, 0))
    parquet.write_table(pa.table({"_key": ["a", "b", "c"], "n": numbers}), tmp_path / "large.parquet")
    result = run(client, "publish", "packed", str(tmp_path / "large.parquet"))
    assert result.stderr.splitlines()[:2] == [
        "record 2: PAYLOAD_MALFORMED: column n: MessagePack has no integer of more than 64 bits",
        "record 3: PAYLOAD_MALFORMED: column n: MessagePack has no integer of more than 64 bits",
    ]
    (row,) = client.tables["packed"].rows.values()
    assert msgspec.msgpack.decode(row.payload) == {"n": 2**64 - 1}


def test_a_file_that_is_no_parquet_is_wrong_usage(client: FakeClient, tmp_path: Path) -> None:
    client.add("orders")
    (tmp_path / "odd.parquet").write_text("no")
    assert run(client, "publish", "orders", str(tmp_path / "odd.parquet")).exit_code == 2


# ---- the report ----


@pytest.mark.slow
def test_twenty_thousand_bad_records_are_ten_lines_and_a_count_by_reason(client: FakeClient, tmp_path: Path) -> None:
    """Story: each bad line was a line on stderr."""
    client.add("orders")
    lines = b"".join(b'{"price":%d}\n' % number for number in range(20_000)) + b"nonsense\n" + b'{"id":1}\n'

    result = run(client, "publish", "orders", "--errors", str(tmp_path / "bad.ndjson"), stdin=lines)

    told = result.stderr.splitlines()
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in told[:10]] == [f"line {number}" for number in range(1, 11)]
    assert told[10:] == ["… 20,001 refused: 20,000 KEY_FIELD_MISSING, 1 PAYLOAD_MALFORMED"]
    (summary,) = rows(result)
    assert (summary["published"], summary["refused"]) == (1, 20_001)
    assert summary["refused_by_reason"] == {"KEY_FIELD_MISSING": 20_000, "PAYLOAD_MALFORMED": 1}
    errors = [json.loads(line) for line in (tmp_path / "bad.ndjson").read_bytes().splitlines()]
    assert len(errors) == 20_001
    assert errors[20_000] | {"message": ""} == {
        "line": 20_001, "reason": "PAYLOAD_MALFORMED", "message": "", "text": "nonsense", "column": 1,
    }  # fmt: skip

    told = run(client, "publish", "orders", stdin=lines[:300]).stderr.splitlines()
    assert told[-1].endswith("; --errors FILE writes all")


def test_of_several_files_the_bad_record_tells_which(client: FakeClient, tmp_path: Path) -> None:
    client.add("orders")
    files = [tmp_path / "a.ndjson", tmp_path / "b.ndjson"]
    for file in files:
        file.write_bytes(b'{"id":1}\n{"no":1}\n')
    result = run(client, "publish", "orders", *map(str, files), "--errors", str(tmp_path / "bad"))
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == [f"{file} line 2" for file in files]
    assert [json.loads(line)["file"] for line in (tmp_path / "bad").read_bytes().splitlines()] == list(map(str, files))
    strict = run(client, "publish", "orders", "--strict", *map(str, files))
    assert strict.stderr.splitlines()[-1] == f"stopped at {files[0]} line 2; published before it: 1 record"


# ---- conditions ----


@pytest.mark.parametrize(
    ("options", "applied"), [(["--if-absent"], ["2"]), (["--if-present"], ["1"]), (["--if-absent", "--delta"], ["2"])]
)
def test_a_condition_decides_about_each_record(client: FakeClient, options: list[str], applied: list[str]) -> None:
    """Rule P3."""
    table = client.add("orders", records=[{"id": 1}])
    before = {key: row.version for key, row in table.rows.items()}

    result = run(client, "publish", "orders", "--batch", "2", *options, stdin=b'{"id":1}\n{"no":1}\n{"id":2}\n')

    assert result.exit_code == 1
    assert [key for key, row in table.rows.items() if row.version != before.get(key)] == applied
    assert rows(result)[0]["refused_by_reason"] == {"CONDITION_FAILED": 1, "KEY_FIELD_MISSING": 1}
    assert "CONDITION_FAILED" in result.stderr


def test_a_condition_on_one_record_is_its_exit_code(client: FakeClient) -> None:
    """Rule P3."""
    client.add("orders")
    first = run(client, "publish", "orders", "--data", '{"id":1}', "--if-absent")
    version = rows(first)[0]["version"]
    assert run(client, "publish", "orders", "--data", '{"id":1}', "--if-absent").stderr.startswith(
        "sow: CONDITION_FAILED"
    )
    assert run(client, "publish", "orders", "--data", '{"id":1,"x":1}', "--if-version", str(version)).exit_code == 0
    assert run(client, "publish", "orders", "--data", '{"id":1,"x":2}', "--if-version", str(version)).exit_code == 1
    assert stored(client)["1"] == {"id": 1, "x": 1}


@pytest.mark.parametrize(
    "options",
    [
        ("--if-absent", "--if-present"),
        ("--if-version", "1"),
        ("--raw", "--as", "csv"),
        ("--data", "{}", "--as", "csv"),
        ("--key", "a", __file__, __file__),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(client: FakeClient, options: tuple[str, ...]) -> None:
    client.add("orders", key=())
    assert run(client, "publish", "orders", *options, stdin=b"{}").exit_code == 2


# ---- what broke it ----


def test_the_mark_of_windows_in_front_of_utf8_belongs_to_no_record(client: FakeClient, tmp_path: Path) -> None:
    """Story: of lines the first one was malformed, and of an array all of it."""
    client.add("orders")
    for content in (b'\xef\xbb\xbf{"id":1}\n{"id":2}\n', b'\xef\xbb\xbf[{"id":3}]', b'\xef\xbb\xbf{\n"id":4}'):
        file = tmp_path / "orders.json"
        file.write_bytes(content)
        assert run(client, "publish", "orders", str(file)).exit_code == 0
    assert list(stored(client)) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "A.CSV.GZ", "a.ndjson"])
def test_a_compressed_file_is_unpacked(client: FakeClient, tmp_path: Path, name: str) -> None:
    """Story: as CSV it was a header without rows, which is no error; later it was wrong usage."""
    client.add("orders")
    is_csv = "csv" in name.lower()
    (tmp_path / name).write_bytes(gzip.compress(b"id\n1\n" if is_csv else b'{"id":1}\n'))
    result = run(client, "publish", "orders", str(tmp_path / name), *(("--as", "csv") if name == "a.csv" else ()))
    assert result.exit_code == 0, result.output
    assert stored(client) == {"1": {"id": 1}}


def test_the_file_of_errors_is_never_the_input(client: FakeClient, tmp_path: Path) -> None:
    """Story: it was emptied before it was read."""
    client.add("orders")
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id":1}\n')
    (tmp_path / "same").symlink_to(file)
    for command in (("publish",), ("load", "--force")):
        assert run(client, *command, "orders", str(file), "--errors", str(tmp_path / "same")).exit_code == 2
    assert file.read_bytes() == b'{"id":1}\n'
    assert run(client, "publish", "orders", str(file), "--errors", str(tmp_path / "no" / "x")).exit_code == 2


def test_a_type_is_for_a_column_that_is_there(client: FakeClient) -> None:
    client.add("orders")
    assert "no column 'zp'" in published(client, "id,zip\n1,01\n", "--types", "zp=text", code=2)


@pytest.mark.parametrize("header", ["id,/a,/a/b", "id,/a/b,/a"])
def test_no_column_is_inside_the_field_of_another(client: FakeClient, header: str) -> None:
    """Story: the second order lost the cell of /a/b in silence."""
    client.add("orders")
    assert "another column" in published(client, f"{header}\n1,2,3\n", code=2)
    assert not stored(client)


def test_a_cell_brings_no_fields_of_its_own_into_fix(client: FakeClient) -> None:
    """Story: the text x, the separator and 999=evil were two fields."""
    client.add("fix", message_type="fix", key=())
    text = "_key,58\na,x\x01999=evil\nb,y\n"
    result = run(client, "publish", "fix", "--as", "csv", stdin=text.encode())
    assert (result.exit_code, "record 1: PAYLOAD_MALFORMED: column 58" in result.stderr) == (1, True)
    assert {key: row.payload for key, row in client.tables["fix"].rows.items()} == {"b": b"58=y\x01"}


def parquet_of(**columns: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue()


def test_nanoseconds_of_spark_and_pandas_are_times_as_others(client: FakeClient) -> None:
    """Story: each of their records was refused where pandas is installed, and ended the command where it is not."""
    client.add("orders")
    moments = pa.array([1_500_000_000, 1], pa.timestamp("ns", tz="UTC"))
    data = parquet_of(
        id=[1, 2], at=moments, deep=pa.array([[{"at": 1000}]] * 2, pa.list_(pa.struct([("at", moments.type)])))
    )
    assert run(client, "publish", "orders", "--as", "parquet", stdin=data).exit_code == 0
    deep = [{"at": "1970-01-01T00:00:00.000001Z"}]
    assert stored(client) == {
        "1": {"id": 1, "at": "1970-01-01T00:00:01.500000Z", "deep": deep},
        "2": {"id": 2, "at": "1970-01-01T00:00:00.000000001Z", "deep": deep},
    }, "no value is rounded"


def test_a_value_that_python_does_not_have_is_a_bad_record(client: FakeClient) -> None:
    """Story: a traceback, and none of the records."""
    client.add("orders")
    pairs = pa.array([[("a", 1), ("a", 2)], None, [("b", 1)]], pa.map_(pa.string(), pa.int64()))
    data = parquet_of(id=[1, 2, 3], at=pa.array([None, 2**62, 0], pa.timestamp("us")), map=pairs)
    result = run(client, "publish", "orders", "--as", "parquet", stdin=data)
    assert (result.exit_code, result.stderr.count("PAYLOAD_MALFORMED")) == (1, 2)
    assert stored(client) == {"3": {"id": 3, "at": "1970-01-01T00:00:00", "map": {"b": 1}}}


def test_a_file_that_is_damaged_in_the_middle_is_wrong_usage(client: FakeClient) -> None:
    client.add("orders")
    sink = io.BytesIO()
    batches = pa.table({"id": range(1000)}).to_batches(max_chunksize=100)
    with ipc.new_stream(sink, batches[0].schema) as file:
        for batch in batches:
            file.write_batch(batch)
    result = run(client, "publish", "orders", "--as", "arrow", stdin=sink.getvalue()[:4000])
    assert result.exit_code == 2
    assert "cannot read the input after record" in result.stderr


def test_a_column_of_keys_gives_the_keys_that_the_server_makes(client: FakeClient) -> None:
    """Story: a date had its quotation marks, 1.0 was another key than 1, and NaN was the key null."""
    client.add("sessions", key=())
    for keys in ([1.0, float("nan"), -0.0], [date(2030, 1, 2)], [True], [7]):
        run(client, "publish", "sessions", "--as", "parquet", stdin=parquet_of(_key=keys, x=[1] * len(keys)))
    assert list(client.tables["sessions"].rows) == ["1", "0", "2030-01-02", "true", "7"]
