"""Streams whose topics move to another cell (rules C18, C24)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sow_cli.moving import Mover
from sow_cli.session import Session, connect
from sow_client import Client
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.read_limits import ReadAllAvailable, ReadLimit, ReadMaxRows
from sow_spark.stream_offsets import Offset, bookmark_of, marked, sources_of, without
from sow_spark.stream_reading import ChangesReader
from tests.spark.cell_streams import CHANGES, Stream
from tests.support.servers.cells import MovingCells
from tests.support.servers.server import until

pytestmark = pytest.mark.usefixtures("stopped")


def heads_of(cells: MovingCells) -> dict[str, int]:
    """The last sequence of each cell, by its epoch."""
    found = {}
    for cell in cells.addresses:
        with cells.direct(cell) as client:
            status = client.status()
            found[status.journal_epoch] = status.last_sequence
    return found


def is_known(offset: Offset, heads: Mapping[str, int], topic: str = "") -> bool:
    """True if an offset names a position in the other cell at or behind its head of before."""
    marks = sources_of(marked(offset, topic)[len(bookmark_of(offset)) :])
    return any(marks.get(epoch, -1) >= head for epoch, head in heads.items() if epoch != offset["epoch"])


class Moving:
    """A stream of one topic, as Spark runs it, and the move of the topic."""

    def __init__(self, cells: MovingCells) -> None:
        self.cells, self.topic = cells, cells.topic("a")
        with Client(cells.home) as client:
            client.create_topic(self.topic, key=["/id"])
        self.publish(0)
        self.reader = self.another()
        self.at = self.reader.initialOffset()
        assert self.next() == [0]

    def another(self, **options: str) -> ChangesReader:
        given = {"server": self.cells.home, "topic": self.topic, "startingFrom": "earliest", "retryFor": "20s"}
        reader = ChangesReader(parse_reading({**given, **options}, "stream"), CHANGES)
        Stream.readers.append(reader)
        return reader

    def publish(self, *numbers: int) -> None:
        with Client(self.cells.home) as client:
            for number in numbers:
                client.publish(self.topic, {"id": number})

    def read(self, parts: Sequence[Any]) -> list[int]:
        return [row["id"] for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]

    def planned(self) -> tuple[Offset, Offset]:
        """The next micro-batch."""
        start, self.at = self.at, self.reader.latestOffset(self.at, ReadAllAvailable())
        return start, self.at

    def next(self) -> list[int]:
        """The rows of the next micro-batch."""
        start, end = self.planned()
        found = self.read(self.reader.partitions(start, end))
        self.reader.commit(end)
        return found

    def await_marks(self) -> None:
        """Returns once the stream knows a position in the other cell that is later than any of an earlier move."""
        heads = heads_of(self.cells)

        def known() -> bool:
            self.publish(-1)
            self.next()
            return is_known(self.at, heads)

        until(known, 20, "marks")

    def move(self, to: str, linked: Callable[[], object] = lambda: None, *also: str) -> None:
        """Moves its topic, and others."""
        moved(self.cells, (self.topic, *also), to, linked)


def moved(cells: MovingCells, topics: Sequence[str], to: str, linked: Callable[[], object], **options: Any) -> None:
    """Moves topics. `linked`: called once the links are complete, before the switch."""

    def tell(line: str) -> None:
        if "is ready to take" in line:
            linked()

    with Mover(Session(cells.home, None, connect), tuple(topics), to, tell, **options) as mover:
        mover.move()


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovingCells]:
    with MovingCells(tmp_path_factory.mktemp("moving")) as made:
        yield made


@pytest.mark.slow
def test_a_stream_goes_along_when_its_topic_moves(moving: MovingCells) -> None:
    """C18. given a stream, and one that had nothing to read while the links were there / when their topics move, and
    back / then they have each change since, the new cell keeps the journal, and a new reader goes on there"""
    stream, idle = Moving(moving), Moving(moving)
    count = 1
    for cell in ("b", "a"):

        def linked() -> None:
            stream.await_marks()
            before = idle.at
            assert (idle.next(), idle.at) == ([], before)
            stream.publish(count)  # noqa: B023 - it is called within this turn

        stream.move(cell, linked, idle.topic)
        with moving.direct("b" if cell == "a" else "a") as left:
            assert left.placement(stream.topic).copy is None
        stream.publish(count + 1)
        idle.publish(count)
        assert set(stream.next()) >= {count, count + 1}
        assert stream.next() == []
        assert set(idle.next()) >= {count}
        with moving.direct(cell) as direct:
            assert [pin.name for pin in direct.here.durables(stream.topic)] == [stream.at["pin"]]
        stream.publish(count + 2)
        stream.reader = stream.another()
        assert stream.next() == [count + 2]
        count += 3


@pytest.mark.slow
def test_a_micro_batch_from_before_a_move_is_read_in_the_new_cell(moving: MovingCells) -> None:
    """given a micro-batch that was planned, and whose parts are known / when the topic moves before a task reads it /
    then the task reads it in the new cell, and so does a new run, which begins with it; nothing is passed over"""
    stream = Moving(moving)
    planned: list[Any] = []

    def linked() -> None:
        stream.await_marks()
        stream.publish(1, 2)
        planned[:] = stream.planned()
        planned.append(stream.reader.partitions(*planned))

    stream.move("b", linked)
    stream.publish(3)
    start, end, parts = planned
    assert set(stream.read(parts)) >= {1, 2}
    assert set(stream.next()) >= {3}
    again = stream.another()
    repeated = stream.read(again.partitions(start, end))
    stream.reader, stream.at = again, end
    assert {1, 2, 3} <= {*repeated, *stream.next()}


@pytest.mark.slow
def test_a_repeated_micro_batch_misses_nothing_when_the_topic_comes_back_to_a_kept_copy(moving: MovingCells) -> None:
    """given links that stay, and a micro-batch that was planned before its topic moved / when a new run repeats it in
    the new cell, and stops, and the topic comes back to the copy that was kept / then the next run has all changes.
    The marks of its end are older than its last changes: what was repeated up to them ended before those."""
    stream = Moving(moving)
    with moving.direct("a") as a, moving.direct("b") as b:
        pattern = f"({stream.topic})"  # so these links are not the move's own
        b.create_topic(stream.topic, key=["/id"], here=True)
        b.add_peer("a-1", moving.addresses["a"][0], topics_pattern=pattern)
        a.add_peer("b-1", moving.addresses["b"][0], topics_pattern=pattern)
        batch: list[Offset] = []

        def linked() -> None:
            stream.await_marks()
            stream.publish(1, 2)
            batch[:] = stream.planned()

        moved(moving, [stream.topic], "b", linked, keep=True)
        stream.reader = stream.another()
        found = stream.read(stream.reader.partitions(*batch))
        stream.reader.commit(batch[1])
        stream.reader.stop()
        moved(moving, [stream.topic], "a", lambda: None, keep=True)
        stream.publish(3)
        stream.reader = stream.another()
        found += stream.next()
        assert set(found) >= {1, 2, 3}
        for client, peer in ((a, "b-1"), (b, "a-1")):
            client.remove_peer(peer)


@pytest.mark.slow
def test_a_stream_that_knows_no_position_in_the_new_cell_says_so(moving: MovingCells) -> None:
    """given a stream that asked for nothing while the links were there / when its topic has moved / then it fails with
    DATA_LOST, and with failOnDataLoss=false reads what the new cell has"""
    stream = Moving(moving)
    stream.publish(1)
    start = stream.at
    _, _, parts = (*stream.planned(), stream.reader.partitions(start, stream.at))
    stream.move("b")
    with pytest.raises(SowSourceError, match="DATA_LOST"):
        stream.read(parts)
    with pytest.raises(SowSourceError, match="DATA_LOST"):
        stream.next()
    stream.reader = stream.another(failOnDataLoss="false")
    assert sorted(stream.next()) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("others", [(), ("a", "b")])
def test_a_query_goes_along_while_its_topic_moves(
    spark: SparkSession, moving: MovingCells, tmp_path: Path, others: Sequence[str]
) -> None:
    """given a query of a topic, or of several, and a publisher that is not paused / when the topic moves to the other
    cell and back / then the query has every record, without an end, and goes on from its checkpoint"""
    topic = moving.topic("a")
    topics = [topic, *map(moving.topic, others)]
    seen: set[int] = set()
    named = {"topics": ",".join(topics)} if others else {"topic": topic}
    options = {"server": moving.home, "startingFrom": "earliest", **named}
    with Client(moving.home) as client:
        for name in topics:
            client.create_topic(name, key=["/id"])
        streamed = spark.readStream.format("sow").schema("id LONG").options(**options).load()

        def started() -> StreamingQuery:
            writer = streamed.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            writer = writer.foreachBatch(lambda batch, _: seen.update(row.id for row in batch.select("id").collect()))
            return writer.trigger(processingTime="100 milliseconds").start()

        def progress() -> Offset:
            last = query.lastProgress
            found: Offset | None = None if last is None else json.loads(last.json)["sources"][0]["endOffset"]
            for at in (found or Offset()).get("cells", {}).values():
                if topic in at["topics"]:
                    return at
            return found if found and "epoch" in found else Offset(epoch="", sequence=0)

        query, count = started(), 0
        try:
            with client.publisher(topic, publisher_id="writer") as publisher:
                for cell in ("b", "a"):
                    ended = threading.Event()

                    def tell(line: str) -> None:
                        if "is ready to take" in line:  # a batch may take longer than any `links_before`
                            heads = heads_of(moving)
                            until(lambda: not query.isActive or is_known(progress(), heads, topic), 60, "marks")

                    def move(cell: str = cell, ended: threading.Event = ended) -> None:
                        try:
                            with Mover(Session(moving.home, None, connect), (topic,), cell, tell) as mover:
                                mover.move()
                        finally:
                            ended.set()

                    publisher.publish({"id": count})
                    count += 1
                    until(lambda: len(seen) == count or not query.isActive, 60, "the query")  # noqa: B023 - in this turn
                    mover = threading.Thread(target=move, daemon=True)
                    mover.start()
                    while not ended.is_set():
                        publisher.publish({"id": count})
                        count += 1
                        ended.wait(0.005)
                    mover.join(60)
                    assert not mover.is_alive()
                publisher.flush()
            until(lambda: len(seen) == count or not query.isActive, 60, "all")
            assert query.exception() is None, str(query.exception())
            assert seen == set(range(count))
            query.stop()
            seen.clear()
            client.publish(topic, {"id": -1})
            query = started()
            until(lambda: -1 in seen or not query.isActive, 60, "the change after the start")
            assert len(seen) < count
        finally:
            query.stop()


# ---- a stream of several topics ----


def copied(cells: MovingCells, cell: str, topic: str) -> int:
    """The records of a topic that are stored in a cell."""
    with cells.direct(cell) as client:
        copy = client.placement(topic).copy
        return copy.records if copy is not None else -1


class MovingStream(Stream):
    """A stream of topics of which one moves: `moves`, `stays` and `there`, which is in the other cell."""

    def __init__(self, cells: MovingCells) -> None:
        self.cells = cells
        self.moves, self.stays, self.there = cells.topic("a"), cells.topic("a"), cells.topic("b")
        with Client(cells.home) as client:
            for topic in (self.moves, self.stays, self.there):
                client.create_topic(topic, key=["/id"])
        self.publish(self.moves, 0)
        self.publish(self.stays, 1)
        named = ",".join([self.moves, self.stays, self.there])
        super().__init__(cells, topics=named, retryFor="20s")
        assert set(self.next()) == {(self.moves, 0), (self.stays, 1)}

    def publish(self, topic: str, *numbers: int) -> None:
        with Client(self.cells.home) as client:
            for number in numbers:
                client.publish(topic, {"id": number})

    def planned(self) -> tuple[Offset, Offset]:
        """The next micro-batch."""
        start, self.at = self.at, self.reader.latestOffset(self.at, ReadAllAvailable())
        return start, self.at

    def all(self, limit: ReadLimit | None = None) -> set[tuple[str, int]]:
        """The rows of the micro-batches up to the end."""
        found: set[tuple[str, int]] = set()
        while True:
            before = self.at
            found.update(self.next(limit))
            if self.at == before:
                return found

    def await_marks(self) -> None:
        """As that of `Moving`."""
        heads = heads_of(self.cells)

        def known() -> bool:
            self.publish(self.moves, -1)
            self.all()
            at = next(at for at in self.at["cells"].values() if self.moves in at["topics"])
            return is_known(at, heads, self.moves)

        until(known, 20, "marks")

    def move(self, to: str, linked: Callable[[], object] = lambda: None) -> None:
        moved(self.cells, [self.moves], to, linked)


@pytest.mark.slow
def test_a_stream_of_several_topics_goes_along_when_one_moves(moving: MovingCells) -> None:
    """C24. given a stream of topics of two cells / when one of them moves to the other cell, and back / then it has
    each change since, of that topic and of the others, the new cell keeps the journal, and a new run goes on there"""
    stream, count = MovingStream(moving), 10
    for left, cell in ("ab", "ba"):

        def linked() -> None:
            # A limit leaves changes of the topic, while the position in the other cell goes on behind them.
            stream.await_marks()
            stream.publish(stream.moves, *range(count, count + 4))  # noqa: B023 - it is called within this turn
            until(lambda: len({copied(moving, one, stream.moves) for one in (left, cell)}) == 1, 20, "the copy")  # noqa: B023
            stream.publish(stream.stays, count)  # noqa: B023
            stream.publish(stream.there, count)  # noqa: B023
            found.update(stream.next(ReadMaxRows(2)))  # noqa: B023

        found: set[tuple[str, int]] = set()
        stream.move(cell, linked)
        stream.publish(stream.moves, count + 4)
        assert len(found) < 6
        found |= stream.all(ReadMaxRows(2))  # the position of the others is not left for its sake
        moves = {(stream.moves, number) for number in range(count, count + 5)}
        assert found >= {*moves, (stream.stays, count), (stream.there, count)}
        assert stream.moves in stream.at["cells"][cell]["topics"]
        with moving.direct(cell) as direct:
            assert [pin.name for pin in direct.here.durables(stream.moves)] == [stream.at["cells"][cell]["pin"]]
        stream.restart()
        stream.publish(stream.moves, count + 5)
        assert stream.all() == {(stream.moves, count + 5)}, "each change once again"
        count += 10


@pytest.mark.slow
def test_a_topic_that_comes_to_a_cell_without_other_changes_is_read_from_its_position(moving: MovingCells) -> None:
    """Story: the cell had got changes of the topic while it lived elsewhere, so the query had looked beyond them for
    its other topics; the topic went on at the very position of these, and began behind its changes"""
    stays, comes = moving.topic("b"), moving.topic("b")
    with Client(moving.home) as client:
        for topic in (stays, comes):
            client.create_topic(topic, key=["/id"])
        client.publish(stays, {"id": 0})
        stream = Stream(moving, topicPattern=f"{stays}|{comes}")
        assert stream.next() == [(stays, 0)]
        start = without(stream.at["cells"]["b"], [comes])
        client.publish(comes, {"id": 1})
    reader = stream.reader._reader("b")
    reader._idle = bookmark_of(start), reader.set_target(), {}
    assert reader.next_end(start, 0, 0) == start
    begun = reader.come(start, comes, bookmark_of(start))
    assert stream.read(reader.partitions(begun, reader.next_end(begun, 0, 0))) == [(comes, 1)]


@pytest.mark.slow
def test_the_only_topic_of_a_query_takes_it_to_another_cell(moving: MovingCells) -> None:
    """given a query whose only topic moves / when it runs again until the present end / then it has all changes since,
    none of before, and the next run goes on; when the topic is deleted / then that is told"""
    topic = moving.topic("a")
    with Client(moving.home) as client:
        client.create_topic(topic, key=["/id"])
        client.publish(topic, {"id": 0})
        stream = Stream(moving, topicPattern=topic, retryFor="20s")
        assert stream.next() == [(topic, 0)]

        def linked() -> None:
            heads = heads_of(moving)

            def known() -> bool:
                client.publish(topic, {"id": 1})
                assert stream.next() == [(topic, 1)]
                return is_known(stream.at["cells"]["a"], heads, topic)

            until(known, 20, "marks")

        moved(moving, [topic], "b", linked)
        client.publish(topic, {"id": -1})
        stream.restart()
        stream.reader.prepareForTriggerAvailableNow()
        assert stream.next() == [], "it comes into the other cell"
        found = stream.next()
        assert (topic, -1) in found
        assert (topic, 0) not in found
        client.publish(topic, {"id": -2})
        assert stream.next() == []
        stream.restart()
        assert stream.next() == [(topic, -2)]
        client.delete_topic(topic)
        with pytest.raises(SowSourceError, match=f"DATA_LOST: changes of topic {topic} .*the topic was deleted"):
            stream.next()


@pytest.mark.slow
def test_a_micro_batch_of_several_topics_from_before_a_move_is_read_in_the_new_cell(moving: MovingCells) -> None:
    """given a micro-batch that was planned, and whose parts are known / when one of its topics moves before a task
    reads it / then the task reads it in the new cell, and so does a new run, which begins with it; nothing is passed
    over"""
    stream = MovingStream(moving)
    batch: list[Any] = []

    def linked() -> None:
        stream.await_marks()
        stream.publish(stream.moves, 11, 12)
        stream.publish(stream.stays, 13)
        batch[:] = stream.planned()
        batch.append(stream.reader.partitions(*batch))

    stream.move("b", linked)
    stream.publish(stream.moves, 14)
    start, end, parts = batch
    wanted = {(stream.moves, 11), (stream.moves, 12), (stream.stays, 13)}
    assert set(stream.read(parts)) >= wanted
    assert set(stream.next()) | set(stream.next()) >= {(stream.moves, 14)}
    stream.restart()
    repeated = set(stream.rows(start, end))
    assert repeated >= wanted
    stream.at = end
    assert (stream.moves, 14) in repeated | stream.all()


@pytest.mark.slow
def test_a_stream_of_several_topics_that_knows_no_position_in_the_new_cell_says_so(moving: MovingCells) -> None:
    """given a stream that asked for nothing while the links were there / when a topic has moved / then it fails with
    DATA_LOST, and with failOnDataLoss=false reads what the new cell has"""
    stream = MovingStream(moving)
    stream.publish(stream.moves, 10)
    stream.move("b")
    with pytest.raises(SowSourceError, match=f"DATA_LOST: changes of topic {stream.moves} .*OTHER_EPOCH"):
        stream.next()
    stream.lenient()
    assert stream.all() == {(stream.moves, 0), (stream.moves, 10)}
