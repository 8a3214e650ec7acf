"""`sow http` in a process of its own, called by httpx, curl and raw sockets.

[1]  An event stream that goes on with the id of its last event has every change once, whichever process was killed.
[2]  A caller reads over HTTP exactly what its own token shows.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx
import pytest

from tests.integration.test_canary import CANARY, NUMBER, tells
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.http_door import RunningDoor, running_door
from tests.support.servers.server import ServerProcess, free_port, until

JSON: Final = {"Content-Type": "application/json"}
LINES: Final = {"Content-Type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("http")) as made:
        yield made


@pytest.fixture(scope="module")
def door(server: ServerProcess) -> Iterator[RunningDoor]:
    with running_door(server.address) as made:
        yield made


@pytest.fixture
def http(door: RunningDoor) -> Iterator[httpx.Client]:
    with door.client() as made:
        yield made


# ---- records ----


def test_a_record_is_put_read_merged_and_deleted(http: httpx.Client) -> None:
    record = "/v1/topics/notes/records/a%2Fb%20%C3%A9"
    put = http.put(record + "?ttl=10m", content=b'{"x":1}', headers=JSON)
    assert (put.status_code, put.json()["key"]) == (200, "a/b é")
    got = http.get(record)
    assert got.content == b'{"x":1}'
    assert got.headers["etag"] == put.headers["etag"] == f'"{put.json()["version"]}"'
    assert got.headers["x-sow-expire-time"] == put.json()["expire_time"]
    assert got.headers["content-type"] == "application/json"
    assert got.headers["cache-control"] == "no-store"
    assert http.get(record, headers={"If-None-Match": got.headers["etag"]}).status_code == 304
    assert (http.head(record).status_code, http.head(record).content) == (200, b"")
    assert http.patch(record, content=b'{"y":2}', headers=JSON).status_code == 200
    assert http.get(record).json() == {"x": 1, "y": 2}
    assert http.delete(record).status_code == 204
    assert http.get(record).json()["reason"] == "RECORD_NOT_FOUND"
    assert http.delete(record).status_code == 404


def test_conditions_keep_what_somebody_else_has_written(http: httpx.Client) -> None:
    record = "/v1/topics/conditions/records/k"
    first = http.put(record, content=b'{"x":1}', headers=JSON | {"If-None-Match": "*"})
    assert first.status_code == 200
    again = http.put(record, content=b'{"x":2}', headers=JSON | {"If-None-Match": "*"})
    assert (again.status_code, again.json()["reason"]) == (412, "CONDITION_FAILED")
    tag = {"If-Match": first.headers["etag"]}
    assert http.put(record, content=b'{"x":3}', headers=JSON | tag).status_code == 200
    assert http.put(record, content=b'{"x":4}', headers=JSON | tag).status_code == 412
    assert http.delete(record, headers=tag).status_code == 412
    assert http.get(record).json() == {"x": 3}


def test_the_key_of_a_document_is_the_one_of_its_address(server: ServerProcess, http: httpx.Client) -> None:
    with server.client() as client:
        client.create_topic("flights", key=["/carrier", "/number"])
    document = b'{"carrier":"LH","number":400}'
    assert http.put("/v1/topics/flights/records/LH%7C400", content=document, headers=JSON).status_code == 200
    other = http.put("/v1/topics/flights/records/LH%7C401", content=document, headers=JSON)
    assert (other.status_code, other.json()["field"]) == (400, "key")
    assert http.get("/v1/topics/flights/count").json() == {"count": 1}
    deep = http.put("/v1/topics/flights/records/LH", content=b'{"a":' * 3_000 + b"1" + b"}" * 3_000, headers=JSON)
    assert (deep.status_code, deep.json()["reason"]) == (400, "PAYLOAD_MALFORMED")


@pytest.mark.parametrize(
    "key", ["abc\n", "a\nb", "\n", "\r\n", "a/b", "/", "100%", "%2F", "a?b#c", "\0", "€\u2028", " "]
)
def test_a_key_of_any_characters_is_that_of_its_address(server: ServerProcess, http: httpx.Client, key: str) -> None:
    """A line break at the end of a key was left out: the record of another key was written, read and deleted."""
    address = f"/v1/topics/odd-keys/records/{quote(key, safe='')}"
    with server.client() as client:
        client.publish("odd-keys", {"of": "another"}, key="abc")
        assert http.put(address, content=b'{"of": "this"}', headers=JSON).json()["key"] == key
        assert http.get(address).json() == {"of": "this"}
        found = client.get("odd-keys", key)
        assert found is not None
        assert found.data == {"of": "this"}
        assert http.delete(address).status_code == 204
        assert [record.key for record in client.query("odd-keys")] == ["abc"]


def test_bodies_that_are_wrong_are_refused_with_a_sentence(http: httpx.Client) -> None:
    record = "/v1/topics/wrong/records/k"
    assert http.put(record, content=b"x=1", headers={"Content-Type": "text/html"}).status_code == 415
    for url, calls in ((record, http.put), ("/v1/topics/wrong/records", http.post)):
        form = calls(url, content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"}).json()
        assert form["detail"].endswith("; for curl: -H 'Content-Type: application/json'")
    assert http.put(record, content=b'{"x":', headers=JSON).json()["reason"] == "PAYLOAD_MALFORMED"
    large = http.put(record, content=b'"' + b"x" * 20_000_000 + b'"', headers=JSON)
    assert (large.status_code, large.json()["reason"]) == (413, "PAYLOAD_TOO_LARGE")
    assert http.put(record + "?tll=1m", content=b"{}", headers=JSON).json()["field"] == "tll"
    assert http.get("/v1/topics/wrong/records/%FF").json()["reason"] == "KEY_NOT_UTF8"
    refused = http.post("/v1/topics/wrong/count")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


def test_a_document_of_another_type_than_its_topic_is_refused(server: ServerProcess, http: httpx.Client) -> None:
    with server.client() as client:
        client.create_topic("packed", message_type="msgpack")
    refused = http.put("/v1/topics/packed/records/k", content=b'{"x":1}', headers=JSON)
    assert (refused.status_code, refused.json()["reason"]) == (400, "PAYLOAD_MALFORMED")
    packed = http.put(
        "/v1/topics/packed/records/k", content=b"\x81\xa1x\x01", headers={"Content-Type": "application/msgpack"}
    )
    assert packed.status_code == 200
    assert http.get("/v1/topics/packed/records/k").headers["content-type"] == "application/msgpack"
    assert http.get("/v1/topics/packed/records").json() == [{"x": 1}]


# ---- queries and loads ----


def test_records_are_queried_counted_and_grouped(http: httpx.Client) -> None:
    lines = b"".join(b'{"id":%d,"desk":"%s","qty":%d}\n' % (n, b"ab"[n % 2 : n % 2 + 1], n) for n in range(2_500))
    loaded = http.post("/v1/topics/trades/records?key=/id", content=lines, headers=LINES)
    assert loaded.json() == {"lines": 2_500, "applied": 2_500, "refused": 0, "refusals": []}
    trades = "/v1/topics/trades"
    assert len(http.get(f"{trades}/records").json()) == 2_500
    asked = {"filter": "/qty >= :n", "params": '{"n": 2490}', "order_by": "/qty DESC", "top": "2", "select": "/qty"}
    assert http.get(f"{trades}/records", params=asked).json() == [{"qty": 2_499}, {"qty": 2_498}]
    told = http.get(f"{trades}/records", params={"top": "2", "metadata": "key", "format": "ndjson"})
    assert [json.loads(line)["_key"] for line in told.text.splitlines()] == ["0", "1"]
    assert told.headers["content-type"] == "application/x-ndjson"
    assert http.get(f"{trades}/count", params={"filter": "/desk = 'a'"}).json() == {"count": 1_250}
    asked = {"group_by": "/desk", "aggregate": "COUNT(*) AS n, SUM(/qty) AS qty", "order_by": "/desk"}
    assert [row["n"] for row in http.get(f"{trades}/groups", params=asked).json()] == [1_250, 1_250]
    wrong = http.get(f"{trades}/records", params={"filter": "/qty >"})
    assert wrong.headers["content-type"] == "application/problem+json"
    assert (wrong.status_code, wrong.json()["position"], wrong.json()["field"]) == (400, "6", "filter")
    assert http.get(f"{trades}/records", params={"top": "-1"}).json()["field"] == "top"
    assert http.get("/v1/topics/absent/records").json()["reason"] == "TOPIC_NOT_FOUND"


INFINITY: Final = {
    "Accept": "application/json;q=0.9,text/plain",
    "User-Agent": "Grafana/12.1.0",
    "Accept-Encoding": "gzip",
}
"""The headers of Grafana's source Infinity for a query of the type JSON. It writes spaces as +."""
JSON_API: Final = {
    "Accept": "application/json, text/plain, */*",
    "X-Grafana-Org-Id": "1",
    "X-Forwarded-For": "10.0.0.1",
}
"""Those of Grafana's proxy for its source JSON API, which writes spaces as %20."""


def test_sources_of_grafana_get_arrays_of_objects(http: httpx.Client) -> None:
    """The requests that these sources send, in the shapes that they need."""
    body = b'{"id":1,"site":"lab","at":100}\n{"id":2,"site":"hall","at":200}\n'
    assert http.post("/v1/topics/graphs/records?key=/id", content=body, headers=LINES).json()["applied"] == 2
    graphs = "/v1/topics/graphs"
    assert http.get("/healthz", headers=INFINITY).status_code == 200, "its health check"
    found = http.get(f"{graphs}/records?filter=%2Fat+%3E%3D+150&metadata=key%2Cpublish_time", headers=INFINITY)
    assert found.headers["content-type"] == "application/json"
    assert [(row["site"], row["_key"]) for row in found.json()] == [("hall", "2")]
    assert datetime.fromisoformat(found.json()[0]["_publish_time"]).tzinfo is not None
    grouped = http.get(f"{graphs}/groups?aggregate=COUNT%28%2A%29+AS+n&group_by=%2Fsite", headers=INFINITY).json()
    assert grouped == [{"site": "hall", "n": 1}, {"site": "lab", "n": 1}]
    topics = http.get("/v1/topics", headers=JSON_API)
    assert (topics.status_code, "graphs" in {one["name"] for one in topics.json()["topics"]}) == (200, True)
    found = http.get(f"{graphs}/records?order_by=%2Fat%20DESC&top=1", headers=JSON_API)
    assert [row["at"] for row in found.json()] == [200]


def test_refused_lines_are_told_by_their_numbers_and_the_others_are_there(http: httpx.Client) -> None:
    http.put("/v1/topics/loads/records/0", content=b'{"id":0}', headers=JSON)
    body = b'{"id":1}\n\n{"id":}\n{"of":"nobody"}\n{"id":2}'
    answer = http.post("/v1/topics/loads/records?key=/id", content=body, headers=LINES).json()
    assert (answer["status"], answer["lines"], answer["applied"], answer["refused"]) == (422, 5, 2, 2)
    assert [(one["line"], one["reason"]) for one in answer["refusals"]] == [
        (3, "PAYLOAD_MALFORMED"),
        (4, "KEY_REQUIRED"),
    ]
    assert answer["refusals"][1]["message"] == "it has no /id that could be a key"
    answer = http.post("/v1/topics/loads/records", content=b'{"id":1}\n\n{"id":2}\n', headers=LINES).json()
    assert [one["line"] for one in answer["refusals"]] == [1, 3]
    assert {one["reason"] for one in answer["refusals"]} == {"KEY_REQUIRED"}
    assert http.post("/v1/topics/loads/records", content=b"id=1", headers={"Content-Type": "text/plain"}).is_error
    assert http.get("/v1/topics/loads/count").json() == {"count": 3}


def test_a_body_that_is_cut_leaves_its_whole_lines(http: httpx.Client, door: RunningDoor) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as raw:
        head = "POST /v1/topics/cut/records?key=/id HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        raw.sendall(head.encode() + b'Content-Type: application/x-ndjson\r\n\r\n{"id":1}\n{"id":2}\n{"id":3')
    until(lambda: http.get("/v1/topics/cut/count").json().get("count") == 2, 20, "the lines before the cut")
    with socket.create_connection(("127.0.0.1", door.port)) as raw:
        head = "PUT /v1/topics/cut/records/9 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        raw.sendall(head.encode() + b'Content-Type: application/json\r\n\r\n{"id":9}')
    assert http.get("/v1/topics/cut/records/9").status_code == 404, "half a body is no record"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_curl_writes_reads_and_follows(door: RunningDoor) -> None:
    def curl(*arguments: str) -> str:
        return subprocess.run(["curl", "-fsS", *arguments], check=True, capture_output=True, text=True).stdout

    record = f"{door.address}/v1/topics/curled/records/1"
    curl("-X", "PUT", record, "--json", '{"x": 1}')
    assert json.loads(curl(record)) == {"x": 1}
    assert json.loads(curl(f"{door.address}/healthz")) == {"status": "ok"}
    done = subprocess.run(
        ["curl", "-sN", "-m", "1", f"{door.address}/v1/topics/curled/changes?snapshot=true"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert 'event: sow\ndata: {"key":"1",' in done.stdout
    refused = subprocess.run(["curl", "-f", f"{record}0"], check=False, capture_output=True)
    assert refused.returncode == 22


def test_the_description_names_every_address(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    page = http.get("/docs").text
    assert http.get("/", follow_redirects=True).text == page, "the address that the door prints"
    for path, operations in described["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page
            actual = path.replace("{topic}", "trades").replace("{key}", "1")
            if method == "get" and "changes" not in path:
                assert http.get(actual).status_code in (200, 400)
    assert "http://" not in page.replace(http.base_url.host, ""), "nothing is loaded from elsewhere"


# ---- who may call ----


def test_other_names_and_other_sites_are_refused(server: ServerProcess, http: httpx.Client) -> None:
    assert http.get("/v1/topics", headers={"Host": "evil.example"}).json()["reason"] == "HOST_UNKNOWN"
    assert http.get("/v1/topics", headers={"Origin": "https://evil.example"}).json()["reason"] == "ORIGIN_REFUSED"
    assert http.get("/v1/topics", headers={"Authorization": "Basic eDp5"}).status_code == 401
    with running_door(server.address, "--cors", "https://app.example") as door, door.client() as allowed:
        page = {"Origin": "https://app.example", "Access-Control-Request-Method": "PUT"}
        assert allowed.options("/v1/topics/x/records/1", headers=page).headers["access-control-allow-origin"]
        answer = allowed.get("/v1/topics", headers={"Origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "Retry-After" in answer.headers["access-control-expose-headers"], "a page reads when to try again"
        assert allowed.get("/v1/topics", headers={"Origin": "https://evil.example"}).status_code == 403


QUERIES: Final = (
    "hidden/records",
    "hidden/count?filter=/n+>+1",
    "orders/records?metadata=key,version,origin,sequence",
    "orders/records?filter=/secret+IS+NOT+NULL&order_by=/secret",
    "orders/records?filter=/secret+LIKE+'('",
    "orders/records?select=/secret,/note&format=ndjson",
    "orders/count?filter=/desk+=+'us'",
    "orders/groups?group_by=/secret&aggregate=COUNT(*)+AS+n",
    "orders/groups?aggregate=MAX(/price)+AS+x",
    "orders/records/77",
    f"orders/changes?after={'0' * 12}.1",
)
"""Each names hidden topics, rows or fields."""


def test_nothing_hidden_is_told(tmp_path: Path) -> None:
    """[2]; two callers of one address share nothing."""
    text = identity("eu", "desk") + identity("both", "all") + identity("nobody")
    text += grant("desk", "orders", "read consume publish delete", 'rows = "/desk = \'eu\'"\nhide = ["/secret"]')
    text += grant("all", ".*", "read consume")
    write_access(tmp_path, text)
    with ServerProcess(tmp_path, GUARDED) as guarded, client_of(guarded, "root") as root:
        root.create_topic("orders", key=["/id"])
        root.create_topic("hidden", key=["/id"])
        root.publish("hidden", {"id": CANARY, "n": NUMBER})
        root.publish("orders", {"id": 1, "desk": "eu", "price": 7, "secret": CANARY})
        root.publish("orders", {"id": 77, "desk": "us", "note": CANARY, "price": NUMBER})
        with running_door(guarded.address) as door, door.client("eu") as eu, door.client("both") as both:
            for query in QUERIES:
                answer = eu.get(f"/v1/topics/{query}")
                assert answer.status_code < 500
                assert not tells(answer.content + str(answer.headers).encode()), query
                assert not answer.is_success or answer.content, query
                with door.client("nobody") as nobody, door.client() as unknown:
                    assert nobody.get(f"/v1/topics/{query}").status_code in (400, 403, 404)
                    assert unknown.get(f"/v1/topics/{query}").headers["www-authenticate"] == "Bearer"
            assert not tells(eu.get("/v1/topics").content)
            assert not tells(eu.delete("/v1/topics/orders/records/77").content)
            put = eu.put("/v1/topics/orders/records/77", content=b'{"id":77,"desk":"eu"}', headers=JSON)
            assert not tells(put.content)
            assert tells(both.get("/v1/topics/orders/records").content), "so the lines above do look for it"
            with stream(eu, "orders/changes") as less, stream(both, "orders/changes") as more:
                root.publish("orders", {"id": 78, "desk": "us", "note": CANARY})
                root.publish("orders", {"id": 2, "desk": "eu", "secret": CANARY})
                told = less(lambda event: True)
                assert (told["key"], told["data"]) == ("2", {"id": 2, "desk": "eu"})
                assert more(lambda event: True)["key"] == "78"
                assert more(lambda event: True)["data"]["secret"] == CANARY


# ---- events ----


@contextmanager
def stream(http: httpx.Client, path: str, last: str = "") -> Iterator[Callable[[Callable[[dict], bool]], dict]]:  # type: ignore[type-arg]  # whatever JSON has
    """The events of a stream: a function that returns the next one that it is asked for."""
    headers = {"Last-Event-ID": last} if last else {}
    with http.stream("GET", f"/v1/topics/{path}", headers=headers) as answer:
        if answer.status_code != 200:
            answer.read()
        assert answer.status_code == 200, answer.text
        lines = answer.iter_lines()

        def following() -> Iterator[dict[str, object]]:
            event: dict[str, object] = {}
            for line in lines:
                name, _, value = line.partition(": ")
                if line == "" and "data" in event:
                    yield event | json.loads(str(event["data"]))
                if line == "":
                    event = {}
                elif name:
                    event[name] = value

        events = following()
        next(lines)  # the retry, which comes once the subscription stands
        yield lambda wanted: next(event for event in events if wanted(event))


def test_a_snapshot_comes_before_the_changes(http: httpx.Client) -> None:
    for key in "12":
        http.put(f"/v1/topics/shots/records/{key}", content=b'{\n"x":1}', headers=JSON)
    with stream(http, "shots/changes?snapshot=true&filter=/x+>+0") as take:
        assert [take(lambda event: True)["event"] for _ in range(3)] == ["sow", "sow", "snapshot_end"]
        http.put("/v1/topics/shots/records/3", content=b'{"x":0}', headers=JSON)
        http.put("/v1/topics/shots/records/2", content=b'{"x":0}', headers=JSON)
        gone = take(lambda event: True)
        assert (gone["event"], gone["key"], gone["reason"]) == ("oof", "2", "match")


def test_listeners_of_the_same_share_one_subscription(server: ServerProcess, door: RunningDoor) -> None:
    with door.client() as http, server.client() as client:
        http.put("/v1/topics/shared/records/0", content=b'{"x":0}', headers=JSON)
        with stream(http, "shared/changes") as one, stream(http, "shared/changes") as other:
            assert len(client.subscriptions("shared")) == 1
            put = http.put("/v1/topics/shared/records/1", content=b'{"x":1}', headers=JSON)
            first = one(lambda event: True)
            assert first == other(lambda event: True)
            assert first["version"] == put.json()["version"]
            with stream(http, "shared/changes", str(first["id"])) as late:
                http.put("/v1/topics/shared/records/2", content=b'{"x":2}', headers=JSON)
                assert late(lambda event: True)["key"] == "2"
                assert len(client.subscriptions("shared")) == 1
        until(lambda: not client.subscriptions("shared"), 20, "the end of a subscription without listeners")


def test_a_bookmark_that_is_not_kept_is_told_by_its_reason(http: httpx.Client) -> None:
    http.put("/v1/topics/kept/records/1", content=b'{"x":1}', headers=JSON)
    gone = http.get("/v1/topics/kept/changes", headers={"Last-Event-ID": "0123456789ab.5"})
    assert (gone.status_code, gone.json()["reason"]) == (410, "BOOKMARK_OTHER_EPOCH")
    with stream(http, "kept/changes?snapshot=true", "0123456789ab.5") as take:
        assert [take(lambda event: True)["event"] for _ in range(3)] == ["resync", "sow", "snapshot_end"]


def test_no_change_is_lost_or_repeated_when_either_process_is_killed(tmp_path: Path) -> None:
    """[1]"""
    port = free_port()
    seen: list[int] = []
    with ServerProcess(tmp_path) as server:

        def publish(number: int) -> None:
            with server.client() as client:
                client.publish("lives", {"n": number}, key=str(number))

        publish(0)
        with running_door(server.address, port=port) as door, door.client() as http:
            with stream(http, "lives/changes") as take:
                publish(1)
                event = take(lambda event: True)
                seen.append(event["data"]["n"])
                server.kill9()
                server.start()
                publish(2)
                event = take(lambda event: True)
                seen.append(event["data"]["n"])
                door.kill()
                publish(3)
        with running_door(server.address, port=port) as door, door.client() as http:
            with stream(http, "lives/changes", str(event["id"])) as take:
                publish(4)
                seen += [take(lambda event: True)["data"]["n"] for _ in range(2)]
    assert seen == [1, 2, 3, 4]
