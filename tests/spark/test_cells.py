"""Jobs about a topic of another cell (rule C10): the option `server` names one cell, and the topic is in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sow_client import Client
from sow_spark.connection import in_cell, kept
from sow_spark.options import Connecting
from sow_spark.stream_ending import stop_for_good
from tests.support.servers.cells import TwoCells


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


@pytest.mark.long
def test_a_pattern_has_the_topics_of_the_cell_of_the_server(
    spark: SparkSession, cells: TwoCells, tmp_path: Path
) -> None:
    """A DataFrame is of one instant, and the offsets of a stream are of one journal."""
    topics = [cells.topic("a"), cells.topic("b")]
    with Client(cells.home) as client:
        for topic in topics:
            client.create_topic(topic, key=["/id"], journal=True)
            client.publish(topic, {"id": topic})
    options = {"server": cells.home, "topicPattern": "|".join(topics)}
    read = spark.read.format("sow").options(**options).load()
    assert [row.id for row in read.select("id").collect()] == topics[:1]
    streamed = spark.readStream.format("sow").options(**options, startingFrom="earliest").load()
    seen: list[str] = []
    writer = streamed.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer = writer.foreachBatch(lambda batch, _: seen.extend(row.id for row in batch.select("id").collect()))
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert seen == topics[:1]


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
