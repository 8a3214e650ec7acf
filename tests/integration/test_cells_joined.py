"""Lists over all cells (rules C11, C19), with real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sow_cli import command
from sow_client import EARLIEST, InvalidArgument, SowError, Unavailable
from tests.support.fakes.commands import rows
from tests.support.servers.cells import Calls, CellServer, TwoCells, calls, placement
from tests.support.servers.http_door import running_door
from tests.support.servers.server import ServerProcess, free_port
from tests.support.simulation.clients import Connect, connect

__all__ = ["calls", "connect"]  # fixtures
pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


def test_topics_of_all_cells_are_one_list(connect: Connect, cells: TwoCells, calls: Calls) -> None:
    (a,), (b,), names = *cells.addresses.values(), [cells.topic(cell) for cell in "abab"]
    with connect(cells.home) as client:
        for name in names:
            client.create_topic(name)
        calls.clear()
        listed = [topic.name for topic in client.topics()]
        assert [name for name in listed if name in names] == sorted(names)
        made = sorted([(a, "GetPlacement"), (a, "ListTopics"), (b, "ListTopics")])
        assert sorted(calls) == made
        calls.clear()
        assert [topic.name for topic in client.topics()] == listed
        assert sorted(calls) == made


def test_each_cell_has_a_client_of_its_own(connect: Connect, cells: TwoCells) -> None:
    here, there = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        client.publish(here, b"{}", key="1")
        client.publish(there, b"{}", key="1")
        found = client.cells()
        assert {cell: one.status().instance for cell, one in found.items()} == {"a": "a-1", "b": "b-1"}
        with found["b"] as only:
            names = {topic.name for topic in only.topics()}
            assert (here in names, there in names) == (False, True)
            assert [*only.cells()] == [""]
            with pytest.raises(SowError) as refused:
                only.get(here, "1")
            assert refused.value.reason == "TOPIC_ELSEWHERE", "it follows nobody"
        assert found["b"].get(there, "1") is not None, "its connections are those of its parent"
    with pytest.raises(SowError, match="closed"):
        found["b"].status()


def test_a_list_is_whole_or_an_error_that_names_the_cell(connect: Connect, cells: TwoCells) -> None:
    with connect(cells.home, connect_timeout=0.5) as client:
        client.topics()
        cells.servers["b"].kill9()
        try:
            with pytest.raises(Unavailable, match="the cell b: ") as lost:
                client.topics()
            assert lost.value.details["cell"] == "b"
            found = client.in_each_cell(lambda one: one.topics())
            assert isinstance(found["a"], list), "the program may go on with the others"
            assert isinstance(found["b"], Unavailable)
            assert client.here.topics() == client.cells()["a"].topics() == found["a"]
        finally:
            cells.servers["b"].start()
        assert client.topics()


def test_what_is_under_way_in_all_cells_is_one_list(connect: Connect, cells: TwoCells) -> None:
    here, there = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        for name in (here, there):
            client.create_topic(name, expiration="enabled")
            client.publish(name, b"{}", key="1", ttl="1h")
            with client.durable(name, f"of-{name}"):
                pass
        due = {one.topic: one.due for one in client.expiry_horizon(spans=["2h"]).topics}
        assert (due[here], due[there]) == ((1,), (1,))
        assert {(one.topic, one.name) for one in client.durables()} >= {(name, f"of-{name}") for name in (here, there)}
        with client.subscribe(here), client.subscribe(there):
            found = {one.topic: one for one in client.subscriptions()}
            assert (found[here].id[:2], found[there].id[:2]) == ("a/", "b/")
            for name in (here, there):
                assert client.subscriptions(name) == [found[name]], "the ids are the same, and lead there"
            assert {one.session for one in found.values()} <= {one.id for one in client.sessions()}
            with pytest.raises(InvalidArgument, match="there is no subscription 'u99999'"):
                client.end_subscription("b/u99999")
            with pytest.raises(InvalidArgument, match="there is no cell c"):
                client.end_subscription("c/u1")
            for name in (here, there):
                with client.durable(name, "watched", start=EARLIEST) as durable, connect(cells.home) as fresh:
                    next(durable)
                    every = [*client.durables(), *client.durables(name), fresh.describe_durable(name, "watched")]
                    ids = [one.consumer.subscription for one in every if one.consumer and one.name == "watched"]
                    assert len(ids) == 3
                    assert {*ids} == {one.id for one in client.subscriptions(name) if one.durable == "watched"}
                    shown = CliRunner().invoke(
                        command.sow, ["--server", cells.home, "durable", "list", "--format", "ndjson"]
                    )
                    assert {
                        one["consumer"] for one in rows(shown) if one["topic"] == name and one["name"] == "watched"
                    } == {ids[0]}
                    client.end_subscription(ids[0])
            (own,) = client.cells()["b"].subscriptions(there)
            assert f"b/{own.id}" == found[there].id, "a cell's own client tells the server's ids"


def test_a_load_that_was_listed_is_found_in_its_cell(connect: Connect, cells: TwoCells) -> None:
    there = cells.topic("b")
    with cells.direct("b") as direct:
        direct.create_topic(there)
        load = direct.open_load(there)
    with connect(cells.home) as client:
        assert load.id in [one.id for one in client.loads()]
        assert client.get_load(load.id).phase == "staging"
        client.abort_load(load.id)
        assert [one.phase for one in client.loads(there)] in ([], ["aborted"])


def test_the_command_and_the_http_door_list_all_cells(cells: TwoCells) -> None:
    here, there = cells.topic("a"), cells.topic("b")
    for cell, name in (("a", here), ("b", there)):
        with cells.direct(cell) as direct:
            direct.publish(name, b"{}", key="1", ttl="1h")

    def sow(*words: str) -> Result:
        return CliRunner().invoke(command.sow, ["--server", cells.home, *words])

    for listed in (["topics"], ["due"]):
        shown = {row.get("name", row.get("topic")): row["cell"] for row in rows(sow(*listed))}
        assert (shown[here], shown[there]) == ("a", "b")
    assert [(row["cell"], row["instance"]) for row in rows(sow("status"))] == [("a", "a-1"), ("b", "b-1")]
    with running_door(cells.home) as door, door.client() as http:
        assert {here, there} <= {topic["name"] for topic in http.get("/v1/topics").json()["topics"]}
        cells.servers["b"].kill9()
        refused = http.get("/v1/topics")
        assert (refused.status_code, "the cell b: " in refused.text) == (503, True), "whole, or an error"
    try:
        alone = sow("topics")
        assert alone.exit_code == 3
        assert "warning: without the cell b: UNREACHABLE" in alone.stderr
        assert {row["cell"] for row in rows(alone)} == {"a"}
        examined = sow("doctor")
        assert examined.exit_code == 3
        faults = [(row["check"], row["cell"]) for row in rows(examined) if row["level"] == "fault"]
        assert faults == [("connection", "b")]
    finally:
        cells.servers["b"].start()
    examined = sow("doctor")
    assert {row.get("cell") for row in rows(examined) if row["check"] == "topics"} == {"a", "b"}


@pytest.mark.long
def test_a_new_cell_is_in_the_next_list(connect: Connect, cells: TwoCells, tmp_path: Path) -> None:
    name, port = cells.topic("b"), free_port()
    addresses = {"c": [f"127.0.0.1:{port}"]}
    with cells.direct("b") as direct:
        direct.create_topic(name)
    with (
        CellServer(tmp_path, "c", placement(1, default="c", cells=addresses), port=port) as server,
        connect(server.address) as client,
    ):
        assert (client.topics(), [*client.cells()]) == ([], ["c"])
        server.rewrite(placement(2, default="c", cells=addresses | {"b": cells.addresses["b"]}))
        client.reload_placement()
        assert name in [topic.name for topic in client.topics()]
        assert [*client.cells()] == ["b", "c"]


@pytest.mark.slow
def test_a_server_without_a_placement_is_asked_for_it_once(connect: Connect, tmp_path: Path, calls: Calls) -> None:
    with ServerProcess(tmp_path) as server, connect(server.address) as client:
        for _ in range(3):
            assert client.topics() == []
        assert [*client.cells()] == [""]
        assert client.cells()[""].status().topics == 0
        methods = sorted(method for _, method in calls)
        assert methods == ["GetPlacement", "GetStatus", "ListTopics", "ListTopics", "ListTopics"]
        server.restart()
        assert client.topics() == client.topics() == []
        assert calls[-1][1] == "ListTopics"
        assert [method for _, method in calls].count("GetPlacement") == 2, "it may have got one meanwhile"
