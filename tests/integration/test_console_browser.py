"""The console in Chromium: every page in both colour schemes, live changes, a lost server, the keyboard, writes.

[1]  The pages are those of the application, so there is none without a test.
[2]  With SOW_CONSOLE_PICTURES=1 the pictures in docs/pictures are made anew (`make console-pictures`).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from sow_client import Client
from sow_console.pages import PAGES
from sow_console.pages.records import AGAIN_MAX
from tests.integration.test_console import ABOUT, BIG, ROWS, fill
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.browser import (
    AXE,
    NEEDS_CHROMIUM,
    SECONDS,
    blank,
    chromium,
    console,
    drawn,
    faults_of,
    go,
    tab,
    writing,
)
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ROOT, ServerProcess, free_port, until

__all__ = ["chromium", "console", "writing"]  # fixtures
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("browser")) as made, made.client() as client:
        fill(client)
        client.create_topic("wide", key=["/id"])
        client.publish_many("wide", [{"id": number, "n": number % 7} for number in range(300)])
        yield made


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_page_is_drawn_stays_live_and_has_no_fault_for_axe(
    server: ServerProcess, console: RunningConsole, chromium: Browser, scheme: str
) -> None:
    faults: list[str] = []
    with tab(chromium, console, scheme) as page:
        for name, one in PAGES.items():
            go(page, console, server, name, ABOUT[name])
            expect(page.locator("h1")).to_contain_text(one.title)
            expect(page.locator("#state")).to_contain_text("as of")
            assert page.locator("#state").get_attribute("data-state") == "live"
            if name == "records":
                drawn(page)
            faults += faults_of(page)
    assert faults == []
    if not AXE:
        pytest.skip("the pages are drawn; axe is not installed here (pip install axe-playwright-python)")


@pytest.mark.skipif(not AXE, reason="axe is not installed here (pip install axe-playwright-python)")
@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.long)])
def test_pages_without_content_and_those_of_faults_have_none_for_axe(
    server: ServerProcess, writing: RunningConsole, chromium: Browser, scheme: str
) -> None:
    with tab(chromium, writing, scheme) as page:
        faults = faults_of(page)
        for path in (
            "durables?topic=none",
            "topic?topic=none",
            "records?topic=orders&filter=/price+>",
            "key",
            "records",
        ):
            page.goto(f"{writing.address}/{server.address}/{path}")
            if "filter" in path:
                expect(page.locator("#filter-error")).to_contain_text("^")
            faults += faults_of(page)
        writes = ("delete?topic=orders&key=1&version=1", "add?topic=orders", "create")
        for path in ("/login", *(f"/{server.address}/write/{write}" for write in writes)):
            page.goto(writing.address + path)
            faults += faults_of(page)
    assert faults == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_alarms_of_all_instances_are_seen_at_one_that_does_not_answer(
    server: ServerProcess, chromium: Browser, scheme: str
) -> None:
    """The overview of a lost instance was an error, and said nothing of the others."""
    lost = f"127.0.0.1:{free_port()}"
    with running_console(f"{lost},{server.address}") as both, tab(chromium, both, scheme) as page:
        page.goto(f"{both.address}/{lost}/overview")
        expect(page.locator(".alarms li")).to_have_count(1)
        expect(page.locator(".alarms")).to_contain_text(f"{lost} not reachable")
        expect(page.locator(".tag.good").first).to_have_text("serving")
        expect(page.locator("main")).to_contain_text(f"{lost} does not tell its topics now.")
        assert faults_of(page) == []


# In the order of the document, which is the order in which it is read: no style reorders it.
CONTROLS: Final = """() => {
    const tabbable = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]";
    const every = [...document.querySelectorAll(tabbable)].filter((one) => one.tabIndex >= 0 && one.checkVisibility());
    const moved = [...document.querySelectorAll("*")].filter((one) => {
        const style = getComputedStyle(one);
        return style.order !== "0" || style.flexDirection.endsWith("reverse") || one.tabIndex > 0;
    });
    window.seen = [];
    addEventListener("focusin", ({ target }) => {
        if (every.includes(target)) window.seen.push(every.indexOf(target));
    });
    document.activeElement?.blur();
    return [every.length, moved.length];
}"""


def test_tab_reaches_every_control_in_the_order_of_reading(
    server: ServerProcess, writing: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, writing) as page:
        for name in PAGES:
            go(page, writing, server, name, ABOUT[name])
            if name == "records":
                drawn(page)
            count, moved = page.evaluate(CONTROLS)
            assert moved == 0, name
            for _ in range(count):
                page.keyboard.press("Tab")
            # Chromium also stops at places that scroll, which are no controls.
            while len(seen := page.evaluate("window.seen")) < count and page.evaluate(IS_INSIDE):
                page.keyboard.press("Tab")
            assert seen == list(range(count)), name


IS_INSIDE: Final = "document.activeElement !== document.body"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_controls_that_write_only_where_writes_were_allowed(
    server: ServerProcess, console: RunningConsole, chromium: Browser, name: str
) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, name, ABOUT[name])
        assert page.locator("[href*='/write/'], [action*='/write/'], [formaction]").count() == 0
        forms = page.locator("form:not([method=get], [method=dialog])")
        assert forms.evaluate_all("forms => forms.map((form) => form.getAttribute('action'))") == ["/logout"]


def test_a_person_logs_in_with_a_token_and_out_again(tmp_path: Path, chromium: Browser) -> None:
    write_access(tmp_path, identity("eu", "desk") + grant("desk", "orders", "read consume observe", ROWS))
    with ServerProcess(tmp_path, GUARDED) as server, client_of(server, "root") as root:
        fill(root)
        with running_console(server.address) as console, blank(chromium) as page:
            page.goto(f"{console.address}/{server.address}/records?topic=orders")
            expect(page.get_by_label("Your token")).to_be_focused()
            page.keyboard.type("eu")
            page.keyboard.press("Enter")
            page.wait_for_url(f"{console.address}/{server.address_of('orders')}/records?topic=orders")
            drawn(page)
            expect(page.locator(".who")).to_have_text("eu")
            assert page.evaluate("document.cookie") == "", "scripts do not see the session"
            page.get_by_role("button", name="log out").click()
            page.wait_for_url("**/login")
            page.go_back()
            page.wait_for_url("**/login?next=*")
            expect(page.get_by_label("Your token")).to_be_visible()


def test_a_record_is_touched_and_deleted_by_clicks(
    server: ServerProcess, writing: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, writing) as page, server.client() as client:
        client.publish("orders", {"id": 500, "price": 5}, ttl="9m")
        about = "topic=orders&key=500"
        go(page, writing, server, "key", about)
        page.get_by_label("Lifetime").fill("3h")
        page.get_by_role("button", name="touch …").click()
        expect(page.locator(".shell")).to_contain_text("touch --ttl 3h orders 500")
        assert client.get_many("orders", ["500"])[0].data == {"id": 500, "price": 5}
        page.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_contain_text("It expires at")
        page.get_by_role("link", name="back").click()
        expect(page.locator("main")).to_contain_text("in 2h59m")
        page.get_by_role("link", name="delete …").click()
        expect(page.get_by_role("heading")).to_have_text("Delete a record")
        page.get_by_role("link", name="leave it").click()
        assert client.get_many("orders", ["500"]), "it was left"
        page.get_by_role("link", name="delete …").click()
        page.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_have_text("The record is deleted.")
        assert client.get_many("orders", ["500"]) == []
        page.get_by_role("link", name="back").click()
        expect(page.locator("main")).to_contain_text("There is no live record of this key")


def test_a_dead_letter_is_published_again_by_clicks(
    server: ServerProcess, writing: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, writing) as page, server.client() as client:
        client.create_topic("bids.dead")
        client.create_topic("bids", key=["/id"], expiration="enabled", dead_letter="bids.dead")
        client.publish("bids", {"id": 1, "price": 9.5}, ttl="1ms")
        until(lambda: client.count("bids.dead"), 30, "the letter")
        go(page, writing, server, "dead-letters", "topic=bids.dead")
        faults = faults_of(page)
        page.get_by_role("link", name="publish again …").click()
        faults += faults_of(page)
        page.get_by_label("ttl").fill("9m")
        page.get_by_role("button", name="look again").click()
        expect(page.locator(".shell").first).to_contain_text("--ttl 9m")
        page.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_contain_text("the letter is deleted")
        assert client.get_many("bids", ["1"])[0].data == {"id": 1, "price": 9.5}
        page.get_by_role("link", name="back").click()
        expect(page.locator("main")).to_contain_text("No letter is here")
        assert faults == []


@pytest.mark.long
def test_all_matches_of_a_large_topic_are_counted_at_a_click(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with server.client() as client:
        client.create_topic("large", key=["/id"], journal=False)
        with client.publisher("large", durability="buffered", batch_records=1_000) as publisher:
            for number in range(AGAIN_MAX + 1):
                publisher.publish({"id": number})
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=large&rows=3")
        drawn(page)
        expect(page.locator("#read")).to_contain_text("the first 3, more match")
        page.get_by_role("link", name="count them").click()
        expect(page.locator("#read")).to_contain_text("3 of 100,001 that matched")
        expect(page.get_by_role("link", name="count them")).to_have_count(0)


def test_a_change_is_drawn_and_a_removal_takes_the_row_away(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page, server.client() as client:
        go(page, console, server, "records", "topic=orders&filter=/price+>+0")
        drawn(page)
        row = page.locator("#grid tbody tr", has=page.locator("a", has_text=re.compile("^3$")))
        expect(row).to_contain_text(str(BIG))
        client.publish("orders", {"id": 3, "price": 4321.50}, ttl="9m")
        expect(row).to_contain_text("4321.5")
        client.publish("orders", {"id": 77, "price": 1}, ttl="9m")
        expect(page.locator("#read")).to_contain_text("4 records, all that match")
        client.publish("orders", {"id": 77, "price": -1}, ttl="9m")
        expect(page.locator("#read")).to_contain_text("3 records, all that match")
        client.sow_delete("orders", keys=["77"])


def test_many_changes_at_a_time_are_drawn_with_few_layouts(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    """Each changed cell made the browser lay out the whole table: with 2,000 rows and 5,000 changes a second it drew
    nothing for minutes."""
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("busy", key=["/id"])
        client.publish_many("busy", [{"id": number, "a": 0, "b": 0} for number in range(400)])
        go(page, console, server, "records", "topic=busy&rows=400")
        drawn(page)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def layouts() -> float:
            found = session.send("Performance.getMetrics")["metrics"]
            return float(next(one["value"] for one in found if one["name"] == "LayoutCount"))

        page.evaluate(
            """() => new MutationObserver((seen) => {
                window.flashed ||= seen.some(({ target }) => target.classList.contains("flash"));
            }).observe(document.querySelector("#grid tbody"), { subtree: true, attributeFilter: ["class"] })"""
        )
        before = layouts()
        client.publish_many("busy", [{"id": number, "a": 7, "b": 7} for number in range(400)])
        rows = page.locator("#grid tbody tr")
        expect(rows.first).to_contain_text("77")
        expect(rows.last).to_contain_text("77")  # out of sight
        assert page.evaluate("window.flashed")
        assert layouts() - before < 200, "there were 800 cells to fill"


def test_the_page_says_what_was_read_and_what_matched(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=wide&filter=/n+=+3&rows=10")
        drawn(page)
        expect(page.locator("#read")).to_contain_text("10 of 43 that matched · 300 read")
        expect(page.locator("#plan")).to_contain_text("reads every record")
        expect(page.locator("#absent")).to_be_hidden()
        go(page, console, server, "records", "topic=wide&filter=/nn+=+3&order=/zz")
        expect(page.locator("#absent")).to_contain_text(
            "no record that was read has a value in /nn: is the name right?"
        )
        expect(page.locator("#absent")).to_contain_text("/zz")


def test_a_wrong_filter_is_shown_and_its_column_selected(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=orders&filter=/price+>+1+AND+foo")
        expect(page.locator("#filter-error")).to_contain_text("^")
        expect(page.locator("#filter")).to_be_focused()
        assert page.evaluate("document.getElementById('filter').selectionStart") == len("/price > 1 AND ")


def test_sorting_is_exact_beyond_the_numbers_of_a_browser(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("big", key=["/id"])
        client.publish_many("big", [{"id": "a", "n": 2**60 + 1}, {"id": "b", "n": 2**60}, {"id": "c", "n": 2**60 + 2}])
        go(page, console, server, "records", "topic=big")
        drawn(page)
        heading = page.get_by_role("button", name="/n", exact=True)
        heading.click()
        keys = page.locator("#grid tbody a")
        expect(keys).to_have_text(["b", "a", "c"])
        page.keyboard.press("Enter")  # the heading still has the focus
        expect(keys).to_have_text(["c", "a", "b"])


def test_columns_and_order_are_in_the_address(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=orders")
        drawn(page)
        for _ in range(2):
            page.locator("#grid thead button", has_text="/price").click()
        page.locator("#columns summary").click()
        page.locator("#columns label", has_text="/account").click()
        assert "sort=-%2Fprice" in page.url
        address = page.url
        keys = page.locator("#grid tbody a").all_text_contents()
        page.evaluate("localStorage.clear()")
        page.goto(address)
        drawn(page)
        assert page.locator("#grid tbody a").all_text_contents() == keys
        expect(page.locator("#grid thead button", has_text="/account")).to_have_count(0)
        expect(page.locator("#grid thead button", has_text="/price")).to_have_count(1)
        saved = page.locator("a.save", has_text="csv").get_attribute("href") or ""
        assert "column=%2Fprice" in saved
        assert "account" not in saved
        page.locator("#filter").fill("/price > 0")
        page.get_by_role("button", name="Show").click()
        drawn(page)
        assert "sort=-%2Fprice" in page.url
        expect(page.locator("#grid thead button", has_text="/account")).to_have_count(0)


def test_charts_of_the_past_are_there_at_once(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    """X11: the server has taken the figures, and nobody has looked."""
    there = server.address_of("orders")

    def samples() -> int:
        with Client(there) as client, closing(client.watch_figures("1h", history="1h")) as watching:
            return len(list(takewhile(lambda one: one.elapsed, watching)))

    until(lambda: samples() >= 2, 30, "two samples")
    with tab(chromium, console) as page:
        page.goto(f"{console.address}/{there}/server")
        chart = page.locator(".chart").first
        expect(chart.locator("canvas")).to_have_count(1)
        drawn = json.loads(chart.get_attribute("data-chart") or "")
        assert len(drawn["seconds"]) >= 2, "as it was loaded"
        assert max(drawn["series"][0]["values"]) > 0, "the topics were filled before"
        expect(page.locator("h2").first).to_contain_text("the last ")
        page.get_by_role("link", name="two minutes, each second").click()
        expect(page.locator("main a[aria-current=true]").first).to_have_text("two minutes, each second")
        go(page, console, server, "overview")
        assert len((page.locator("svg.line polyline").first.get_attribute("points") or "").split()) >= 2


def test_charts_are_drawn_and_keep_up(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "server", "within=2m")
        chart = page.locator(".chart").first
        expect(chart.locator("canvas")).to_have_count(1)
        before = chart.get_attribute("data-chart")
        expect(chart).not_to_have_attribute("data-chart", before or "")
        expect(chart.locator("canvas")).to_have_count(1)
        expect(page.locator("main")).to_contain_text("topic_created")


DRAWN: Final = """async values => {
    const place = document.querySelector(".chart").cloneNode();
    const series = [{ label: "one", values }], seconds = values.map((_, at) => 5 * at);
    document.querySelector(".chart").after(place);
    place.dataset.chart = JSON.stringify({ title: "alone", unit: "count", seconds, series });
    await new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    const canvas = place.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, at) => at % 4 === 3 && value).length;
}"""
"""The number of pixels that a chart of these values has."""


def test_a_value_between_two_gaps_is_drawn(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "server")
        expect(page.locator(".chart canvas").first).to_be_visible()
        none: list[float | None] = [None] * 700
        assert page.evaluate(DRAWN, [*none[:350], 0.5, *none[:349]]) > page.evaluate(DRAWN, none)


def test_the_keyboard_reaches_everything(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "overview")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("2")
        page.wait_for_url("**/records")
        go(page, console, server, "records", "topic=wide")
        drawn(page)
        page.keyboard.press("/")
        expect(page.locator("#topic")).to_be_focused()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.closest('tbody') !== null"):
                break
        page.keyboard.press("ArrowDown")
        page.keyboard.press("End")
        page.keyboard.press("Home")
        assert page.evaluate("document.activeElement.textContent") == "1"
        page.keyboard.press("Enter")
        page.wait_for_url("**/key?topic=wide&key=1")


def test_the_keys_are_told_on_the_page(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "overview")
        expect(page.locator("#state")).to_contain_text("as of")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("dark or light")
        page.keyboard.press("2")  # no page is left by a key that is meant for the dialog
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.keyboard.press("0")
        page.wait_for_url("**/server")


def test_a_field_of_the_filter_is_completed(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=orders")
        drawn(page)
        page.locator("#filter").press_sequentially("/pr")
        expect(page.get_by_role("option")).to_have_text(["/price"])
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#filter")).to_have_value("/price")


def test_a_lost_server_is_said_and_the_page_goes_on_by_itself(
    tmp_path_factory: pytest.TempPathFactory, chromium: Browser
) -> None:
    with ServerProcess(tmp_path_factory.mktemp("lost")) as server:
        with server.client() as client:
            fill(client)
        with running_console(server.address) as console:
            for name in ("records", "durables"):
                with tab(chromium, console) as page:
                    go(page, console, server, name, "topic=orders")
                    expect(page.locator("#state")).to_contain_text("as of")
                    if name == "records":
                        drawn(page)
                    server.kill9()
                    expect(page.locator("#state")).to_contain_text("disconnected since", timeout=SECONDS)
                    expect(page.locator("body")).to_have_class("old")
                    assert faults_of(page) == [], "it is to be read all the same"
                    if name == "records":
                        expect(page.locator("#grid tbody tr")).to_have_count(3)
                    server.start()
                    expect(page.locator("#state")).not_to_contain_text("disconnected", timeout=SECONDS)
                    expect(page.locator("body")).not_to_have_class("old")


def test_the_choice_of_colours_is_kept(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "overview")
        page.locator("#theme").click()
        go(page, console, server, "due")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_a_payload_that_looks_like_a_page_is_text(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("evil", key=["/id"])
        client.publish("evil", {"id": evil, evil: evil})
        for name, query in (
            ("records", "topic=evil"),
            ("key", f"topic=evil&key={evil}"),
            ("durables", f"topic={evil}"),
        ):
            go(page, console, server, name, query)
            if name == "records":
                drawn(page)
            expect(page.locator("main")).to_contain_text("onerror=alert(1)") if name != "durables" else None
            assert page.locator("main img, main script").count() == 0


def test_the_grid_has_its_bound_when_more_records_come_than_were_there(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("growing", key=["/id"])
        client.publish_many("growing", [{"id": number} for number in range(3)])
        go(page, console, server, "records", "topic=growing&rows=5")
        drawn(page)
        client.publish_many("growing", [{"id": number} for number in range(100, 200)])
        expect(page.locator("#read")).to_contain_text("the first 5, more match")
        expect(page.locator("#grid tbody tr")).to_have_count(5)


def test_the_focus_stays_in_the_grid_when_its_row_moves_leaves_or_is_made_anew(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("moving", key=["/id"])
        client.publish_many("moving", [{"id": name, "n": n} for n, name in enumerate("abc")])
        go(page, console, server, "records", "topic=moving")
        drawn(page)
        page.get_by_role("button", name="/n").click()
        page.locator("#grid tbody td").first.focus()
        focused = page.locator("#grid td:focus")
        expect(focused).to_have_text("a")
        client.publish("moving", {"id": "a", "n": 9})
        expect(page.locator("#grid tbody tr td:first-child")).to_have_text(["b", "c", "a"])
        expect(focused).to_have_text("a")
        client.publish("moving", {"id": "a", "n": 9, "new": 1})
        expect(page.locator("#grid thead")).to_contain_text("/new")
        expect(focused).to_have_text("a")
        client.sow_delete("moving", keys=["a"])
        expect(page.locator("#grid tbody tr")).to_have_count(2)
        expect(focused).to_have_text("c")


def test_records_of_ten_thousand_fields_are_drawn(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    """Each row took half a second, as each field was looked for in a list of all."""
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("fields", key=["/id"])
        client.publish_many("fields", [{"id": n} | {f"f{i}": i for i in range(10_000)} for n in range(5)])
        go(page, console, server, "records", "topic=fields")
        expect(page.locator("#grid tbody tr")).to_have_count(5)
        assert page.locator("#columns input").count() == 1_000 + 5


def test_a_write_reaches_the_key_that_was_asked_about_whatever_its_line_breaks_are(
    server: ServerProcess, writing: RunningConsole, chromium: Browser
) -> None:
    """A browser sends the field of a form with CR LF for LF: another record was deleted."""
    with tab(chromium, writing) as page, server.client() as client:
        client.create_topic("breaks", key=["/id"])
        client.publish_many("breaks", [{"id": "a\nb"}, {"id": "a\r\nb"}])
        go(page, writing, server, "key", "topic=breaks&key=a%0Ab")
        page.get_by_role("link", name="delete …").click()
        page.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_have_text("The record is deleted.")
        assert [one.key for one in client.query("breaks")] == ["a\r\nb"]


def test_logging_out_ends_the_open_pages(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=orders")
        drawn(page)
        other = page.context.new_page()
        go(other, console, server, "overview")
        other.get_by_role("button", name="log out").click()
        other.wait_for_url("**/login")
        expect(page.locator("#problem")).to_contain_text("Your session has ended")
        expect(page.locator("#state")).to_contain_text("logged out")


# ---- pictures ----

PICTURES: Final = ROOT / "docs" / "pictures"
SHOWN: Final = {
    "console-overview": ("dark", "overview", ""),
    "console-records": (
        "dark",
        "records",
        "topic=orders&filter=/symbol+=+'ACME'+AND+/quantity+>+100&order=/price+DESC",
    ),
    "console-key": ("light", "key", "topic=orders&key=1007"),
    "console-due": ("light", "due", "within=10m"),
    "console-groups": ("light", "groups", "topic=orders&by=/symbol,+/side&total=/price+*+/quantity"),
}
"""The pictures in docs/console.md: colours, page, arguments."""
PICTURE_BYTES_MAX: Final = 100_000


def test_each_picture_is_small_and_shown() -> None:
    text = (ROOT / "docs" / "console.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(pictures/(.*)\.png\)", text)) == set(SHOWN)
    assert {file.name for file in PICTURES.glob("console-*")} == {f"{name}.png" for name in SHOWN}
    for name in SHOWN:
        data = (PICTURES / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) <= PICTURE_BYTES_MAX, name


@pytest.mark.skipif("SOW_CONSOLE_PICTURES" not in os.environ, reason="made on request: make console-pictures")
def test_pictures_are_made(tmp_path: Path, chromium: Browser) -> None:
    # Two other topics, and orders that fall due here and there; one with a story.
    draws = random.Random(18)
    config = "[topics.orders]\nkey = ['/id']\nexpiration = 'enabled'\nindex = ['/symbol']\n"
    config += "[topics.quotes]\nkey = ['/symbol']\nexpiration = 'enabled'\n[topics.desks]\nkey = ['/name']\n"

    def order(number: int) -> bytes:
        symbol, side = draws.choice(["ACME", "BOLT", "CORA", "DUNE"]), draws.choice(["buy", "sell"])
        price, quantity = f"{draws.uniform(9, 99):.2f}", draws.randrange(10, 900)
        values = f'"symbol":"{symbol}","side":"{side}","price":{price},"quantity":{quantity},"desk":"eu"'
        return f'{{"id":{number},{values}}}'.encode()

    with ServerProcess(tmp_path, '[server]\ninstance = "london"\n' + config, port=7450) as server:
        with server.client() as client, running_console(server.address) as console:

            def publish(number: int) -> None:
                client.publish("orders", order(number), ttl=f"{draws.randrange(20, 900)}s")

            for number in range(1_000, 1_400):
                publish(number)
            client.publish_many("quotes", [{"symbol": f"S{n}", "bid": n} for n in range(120)], ttl="15m")
            client.publish_many("desks", [{"name": name} for name in ("eu", "us", "asia")])
            values = '"symbol":"ACME","side":"buy","price":%s,"quantity":%d,"desk":"eu"'
            for price, quantity in (("41.50", 400), ("41.75", 400), ("42.00", 250)):
                client.publish("orders", ('{"id":1007,' + values % (price, quantity) + "}").encode(), ttl="10m")
            client.touch("orders", "1007", ttl="20m")
            for name, (scheme, page_name, about) in SHOWN.items():
                with tab(chromium, console, scheme, width=1_040, height=560) as page:
                    go(page, console, server, page_name, about)
                    for _ in range(64 if page_name == "overview" else 2):
                        for _ in range(draws.randrange(4, 30)):
                            publish(draws.randrange(1_010, 1_400))
                        page.wait_for_timeout(700)  # its charts want some seconds of life
                    page.screenshot(path=PICTURES / f"{name}.png")
