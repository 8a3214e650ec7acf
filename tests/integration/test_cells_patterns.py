"""Subscriptions to patterns over several cells (rule C21), with real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_cli import command
from sow_client import (
    EARLIEST,
    Change,
    Client,
    InvalidArgument,
    NotFound,
    ResyncRequired,
    SowError,
    Subscription,
    Unavailable,
)
from sow_client.aio import _joining as aio_joining
from sow_client.blocking import _joining as blocking_joining
from tests.support.servers.cells import NOBODY, Calls, TwoCells, calls, placement
from tests.support.servers.cluster import WAIT_SECONDS
from tests.support.servers.server import ServerProcess
from tests.support.simulation.clients import Connect, connect

__all__ = ["calls", "connect"]  # fixtures
pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


@pytest.fixture
def topics(cells: TwoCells) -> tuple[str, str]:
    """A topic of each cell, with a record."""
    here, there = cells.topic("a"), cells.topic("b")
    with Client(cells.home) as client:
        client.publish(here, b"{}", key="1")
        client.publish(there, b"{}", key="1")
    return here, there


@contextmanager
def down(cells: TwoCells) -> Iterator[Callable[[], None]]:
    """The cell b is down in the block, until it is started again."""
    server = cells.servers["b"]
    server.kill9()
    with ExitStack() as stack:
        stack.callback(server.start)
        yield stack.close


def pattern(*topics: str) -> str:
    return "|".join(topics)


def bookmarks(changes: Subscription) -> Mapping[str, str]:
    found: object = changes.bookmark
    assert isinstance(found, Mapping)
    return found


def taken(changes: Subscription, count: int) -> list[Change]:
    """The next changes, as many as come."""
    found: list[Change] = []
    while len(found) < count and (change := changes.next(5.0)) is not None:
        found.append(change)
    return found


def told(changes: list[Change]) -> list[tuple[str, str, str, str]]:
    return sorted((change.cell, change.op, change.topic, change.key) for change in changes)


def test_a_pattern_follows_topics_of_all_cells(connect: Connect, cells: TwoCells, topics: tuple[str, str]) -> None:
    here, there = topics
    with connect(cells.home) as client:
        with client.subscribe(topic_pattern=pattern(here, there)) as changes:
            assert changes.cells == {"a": None, "b": None}
            for topic in (there, here):
                client.publish(topic, b"{}", key="2")
            assert told(list(islice(changes, 2))) == [("a", "put", here, "2"), ("b", "put", there, "2")]
            bookmark = bookmarks(changes)
            assert sorted(bookmark) == ["a", "b"]
        for topic in (there, here):
            client.publish(topic, b"{}", key="3")
        with client.subscribe(topic_pattern=pattern(here, there), start=bookmark) as changes:
            assert told(list(islice(changes, 2))) == [("a", "put", here, "3"), ("b", "put", there, "3")]
        with client.subscribe(topic_pattern=pattern(here, there), start={"b": bookmark["b"]}) as changes:
            again = told(taken(changes, 4))
        assert [key for cell, _, _, key in again if cell == "a"] == ["1", "2", "3"], "from the earliest change"


def test_many_changes_of_both_cells_come_in_the_order_of_their_topics(
    connect: Connect, cells: TwoCells, topics: tuple[str, str]
) -> None:
    """In frames of many, and with waits between the last ones."""
    with connect(cells.home) as client, client.subscribe(topic_pattern=pattern(*topics)) as changes:
        for _ in range(3):
            for topic in topics:
                client.publish_many(topic, [b"{}"] * 200, keys=map(str, range(200)))
            found = list(islice(changes, 400))
            for topic in topics:
                assert [change.key for change in found if change.topic == topic] == [str(n) for n in range(200)]


def test_the_snapshots_of_all_cells_end_once(connect: Connect, cells: TwoCells, topics: tuple[str, str]) -> None:
    here, there = topics
    with connect(cells.home) as client, client.sow_and_subscribe(topic_pattern=pattern(here, there)) as changes:
        first = list(islice(changes, 3))
        assert told(first[:2]) == [("a", "sow", here, "1"), ("b", "sow", there, "1")]
        assert (first[2].op, first[2].topic, first[2].bookmark) == ("snapshot_end", "", None)
        client.publish(there, b"{}", key="2")
        assert told([next(changes)]) == [("b", "put", there, "2")]
        assert sorted(bookmarks(changes)) == ["a", "b"]


def test_a_topic_that_comes_to_a_cell_without_one_is_followed_from_its_first_change(
    connect: Connect, cells: TwoCells
) -> None:
    here, there = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        with pytest.raises(NotFound, match="no topic matches") as nothing:
            client.subscribe(topic_pattern=pattern(here, there)).open()
        assert nothing.value.reason == "PATTERN_MATCHES_NOTHING"
        client.publish(here, b"{}", key="1")
        with (
            client.subscribe(topic_pattern=pattern(here, there)) as changes,
            client.sow_and_subscribe(topic_pattern=pattern(here, there)) as snapshot,
        ):
            assert [next(snapshot).op, next(snapshot).op] == ["sow", "snapshot_end"]
            client.publish(there, b"{}", key="1")
            assert told([next(changes)]) == [("b", "put", there, "1")]
            assert [(change.cell, change.op) for change in islice(snapshot, 2)] == [("b", "sow"), ("", "snapshot_end")]


def test_an_outage_of_a_cell_is_told_for_its_topics_and_the_others_go_on(
    connect: Connect, cells: TwoCells, topics: tuple[str, str]
) -> None:
    here, there = topics
    heard: list[SowError | None] = []
    with connect(cells.home, connect_timeout=0.3) as client:
        changes = client.subscribe(topic_pattern=pattern(here, there), start=EARLIEST, on_interruption=heard.append)
        assert len(list(islice(changes, 2))) == 2
        with down(cells) as start_again:
            for key in ("2", "3"):
                client.publish(here, b"{}", key=key)
                assert told([next(changes)]) == [("a", "put", here, key)]
            give_up = time.monotonic() + WAIT_SECONDS
            while not heard and time.monotonic() < give_up:
                assert changes.next(0.05) is None
            assert [error and error.details["cell"] for error in heard] == ["b"]
            missing = changes.cells["b"]
            assert missing is not None
            assert missing.message.startswith("the cell b: ")
            bookmark = bookmarks(changes)
            with client.subscribe(topic_pattern=pattern(here, there), start=bookmark) as resumed:
                client.publish(here, b"{}", key="4")
                assert told([next(resumed)]) == [("a", "put", here, "4")], "its other cell is down from the begin"
                with pytest.raises(Unavailable, match="the cell b: ") as outage:
                    client.subscribe(topic_pattern=pattern(here, there)).open()  # what b gets now would be missing
                assert outage.value.details["cell"] == "b"
                start_again()
                client.publish(there, b"{}", key="5")
                assert told([next(resumed)]) == [("b", "put", there, "5")]
        assert told(list(islice(changes, 2))) == [("a", "put", here, "4"), ("b", "put", there, "5")]
        assert heard[1:] == [None]
        changes.close()


def test_an_outage_is_told_while_the_other_cells_are_silent(
    connect: Connect, cells: TwoCells, topics: tuple[str, str]
) -> None:
    """It was told with the next change of another cell, which may be hours later."""
    here, there = topics

    def publish(error: SowError | None) -> None:
        if error is not None:
            other.publish(here, b"{}", key="told")

    with connect(cells.home, connect_timeout=0.3) as client, Client(cells.home) as other:
        changes = client.subscribe(topic_pattern=pattern(here, there), start=EARLIEST, on_interruption=publish)
        assert len(list(islice(changes, 2))) == 2
        with down(cells):
            change = changes.next(WAIT_SECONDS)
            assert change is not None
            assert told([change]) == [("a", "put", here, "told")]
        changes.close()


def test_a_start_that_does_not_fit_is_refused(connect: Connect, cells: TwoCells, topics: tuple[str, str]) -> None:
    here, there = topics
    with connect(cells.home) as client, cells.direct("b") as b:
        with pytest.raises(InvalidArgument, match=r"start: is the bookmark of one cell, and there are several"):
            client.subscribe(topic_pattern=pattern(here, there), start="0d4c5b7e8f90.17").open()
        with pytest.raises(InvalidArgument, match=r"start: has the bookmarks of cells, which only topic_pattern needs"):
            client.subscribe(here, start={"a": "0d4c5b7e8f90.17"})
        with pytest.raises(InvalidArgument, match=r"start: 'a': 5 is not the name of a cell with a bookmark"):
            client.subscribe(topic_pattern=here, start={"a": 5})  # type: ignore[dict-item]  # on purpose
        part = b.cells()["b"]
        with part.subscribe(topic_pattern=there) as changes:
            assert isinstance(changes.bookmark, str), "a client of one cell has one position"


@pytest.mark.long
def test_the_command_follows_a_pattern_and_goes_on(cells: TwoCells, topics: tuple[str, str]) -> None:
    follow = ["--server", cells.home, "subscribe", pattern(*topics), "--pattern", "--from"]

    def followed(start: str, *options: str) -> Result:
        done = CliRunner().invoke(command.sow, [*follow, start, *options])
        assert done.exit_code == 0, done.output
        return done

    first = [json.loads(line) for line in followed("earliest", "--count", "2").stdout.splitlines()]
    assert sorted((line["cell"], line["topic"]) for line in first) == [("a", topics[0]), ("b", topics[1])]
    start = json.dumps({line["cell"]: line["bookmark"] for line in first})
    with Client(cells.home) as client:
        client.publish(topics[1], b"{}", key="2")
    again = followed(start, "--count", "1", "--format", "table")
    assert '1 message; bookmark \'{"a": ' in again.stderr
    refused = CliRunner().invoke(command.sow, [*follow, '{"a": 5}'])
    assert refused.exit_code == 2
    assert "no JSON object of cells and bookmarks" in refused.stderr


# -- other placements --------------------------------------------------------------------------------------------------


def test_no_change_is_lost_when_a_topic_moves(connect: Connect, cells: TwoCells) -> None:
    """C21: the reader is late, so the cell that the topic leaves still owes changes of it when it has gone."""
    topic, other = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        client.create_topic(topic)
        client.create_topic(other)
        changes = client.subscribe(topic_pattern=pattern(topic, other), batch_size=1)
        for number in range(50):
            client.publish(topic, {"n": number}, key="1")
        cells.place((topic, "b"))
        client.publish(topic, {"n": 50}, key="1")
        client.publish(topic, {"n": 51}, key="end")
        seen: list[int] = []
        for _ in range(600):  # what the older cell has told after the newer one comes again
            if (change := changes.next(0.05)) is not None and change.record is not None and change.key == "1":
                seen.append(change.record.data["n"])
            if set(range(51)) == set(seen) and seen[-1] == 50:
                break
        assert set(range(51)) == set(seen)
        assert seen[-1] == 50
        changes.close()
    cells.place()


def test_a_call_ends_with_a_frame_where_its_topics_leave(cells: TwoCells, topics: tuple[str, str]) -> None:
    """C21: for clients whose gRPC drops messages that were not read yet when an error comes."""
    here, _ = topics
    with grpc.insecure_channel(cells.addresses["a"][0]) as channel, Client(cells.home) as client:
        request = sow_pb2.SubscribeRequest(topic_pattern=here, tell_left=True)
        call = sow_pb2_grpc.SowServiceStub(channel).Subscribe(request, timeout=30)
        assert next(call).HasField("progress")
        client.publish(here, b"{}", key="2")
        cells.place((here, "b"))
        frames = list(call)
        assert [key for frame in frames for key in frame.changes.records.key] == ["2"]
        assert frames[-1].topics_left.placement_version == cells.version
        assert call.code() is grpc.StatusCode.OK


@pytest.mark.slow
def test_no_change_is_lost_when_two_topics_swap_their_cells(connect: Connect, cells: TwoCells) -> None:
    """C21: both cells still owe changes, and each shows the topic that has come meanwhile."""
    topics = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        for topic in topics:
            client.create_topic(topic)
        changes = client.subscribe(topic_pattern=pattern(*topics), batch_size=1)
        for number in range(50):
            for topic in topics:
                client.publish(topic, {"n": number}, key="1")
        cells.place((topics[0], "b"), (topics[1], "a"))
        for topic in topics:
            client.publish(topic, {"n": 50}, key="1")
        seen: dict[str, list[int]] = {topic: [] for topic in topics}
        for _ in range(600):
            if (change := changes.next(0.05)) is not None and change.record is not None:
                seen[change.topic].append(change.record.data["n"])
            if all(set(found) == set(range(51)) and found[-1] == 50 for found in seen.values()):
                break
        for found in seen.values():
            assert set(found) == set(range(51))
            assert found[-1] == 50
        changes.close()
    cells.place()


def test_a_snapshot_follows_a_topic_that_moves(connect: Connect, cells: TwoCells) -> None:
    topic, other = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        for name in (topic, other):
            client.publish(name, b"{}", key="old")
        with client.sow_and_subscribe(topic_pattern=pattern(topic, other)) as changes:
            assert [change.op for change in islice(changes, 3)] == ["sow", "sow", "snapshot_end"]
            cells.place((topic, "b"))
            client.publish(topic, b"{}", key="new")
            client.publish(other, b"{}", key="new")
            view: dict[str, set[str]] = {topic: {"old"}, other: {"old"}}
            for change in changes:
                if change.op == "resync":
                    view.pop(change.topic, None)
                elif change.record is not None:
                    view.setdefault(change.topic, set()).add(change.key)
                if view == {topic: {"new"}, other: {"old", "new"}}:
                    break
    cells.place()


def test_a_cell_that_a_placement_adds_joins(connect: Connect, cells: TwoCells, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aio_joining, blocking_joining):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    here, there = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client, cells.direct("b") as b:
        client.publish(here, b"{}", key="1")
        b.publish(there, b"{}", key="1")
        cells.version += 1
        cells.load("a", placement(cells.version, cells={"a": cells.addresses["a"]}))
        with client.subscribe(topic_pattern=pattern(here, there)) as changes:
            assert changes.cells == {"a": None}
            cells.place()
            assert told([next(changes)]) == [("b", "put", there, "1")]
            assert changes.cells == {"a": None, "b": None}


def test_a_cell_that_was_lost_and_has_another_placement_is_told(
    connect: Connect, cells: TwoCells, topics: tuple[str, str]
) -> None:
    with connect(cells.home) as client, client.subscribe(topic_pattern=pattern(*topics), start=EARLIEST) as changes:
        assert len(list(islice(changes, 2))) == 2
        with down(cells):
            cells.place(at="a")
            cells.servers["b"].rewrite(cells.servers["a"].placement.read_text())
        with pytest.raises(ResyncRequired, match="the cell b: it has another placement since it was followed last"):
            next(changes)


def test_a_program_that_stops_across_a_move_is_told(connect: Connect, cells: TwoCells, topics: tuple[str, str]) -> None:
    here, there = topics
    with connect(cells.home) as client:
        with client.subscribe(topic_pattern=pattern(here, there), start=EARLIEST) as changes:
            assert len(taken(changes, 2)) == 2
            bookmark = bookmarks(changes)
        client.publish(here, b"{}", key="unseen")
        cells.place((here, "b"))
        with pytest.raises(ResyncRequired, match="the cell a: it has another placement since it was followed last"):
            next(client.subscribe(topic_pattern=pattern(here, there), start=bookmark))
        with pytest.raises(ResyncRequired, match="there is no cell 'c' any more"):
            client.subscribe(topic_pattern=there, start={**bookmark, "c": "0d4c5b7e8f90.17"}).open()
    cells.place()


def test_a_call_that_goes_on_across_a_placement_is_resumed_and_may_break(
    connect: Connect, cells: TwoCells, topics: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placement of other topics has changed: no topic of the pattern has left."""
    for module in (aio_joining, blocking_joining):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    with connect(cells.home) as client:
        with client.subscribe(topic_pattern=pattern(*topics)) as changes:
            cells.place()
            version = f";p={cells.version}"
            for number in range(200):
                for topic in topics:
                    client.publish(topic, b"{}", key=str(number))
                assert len(taken(changes, 2)) == 2
                if all(at.endswith(version) for at in bookmarks(changes).values()):
                    break
                changes.next(0.02)
            after = bookmarks(changes)
            assert {at.rpartition(";")[2] for at in after.values()} == {version[1:]}
        with client.subscribe(topic_pattern=pattern(*topics), start=after) as changes:
            client.publish(topics[1], b"{}", key="last")
            assert told(taken(changes, 1)) == [("b", "put", topics[1], "last")]


@pytest.mark.parametrize("sow", [False, True])
def test_a_server_that_becomes_a_cell_is_told(connect: Connect, tmp_path: Path, calls: Calls, sow: bool) -> None:
    """Topics of other cells would be missing. Without a placement it is asked for one once a connection."""
    alone = '[server]\ndynamic_topics = true\ninstance = "a-1"\n'
    with ServerProcess(tmp_path, alone) as server, connect(server.address) as client:
        client.publish("a", b"{}", key="1")
        follow = client.sow_and_subscribe if sow else client.subscribe
        calls.clear()
        with follow(topic_pattern="a|b") as changes:
            if sow:
                assert [change.op for change in islice(changes, 2)] == ["sow", "snapshot_end"]
            server.restart()
            client.publish("a", b"{}", key="2")
            assert next(changes).op == "put"
            asked = [method for _, method in calls if method == "GetPlacement"]
            assert len(asked) == 2
            assert isinstance(changes.bookmark, str)
            text = placement(1, ("b", "b"), cells={"a": [server.address], "b": [NOBODY]})
            (tmp_path / "placement.toml").write_text(text)
            server.configure(alone + '[placement]\ncell = "a"\nfile = "placement.toml"\n')
            server.restart()
            with pytest.raises(ResyncRequired, match="one of several cells"):
                next(changes)


@pytest.mark.slow
def test_a_cell_hands_over_all_that_a_topic_got_before_it_left(connect: Connect, cells: TwoCells) -> None:
    """C4: more than connections hold, so most of it is still to be sent when the topic leaves."""
    topic, other = cells.topic("a"), cells.topic("a")
    with connect(cells.home) as client, cells.direct("a") as a:
        client.create_topic(topic)
        client.create_topic(other)
        with a.here.subscribe(topic_pattern=pattern(topic, other, f"{other}-new"), batch_size=1) as changes:
            client.publish_many(topic, [{"text": "x" * 20_000}] * 300, keys=map(str, range(300)))
            cells.place((topic, "b"))
            new = f"{other}-new"
            client.publish(new, b"{}", key="made meanwhile")
            found = taken(changes, 301)
            assert [change.key for change in found if change.topic == topic] == [str(number) for number in range(300)]
            assert [change.key for change in found if change.topic == new] == ["made meanwhile"]
            client.publish(other, b"{}", key="on")
            assert next(changes).key == "on"
    cells.place()
