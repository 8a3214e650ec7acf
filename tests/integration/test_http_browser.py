"""`EventSource` of Chromium on a page of a site that `--cors` lists: it goes on by itself after the door was killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.support.servers.browser import CHROMIUM, NEEDS_CHROMIUM, SECONDS
from tests.support.servers.http_door import running_door
from tests.support.servers.server import ServerProcess, free_port

PAGE = """<!doctype html><title>seen</title><script>
const seen = [], source = new EventSource(location.hash.slice(1));
source.addEventListener("put", event => seen.push([JSON.parse(event.data).data.n, event.lastEventId]));
</script>"""

pytestmark = NEEDS_CHROMIUM


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def site() -> Iterator[str]:
    """The origin of a page of this machine. Chromium lets no page of an address without HTTPS elsewhere call this
    machine, whatever CORS says, and the door's own pages may call nothing: an `EventSource` there never opens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_page_misses_nothing_when_the_door_is_killed(tmp_path: Path) -> None:
    """Chromium shows Last-Event-ID by itself, also where it has got nothing but the mark of its beginning."""
    port = free_port()
    with ServerProcess(tmp_path) as server, server.client() as client, site() as origin, sync_playwright() as driver:

        def publish(number: int) -> None:
            client.publish("lives", {"n": number}, key=str(number))

        publish(0)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(SECONDS)
        with running_door(server.address, "--cors", origin, port=port) as door:
            page.goto(f"{origin}/#{door.address}/v1/topics/lives/changes")
            page.wait_for_function("source.readyState === 1")
            door.kill()
            publish(1)
            publish(2)
        with running_door(server.address, "--cors", origin, port=port) as door:
            page.wait_for_function("seen.length === 2")
            publish(3)
            page.wait_for_function("seen.length === 3")
            door.kill()
            publish(4)
        with running_door(server.address, "--cors", origin, port=port):
            page.wait_for_function("seen.length === 4")
            assert [number for number, _ in page.evaluate("seen")] == [1, 2, 3, 4]
            browser.close()
