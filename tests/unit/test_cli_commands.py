"""Every command of `sow` against a fake client: its calls, its output and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from sow_client import (
    DeadlineExceeded,
    InternalError,
    PermissionDenied,
    ResourceExhausted,
    SowError,
    Unavailable,
    UnsoundRow,
)
from tests.support.fake_client import NOW_MICROS, FakeClient, FakePublisher


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def run(client: FakeClient, *arguments: str, stdin: bytes | None = None) -> Result:
    """Runs one command line as a script would: nothing is a terminal."""
    return CliRunner().invoke(sow, arguments, input=stdin, obj=lambda _session: client)


def rows(result: Result) -> list[dict[str, object]]:
    """The NDJSON that a command wrote."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        yield (*path, name)


# ---- usage, help, connecting ----


@pytest.mark.parametrize("path", list(commands(sow)), ids=" ".join)
def test_every_command_explains_itself_with_an_example_and_is_documented(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(sow, [*path, "--help"])

    assert result.exit_code == 0
    if len(path) > 1 or path[0] not in ("topic", "durable", "policy", "retention", "quota", "replication"):
        assert f"sow {' '.join(path)}" in result.stdout.split("Options:")[0]
        assert "--format" in result.stdout
        documentation = Path(__file__).parents[2] / "docs" / "cli.md"
        assert f"sow {' '.join(path)}" in documentation.read_text()


def test_help_needs_no_server() -> None:
    def connect(_session: object) -> FakeClient:
        pytest.fail("--help must not connect")

    assert CliRunner().invoke(sow, ["query", "--help"], obj=connect).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tls-cert", __file__, "topics"),
        ("--tls-ca", "/no/such/file", "topics"),
        ("no-such-command",),
        ("publish",),
        ("publish", "orders", "/no/such/file"),
        ("publish", "orders", "--data", "{}", "--ttl", "30"),
        ("publish", "orders", "--data", "{}", "--ttl", "-1s"),
        ("publish", "orders", "--data", "{}", "--expire-at", "tomorrow"),
        ("publish", "orders", "--data", "{}", "--expire-at", "2030-01-31T12:00:00"),
        ("publish", "orders", "--data", "{}", "--ttl", "1s", "--expire-at", "2030-01-31T12:00:00Z"),
        ("publish", "orders", __file__, "--data", "{}"),
        ("publish", "orders", "--key", "a", "--key-field", "id"),
        ("publish", "orders", "--key-field", "/a//b"),
        ("publish", "orders", "--batch", "0"),
        ("publish", "orders", "--key", "\udcff", "--data", "{}"),
        ("get", "orders"),
        ("query", "orders", "--top", "0"),
        ("query", "orders", "--select", "/a", "--exclude", "/b"),
        ("query", "orders", "--select", "/a", "--keys-only"),
        ("query", "orders", "--keys", "a,,b"),
        ("query", "orders", "--format", "xml"),
        ("query", "orders", "--explain", "--count"),
        ("query", "orders", "--count", "--select", "/a"),  # refused by the server, and only together with --top
        ("query", "orders", "--count", "--exclude", "/a"),
        ("query", "orders", "--count", "--keys-only"),
        ("query", "orders", "--count", "--order-by", "/a"),
        ("publish", "orders", "--unset", "/a", "--data", "{}"),
        ("publish", "orders", "--delta", "--unset", "/a,,/b", "--data", "{}"),
        ("delete", "orders"),
        ("delete", "orders", "--key", "1", "--all"),
        ("delete", "orders", "--key", "1", "--filter", "true"),
        ("delete", "orders", "--all"),  # nobody to ask
        ("topic", "delete", "orders"),
        ("topic", "alter", "orders"),
        ("topic", "create", "orders", "--expiration", "sometimes"),
        ("topic", "create", "orders", "--retain-bytes", "10 parsecs"),
        ("topic", "create", "orders", "--fix-separator", "ab"),
        ("topic", "alter", "orders", "--index", "symbol"),
        ("topic", "alter", "orders", "--index", "none", "--index", "/symbol"),
        ("topic", "restamp", "orders"),
        ("topic", "restamp", "orders", "--set", "1s", "--clear"),
        ("topic", "restamp", "orders", "--cap", "never"),
        ("touch", "orders", "1", "--ttl", "1s", "--expire-at", "2030-01-31T12:00:00Z"),
    ],
)
def test_wrong_usage_ends_with_2_and_asks_the_server_nothing(client: FakeClient, arguments: tuple[str, ...]) -> None:
    result = run(client, *arguments)

    assert result.exit_code == 2, result.output
    assert "Error:" in result.stderr
    assert result.stdout == ""
    assert [name for name, _ in client.calls if name not in ("close", "describe_topic")] == []


def test_a_bad_address_is_wrong_usage() -> None:
    result = CliRunner().invoke(sow, ["--server", "localhost:notaport", "topics"])

    assert result.exit_code == 2
    assert "localhost:notaport" in result.stderr


def test_a_server_that_is_not_there_ends_with_3_within_seconds() -> None:
    # Port 1 of the loopback address: refused at once, so this waits only as long as the command goes on trying.
    result = CliRunner().invoke(sow, ["topics"], env={"SOW_SERVER": "127.0.0.1:1"})

    assert result.exit_code == 3
    assert "UNREACHABLE" in result.stderr
    assert "127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("cannot connect", reason="UNREACHABLE"), 3),
        (Unavailable("cut", reason="STREAM_CUT"), 3),
        (DeadlineExceeded("too slow", reason="DEADLINE_EXCEEDED"), 3),
        (Unavailable("stopping", reason="STOPPING"), 1),
        (Unavailable("writes have stopped", reason="STORE_FAILED"), 1),
        (PermissionDenied("who are you", reason="PERMISSION_DENIED"), 1),
        (InternalError("a fault", reason="INTERNAL"), 1),
    ],
)
def test_only_a_silent_server_counts_as_unreachable(client: FakeClient, error: SowError, code: int) -> None:
    client.fails_with = error

    result = run(client, "status")

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"sow: {error.reason}: {error.message}")


def test_an_error_shows_reason_message_details_and_when_to_try_again(client: FakeClient) -> None:
    client.fails_with = ResourceExhausted(
        "the queue is full", reason="OVERLOADED", details={"field": "topic", "position": "7"}, retry_after=1.5
    )

    result = run(client, "count", "orders")

    assert result.stderr.splitlines() == [
        "sow: OVERLOADED: the queue is full",
        "  field: topic",
        "  position: 7",
        "  retry after: 1.5 s",
    ]


def test_a_bad_filter_is_shown_with_a_caret_below_the_place_at_fault(client: FakeClient) -> None:
    client.add("orders")

    for command in (("query",), ("count",), ("query", "--explain"), ("delete", "--filter")):
        result = run(client, command[0], "orders", *command[1:], "/price > AND /symbol = 'A'")

        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            "sow: FILTER_INVALID: expected a value at 9",
            "  /price > AND /symbol = 'A'",
            "           ^",
            "  field: filter",
        ]


def test_control_characters_of_a_message_do_not_reach_the_terminal(client: FakeClient) -> None:
    client.fails_with = InternalError("one\x1b[2J\ntwo\r", reason="INTERNAL")

    assert run(client, "status").stderr == "sow: INTERNAL: one\\x1b[2J\ntwo\\r\n"


def test_ctrl_c_ends_with_130(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "status", interrupted)

    result = run(client, "status")

    assert (result.exit_code, result.output) == (130, "")


def test_a_reader_that_goes_away_is_no_failure(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(client, "status", broken)

    result = run(client, "status")

    assert (result.exit_code, result.output) == (0, "")


# ---- topics ----


def test_topics_are_listed_with_settings_and_figures(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    client.add("orders", records=[{"id": 1}], expiration="30s", max_ttl="1h")
    client.add("fills", key=("/venue", "/id"))

    listed = rows(run(client, "topics"))
    table = run(client, "topics", "--format", "table").stdout

    assert [one["name"] for one in listed] == ["fills", "orders"]
    assert listed[0]["key"] == ["/venue", "/id"]
    assert "max_ttl" not in listed[0]
    assert (listed[1]["expiration"], listed[1]["max_ttl"], listed[1]["live_records"]) == ("30s", "1h0m0s", 1)
    assert "/venue /id" in table
    assert "30s" in table


def test_no_topics_are_an_empty_list(client: FakeClient) -> None:
    assert run(client, "topics").stdout == ""
    assert run(client, "topics", "--format", "json").stdout == "[]\n"
    assert run(client, "topics", "--format", "csv").stdout.startswith("name,message_type,key,expiration,")
    assert run(client, "topics", "--format", "table").stdout == "no topics\n"


def test_create_sends_only_the_given_options(client: FakeClient) -> None:
    result = run(
        client, "topic", "create", "orders", "--key", "/a", "--key", "/b", "--expiration", "30s", "--max-ttl", "1h",
        "--no-journal", "--retain-time", "unlimited", "--retain-bytes", "64MiB", "--message-type", "nvfix",
        "--fix-separator", r"\x02",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert client.arguments_of("create_topic") == {
        "name": "orders",
        "key": ("/a", "/b"),
        "message_type": "nvfix",
        "expiration": "30s",
        "max_ttl": "1h",
        "journal": False,
        "retain_time": "unlimited",
        "retain_bytes": 64 * 2**20,
        "fix_separator": "\x02",
    }
    assert run(client, "topic", "create", "plain").exit_code == 0
    assert client.arguments_of("create_topic") == {"name": "plain"}


def test_creating_a_topic_twice_ends_with_1(client: FakeClient) -> None:
    client.add("orders")

    result = run(client, "topic", "create", "orders")

    assert result.exit_code == 1
    assert result.stderr == "sow: TOPIC_EXISTS: topic 'orders' exists\n  field: name\n"


def test_alter_takes_a_bound_away_with_none(client: FakeClient) -> None:
    client.add("orders", max_ttl="1h")

    result = run(client, "topic", "alter", "orders", "--max-ttl", "none", "--retain-bytes", "unlimited", "--journal")

    assert result.exit_code == 0
    assert client.arguments_of("alter_topic") == {
        "name": "orders",
        "max_ttl": None,
        "retain_bytes": -1,
        "journal": True,
    }


def test_describe_shows_one_topic(client: FakeClient) -> None:
    client.add("orders", expiration="30s", records=[{"id": 1}])

    table = run(client, "topic", "describe", "orders", "--format", "table").stdout

    assert "expiration" in table
    assert "30s" in table
    assert rows(run(client, "topic", "describe", "orders"))[0]["live_records"] == 1
    assert run(client, "topic", "describe", "nothing").exit_code == 1


def test_alter_replaces_the_indexes_and_takes_them_away_with_none(client: FakeClient) -> None:
    client.add("orders")

    assert run(client, "topic", "alter", "orders", "--index", "/a", "--index", "/b").exit_code == 0
    assert client.arguments_of("alter_topic") == {"name": "orders", "index": ("/a", "/b")}
    assert run(client, "topic", "create", "fills", "--index", "/a").exit_code == 0
    assert client.arguments_of("create_topic") == {"name": "fills", "index": ("/a",)}
    assert run(client, "topic", "alter", "orders", "--index", "none").exit_code == 0
    assert client.arguments_of("alter_topic") == {"name": "orders", "index": ()}


def test_describe_tells_which_indexes_are_complete(client: FakeClient) -> None:
    client.add("orders", index=("/a", "/b"))
    client.add("plain")

    table = run(client, "topic", "describe", "orders", "--format", "table").stdout
    described = rows(run(client, "topic", "describe", "orders"))[0]
    plain = rows(run(client, "topic", "describe", "plain"))[0]

    assert "/a (complete), /b (being built)" in table
    assert (described["index"], described["index_building"]) == (["/a", "/b"], ["/b"])
    assert plain["index"] == []
    assert "index_building" not in plain
    assert ",index,index_building," in run(client, "topic", "describe", "plain", "--format", "csv").stdout


@pytest.mark.parametrize(
    ("options", "mode", "ttl"),
    [(("--set", "1h"), "set", "1h"), (("--cap", "10m"), "cap", "10m"), (("--clear",), "clear", None)],
)
def test_restamp_says_how_many_it_changed(
    client: FakeClient, options: tuple[str, ...], mode: str, ttl: str | None
) -> None:
    client.add("orders", records=[{"id": 1}, {"id": 2}])

    done = run(client, "topic", "restamp", "orders", *options, "--filter", "/id > 0")

    assert rows(done) == [{"topic": "orders", "matched": 2, "restamped": 2, "sequence": 4}]
    assert client.arguments_of("restamp") == {
        "topic": "orders",
        "mode": mode,
        "ttl": ttl,
        "filter": "/id > 0",
        "dry_run": False,
    }


def test_a_restamp_can_only_count(client: FakeClient) -> None:
    client.add("orders", records=[{"id": 1}], expiration="enabled")

    counted = run(client, "topic", "restamp", "orders", "--set", "1h", "--dry-run", "--format", "table")

    assert "0 (dry run)" in counted.stdout
    assert client.tables["orders"].rows["1"].expire_time_micros is None
    assert run(client, "topic", "restamp", "nothing", "--clear").exit_code == 1


def test_a_check_lists_rows_of_any_key_and_ends_with_1_while_they_stay(client: FakeClient) -> None:
    """R13."""
    client.unsound = [UnsoundRow(b"\xff\x1b[2J", "KEY_NOT_UTF8", "key: is not well-formed UTF-8", 7, "ldn-1", 3)]

    found = run(client, "topic", "check", "orders", "--rows", "5")
    assert found.exit_code == 1
    assert rows(found) == [
        {
            "topic": "orders",
            "checked": 10,
            "unsound": 1,
            "removed": 0,
            "rows": [
                {
                    "key": "\\xff\x1b[2J",
                    "reason": "KEY_NOT_UTF8",
                    "message": "key: is not well-formed UTF-8",
                    "version": 7,
                    "origin": "ldn-1",
                    "payload_bytes": 3,
                }
            ],
        }
    ]
    assert client.arguments_of("check_topic") == {"topic": "orders", "repair": False, "rows_max": 5}
    table = run(client, "topic", "check", "orders", "--repair", "--format", "table")
    assert table.exit_code == 0
    assert "\\xff\\x1b[2J" in table.stdout
    assert "\x1b[2J" not in table.stdout
    client.unsound = []
    assert run(client, "topic", "check", "orders").exit_code == 0


def test_a_topic_is_deleted_only_when_forced_without_a_terminal(client: FakeClient) -> None:
    client.add("orders", records=[{"id": 1}, {"id": 2}])

    refused = run(client, "topic", "delete", "orders")
    forced = run(client, "topic", "delete", "orders", "-f")

    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert rows(forced) == [{"topic": "orders", "deleted_records": 2}]


def test_force_does_not_override_the_check_for_peers(client: FakeClient) -> None:
    """Rule T5: scripts cannot be asked and so have to use --force; a peer may be behind all the same."""
    for options, forced in ((("-f",), False), (("-f", "--unshipped"), True)):
        client.add("orders")
        assert run(client, "topic", "delete", "orders", *options).exit_code == 0
        assert client.calls[-2] == ("delete_topic", {"name": "orders", "force": forced})


# ---- publish ----


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
    assert client.arguments_of("publisher") == {"ttl": "never", "expire_at": None, "keep_ttl": True, "batch_records": 7}


def test_bad_lines_are_reported_with_their_number_and_the_rest_goes_on(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("orders")
    file = tmp_path / "orders.ndjson"
    file.write_bytes(b'{"id":1}\n\n{"price":2}\n   \n{"id":3}\r\nnonsense\n{"id":5}\n{"price":6}\n')

    result = run(client, "publish", "orders", str(file))

    assert result.exit_code == 1
    assert list(table.rows) == ["1", "3", "5"]
    assert [line.split(":")[:2] for line in result.stderr.splitlines()] == [
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
    assert [line.split(":")[:2] for line in result.stderr.splitlines()] == [
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


# ---- get, query, count ----


def test_get_shows_records_and_names_the_keys_without_one(client: FakeClient) -> None:
    client.add("orders", records=[{"id": 1}, {"id": 2}])

    found = run(client, "get", "orders", "2", "1")
    partly = run(client, "get", "orders", "1", "9")

    assert [one["key"] for one in rows(found)] == ["2", "1"]
    assert (found.exit_code, partly.exit_code) == (0, 1)
    assert [one["key"] for one in rows(partly)] == ["1"]
    assert partly.stderr == "sow: RECORD_NOT_FOUND: key: there is no live record '9'\n"


def test_get_of_one_key_shows_all_about_it_in_a_table(client: FakeClient) -> None:
    client.add("orders", expiration="enabled")
    run(client, "publish", "orders", "--data", '{"id":1,"note":"[bold]\\u001b[2J"}')

    table = run(client, "get", "orders", "1", "--format", "table").stdout

    assert '"note": "[bold]\\u001b[2J"' in table
    assert "expires    never" in table
    assert "origin     fake-1" in table


def test_query_passes_its_options_on(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one} for one in range(1, 8)])

    result = run(client, "query", "orders", "--top", "2", "--skip", "1", "--select", "/id,/price", "--select", "/a")

    assert [one["key"] for one in rows(result)] == ["2", "3"]
    assert client.arguments_of("query") == {
        "filter": None,
        "order_by": None,
        "select": ["/id", "/price", "/a"],
        "exclude": None,
        "keys_only": False,
        "skip_n": 1,
        "top_n": 2,
    }
    assert [one["key"] for one in rows(run(client, "query", "orders", "--keys", "5,6", "--keys", "99"))] == ["5", "6"]


def test_query_takes_a_filter_and_an_order(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one, "price": one * 10} for one in range(1, 8)])

    result = run(client, "query", "orders", "/price > 50", "--order-by", "/price DESC, /id", "--order-by", "/x")

    assert [one["key"] for one in rows(result)] == ["6", "7"]
    assert client.arguments_of("query")["order_by"] == ["/price DESC, /id", "/x"]


def test_explain_tells_how_records_are_found_and_shows_none(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one, "price": one * 10} for one in range(1, 8)])

    arguments = ("query", "orders", "/price > 50", "--explain", "--top", "3", "--keys", "6,7", "--order-by", "/id")
    (plan,) = rows(run(client, *arguments))
    table = run(client, *arguments, "--format", "table").stdout

    assert plan == {
        "topic": "orders",
        "access": "index",
        "index_path": "/price",
        "probes": 1,
        "index_entries": 2,
        "scanned": 2,
        "matched": 2,
        "returned": 2,
        "filter": "/price > 50",
    }
    assert client.arguments_of("explain") == {
        "filter": "/price > 50",
        "order_by": ["/id"],
        "keys": ["6", "7"],
        "skip_n": 0,
        "top_n": 3,
    }
    assert "reads an index, then its records" in table


def test_query_of_an_unknown_topic_ends_with_1(client: FakeClient) -> None:
    result = run(client, "query", "nothing")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "sow: TOPIC_NOT_FOUND: there is no topic 'nothing'\n  field: topic\n"


def test_count_counts(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one} for one in range(5)])

    assert rows(run(client, "count", "orders")) == [{"topic": "orders", "count": 5}]
    assert rows(run(client, "query", "orders", "--count")) == [{"topic": "orders", "count": 5}]
    assert rows(run(client, "query", "orders", "--count", "--keys", "1,2,77")) == [{"topic": "orders", "count": 2}]
    for arguments in (("count", "orders", "/id > 2"), ("query", "orders", "/id > 2", "--count")):
        assert rows(run(client, *arguments)) == [{"topic": "orders", "count": 2}]
    assert rows(run(client, "query", "orders", "/id > 2", "--count", "--skip", "1")) == [
        {"topic": "orders", "count": 1}
    ]


# ---- delete, touch, persist ----


def test_delete_by_keys_by_document_and_all(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("orders", records=[{"id": one} for one in range(6)])
    file = tmp_path / "order.json"
    file.write_text('{"id": 3}')

    by_keys = rows(run(client, "delete", "orders", "--key", "0", "--key", "1", "--key", "77"))[0]
    by_document = rows(run(client, "delete", "orders", "--data", str(file)))[0]
    by_stdin = rows(run(client, "delete", "orders", "--data", "-", stdin=b'{"id":4}'))[0]
    counted = rows(run(client, "delete", "orders", "--all", "--dry-run"))[0]
    assert list(table.rows) == ["2", "5"]
    everything = rows(run(client, "delete", "orders", "--all", "--force"))[0]

    assert (by_keys["matched"], by_keys["deleted"]) == (2, 2)
    assert (by_document["deleted"], by_stdin["deleted"]) == (1, 1)
    assert (counted["matched"], counted["deleted"]) == (2, 0)
    assert everything["deleted"] == 2
    assert table.rows == {}


def test_delete_by_filter(client: FakeClient) -> None:
    table = client.add("orders", records=[{"id": one} for one in range(6)])

    counted = rows(run(client, "delete", "orders", "--filter", "/id >= 4", "--dry-run"))[0]
    deleted = rows(run(client, "delete", "orders", "--filter", "/id >= 4"))[0]

    assert (counted["matched"], counted["deleted"]) == (2, 0)
    assert (deleted["matched"], deleted["deleted"]) == (2, 2)
    assert list(table.rows) == ["0", "1", "2", "3"]


def test_touch_and_persist_report_each_key(client: FakeClient) -> None:
    table = client.add("sessions", records=[{"id": "alice"}, {"id": "bob"}], expiration="enabled")

    touched = run(client, "touch", "sessions", "alice", "nobody", "bob", "--ttl", "20m")
    persisted = run(client, "persist", "sessions", "alice")

    assert touched.exit_code == 1
    assert [one["key"] for one in rows(touched)] == ["alice", "bob"]
    assert touched.stderr == "nobody: RECORD_NOT_FOUND: no live record of that key\n"
    assert table.rows["bob"].expire_time_micros == NOW_MICROS + 20 * 60_000_000
    assert persisted.exit_code == 0
    assert "expire_time_micros" not in rows(persisted)[0]
    assert client.arguments_of("touch")["ttl"] == "never"


# ---- the server ----


def test_status_compact_and_accept_clock(client: FakeClient) -> None:
    client.add("orders")

    status = rows(run(client, "status"))[0]
    table = run(client, "status", "--format", "table").stdout

    assert (status["state"], status["topics"], status["sweep_paused"]) == ("serving", 1, False)
    assert "failure" not in status
    assert "(1m30s ago)" in table
    assert rows(run(client, "compact")) == [{"bytes_before": 4_096_000, "bytes_after": 1_024}]
    assert rows(run(client, "accept-clock"))[0]["after"] == "2030-03-17T18:46:40+00:00"
