"""Clients that follow a topic to its cell (rules C10 to C14), with real servers, and with a hostile one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Final

import grpc
import pytest
from click.testing import CliRunner

from sow_cli import command
from sow_client import (
    EARLIEST,
    Ack,
    Client,
    FailedPrecondition,
    NotFound,
    Publisher,
    ResyncRequired,
    SowError,
    Unavailable,
)
from tests.support.fakes.fake_channels import Ended
from tests.support.servers.cells import Calls, TwoCells, calls
from tests.support.servers.http_door import running_door
from tests.support.simulation.clients import Connect, connect
from tests.support.stores.describing import describing

__all__ = ["calls", "connect"]  # fixtures
pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


def test_a_call_goes_to_the_cell_of_its_topic_and_the_wrong_cell_is_asked_once(
    connect: Connect, cells: TwoCells, calls: Calls
) -> None:
    (a,), (b,), there, here = *cells.addresses.values(), cells.topic("b"), cells.topic("a")
    with connect(cells.home) as client:
        client.publish(there, b"{}", key="1")
        assert calls == [(a, "Publish"), (b, "Publish")]
        calls.clear()
        assert client.get(there, "1") is not None
        client.publish(there, b"{}", key="2")
        client.publish(here, b"{}", key="1")
        assert calls == [(b, "Get"), (b, "Publish"), (a, "Publish")]
    assert cells.keys("b", there) == ["1", "2"]
    assert cells.keys("a", here) == ["1"]


def test_an_export_of_two_cells_is_refused_and_leaves_nothing_behind(
    connect: Connect, cells: TwoCells, calls: Calls
) -> None:
    with connect(cells.home) as client:
        there, also, here = cells.topic("b"), cells.topic("b"), cells.topic("a")
        for name in (there, also, here):
            client.create_topic(name)
        for first, other in ((here, there), (there, here)):
            with pytest.raises(SowError, match=f"'{other}' lives in the cell .*must live in one cell") as refused:
                client.open_export([first, other])
            assert (refused.value.reason, refused.value.details["topic"]) == ("TOPIC_ELSEWHERE", other)
            assert "their placements differ" not in refused.value.message
        assert client.open_export([there, also]).topics == (there, also)
        calls.clear()
        assert (client.get(here, "1"), client.get(there, "1")) == (None, None)
        assert calls == [(cells.addresses["a"][0], "Get"), (cells.addresses["b"][0], "Get")], "both are remembered"


def test_every_kind_of_call_follows(connect: Connect, cells: TwoCells) -> None:
    """Each with a topic that the client meets for the first time."""
    with cells.direct("b") as direct:
        topics = [cells.topic("b") for _ in range(12)]
        for topic in topics:
            direct.create_topic(topic, key=["/id"], expiration="enabled")
            direct.publish_many(topic, [{"id": "1"}, {"id": "2"}])
    names = iter(topics)
    with connect(cells.home) as client:
        assert client.count(next(names)) == 2
        assert [record.key for record in client.query(next(names))] == ["1", "2"]
        assert client.sow_delete(next(names), all=True).deleted == 2
        assert client.restamp(next(names), "set", ttl="1h").restamped == 2
        assert client.history(next(names), "1").entries != ()
        with client.transaction(next(names)) as change:
            change.remove("1")
            change.publish({"id": "3"})
        topic = next(names)
        with client.subscribe(topic, start=EARLIEST) as changes:
            assert [next(changes).key for _ in range(2)] == ["1", "2"]
        with client.live_result(next(names), order_by="/id DESC", top_n=1) as result:
            result.open()
            assert [record.key for record in result.list()] == ["2"]
        export = client.open_export(next(names), parts=1)
        assert sum(batch.count for batch in client.read_export(export.id, 0)) == 2
        client.close_export(export.id)
        with client.lease("1m") as lease:
            lease.publish(next(names), {"id": "leased"})
            lease.publish(cells.topic("a"), b"{}", key="leased")  # a lease over two cells
        topic = next(names)
        load = client.open_load(topic)
        with client.stage_load(load.id, 0, 0) as stager:
            stager.stage([b'{"id":"9"}'])
        assert [*client.commit_load(load.id, [stager.part()])][-1].phase == "done"
        assert [record.key for record in client.query(topic)] == ["9"]
        client.alter_topic(next(names), default_ttl="1h")


def test_a_publisher_streams_to_the_cell_of_its_topic(connect: Connect, cells: TwoCells) -> None:
    topic, owned, owner = cells.topic("b"), cells.topic("b"), cells.topic("owner")
    acks: list[Ack] = []
    with connect(cells.home) as client:
        with client.publisher(topic, batch_records=2, on_ack=acks.append) as publisher:
            for number in range(10):
                publisher.publish(b"{}", key=str(number))
        assert (publisher.applied, publisher.refused) == (10, 0)
        assert [ack.records for ack in acks] == [2] * 5, "the refusal of the first cell settles nothing"
        with client.publisher(owned, publisher_id=owner, unit=1) as publisher:
            publisher.publish(b"{}", key="1")
            publisher.finish_unit()
        assert client.open_publisher(owner, unit=1, topic=owned).unit_done
        assert not client.open_publisher(owner, unit=1).unit_done, "the unit is in the other cell"
    assert len(cells.keys("b", topic)) == 10


def test_a_publisher_goes_along_when_its_topic_moves(connect: Connect, cells: TwoCells) -> None:
    """And back: the records that a cell has refused are new to it when it gets them again."""
    topic = cells.topic("a")
    with connect(cells.home) as client:
        with client.publisher(topic, batch_records=3) as publisher:
            for number in range(7):
                publisher.publish(b"{}", key=f"1-{number}")
            publisher.flush()
            cells.place((topic, "b"))
            for number in range(7):
                publisher.publish(b"{}", key=f"2-{number}")
            publisher.flush()
            cells.place()
            for number in range(7):
                publisher.publish(b"{}", key=f"3-{number}")
        assert (publisher.applied, publisher.duplicates, publisher.refused) == (21, 0, 0)
    assert [key[0] for key in cells.keys("a", topic)] == ["1"] * 7 + ["3"] * 7
    cells.place((topic, "b"))
    assert cells.keys("b", topic) == [f"2-{number}" for number in range(7)]
    cells.place()


def test_a_publisher_waits_while_the_cells_disagree(connect: Connect, cells: TwoCells) -> None:
    """As they do while a new placement is being loaded: nothing is lost, and each record comes once."""
    topic = cells.topic("a")
    with connect(cells.home) as client:
        cells.place((topic, "b"), at="a")  # b does not know it yet
        with pytest.raises(FailedPrecondition) as differ:
            client.publish(topic, b"{}", key="0")
        assert differ.value.reason == "TOPIC_ELSEWHERE"
        assert differ.value.message == (
            f"{topic}: the cell a says that it lives in the cell b, and the cell b says that it lives in the "
            "cell a: their placements differ"
        )
        agreed = threading.Timer(0.3, cells.place, [(topic, "b")])
        agreed.start()
        with client.publisher(topic, batch_records=2) as publisher:
            for number in range(5):
                publisher.publish({}, key=str(number))  # which asks for the form of documents first
        agreed.join()
        assert (publisher.applied, publisher.duplicates, publisher.refused) == (5, 0, 0)
    assert cells.keys("b", topic) == ["0", "1", "2", "3", "4"]
    cells.place()


def test_a_publisher_with_an_epoch_of_the_program_stays(connect: Connect, cells: TwoCells) -> None:
    topic, owner = cells.topic("b"), cells.topic("owner")
    with connect(cells.home) as client:
        opened = client.open_publisher(owner)
        publisher = client.publisher(topic, publisher_id=owner, epoch=opened.epoch, token=opened.token)
        publisher.publish(b"{}", key="1")
        with pytest.raises(FailedPrecondition, match="open_publisher takes the topic") as stays:
            publisher.flush()
        assert stays.value.reason == "TOPIC_ELSEWHERE"
        publisher.abort()
    with pytest.raises(NotFound):
        cells.keys("b", topic)


def test_subscriptions_go_along_when_their_topic_moves_and_tell_what_is_missing(
    connect: Connect, cells: TwoCells
) -> None:
    """The other cell has another journal: a subscription without a snapshot cannot go on there unseen."""
    topic = cells.topic("a")
    with connect(cells.home) as client, cells.direct("a") as a:
        a.publish(topic, b'{"n":1}', key="1")
        changes = client.subscribe(topic, start=EARLIEST)
        everything = client.sow_and_subscribe(topic)
        durable = client.durable(topic, "reader", start=EARLIEST)
        assert next(changes).key == next(durable).key == "1"
        assert [next(everything).op, next(everything).op] == ["sow", "snapshot_end"]

        cells.place((topic, "b"))
        with cells.direct("b") as b:
            b.publish(topic, b'{"n":2}', key="2")
        assert [next(everything).op for _ in range(3)] == ["resync", "sow", "snapshot_end"]
        with pytest.raises(ResyncRequired) as missing:
            next(changes)
        assert missing.value.bookmark is not None
        with pytest.raises(FailedPrecondition, match="stays in the cell where it began") as kept:
            next(durable)
        assert kept.value.reason == "TOPIC_ELSEWHERE"
        for one in (changes, everything, durable):
            one.close()
    cells.place()


def test_a_live_view_goes_along_when_its_topic_moves(cells: TwoCells) -> None:
    topic = cells.topic("a")
    with Client(cells.home) as client, cells.direct("a") as a:
        a.publish(topic, b'{"n":1}', key="1")
        with client.live_view(topic) as view:
            assert [*view] == ["1"]
            cells.place((topic, "b"))
            with cells.direct("b") as b:
                b.publish(topic, b'{"n":2}', key="2")
            for _ in range(600):
                if [*view] == ["2"]:
                    break
                view.wait(0.05)
                threading.Event().wait(0.01)
            assert [*view] == ["2"]
    cells.place()


def test_a_topic_that_came_home_is_found_there(connect: Connect, cells: TwoCells, calls: Calls) -> None:
    (a,), (b,) = cells.addresses["a"], cells.addresses["b"]
    topic = cells.topic("a")
    with connect(cells.home) as client:
        cells.place((topic, "b"))
        client.publish(topic, b"{}", key="1")
        cells.place()
        calls.clear()
        client.publish(topic, b"{}", key="2")
        assert calls == [(b, "Publish"), (a, "Publish")]
        calls.clear()
        client.publish(topic, b"{}", key="3")
        assert calls == [(a, "Publish")]


def test_a_cell_that_is_down_is_told_for_its_topics_alone(connect: Connect, cells: TwoCells) -> None:
    topic = cells.topic("b")

    def published(publisher: Publisher) -> None:
        try:
            publisher.publish(b"{}", key="1")
            publisher.flush()
        finally:
            publisher.abort()

    with connect(cells.home, connect_timeout=0.3) as client:
        client.publish(topic, b"{}", key="1")
        cells.servers["b"].kill9()
        try:
            for call in (
                lambda: client.get(topic, "1"),
                lambda: client.count(topic),
                lambda: client.sow_delete(topic, keys=["1"]),
                lambda: client.subscribe(topic, retry_for=0.2).open(),
                lambda: published(client.publisher(topic, retry_for=0.2)),
            ):
                with pytest.raises(Unavailable, match=f"the cell b, where {topic} lives: ") as down:
                    call()
                assert (down.value.reason, down.value.details["cell"]) == ("UNREACHABLE", "b")
                assert down.value.message.count("the cell b") == 1
            client.publish(cells.topic("a"), b"{}", key="1")
        finally:
            cells.servers["b"].start()
        with Client(cells.home) as other:
            other.get(topic, "1")
        assert client.get(topic, "1") is not None


# -- trust -------------------------------------------------------------------------------------------------------------

TOKEN: Final = "the-token-of-the-program"


class Liar(grpc.GenericRpcHandler):
    """A server that sends every call elsewhere, and notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.sends_to = ""
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((describing(), self))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        token = dict(details.invocation_metadata).get("authorization", "")
        self.shown.append((details.method.rpartition("/")[2], str(token)))

        def refused(_request: bytes, context: grpc.ServicerContext) -> bytes:
            told = {"cell": f"of {self.sends_to}", "servers": self.sends_to, "from_cell": self.address}
            ended = Ended(grpc.StatusCode.FAILED_PRECONDITION, "TOPIC_ELSEWHERE", "elsewhere", told)
            context.set_trailing_metadata(ended.trailing_metadata())
            context.abort(ended.code(), ended.details())

        return grpc.unary_unary_rpc_method_handler(refused)

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def liars() -> Iterator[tuple[Liar, Liar, Liar]]:
    made = Liar(), Liar(), Liar()
    yield made
    for liar in made:
        liar.stop()


def test_no_other_cell_sends_a_client_with_its_token_to_a_third(
    connect: Connect, liars: tuple[Liar, Liar, Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home's word counts alone: b names c, so home is asked again, and then the call ends. c sees nothing."""
    monkeypatch.setattr("sow_client._cells.PAUSES", ())
    home, b, c = liars
    home.sends_to, b.sends_to, c.sends_to = b.address, c.address, home.address
    with connect(home.address, token=TOKEN) as client:
        for _ in range(2):
            with pytest.raises(FailedPrecondition) as ended:
                client.get("orders", "1")
            assert ended.value.reason == "TOPIC_ELSEWHERE"
            assert f"lives in the cell of {b.address}" in ended.value.message
            assert f"lives in the cell of {c.address}" in ended.value.message
    assert [name for name, _ in home.shown] == ["Get"] * 4
    assert b.shown == [("Get", f"Bearer {TOKEN}")] * 2
    assert c.shown == []


@pytest.mark.parametrize("servers", ["unix:/tmp/sow", "dns:///localhost:7450", "", "127.0.0.1:1,", "127.0.0.1:0"])
def test_an_answer_without_good_addresses_leads_nowhere(
    connect: Connect, liars: tuple[Liar, Liar, Liar], servers: str
) -> None:
    home, _, _ = liars
    home.sends_to = servers
    with connect(home.address, token=TOKEN) as client, pytest.raises(FailedPrecondition) as ended:
        client.get("orders", "1")
    assert ended.value.reason == "TOPIC_ELSEWHERE"
    assert [name for name, _ in home.shown] == ["Get"]


def test_a_token_goes_to_no_other_machine_in_plain_text(connect: Connect, liars: tuple[Liar, Liar, Liar]) -> None:
    home, _, _ = liars
    home.sends_to = "192.0.2.1:7450"
    with connect(home.address, token=TOKEN) as client, pytest.raises(FailedPrecondition) as ended:
        client.get("orders", "1")
    assert ended.value.reason == "TOPIC_ELSEWHERE"
    assert "192.0.2.1:7450, over TLS only" in ended.value.message


def test_a_channel_of_the_program_is_not_left(liars: tuple[Liar, Liar, Liar]) -> None:
    home, b, _ = liars
    home.sends_to = b.address
    with (
        grpc.insecure_channel(home.address) as channel,
        Client(channel=channel) as client,
        pytest.raises(FailedPrecondition, match="elsewhere"),
    ):
        client.get("orders", "1")
    assert b.shown == []


def test_a_client_shows_its_cells_and_closes_the_channels_to_all(cells: TwoCells) -> None:
    topic = cells.topic("b")
    with Client(cells.home) as client:
        client.publish(topic, b"{}", key="1")
        assert repr(client) == f"Client('{cells.home}', also of the cells b)"
        (there,) = client._cells.others
    assert there.transport.is_closed
    with pytest.raises(SowError) as closed:
        client.get(topic, "1")
    assert closed.value.reason == "CLOSED"


FORKED: Final = """
import os, sys
from sow_client import Client

home, topic = sys.argv[1:]
with Client(home) as client:
    client.publish(topic, b"{}", key="1")
    if not (child := os.fork()):
        client.publish(topic, b"{}", key="child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    client.publish(topic, b"{}", key="2")
"""


@pytest.mark.long
def test_a_forked_child_goes_to_the_cell_of_a_topic_on_channels_of_its_own(cells: TwoCells) -> None:
    topic = cells.topic("b")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GRPC_ENABLE_FORK_SUPPORT": "1"}
    subprocess.run([sys.executable, "-c", FORKED, cells.home, topic], check=True, timeout=60, env=environment)
    assert cells.keys("b", topic) == ["1", "2", "child"]


def test_a_copy_that_was_left_behind_is_deleted_at_home(connect: Connect, cells: TwoCells) -> None:
    """C5: and not the topic, which the client knows in the other cell."""
    topic = cells.topic("a")
    with connect(cells.home) as client:
        client.publish(topic, b"{}", key="old")
        cells.place((topic, "b"))
        client.publish(topic, b"{}", key="new")
        assert client.delete_topic(topic, here=True) == 1
        assert client.placement(topic).cell == "a"
        assert [record.key for record in client.query(topic)] == ["new"]
    cells.place()


# -- what is made of the clients ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_and_its_sql_follow(cells: TwoCells) -> None:
    """Q8: a join may be over topics of two cells."""
    there, here = cells.topic("b"), cells.topic("a")

    def sow(*arguments: str, given: str = "") -> str:
        done = CliRunner().invoke(command.sow, ["--server", cells.home, *arguments], input=given)
        assert done.exit_code == 0, done.output
        return done.output

    with Client(cells.home) as client:
        for topic in (there, here):
            client.create_topic(topic, key=["/id"])
    sow("publish", there, given='{"id":1,"name":"x"}\n')
    sow("publish", here, given='{"id":1,"size":2}\n')
    assert '"name":"x"' in sow("get", there, "1")
    joined = sow("sql", f'SELECT name, size FROM "{there}" JOIN "{here}" USING (id)', "--format", "csv")
    assert "x,2" in joined
    assert cells.keys("b", there) == cells.keys("a", here) == ["1"]


@pytest.mark.long
def test_the_door_of_http_follows(cells: TwoCells) -> None:
    topic = cells.topic("b")
    with cells.direct("b") as direct:
        direct.create_topic(topic)
    with running_door(cells.home) as door, door.client() as http:
        assert http.put(f"/v1/topics/{topic}/records/1", json={"n": 1}).status_code == 200
        assert http.get(f"/v1/topics/{topic}/records/1").json()["n"] == 1
    assert cells.keys("b", topic) == ["1"]
