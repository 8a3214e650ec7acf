"""The four formats: exact values for machines, safe and short text for people, nothing buffered whole."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result, _NamedTextIOWrapper

from sow_cli import display
from sow_cli.command import sow
from sow_cli.output import Fact, Format, Output, RecordForm
from sow_client import RecordBatch
from tests.support.fake_client import FakeClient
from tests.support.fake_results import NOW_MICROS, Row


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


def test_csv_has_the_payload_in_one_column(client: FakeClient) -> None:
    read = list(csv.DictReader(io.StringIO(run(client, "query", "orders", "--format", "csv").stdout)))

    assert list(read[0]) == [
        "topic", "key", "version", "publish_time_micros", "expire_time_micros", "origin", "sequence", "payload",
    ]  # fmt: skip
    assert [one["expire_time_micros"] for one in read] == ["1900000012300000", "", "1899999999999999"]
    assert json.loads(read[1]["payload"]) == {"id": 2, "note": 'ä,"b"'}
    assert run(client, "query", "orders", "--format", "csv", "--skip", "9").stdout.count("\n") == 1


def test_csv_quotes_values_where_necessary(client: FakeClient) -> None:
    keys = ["plain", "a,b", 'say "x"', "two\nlines", ""]
    client.add("odd").rows.update({key: Row(b"{}", 1, None, 1) for key in keys})

    read = list(csv.DictReader(io.StringIO(run(client, "query", "odd", "--format", "csv").stdout, newline="")))

    assert [one["key"] for one in read] == sorted(keys)


def test_payloads_of_other_types_are_base64(client: FakeClient) -> None:
    client.add("blobs", key=(), message_type="binary").rows["a"] = Row(b"\x00\xff", 1, None, 1)

    assert json.loads(run(client, "query", "blobs").stdout)["payload"] == "AP8="
    assert run(client, "query", "blobs", "--format", "csv").stdout.endswith(",AP8=\n")
    assert "\\x00\\xff" in run(client, "query", "blobs", "--format", "table").stdout


def test_keys_only_leaves_the_payload_out_everywhere(client: FakeClient) -> None:
    for output_format in Format:
        result = run(client, "query", "orders", "--keys-only", "--format", output_format.value)
        assert "payload" not in result.stdout
        assert result.stdout.count("1899999995000000" if output_format is not Format.TABLE else "46:35.000Z") == 3


def test_a_table_shows_time_left_and_cuts_long_payloads(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    client.tables["orders"].rows["4"] = Row(b'{"id":4,"x":"' + b"y" * 500 + b'"}', 14, None, 4)

    result = run(client, "query", "orders", "--format", "table")
    lines = result.stdout.splitlines()

    assert lines[0].split() == ["key", "expires", "published", "payload"]
    assert "in 12.3s" in lines[1]
    assert "never" in lines[2]
    assert "1µs ago" in lines[3]
    assert len(lines[4]) == 80
    assert lines[4].endswith("…")
    assert result.stderr == "4 records, as of 2030-03-17 17:46:40.000Z\n"


def test_a_table_spells_out_control_characters(client: FakeClient) -> None:
    client.tables["orders"].rows["\x1b[31mred"] = Row(b'{"id":"\x7f[bold]"}', 1, None, 1)

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


@pytest.mark.parametrize("output_format", [one.value for one in Format])
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
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # a table's own colours

    assert "x1b[2J" in text or "u001b[2J" in text
    assert ON_A_TERMINAL.findall(text) == []


def test_json_on_a_terminal_is_the_same_json(hostile: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """X7."""
    for output_format in ("ndjson", "json"):
        arguments = ("query", "hostile", "--format", output_format)
        shown = written(hostile, monkeypatch, *arguments, is_terminal=True)
        exact = written(hostile, monkeypatch, *arguments, is_terminal=False)
        assert shown != exact
        assert json.loads(shown) == json.loads(exact)


def test_a_pipe_gets_exact_bytes(hostile: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """X7."""
    text = written(hostile, monkeypatch, "query", "hostile", is_terminal=False)
    assert f'"payload":{DOCUMENT}}}' in text
    text = written(hostile, monkeypatch, "query", "hostile", "--format", "csv", is_terminal=False)
    assert next(csv.DictReader(io.StringIO(text, newline="")))["key"] == KEY


FORMULAS = ["=1+2", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", '=A1&",x"', '=HYPERLINK("http://x","y")']


def test_csv_for_spreadsheets_has_no_formulas(client: FakeClient) -> None:
    """X7. Story: a key that a stranger publishes runs as a formula where the CSV is opened."""
    keys = [*FORMULAS, "plain", "1=1", "", "'quoted"]
    client.add("odd").rows.update({key: Row(b"-5", 1, None, 1) for key in keys})

    def read(*options: str) -> list[dict[str, str]]:
        text = run(client, "query", "odd", "--format", "csv", *options).stdout_bytes.decode()
        return list(csv.DictReader(io.StringIO(text, newline="")))

    expected = {key: f"'{key}" if key in FORMULAS else key for key in keys}
    assert {one["key"] for one in read("--csv-safe")} == set(expected.values())
    assert {one["payload"] for one in read("--csv-safe")} == {"'-5"}
    assert [one["key"] for one in read()] == sorted(keys)
    assert {one["payload"] for one in read()} == {"-5"}


def test_payloads_in_base64_are_guarded_too(client: FakeClient) -> None:
    client.add("blobs", key=(), message_type="binary").rows["a"] = Row(b"\xf8\x00", 1, None, 1)
    assert run(client, "query", "blobs", "--format", "csv").stdout.endswith(",+AA=\n")
    assert run(client, "query", "blobs", "--format", "csv", "--csv-safe").stdout.endswith(",'+AA=\n")


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

    Output(output_format).records(batches(), RecordForm("orders", payload_is_json=True), now_micros=lambda: NOW_MICROS)

    assert len(seen) == 2
    assert b"17" in seen[0] or b'"key":"2"' in seen[0] or b",2," in seen[0]
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
