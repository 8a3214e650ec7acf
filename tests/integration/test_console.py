"""`sow console` over real servers: pages, their JSON, their sockets, and what a person may not see."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import click
import httpx
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from sow_cli.command import sow
from sow_client import EARLIEST, Client
from sow_console.pages import PAGES
from sow_console.writes import WRITES
from tests.support.oracles.access import GUARDED, audited, client_of, grant, identity, write_access
from tests.support.servers.cluster import Cluster
from tests.support.servers.console import RunningConsole, running_console
from tests.support.servers.server import ServerProcess, until

BIG: Final = 2**60 + 1
ABOUT: Final = {
    "overview": "",
    "records": "topic=orders&filter=/price+>+1",
    "groups": "topic=orders&by=/desk&total=/price",
    "key": "topic=orders&key=1",
    "due": "topic=orders&within=10m",
    "durables": "topic=orders",
    "replication": "",
    "topic": "topic=orders",
    "connections": "topic=orders",
    "dead-letters": "topic=orders",
    "server": "changed=1",
}


def fill(client: Client) -> None:
    client.create_topic("orders", key=["/id"], expiration="enabled")
    for number in range(1, 4):
        client.publish("orders", {"id": number, "desk": "eu", "price": number, "account": BIG}, ttl="9m")
    client.publish("orders", {"id": 1, "desk": "eu", "price": 9, "account": BIG}, ttl="9m")


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("open")) as server, server.client() as client:
        fill(client)
        yield server


@pytest.fixture(scope="module")
def console(open_server: ServerProcess) -> Iterator[RunningConsole]:
    with running_console(open_server.address) as made:
        yield made


@pytest.fixture(scope="module")
def browser(console: RunningConsole) -> httpx.Client:
    return console.opened()


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_an_address_and_a_json_twin(open_server: ServerProcess, browser: httpx.Client, page: str) -> None:
    about = httpx.QueryParams(ABOUT[page])
    shown = browser.get(f"/{open_server.address}/{page}", params=about, follow_redirects=True)  # to the topic's cell
    assert shown.status_code == 200
    assert 'class="problem"><p>' not in shown.text, "it is not a page of an error"
    twin = browser.get(f"/{open_server.address}/{page}.json", params=about)
    assert twin.headers["content-type"] == "application/json"
    shlex.split(twin.json()["command"])
    parsed(shlex.split(twin.json()["command"]))
    bare = browser.get(f"/{open_server.address}/{page}")
    assert bare.status_code == 200


def parsed(words: list[str]) -> None:
    """Fails where the command line is none of `sow`."""
    assert words[:2] == ["sow", "--server"]
    command: click.Command | None = sow
    rest = words[3:]
    while isinstance(command, click.Group):
        command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
    assert command is not None, words
    command.make_context("sow", rest)


def test_numbers_reach_the_browser_as_they_were_published(
    open_server: ServerProcess, console: RunningConsole, browser: httpx.Client
) -> None:
    told = browser.get(f"/{open_server.address}/records.json", params={"topic": "orders"}).json()["way"]
    assert told == "reads every record: 3 records read, 0 entries of indexes", "as `sow query --with-plan` says it"
    for page in ("records", "key"):
        answer = browser.get(f"/{open_server.address}/{page}.json", params=httpx.QueryParams(ABOUT[page]))
        assert f'"account":{BIG}'.encode() in answer.content
    with console.socket(browser, f"/{open_server.address}/records/live?topic=orders") as socket:
        frame = json.loads(socket.recv(30))
    assert f'"account":{BIG}' in frame["rows"][0][1]
    assert (frame["read"], frame["matched"], frame["reset"], frame["absent"]) == (3, 3, True, [])
    mistyped = browser.get(f"/{open_server.address}/records.json", params={"topic": "orders", "filter": "/prcie = 1"})
    assert mistyped.json()["absent"] == ["/prcie"]


def test_a_change_comes_in_the_next_frame_once_the_last_was_drawn(
    open_server: ServerProcess, console: RunningConsole, browser: httpx.Client
) -> None:
    with console.socket(browser, f"/{open_server.address}/records/live?topic=orders") as socket:
        json.loads(socket.recv(30))
        with open_server.client() as client:
            for number in range(50):
                client.publish("orders", {"id": 2, "n": number}, ttl="9m")
        with pytest.raises(TimeoutError):
            socket.recv(0)  # nothing was drawn, so nothing comes
        rows: list[list[object]] = []
        number = 1
        while not rows or '"n":49' not in str(rows[-1][1]):
            socket.send(str(number))
            frame = json.loads(socket.recv(30))
            number, rows = frame["frame"], frame["rows"]
            assert len(rows) <= 1, "only the newest of a key"


def test_all_that_matches_is_saved_with_the_chosen_columns(open_server: ServerProcess, browser: httpx.Client) -> None:
    with open_server.client() as client:
        client.create_topic("saved", key=["/id"])
        client.publish_many("saved", [{"id": n, "price": n, "account": BIG} for n in range(4)])
    about = {"topic": "saved", "filter": "/price > 0"}
    path = f"/{open_server.address}/export"
    lines = browser.get(path, params=about | {"kind": "ndjson"})
    assert lines.headers["content-disposition"] == 'attachment; filename="saved.ndjson"'
    assert f'"account":{BIG}' in lines.text
    assert [json.loads(line)["key"] for line in lines.text.splitlines()] == ["1", "2", "3"]
    chosen = [("column", "@key"), ("column", "/price")]
    rows = browser.get(path, params=httpx.QueryParams([*about.items(), ("kind", "csv"), *chosen])).text
    assert rows.splitlines() == ["_key,price", "1,1", "2,2", "3,3"]
    every = browser.get(path, params=about | {"kind": "csv"}).text
    assert (
        every.splitlines()[0]
        == "_key,id,price,account,_version,_publish_time_micros,_expire_time_micros,_origin,_sequence"
    )
    whole = parquet.read_table(io.BytesIO(browser.get(path, params=about | {"kind": "parquet"}).content))
    assert whole["account"].to_pylist() == [BIG] * 3


def test_a_file_that_cannot_begin_is_refused_with_the_reason(open_server: ServerProcess, browser: httpx.Client) -> None:
    path = f"/{open_server.address}/export"
    wrong = {
        ("kind", "xls", 404): "no such file",
        ("filter", "/price >", 400): "expected a value",
        ("topic", "nothing", 400): "nothing",
        ("column", "price", 400): "not a path",
    }
    for (name, value, code), word in wrong.items():
        answer = browser.get(path, params={"kind": "csv", "topic": "orders"} | {name: value})
        assert (answer.status_code, word in answer.text) == (code, True), answer.text


def test_a_wrong_filter_is_an_answer_with_its_column(
    open_server: ServerProcess, console: RunningConsole, browser: httpx.Client
) -> None:
    path = f"/{open_server.address}/records"
    answer = browser.get(f"{path}.json", params={"topic": "orders", "filter": "/price >"})
    assert answer.status_code == 400
    assert answer.json()["error"]["position"] == 8
    with console.socket(browser, f"{path}/live?topic=orders&filter=/price+>") as socket:
        assert json.loads(socket.recv(30))["error"]["position"] == 8


def test_an_error_is_no_dead_end(open_server: ServerProcess, browser: httpx.Client) -> None:
    """A mistyped key or topic took the page's fields away."""
    path = f"/{open_server.address}"
    shown = browser.get(f"{path}/key", params={"topic": "orders", "key": "1|2"}).text
    assert "has 2 parts" in shown
    assert 'name="topic" value="orders"' in shown
    assert 'name="key" value="1|2"' in shown
    shown = browser.get(f"{path}/due", params={"topic": "ordesr"}).text
    assert "did you mean &#39;orders&#39;?" in shown
    assert f'<a href="{path}/due">' in shown.split('class="problem"')[-1]


def test_the_values_of_a_filter_are_json_in_their_own_field(
    open_server: ServerProcess, console: RunningConsole, browser: httpx.Client
) -> None:
    attack = "' OR true OR /name = '"
    with open_server.client() as client:
        client.create_topic("named", key=["/id"])
        client.publish_many("named", [{"id": 1, "name": attack}, {"id": 2, "name": "O'Brien"}])
    about = {"topic": "named", "filter": "/name IN :names", "parameters": json.dumps({"names": [attack, "x"]})}
    path = f"/{open_server.address}"
    answer = browser.get(f"{path}/records.json", params=about)
    assert answer.status_code == 200, answer.text
    command = shlex.split(answer.json()["command"])
    assert command[-4:-2] == ["--param", "names:=" + json.dumps([attack, "x"])]
    parsed(command)
    with console.socket(browser, f"{path}/records/live?{httpx.QueryParams(about)}") as socket:
        assert [row[0] for row in json.loads(socket.recv(30))["rows"]] == ["1"]
    lines = browser.get(f"{path}/export", params=about | {"kind": "ndjson"}).text.splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["1"]
    page = browser.get(f"{path}/records", params=about).text
    assert "OR true" in page
    for wrong, word in (("{", "no JSON object"), ('{"nmes": []}', ":nmes"), ('{"names": "x"}', "takes a list")):
        answer = browser.get(f"{path}/records.json", params=about | {"parameters": wrong})
        assert (answer.status_code, word in answer.text) == (400, True), answer.text
        answer = browser.get(f"{path}/export", params=about | {"parameters": wrong, "kind": "csv"})
        assert answer.status_code == 400


def test_the_server_page_has_each_setting_with_its_origin(open_server: ServerProcess, browser: httpx.Client) -> None:
    path = f"/{open_server.address}/server.json"
    every = browser.get(path).json()["settings"]
    changed = browser.get(path, params={"changed": "1"}).json()["settings"]
    assert {one["origin"] for one in every} == {"default"} | {one["origin"] for one in changed}
    assert changed == [one for one in every if one["origin"] != "default"]
    assert ("server", "data_dir") in {(one["table"], one["key"]) for one in changed}


def test_the_server_page_has_charts_and_the_log(open_server: ServerProcess, browser: httpx.Client) -> None:
    twin = browser.get(f"/{open_server.address}/server.json").json()
    assert twin["charts"][0]["title"] == "Changes"
    assert {"ready", "topic_created"} <= {line["event"] for line in twin["lines"]}
    assert twin["lines"] == sorted(twin["lines"], key=lambda line: line["time"], reverse=True)
    worse = browser.get(f"/{open_server.address}/server.json", params={"level": "error"}).json()
    assert worse["lines"] == []


def test_a_socket_ends_with_its_session(open_server: ServerProcess, console: RunningConsole) -> None:
    browser = console.opened()
    with console.socket(browser, f"/{open_server.address}/records/live?topic=orders") as socket:
        socket.recv(30)
        page = browser.get(f"/{open_server.address}/records").text
        csrf = page.split('name="csrf" value="')[1].split('"')[0]
        assert browser.post("/logout", data={"csrf": csrf}, headers={"Origin": console.address}).status_code == 303
        with pytest.raises(Exception, match="4401"):
            socket.recv(30)


# ---- rights ----

ROWS: Final = "rows = \"/desk = 'eu'\"\nhide = ['/secret']"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, RunningConsole]]:
    folder = tmp_path_factory.mktemp("guarded")
    text = identity("eu", "desk") + grant("desk", "orders", "read consume observe", ROWS)
    text += identity("both", "all") + grant("all", ".*", "read consume observe")
    write_access(folder, text)
    with ServerProcess(folder, GUARDED) as server, running_console(server.address) as console:
        yield server, console


def test_an_unknown_token_begins_no_session(guarded: tuple[ServerProcess, RunningConsole]) -> None:
    server, console = guarded
    with console.browser() as browser:
        answer = browser.post("/login", data={"token": "guess"}, headers={"Origin": console.address})
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
        assert browser.get(f"/{server.address}/overview").headers["location"].startswith("/login")


def test_a_session_of_the_one_time_address_has_no_more_rights_than_nobody(
    guarded: tuple[ServerProcess, RunningConsole],
) -> None:
    server, console = guarded
    page = console.opened().get(f"/{server.address}/records")
    assert "UNAUTHENTICATED" in page.text


def test_the_command_says_what_to_install_and_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = tmp_path / "none.pem"
    pem.write_text("this is no certificate")
    https = ("--https-cert", str(pem), "--https-key", str(pem))
    wrong = {
        ("--listen", "0.0.0.0:7480"): "plain text",
        ("--listen", "0.0.0.0:7480", *https): "no browser calls the console 0.0.0.0",
        ("--listen", "127.0.0.1:0", *https): "--https-cert, --https-key: they are no PEM certificate",
        ("--url", "http://console.example"): "plain text",
        ("--listen", "nothing"): "HOST:PORT",
        ("--https-cert", str(tmp_path)): "is a directory",
    }
    for arguments, word in wrong.items():
        done = CliRunner().invoke(sow, ["console", *arguments])
        assert (done.exit_code, word in done.output) == (2, True), done.output
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "starlette" else object())
    done = CliRunner().invoke(sow, ["console"])
    assert done.exit_code == 1
    assert "needs starlette; install them: pip install 'sow[console]'" in done.output


# ---- writes ----


def test_there_are_no_writes_unless_the_console_was_started_with_them(
    open_server: ServerProcess, console: RunningConsole, browser: httpx.Client
) -> None:
    path = f"/{open_server.address}/write/delete"
    about = {"topic": "orders", "key": "1"}
    assert browser.get(path, params=about).status_code == 404
    assert browser.post(path, data=about, headers={"Origin": console.address}).status_code == 404
    assert "write/" not in browser.get(f"/{open_server.address}/key", params=about).text


def test_each_write_asks_shows_its_command_and_is_done_as_the_person(tmp_path: Path) -> None:
    actions = "read consume publish delete create observe operator topic-admin"
    text = identity("writer", "all") + grant("all", ".*", actions)
    write_access(tmp_path, text + identity("reader", "some") + grant("some", ".*", "read observe"))
    with (
        ServerProcess(tmp_path, GUARDED) as server,
        client_of(server, "root") as root,
        client_of(server, "writer") as writer,
        running_console(server.address, "--allow-writes") as console,
    ):
        fill(root)
        with writer.durable("orders", "billing") as durable:
            threading.Timer(0, root.publish, ("orders", {"id": 3}), {"ttl": "9m"}).start()
            next(iter(durable))
        browser, reader = console.logged_in("writer"), console.logged_in("reader")
        own = {"Origin": console.address}
        root.create_topic("letters")
        letter = root.publish(
            "letters", {"dead_letter": [{"topic": "orders", "key": "4", "version": 1}], "id": 4}, key="l"
        )
        with root.subscribe("orders", start=EARLIEST) as followed, root.subscribe("letters", start=EARLIEST) as other:
            next(iter(followed))
            next(iter(other))
            of_two, seen = (str(one.version) for one in root.get_many("orders", ["2", "3"]))
            given = {
                "touch": {"topic": "orders", "key": "1", "ttl": "1d"},
                "edit": {"topic": "orders", "key": "2", "payload": '{"id": 2, "n": 1}', "version": of_two},
                "persist": {"topic": "orders", "key": "2"},
                "delete": {"topic": "orders", "key": "3", "version": seen},
                "add": {"topic": "orders", "payload": '{"id": 7}'},
                "create": {"topic": "made", "key": "/id"},
                "republish": {"topic": "letters", "key": "l", "version": str(letter.version), "target": "orders"},
                "clear": {"topic": "orders", "durable": "billing"},
                "rewind": {"topic": "orders", "durable": "billing"},
                "alter": {"topic": "orders", "setting": "max_ttl", "value": "2d"},
                "repair": {"peer": "nobody"},
                "end": {"id": root.subscriptions("orders")[0].id},
                "end-session": {"id": root.subscriptions("letters")[0].session},
            }
            assert given.keys() == WRITES.keys()
            for name, about in given.items():
                path = f"/{server.address}/write/{name}"
                asked = browser.get(path, params=about).text
                if WRITES[name].long:
                    asked = browser.post(path, data=about | {"look": "1", "csrf": csrf_of(asked)}, headers=own).text
                of_another = reader.get(f"/{server.address}/overview").text
                about |= dict(re.findall('name="(expected)" value="(.*?)"', asked))
                parsed(shlex.split(html.unescape(re.findall("<code>(.*?)</code>", asked)[0])))
                for form in (about, about | {"csrf": csrf_of(of_another)}):
                    assert browser.post(path, data=form, headers=own).status_code == 403
                refused = reader.post(path, data=about | {"csrf": csrf_of(of_another)}, headers=own)
                assert (refused.status_code, "PERMISSION_DENIED" in refused.text) == (400, True), refused.text
                if name == "delete":
                    assert root.get_many("orders", ["3"]), "nothing was done yet"
                done = browser.post(path, data=about | {"csrf": csrf_of(asked)}, headers=own)
                assert done.status_code == (400 if name == "repair" else 200), done.text  # there is no such peer
        one, two = root.get_many("orders", ["1", "2"])
        assert one.expire_time is not None
        assert one.expire_time - one.publish_time > timedelta(hours=23)
        assert two.expire_time is None
        assert root.get_many("orders", ["3"]) == []
        assert any(line["identity"] == "reader" for line in audited(tmp_path))


def csrf_of(page: str) -> str:
    """The CSRF token in a page."""
    found = re.search('name="csrf" value="(.*?)"', page)
    assert found, page
    return found[1]


# ---- several instances ----


def test_the_page_of_replication_shows_the_links(tmp_path: Path) -> None:
    with Cluster(tmp_path, "a", "b", topics="[topics.orders]\nkey = ['/id']") as cluster:
        cluster["a"].client.publish("orders", {"id": 1})
        cluster.await_equal()
        first, second = cluster["a"].server.address, cluster["b"].server.address
        with running_console(f"{first},{second}") as console:
            browser = console.opened()
            twin = browser.get(f"/{first}/replication.json").json()
            assert [node["name"] for node in twin["graph"]["nodes"]] == ["a", "b"]
            assert [arrow["good"] for arrow in twin["graph"]["arrows"]] == [True, True]
            assert browser.get(f"/{second}/replication").text.count('marker-end="url(#tip)"') == 2
            overview = browser.get(f"/{second}/overview.json").json()
            assert [one["instance"]["name"] for one in overview["instances"]] == ["a", "b"]
            story = browser.get(f"/{second}/key.json", params={"topic": "orders", "key": "1"}).json()
            assert [(one["event"], one["instance"], one["replicated"]) for one in story["chapters"]] == [
                ("published", "a", True)
            ]
            path = f"/{first}/check/verify"
            asked = browser.get(path, params={"peer": "b"}).text
            parsed(shlex.split(html.unescape(re.findall("<code>(.*?)</code>", asked)[0])))
            form = {"peer": "b", "csrf": csrf_of(asked)}
            own = {"Origin": console.address}
            assert browser.post(path, data=form | {"csrf": "guess"}, headers=own).status_code == 403
            assert browser.post(path, data=form, headers=own).status_code == 200
            until(lambda: browser.get(f"/{first}/replication.json").json()["run"]["ended"], 30, "the comparison")
            run = browser.get(f"/{first}/replication.json").json()["run"]
            assert (run["done"], run["total"], run["records"], run["differing"]) == (1, 1, 1, 0)
            assert run["results"][0]["topic"] == "orders"
            assert "Comparison with b" in browser.get(f"/{first}/replication").text
            assert browser.get(f"/{first}/write/repair", params={"peer": "b"}).status_code == 404, "it only reads"
