"""A browser for tests: Chromium, tabs of people at the console, and axe.

[1]  Any message on the browser's console fails the test, so a page that breaks its own policy does.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS: Final = 60_000
"""For a busy machine; in milliseconds."""


def _axe() -> Path | None:
    """The script of axe-core, which that package brings."""
    found = importlib.util.find_spec("axe_playwright_python")
    return Path(found.origin).with_name("axe.min.js") if found and found.origin else None


AXE: Final = _axe()
NEEDS_CHROMIUM: Final = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine (Debian: chromium)"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def console(server: ServerProcess) -> Iterator[RunningConsole]:
    """A console at the `server` of the module."""
    with running_console(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def writing(server: ServerProcess) -> Iterator[RunningConsole]:
    """One that may write."""
    with running_console(server.address, "--allow-writes") as made:
        yield made


@contextmanager
def blank(chromium: Browser, scheme: str = "dark", *, width: int = 1_280, height: int = 720) -> Iterator[Page]:
    """A tab of somebody who has not logged in ([1])."""
    said: list[str] = []
    context = chromium.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        viewport={"width": width, "height": height},
    )
    context.set_default_timeout(SECONDS)
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text} {message.location}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    assert said == [], said


@contextmanager
def tab(
    chromium: Browser, console: RunningConsole, scheme: str = "dark", *, width: int = 1_280, height: int = 720
) -> Iterator[Page]:
    """A tab of somebody who has opened the one-time address."""
    with blank(chromium, scheme, width=width, height=height) as page:
        page.goto(console.address + console.one_time())
        yield page


def go(page: Page, console: RunningConsole, server: ServerProcess, name: str, query: str = "") -> None:
    page.goto(f"{console.address}/{server.address}/{name}?{query}")


def drawn(page: Page) -> None:
    """Waits for a frame of the grid."""
    page.locator("#grid tbody tr").first.wait_for()


def faults_of(page: Page) -> list[str]:
    """The violations that axe finds, with the elements; none where there is no axe."""
    if not AXE:
        return []
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [
        f"{page.url}: {one['id']}: {node['html']}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
