"""`sow view`, and views in `sow topic describe`, `sow topics` and `sow doctor` (rules V1, V6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sow_cli.doctor import judged_topics
from sow_client import ViewDefinition, ViewStatus
from tests.support.fakes.commands import rows, run
from tests.support.fakes.fake_client import FakeClient

CREATE = ("view", "create", "positions", "--source", "orders")
DEFINED = ("--where", "/open", "--group-by", "/account", "--select", "SUM(/qty) AS qty, MAX(/px) AS high")


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    client.add("orders", key=("/id",), records=[{"id": "1"}, {"id": "2"}])
    return client


def test_the_options_go_to_the_client(client: FakeClient) -> None:
    result = run(client, *CREATE, *DEFINED, "--index", "/qty", "--no-journal")
    assert result.exit_code == 0, result.stderr
    assert client.arguments_of("create_view") == {
        "name": "positions",
        "source": "orders",
        "where": "/open",
        "group_by": ("/account",),
        "select": ("SUM(/qty) AS qty, MAX(/px) AS high",),
        "index": ("/qty",),
        "journal": False,
    }
    (row,) = rows(result)
    assert (row["name"], row["source"], row["where"], row["group_by"]) == ("positions", "orders", "/open", ["/account"])


def test_create_waits_until_the_view_is_complete(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sow_cli.views._LOOK_SECONDS", 0)
    client.builds = [False, False, True]
    (row,) = rows(run(client, *CREATE, *DEFINED, "--wait"))
    assert (row["complete"], client.builds) == (True, [])


def test_a_view_that_exists_stays_as_it_is_if_that_is_allowed(client: FakeClient) -> None:
    assert run(client, *CREATE, *DEFINED).exit_code == 0
    again = run(client, *CREATE, *DEFINED)
    assert (again.exit_code, "TOPIC_EXISTS" in again.stderr) == (1, True)
    there = run(client, *CREATE, "--select", "COUNT(*) AS n", "--if-not-exists")
    assert there.exit_code == 0
    assert "positions exists already, and stays as it is, with another definition" in there.stderr


def test_views_are_listed_and_described(client: FakeClient) -> None:
    run(client, *CREATE, *DEFINED)
    run(client, "view", "create", "other", "--source", "trades", "--select", "COUNT(*) AS n")
    assert [row["name"] for row in rows(run(client, "view", "list"))] == ["other", "positions"]
    assert [row["name"] for row in rows(run(client, "view", "list", "orders"))] == ["positions"]
    csv = run(client, "view", "list", "orders", "--format", "csv").stdout.splitlines()
    assert csv[0].startswith("name,source,where,group_by,select,complete,records_read,groups,ungrouped")
    assert run(client, "view", "list", "none", "--format", "table").stdout == "no views\n"
    shown = run(client, "view", "describe", "positions", "--format", "table").stdout
    assert "SUM(/qty) AS qty, MAX(/px) AS high" in shown


def test_a_topic_is_no_view(client: FakeClient) -> None:
    for command in (("view", "describe", "orders"), ("view", "delete", "orders", "--force")):
        result = run(client, *command)
        assert (result.exit_code, "orders is a topic, and no view" in result.stderr) == (2, True)
    assert "orders" in client.tables


def test_a_view_is_deleted_when_one_is_sure(client: FakeClient) -> None:
    run(client, *CREATE, *DEFINED)
    assert run(client, "view", "delete", "positions").exit_code == 2, "there is no terminal to ask on"
    assert rows(run(client, "view", "delete", "positions", "--force")) == [{"view": "positions", "deleted_records": 0}]
    assert "positions" not in client.tables


def test_a_description_of_a_topic_tells_that_it_is_a_view(client: FakeClient) -> None:
    run(client, *CREATE, *DEFINED)
    client.statuses["positions"] = ViewStatus(complete=False, records_read=1200, groups=2, ungrouped=1)
    (row,) = rows(run(client, "topic", "describe", "positions"))
    assert row["view"] == {
        "source": "orders",
        "where": "/open",
        "group_by": "/account",
        "select": "SUM(/qty) AS qty, MAX(/px) AS high",
        "complete": False,
        "records_read": 1200,
        "groups": 2,
        "ungrouped": 1,
    }
    shown = run(client, "topic", "describe", "positions", "--format", "table").stdout
    assert "of orders by /account: SUM(/qty) AS qty, MAX(/px) AS high where /open; being built, 1,200 records" in shown
    assert "view" not in rows(run(client, "topic", "describe", "orders"))[0]


def test_the_doctor_names_views_that_are_not_complete(client: FakeClient) -> None:
    run(client, *CREATE, *DEFINED)
    built = client.describe_topic("positions")
    building = replace(built, view_status=ViewStatus(complete=False, records_read=5, groups=0, ungrouped=0))
    (finding,) = judged_topics([building])
    assert (finding.level, finding.check) == ("warning", "topics")
    assert "positions: the view is being built" in finding.found
    assert "sow view describe positions" in finding.advice
    done = replace(built, view_status=ViewStatus(complete=True, records_read=5, groups=1, ungrouped=0))
    # As a server has it: a view has no lifetimes, and nobody can turn them on.
    done = replace(done, settings=replace(done.settings, expiration="disabled"))
    assert [one.level for one in judged_topics([done])] == ["ok"]
    assert done.view == ViewDefinition("orders", ("/account",), ("SUM(/qty) AS qty", "MAX(/px) AS high"), "/open")
