"""`sow console` over two cells, of which it knows one (rule C23)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from sow_client import EARLIEST
from tests.support.servers.browser import NEEDS_CHROMIUM, chromium, drawn, faults_of, tab
from tests.support.servers.cells import TwoCells
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import until

__all__ = ["chromium"]  # a fixture


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


@pytest.fixture(scope="module")
def console(cells: TwoCells) -> Iterator[RunningConsole]:
    with running_console(cells.home) as made:
        yield made


@pytest.fixture(scope="module")
def browser(console: RunningConsole) -> httpx.Client:
    return console.opened()


def made(cells: TwoCells, cell: str) -> str:
    """A topic with a record that falls due, and a durable."""
    topic = cells.topic(cell)
    with cells.direct(cell) as client:
        client.create_topic(topic, key=["/id"], expiration="enabled")
        client.publish(topic, {"id": 1}, ttl="9m")
        with client.durable(topic, "reader", start=EARLIEST) as durable:
            next(durable)
    return topic


def overview(browser: httpx.Client, server: str) -> Any:
    return browser.get(f"/{server}/overview.json").json()


@pytest.mark.slow
def test_one_address_of_one_cell_shows_all_cells(cells: TwoCells, browser: httpx.Client) -> None:
    here, there = made(cells, "a"), made(cells, "b")
    (a,), (b,) = cells.addresses.values()
    cells.place()  # they look at each other
    until(lambda: not overview(browser, a)["alarms"], 20, "there is no alarm")
    told = overview(browser, a)
    assert [(one["server"], one["cell"]) for one in told["instances"]] == [(a, "a"), (b, "b")]
    names = [one["instance"]["name"] for one in overview(browser, a)["instances"]]
    assert names == ["a-1", "b-1"]
    for server in (a, b):
        assert {(one["name"], one["cell"]) for one in overview(browser, server)["topics"]} >= {
            (here, "a"),
            (there, "b"),
        }
        due = browser.get(f"/{server}/due.json").json()
        assert {(here, "a"), (there, "b")} <= {*due["cells"].items()}
        assert {here, there} <= {one["topic"] for one in due["topics"]}
        durables = browser.get(f"/{server}/durables.json").json()
        assert {(here, "a"), (there, "b")} <= {*durables["cells"].items()}
        assert {here, there} <= {*browser.get(f"/{server}/records.json").json()["topics"]}
        ids = {one["id"].partition("/")[0] for one in browser.get(f"/{server}/connections.json").json()["sessions"]}
        assert ids == {"a", "b"}
        shown = browser.get(f"/{server}/overview").text
        assert '<th scope="col">cell</th>' in shown
        assert "No alarms" in shown
    assert browser.get("/127.0.0.1:1/overview").status_code == 404, "nobody names that one"


@pytest.mark.slow
def test_a_page_about_a_topic_goes_to_a_server_of_its_cell(cells: TwoCells, browser: httpx.Client) -> None:
    here, there = made(cells, "a"), made(cells, "b")
    (a,), (b,) = cells.addresses.values()
    for topic, server, other, pages in ((there, b, a, ["records", "key", "topic"]), (here, a, b, ["due"])):
        for page in pages:
            moved = browser.get(f"/{other}/{page}", params={"topic": topic, "key": "1"})
            assert moved.status_code == 303
            assert moved.headers["location"] == f"/{server}/{page}?topic={topic}&key=1"
        assert browser.get(f"/{server}/{pages[0]}", params={"topic": topic, "key": "1"}).status_code == 200
        records = browser.get(f"/{other}/records.json", params={"topic": topic}).json()["records"]
        assert [one["key"] for one in records] == ["1"], "and its JSON is the same everywhere"


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_a_browser_shows_all_cells_and_goes_to_the_cell_of_a_topic(
    cells: TwoCells, console: RunningConsole, chromium: Browser
) -> None:
    there = made(cells, "b")
    (a,), (b,) = cells.addresses.values()
    with tab(chromium, console) as page:
        page.goto(f"{console.address}/{a}/overview")
        expect(page.locator(".cards article h2", has_text="b-1")).to_be_visible()
        expect(page.locator(".servers a")).to_have_text([f"a {a}", f"b {b}"])
        faults = faults_of(page)
        page.locator("tbody a", has_text=re.compile(f"^{there}$")).click()
        expect(page).to_have_url(f"{console.address}/{b}/records?topic={there}")
        drawn(page)
        assert faults + faults_of(page) == []


@pytest.mark.long
def test_trouble_with_the_placement_is_an_alarm(cells: TwoCells, browser: httpx.Client) -> None:
    """C5, C7: a stray, and a cell with another placement."""
    (a,) = cells.addresses["a"]
    topic = made(cells, "a")

    def alarms() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for server, alarm in overview(browser, a)["alarms"]:
            found.setdefault(server, []).append(alarm)
        return found

    cells.place((topic, "b"))
    until(
        lambda: alarms() == {a: [f"{topic} lives in the cell b, and a copy of it is here: sow doctor"]},
        20,
        "the stray is told",
    )
    cells.place()
    until(lambda: not alarms(), 20, "there is no alarm")
    cells.place(("c-.*", "b"), at="a")
    until(lambda: any("the cell b has another placement: " in one for one in alarms().get(a, [])), 20, "they differ")
    cells.place()
    until(lambda: not alarms(), 20, "there is no alarm")


@pytest.mark.long
def test_a_cell_that_is_down_is_missing_and_the_others_are_there(cells: TwoCells, browser: httpx.Client) -> None:
    here, there = made(cells, "a"), made(cells, "b")
    (a,), (b,) = cells.addresses.values()
    until(lambda: there in str(overview(browser, a)["topics"]), 20, "it is listed")
    cells.servers["b"].kill9()
    try:
        until(lambda: "b" in overview(browser, a)["missing"], 20, "its cell is missing")
        told = overview(browser, a)
        assert here in {one["name"] for one in told["topics"]}
        assert there not in {one["name"] for one in told["topics"]}
        until(lambda: b in {server for server, _ in overview(browser, a)["alarms"]}, 20, "the instance is told")
        assert "The cell b is not in this list: " in browser.get(f"/{a}/durables").text
        assert here in browser.get(f"/{a}/records.json").json()["topics"]
        assert browser.get(f"/{a}/records.json", params={"topic": here}).json()["records"][0]["key"] == "1"
    finally:
        cells.servers["b"].start()
    until(lambda: not overview(browser, a)["missing"], 20, "it is there again")
