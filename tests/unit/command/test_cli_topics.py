"""The commands about topics and the server, against a fake client: their calls, their output, their exit codes."""

from __future__ import annotations

import pytest

from sow_client import (
    UnsoundRow,
)
from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS

__all__ = ["client"]  # a fixture


def test_topics_are_listed_with_settings_and_figures(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    client.add("orders", records=[{"id": 1}], expiration="30s", max_ttl="1h")
    client.add("fills", key=("/venue", "/id"))

    listed = rows(run(client, "topics"))
    table = run(client, "topics", "--format", "table").stdout

    assert [one["name"] for one in listed] == ["fills", "orders"]
    assert listed[0]["key"] == ["/venue", "/id"]
    assert "max_ttl" not in listed[0]
    assert (listed[1]["expiration"], listed[1]["max_ttl"], listed[1]["live_records"]) == ("30s", "1h", 1)
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


def test_caps_are_set_taken_away_and_described(client: FakeClient) -> None:
    """T6, T7."""
    created = run(client, "topic", "create", "orders", "--max-records", "1000", "--max-stored-bytes", "1GiB")
    assert created.exit_code == 0
    assert client.arguments_of("create_topic") == {"name": "orders", "max_records": 1000, "max_stored_bytes": 2**30}
    assert run(client, "topic", "alter", "orders", "--max-records", "none", "--max-stored-bytes", "none").exit_code == 0
    assert client.arguments_of("alter_topic") == {"name": "orders", "max_records": None, "max_stored_bytes": None}
    assert rows(run(client, "topic", "describe", "orders"))[0]["full_refusals"] == 0


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


def test_status_compact_and_accept_clock(client: FakeClient) -> None:
    client.add("orders")

    status = rows(run(client, "status"))[0]
    table = run(client, "status", "--format", "table").stdout

    assert (status["state"], status["topics"], status["sweep_paused"]) == ("serving", 1, False)
    assert "failure" not in status
    assert "(1m30s ago)" in table
    assert rows(run(client, "compact")) == [{"bytes_before": 4_096_000, "bytes_after": 1_024}]
    assert rows(run(client, "accept-clock"))[0]["after_micros"] == NOW_MICROS + 3_600_000_000
