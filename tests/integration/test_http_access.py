"""A caller of `sow http` is told nothing of what its token does not show (rules A4, A5).

[1]  Two worlds are equal but for what is hidden from `desk`, as in `tests/unit/access/test_noninterference.py`: in one
     of them hidden records are in another topic, and hidden fields are missing. Each answer is the same in both.
[2]  What is hidden is answered as what does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from sow_client import Client
from tests.integration.test_canary import CANARY, NUMBER, tells
from tests.integration.test_http import JSON, LINES, stream
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.http_door import running_door
from tests.support.servers.server import ServerProcess
from tests.unit.access.test_noninterference import FILTERS, HIDE, ORDERS, RIGHTS, ROWS

HIDDEN: Final = ("a00", "a02", f"z-{CANARY}")
GROUPS: Final = ("/region", "/secret", "/client/iban", "/price % 2 AS even", "@version > 0 AS any", "")
AGGREGATES: Final = ("COUNT(*) AS n, MAX(/secret) AS m, SUM(/price) AS s", "COUNT(DISTINCT /client/iban) AS z")


@dataclass(frozen=True, slots=True)
class World:
    """One of the two worlds ([1])."""

    root: Client
    desk: httpx.Client
    hidden_here: bool

    def publish(self, key: str, region: str, price: int) -> None:
        """A record of eu is one that desk sees."""
        document: dict[str, Any] = {"id": key, "region": region, "price": price, "client": {"name": "n"}}
        if self.hidden_here:
            document |= {"secret": f"{CANARY}-{key}", "client": {"iban": [NUMBER, CANARY], "name": "n"}}
        self.root.publish("orders" if region == "eu" or self.hidden_here else "elsewhere", document)


@contextmanager
def world(folder: Path, *, hidden_here: bool) -> Iterator[World]:
    access = identity("desk", "desk") + grant("desk", "orders", RIGHTS, f"{ROWS}\n{HIDE}")
    write_access(folder, access)
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(folder, GUARDED))
        root = stack.enter_context(client_of(server, "root"))
        door = stack.enter_context(running_door(server.address))
        made = World(root, stack.enter_context(door.client("desk")), hidden_here)
        for topic in ("orders", "elsewhere"):
            root.create_topic(topic, key=["/id"], expiration="enabled", index=["/price", "/secret"])
        for number in range(8):
            made.publish(f"a{number:02}", "us", number)
            if number % 2 == 0:
                made.publish(f"b{number:02}", "eu", number)
        made.publish(HIDDEN[-1], "us", NUMBER)
        yield made


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, World]]:
    folder = tmp_path_factory.mktemp("worlds")
    with world(folder / "one", hidden_here=True) as one, world(folder / "other", hidden_here=False) as other:
        yield one, other


def asked(desk: httpx.Client, method: str, path: str, **more: Any) -> str:
    """The whole answer, without what differs between two servers: their names, times and versions."""
    answer = desk.request(method, path, **more)
    told = f"{answer.status_code} {sorted(answer.headers.items())} {answer.text}"
    assert answer.status_code < 500, told
    assert not tells(told.encode()), f"{path}: {told}"
    return comparable(told)


def comparable(told: str) -> str:
    told = re.sub(r"[0-9a-f]{12}\.(\d+)", r"EPOCH.\1", told)
    told = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z|\w{3}, \d\d \w{3} \d{4} [\d:]+ GMT", "TIME", told)
    return re.sub(r"\d{15,}", "VERSION", told)


def questions() -> Iterator[tuple[str, dict[str, str]]]:
    yield "/v1/topics", {}
    for topic in ("orders", "elsewhere", "absent"):
        yield f"/v1/topics/{topic}/count", {}
        yield f"/v1/topics/{topic}/records", {}
        yield f"/v1/topics/{topic}/records/a00", {}
    for text in FILTERS:
        yield "/v1/topics/orders/count", {"filter": text}
        yield "/v1/topics/orders/records", {"filter": text, "metadata": "key,version,sequence,origin"}
    for text in ORDERS:
        yield "/v1/topics/orders/records", {"order_by": text, "top": "2", "skip": "1", "format": "ndjson"}
    for group in GROUPS:
        for aggregate in AGGREGATES:
            yield "/v1/topics/orders/groups", {"group_by": group, "aggregate": aggregate}
    yield "/v1/topics/orders/groups", {"aggregate": "COUNT(*) AS n", "having": "MAX(/secret) > ''"}
    yield "/v1/topics/orders/records", {"select": "/secret,/client"}
    yield "/v1/topics/orders/records", {"filter": "/secret = :x", "params": '{"x": 5}'}
    for key in ("b00", "b01", *HIDDEN[:2], "none"):
        yield f"/v1/topics/orders/records/{key}", {}
    yield "/v1/topics/elsewhere/changes", {}


@pytest.mark.slow
def test_what_is_hidden_makes_no_difference_to_any_answer(worlds: tuple[World, World]) -> None:
    """[1]"""
    assert worlds[0].root.count("orders") > worlds[1].root.count("orders"), "so the worlds do differ"
    for path, parameters in questions():
        one, other = (asked(each.desk, "GET", path, params=parameters) for each in worlds)
        assert one == other, (path, parameters)
    for method, path, more in (
        ("HEAD", "records/b00", {}),
        ("PATCH", "records/b00", {"content": b'{"id":"b00","price":9}', "headers": JSON}),
        ("PUT", "records/b02", {"content": b'{"id":"b02","region":"eu"}', "headers": JSON | {"If-Match": '"1"'}}),
        ("PUT", "records/b02", {"content": b'{"id":"a00","region":"eu"}', "headers": JSON}),
        ("POST", "records", {"content": b'{"id":"n1","region":"eu"}\n{"id":}\n', "headers": LINES}),
        ("DELETE", "records/a02", {}),
        ("DELETE", "records/a02", {"headers": {"If-Match": '"1"'}}),
        ("DELETE", "records/b04", {}),
    ):
        one, other = (asked(each.desk, method, f"/v1/topics/orders/{path}", **more) for each in worlds)
        assert one == other, (method, path)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "&filter=/secret+IS+NOT+NULL+OR+/price+<+9"])
def test_what_is_hidden_makes_no_difference_to_a_stream(worlds: tuple[World, World], more: str) -> None:
    """[1]; also when hidden records change between those that are seen."""
    told = []
    for each in worlds:
        with stream(each.desk, f"orders/changes?snapshot=true{more}") as take:
            events: list[dict[str, Any]] = []
            while not events or events[-1]["event"] != "snapshot_end":
                events.append(take(lambda event: True))
            each.publish("a01", "us", 7)
            each.publish("b06", "eu", 8)
            each.publish("a01", "us", 1)
            events.append(take(lambda event: True))
        assert not tells(str(events).encode())
        assert events[-1]["key"] == "b06"
        told.append(comparable(str(events)))
    assert told[0] == told[1]


def test_what_is_hidden_is_answered_as_what_does_not_exist(worlds: tuple[World, World]) -> None:
    """[2]; byte for byte, but for the words of the request."""
    desk = worlds[0].desk
    for method in ("GET", "HEAD", "DELETE"):
        for more in ({}, {"If-Match": '"17"'}, {"If-None-Match": '"17"'}):
            answers = {
                asked(desk, method, f"/v1/topics/orders/records/{key}", headers=more).replace(key, "KEY")
                for key in ("a00", "a02", "x99")
            }
            assert len(answers) == 1, answers
    for path in ("records", "records/a00", "count", "groups?aggregate=COUNT(*)+AS+n", "changes"):
        hidden, absent = (asked(desk, "GET", f"/v1/topics/{topic}/{path}") for topic in ("elsewhere", "elsewhile"))
        assert hidden == absent.replace("elsewhile", "elsewhere")
