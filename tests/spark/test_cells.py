"""Jobs about a topic of another cell (rule C10): the option `server` names one cell, and the topic is in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

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
def test_a_stream_goes_on_while_its_topic_moves(spark: SparkSession, tmp_path: Path) -> None:
    """It misses nothing. Some changes may come again (rule F9)."""
    with MovingCells(tmp_path / "cells") as cells, Client(cells.home) as client:
        topic = cells.topic("a")
        client.create_topic(topic, key=["/id"], retain_time="1h")
        options = {"server": cells.home, "topic": topic, "startingFrom": "earliest"}
        streamed = spark.readStream.format("sow").schema("id LONG").options(**options).load()
        seen: set[int] = set()
        writer = streamed.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer = writer.foreachBatch(lambda batch, _: seen.update(row.id for row in batch.select("id").collect()))
        query = writer.trigger(processingTime="200 milliseconds").start()
        ended, published = threading.Event(), threading.Thread(target=lambda: _publish(cells.home, topic, count, ended))
        count: list[int] = []
        published.start()
        try:
            until(lambda: len(seen) > 50, 60, "the stream to have the first ones")
            with Mover(
                Session(cells.home, None, connect), (topic,), "b", print, links_before=10, links_for=30
            ) as mover:
                mover.move()
            after = len(count)
            until(lambda: len(count) > after + 50, 60, "records after the move")
            ended.set()
            published.join()
            until(lambda: seen >= set(count), 60, "the stream to have all")
            assert query.exception() is None
            assert set(map(int, cells.keys("b", topic))) == set(count)
        finally:
            ended.set()
            query.stop()


def _publish(server: str, topic: str, count: list[int], ended: threading.Event) -> None:
    with Client(server) as client:
        while not ended.wait(0.02):
            client.publish(topic, {"id": len(count)})
            count.append(len(count))
