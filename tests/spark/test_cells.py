"""Jobs about topics of other cells (rules C10, C24): the option `server` names one cell, and topics are in another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sow_client import Client
from sow_spark.connection import in_cell, kept
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.options import Connecting
from sow_spark.read_limits import ReadMaxRows
from sow_spark.reading import ExportPartition, SnapshotReader, opened_at_load
from sow_spark.schemas import infer
from sow_spark.stream_cells import CellsReader
from sow_spark.stream_ending import stop_for_good
from sow_spark.stream_offsets import Offset
from tests.spark.cell_streams import SCHEMA, Stream
from tests.support.servers.cells import TwoCells

pytestmark = pytest.mark.usefixtures("stopped")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


@pytest.mark.long
def test_jobs_run_in_the_cell_of_their_topic(spark: SparkSession, cells: TwoCells, tmp_path: Path) -> None:
    """Tasks have clients of their own, which know exports, loads and publishers by their ids alone."""
    topic = cells.topic("b")
    with cells.direct("b") as direct:
        direct.create_topic(topic, key=["/id"])
    options = {"server": cells.home, "topic": topic}

    spark.createDataFrame([(1,), (2,)], "id LONG").write.format("sow").options(**options).mode("append").save()
    assert cells.keys("b", topic) == ["1", "2"]
    read = spark.read.format("sow").options(**options).load()
    assert sorted(row.id for row in read.select("id").collect()) == [1, 2]
    spark.createDataFrame([(3,)], "id LONG").write.format("sow").options(**options).mode("overwrite").save()
    assert cells.keys("b", topic) == ["3"]

    streamed = spark.readStream.format("sow").options(**options, startingFrom="earliest").load()
    seen: list[int] = []
    writer = streamed.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer = writer.foreachBatch(lambda batch, _: seen.extend(row.id for row in batch.select("id").collect()))
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert 3 in seen
    assert topic not in [found.name for found in cells.direct("a").here.topics()]


def test_tasks_get_the_addresses_of_the_cell(cells: TwoCells) -> None:
    topic, given = cells.topic("b"), Connecting(server=cells.home)
    with Client(cells.home) as client:
        assert kept(given, client, topic) == given, "nothing is known of it yet"
        client.publish(topic, b"{}", key="1")
        assert kept(given, client, topic).server == cells.addresses["b"][0]
        assert in_cell(given, client, cells.topic("a")) == given


def test_the_pin_of_a_query_is_removed_in_the_cell_of_its_topic_and_no_other_pin(cells: TwoCells) -> None:
    """Two queries may give their pins one name, each for its own topic."""
    topic, also = cells.topic("b"), cells.topic("b")
    with Client(cells.home) as client:
        for name in (topic, also):
            client.create_topic(name, journal=True)
            client.publish(name, b"{}", key="1")
            client.pin_journal(name, "nightly", client.plan_changes(name, start="latest").start)
        ended: Any = SimpleNamespace(stop=lambda: None, recentProgress=[])
        options = {"server": cells.home, "topic": topic, "pinName": "nightly"}
        assert stop_for_good(ended, options) == [f"{topic}/nightly"]
        assert [pin.topic for name in (topic, also) for pin in client.durables(name)] == [also]


# ---- one DataFrame over topics of several cells ----


def planned(reader: SnapshotReader) -> list[ExportPartition]:
    found = reader.partitions()
    return [one for one in found if isinstance(one, ExportPartition)]


def rows_of(reader: SnapshotReader, parts: list[ExportPartition]) -> list[tuple[str, int]]:
    return sorted(
        (row["_topic"], row["id"]) for part in parts for batch in reader.read(part) for row in batch.to_pylist()
    )


def filled(cells: TwoCells, name: str, sizes: dict[str, int]) -> dict[str, str]:
    """A topic in each cell, by the name of the cell, with so many records."""
    topics = {cell: f"{cell}-{name}" for cell in sizes}
    with Client(cells.home) as client:
        for cell, topic in topics.items():
            client.create_topic(topic, key=["/id"], journal=True)
            client.publish_many(topic, [{"id": number, cell: True} for number in range(sizes[cell])])
    return topics


@pytest.mark.slow
def test_a_dataframe_has_an_export_of_each_cell(cells: TwoCells) -> None:
    """C24. given topics of two cells / when a pattern, or their list, is read / then each cell has one export with its
    own topics, each record comes once, and what comes later in one cell is not in it"""
    topics = filled(cells, "frame", {"a": 3, "b": 700})
    with Client(cells.home) as client:
        client.create_topic("b-frame.too", key=["/id"])
        client.publish("b-frame.too", {"id": 9})
        expected = sorted([(topic, n) for cell, topic in topics.items() for n in range({"a": 3, "b": 700}[cell])])
        options = parse_reading({"server": cells.home, "topicPattern": ".-frame.*"})
        listed = parse_reading({"server": cells.home, "topics": "b-frame,a-frame", "partitions": "4"})
        for given, extra, number in ((options, [("b-frame.too", 9)], 2), (listed, [], 4)):
            reader = SnapshotReader(given, SCHEMA)
            parts = planned(reader)
            assert len({part.export_id for part in parts}) == 2
            assert len(parts) == number, "as `partitions` asks for all together"
            for part in parts:
                cell = {share.topic[0] for share in part.shares}
                assert [part.connecting.server] == cells.addresses[cell.pop()]
                assert not cell, "a task stays in a cell"
            client.publish("b-frame", {"id": 1_000})
            assert rows_of(reader, parts) == sorted([*expected, *extra])
            client.sow_delete("b-frame", keys=["1000"])
        assert set(infer(options).names) >= {"_topic", "id", "a", "b"}, "a sample of each"


@pytest.mark.slow
def test_a_dataframe_of_one_load_keeps_the_exports_of_its_cells(cells: TwoCells) -> None:
    """given snapshot=load / when records come later, and the exports end / then it shows the instants of the load, and
    fails afterwards; a load that fails leaves no export"""
    filled(cells, "load", {"a": 2, "b": 2})
    options = parse_reading({"server": cells.home, "topics": "a-load,b-load", "snapshot": "load"})
    loaded = opened_at_load(options)
    reader = SnapshotReader(options, SCHEMA, loaded)
    with Client(cells.home) as client:
        for topic in ("a-load", "b-load"):
            client.publish(topic, {"id": 7})
        everything = [("a-load", 0), ("a-load", 1), ("b-load", 0), ("b-load", 1)]
        assert rows_of(reader, planned(reader)) == everything
        with cells.direct("b") as direct:
            direct.close_export(str(loaded[1].export))
        with pytest.raises(SowSourceError, match="EXPORT_NOT_FOUND"):
            planned(reader)
    assert [one.topics for one in loaded] == [("a-load",), ("b-load",)]


@pytest.mark.slow
def test_a_cell_that_is_away_matters_only_for_its_topics(cells: TwoCells) -> None:
    """given a cell that is down / when topics of the other one are listed / then they are read at once; a pattern, and
    a topic that is nowhere else, are refused, with the name of the cell"""
    filled(cells, "away", {"a": 1, "b": 1})
    cells.servers["b"].kill9()
    try:
        given = {"server": cells.home, "retryFor": "0s", "connectTimeout": "1s"}
        reader = SnapshotReader(parse_reading({**given, "topics": "a-away"}), SCHEMA)
        assert rows_of(reader, planned(reader)) == [("a-away", 0)]
        for named in ({"topics": "a-away,b-away"}, {"topicPattern": ".-away"}):
            reader = SnapshotReader(parse_reading({**given, **named}), SCHEMA)
            with pytest.raises(SowSourceError, match=r"UNREACHABLE.*the cell b"):
                planned(reader)
    finally:
        cells.servers["b"].start()


def test_a_topic_that_two_cells_have_is_refused(cells: TwoCells) -> None:
    """given placements that differ / when both cells have a topic / then no DataFrame has its records twice"""
    filled(cells, "twice", {"a": 1, "b": 1})
    cells.place(("b-twice", "a"), at="a")
    try:
        with Client(cells.home) as client:
            client.create_topic("b-twice")
        for named in ({"topicPattern": ".-twice"}, {"topics": "a-twice,b-twice"}):
            reader = SnapshotReader(parse_reading({"server": cells.home, **named}), SCHEMA)
            with pytest.raises(SowSourceError, match=r"the cells a and b both have topic b-twice"):
                planned(reader)
    finally:
        cells.place()
        with cells.direct("a") as direct:
            direct.delete_topic("b-twice", here=True)


# ---- one stream over topics of several cells ----


@pytest.mark.slow
def test_a_stream_has_a_position_in_each_cell(cells: TwoCells) -> None:
    """C24. given topics of two cells / when they are followed / then each change comes once, also after a restart, and
    a topic that comes later in a cell has all of its changes"""
    a, b = filled(cells, "stream", {"a": 2, "b": 3}).values()
    stream = Stream(cells, topicPattern=".-stream.*", pinName="stream-of-cells")
    assert sorted(stream.at["cells"]) == ["a", "b"]
    assert stream.next() == [(a, 0), (a, 1), (b, 0), (b, 1), (b, 2)]
    assert stream.next() == []
    with Client(cells.home) as client:
        client.publish(b, {"id": 7})
        assert stream.next() == [(b, 7)]
        before = stream.at
        client.publish(a, {"id": 8})
        client.create_topic("b-stream.later", key=["/id"], journal=True)
        client.publish("b-stream.later", {"id": 9})
        assert stream.next() == [(a, 8), ("b-stream.later", 9)]
        told = stream.reader.reportLatestOffset()
        assert told is not None
        assert (sorted(told["cells"]), told["recordsBehind"], told["secondsBehind"]) == (["a", "b"], 0, 0)
        stream.restart()
        assert stream.rows(before, stream.at) == [(a, 8), ("b-stream.later", 9)]
        assert stream.next() == []
        durables = [one for cell in client.cells().values() for one in cell.durables()]
        pins = [(one.topic, one.name) for one in durables if one.name == "stream-of-cells"]
        assert sorted(pins) == [(a, "stream-of-cells"), (b, "stream-of-cells"), ("b-stream.later", "stream-of-cells")]
        ended: Any = SimpleNamespace(stop=lambda: None, recentProgress=[])
        options = {"server": cells.home, "topicPattern": ".-stream.*", "pinName": "stream-of-cells"}
        assert sorted(stop_for_good(ended, options)) == sorted(f"{topic}/{name}" for topic, name in pins)


@pytest.mark.slow
def test_a_cell_comes_into_a_stream_with_its_first_topic(cells: TwoCells) -> None:
    """given a query whose topics are in one cell / when a topic comes in another one / then none of its changes is
    missing, and the limit of a trigger holds for both cells together"""
    filled(cells, "comes", {"a": 0})
    with Client(cells.home) as client:
        for number in range(5):  # a commit is not split
            client.publish("a-comes", {"id": number})
    stream = Stream(cells, topicPattern=".-comes")
    assert list(stream.at["cells"]) == ["a"]
    assert len(stream.next(ReadMaxRows(4))) == 4 - 2, "half of it, as the other cell might have as many"
    with Client(cells.home) as client:
        client.create_topic("b-comes", key=["/id"], journal=True)
        for number in range(5):
            client.publish("b-comes", {"id": number})
    batches = [stream.next(ReadMaxRows(4)) for _ in range(5)]
    assert max(map(len, batches)) <= 4
    assert sorted(row for batch in batches for row in batch) == [
        *(("a-comes", number) for number in range(2, 5)),
        *(("b-comes", number) for number in range(5)),
    ]


@pytest.mark.slow
def test_a_stream_of_listed_topics_says_which_is_missing_or_gone(cells: TwoCells) -> None:
    """given a list of topics in two cells / when one is missing at the start / then that is said, and no pin is left;
    when one is deleted later / then its loss is told, or with failOnDataLoss=false the others go on"""
    a, b = filled(cells, "listed", {"a": 1, "b": 1}).values()
    with pytest.raises(SowSourceError, match="TOPIC_NOT_FOUND: topic b-missing is not there"):
        Stream(cells, topics=f"{a},b-missing", pinName="left")
    with Client(cells.home) as client:
        assert not [one for cell in client.cells().values() for one in cell.durables() if one.name == "left"]
        stream = Stream(cells, topics=f"{b},{a}")
        assert stream.next() == [(a, 0), (b, 0)]
        client.delete_topic(b)
        with pytest.raises(SowSourceError, match=f"DATA_LOST: changes of topic {b} .*the topic was deleted"):
            stream.next()
    one = stream.at["cells"]["b"]
    with Client(cells.home) as client:
        client.create_topic(b, key=["/id"], journal=True)
    lenient = Stream(cells, topics=f"{a},{b}", failOnDataLoss="false", startingFrom="latest")
    lenient.at = Offset(cells={**lenient.at["cells"], "b": one})
    with Client(cells.home) as client:
        client.publish(a, {"id": 5})
        client.publish(b, {"id": 6})
    assert lenient.next() == [(a, 5), (b, 6)]


@pytest.mark.slow
def test_an_available_now_tells_the_loss_of_the_only_topic_of_a_cell(cells: TwoCells) -> None:
    """given a query that has run / when the only topic of a cell is deleted, and it runs again until the present end /
    then the loss is told; a topic that comes after that end was set is read as far as it was there"""
    a, b = filled(cells, "now", {"a": 1, "b": 1}).values()
    stream = Stream(cells, topicPattern=".-now.*")
    assert stream.next() == [(a, 0), (b, 0)]
    with Client(cells.home) as client:
        client.publish(b, {"id": 1})
        client.delete_topic(b)
        stream.restart()
        stream.reader.prepareForTriggerAvailableNow()
        with pytest.raises(SowSourceError, match=f"DATA_LOST: changes of topic {b} .*the topic was deleted"):
            stream.next()
        late = Stream(cells, topicPattern=".-now.*", begins=False)
        late.reader.prepareForTriggerAvailableNow()
        client.create_topic("b-now.late", key=["/id"], journal=True)
        client.publish("b-now.late", {"id": 2})
        late.at = late.reader.initialOffset()
        assert late.next() == [(a, 0), ("b-now.late", 2)]
        client.publish("b-now.late", {"id": 3})
        assert late.next() == []


def test_a_name_that_leads_to_several_cells_is_refused(cells: TwoCells, monkeypatch: pytest.MonkeyPatch) -> None:
    """given an address whose connections go to one cell and then to another / when a stream begins / then it is
    refused: one cell was read twice, and the other one not at all"""
    filled(cells, "turns", {"a": 1, "b": 1})
    monkeypatch.setattr(CellsReader, "_ask", lambda _: {name: given(cells, "b") for name in ("a", "b")})
    with pytest.raises(SowSourceError, match=r"TOPIC_ELSEWHERE.* is in the cell a, and now the cell 'b' answers"):
        Stream(cells, topicPattern=".-turns")


def given(cells: TwoCells, cell: str) -> Connecting:
    return Connecting(server=cells.addresses[cell][0])


def test_a_stream_begins_at_the_bookmark_of_each_cell(cells: TwoCells) -> None:
    """given exports of two cells / when a stream starts from their bookmarks / then it has the changes since; a single
    bookmark is refused"""
    a, b = filled(cells, "marks", {"a": 1, "b": 1}).values()
    with cells.direct("a") as at_a, cells.direct("b") as at_b:
        marks = {"a": at_a.open_export(a).bookmark, "b": at_b.open_export(b).bookmark}
    with Client(cells.home) as client:
        for topic in (a, b):
            client.publish(topic, {"id": 3})
    assert Stream(cells, topics=f"{a},{b}", startingFrom=json.dumps(marks)).next() == [(a, 3), (b, 3)]
    for wrong in (str(marks["a"]), json.dumps({"a": marks["a"]})):
        with pytest.raises(
            SowSourceError, match=r"startingFrom: there are topics in the cells a, b, and a bookmark is of"
        ):
            Stream(cells, topics=f"{a},{b}", startingFrom=wrong)


def test_a_query_of_one_cell_goes_on_when_the_server_gets_others(cells: TwoCells) -> None:
    """given a checkpoint from before there were cells / when the server is one of two / then the query goes on at its
    position"""
    a, b = filled(cells, "before", {"a": 2, "b": 1}).values()
    stream = Stream(cells, topicPattern=".-before")
    stream.at = stream.at["cells"]["a"]
    assert stream.next() == [(a, 0), (a, 1)]
    assert stream.next() == [(b, 0)], "the cell has come into the query"


@pytest.mark.long
def test_a_stream_of_several_cells_in_spark(spark: SparkSession, cells: TwoCells, tmp_path: Path) -> None:
    """given topics of two cells / when a query follows them, and goes on from its checkpoint / then each change comes
    once"""
    a, b = filled(cells, "query", {"a": 3, "b": 4}).values()
    reader = spark.readStream.format("sow").option("server", cells.home).option("startingFrom", "earliest")
    stream = reader.schema("id LONG, _topic STRING, _op STRING").option("topicPattern", ".-query").load()
    found: list[tuple[str, int]] = []

    def take(batch: DataFrame, _: int) -> None:
        found.extend((row["_topic"], row["id"]) for row in batch.collect())

    for _ in range(2):
        writer = stream.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(take)
        assert writer.trigger(availableNow=True).start().awaitTermination(120)
        with Client(cells.home) as client:
            for topic in (a, b):
                client.publish(topic, {"id": 9})
    assert sorted(found) == [(a, 0), (a, 1), (a, 2), (a, 9), (b, 0), (b, 1), (b, 2), (b, 3), (b, 9)]


@pytest.mark.long
def test_a_dataframe_of_several_cells_in_spark(spark: SparkSession, cells: TwoCells) -> None:
    """given topics of two cells / when one DataFrame, and a join in SQL, read them / then all rows of its instants are
    there"""
    filled(cells, "spark", {"a": 3, "b": 4})
    reader = spark.read.format("sow").option("server", cells.home).schema("id LONG, _topic STRING")
    frame = reader.option("topicPattern", ".-spark").load()
    assert {row["_topic"]: row["count"] for row in frame.groupBy("_topic").count().collect()} == {
        "a-spark": 3,
        "b-spark": 4,
    }
    with Client(cells.home) as client:
        for topic in ("a-spark", "b-spark"):
            client.publish(topic, {"id": 9})
    assert frame.count() == 7
    for topic in ("a-spark", "b-spark"):
        spark.sql(
            f"CREATE OR REPLACE TEMPORARY VIEW `{topic}` (id LONG) USING sow "
            f"OPTIONS (server '{cells.home}', topic '{topic}')"
        )
    joined = spark.sql("SELECT count(*) AS n FROM `a-spark` JOIN `b-spark` USING (id)").first()
    assert joined is not None
    assert joined.n == 4


# ---- rows that name their topic ----


@pytest.mark.long
def test_rows_go_to_the_topics_that_a_column_names(spark: SparkSession, cells: TwoCells, tmp_path: Path) -> None:
    """C24. given rows of topics in two cells / when they are written, and a stream writes them again / then each topic
    has its rows, each batch once; a row without a topic is a bad row, and a topic that is not there fails the job"""
    a, b = filled(cells, "named", {"a": 0, "b": 0}).values()
    rows = spark.createDataFrame([(a, 1), (b, 2), (b, 3), (None, 4)], "topic STRING, id LONG")
    sink = {"server": cells.home, "topicColumn": "topic"}
    with pytest.raises(PySparkException, match="column topic is null: there is no topic"):
        rows.write.format("sow").options(**sink).mode("append").save()
    rows.write.format("sow").options(**sink, onBadRow="drop").mode("append").save()
    assert (cells.keys("a", a), cells.keys("b", b)) == (["1"], ["2", "3"])
    with pytest.raises(PySparkException, match="TOPIC_NOT_FOUND"):
        rows.selectExpr("'b-nowhere' AS topic", "id").write.format("sow").options(**sink).mode("append").save()
    with pytest.raises(PySparkException, match="topicColumn: counts only in an append"):
        rows.write.format("sow").options(**sink).mode("overwrite").save()

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text(f'{{"t": "{a}", "id": 7}}\n{{"t": "{b}", "id": 8}}\n')
    stream = spark.readStream.schema("t STRING, id LONG").json(str(tmp_path / "in"))
    seen: list[list[int]] = []
    for _ in range(2):  # the batch again, as after a crash before its commit
        writer = stream.writeStream.format("sow").options(server=cells.home, topicColumn="t", writerId="named")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert query.exception() is None
        shutil.rmtree(tmp_path / "checkpoint")
        with Client(cells.home) as client:
            found = [client.get(topic, key) for topic, key in ((a, "7"), (b, "8"))]
        seen.append([record.version for record in found if record is not None])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
