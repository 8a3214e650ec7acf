"""The formats: exact values for machines, safe and short text for people, nothing buffered whole."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result, _NamedTextIOWrapper

from sow_cli import display
from sow_cli.arguments import instant
from sow_cli.command import sow
from sow_cli.output import MESSAGE_FORMATS, Fact, Format, Output
from sow_cli.rows import RecordForm
from sow_client import RecordBatch
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS, Row


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    table = client.add("orders")
    table.rows["1"] = Row(b'{"id":1,"price":9.50}', 11, NOW_MICROS + 12_300_000, 1)
    table.rows["2"] = Row('{\n  "id": 2,\r\n  "note": "ä,\\"b\\""\n}'.encode(), 12, None, 2)
    table.rows["3"] = Row(b'{"id":3}', 13, NOW_MICROS - 1, 3)
    return client


def run(client: FakeClient, *arguments: str) -> Result:
    result = CliRunner().invoke(sow, arguments, obj=lambda _session: client)
    assert result.exit_code == 0, result.output
    return result


def test_a_record_in_ndjson_has_the_documented_form(client: FakeClient) -> None:
    lines = run(client, "query", "orders").stdout.splitlines()

    # The payload has the published digits; only its line ends are removed.
    assert lines[0] == (
        '{"topic":"orders","key":"1","version":11,"publish_time_micros":1899999995000000,'
        '"expire_time_micros":1900000012300000,"origin":"fake-1","sequence":1,"payload":{"id":1,"price":9.50}}'
    )
    assert lines[1].endswith('"origin":"fake-1","sequence":2,"payload":{"id":2,"note":"ä,\\"b\\""}}')
    assert "expire_time_micros" not in lines[1]
    assert len(lines) == 3


def test_json_is_an_array_of_the_same_records(client: FakeClient) -> None:
    lines = [json.loads(line) for line in run(client, "query", "orders").stdout.splitlines()]

    assert json.loads(run(client, "query", "orders", "--format", "json").stdout) == lines
    assert json.loads(run(client, "query", "orders", "--format", "json", "--skip", "9").stdout) == []
    assert json.loads(run(client, "get", "orders", "1", "--format", "json").stdout) == lines[0]
    assert json.loads(run(client, "get", "orders", "1", "2", "--format", "json").stdout) == lines[:2]


def test_csv_has_a_column_for_each_field_between_the_key_and_the_other_metadata(client: FakeClient) -> None:
    client.query_batch_size = 10
    read = list(csv.DictReader(io.StringIO(run(client, "query", "orders", "--format", "csv").stdout)))

    assert list(read[0]) == [
        "_key", "id", "price", "note",
        "_version", "_publish_time_micros", "_expire_time_micros", "_origin", "_sequence",
    ]  # fmt: skip
    assert [one["_expire_time_micros"] for one in read] == ["1900000012300000", "", "1899999999999999"]
    assert [(one["id"], one["price"], one["note"]) for one in read] == [
        ("1", "9.50", ""),
        ("2", "", 'ä,"b"'),
        ("3", "", ""),
    ]
    assert run(client, "query", "orders", "--format", "csv", "--skip", "9").stdout.count("\n") == 1


def test_csv_has_the_columns_that_were_selected_and_no_other(client: FakeClient) -> None:
    client.tables["orders"].rows["1"].payload = b'{"id":1,"at":{"bid":1.10,"x/y":[1,\n 2]},"empty":"","none":null}'

    text = run(client, "query", "orders", "--top", "1", "--format", "csv", "--select", "/at/bid,@key,/at/[x/y]").stdout
    assert text == '/at/bid,_key,/at/[x/y]\n1.10,1,"[1,2]"\n'
    assert client.arguments_of("query")["select"] == ["/at/bid", "/at/[x/y]"]

    text = run(client, "get", "orders", "1", "--format", "csv", "--select", "/empty,/none,/missing").stdout
    assert text == 'empty,none,missing\n"",,\n'
    text = run(client, "get", "orders", "1", "--format", "csv", "--select", "/none").stdout
    assert list(csv.reader(io.StringIO(text))) == [["none"], [""]]


def test_metadata_alone_needs_no_payloads(client: FakeClient) -> None:
    text = run(client, "query", "orders", "--format", "csv", "--select", "@key,@expire_time", "--top", "2").stdout
    assert text == "_key,_expire_time_micros\n1,1900000012300000\n2,\n"
    assert client.arguments_of("query")["keys_only"] is True


@pytest.mark.parametrize("wrong", ["@expires", "price", "/a//b", "/[a"])
def test_a_selected_column_that_is_none_is_wrong_usage(client: FakeClient, wrong: str) -> None:
    result = CliRunner().invoke(sow, ["query", "orders", "--select", wrong], obj=lambda _session: client)
    assert result.exit_code == 2
    assert "--select" in result.stderr


@pytest.mark.parametrize("output_format", ["csv", "table"])
def test_fields_that_only_later_records_have_are_told(client: FakeClient, output_format: str) -> None:
    """Story: the columns are those of the first records, and the others were lost without a word."""
    result = run(client, "query", "orders", "--format", output_format)
    assert "no column" not in result.stderr

    client.tables["orders"].rows["3"].payload = b'{"id":3,"late":1,"/odd":2,"_key":3}'
    result = run(client, "query", "orders", "--format", output_format)
    told = "1 record with fields that have no column: late, /[/odd], /_key; see --select"
    assert told in result.stderr.splitlines()


def test_names_of_fields_never_look_like_metadata(client: FakeClient) -> None:
    client.add("odd").rows["1"] = Row(b'{"_key":1,"@key":2,"/a/b":3,"":4,"ok":5}', 1, None, 1)
    header = run(client, "query", "odd", "--format", "csv").stdout.splitlines()[0].split(",")
    assert header[:6] == ["_key", "/_key", "/@key", "/[/a/b]", "/[]", "ok"]


def test_fields_of_every_structured_type_are_columns(client: FakeClient) -> None:
    client.add("fix", key=(), message_type="fix").rows["a"] = Row(b"35=D\x0155=IBM\x0155=X\x01", 1, None, 1)
    client.add("nv", key=(), message_type="nvfix", fix_separator=";").rows["a"] = Row(b"sym=IBM;px=1.50;", 1, None, 1)
    packed = msgspec.msgpack.encode({"a": 1, "b": {"c": [1, None]}, "d": "x"})
    client.add("packed", key=(), message_type="msgpack").rows["a"] = Row(packed, 1, None, 1)

    def first(topic: str) -> list[tuple[str, str]]:
        (read,) = csv.DictReader(io.StringIO(run(client, "query", topic, "--format", "csv").stdout))
        return [(name, value) for name, value in read.items() if not name.startswith("_")]

    assert first("fix") == [("35", "D"), ("55", "IBM")]
    assert first("nv") == [("sym", "IBM"), ("px", "1.50")]
    assert first("packed") == [("a", "1"), ("b", '{"c":[1,null]}'), ("d", "x")]


# --- raw -------------------------------------------------------------------------------------------------------------


PNG = b"\x89PNG\r\n\x1a\n\x00\xff"


def test_raw_writes_the_bytes_of_a_record_and_nothing_more(client: FakeClient) -> None:
    client.add("images", key=(), message_type="binary").rows["logo"] = Row(PNG, 1, None, 1)

    assert run(client, "get", "images", "logo", "--raw").stdout_bytes == PNG
    assert run(client, "get", "images", "logo", "--format", "raw").stdout_bytes == PNG
    assert ("describe_topic", {"name": "images"}) not in client.calls, "bytes as they are need no settings"


def test_raw_writes_a_line_for_each_of_several_records(client: FakeClient) -> None:
    together = b'{"id":1,"price":9.50}\n{"id":3}\n'
    assert run(client, "get", "orders", "1", "3", "--raw").stdout_bytes == together
    assert run(client, "query", "orders", "--keys", "1,3", "--format", "raw").stdout_bytes == together
    assert run(client, "query", "orders", "--keys-only", "--format", "raw").stdout == "1\n2\n3\n"
    followed = run(client, "subscribe", "orders", "--sow", "--count", "1", "--format", "raw")
    assert followed.stdout_bytes == b'{"id":1,"price":9.50}\n'


def test_fix_is_shown_with_another_separator_on_request(client: FakeClient) -> None:
    client.add("fix", key=(), message_type="fix").rows["a"] = Row(b"35=D\x0155=IBM\x01", 1, None, 1)
    assert run(client, "get", "fix", "a", "--raw", "--soh", "|").stdout == "35=D|55=IBM|"
    shown = run(client, "get", "fix", "a", "--format", "table", "--soh", "|").stdout
    assert "payload    35=D|55=IBM|" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "orders", "1", "--raw", "--format", "csv"),
        ("get", "orders", "1", "--soh", "|"),
        ("query", "orders", "--count", "--format", "raw"),
        ("query", "orders", "--explain", "--format", "raw"),
        ("topics", "--format", "raw"),
    ],
)
def test_raw_is_for_records_alone(client: FakeClient, arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(sow, arguments, obj=lambda _session: client).exit_code == 2


# --- quoting ---------------------------------------------------------------------------------------------------------


def test_csv_quotes_values_where_necessary(client: FakeClient) -> None:
    keys = ["plain", "a,b", 'say "x"', "two\nlines", ""]
    client.add("odd").rows.update({key: Row(b"{}", 1, None, 1) for key in keys})

    read = list(csv.DictReader(io.StringIO(run(client, "query", "odd", "--format", "csv").stdout, newline="")))

    assert [one["_key"] for one in read] == sorted(keys)


def test_payloads_of_other_types_are_base64(client: FakeClient) -> None:
    client.add("blobs", key=(), message_type="binary").rows["a"] = Row(b"\x00\xff", 1, None, 1)

    assert json.loads(run(client, "query", "blobs").stdout)["payload"] == "AP8="
    assert run(client, "query", "blobs", "--format", "csv").stdout.splitlines()[1].startswith("a,AP8=,1,")
    assert "\\x00\\xff" in run(client, "query", "blobs", "--format", "table").stdout


def test_keys_only_leaves_the_payload_out_everywhere(client: FakeClient) -> None:
    for output_format in MESSAGE_FORMATS:
        result = run(client, "query", "orders", "--keys-only", "--format", output_format.value)
        assert "payload" not in result.stdout
        if output_format is not Format.RAW:
            assert result.stdout.count("1899999995000000" if output_format is not Format.TABLE else "46:35.000Z") == 3


def test_a_table_has_the_key_the_time_left_and_the_fields(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    client.query_batch_size = 10
    client.tables["orders"].rows["4"] = Row(b'{"id":40,"note":"' + b"y" * 500 + b'"}', 14, None, 4)

    result = run(client, "query", "orders", "--format", "table")
    lines = result.stdout.splitlines()

    assert lines[0].split() == ["key", "expires", "id", "price", "note"]
    assert lines[1] == "  1  in 12.3s   1   9.50"
    assert lines[2] == '  2  never      2         ä,"b"'
    assert lines[3] == "  3  1µs ago    3"
    assert len(lines[4]) == 80
    assert lines[4].endswith("…")
    assert result.stderr == "4 records, as of 2030-03-17T17:46:40.000Z\n"


def test_a_table_names_the_columns_that_have_no_room(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    document = {"id": 1, **{f"field_{number}": "x" * 12 for number in range(4)}}
    client.add("wide", records=[document])

    result = run(client, "query", "wide", "--format", "table")

    assert result.stdout.splitlines()[0].split() == ["key", "expires", "id", "field_0", "field_1"]
    assert max(map(len, result.stdout.splitlines())) <= 50
    assert result.stderr.splitlines()[0] == "2 more columns: field_2, field_3; see --select, or --format ndjson"


def test_a_table_shows_the_selected_columns_behind_the_key(client: FakeClient) -> None:
    text = run(
        client, "query", "orders", "--format", "table", "--top", "1", "--select", "/price,@publish_time,@sequence"
    )
    assert [line.split() for line in text.stdout.splitlines()] == [
        ["key", "price", "publish_time", "sequence"],
        ["1", "9.50", "17:46:35.000Z", "1"],
    ]


def test_payloads_without_fields_are_one_column_of_a_table(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    client.add("lists", key=()).rows.update({"a": Row(b"[1,\n2]", 1, None, 1), "b": Row(b'"' + b"y" * 500, 1, None, 1)})

    lines = run(client, "query", "lists", "--format", "table").stdout.splitlines()

    assert lines[0].split() == ["key", "expires", "published", "payload"]
    assert lines[1].endswith("17:46:35.000Z  [1,2]")
    assert len(lines[2]) == 80


def test_a_table_spells_out_control_characters(client: FakeClient) -> None:
    client.tables["orders"].rows["\x1b[31mred"] = Row(b'{"id":"\x7f[bold]"}', 1, None, 1)

    client.query_batch_size = 10
    table = run(client, "query", "orders", "--format", "table").stdout

    assert "\x1b" not in table
    assert "\\x1b[31mred" in table
    assert "\\x7f[bold]" in table


# --- terminals and spreadsheets --------------------------------------------------------------------------------------


DOCUMENT = '{"id":"\x7f\x9b31m\u202e","tab":\t1}'
KEY = "k\x1b[2J\x9d\r\u202e"
ON_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that no terminal may get."""


@pytest.fixture
def hostile(client: FakeClient) -> FakeClient:
    """A client with a topic whose key and document would act upon a terminal."""
    client.add("hostile").rows[KEY] = Row(DOCUMENT.encode(), 1, None, 1)
    return client


def written(client: FakeClient, monkeypatch: pytest.MonkeyPatch, *arguments: str, is_terminal: bool) -> str:
    """The output of a command to stdout, which claims to be a terminal or not."""
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: is_terminal, raising=False)
    return run(client, *arguments).stdout_bytes.decode()


@pytest.mark.parametrize("output_format", [one.value for one in MESSAGE_FORMATS])
@pytest.mark.parametrize(
    "command",
    [("query", "hostile"), ("get", "hostile", KEY), ("subscribe", "hostile", "--sow", "--count", "1")],
    ids=["query", "get", "subscribe"],
)
def test_no_control_character_of_the_data_reaches_a_terminal(
    hostile: FakeClient, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], output_format: str
) -> None:
    """X7."""
    text = written(hostile, monkeypatch, *command, "--format", output_format, is_terminal=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # our own colours

    assert "x1b[2J" in text or "u001b[2J" in text or (output_format == "raw" and "u009b31m" in text)
    assert ON_A_TERMINAL.findall(text) == []


@pytest.mark.parametrize("output_format", ["parquet", "arrow"])
def test_binary_formats_are_not_for_a_terminal(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, output_format: str
) -> None:
    """X7."""
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    arguments = ["query", "orders", "--format", output_format]
    result = CliRunner().invoke(sow, arguments, obj=lambda _session: client)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not for a terminal" in result.stderr


def test_json_on_a_terminal_is_the_same_json(hostile: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """X7."""
    for output_format in ("ndjson", "json"):
        arguments = ("query", "hostile", "--format", output_format)
        shown = written(hostile, monkeypatch, *arguments, is_terminal=True)
        exact = written(hostile, monkeypatch, *arguments, is_terminal=False)
        assert shown != exact
        assert json.loads(re.sub(r"\x1b\[[0-9;]*m", "", shown)) == json.loads(exact)


def test_a_pipe_gets_exact_bytes(hostile: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """X7."""
    text = written(hostile, monkeypatch, "query", "hostile", is_terminal=False)
    assert f'"payload":{DOCUMENT}}}' in text
    text = written(hostile, monkeypatch, "query", "hostile", "--format", "csv", is_terminal=False)
    assert next(csv.DictReader(io.StringIO(text, newline="")))["_key"] == KEY


FORMULAS = ["=1+2", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", '=A1&",x"', '=HYPERLINK("http://x","y")']


def test_csv_for_spreadsheets_has_no_formulas(client: FakeClient) -> None:
    """X7. Story: a key that a stranger publishes runs as a formula where the CSV is opened."""
    keys = [*FORMULAS, "plain", "1=1", "", "'quoted"]
    client.add("odd").rows.update({key: Row(b"-5", 1, None, 1) for key in keys})

    def read(*options: str) -> list[dict[str, str]]:
        text = run(client, "query", "odd", "--format", "csv", *options).stdout_bytes.decode()
        return list(csv.DictReader(io.StringIO(text, newline="")))

    expected = {key: f"'{key}" if key in FORMULAS else key for key in keys}
    assert {one["_key"] for one in read("--csv-safe")} == set(expected.values())
    assert {one["_payload"] for one in read("--csv-safe")} == {"'-5"}
    assert [one["_key"] for one in read()] == sorted(keys)
    assert {one["_payload"] for one in read()} == {"-5"}


def test_payloads_in_base64_are_guarded_too(client: FakeClient) -> None:
    client.add("blobs", key=(), message_type="binary").rows["a"] = Row(b"\xf8\x00", 1, None, 1)
    assert run(client, "query", "blobs", "--format", "csv").stdout.splitlines()[1].startswith("a,+AA=,")
    assert run(client, "query", "blobs", "--format", "csv", "--csv-safe").stdout.splitlines()[1].startswith("a,'+AA=,")


def test_messages_and_results_are_guarded_and_numbers_stay_numbers(client: FakeClient) -> None:
    client.add("odd").rows["=1"] = Row(b"{}", -7, None, 1)
    text = run(client, "subscribe", "odd", "--sow", "--count", "1", "--format", "csv", "--csv-safe").stdout
    (message,) = csv.DictReader(io.StringIO(text))
    assert (message["key"], message["version"]) == ("'=1", "-7")

    for options, expected in ((("--csv-safe",), "'=name"), ((), "=name")):
        buffer = io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stdout(buffer):
            output = Output(Format.CSV, csv_safe=bool(options))
            output.one([Fact("name", "=name", ""), Fact("lag", -1, "")])
            output.many([[Fact("name", "=name", ""), Fact("lag", -1, "")]], names=["name", "lag"], nothing="")
        assert buffer.buffer.getvalue().decode() == f"name,lag\n{expected},-1\n" * 2


@pytest.mark.parametrize("options", [(), ("--format", "ndjson"), ("--format", "table")])
def test_the_guard_is_for_csv_alone(client: FakeClient, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(sow, ["query", "orders", "--csv-safe", *options], obj=lambda _session: client)
    assert result.exit_code == 2
    assert "--csv-safe is for --format csv" in result.stderr


def test_an_empty_table_says_so(client: FakeClient) -> None:
    assert run(client, "query", "orders", "--skip", "9", "--format", "table").stdout == "no records\n"


@pytest.mark.parametrize("output_format", [Format.NDJSON, Format.CSV, Format.JSON, Format.TABLE])
def test_each_batch_is_written_before_the_next_is_asked_for(
    client: FakeClient, output_format: Format, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    seen: list[bytes] = []

    def batches() -> Iterator[RecordBatch]:
        for batch in client.query("orders").batches():
            yield batch
            seen.append(capsysbinary.readouterr().out)

    Output(output_format).records(batches(), RecordForm("orders", message_type="json"), now_micros=lambda: NOW_MICROS)

    assert len(seen) == 2
    assert b'"key":"2"' in seen[0] or b"2," in seen[0] or b"2  never" in seen[0]
    assert all(seen)


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0µs"),
        (999, "999µs"),
        (1_500, "1.5ms"),
        (850_000, "850ms"),
        (999_600, "1s"),
        (12_345_678, "12.3s"),
        (59_960_000, "1m00s"),
        (245_000_000, "4m05s"),
        (12_000_000_000, "3h20m"),
        (2 * 86_400_000_000 + 4 * 3_600_000_000, "2d4h"),
    ],
)
def test_lengths_of_time_are_short(micros: int, text: str) -> None:
    assert display.duration(micros) == text


def test_times_beyond_the_calendar_are_shown_as_numbers() -> None:
    assert display.instant(2**62) == f"{2**62}µs"


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_have_binary_units(byte_count: int, text: str) -> None:
    assert display.size(byte_count) == text


# --- one form of times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("accept-clock",),
        ("topics",),
        ("topic", "describe", "orders"),
        ("durable", "list"),
        ("replication", "status"),
        ("get", "orders", "1"),
        ("publish", "orders", "--data", '{"id":9}', "--ttl", "1h"),
        ("touch", "orders", "1", "--ttl", "1h"),
    ],
    ids=" ".join,
)
def test_machine_formats_have_times_as_micros_and_no_texts_of_them(
    client: FakeClient, arguments: tuple[str, ...]
) -> None:
    """Story: JSON had ISO 8601 here and microseconds there."""
    client.keep("orders", "billing")
    text = run(client, *arguments, "--format", "json").stdout

    assert re.findall(r"\d{4}-\d\d-\d\d[T ]", text) == []
    numbers = re.findall(r'"(\w+)": *\d{15,}', text)
    assert [name for name in numbers if not name.endswith("_micros") and name not in ("version", "sequence")] == []
    assert re.findall(r"\dh0m|m0s", text) == []


@pytest.mark.parametrize(
    "arguments", [("status",), ("get", "orders", "1"), ("durable", "describe", "orders", "billing")]
)
def test_tables_have_times_as_options_take_them(client: FakeClient, arguments: tuple[str, ...]) -> None:
    client.keep("orders", "billing")
    text = run(client, *arguments, "--format", "table").stdout
    times = re.findall(r"20\d\d-\S+", text)
    assert times
    assert all(instant(time) for time in times)


def test_raw_counts_also_where_the_user_has_another_default(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOW_FORMAT", "json")
    assert run(client, "get", "orders", "3", "--raw").stdout == '{"id":3}'
