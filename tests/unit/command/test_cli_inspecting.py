"""`sow due`, `sow history`, `sow sessions` and `sow status --watch`, against a fake client."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sow_client import (
    ActiveSubscription,
    ConfigSetting,
    DurableConsumer,
    ExpiryHorizon,
    Figures,
    KeptResult,
    LinkFigures,
    LogLine,
    PastChange,
    TopicDue,
    TopicFigures,
)
from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient

__all__ = ["client"]  # a fixture

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
SPANS = (timedelta(minutes=1), timedelta(hours=1))


def test_due_shows_a_column_for_each_span(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    orders = TopicDue("orders", 3, (1_000, 20), NOW + timedelta(seconds=7), False)
    end = NOW + SPANS[-1]
    client.horizon = ExpiryHorizon(NOW, SPANS, (orders, TopicDue("plain", 0, (0, 0), None, True)), end, end)

    listed = run(client, "due", "--within", "1m", "--within", "1h", "--exact")
    table = run(client, "due", "orders", "--format", "table")

    assert rows(listed)[0] == {
        "topic": "orders",
        "next_time_micros": 1_896_091_207_000_000,
        "overdue": 3,
        "due_1m": 1_000,
        "due_1h": 20,
        "incomplete": False,
    }
    assert "plain: expiration was just enabled" in listed.stderr
    assert "counted up to" not in listed.stderr
    assert "entries" not in listed.stderr
    assert client.arguments_of("expiry_horizon") == {"topic": "orders", "spans": (), "exact": False}
    assert "1,000" in table.stdout
    assert "1h" in table.stdout


def test_due_tells_up_to_when_it_has_counted(client: FakeClient) -> None:
    upto = NOW + timedelta(minutes=10)
    client.horizon = ExpiryHorizon(NOW, SPANS, (), upto, upto)
    assert "counted up to 2030-01-31 12:10:00Z" in (told := run(client, "due").stderr)
    assert "entries" not in told, "all that is counted is exact"
    assert run(client, "due", "--within", "soon").exit_code == 2


def test_due_tells_which_counts_are_of_entries(client: FakeClient) -> None:
    client.horizon = ExpiryHorizon(NOW, SPANS, (), NOW + SPANS[-1], NOW + timedelta(minutes=10))
    told = "are entries of the expiry index, also of records that were changed or deleted"
    assert f"counts behind 2030-01-31 12:10:00Z {told}" in run(client, "due").stderr
    client.horizon = replace(client.horizon, exact_upto=NOW - timedelta(microseconds=1))
    assert f"all counts {told}" in run(client, "due").stderr


def test_sessions_list_subscriptions_and_end_one(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one = ActiveSubscription(
        "u4", "s2", "desk", "ipv4:1.2.3.4:5", NOW, "", "ord.*", "/px > 2", "", "4f9d.12", behind=True, queued_bytes=2048
    )
    client.active = [one, replace(one, id="u5", topic="orders", topic_pattern="", durable="billing")]
    client.active.append(replace(one, id="u6", kept=KeptResult(1_110, 4_096, 2, 3)))

    listed = rows(run(client, "sessions", "--subscriptions"))
    table = run(client, "sessions", "--subscriptions", "--topic", "orders", "--format", "table").stdout

    assert (listed[0]["topic_pattern"], listed[0]["filter"], listed[0]["queued_bytes"]) == ("ord.*", "/px > 2", 2048)
    assert (listed[1]["topic"], listed[1]["durable"], listed[1]["session"]) == ("orders", "billing", "s2")
    assert [listed[2][name] for name in ("kept_records", "kept_bytes", "runs", "kept_for")] == [1_110, 4_096, 2, 3]
    assert listed[0].get("kept_records") is None
    assert "ord.*" in table
    assert "1,110, 4.0 KiB, 2 runs" in table
    assert client.arguments_of("subscriptions") == {"topic": "orders"}
    assert rows(run(client, "sessions", "--end", "u4")) == [{"ended_calls": 1}]
    assert client.arguments_of("end_subscription") == {"id": "u4"}
    assert rows(run(client, "sessions", "--end", "s2")) == [{"ended_calls": 2}]
    assert run(client, "sessions", "--topic", "orders").exit_code == 2
    assert run(client, "sessions", "--subscriptions", "--end", "s2").exit_code == 2, "it would list nothing"


def test_durables_name_their_consumer(client: FakeClient) -> None:
    client.keep("orders", "billing")
    kept = client.kept["orders", "billing"]
    consumer = DurableConsumer("u5", "desk", "ipv4:10.0.0.7:5", NOW, "4f9d.12", behind=False, queued_bytes=0)
    assert "consumer" not in rows(run(client, "durable", "describe", "orders", "billing"))[0]
    client.kept["orders", "billing"] = replace(kept, attached=True, consumer=consumer)
    found = rows(run(client, "durable", "describe", "orders", "billing"))[0]
    assert (found["consumer"], found["consumer_address"]) == ("desk", "ipv4:10.0.0.7:5")


def test_due_is_drawn_as_bars_for_topics_that_have_some(client: FakeClient) -> None:
    ends = (timedelta(minutes=1), timedelta(hours=1))
    topics = (TopicDue("orders", 0, (5, 20), None, False), TopicDue("quiet", 0, (0, 0), None, False))
    client.horizon = ExpiryHorizon(NOW, ends, topics, NOW + ends[-1], NOW + ends[-1])

    lines = run(client, "due", "--plot").stdout.splitlines()

    assert lines[0] == "orders"
    assert [line.split()[:2] for line in lines[1:]] == [["overdue", "0"], ["≤1m", "5"], ["≤1h", "20"]]
    assert lines[3].count("█") // lines[2].count("█") == 4
    assert run(client, "due", "--plot", "--format", "csv").exit_code == 2
    client.horizon = ExpiryHorizon(NOW, ends, topics[1:], NOW + ends[-1], NOW + ends[-1])
    assert "no record falls due" in run(client, "due", "--plot").stderr


def test_status_watched_writes_a_line_for_each_answer(client: FakeClient) -> None:
    busy = TopicFigures("orders", 10, 100, 20, 1_234.4, 99.0)
    idle = TopicFigures("plain", 1, 1, 1, 0.0, 0.0)
    link = LinkFigures("ldn", "streaming", 7, timedelta(milliseconds=1500))
    first = Figures(NOW, timedelta(), 9, 0.0, 0.0, 1, 2, 3, 4, 1, 5, 2, (idle,), ())
    second = replace(
        first, elapsed=timedelta(seconds=1), changes_per_second=1_300.0, topics=(busy, idle), links=(link,)
    )
    client.figures = [first, second]

    lines = run(client, "status", "--watch", "2s", "--format", "table").stdout.splitlines()
    listed = rows(run(client, "status", "--watch"))

    assert client.arguments_of("watch_figures")["interval"] == "1s"
    assert lines[0].split()[:3] == ["time", "changes/s", "expired/s"]
    assert lines[1].split() == ["12:00:00", "-", "-", "1", "4", "1", "3", "-"]
    assert lines[2].split() == ["12:00:00", "1,300", "0", "1", "4", "1", "3", "1.5s", "orders", "1,234/s"]
    assert str(listed[1]["topics"]).startswith("[{'topic': 'orders'")
    assert listed[1]["links"] == [{"peer": "ldn", "state": "streaming", "lag_sequences": 7, "lag_micros": 1_500_000}]
    assert run(client, "status", "--watch", "--format", "csv").exit_code == 2
    assert run(client, "status", "--watch", "2").exit_code == 2


def test_config_show_tells_values_and_origins(client: FakeClient) -> None:
    client.settings = [
        ConfigSetting("server", 0, "listen", '"127.0.0.1:7450"', "command line", False),
        ConfigSetting("storage", 0, "background_jobs", "2", "default", False),
        ConfigSetting("replication", 0, "token", "", "file", True),
        ConfigSetting("replication.peers", 1, "name", '"ldn"', "file", False),
    ]

    listed = rows(run(client, "config", "show"))
    table = run(client, "config", "show", "--format", "table").stdout

    assert listed[0] == {
        "table": "server", "key": "listen", "value": '"127.0.0.1:7450"', "origin": "command line", "hidden": False
    }  # fmt: skip
    assert "(a secret)" in table
    assert "replication.peers 1" in table
    assert [one["key"] for one in rows(run(client, "config", "show", "storage"))] == ["background_jobs"]
    assert [one["key"] for one in rows(run(client, "config", "show", "--changed"))] == ["listen", "token", "name"]
    refused = run(client, "config", "show", "stroage")
    assert (refused.exit_code, "storage" in refused.stderr) == (2, True)


# ---- history ----


def past(client: FakeClient, *prices: int) -> list[PastChange]:
    """One publish of the key 1 for each price, the newest first."""
    found = []
    for price in prices:
        client.publish("orders", b'{"id":1,"px":%d}' % price)
        (record,) = client.get_many("orders", ["1"])
        found.append(PastChange("put", None, record, NOW, "nyc"))
    return found[::-1]


def test_a_number_that_becomes_its_text_and_an_empty_text_are_changes(client: FakeClient) -> None:
    client.add("orders")
    found = []
    for payload in (b'{"id":1,"zip":"123","note":""}', b'{"id":1,"zip":123}', b'{"id":1,"zip":"123"}'):
        client.publish("orders", payload)
        (record,) = client.get_many("orders", ["1"])
        found.append(PastChange("put", None, record, NOW, "nyc"))
    client.past = found[::-1]
    told = rows(run(client, "history", "orders", "1"))
    assert [row.get("changed") for row in told] == [None, ["zip", "note"], ["zip"]]
    shown = run(client, "history", "orders", "1", "--format", "table").stdout
    assert 'zip "123" → 123, note "" → -' in shown
    assert 'zip 123 → "123"' in shown


def test_the_last_changes_are_compared_with_the_one_before_them(client: FakeClient) -> None:
    client.add("orders")
    client.past = past(client, 5, 6, 7)
    told = run(client, "history", "orders", "1", "--last", "1")
    assert [(row["changed"], row["instance"]) for row in rows(told)] == [(["px"], "nyc")]
    assert "the last 1 change, and there are more" in told.stderr
    assert client.arguments_of("history")["entries_max"] == 2
    whole = run(client, "history", "orders", "1", "--last", "3", "--format", "table")
    assert "more" not in whole.stderr
    assert "the journal has all changes since the topic was made" in whole.stderr


def test_a_long_story_is_read_in_pages(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sow_cli.history._PAGE_MAX", 2)
    client.add("orders")
    client.past = past(client, 5, 6, 7, 8, 9)
    told = rows(run(client, "history", "orders", "1", "--last", "4"))
    assert [row["payload"] for row in told] == [{"id": 1, "px": price} for price in (6, 7, 8, 9)]
    assert [arguments["upto"] for name, arguments in client.calls if name == "history"] == [None, "2", "4"]


def test_a_story_says_where_the_journal_begins(client: FakeClient) -> None:
    """What was discarded is not told as if it had never been."""
    client.add("orders")
    client.past = past(client, 5)
    client.begin = client.describe_topic("orders").create_time + timedelta(minutes=3, milliseconds=7)
    told = run(client, "history", "orders", "1", "--format", "table")
    assert f"the journal begins {client.begin:%Y-%m-%d %H:%M:%S}.007Z" in told.stderr.replace("T", " ")
    assert "changes in between, if any, are not kept" in told.stderr
    assert "now: version" in told.stderr
    client.past = []
    empty = run(client, "history", "orders", "2", "--format", "table")
    assert "no change of this key" in empty.stdout
    assert "the journal is empty; the topic was made" in empty.stderr


def test_a_record_that_went_out_of_sight_is_not_told_as_deleted(client: FakeClient) -> None:
    client.add("orders")
    (change,) = past(client, 5)
    client.past = [replace(change, op="delete", reason="not_permitted", instance="")]
    assert "you may not see it" in run(client, "history", "orders", "1", "--format", "table").stdout


def test_the_log_is_a_line_for_each_event(client: FakeClient) -> None:
    client.lines = [LogLine(NOW, "warning", "odd", "sow_server.app", '{"n":1,"why":"\\u001b[31m"}', missed=3)]

    listed = rows(run(client, "log", "--level", "warning", "--lines", "5", "--follow"))
    table = run(client, "log", "--format", "table").stdout

    assert listed == [
        {
            "time_micros": 1_896_091_200_000_000, "level": "warning", "event": "odd", "logger": "sow_server.app",
            "fields": {"n": 1, "why": "\x1b[31m"}, "missed": 3,
        }
    ]  # fmt: skip
    assert "odd n=1" in table
    assert "3 lines missed" in table
    assert "\x1b[31m" not in table, "data does not act on a terminal (X7)"
    assert dict(client.calls)["watch_log"] == {"level": None, "lines_max": 100, "follow": False}
    assert run(client, "log", "--format", "csv").exit_code == 2
