"""`sow due`, `sow sessions` and `sow status --watch`, against a fake client."""

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
    LinkFigures,
    TopicDue,
    TopicFigures,
)
from tests.support.commands import client, rows, run
from tests.support.fake_client import FakeClient

__all__ = ["client"]  # a fixture

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
SPANS = (timedelta(minutes=1), timedelta(hours=1))


def test_due_shows_a_column_for_each_span(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    orders = TopicDue("orders", 3, (1_000, 20), NOW + timedelta(seconds=7), False)
    client.horizon = ExpiryHorizon(NOW, SPANS, (orders, TopicDue("plain", 0, (0, 0), None, True)), NOW + SPANS[-1])

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
    assert client.arguments_of("expiry_horizon") == {"topic": "orders", "spans": (), "exact": False}
    assert "1,000" in table.stdout
    assert "1h" in table.stdout


def test_due_tells_up_to_when_it_has_counted(client: FakeClient) -> None:
    client.horizon = ExpiryHorizon(NOW, SPANS, (), NOW + timedelta(minutes=10))
    assert "counted up to 2030-01-31 12:10:00Z" in run(client, "due").stderr
    assert run(client, "due", "--within", "soon").exit_code == 2


def test_sessions_list_subscriptions_and_end_one(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one = ActiveSubscription(
        "u4", "s2", "desk", "ipv4:1.2.3.4:5", NOW, "", "ord.*", "/px > 2", "", "4f9d.12", behind=True, queued_bytes=2048
    )
    client.active = [one, replace(one, id="u5", topic="orders", topic_pattern="", durable="billing")]

    listed = rows(run(client, "sessions", "--subscriptions"))
    table = run(client, "sessions", "--subscriptions", "--topic", "orders", "--format", "table").stdout

    assert (listed[0]["topic_pattern"], listed[0]["filter"], listed[0]["queued_bytes"]) == ("ord.*", "/px > 2", 2048)
    assert (listed[1]["topic"], listed[1]["durable"], listed[1]["session"]) == ("orders", "billing", "s2")
    assert "ord.*" in table
    assert client.arguments_of("subscriptions") == {"topic": "orders"}
    assert rows(run(client, "sessions", "--end", "u4")) == [{"ended_calls": 1}]
    assert client.arguments_of("end_subscription") == {"id": "u4"}
    assert rows(run(client, "sessions", "--end", "s2")) == [{"ended_calls": 2}]
    assert run(client, "sessions", "--topic", "orders").exit_code == 2


def test_durables_name_their_consumer(client: FakeClient) -> None:
    client.keep("orders", "billing")
    kept = client.kept["orders", "billing"]
    consumer = DurableConsumer("u5", "desk", "ipv4:10.0.0.7:5", NOW, "4f9d.12", behind=False, queued_bytes=0)
    assert "consumer" not in rows(run(client, "durable", "describe", "orders", "billing"))[0]
    client.kept["orders", "billing"] = replace(kept, attached=True, consumer=consumer)
    found = rows(run(client, "durable", "describe", "orders", "billing"))[0]
    assert (found["consumer"], found["consumer_address"]) == ("desk", "ipv4:10.0.0.7:5")


def test_status_watched_writes_a_line_for_each_answer(client: FakeClient) -> None:
    busy = TopicFigures("orders", 10, 100, 20, 1_234.4, 99.0)
    idle = TopicFigures("plain", 1, 1, 1, 0.0, 0.0)
    link = LinkFigures("ldn", "streaming", 7, timedelta(milliseconds=1500))
    first = Figures(NOW, timedelta(), 9, 0.0, 0.0, 1, 2, 3, 4, 1, 5, 2, (idle,), ())
    second = replace(
        first, elapsed=timedelta(seconds=1), changes_per_second=1_300.0, topics=(busy, idle), links=(link,)
    )
    client.figures = [first, second]

    lines = run(client, "status", "--watch", "--interval", "2s", "--format", "table").stdout.splitlines()
    listed = rows(run(client, "status", "--watch"))

    assert client.arguments_of("watch_figures")["interval"] == "1s"
    assert lines[0].split()[:3] == ["time", "changes/s", "expired/s"]
    assert lines[1].split() == ["12:00:00", "-", "-", "1", "4", "1", "3", "-"]
    assert lines[2].split() == ["12:00:00", "1,300", "0", "1", "4", "1", "3", "1.5s", "orders", "1,234/s"]
    assert str(listed[1]["topics"]).startswith("[{'topic': 'orders'")
    assert listed[1]["links"] == [{"peer": "ldn", "state": "streaming", "lag_sequences": 7, "lag_micros": 1_500_000}]
    assert run(client, "status", "--watch", "--format", "csv").exit_code == 2


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
