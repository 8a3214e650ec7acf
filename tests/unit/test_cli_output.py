"""The four formats: exact values for machines, safe and short text for people, nothing buffered whole."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from sow_cli import display
from sow_cli.command import sow
from sow_cli.output import Format, Output, RecordForm
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
