"""The console in Chromium: every page in both colour schemes, live changes, a lost server, the keyboard.

[1]  Any message on the browser's console fails the test, so a page that breaks its own policy does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from sow_console.pages import PAGES
from tests.integration.test_console import ABOUT, BIG, fill
from tests.support.console import RunningConsole, running_console
from tests.support.server import ServerProcess

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS: Final = 60_000
"""For a busy machine; in milliseconds."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine (Debian: chromium)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("browser")) as made, made.client() as client:
        fill(client)
        client.create_topic("wide", key=["/id"])
        client.publish_many("wide", [{"id": number, "n": number % 7} for number in range(300)])
        yield made


@pytest.fixture(scope="module")
def console(server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(chromium: Browser, console: RunningConsole, scheme: str = "dark") -> Iterator[Page]:
    """A tab of somebody who has opened the one-time address ([1])."""
    said: list[str] = []
    context = chromium.new_context(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text} {message.location}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(console.address + console.one_time())
    yield page
    context.close()
    assert said == []


def go(page: Page, console: RunningConsole, server: ServerProcess, name: str, query: str = "") -> None:
    page.goto(f"{console.address}/{server.address}/{name}?{query}")


def drawn(page: Page) -> None:
    """Waits for a frame of the grid."""
    page.locator("#grid tbody tr").first.wait_for()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_page_is_drawn_and_stays_live(
    server: ServerProcess, console: RunningConsole, chromium: Browser, scheme: str
) -> None:
    with tab(chromium, console, scheme) as page:
        for name, about in ABOUT.items():
            go(page, console, server, name, about)
            expect(page.locator("h1")).to_contain_text(PAGES[name].title)
            expect(page.locator("#state")).to_contain_text("as of")
            assert page.locator("#state").get_attribute("data-state") == "live"
            assert legible(page, "body", "main h1")
            if page.locator("th[scope=col]").count():
                assert legible(page, ".scroll", "th[scope=col]")


def legible(page: Page, ground: str, text: str) -> bool:
    """Whether text has a contrast of 4.5 to 1 at least, as WCAG asks for."""
    colours = page.evaluate(
        """([ground, text]) => {
            const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const rgb = (colour) => {
                canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data];
            };
            const of = (query, name) => rgb(getComputedStyle(document.querySelector(query))[name]);
            return [of(ground, "backgroundColor"), of(text, "color")];
        }""",
        [ground, text],
    )

    def light(colour: list[int]) -> float:
        parts = [part / 255 for part in colour[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(light, colours))
    return (high + 0.05) / (low + 0.05) >= 4.5


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


def test_the_page_says_what_was_read_and_what_matched(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "records", "topic=wide&filter=/n+=+3&rows=10")
        drawn(page)
        expect(page.locator("#read")).to_contain_text("10 of 43 that matched · 300 read")
        expect(page.locator("#plan")).to_contain_text("reads every record")


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


def test_charts_are_drawn_and_keep_up(server: ServerProcess, console: RunningConsole, chromium: Browser) -> None:
    with tab(chromium, console) as page:
        go(page, console, server, "server")
        chart = page.locator(".chart").first
        expect(chart.locator("canvas")).to_have_count(1)
        before = chart.get_attribute("data-chart")
        expect(chart).not_to_have_attribute("data-chart", before or "")
        expect(chart.locator("canvas")).to_have_count(1)
        expect(page.locator("main")).to_contain_text("topic_created")


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
