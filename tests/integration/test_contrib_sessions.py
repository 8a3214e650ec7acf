"""Sessions of Starlette and FastAPI on a real server (sow_client.contrib.starlette)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from sow_client import Client
from sow_client.contrib.starlette import SessionMiddleware
from tests.support.servers.server import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def store(server: ServerProcess, tmp_path: Path) -> Iterator[Client]:
    with server.client() as client:
        client.create_topic("sessions", exist_ok=True, expiration="enabled")
        client.sow_delete("sessions", all=True)
        yield client


def app_of(server: ServerProcess, *, lifetime: str = "20m", secure: bool = False) -> FastAPI:
    app = FastAPI()
    app.add_middleware(SessionMiddleware, server=server.address, lifetime=lifetime, secure=secure)

    def sign_in(request: Request, user: str) -> dict[str, Any]:
        request.session.regenerate()  # type: ignore[attr-defined]  # Starlette's type of a session is dict
        request.session["user"] = user
        request.session.setdefault("cart", [])
        return dict(request.session)

    def add(request: Request, item: str) -> dict[str, Any]:
        request.session.setdefault("cart", []).append(item)
        return dict(request.session)

    def show(request: Request) -> dict[str, Any]:
        return dict(request.session)

    def sign_out(request: Request) -> None:
        request.session.clear()

    for path, handler in (("/in", sign_in), ("/add", add), ("/show", show), ("/out", sign_out)):
        app.get(path, response_model=None)(handler)
    return app


@pytest.fixture
def browser(server: ServerProcess, store: Client) -> Iterator[TestClient]:
    with TestClient(app_of(server)) as client:
        yield client


def test_a_session_keeps_its_values_and_its_cookie_has_an_id_alone(browser: TestClient, store: Client) -> None:
    assert browser.get("/show").headers.get("set-cookie") is None, "an empty session has no cookie"
    cookie = browser.get("/in?user=alice").headers["set-cookie"]
    assert "alice" not in cookie
    assert cookie.endswith("; Max-Age=1200; Path=/; HttpOnly; SameSite=Lax")
    browser.get("/add?item=bread")
    assert browser.get("/add?item=milk").json() == {"user": "alice", "cart": ["bread", "milk"]}
    (record,) = store.query("sessions")
    assert record.key == browser.cookies["session"]


def test_signing_in_gives_a_new_id_and_ends_the_old_one(browser: TestClient, store: Client) -> None:
    browser.get("/add?item=bread")
    old = browser.cookies["session"]
    assert browser.get("/in?user=alice").json()["cart"] == ["bread"]
    assert [record.key for record in store.query("sessions")] == [browser.cookies["session"]]
    assert browser.cookies["session"] != old


@pytest.mark.parametrize("shown", ["A" * 43, "short", "a b", '"', "../" * 15])
def test_an_id_that_nobody_has_given_is_never_taken_over(browser: TestClient, store: Client, shown: str) -> None:
    answer = browser.get("/add?item=x", headers={"Cookie": f"session={shown}"})
    assert answer.json() == {"cart": ["x"]}
    assert [record.key for record in store.query("sessions")] != [shown]


@pytest.mark.parametrize("other", ['prefs={"a": 1}', "no name", "=", 'quoted="a', "x[]=1", "session=", "session=short"])
def test_a_cookie_of_another_program_keeps_no_session_away(browser: TestClient, other: str) -> None:
    """`SimpleCookie` reads none of the cookies if one of them is unusual, so each request began a new session."""
    browser.get("/in?user=alice")
    own = f"session={browser.cookies['session']}"
    browser.cookies.clear()
    for shown in (f"{other}; {own}", f"{own}; {other}"):
        assert browser.get("/show", headers={"Cookie": shown}).json()["user"] == "alice"


def test_a_session_that_is_cleared_is_deleted_with_its_cookie(browser: TestClient, store: Client) -> None:
    browser.get("/in?user=alice")
    assert "Max-Age=0" in browser.get("/out").headers["set-cookie"]
    assert store.count("sessions") == 0


def test_a_use_renews_a_session_once_a_quarter_of_its_lifetime_has_gone(browser: TestClient, store: Client) -> None:
    browser.get("/in?user=alice")
    (fresh,) = store.query("sessions")
    browser.get("/show")
    assert next(iter(store.query("sessions"))).version == fresh.version, "reading costs no write"
    store.touch("sessions", fresh.key, ttl="10m")
    browser.get("/show")
    (renewed,) = store.query("sessions")
    assert renewed.expire_time is not None
    assert (renewed.expire_time - renewed.publish_time).total_seconds() > 1_100


def test_a_session_that_another_request_has_ended_stays_ended(server: ServerProcess, store: Client) -> None:
    app = app_of(server)

    async def slow(request: Request) -> None:
        request.session["late"] = True
        store.sow_delete("sessions", all=True)

    app.get("/slow", response_model=None)(slow)
    with TestClient(app) as browser:
        browser.get("/in?user=alice")
        assert "Max-Age=0" in browser.get("/slow").headers["set-cookie"]
    assert store.count("sessions") == 0


def test_a_cookie_for_https_says_so(server: ServerProcess, store: Client) -> None:
    with TestClient(app_of(server, secure=True), base_url="https://shop.example") as browser:
        assert browser.get("/in?user=alice").headers["set-cookie"].endswith("; Secure")
        assert browser.get("/show").json()["user"] == "alice"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"cookie": "a;b"}, "cookie: 'a;b' is no name"),
        ({"same_site": "none"}, "same_site: browsers take 'none' only with secure=True"),
        ({"lifetime": "10ms"}, "lifetime: '10ms' is shorter than a second"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(named: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        SessionMiddleware(FastAPI(), **named)
    assert said in str(refused.value)
