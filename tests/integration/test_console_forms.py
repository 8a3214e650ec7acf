"""Forms of the console in Chromium: records and topics that people make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.integration.test_console_browser import CHROMIUM, go, tab
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine (Debian: chromium)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("forms")) as made:
        yield made


@pytest.fixture(scope="module")
def writing(server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(server.address, "--allow-writes") as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


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
        page.get_by_label("payload").fill('\n{"id": 7, "price": 10.50}')
        page.get_by_role("button", name="look again").click()
        expect(page.get_by_label("payload")).to_have_value('\n{"id": 7, "price": 10.50}')
        page.get_by_role("button", name="Do it").click()
        page.get_by_role("link", name="back").click()
        expect(page.locator(".payload").first).to_contain_text("10.50")
        assert client.get_many("edited", ["7"])[0].payload == b'\n{"id": 7, "price": 10.50}'
