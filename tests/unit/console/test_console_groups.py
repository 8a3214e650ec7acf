"""The page of groups: what it asks for, its bars, and a server that does not know aggregates."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from sow_client._contract import Needed, too_old
from sow_console import charts
from sow_console.pages import groups
from tests.support.servers.console import SERVER, FakeClient, FakeConsole


def asked(**arguments: str) -> groups.Asked:
    return groups.asked({"topic": "trades", **arguments})


def test_the_command_asks_for_the_same() -> None:
    wanted = asked(by="/site, FLOOR(/px) AS px", total="/qty", filter="-/a < :n", parameters='{"n": 1, "t": "x"}')
    assert wanted.words == [
        "query", "--param", "n:=1", "--param", "t=x", "--group-by", "/site, FLOOR(/px) AS px",
        "--aggregate", "SUM(/qty) AS sum", "--order-by", "/sum DESC", "--top", "50", "--plot",
        "--", "trades", "-/a < :n",
    ]  # fmt: skip
    assert asked(by="/site").words[1:] == [
        "--group-by", "/site", "--aggregate", "COUNT(*) AS count", "--order-by", "/count DESC", "--top", "50", "--plot",
        "trades",
    ]  # fmt: skip


def test_the_name_of_the_number_is_none_of_the_groups() -> None:
    assert asked(by="/count").name == "count_"
    assert asked(by="/sum, /sum_", total="/x").order == "/sum__ DESC"


def test_bars_have_one_scale_with_zero() -> None:
    drawn = charts.bars([("a",), ("b", True), (2026,), (2.5,)], [30_000, -10_000, None, 0])
    assert [one.names for one in drawn] == [("a",), ("b", "true"), ("2026",), ("2.5",)], "a year has no comma"
    assert [one.value for one in drawn] == ["30,000", "-10,000", "–", "0"]
    assert [(one.begin, one.length, one.negative) for one in drawn] == [
        (0.25, 0.75, False),
        (0.0, 0.25, True),
        (0.25, 0.0, False),
        (0.25, 0.0, False),
    ]
    assert charts.bars([], []) == ()


def test_what_is_no_number_has_no_bar() -> None:
    """A text of a record as a number: "1e999999999" took all memory, and "word" ended the page."""
    drawn = charts.bars([("a",), ("b",), ("c",), ("d",)], ["1e999999999", "word", True, 2])
    assert [(one.value, one.length) for one in drawn] == [("1e999999999", 0), ("word", 0), ("true", 0), ("2", 1)]


def test_numbers_beyond_a_double_have_bars() -> None:
    first, second, third = charts.bars([("a",), ("b",), ("c",)], [10**400, 5 * 10**399, 1.5])
    assert (first.length, second.length, third.length) == (1.0, 0.5, 0.0)
    assert (first.value, third.value) == ("1.00000e+400", "1.5")


def test_an_older_server_is_told_with_what_it_needs_and_the_form_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(client: FakeClient, *given: object, **named: object) -> object:
        raise too_old(Needed("group_by", 3), SERVER, 2)

    monkeypatch.setattr(FakeClient, "query", query, raising=False)
    console = FakeConsole({"token": "ann"})
    with TestClient(console.app, base_url="http://127.0.0.1:7480", follow_redirects=False) as browser:
        browser.post("/login", data={"token": "token"}, headers={"Origin": "http://127.0.0.1:7480"})
        shown = browser.get(f"/{SERVER}/groups", params={"topic": "trades", "by": "/<b>", "total": "/qty"}).text
        assert "SERVER_TOO_OLD" in shown
        assert "it needs contract 3" in shown
        assert 'name="by" value="/&lt;b&gt;"' in shown
        assert 'name="total" value="/qty"' in shown
        twin = browser.get(f"/{SERVER}/groups.json", params={"topic": "trades", "by": "/a"})
        assert (twin.status_code, twin.json()["error"]["reason"]) == (400, "SERVER_TOO_OLD")
