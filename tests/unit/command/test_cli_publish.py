"""`sow publish`, against a fake client: its calls, its output, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sow_client import (
    Unavailable,
)
from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_publishing import FakePublisher
from tests.support.fakes.fake_results import NOW_MICROS

__all__ = ["client"]  # a fixture


def test_lines_are_published_in_order_and_summed_up(client: FakeClient) -> None:
    table = client.add("orders")

    result = run(client, "publish", "orders", "--ttl", "30s", stdin=b'{"id":1}\n{"id":2}\n{"id":1,"x":1}')

    assert result.exit_code == 0, result.output
    assert {key: row.payload for key, row in table.rows.items()} == {"1": b'{"id":1,"x":1}', "2": b'{"id":2}'}
    summary = rows(result)[0]
    assert (summary["topic"], summary["published"], summary["refused"]) == ("orders", 3, 0)
    assert client.arguments_of("publisher")["ttl"] == "30s"


def test_options_of_publish_reach_the_publisher(client: FakeClient) -> None:
    client.add("orders")

    result = run(client, "publish", "orders", "--keep-ttl", "--batch", "7", "--ttl", "never", stdin=b'{"id":1}\n')

    assert result.exit_code == 0, result.output
    assert client.arguments_of("publisher") == {
        "ttl": "never",
        "expire_at": None,
        "keep_ttl": True,
        "extend_ttl": False,
        "batch_records": 7,
    }


@pytest.mark.parametrize(
    ("arguments", "method", "keep", "extend"),
    [
        (["--ttl-mode", "extend"], "publisher", False, True),
        (["--ttl-mode", "keep"], "publisher", True, False),
        (["--ttl-mode", "reset"], "publisher", False, False),
        (["--ttl-mode", "extend", "--data", '{"id":1}'], "publish", False, True),
        (["--ttl-mode", "extend", "--delta", "--data", '{"id":1}'], "delta_publish", False, True),
    ],
)
def test_the_mode_of_lifetimes_reaches_each_way_of_publishing(
    client: FakeClient, arguments: list[str], method: str, keep: bool, extend: bool
) -> None:
    client.add("orders")

    result = run(client, "publish", "orders", "--ttl", "30s", *arguments, stdin=b'{"id":1}\n')

    assert result.exit_code == 0, result.output
    given = client.arguments_of(method)
    assert (given["keep_ttl"], given["extend_ttl"]) == (keep, extend)


def test_two_modes_of_lifetimes_are_wrong_usage(client: FakeClient) -> None:
    client.add("orders")
    result = run(client, "publish", "orders", "--keep-ttl", "--ttl-mode", "extend", stdin=b"")
    assert result.exit_code == 2


def test_bad_lines_are_reported_with_their_number_and_the_rest_goes_on(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("orders")
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id":1}\n\n{"price":2}\n   \n{"id":3}\r\nnonsense\n{"id":5}\n{"price":6}\n')

    result = run(client, "publish", "orders", str(file))

    assert result.exit_code == 1
    assert list(table.rows) == ["1", "3", "5"]
    told = [line for line in result.stderr.splitlines() if not line.startswith("  ")]
    assert result.stderr.splitlines()[2:4] == ["  nonsense", "  ^"], "the fault is shown"
    assert [line.split(":")[:2] for line in told] == [
        ["line 3", " KEY_FIELD_MISSING"],
        ["line 6", " PAYLOAD_MALFORMED"],
        ["line 8", " KEY_FIELD_MISSING"],
    ]
    assert (rows(result)[0]["published"], rows(result)[0]["refused"]) == (3, 3)


def test_lines_that_are_refused_here_do_not_shift_those_that_the_server_refuses(client: FakeClient) -> None:
    client.add("ticks", key=())

    result = run(
        client, "publish", "ticks", "--key-field", "symbol",
        stdin=b'{"symbol":"A"}\n{"no":1}\n[1]\n{"symbol":"B"}\n{"symbol":{}}\n{"symbol":null}\n{"symbol":"C"}\nx\n',
    )  # fmt: skip

    assert result.exit_code == 1
    told = [line for line in result.stderr.splitlines() if not line.startswith("  ")]
    assert [line.split(":")[:2] for line in told] == [
        ["line 2", " KEY_FIELD_MISSING"],
        ["line 3", " KEY_FIELD_MISSING"],
        ["line 5", " KEY_FIELD_NOT_SCALAR"],
        ["line 6", " KEY_FIELD_MISSING"],
        ["line 8", " PAYLOAD_MALFORMED"],
    ]
    assert list(client.tables["ticks"].rows) == ["A", "B", "C"]


def test_the_text_of_the_key_field_is_canonical(client: FakeClient) -> None:
    table = client.add("ticks", key=())
    lines = [b'{"a":{"b":1}}', b'{"a":{"b":2.0}}', b'{"a":{"b":2.5}}', b'{"a":{"b":true}}', b'{"a":{"b":"x|y"}}']

    assert run(client, "publish", "ticks", "--key-field", "/a/b", stdin=b"\n".join(lines)).exit_code == 0
    assert list(table.rows) == ["1", "2", "2.5", "true", "x|y"]


@pytest.mark.parametrize(("batch", "bad_line"), [("1000", 4), ("2", 4), ("3", 4)])
def test_strict_publishes_everything_before_the_first_bad_line_and_nothing_after(
    client: FakeClient, batch: str, bad_line: int
) -> None:
    table = client.add("orders")
    lines = b'{"id":1}\n\n{"id":2}\n{"price":3}\n{"id":4}\n{"price":5}\n'

    result = run(client, "publish", "orders", "--strict", "--batch", batch, stdin=lines)

    assert result.exit_code == 1
    assert list(table.rows) == ["1", "2"]
    assert result.stderr.startswith(f"line {bad_line}: KEY_FIELD_MISSING: ")
    assert (rows(result)[0]["published"], rows(result)[0]["refused"]) == (2, 1)
    assert client.arguments_of("publish_many")["atomic"] is True


def test_strict_finds_the_first_of_a_line_refused_by_the_server_and_one_refused_here(client: FakeClient) -> None:
    table = client.add("copy")
    lines = b'{"payload":{"id":1}}\n{"payload":{"price":2}}\n{"payload":{"id":3}}\nnonsense\n{"payload":{"id":5}}\n'

    result = run(client, "publish", "copy", "--strict", "--records", stdin=lines)

    assert result.exit_code == 1
    assert list(table.rows) == ["1"]
    assert result.stderr.splitlines()[0].startswith("line 2: KEY_FIELD_MISSING: ")


def test_strict_without_a_bad_line_publishes_all(client: FakeClient) -> None:
    table = client.add("orders")

    result = run(client, "publish", "orders", "--strict", "--batch", "2", stdin=b'{"id":1}\n{"id":2}\n{"id":3}\n')

    assert result.exit_code == 0, result.output
    assert list(table.rows) == ["1", "2", "3"]


def test_one_document_is_published_and_its_stamp_shown(client: FakeClient) -> None:
    client.add("orders", expiration="enabled")

    result = run(client, "publish", "orders", "--data", '{"id":1}', "--ttl", "30s")

    assert result.exit_code == 0, result.output
    assert rows(result)[0]["key"] == "1"
    assert rows(result)[0]["expire_time_micros"] == NOW_MICROS + 30_000_000


@pytest.mark.parametrize("options", [(), ("--strict",), ("--data", '{"id":1,"price":2}')])
def test_deltas_are_merged_into_their_records(client: FakeClient, options: tuple[str, ...]) -> None:
    """Rule P2."""
    table = client.add("orders", records=[{"id": 1, "price": 1, "note": "x", "at": {"a": 1, "b": 2}}])

    result = run(
        client, "publish", "orders", "--delta", "--unset", "/note,/at/b", *options, stdin=b'{"id":1,"price":2}\n'
    )

    assert result.exit_code == 0, result.output
    assert json.loads(table.rows["1"].payload) == {"id": 1, "price": 2, "at": {"a": 1}}


def test_one_document_that_is_refused_ends_with_1(client: FakeClient) -> None:
    client.add("orders")

    result = run(client, "publish", "orders", "--data", "{}")

    assert result.exit_code == 1
    assert result.stderr.startswith("sow: KEY_FIELD_MISSING: ")


def test_a_file_with_a_key_is_one_record_with_all_of_its_bytes(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("images", key=(), message_type="binary")
    file = tmp_path / "logo.png"
    file.write_bytes(b"\x89PNG\r\n\x00\n")

    assert run(client, "publish", "images", str(file), "--key", "logo").exit_code == 0
    assert table.rows["logo"].payload == b"\x89PNG\r\n\x00\n"


def test_lines_for_other_message_types_are_base64_unless_raw(client: FakeClient) -> None:
    table = client.add("blobs", key=(), message_type="binary")

    assert run(client, "publish", "blobs", "--key", "a", "--data", "aGk=").exit_code == 0
    assert run(client, "publish", "blobs", "--key", "b", "--data", "aGk=", "--raw").exit_code == 0
    refused = run(client, "publish", "blobs", stdin=b"not base64!\n")

    assert (table.rows["a"].payload, table.rows["b"].payload) == (b"hi", b"aGk=")
    assert refused.stderr.startswith("line 1: PAYLOAD_MALFORMED: not base64")


def test_raw_lines_keep_their_spaces(client: FakeClient) -> None:
    table = client.add("notes", key=(), message_type="fix")

    result = run(client, "publish", "notes", "--raw", "--key", "a", "--data", " 55=A ")

    assert result.exit_code == 0, result.output
    assert table.rows["a"].payload == b" 55=A "


def test_a_topic_is_copied_with_its_keys_payloads_and_expire_times(client: FakeClient) -> None:
    source = client.add("blobs", key=(), message_type="binary")
    target = client.add("copy", key=(), message_type="binary")
    run(client, "publish", "blobs", "--key", "a", "--data", "line\nend", "--raw", "--ttl", "1m")
    run(client, "publish", "blobs", "--key", "b", "--data", "", "--raw")

    lines = run(client, "query", "blobs").stdout_bytes
    result = run(client, "publish", "copy", "--records", "--ttl", "never", stdin=lines)

    assert result.exit_code == 0, result.output
    assert {key: (row.payload, row.expire_time_micros) for key, row in target.rows.items()} == {
        key: (row.payload, row.expire_time_micros) for key, row in source.rows.items()
    }


def test_a_lifetime_that_will_be_ignored_is_remarked_upon(client: FakeClient) -> None:
    client.add("orders", expiration="disabled")

    result = run(client, "publish", "orders", "--data", '{"id":1}', "--ttl", "30s")

    assert result.exit_code == 0
    assert "expiration disabled" in result.stderr
    assert rows(result)[0]["ttl_ignored"] is True


def test_records_that_are_copied_with_lifetimes_of_no_effect_are_remarked_upon(client: FakeClient) -> None:
    """L3. `--records` takes the lifetimes from the lines: only the answers tell that they have no effect."""
    client.add("orders", records=[{"id": 1}, {"id": 2}])
    client.add("copy", expiration="disabled")
    run(client, "publish", "orders", "--data", '{"id":3}', "--ttl", "30s")
    lines = run(client, "query", "orders").stdout_bytes

    for options in ([], ["--strict"]):
        result = run(client, "publish", "copy", "--records", *options, stdin=lines)

        assert result.exit_code == 0
        assert result.stderr.count("expiration disabled") == 1
        assert rows(result)[0]["ttls_ignored"] == 1


def test_a_lifetime_without_effect_is_never_shown_as_one_that_is_over(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3. A table showed "20m01s ago", and the record was there for ever."""
    monkeypatch.setenv("COLUMNS", "200")
    client.add("orders", expiration="disabled")
    published = run(client, "publish", "orders", "--data", '{"id":1}', "--ttl", "1s", "--format", "table")
    got = run(client, "get", "orders", "1", "--format", "table")
    found = run(client, "query", "orders", "--format", "table")
    touched = run(client, "touch", "orders", "1", "--ttl", "1s", "--format", "table")

    for result in (published, got, touched):
        assert "without effect: the topic has expiration disabled" in result.stdout
    assert "never (off)" in found.stdout
    for result in (published, got, found, touched):
        assert "sow topic alter orders --expiration enabled" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (Unavailable("gone", reason="UNREACHABLE"), 3)]
)
def test_breaking_off_tells_how_far_it_came(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    client.add("orders")
    monkeypatch.setattr(FakePublisher, "breaks_at", 2)
    monkeypatch.setattr(FakePublisher, "breaks_with", error)

    result = run(client, "publish", "orders", stdin=b'{"id":1}\n\n{"id":2}\n{"id":3}\n')

    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("broke off: lines 1 to 3 are published or refused\n")
