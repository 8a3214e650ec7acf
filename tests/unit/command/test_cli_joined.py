"""Lists of the command over all cells (rule C20), against fake clients."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sow_client import Figures, PermissionDenied, Placement, Unavailable
from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient

__all__ = ["client"]  # a fixture

AWAY = Unavailable("the cell c: nobody answers", reason="UNREACHABLE")
REFUSED = PermissionDenied("no", reason="PERMISSION_DENIED")


@pytest.fixture
def other(client: FakeClient) -> FakeClient:
    """The client of the cell b; `client` is that of the cell a."""
    made = FakeClient()
    client.others = {"b": made}
    client.add("orders")
    client.add("zebra")
    made.add("news")
    return made


def test_topics_of_all_cells_are_one_table_that_names_their_cells(client: FakeClient, other: FakeClient) -> None:
    listed = run(client, "topics")
    assert [(row["name"], row["cell"]) for row in rows(listed)] == [("news", "b"), ("orders", "a"), ("zebra", "a")]
    assert listed.exit_code == 0
    assert run(client, "topics", "--format", "csv").stdout.startswith("name,cell,message_type,")
    assert ["cell" in row for row in rows(run(client, "topics", "--here"))] == [False, False]
    client.others = {}
    assert ["cell" in row for row in rows(run(client, "topics"))] == [False, False]


@pytest.mark.parametrize(("error", "code"), [(AWAY, 3), (REFUSED, 1)])
def test_a_list_shows_the_cells_that_answer_and_warns_of_the_others(
    client: FakeClient, other: FakeClient, error: Unavailable | PermissionDenied, code: int
) -> None:
    client.others["c"] = error
    for command in (["topics"], ["view", "list"], ["durable", "list"], ["sessions"], ["status"]):
        listed = run(client, *command)
        assert listed.exit_code == code, command
        message = error.message.removeprefix("the cell c: ")
        assert listed.stderr == f"warning: without the cell c: {error.reason}: {message}\n"
    assert [row["name"] for row in rows(run(client, "topics"))] == ["news", "orders", "zebra"]


def test_a_list_of_which_no_cell_has_a_part_is_an_error(client: FakeClient, other: FakeClient) -> None:
    client.fails_with = other.fails_with = REFUSED
    listed = run(client, "topics")
    assert (listed.exit_code, listed.stdout) == (1, "")
    assert listed.stderr.startswith("sow: PERMISSION_DENIED: no")


def test_status_has_a_line_for_each_cell(
    client: FakeClient, other: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    other.placed = Placement("b", 3)
    assert [row["cell"] for row in rows(run(client, "status"))] == ["a", "b"]
    head, _, *lines = run(client, "status", "--format", "table").stdout.splitlines()
    assert head.split()[:3] == ["cell", "instance", "state"]
    assert [line.split()[0] for line in lines[:2]] == ["a", "b"]
    one = run(client, "status", "--here", "--format", "table").stdout
    assert "journal epoch" in one, "all about it"


def test_sessions_of_several_cells_have_ids_that_end_them_there(client: FakeClient, other: FakeClient) -> None:
    from sow_client import CallerSession

    now = datetime(2030, 1, 31, 12, tzinfo=UTC)
    client.callers = [CallerSession("s1", "desk", "jwt", "f", "x", now, {})]
    other.callers = [replace(client.callers[0], identity="ops")]
    assert [(row["id"], row["identity"]) for row in rows(run(client, "sessions"))] == [
        ("a/s1", "desk"),
        ("b/s1", "ops"),
    ]
    run(client, "sessions", "--end", "b/s1")
    assert client.arguments_of("end_session") == {"id": "b/s1"}
    run(client, "sessions", "--end", "b/u1")
    assert client.arguments_of("end_subscription") == {"id": "b/u1"}


def test_figures_of_several_cells_come_as_they_are_told(client: FakeClient, other: FakeClient) -> None:
    """Each stream of the fake client ends: its cell is missing from then on, and the last one ends the command."""
    now = datetime(2030, 1, 31, 12, tzinfo=UTC)
    client.figures = [Figures(now, timedelta(seconds=1), 9, 7.0, 0.0, 1, 2, 3, 4, 1, 5, 2, (), ())]
    other.figures = [replace(client.figures[0], changes_per_second=5.0)]
    watched = run(client, "status", "--watch")
    found = {row["cell"]: row["changes_per_second"] for row in rows(watched)}
    assert found == {"a": 7.0, "b": 5.0}
    assert watched.exit_code == 3
    assert "warning: without the cell" in watched.stderr
    lines = run(client, "status", "--watch", "--format", "table").stdout.splitlines()
    assert lines[0].split()[:3] == ["cell", "time", "changes/s"]
    assert sorted(line.split()[0] for line in lines[1:]) == ["a", "b"]


def test_a_first_cell_without_a_placement_takes_no_column_of_status_from_the_others(
    client: FakeClient, other: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "placement", lambda: Placement(""))
    monkeypatch.setattr(other, "placement", lambda: Placement("b", 7, "digest", {"b": ("b:1",)}))
    head, *lines = run(client, "status", "--format", "csv").stdout.splitlines()
    assert head.startswith("cell,instance,state,")
    assert "cell_problems" in head
    assert [line.partition(",")[0] for line in lines] == ["a", "b"]
