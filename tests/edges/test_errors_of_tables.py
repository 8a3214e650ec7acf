"""`--errors` of CSV, Parquet and Arrow: a refused row is kept, mended, and published with the meaning it had."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc, parquet

from sow_cli.command import sow
from sow_client import Client
from tests.support.servers.server import ServerProcess

STAMP = 1_893_456_000_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("tables")) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def run(server: ServerProcess, *arguments: object) -> Result:
    return CliRunner().invoke(sow, ["--server", server.address, *map(str, arguments)])


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mended(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def records(client: Client, topic: str) -> list[tuple[str, bytes, int | None]]:
    return [(one.key, one.payload, one.expire_time_micros) for one in client.query(topic)]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_row_with_an_edited_payload_column_is_kept_and_mended(
    server: ServerProcess, client: Client, tmp_path: Path, suffix: str
) -> None:
    """Only its place and the reason were in the file."""
    topic = f"edited-{suffix}"
    client.create_topic(topic, expiration="enabled")
    client.publish(topic, b'{"a":"1","b":null}', key="k", expire_at=STAMP)
    client.publish(topic, b'{"a":2}', key="l")
    before = records(client, topic)
    file = tmp_path / f"a.{suffix}"
    run(server, "export", topic, file)
    if suffix == "csv":
        file.write_text(file.read_text().replace('k,"1"', 'k,"7"'))
    else:
        table = parquet.read_table(file)
        parquet.write_table(table.set_column(1, "a", pa.array(["7", "2"])), file)
    client.sow_delete(topic, all=True)

    done = run(server, "publish", topic, file, "--errors", tmp_path / "bad.ndjson")

    assert done.exit_code == 1
    (line,) = told(tmp_path / "bad.ndjson")
    assert (line["record"], line["reason"]) == (1, "PAYLOAD_MALFORMED")
    assert {name: line["row"][name] for name in ("_key", "a", "b", "_payload")} == {
        "_key": "k",
        "a": "7",
        "b": None,
        "_payload": '{"a":"1","b":null}',
    }
    again = run(server, "publish", topic, tmp_path / "bad.ndjson")
    assert (again.exit_code, "column a: it is another value" in again.stderr) == (1, True), "the fault is still there"
    line["row"]["a"] = "1"
    assert run(server, "publish", topic, mended(tmp_path / "mended.ndjson", [line])).exit_code == 0
    assert records(client, topic) == before
    line["row"] |= {"a": "7", "_payload": None}
    assert run(server, "publish", topic, mended(tmp_path / "columns.ndjson", [line])).exit_code == 0
    assert records(client, topic)[0] == ("k", b'{"a":"7"}', STAMP)


CSV = b'''id;name;price;ok;zip
1;one;9.50;true;01234
2;"two;""2""";x9;TRUE;01234
3;three;1
4;"four"4;1;true;0
5;M\xfcller;1;true;0
'''


def test_cells_of_csv_are_kept_and_mended_with_the_types_of_their_columns(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("cells", key=["/id"])
    (tmp_path / "a.csv").write_bytes(CSV)
    bad = tmp_path / "bad.ndjson"
    types = ("--types", "id=int,price=number,ok=bool,zip=text")

    done = run(server, "publish", "cells", tmp_path / "a.csv", *types, "--errors", bad)

    assert done.exit_code == 1
    two, three, four, five = told(bad)
    assert [one["record"] for one in (two, three, four, five)] == [2, 3, 4, 5]
    assert two["row"] == {"id": 2, "name": 'two;"2"', "price": "x9", "ok": "TRUE", "zip": "01234"}
    assert two["types"] == {"price": "number", "ok": "bool"}
    assert (three["row"], three["delimiter"]) == ("3;three;1", ";")
    assert (three["columns"], four["row"]) == (["id", "name", "price", "ok", "zip"], '4;"four"4;1;true;0')
    assert five["types"] == {"name": "base64"}

    assert run(server, "publish", "cells", bad, "--errors", tmp_path / "twice.ndjson").exit_code == 1
    strip = ("line", "record", "message")
    assert [{name: one[name] for name in one if name not in strip} for one in told(tmp_path / "twice.ndjson")] == [
        {name: one[name] for name in one if name not in strip} for one in told(bad)
    ], "each is refused again, and kept as it was"

    two["row"] |= {"price": "9.75", "ok": True}
    three["row"] += ";false;02345"
    four["row"] = '4;"four;4";;true;0'
    five["row"]["name"] = "Müller"
    del five["types"]
    again = run(server, "publish", "cells", mended(bad, [two, three, four, five]))

    assert again.exit_code == 0, again.output
    assert [one.payload.decode() for one in client.query("cells")] == [
        '{"id":1,"name":"one","price":9.50,"ok":true,"zip":"01234"}',
        '{"id":2,"name":"two;\\"2\\"","price":9.75,"ok":true,"zip":"01234"}',
        '{"id":3,"name":"three","price":1,"ok":false,"zip":"02345"}',
        '{"id":4,"name":"four;4","ok":true,"zip":"0"}',
        '{"id":5,"name":"Müller","price":1,"ok":true,"zip":"0"}',
    ]


def test_values_that_json_lacks_are_kept_and_mended(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    client.create_topic("lacks", key=["/id"])
    table = pa.table(
        {
            "id": [1, 2, 3],
            "x": [float("nan"), 1.0, 2.0],
            "at": pa.array([0, 2**62, 0], pa.timestamp("us")),
            "m": pa.array([None, None, [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
        }
    )
    with ipc.new_file(tmp_path / "a.feather", table.schema) as writer:
        writer.write_table(table)
    bad = tmp_path / "bad.ndjson"
    assert run(server, "publish", "lacks", tmp_path / "a.feather", "--errors", bad).exit_code == 1
    lines = told(bad)
    assert [one["types"] for one in lines] == [{"x": "number"}, {"at": "time"}, {"m": "json"}]
    assert lines[0]["row"]["x"] == "nan"
    again = run(server, "publish", "lacks", bad)
    assert (again.exit_code, json.loads(again.stdout)["refused"]) == (1, 3)
    lines[0]["row"]["x"] = None
    lines[1]["row"]["at"] = "9999-12-31T00:00:00"
    lines[2]["row"]["m"] = {"a": 2}
    assert run(server, "publish", "lacks", mended(bad, lines)).exit_code == 0
    assert [json.loads(one.payload) for one in client.query("lacks")] == [
        {"id": 1, "at": "1970-01-01T00:00:00"},
        {"id": 2, "x": 1.0, "at": "9999-12-31T00:00:00"},
        {"id": 3, "x": 2.0, "at": "1970-01-01T00:00:00", "m": {"a": 2}},
    ]


def test_a_lifetime_of_the_command_is_that_of_a_mended_row(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """The row has an expire time of its own, which the options of the first run did not let count."""
    client.create_topic("lived", expiration="enabled")
    (tmp_path / "a.csv").write_text(f"_key,n,_expire_time_micros\na,1,{STAMP}\nb,x,{STAMP}\n")
    bad = tmp_path / "bad.ndjson"
    given = ("--types", "n=number", "--ttl", "never")
    assert run(server, "publish", "lived", tmp_path / "a.csv", *given, "--errors", bad).exit_code == 1
    (line,) = told(bad)
    line["row"]["n"] = 2
    for options in ((), ("--records",)):
        assert run(server, "publish", "lived", mended(bad, [line]), "--ttl", "never", *options).exit_code == 0
        assert records(client, "lived") == [("a", b'{"n":1}', None), ("b", b'{"n":2}', None)]


def test_documents_without_their_key_field_are_mended_with_it(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("fielded")
    (tmp_path / "a.ndjson").write_text('{"k":"a"}\n{"kk":"b"}\n')
    (tmp_path / "a.csv").write_text("k,n\nc,1\n,2\n")
    bad = tmp_path / "bad.ndjson"
    for name, old, new in (("a.ndjson", "kk", "k"), ("a.csv", '"k":null', '"k":"d"')):
        given = ("--key-field", "k", "--errors", bad)
        assert run(server, "publish", "fielded", tmp_path / name, *given).exit_code == 1
        bad.write_text(bad.read_text().replace(old, new))
        assert run(server, "publish", "fielded", bad, "--key-field", "k").exit_code == 0
    assert [one.key for one in client.query("fielded")] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("payload", "cell"), [('{""a"":""1"",""b"":null}', "1"), ('{""a"":true,""b"":null}', "1")])
def test_a_number_beside_another_value_of_payload_is_refused(
    server: ServerProcess, client: Client, tmp_path: Path, payload: str, cell: str
) -> None:
    """A number beside a text that looks alike was taken for the same, and somebody's change was lost."""
    (tmp_path / "a.csv").write_text(f'_key,a,b,_payload,_version\nk,{cell},,"{payload}",17\n')
    done = run(server, "publish", "beside", tmp_path / "a.csv")
    assert done.exit_code == 1
    assert "record 1: PAYLOAD_MALFORMED: column a: it is another value than in the record" in done.stderr


def test_a_text_beside_a_number_of_payload_is_what_an_export_writes(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("mixed", b'{"a":1}', key="k")
    client.publish("mixed", b'{"a":"1"}', key="l")
    before = records(client, "mixed")
    for suffix in ("parquet", "csv"):
        run(server, "export", "mixed", tmp_path / f"a.{suffix}")
        assert run(server, "publish", "mixed", tmp_path / f"a.{suffix}").exit_code == 0
        assert records(client, "mixed") == before


def test_a_key_that_the_client_does_not_send_is_a_bad_record(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """It ended the whole run."""
    client.create_topic("keys")
    (tmp_path / "a.csv").write_bytes(b"_key,n\na,1\n\xff,2\n" + b"k" * 600_000 + b",3\nb,4\n")
    done = run(server, "publish", "keys", tmp_path / "a.csv", "--errors", tmp_path / "bad.ndjson")
    assert done.exit_code == 1
    assert [one["reason"] for one in told(tmp_path / "bad.ndjson")] == ["PAYLOAD_MALFORMED", "KEY_TOO_LARGE"]
    assert [one.key for one in client.query("keys")] == ["a", "b"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_of_errors_is_compressed_by_its_name(
    server: ServerProcess, client: Client, tmp_path: Path, suffix: str
) -> None:
    client.create_topic(f"packed-{suffix}", key=["/id"])
    (tmp_path / "a.ndjson").write_text('{"id":1}\n{"no":2}\n')
    bad = tmp_path / f"bad.ndjson.{suffix}"
    assert run(server, "publish", f"packed-{suffix}", tmp_path / "a.ndjson", "--errors", bad).exit_code == 1
    if suffix == "gz":
        line = json.loads(gzip.decompress(bad.read_bytes()))
        assert line["payload"] == {"no": 2}
    again = run(server, "publish", f"packed-{suffix}", bad)
    assert (again.exit_code, "line 1: KEY_FIELD_MISSING" in again.stderr) == (1, True)
    (tmp_path / "b.ndjson").write_text('{"id":1}\n')
    assert run(server, "publish", f"packed-{suffix}", tmp_path / "b.ndjson", "--errors", bad).exit_code == 0
    empty = run(server, "publish", f"packed-{suffix}", bad)
    assert (empty.exit_code, json.loads(empty.stdout)["published"]) == (0, 0), "whole, and without a record"


def test_records_that_a_load_refuses_at_the_server_are_kept(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    """Only their places were in the file."""
    client.create_topic("loaded", key=["/id"])
    some = [{"id" if number % 700 else "no": number} for number in range(1, 12_001)]
    (tmp_path / "a.ndjson").write_text("".join(json.dumps(one) + "\n" for one in some))
    bad = tmp_path / "bad.ndjson"
    options = ("--force", "--skip-bad", "--errors", bad)
    loaded = run(server, "load", "loaded", tmp_path / "a.ndjson", *options)
    assert loaded.exit_code == 1
    # Loaded, the mended file would be the whole content of the topic.
    assert f"publish loaded {bad}; another load would remove all other records" in loaded.stderr
    assert [(one["line"], one["payload"]) for one in told(bad)] == [(n, {"no": n}) for n in range(700, 12_001, 700)]
    bad.write_text(bad.read_text().replace('"no"', '"id"'))
    assert run(server, "publish", "loaded", bad).exit_code == 0
    assert client.count("loaded") == 12_000


def test_names_of_columns_that_are_no_utf8_are_wrong_usage(server: ServerProcess, tmp_path: Path) -> None:
    """Story: `--errors` ended with a traceback at the first record of a CSV from Excel whose column was `Größe`."""
    (tmp_path / "a.csv").write_bytes("id;Größe\n1;2\n".encode("cp1252"))
    done = run(server, "publish", "sizes", tmp_path / "a.csv", "--errors", tmp_path / "bad.ndjson")
    assert (done.exit_code, "names of the columns, is no UTF-8; see --encoding" in done.stderr) == (2, True)
    assert (
        run(server, "publish", "sizes", tmp_path / "a.csv", "--encoding", "cp1252", "--key-field", "id").exit_code == 0
    )


@pytest.mark.parametrize(
    ("first", "options"),
    [('{"reason":"X","message":"y","line":1,"key":"k","payload":{"id":0}}', ()), ('{"id":"0"}', ("--key-field", "id"))],
)
def test_a_line_that_is_no_utf8_is_a_bad_record_among_records(
    server: ServerProcess, client: Client, tmp_path: Path, first: str, options: tuple[str, ...]
) -> None:
    """Story: behind lines of an export, and with --key-field, it ended the command with a traceback."""
    topic = f"bytes-{len(options)}"
    client.create_topic(topic)
    (tmp_path / "a.ndjson").write_bytes(first.encode() + b'\n{"id":"\xff","key":"\xff","payload":{}}\n')
    done = run(server, "publish", topic, tmp_path / "a.ndjson", *options, "--errors", tmp_path / "bad.ndjson")
    assert (done.exit_code, json.loads(done.stdout)["published"]) == (1, 1), done.stderr
    (line,) = told(tmp_path / "bad.ndjson")
    assert (line["reason"], set(line) >= {"base64"}) == ("PAYLOAD_MALFORMED", True)


def test_a_column_of_expire_times_has_times(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    """Story: true was taken for a number, and the line of --errors was no JSON."""
    client.create_topic("times", key=["/id"], expiration="enabled")
    table = pa.table({"id": [1, 2], "_expire_time": pa.array([True, None])})
    parquet.write_table(table, tmp_path / "a.parquet")
    bad = tmp_path / "bad.ndjson"
    assert run(server, "publish", "times", tmp_path / "a.parquet", "--errors", bad).exit_code == 1
    (line,) = told(bad)
    assert (line["reason"], line["row"]) == ("PAYLOAD_MALFORMED", {"id": 1, "_expire_time": True})
    assert run(server, "publish", "times", bad).exit_code == 1
    line["row"]["_expire_time"] = STAMP
    assert run(server, "publish", "times", mended(bad, [line])).exit_code == 0
    assert [one.expire_time_micros for one in client.query("times")] == [STAMP, None]


def test_a_return_at_the_end_of_a_row_is_still_there_the_second_time(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("returns", key=["/id"])
    (tmp_path / "a.csv").write_bytes(b"id,a\r\n1,x\r\n2,y\r\r\n")
    bad = tmp_path / "bad.ndjson"
    assert run(server, "publish", "returns", tmp_path / "a.csv", "--errors", bad).exit_code == 1
    again = run(server, "publish", "returns", bad)
    assert (again.exit_code, "carriage return" in again.stderr) == (1, True)
    (line,) = told(bad)
    line["row"] = "2,y"
    assert run(server, "publish", "returns", mended(bad, [line])).exit_code == 0


def test_a_full_disk_of_the_file_of_errors_tells_how_far_the_run_came(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    client.create_topic("full", key=["/id"])
    rows = "".join([f"{number},{number if number < 1_000 else 'x'}\n" for number in range(3_000)])
    (tmp_path / "a.csv").write_text("id,n\n" + rows)
    done = run(server, "publish", "full", tmp_path / "a.csv", "--errors", "/dev/full")
    assert done.exit_code == 1
    assert "broke off: records 1 to " in done.stderr
    assert done.stderr.endswith("sow: cannot write: No space left on device\n")
