"""Jobs about a topic of another cell (rule C10): the option `server` names one cell, and the topic is in another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sow_client import Client
from sow_spark.connection import in_cell, kept
from sow_spark.options import Connecting
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
    assert topic not in [found.name for found in cells.direct("a").topics()]


def test_tasks_get_the_addresses_of_the_cell(cells: TwoCells) -> None:
    topic, given = cells.topic("b"), Connecting(server=cells.home)
    with Client(cells.home) as client:
        assert kept(given, client, topic) == given, "nothing is known of it yet"
        client.publish(topic, b"{}", key="1")
        assert kept(given, client, topic).server == cells.addresses["b"][0]
        assert in_cell(given, client, cells.topic("a")) == given
