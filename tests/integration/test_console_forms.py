"""Forms of the console in Chromium: records, topics and views that people make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.servers.browser import NEEDS_CHROMIUM, chromium, console, drawn, faults_of, go, tab, writing
from tests.support.servers.console import RunningConsole
from tests.support.servers.server import ServerProcess

__all__ = ["chromium", "console", "writing"]  # fixtures
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("forms")) as made:
        yield made


def test_a_record_is_added_and_edited_by_clicks(
    server: ServerProcess, writing: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, writing) as page, server.client() as client:
        client.create_topic("edited", key=["/id"])
        go(page, writing, server, "records", "topic=edited")
        page.get_by_role("link", name="add a record …").click()
        page.get_by_label("payload").fill('{"id": 7,\n "price": 9.50}')
        page.get_by_role("button", name="look again").click()
        page.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status")).to_contain_text("is added, as version")
        go(page, writing, server, "key", "topic=edited&key=7")
        page.get_by_role("link", name="edit …").click()
        expect(page.get_by_label("payload")).to_have_value('{"id": 7,\n "price": 9.50}')
        faults = faults_of(page)
        page.get_by_label("payload").fill('\n{"id": 7, "price": 10.50}')
        page.get_by_role("button", name="look again").click()
        expect(page.get_by_label("payload")).to_have_value('\n{"id": 7, "price": 10.50}')
        faults += faults_of(page)
        page.get_by_role("button", name="Do it").click()
        page.get_by_role("link", name="back").click()
        expect(page.locator(".payload").first).to_contain_text("10.50")
        assert faults == []
        assert client.get_many("edited", ["7"])[0].payload == b'\n{"id": 7, "price": 10.50}'


def test_views_are_saved_by_name_opened_and_deleted(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("viewed", key=["/id"])
        client.publish_many("viewed", [{"id": n, "price": n, "secret": "s3cr3t"} for n in range(5)])
        go(page, console, server, "records", "topic=viewed&filter=/price+>+1&rows=50&count=1")
        drawn(page)
        page.locator("#grid thead button", has_text="/price").click()
        page.locator("#columns summary").click()
        page.locator("#columns label", has_text="/secret").click()
        page.locator("#views summary").click()
        expect(page.locator("#views output")).to_have_text("No view is saved in this browser.")
        for name in ("dear ones", evil):
            page.get_by_label("Name").fill(name)
            page.get_by_role("button", name="save this view").click()
        expect(page.locator("#views output")).to_have_text(f"saved: {evil}")
        expect(page.locator("#views li a")).to_have_text([evil, "dear ones"])
        assert page.locator("main img").count() == 0
        assert faults_of(page) == []
        kept = page.evaluate("localStorage.getItem('sow-views')")
        assert "s3cr3t" not in kept
        assert "count" not in kept, "no part of a view"
        page.evaluate("localStorage.removeItem('sow-columns-viewed')")

        go(page, console, server, "records")
        page.locator("#views summary").click()
        expect(page.get_by_label("Name")).to_be_hidden()
        page.get_by_role("link", name="dear ones").click()
        drawn(page)
        expect(page.locator("#filter")).to_have_value("/price > 1")
        expect(page.locator("[name=rows]")).to_have_value("50")
        expect(page.locator("#grid thead button", has_text="/secret")).to_have_count(0)
        assert "sort=%2Fprice" in page.url
        assert "count" not in page.url
        page.locator("#views summary").click()
        page.get_by_role("button", name="delete dear ones").click()
        expect(page.locator("#views li a")).to_have_text([evil])
        page.reload()
        page.locator("#views summary").click()
        expect(page.locator("#views li a")).to_have_text([evil])


@pytest.mark.parametrize(
    "kept", ["no JSON", '{"a": "topic=x"}', '[["a", 1], "topic=x", ["b"], ["good", "topic=viewed&evil=1&filter=+"]]']
)
def test_views_that_something_else_has_put_there_do_no_harm(
    server: ServerProcess, console: RunningConsole, chromium: Browser, kept: str
) -> None:
    with tab(chromium, console) as page:
        page.evaluate("kept => localStorage.setItem('sow-views', kept)", kept)
        go(page, console, server, "records")
        page.locator("#views summary").click()
        if "good" in kept:
            expect(page.locator("#views li a")).to_have_text(["good"])
            expect(page.locator("#views li a")).to_have_attribute("href", "records?topic=viewed")
        else:
            expect(page.locator("#views output")).to_have_text("No view is saved in this browser.")


def test_a_view_that_cannot_be_kept_is_not_said_to_be_saved(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    full = "[...Array(100)].map((_, n) => [`v${n}`, 'topic=x'])"
    with tab(chromium, console) as page:
        page.evaluate(f"() => localStorage.setItem('sow-views', JSON.stringify({full}))")
        go(page, console, server, "records", "topic=viewed")
        page.locator("#views summary").click()
        save = page.get_by_role("button", name="save this view")
        page.get_by_label("Name").fill("one more")
        save.click()
        expect(page.locator("#views output")).to_have_text("not saved: there are 100 already; delete one first")
        page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
        page.get_by_label("Name").fill("v7")
        save.click()
        expect(page.locator("#views output")).to_have_text("not saved: this browser keeps no more for the console")
