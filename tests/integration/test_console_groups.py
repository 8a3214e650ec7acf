"""Groups in the console over a real server: what is drawn, and the command that gives the same (rules Q11, Q12)."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from sow_console.pages.groups import SHOWN
from tests.support.servers.browser import NEEDS_CHROMIUM, SECONDS, chromium, faults_of, tab
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess

__all__ = ["chromium"]  # a fixture

ATTACK = "<img src=x onerror=alert(1)>'\""
MANY = 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("groups")) as made, made.client() as client:
        client.create_topic("trades", key=["/id"])
        sites = ["ldn", "ldn", "ldn", "nyc", "nyc", ATTACK, None, ["a"]]
        trades = [{"id": number, "site": site, "qty": 10 - 5 * number} for number, site in enumerate(sites)]
        client.publish_many("trades", trades)
        client.create_topic("empty", key=["/id"])
        yield made


@pytest.fixture(scope="module")
def console(server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def browser(console: RunningConsole) -> httpx.Client:
    return console.opened()


def shown(server: ServerProcess, browser: httpx.Client, **arguments: str) -> str:
    answer = browser.get(f"/{server.address}/groups", params=arguments, follow_redirects=True)
    assert answer.status_code == 200
    return answer.text


def twin(server: ServerProcess, browser: httpx.Client, **arguments: str) -> dict[str, object]:
    answer = browser.get(f"/{server.address}/groups.json", params=arguments)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def by_the_command(found: dict[str, object]) -> list[object]:
    """The results of the command that the page shows, without its chart."""
    words = shlex.split(str(found["command"]))
    assert words[0] == "sow"
    words.remove("--plot")
    done = subprocess.run([sow(), *words[1:]], check=True, capture_output=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "results"),
    [
        ({"by": "/site"}, [{"site": "ldn", "count": 3}, {"site": "nyc", "count": 2}, {"site": ATTACK, "count": 1}]),
        (
            {"by": "/site", "total": "/qty"},
            [{"site": "ldn", "sum": 15}, {"site": ATTACK, "sum": -15}, {"site": "nyc", "sum": -15}],
        ),
        (
            {"by": "/site", "filter": "/site = :s", "parameters": json.dumps({"s": ATTACK})},
            [{"site": ATTACK, "count": 1}],
        ),
        ({"by": "/site", "filter": "/id > 99"}, []),
    ],
)
def test_the_page_and_its_command_have_the_same_groups(
    server: ServerProcess, browser: httpx.Client, arguments: dict[str, str], results: list[object]
) -> None:
    found = twin(server, browser, topic="trades", **arguments)
    assert found["results"] == results
    assert by_the_command(found) == results


def test_values_are_text_and_never_html(server: ServerProcess, browser: httpx.Client) -> None:
    page = shown(server, browser, topic="trades", by="/site")
    assert "<img" not in page
    assert html.escape(ATTACK, quote=True).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
    assert "2 in no group: a value to group by is null, an array or an object" in page
    assert "<b>3</b> groups of 8 records" in page


@pytest.mark.slow
def test_of_ten_thousand_groups_the_greatest_are_drawn(server: ServerProcess, browser: httpx.Client) -> None:
    with server.client() as client:
        client.create_topic("many", key=["/id"])
        with client.publisher("many", durability="buffered", batch_records=1_000) as publisher:
            for number in range(MANY):
                publisher.publish({"id": number, "group": number, "qty": number})
    page = shown(server, browser, topic="many", by="/group", total="/qty")
    assert page.count("<rect") == SHOWN
    assert f"{MANY - SHOWN:,} other groups are not shown." in page
    assert re.findall(r'<td class="n">([0-9,]+)</td>', page)[:2] == ["9,999", "9,998"]
    page = shown(server, browser, topic="many", by="/group")
    assert f"{MANY - SHOWN:,} other groups are not shown; they have {MANY - SHOWN:,} records together." in page


def test_no_groups_and_bad_expressions_are_no_dead_ends(server: ServerProcess, browser: httpx.Client) -> None:
    assert "There is no group: the topic is empty." in shown(server, browser, topic="empty", by="/x")
    missing = shown(server, browser, topic="trades", by="/stie")
    assert "There is no group: no record has a value to group by." in missing
    assert "no record has a value at <code>/stie</code>" in missing
    wrong = shown(server, browser, topic="trades", by="/site +")
    assert "EXPRESSION_INVALID" in wrong
    assert "<pre>  /site +\n         ^</pre>" in wrong
    assert 'name="by" value="/site +"' in wrong
    # It was two expressions, the second one a text, and the page ended with an error of its own.
    assert "EXPRESSION_INVALID" in shown(server, browser, topic="trades", by="/id", total="/qty) AS a, MAX(/site")
    assert "Name a field to group by" in shown(server, browser, topic="trades")
    assert ">trades</a>" in shown(server, browser)


@pytest.mark.slow
@NEEDS_CHROMIUM
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_bars_in_a_browser_compare_as_values_do_and_stay_live(
    server: ServerProcess, console: RunningConsole, chromium: Browser, scheme: str
) -> None:
    topic = f"live-{scheme}"
    with tab(chromium, console, scheme) as page, server.client() as client:
        client.create_topic(topic, key=["/id"])
        client.publish_many(topic, [{"id": n, "site": site, "qty": 7} for n, site in enumerate(["a", "a", ATTACK])])
        page.goto(f"{console.address}/{server.address}/records?topic={topic}")
        page.get_by_role("link", name="groups", exact=True).click()
        page.get_by_label("Group by").fill("/site")
        page.keyboard.press("Enter")
        rows, bars = page.locator(".groups tbody tr"), page.locator(".groups rect")
        expect(rows).to_have_count(2)
        expect(rows.nth(1).locator("th")).to_have_text(ATTACK)
        first, second = (bars.nth(number).bounding_box() for number in range(2))
        assert first is not None
        assert second is not None
        assert abs(first["width"] - 2 * second["width"]) < 3
        assert abs(first["x"] - second["x"]) < 2
        client.publish(topic, {"id": 3, "site": "b", "qty": -14})
        expect(rows).to_have_count(3, timeout=SECONDS)  # a page rests longer where it took long to make
        assert faults_of(page) == []
        page.get_by_label("Sum of").fill("/qty")
        page.keyboard.press("Enter")
        expect(page.locator(".groups rect.negative")).to_have_count(1)
        below, above = page.locator(".groups rect.negative").bounding_box(), bars.nth(1).bounding_box()
        assert below is not None
        assert above is not None
        assert abs(below["x"] + below["width"] - above["x"]) < 2, "zero is between them"
        assert faults_of(page) == []
        page.keyboard.press("Escape")
        page.locator("main").click()
        page.keyboard.press("1")
        expect(page.locator("h1")).to_contain_text("Overview")
        page.wait_for_load_state()  # its script takes keys
        page.keyboard.press("g")
        expect(page.locator("h1")).to_contain_text("Groups")
