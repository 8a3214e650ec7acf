"""Jobs about a topic of another cell (rule C10): the option `server` names one cell, and the topic is in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from sow_cli.moving import Mover
from sow_cli.session import Session, connect
from sow_client import Client
from sow_spark.connection import in_cell, kept
from sow_spark.options import Connecting
from sow_spark.stream_ending import stop_for_good
from tests.support.servers.cells import MovingCells, TwoCells
from tests.support.servers.server import until


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
    assert topic not in [found.name for found in cells.direct("a").topics()]


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


@pytest.mark.long
def test_a_stream_ends_when_its_topic_moves_and_a_new_one_reads_everything(spark: SparkSession, tmp_path: Path) -> None:
    """Its offsets are of the old cell, so it ends with an error, and passes over nothing."""
    with MovingCells(tmp_path / "cells") as cells, Client(cells.home) as client:
        topic = cells.topic("a")
        client.create_topic(topic, key=["/id"], retain_time="1h")
        options = {"server": cells.home, "topic": topic, "startingFrom": "earliest"}
        streamed = spark.readStream.format("sow").schema("id LONG").options(**options).load()
        seen: set[int] = set()

        def started(checkpoint: str) -> StreamingQuery:
            writer = streamed.writeStream.option("checkpointLocation", str(tmp_path / checkpoint))
            writer = writer.foreachBatch(lambda batch, _: seen.update(row.id for row in batch.select("id").collect()))
            return writer.trigger(processingTime="200 milliseconds").start()

        query = started("before")
        try:
            client.publish_many(topic, [{"id": number} for number in range(100)])
            until(lambda: len(seen) == 100, 60, "the stream to have the first ones")
            with Mover(Session(cells.home, None, connect), (topic,), "b", print) as mover:
                mover.move()
            client.publish_many(topic, [{"id": number} for number in range(100, 200)])
            until(lambda: query.exception() is not None or len(seen) == 200, 60, "the stream to end")
            assert len(seen) == 100
            seen.clear()
            query = started("after")
            until(lambda: len(seen) == 200, 60, "the new stream to have all")
        finally:
            query.stop()
