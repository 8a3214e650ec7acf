"""`sow due`, against a fake client."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sow_client import ExpiryHorizon, TopicDue
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
        "next_time": "2030-01-31T12:00:07+00:00",
        "overdue": 3,
        "due_1m0s": 1_000,
        "due_1h0m0s": 20,
        "incomplete": False,
    }
    assert "plain: expiration was just enabled" in listed.stderr
    assert "counted up to" not in listed.stderr
    assert client.arguments_of("expiry_horizon") == {"topic": "orders", "spans": (), "exact": False}
    assert "1,000" in table.stdout
    assert "1h0m0s" in table.stdout


def test_due_tells_up_to_when_it_has_counted(client: FakeClient) -> None:
    client.horizon = ExpiryHorizon(NOW, SPANS, (), NOW + timedelta(minutes=10))
    assert "counted up to 2030-01-31 12:10:00Z" in run(client, "due").stderr
    assert run(client, "due", "--within", "soon").exit_code == 2
