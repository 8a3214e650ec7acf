"""Topics that move from cell to cell while programs use them (rules C15 to C18)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from click.testing import CliRunner

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_cli import command, session
from sow_cli.exits import Refused
from sow_cli.moving import Moved, Mover
from sow_cli.placement_text import moved_text
from sow_cli.session import Session
from sow_client import EARLIEST, Client, SowError, Unavailable
from tests.support.servers.cells import CellServer, MovingCells, placement
from tests.support.servers.cluster import WAIT_SECONDS
from tests.support.servers.server import free_port, until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture
pytestmark = pytest.mark.one_client
STEPS: Final = 10
"""Lines that a move tells, and one more."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingCells]:
    with MovingCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


def move(cells: MovingCells, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Runs the command; returns what it has written to stdout, or "error"."""
    line = ["--server", cells.home, "cells", "move", *arguments, "--format", "json"]
    for option in ("--links-for", "--links-before"):
        line += [] if option in line else [option, "0s"]
    result = CliRunner().invoke(command.sow, line)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout) if code == 0 else {"error": result.stderr}
    return found


class Judge:
    """Publishes to both cells, without following, one record after the other: so no two requests overlap. After the
    first that the new cell takes, the old one must take none."""

    def __init__(self, cells: MovingCells, topic: str) -> None:
        self._cells = cells
        self._topic = topic
        self._ended = threading.Event()
        self.taken: list[str] = []
        """The cells that took the records; the place of each is its key."""
        self.unanswered: set[str] = set()
        """Keys of records of which no answer said whether a cell took them, as it was killed."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        channels = {cell: grpc.insecure_channel(servers[0], options) for cell, servers in self._cells.addresses.items()}
        stubs = {cell: sow_pb2_grpc.SowServiceStub(channel) for cell, channel in channels.items()}
        while not self._ended.wait(0.002):
            for cell, stub in stubs.items():
                payload = json.dumps({"id": len(self.taken)}).encode()
                request = sow_pb2.PublishRequest(topic=self._topic, records=[sow_pb2.PublishRecord(payload=payload)])
                try:
                    response = stub.Publish(request, timeout=5)
                except grpc.RpcError as error:
                    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        self.unanswered.add(str(len(self.taken)))
                    continue
                if not response.results[0].HasField("refusal"):
                    self.taken.append(cell)
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Judge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        end(self._thread)

    @property
    def both(self) -> bool:
        """True if the cell a took a record after the cell b."""
        return "b" in self.taken and "a" in self.taken[self.taken.index("b") :]


def end(thread: threading.Thread) -> None:
    """Waits until a thread has ended."""
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


class Ended(Exception):
    """The command was ended."""


def mover(cells: MovingCells, topics: tuple[str, ...], tell: Callable[[str], None], cell: str = "b") -> Moved:
    with Mover(Session(cells.home, None, session.connect), topics, cell, tell) as one:
        return one.move()


def check_moved(cells: MovingCells, topic: str, judge: Judge) -> None:
    """Everything that a cell has acknowledged is in the cell b, and nothing of the move is left."""
    assert not judge.both, judge.taken
    assert {"a", "b"} == set(judge.taken)
    acknowledged = set(map(str, range(len(judge.taken))))
    assert acknowledged <= set(cells.keys("b", topic)) <= acknowledged | judge.unanswered
    for cell in "ab":
        with cells.direct(cell) as client:
            placed = client.placement(topic)
            assert placed.topic_cell == "b"
            assert (placed.copy is not None) == (cell == "b")
            assert placed.prepared is None
            assert client.replication_status().outgoing == ()


def made(cells: MovingCells) -> str:
    topic = cells.topic("a")
    with Client(cells.home) as client:
        client.create_topic(topic, key=["/id"])
    return topic


def test_a_topic_moves_with_its_records_while_programs_publish(cells: MovingCells) -> None:
    topic = made(cells)
    with Judge(cells, topic) as judge:
        until(lambda: len(judge.taken) > 10, 10, "records")
        done = move(cells, topic, "--to", "b")
        until(lambda: "b" in judge.taken, 10, "records")
    assert done["from"] == "a"
    assert done["kept"] == []
    assert done["pause_micros"] > 0  # `python -m benchmarks moves` judges it
    check_moved(cells, topic, judge)
    assert "pause_micros" not in move(cells, topic, "--to", "b")  # nothing is left to do


@pytest.mark.long
@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("killed", ["command", "a", "b"])
def test_a_move_that_is_killed_at_a_step_is_ended_by_the_next_one(cells: MovingCells, killed: str, step: int) -> None:
    topic = made(cells)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == step:
            if killed == "command":
                raise Ended
            cells.servers[killed].kill9()
            cells.servers[killed].start()

    with Judge(cells, topic) as judge:
        until(lambda: len(judge.taken) > 10, 10, "records")
        try:
            mover(cells, (topic,), tell)
        except (Ended, SowError):
            mover(cells, (topic,), lambda line: None)
        until(lambda: "b" in judge.taken, 10, "records")
    check_moved(cells, topic, judge)


def test_programs_go_along_without_losing_anything(cells: MovingCells) -> None:
    """A publisher with an id, a live view, a subscription, the consumer of a durable: their topic moves, and back."""
    topic = cells.topic("a")
    seen: list[str] = []
    consumed: set[str] = set()
    with Client(cells.home) as client, Client(cells.home) as other:
        client.create_topic(topic, key=["/id"], retain_time="1h", replicate_durables=True, default_ttl="1h")
        changes = other.subscribe(topic, start=EARLIEST)
        durable = other.durable(topic, "reader", start=EARLIEST)
        readers = [
            threading.Thread(target=lambda: seen.extend(change.key for change in changes), daemon=True),
            threading.Thread(target=lambda: _consume(durable, consumed), daemon=True),
        ]
        for reader in readers:
            reader.start()
        with other.live_view(topic) as view, client.publisher(topic, publisher_id="writer") as publisher:
            count = 0
            for cell in ("b", "a"):
                ended = threading.Event()
                moving = threading.Thread(target=_move_and_tell, args=(cells, topic, cell, ended), daemon=True)
                moving.start()
                while not ended.is_set():
                    publisher.publish({"id": count})
                    count += 1
                    ended.wait(0.005)
                end(moving)
            publisher.flush()
            assert (publisher.applied, publisher.duplicates, publisher.refused) == (count, 0, 0)
            wanted = set(map(str, range(count)))
            until(lambda: view.keys() == wanted, 20, "the view to have all")
            until(lambda: wanted <= set(seen), 20, "the subscription to have all")
            until(lambda: wanted <= consumed, 20, "the consumer to have all")
        changes.close()
        durable.close()
        for reader in readers:
            end(reader)
        assert set(cells.keys("a", topic)) == wanted
        assert all(record.expire_time is not None for record in client.query(topic))


def _move_and_tell(cells: MovingCells, topic: str, cell: str, ended: threading.Event) -> None:
    try:
        move(cells, topic, "--to", cell, "--links-for", "500ms", "--links-before", "1s")
    finally:
        ended.set()


def _consume(durable: Any, consumed: set[str]) -> None:
    for change in durable:
        consumed.add(change.key)
        durable.acknowledge(change)


def test_topics_that_belong_together_move_together(cells: MovingCells) -> None:
    orders, dead, counts = (cells.topic("a") for _ in range(3))
    with Client(cells.home) as client:
        client.create_topic(dead)
        client.create_topic(orders, key=["/id"], dead_letter=dead, index=["/side"])
        client.create_view(counts, source=orders, group_by=["/side"], select=["COUNT(*) AS n"])
        client.publish(orders, {"id": 1, "side": "buy"})
        client.publish(dead, b"{}", key="old")
        refused = move(cells, orders, "--to", "b", code=1)["error"]
        assert f"Also name: {' '.join(sorted((dead, counts)))}" in refused
        move(cells, orders, dead, counts, "--to", "b")
        client.publish(orders, {"id": 2, "side": "buy"})
        assert [record.data["n"] for record in client.query(counts)] == [2]
        assert client.describe_topic(orders).settings.dead_letter == dead
        assert client.describe_topic(orders).settings.index == ("/side",)
        assert cells.keys("b", dead) == ["old"]


def test_what_would_lose_something_is_refused_and_nothing_changes(cells: MovingCells) -> None:
    topic, kept, absent = made(cells), cells.topic("a"), cells.topic("a")
    with Client(cells.home) as client:
        client.durable(topic, "reader").close()
        client.create_topic(kept, journal=False)
        before = client.placement().version
        assert "--replicate-durables" in move(cells, topic, "--to", "b", code=1)["error"]
        assert "has no journal" in move(cells, kept, "--to", "b", code=1)["error"]
        assert "TOPIC_NOT_FOUND" in move(cells, absent, "--to", "b", code=1)["error"]
        assert "there is no cell c" in move(cells, topic, "--to", "c", code=1)["error"]
        with cells.direct("b") as direct:
            direct.create_topic(topic, key=["/id"], here=True)
            assert direct.placement(topic).copy is not None
        assert client.placement().version == before
        assert client.replication_status().outgoing == ()


def test_a_move_is_undone_before_it_has_switched(cells: MovingCells) -> None:
    topic = made(cells)
    with Client(cells.home) as client, cells.direct("b") as direct:
        client.publish(topic, {"id": 1})

        def tell(line: str) -> None:
            if "is ready to take" in line:
                raise Ended

        with pytest.raises(Ended):
            mover(cells, (topic,), tell)
        waiting = direct.placement().prepared
        assert waiting is not None
        assert waiting.topics == (topic,)
        until(lambda: "has version" in getattr(direct.placement().prepared, "message", ""), 5, "the server to look")
        shown = CliRunner().invoke(command.sow, ["--server", cells.addresses["b"][0], "doctor"])
        assert f"for {topic}" in shown.output
        cells.servers["b"].kill9()
        cells.servers["b"].start()
        assert direct.placement().prepared is not None
        move(cells, topic, "--to", "b", "--abort")
        placed = direct.placement(topic)
        assert placed.prepared is None
        assert placed.copy is None
        assert direct.replication_status().outgoing == ()
        assert cells.keys("a", topic) == ["1"]
        shown = CliRunner().invoke(command.sow, ["--server", cells.home, "cells", "move", topic, "--to=b", "--abort"])
        assert shown.exit_code == 0
        assert f"nothing to undo: no move of {topic} to the cell b is under way" in shown.stderr
        move(cells, topic, "--to", "b")
        assert cells.keys("b", topic) == ["1"]


def _prepared(cells: MovingCells) -> tuple[str, str]:
    """A topic with a record, whose move was ended before the switch; and the placement with it in the cell b."""
    topic = made(cells)
    with Client(cells.home) as client:
        client.publish(topic, {"id": 1})
        text = moved_text(client.placement().text, (topic,), "b")

    def tell(line: str) -> None:
        if "is ready to take" in line:
            raise Ended

    with pytest.raises(Ended):
        mover(cells, (topic,), tell)
    return topic, text


@pytest.mark.parametrize("accept_loss", [False, True])
def test_an_abort_deletes_no_copy_that_may_be_the_only_one(accept_loss: bool, tmp_path: Path) -> None:
    """Story: the machine of the old cell was lost just after it had switched."""
    with MovingCells(tmp_path) as cells:
        topic, text = _prepared(cells)
        cells.servers["b"].kill9()
        with cells.direct("a") as direct:
            direct.reload_placement(text)
        cells.servers["a"].kill9()
        cells.servers["b"].start()
        at = Session(cells.addresses["b"][0], None, session.connect)
        with cells.direct("b") as direct, Mover(at, (topic,), "b", lambda line: None) as one:
            if accept_loss:
                one.abort(accept_loss=True)
                assert direct.get(topic, "1") is not None
                assert direct.placement().prepared is None
            else:
                with pytest.raises(Refused, match="the cell a does not answer"):
                    one.abort(accept_loss=False)
                copy = direct.placement(topic).copy
                assert copy is not None
                assert copy.records == 1
        if not accept_loss:
            cells.servers["a"].start()
            with Mover(at, (topic,), "b", lambda line: None) as one:
                with pytest.raises(Refused, match="has begun"):
                    one.abort(accept_loss=False)
            move(cells, topic, "--to", "b")
            assert cells.keys("b", topic) == ["1"]


@pytest.mark.parametrize("lost", ["links", "prepared"])
def test_a_switch_that_lost_what_it_needs_is_ended_by_the_next_run(cells: MovingCells, lost: str) -> None:
    """Story: two operators moved the same topic, and one of them ended or undid it meanwhile."""
    topic, text = _prepared(cells)
    with cells.direct("a") as a, cells.direct("b") as b:
        if lost == "links":
            a.remove_peer("b-1")
            b.remove_peer("a-1")
        else:
            b.drop_placement()
        a.reload_placement(text)
        move(cells, topic, "--to", "b")
        assert cells.keys("b", topic) == ["1"]
        assert a.placement(topic).copy is None


def test_what_waits_is_undone_by_its_own_abort_alone(cells: MovingCells) -> None:
    topic, other = _prepared(cells)[0], made(cells)
    with cells.direct("b") as direct:
        with pytest.raises(SowError, match="on its way to this cell"):
            direct.delete_topic(topic, here=True, force=True)
        move(cells, other, "--to", "b", "--abort")
        assert direct.placement().prepared is not None
    move(cells, topic, "--to", "b", "--abort")
    assert cells.keys("a", topic) == ["1"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable("Stream removed", reason="UNREACHABLE"), 3), (Refused("too much"), 1), (KeyboardInterrupt(), 130)],
)
def test_a_move_that_ends_in_the_middle_says_how_to_go_on(
    cells: MovingCells, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """Story: a server was killed, and the command said `UNREACHABLE: Stream removed`; after Ctrl-C it said nothing."""
    topic = made(cells)

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Mover, "_switch", fails)
        told = move(cells, topic, "--to", "b", code=code)["error"]
    assert "ended in the middle: run the same command again; until the switch, --abort undoes it" in told
    assert "in the middle" not in move(cells, topic, "--to", "c", code=1)["error"], "nothing has changed there"
    move(cells, topic, "--to", "b", "--abort")


def test_a_copy_that_the_other_cell_may_lack_is_never_deleted(cells: MovingCells) -> None:
    """Story: an operator changed the placement by hand, without a link, and then found the command."""
    topic = made(cells)
    with Client(cells.home) as client:
        client.publish(topic, {"id": 1})
        placed = client.placement()
        text = moved_text(placed.text, (topic,), "b")
        for cell in "ab":
            with cells.direct(cell) as direct:
                direct.reload_placement(text)
        client.create_topic(topic, key=["/id"])
        done = move(cells, topic, "--to", "b")
        assert done["kept"] == [f"{topic} at {cells.home}"]
        assert client.get(topic, "1") is None
        refused = move(cells, topic, "--to", "a", code=1)["error"]
        assert "has a copy" in refused
        assert "with 1 records, of no link" in refused


def test_a_topic_moves_from_two_replicas_to_two_others(tmp_path: Path) -> None:
    """Every server of a cell may have records that no other one has yet."""
    ports = {name: free_port() for name in ("a-1", "a-2", "b-1", "b-2")}
    addresses = {cell: [f"127.0.0.1:{ports[f'{cell}-{number}']}" for number in (1, 2)] for cell in "ab"}
    with ExitStack() as stack:
        for name, port in ports.items():
            other = f"{name[:2]}{3 - int(name[2])}"
            peer = f'[[replication.peers]]\nname = "{other}"\naddress = "127.0.0.1:{ports[other]}"\n'
            config = f'[server]\ninstance = "{name}"\n{peer}'
            text = placement(1, cells=addresses)
            stack.enter_context(CellServer(tmp_path / name, name[0], text, config=config, port=port))
        clients = {name: stack.enter_context(Client(f"127.0.0.1:{port}")) for name, port in ports.items()}
        for name in ("a-1", "a-2"):
            clients[name].create_topic("orders", key=["/id"])
            clients[name].publish("orders", {"id": name})
        told: list[str] = []
        with Mover(Session(addresses["a"][0], None, session.connect), ("orders",), "b", told.append) as one:
            assert one.move().kept == ()
        for name in ("b-1", "b-2"):
            found = clients[name].placement("orders")
            assert found.copy is not None
            assert found.copy.records == 2
            assert found.topic_cell == "b"
        clients["b-2"].publish("orders", {"id": 3})
        assert [link.origin for name in clients for link in clients[name].replication_status().outgoing] == ["file"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_a_quiet_subscription_goes_along(connect: Connect, cells: MovingCells, joined: bool) -> None:
    """C12. Story: it got nothing while the links were there, so its bookmark meant nothing in the new cell."""
    topic = made(cells)
    with connect(cells.home) as client:
        client.publish(topic, {"id": 0})
        with client.subscribe(topic_pattern=topic) if joined else client.subscribe(topic) as changes:
            move(cells, topic, "--to", "b", "--links-before", "1ms")
            client.publish(topic, {"id": 1})
            assert next(change.key for change in changes if change.key != "0") == "1"
