"""The console lets in nobody but those who have logged in, from its own pages, under its own name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message, Scope
from starlette.websockets import WebSocketDisconnect

from sow_console import guards, sessions
from sow_console.app import _local, addresses, routes
from sow_console.live import ENDED
from sow_console.writes import CHECKS, WRITES
from tests.support.servers.console import HOST, SERVER, Clock, FakeConsole

ORIGIN = f"http://{HOST}"
OWN = {"Origin": ORIGIN}
RECORDS = f"/{SERVER}/records"
LIVE = f"ws://{HOST}/{SERVER}/durables/live"
"""Absolute, as the test client calls itself `testserver` otherwise."""


@pytest.fixture
def console() -> FakeConsole:
    return FakeConsole({"alice-token": "alice", "bob-token": "bob"})


@pytest.fixture
def browser(console: FakeConsole) -> Iterator[TestClient]:
    with TestClient(console.app, base_url=ORIGIN, follow_redirects=False) as made:
        yield made


def log_in(browser: TestClient, token: str = "alice-token") -> str:
    """Returns the CSRF token of the session."""
    assert browser.post("/login", data={"token": token}, headers=OWN).status_code == 303
    found = re.search(r'name="csrf" value="([^"]+)"', browser.get(RECORDS).text)
    assert found
    return found[1]


# ---- names and origins ----


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7480", "127.0.0.1", "127.0.0.1:7481", ""])
def test_a_foreign_host_is_refused_whatever_is_asked_for(browser: TestClient, host: str) -> None:
    for path in ("/login", "/static/console.css", RECORDS):
        answer = browser.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "Host" in answer.text


@pytest.mark.parametrize("host", ["localhost:7480", "LOCALHOST:7480", "[::1]:7480", HOST])
def test_this_machine_has_several_names(browser: TestClient, host: str) -> None:
    assert browser.get("/login", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1:7480", "http://127.0.0.1:7481", "null", None]
)
def test_a_log_in_from_another_site_is_refused(browser: TestClient, console: FakeConsole, origin: str | None) -> None:
    answer = browser.post("/login", data={"token": "alice-token"}, headers={"Origin": origin} if origin else {})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert console.calls == [], "no server was asked about the token"


@pytest.mark.parametrize("origin", ["http://evil.example", None])
def test_a_socket_from_another_site_is_refused_with_the_cookie(browser: TestClient, origin: str | None) -> None:
    """Every socket of these tests was once refused for the test client's name, whatever its origin."""
    log_in(browser)
    headers = {"Origin": origin} if origin else {}
    with pytest.raises(WebSocketDisconnect) as refused, browser.websocket_connect(LIVE, headers=headers):
        pass
    assert refused.value.code == 4403
    with browser.websocket_connect(LIVE, headers=OWN):
        pass  # from a page of the console it is let in


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", [(b"host", HOST.encode()), (b"host", b"evil.example")]),
        ("POST", [(b"host", HOST.encode()), (b"origin", ORIGIN.encode()), (b"origin", b"http://evil.example")]),
        (
            "POST",
            [
                (b"host", HOST.encode()),
                (b"origin", ORIGIN.encode()),
                (b"content-length", b"4"),
                (b"transfer-encoding", b"chunked"),
            ],
        ),
    ],
)
def test_headers_that_can_be_read_in_two_ways_are_refused(method: str, headers: list[tuple[bytes, bytes]]) -> None:
    place = guards.place_of("127.0.0.1", 7480, secure=False)
    assert guards.refusal(place, kind="http", method=method, headers=Headers(raw=headers))
    once = [one for one in dict(reversed(headers)).items() if one[0] != b"transfer-encoding"]
    assert not guards.refusal(place, kind="http", method=method, headers=Headers(raw=once))


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "Forwarded", "X-Original-URL", "X-Rewrite-URL", "X-HTTP-Method"])
def test_headers_of_proxies_change_nothing(browser: TestClient, name: str) -> None:
    log_in(browser)
    said = {name: f"host={HOST}" if name == "Forwarded" else HOST}
    assert browser.get(RECORDS, headers={"Host": "evil.example"} | said).status_code == 403
    assert browser.get("/nothing", headers={name: "/login"}).status_code == 404
    assert browser.get("/logout", headers={name: "POST", "X-HTTP-Method-Override": "POST"}).status_code == 405
    assert browser.get(RECORDS).status_code == 200


def test_behind_a_proxy_only_its_name_counts() -> None:
    place = guards.place_of("0.0.0.0", 7480, secure=False, url="https://console.example/")
    assert place.secure
    assert place.origins == {"https://console.example"}
    for wrong in ("console.example", "ftp://console.example", "https://console.example/path"):
        with pytest.raises(ValueError, match="is not an address"):
            guards.place_of("0.0.0.0", 7480, secure=False, url=wrong)


PATHS = (
    "/login",
    "/static/page.js",
    "/static/none.js",
    RECORDS,
    f"{RECORDS}.json",
    "/nothing",
    "/a/b/c",
    "/open?code=x",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", [ORIGIN, "http://evil.example"])
def test_every_answer_has_the_policy(browser: TestClient, path: str, origin: str) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS", "TRACE", "DELETE"):
        headers = browser.request(method, path, headers={"Origin": origin}).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'"), method
        assert "unsafe" not in policy, method
        assert "frame-ancestors 'none'" in policy, method
        assert headers["x-content-type-options"] == "nosniff", method
        assert headers["referrer-policy"] == "same-origin", method
        assert headers["cross-origin-resource-policy"] == "same-origin", method
        assert headers["cache-control"] == ("no-cache" if "static" in path else "no-store"), method


def test_an_answer_to_a_fault_has_the_policy_and_no_story_of_it(
    console: FakeConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object, **about: object) -> list[object]:
        raise RuntimeError("a secret of the program")

    with TestClient(console.app, base_url=ORIGIN, follow_redirects=False, raise_server_exceptions=False) as browser:
        log_in(browser)
        monkeypatch.setattr("tests.support.servers.console.FakeClient.topics", broken)
        for path in (RECORDS, f"{RECORDS}.json"):
            answer = browser.get(path)
            assert (answer.status_code, answer.text) == (500, "Internal Server Error")
            assert answer.headers["content-security-policy"] == guards.POLICY


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/..%5capp.py",
        "/static/%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/....//app.py",
        "/static/page.js%00",
        "/static/%00",
        "/static/",
        "/static/" + "a" * 5_000,
        f"/{SERVER}/../static/../app.py",
    ],
)
def test_only_files_of_the_console_are_served(browser: TestClient, path: str) -> None:
    log_in(browser)
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


@pytest.mark.parametrize(
    "path", ["//evil.example", "//evil.example/", "/login/", f"{RECORDS}/?topic=orders", "/static"]
)
def test_an_address_that_is_almost_right_leads_nowhere(browser: TestClient, path: str) -> None:
    """Starlette redirects such an address to itself under `http`, also behind a proxy that speaks HTTPS. So the filter
    in it would have gone over the network as plain text."""
    log_in(browser)
    answer = browser.get(ORIGIN + path)
    assert (answer.status_code, answer.headers.get("location")) == (404, None)


# ---- sessions ----


@pytest.mark.parametrize("path", [RECORDS, f"/{SERVER}/overview", f"/{SERVER}/key?topic=orders&key=1"])
def test_no_page_answers_without_a_session(browser: TestClient, console: FakeConsole, path: str) -> None:
    assert browser.get(path).headers["location"].startswith("/login?next=%2F")
    assert browser.get(path.replace("?", ".json?") if "?" in path else f"{path}.json").status_code == 401
    with pytest.raises(WebSocketDisconnect) as refused, browser.websocket_connect(LIVE, headers=OWN) as socket:
        socket.receive_bytes()
    assert refused.value.code == ENDED, "a browser is told, as it would try for ever otherwise"
    assert console.calls == []


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(browser: TestClient) -> None:
    answer = browser.post("/login", data={"token": "alice-token"}, headers=OWN)
    cookie = answer.headers["set-cookie"]
    name, *flags = cookie.split("; ")
    assert sorted(flags) == ["HttpOnly", "Path=/", "SameSite=strict"], "no Domain, and it ends with the browser"
    assert name.startswith("sow-console-7480="), "a console at another port has a cookie of its own"
    assert "alice" not in cookie


def test_each_log_in_has_secrets_of_its_own(browser: TestClient, console: FakeConsole) -> None:
    seen: set[str] = set()
    for _ in range(5):
        csrf = log_in(browser)
        seen |= {csrf, dict(browser.cookies)["sow-console-7480"], console.console.sessions.new_code()}
    assert len(seen) == 15
    assert min(map(len, seen)) >= 43, "32 random bytes"


def test_a_session_is_not_chosen_by_the_browser(browser: TestClient, console: FakeConsole) -> None:
    browser.cookies.set("sow-console-7480", "chosen", domain="127.0.0.1", path="/")
    log_in(browser)
    assert console.console.sessions.find("chosen") is None


def test_over_tls_the_cookie_is_secure_and_bound_to_the_host() -> None:
    console = FakeConsole({"alice-token": "alice"}, host="0.0.0.0", url="https://console.example")
    with TestClient(console.app, base_url="https://console.example", follow_redirects=False) as browser:
        answer = browser.post("/login", data={"token": "alice-token"}, headers={"Origin": "https://console.example"})
        assert answer.headers["set-cookie"].startswith("__Host-sow-console=")
        assert {"Secure", "HttpOnly", "Path=/", "SameSite=strict"} == set(answer.headers["set-cookie"].split("; ")[1:])
        assert "max-age" in answer.headers["strict-transport-security"]


def test_a_page_shows_no_token(browser: TestClient) -> None:
    log_in(browser)
    assert "alice-token" not in browser.get(RECORDS).text
    assert "alice-token" not in browser.post("/login", data={"token": "alice-tokenx"}, headers=OWN).text


def test_a_log_out_without_the_csrf_token_of_the_session_is_refused(browser: TestClient, console: FakeConsole) -> None:
    log_in(browser)
    of_another = log_in(TestClient(console.app, base_url=ORIGIN, follow_redirects=False), "bob-token")
    for form in ({"other": "x"}, {"csrf": ""}, {"csrf": of_another}):
        assert browser.post("/logout", data=form, headers=OWN).status_code == 403
    assert browser.get(RECORDS).status_code == 200


def test_a_stolen_cookie_is_worth_nothing_after_the_log_out(browser: TestClient, console: FakeConsole) -> None:
    csrf = log_in(browser)
    stolen = dict(browser.cookies)
    (_, client) = console.clients
    assert browser.post("/logout", data={"csrf": csrf}, headers=OWN).status_code == 303
    browser.cookies.update(stolen)
    assert browser.get(RECORDS).status_code == 303
    assert browser.get(f"{RECORDS}.json").status_code == 401
    with pytest.raises(WebSocketDisconnect) as refused, browser.websocket_connect(LIVE, headers=OWN) as socket:
        socket.receive_bytes()
    assert refused.value.code == ENDED
    assert browser.post("/logout", data={"csrf": csrf}, headers=OWN).headers["location"] == "/login"
    assert client.closed, "its calls have ended, too"


def test_a_log_out_takes_the_cookie_away(browser: TestClient) -> None:
    csrf = log_in(browser)
    gone = browser.post("/logout", data={"csrf": csrf}, headers=OWN).headers["set-cookie"]
    assert gone.startswith('sow-console-7480=""')
    assert "Max-Age=0" in gone
    assert not browser.cookies


def test_a_new_log_in_ends_the_session_before(browser: TestClient) -> None:
    log_in(browser)
    first = dict(browser.cookies)
    log_in(browser, "bob-token")
    browser.cookies.clear()
    browser.cookies.update(first)
    assert browser.get(RECORDS).status_code == 303


def test_a_session_that_is_not_used_ends(browser: TestClient, console: FakeConsole) -> None:
    log_in(browser)
    console.clock.now += sessions.IDLE_SECONDS - 1
    assert browser.get(RECORDS).status_code == 200
    console.clock.now += sessions.IDLE_SECONDS
    assert browser.get(RECORDS).status_code == 303


def test_a_session_that_is_used_ends_in_the_end(browser: TestClient, console: FakeConsole) -> None:
    log_in(browser)
    uses = int(sessions.AGE_SECONDS / 1_800) - 1
    for _ in range(uses):
        console.clock.now += 1_800
        assert browser.get(RECORDS).status_code == 200
    console.clock.now += 1_800
    assert browser.get(RECORDS).status_code == 303


def test_the_session_unused_for_longest_makes_room(console: FakeConsole) -> None:
    async def work() -> None:
        kept = console.console.sessions
        first, second = await kept.begin({}, None), await kept.begin({}, None)
        console.clock.now += 1
        assert kept.find(first.id) is first
        for _ in range(sessions.SESSIONS_MAX - 1):
            await kept.begin({}, None)
        assert kept.find(second.id) is None
        assert second.ended.is_set(), "its sockets end"
        assert kept.find(first.id) is first

    asyncio.run(work())


def test_each_person_calls_with_the_own_token(browser: TestClient, console: FakeConsole) -> None:
    log_in(browser)
    other = TestClient(console.app, base_url=ORIGIN, follow_redirects=False)
    log_in(other, "bob-token")
    console.calls.clear()
    other.get(RECORDS)
    browser.get(RECORDS)
    assert console.calls == [(SERVER, "bob"), (SERVER, "alice")]


@pytest.mark.parametrize("server", ["evil.example:7450", "ldn.example", "ldn.example:7451"])
def test_a_token_goes_to_no_server_that_was_not_named(browser: TestClient, console: FakeConsole, server: str) -> None:
    log_in(browser)
    made = len(console.clients)
    assert browser.get(f"/{server}/records").status_code == 404
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        browser.websocket_connect(f"ws://{HOST}/{server}/records/live", headers=OWN) as socket,
    ):
        socket.receive_bytes()
    assert refused.value.code == ENDED
    assert len(console.clients) == made
    assert {client.server for client in console.clients} == {SERVER}


def test_only_log_ins_that_fail_wait(browser: TestClient, console: FakeConsole) -> None:
    """Story: five failed log-ins from an address locked out good tokens as well. Behind a proxy all people have one
    address, so anybody could lock out everybody."""
    for _ in range(sessions.ATTEMPTS_MAX):
        assert browser.post("/login", data={"token": "guess"}, headers=OWN).status_code == 403
    assert console.slept == []
    for _ in range(3):
        assert browser.post("/login", data={"token": "guess"}, headers=OWN).status_code == 403
        log_in(browser)
    assert console.slept == [sessions.WAIT_SECONDS] * 3
    console.clock.now += sessions.ATTEMPTS_SECONDS
    assert browser.post("/login", data={"token": "guess"}, headers=OWN).status_code == 403
    assert len(console.slept) == 3, "a minute later"


def test_failed_log_ins_of_one_address_do_not_slow_those_of_another() -> None:
    kept = sessions.Sessions((), lambda *_: pytest.fail("no server is asked"), Clock())
    for number in range(sessions.ATTEMPTS_MAX * 2):
        with kept.failing("10.0.0.1") as seconds:
            assert seconds == (0 if number < sessions.ATTEMPTS_MAX else sessions.WAIT_SECONDS)
    with kept.failing("10.0.0.2") as seconds:
        assert seconds == 0


def test_what_waits_and_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELD_MAX", 3)
    monkeypatch.setattr(sessions, "ADDRESSES_MAX", 10)
    kept = sessions.Sessions((), lambda *_: pytest.fail("no server is asked"), Clock())
    with ExitStack() as stack:
        waits = [stack.enter_context(kept.failing("10.0.0.1")) for _ in range(sessions.ATTEMPTS_MAX + 5)]
    assert waits == [0] * sessions.ATTEMPTS_MAX + [sessions.WAIT_SECONDS] * 3 + [0] * 2
    with kept.failing("10.0.0.1") as again:
        assert again == sessions.WAIT_SECONDS, "they have given back their room"
    for number in range(50):
        with kept.failing(f"10.0.1.{number}"):
            pass
    assert len(kept._failed) == 10


@pytest.mark.slow
def test_so_many_log_ins_at_a_time_are_asked_about(console: FakeConsole) -> None:
    async def work() -> None:
        console.answers = asyncio.Event()
        transport = httpx.ASGITransport(console.app)
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as browser:
            attempts = [
                asyncio.create_task(browser.post("/login", data={"token": "guess"}, headers=OWN))
                for _ in range(sessions.ASKED_MAX + 3)
            ]
            for _ in range(1_000):
                await asyncio.sleep(0)
            assert len(console.clients) == sessions.ASKED_MAX
            console.answers.set()
            assert {(await one).status_code for one in attempts} == {403}
            assert len(console.clients) == len(attempts)

    asyncio.run(work())


@pytest.mark.slow
def test_who_has_most_sessions_makes_room_for_another() -> None:
    """One person with a good token logged in until the sessions of all others had ended."""

    async def work() -> None:
        clock = Clock()
        kept = sessions.Sessions((), lambda *_: pytest.fail("no server is asked"), clock)
        alice = await kept.begin({SERVER: "alice"}, None)
        first = await kept.begin({SERVER: "bob"}, None)
        for _ in range(3 * sessions.SESSIONS_MAX):
            clock.now += 1
            last = await kept.begin({SERVER: "bob"}, None)
            assert kept.find(last.id) is last
        assert kept.find(alice.id) is alice
        assert kept.find(first.id) is None

    asyncio.run(work())


def test_log_ins_that_succeed_are_no_failed_attempts(browser: TestClient) -> None:
    for _ in range(sessions.ATTEMPTS_MAX + 1):
        log_in(browser)


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil.example", "x", "/a\nb", "/\t/evil", ""]
)
def test_a_log_in_leads_to_no_other_site(browser: TestClient, target: str) -> None:
    assert _local(target) == "/"
    answer = browser.post("/login", data={"token": "alice-token", "next": target}, headers=OWN)
    assert answer.headers["location"] == "/"
    shown = browser.get("/login", params={"next": target}).text
    assert 'name="next" value="/"' in shown
    assert _local(f"/{SERVER}/records?topic=orders") == f"/{SERVER}/records?topic=orders"


def test_forms_are_bounded(browser: TestClient) -> None:
    assert browser.post("/login", data={"token": "x" * 40_000}, headers=OWN).status_code == 413
    assert browser.post("/login", json={"token": "x"}, headers=OWN).status_code == 415
    form = OWN | {"Content-Type": "application/x-www-form-urlencoded"}
    for body, status in ((b"a=1&" * 200, 400), (b"\xff\xfe=1", 400), (b"token=%ff%00", 403)):
        assert browser.post("/login", content=body, headers=form).status_code == status


def test_a_form_that_is_announced_as_too_large_is_not_read(console: FakeConsole) -> None:
    async def work() -> None:
        sent: list[Message] = []

        async def receive() -> Message:
            raise AssertionError("nothing of it is read")

        async def send(message: Message) -> None:
            sent.append(message)

        names = {"host": HOST, "origin": ORIGIN, "content-type": "application/x-www-form-urlencoded"}
        names["content-length"] = str(10**12)
        headers = [(name.encode(), value.encode()) for name, value in names.items()]
        scope: Scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": headers}
        scope["client"] = None
        await console.app(scope, receive, send)
        assert sent[0]["status"] == 413

    asyncio.run(work())


def test_there_are_no_routes_that_write(browser: TestClient, console: FakeConsole) -> None:
    methods = {route.path: route.methods or set() for route in routes(console.console) if isinstance(route, Route)}
    changing = {path for path, allowed in methods.items() if allowed - guards.SAFE_METHODS}
    assert changing == {"/login", "/logout", "/{server}/check/{name}"}
    assert CHECKS.keys() == {"verify"}, "it compares, and changes nothing"
    csrf = log_in(browser)
    for name in WRITES:
        for method in ("GET", "POST"):
            answer = browser.request(method, f"/{SERVER}/write/{name}", headers=OWN)
            assert answer.status_code == 404
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        answer = browser.request(method, RECORDS, headers=OWN | {"X-CSRF-Token": csrf})
        assert answer.status_code == 405


# ---- one-time addresses ----


def test_a_one_time_address_works_once_and_is_followed_by_another(browser: TestClient, console: FakeConsole) -> None:
    console.console.announce()
    first = console.announced[0].removeprefix(ORIGIN)
    assert browser.get(first).headers["location"] == "/"
    assert len(console.announced) == 2
    browser.cookies.clear()
    assert browser.get(first).status_code == 403
    assert browser.get("/open?code=").status_code == 403
    assert len(console.announced) == 2


def test_there_is_no_one_time_address_where_others_reach_the_console() -> None:
    console = FakeConsole({}, host="0.0.0.0", url="https://console.example")
    code = console.console.sessions.new_code()
    with TestClient(console.app, base_url="https://console.example", follow_redirects=False) as browser:
        assert browser.get(f"/open?code={code}").status_code == 403


def test_a_session_without_a_token_is_led_to_the_log_in_by_a_server_that_asks_for_one(
    browser: TestClient, console: FakeConsole
) -> None:
    console.console.announce()
    browser.get(console.announced[0])
    page = browser.get(RECORDS)
    assert "UNAUTHENTICATED" in page.text
    assert "/login?next=" in page.text


def test_servers_are_named_with_their_ports() -> None:
    assert addresses("a, b:1,[::1]:7450,a:7450") == ["a:7450", "b:1", "[::1]:7450"]
