"""`sow console` under attack, in a process of its own: raw requests, and values that a person may not see.

The rest of what it refuses is tested without servers, in `tests/unit/console/test_console_guards.py`.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from sow_console.guards import POLICY
from sow_console.live import ENDED
from sow_console.pages import PAGES
from sow_console.writes import CHECKS, WRITES
from tests.integration.test_canary import CANARY, NUMBER, tells
from tests.integration.test_console import ABOUT, ROWS, csrf_of, fill
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess

SECONDS: Final = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`eu` may see the rows of its desk, without one field, and `both` all of them."""
    folder = tmp_path_factory.mktemp("guarded")
    text = identity("eu", "desk") + grant("desk", "orders", "read consume observe", ROWS)
    text += identity("both", "all") + grant("all", ".*", "read consume observe")
    write_access(folder, text)
    with ServerProcess(folder, GUARDED) as made, client_of(made, "root") as root:
        fill(root)
        root.create_topic("hidden", key=["/id"], expiration="enabled")
        root.publish("hidden", {"id": CANARY, "n": NUMBER}, ttl="9m")
        root.publish("orders", {"id": 1, "desk": "eu", "price": 7, "secret": CANARY, "account": 1}, ttl="9m")
        root.publish("orders", {"id": CANARY, "desk": "us", "price": NUMBER}, ttl="9m")
        root.publish("orders", {"id": 77, "desk": "us", "note": CANARY}, ttl="9m")
        root.publish("orders", {"id": 77, "desk": "us", "note": CANARY, "price": NUMBER}, ttl="9m")
        yield made


@pytest.fixture(scope="module")
def console(server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(server.address, "--allow-writes") as made:
        yield made


# ---- a canary ----

QUERIES: Final = (
    "",
    "topic=hidden&key=1",
    "topic=hidden&filter=/n+>+1&order=/n",
    "topic=orders&filter=/secret+IS+NOT+NULL&order=/secret",
    "topic=orders&filter=/secret+LIKE+'('",
    "topic=orders&filter=/desk+=+'us'",
    "topic=orders&filter=/price+>&order=/note",
    "topic=orders&key=77",
    "topic=orders&key=77&upto=x",
    "topic=orders&rows=2000&count=1&within=10m",
    "topic=orders&by=/secret",
    "topic=orders&by=/desk&total=/secret",
    "topic=orders&by=@key&filter=/price+>+0",
    "topic=hidden&by=/n",
)
"""Each names hidden topics, rows or fields, or is wrong."""


def test_nothing_hidden_is_on_a_page_in_its_json_or_in_an_error(server: ServerProcess, console: RunningConsole) -> None:
    with closing(console.logged_in("eu")) as browser:
        for page in PAGES:
            for query in (ABOUT[page], *QUERIES):
                for ending in ("", ".json"):
                    answer = browser.get(f"/{server.address}/{page}{ending}", params=httpx.QueryParams(query))
                    assert answer.status_code < 500, answer.text
                    assert not tells(answer.content), f"{page}{ending}?{query}"
                    assert not tells(str(answer.headers).encode())
        for kind in ("ndjson", "csv"):
            for query in (*QUERIES, "topic=orders&column=/secret&column=/note"):
                saved = browser.get(f"/{server.address}/export", params=httpx.QueryParams(f"{query}&kind={kind}"))
                assert not tells(saved.content), f"{kind}: {query}"


def test_nothing_hidden_comes_over_a_socket(server: ServerProcess, console: RunningConsole) -> None:
    with ExitStack() as stack:
        browser = stack.enter_context(closing(console.logged_in("eu")))
        about = [
            (page, query) for page in PAGES for query in (ABOUT[page], "topic=orders&key=77", "topic=hidden&key=1")
        ]
        paths = [f"/{server.address}/{page}/live?{httpx.QueryParams(query)}" for page, query in about]
        # All of them first: a page makes its first frame after its interval.
        for path, followed in [(path, stack.enter_context(console.socket(browser, path))) for path in paths]:
            assert not tells(followed.recv(SECONDS, decode=False)), path


def test_changes_reach_a_grid_without_what_is_hidden(server: ServerProcess, console: RunningConsole) -> None:
    with (
        closing(console.logged_in("eu")) as browser,
        console.socket(browser, f"/{server.address}/records/live?topic=orders") as followed,
        client_of(server, "root") as root,
    ):
        frames = [followed.recv(SECONDS, decode=False)]
        root.publish("orders", {"id": 1, "desk": "eu", "price": 8, "secret": CANARY}, ttl="9m")
        root.publish("orders", {"id": 2, "desk": "us", "price": 8, "secret": CANARY}, ttl="9m")
        root.publish("orders", {"id": 3, "desk": "eu", "price": 88, "secret": CANARY}, ttl="9m")
        while b'\\"price\\":88' not in frames[-1]:
            followed.send(str(len(frames)))
            frames.append(followed.recv(SECONDS, decode=False))
        assert not any(map(tells, frames))


def test_the_canary_is_shown_to_those_who_may_see_it(server: ServerProcess, console: RunningConsole) -> None:
    with closing(console.logged_in("both")) as browser:
        seen = {
            page: tells(browser.get(f"/{server.address}/{page}.json", params={"topic": "orders", "key": "77"}).content)
            for page in ("records", "key")
        }
        assert seen == {"records": True, "key": True}, "so the tests above do look for it"


def test_a_refused_write_tells_nothing_hidden(server: ServerProcess, console: RunningConsole) -> None:
    with closing(console.logged_in("eu")) as browser:
        csrf = csrf_of(browser.get(f"/{server.address}/overview").text)
        about = {"topic": "orders", "key": "77", "ttl": "1m", "durable": "d", "id": "x"}
        for kind, name, write in [("write", *one) for one in WRITES.items()] + [
            ("check", *one) for one in CHECKS.items()
        ]:
            path = f"/{server.address}/{kind}/{name}"
            given = {field: about.get(field, "1") for field in write.fields}
            assert not tells(browser.get(path, params=given).content), name
            done = browser.post(path, data=given | {"csrf": csrf}, headers={"Origin": console.address})
            assert 400 <= done.status_code < 500, done.text
            assert not tells(done.content), name


# ---- one person's session and another's ----


def test_each_session_shows_what_its_own_token_may_see(server: ServerProcess, console: RunningConsole) -> None:
    path = f"/{server.address}/records/live?topic=orders"
    with closing(console.logged_in("eu")) as one, closing(console.logged_in("both")) as other:
        for browser, sees in ((one, False), (other, True), (one, False)):
            with console.socket(browser, path) as followed:
                assert tells(followed.recv(SECONDS, decode=False)) == sees
        assert one.get("/" + server.address + "/overview").text.count(">eu<") == 1
        csrf = csrf_of(other.get(f"/{server.address}/records").text)
        own = {"Origin": console.address}
        assert one.post("/logout", data={"csrf": csrf}, headers=own).status_code == 403
        write = f"/{server.address}/write/delete"
        given = {"topic": "orders", "key": "1", "csrf": csrf}
        assert one.post(write, data=given, headers=own).status_code == 403


def test_nobody_is_lent_the_token_of_the_environment(server: ServerProcess, tmp_path: Path) -> None:
    """A client reads SOW_TOKEN_FILE. So whoever opened the one-time address once had the rights of that token."""
    token = tmp_path / "token"
    token.write_text("both")
    token.chmod(0o600)
    with running_console(server.address, token_file=token) as console, closing(console.opened()) as browser:
        page = browser.get(f"/{server.address}/records.json?topic=orders")
    assert not tells(page.content)
    assert "UNAUTHENTICATED" in page.text


def test_a_stolen_cookie_is_worth_nothing_after_the_log_out(server: ServerProcess, console: RunningConsole) -> None:
    path = f"/{server.address}/records"
    with closing(console.logged_in("both")) as browser, closing(console.browser()) as thief:
        thief.cookies.update(browser.cookies)
        with console.socket(thief, f"{path}/live?topic=orders") as stolen:
            stolen.recv(SECONDS)
            form = {"csrf": csrf_of(browser.get(path).text)}
            assert browser.post("/logout", data=form, headers={"Origin": console.address}).status_code == 303
            with pytest.raises(ConnectionClosed) as ended:
                stolen.recv(SECONDS)
            assert ended.value.rcvd is not None
            assert ended.value.rcvd.code == ENDED
        assert thief.get(path).headers["location"].startswith("/login")
        assert thief.get(f"{path}.json").status_code == 401
        with console.socket(thief, f"{path}/live?topic=orders") as late, pytest.raises(ConnectionClosed, match="4401"):
            late.recv(SECONDS)


# ---- bytes on the wire ----


def said(console: RunningConsole, data: bytes) -> bytes:
    """All that is answered until the console ends the connection."""
    host, port = console.host.split(":")
    with socket.create_connection((host, int(port)), SECONDS) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def request(console: RunningConsole, line: str, *more: str, body: str = "") -> bytes:
    lines = [f"{line} HTTP/1.1", f"Host: {console.host}", f"Origin: {console.address}", *more, "", body]
    return "\r\n".join(lines).encode()


def test_two_requests_in_the_place_of_one_are_refused(server: ServerProcess, console: RunningConsole) -> None:
    """A proxy that reads the other length would see one request here, which it lets through."""
    form = "Content-Type: application/x-www-form-urlencoded"
    hidden = "0\r\n\r\n" + request(console, "GET /static/theme.js").decode()
    both = request(console, "POST /login", form, "Content-Length: 4", "Transfer-Encoding: chunked", body=hidden)
    answers = said(console, both)
    assert answers.startswith(b"HTTP/1.1 403 ")
    assert answers.count(b"HTTP/1.1 ") == 1, "the connection ends with it"
    for lines in (
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: -1",),
        ("Content-Length: 4, 5",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
    ):
        answer = said(console, request(console, "POST /login", form, *lines, body="token"))
        assert re.match(rb"HTTP/1.1 (400|501) ", answer), (lines, answer)
        assert answer.count(b"HTTP/1.1 ") == 1


def test_each_request_of_a_connection_is_looked_at(server: ServerProcess, console: RunningConsole) -> None:
    first = request(console, "GET /login")
    for other in (
        first.replace(console.host.encode(), b"evil.example", 1),
        request(console, "POST /logout", "Content-Length: 0").replace(console.address.encode(), b"http://evil.example"),
    ):
        answers = said(console, first + other)
        assert re.findall(rb"HTTP/1\.1 (\d+) ", answers) == [b"200", b"403"]
        assert answers.lower().count(b"content-security-policy: " + POLICY.lower().encode()) == 2


def test_requests_without_a_good_name_are_refused(server: ServerProcess, console: RunningConsole) -> None:
    page = f"/{server.address}/records"
    for data in (
        b"GET /login HTTP/1.1\r\n\r\n",
        b"GET /login HTTP/1.0\r\n\r\n",
        request(console, "GET /login", "Host: evil.example"),
        request(console, "GET /login", "X: 1\r\n\x00"),
        request(console, f"GET {page}", "X: " + "a" * 200_000),
        b"\x16\x03\x01\x00\xa5\x01\r\n\r\n",
    ):
        try:
            answer = said(console, data)
        except ConnectionError:
            continue  # it is not even answered
        assert re.match(rb"HTTP/1.1 4\d\d ", answer), answer


def test_what_no_browser_sends_ends_nothing_but_its_socket(server: ServerProcess, console: RunningConsole) -> None:
    path = f"/{server.address}/records/live?topic=orders"
    with closing(console.logged_in("eu")) as browser:
        with console.socket(browser, path) as followed:
            followed.recv(SECONDS)
            followed.send("1" * 2_000)
            with pytest.raises(ConnectionClosed) as ended:
                followed.recv(SECONDS)
            assert ended.value.rcvd is not None
            assert ended.value.rcvd.code == 1009, "too large"
        with console.socket(browser, path) as followed:
            followed.recv(SECONDS)
            followed.send(b"\x001")
            followed.send("1")
            with client_of(server, "root") as root:
                root.publish("orders", {"id": 1, "desk": "eu", "price": 9}, ttl="9m")
            assert json.loads(followed.recv(SECONDS))["frame"] == 2


WRONG: Final = (
    "topic=%00&key=%00&filter=%00",
    "topic=orders&key=1&upto=%ff",
    "topic=../orders&key=../1",
    f"topic={'a' * 5_000}&key={'k' * 20_000}",
    f"topic=orders&filter={'(' * 3_000}",
    "topic=orders&order=//&rows=-1&key=-1",
    "topic=orders&rows=%D9%A3&filter=%EF%BF%BF%F0%9F%98%80",
    "topic=orders&within=9999999999999d",
    "topic=orders&within=-1m",
    "topic=orders&within=nan&changed=%00",
    "topic=(&name=(&pattern=(&id=%00",
    "topic=orders&by=(&total=%00",
)


@pytest.mark.parametrize("page", PAGES)
def test_wrong_arguments_are_answered(server: ServerProcess, console: RunningConsole, page: str) -> None:
    with closing(console.logged_in("both")) as browser:
        for query in WRONG:
            for ending in ("", ".json"):
                answer = browser.get(f"/{server.address}/{page}{ending}?{query}")
                assert answer.status_code < 500, (query, answer.text)
                assert "Traceback" not in answer.text


# This test ends the console, so it comes last.


def test_the_terminal_shows_no_token_no_cookie_and_nothing_hidden(
    server: ServerProcess, console: RunningConsole
) -> None:
    with closing(console.logged_in("eu")) as browser:
        browser.post("/login", data={"token": "guessed-token"}, headers={"Origin": console.address})
        browser.get(f"/{server.address}/records", params={"topic": "orders", "filter": "/price > 424242"})
        cookies = list(dict(browser.cookies).values())
    console.process.terminate()
    assert console.process.stdout is not None
    output = console.process.stdout.read()
    assert not tells(output.encode())
    for secret in ("guessed-token", "424242", "Traceback", *cookies):
        assert secret not in output
