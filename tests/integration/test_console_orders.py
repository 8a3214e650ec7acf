"""The grid of an order: over a socket, and in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.servers.browser import NEEDS_CHROMIUM, chromium, drawn, go, tab
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess

__all__ = ["chromium"]  # a fixture


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("orders")) as made:
        yield made


@pytest.fixture(scope="module")
def console(server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(server.address) as made:
        yield made


@pytest.mark.parametrize("journal", [True, False])
def test_the_first_records_of_an_order_are_replaced_by_those_behind_them(
    server: ServerProcess, console: RunningConsole, journal: bool
) -> None:
    topic = f"ranked-{journal}"
    with server.client() as client:
        client.create_topic(topic, key=["/id"], journal=journal)
        for number in range(1, 5):
            client.publish(topic, {"id": number, "price": number})
        path = f"/{server.address}/records/live?topic={topic}&order=/price+DESC&rows=2"
        with console.socket(console.opened(), path) as socket:

            def order(wanted: list[str]) -> dict[str, Any]:
                while True:
                    frame = json.loads(socket.recv(30))
                    assert (frame["error"], frame["unranked"]) == (None, "")
                    socket.send(str(frame["frame"]))
                    if frame.get("order") == wanted:
                        return dict(frame)

            assert order(["4", "3"])["more"]
            client.sow_delete(topic, keys=["4"])
            assert [row[0] for row in order(["3", "2"])["rows"]] == ["2"]
            client.publish(topic, {"id": 1, "price": 9})
            assert order(["1", "3"])["more"]
            client.sow_delete(topic, keys=["1", "2"])
            assert not order(["3"])["more"]


@NEEDS_CHROMIUM
def test_the_rows_of_an_order_are_always_the_first_ones(
    server: ServerProcess, console: RunningConsole, chromium: Browser
) -> None:
    with tab(chromium, console) as page, server.client() as client:
        client.create_topic("ranked", key=["/id"])
        for number in range(1, 6):
            client.publish("ranked", {"id": number, "price": number})
        go(page, console, server, "records", "topic=ranked&order=/price+DESC&rows=3")
        drawn(page)
        keys = page.locator("#grid tbody a")
        expect(keys).to_have_text(["5", "4", "3"])
        client.sow_delete("ranked", keys=["4"])
        expect(keys).to_have_text(["5", "3", "2"])
        client.publish("ranked", {"id": 2, "price": 10})
        expect(keys).to_have_text(["2", "5", "3"])
        client.publish("ranked", {"id": 6, "price": 6})
        expect(keys).to_have_text(["2", "6", "5"])
        expect(page.locator("#read")).not_to_contain_text("left since")
        page.locator("#pause").click()
        client.sow_delete("ranked", keys=["6"])
        client.publish("ranked", {"id": 7, "price": 7})
        client.publish("ranked", {"id": 8, "price": 11})
        expect(keys).to_have_text(["2", "6", "5"])
        page.locator("#pause").click()
        expect(keys).to_have_text(["8", "2", "7"])
        client.sow_delete("ranked", keys=["1", "2", "3", "5", "7"])
        expect(keys).to_have_text(["8"])
        expect(page.locator("#read")).to_contain_text("1 records, all that match")
