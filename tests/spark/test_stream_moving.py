"""Streams that lose their instance and go on at another one (rule F18)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructType

from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.read_limits import ReadAllAvailable
from sow_spark.stream_offsets import Offset, bookmark_of, joined, sources_of
from sow_spark.stream_pins import NOTE
from sow_spark.stream_reading import ChangesReader
from tests.support.servers.cluster import Cluster
from tests.support.servers.server import until

KEYS = StructType().add("_key", StringType()).add("_op", StringType())
ALL = ReadAllAvailable()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(
        tmp_path, "a", "b", topics="[topics.orders]\nkey = ['/id']\n[topics.more]\nkey = ['/id']\n"
    ) as cluster:
        cluster.await_streaming()
        yield cluster


def reader_of(pair: Cluster, **options: str) -> ChangesReader:
    servers = ",".join(pair[name].server.address for name in ("a", "b"))
    given = {"server": servers, "connectTimeout": "1s", "retryFor": "20s", "startingFrom": "earliest", **options}
    if "topics" not in given:
        given["topic"] = "orders"
    return ChangesReader(parse_reading(given), KEYS)


def keys_between(reader: ChangesReader, start: Offset, end: Offset) -> list[str]:
    return [
        row["_key"]
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def publish(pair: Cluster, instance: str, *ids: str, topic: str = "orders") -> None:
    for one in ids:
        pair[instance].client.publish(topic, {"id": one})


def after(reader: ChangesReader, start: Offset) -> tuple[Offset, list[str]]:
    """The next micro-batch, and its keys."""
    end = reader.latestOffset(start, ALL)
    return end, keys_between(reader, start, end)


def with_marks(pair: Cluster, reader: ChangesReader, start: Offset, instance: str = "a") -> Offset:
    """An offset that is worth something at the other instance: the server samples its state now and then."""
    found = [start]

    def marked() -> bool:
        publish(pair, instance, "sample")
        found[0] = reader.latestOffset(found[0], ALL)
        return "marks" in found[0]

    until(marked, 30, "an offset with marks")
    pair.await_streaming()
    return found[0]


def test_a_stream_goes_on_at_another_instance_and_misses_nothing(pair: Cluster) -> None:
    """given a stream of two instances / when the one in use is killed between two micro-batches, and comes back / then
    the stream goes on at the other one, with every change since, and stays there"""
    publish(pair, "a", "1")
    reader = reader_of(pair)
    offset = with_marks(pair, reader, reader.initialOffset())
    assert offset["epoch"] == pair["a"].client.status().journal_epoch
    publish(pair, "a", "2")
    publish(pair, "b", "3")
    pair.await_streaming()
    pair["a"].server.kill9()
    publish(pair, "b", "4")
    end, keys = after(reader, offset)
    assert end["epoch"] == pair["b"].client.status().journal_epoch
    assert {"2", "3", "4"} <= set(keys)
    assert keys_between(reader, offset, end) == keys
    reader.commit(end)
    pair.start("a")
    publish(pair, "b", "5")
    last, keys = after(reader, end)
    assert (last["epoch"], keys) == (end["epoch"], ["5"])
    again = reader_of(pair)
    publish(pair, "b", "6")
    assert after(again, last)[1] == ["6"], "a new reader finds the instance that the offsets belong to"
    reader.stop()
    again.stop()


def test_a_repeated_micro_batch_is_not_taken_for_read_by_the_first_instance(pair: Cluster) -> None:
    """given a micro-batch that was planned at one instance, whose last changes have not reached the other / when the
    first one is lost, the micro-batch is repeated at the other one, and the first one comes back, for a new reader /
    then the changes that only the first one had still come"""
    publish(pair, "a", "1")
    reader = reader_of(pair)
    offset = with_marks(pair, reader, reader.initialOffset())
    pair.proxies["a", "b"].refuse()
    publish(pair, "a", "only-a")
    end = reader.latestOffset(offset, ALL)
    reader.stop()
    pair["a"].server.kill9()
    publish(pair, "b", "at-b")
    repeating = reader_of(pair)
    assert "only-a" not in keys_between(repeating, offset, end)
    notes = [one.name for one in pair["b"].client.durables() if one.name.endswith(NOTE)]
    assert notes == [f"{end['pin']}{NOTE}"]
    repeating.stop()
    pair.start("a")
    fresh = reader_of(pair)
    last, keys = after(fresh, end)
    assert "only-a" in keys
    assert keys_between(fresh, end, last) == keys
    fresh.stop()


def test_a_stream_waits_where_no_other_instance_knows_its_position(pair: Cluster) -> None:
    publish(pair, "a", "1")
    reader = reader_of(pair, retryFor="0s")
    offset = reader.initialOffset()
    assert "marks" not in offset
    pair["a"].server.kill9()
    with pytest.raises(SowSourceError, match="UNREACHABLE"):
        reader.latestOffset(offset, ALL)
    with pytest.raises(SowSourceError, match=r"does not serve, and .+ does not know where to go on"):
        reader.latestOffset(offset, ALL)
    pair.start("a")
    assert after(reader, offset)[1] == ["1"]
    reader.stop()


def test_a_stream_of_several_topics_moves(pair: Cluster) -> None:
    publish(pair, "a", "1")
    publish(pair, "a", "m1", topic="more")
    reader = reader_of(pair, topics="orders,more")
    offset = with_marks(pair, reader, reader.initialOffset())
    publish(pair, "a", "m2", topic="more")
    pair.await_streaming()
    pair["a"].server.kill9()
    end, keys = after(reader, offset)
    assert end["epoch"] != offset["epoch"]
    assert "m2" in keys
    assert bookmark_of(reader.latestOffset(end, ALL)) == bookmark_of(end)
    reader.stop()


def test_marks_of_several_topics_are_the_earliest() -> None:
    assert joined([";t=9;aa.5;bb.7", ";t=4;bb.6;cc.1"]) == ";t=4;bb.6"
    assert joined([";t=9;aa.5", ""]) == ""
    assert sources_of(";t=9;aa.5;bb.7;h=cc.1") == {"aa": 5, "bb": 7}


@pytest.mark.long
def test_a_running_query_moves_by_itself(spark: SparkSession, pair: Cluster, tmp_path: Path) -> None:
    """given a query that waits for changes / when its instance is killed / then it goes on at the other one, without an
    error, and has every change"""
    seen: set[str] = set()
    servers = ",".join(pair[name].server.address for name in ("a", "b"))
    source = (
        spark.readStream.format("sow").schema("_key STRING").option("server", servers).option("connectTimeout", "1s")
    )
    frame = source.option("startingFrom", "earliest").load("orders")
    writer = frame.writeStream.foreachBatch(lambda batch, _: seen.update(row[0] for row in batch.collect()))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        publish(pair, "a", "1")
        until(lambda: "1" in seen, 120, "the first change")
        # An offset with marks needs a change after the server has sampled its state.
        for number in range(5):
            publish(pair, "a", f"s{number}")
            until(lambda wanted=f"s{number}": wanted in seen, 120, "a sample")  # type: ignore[misc]  # a lambda's default argument
        pair.await_streaming()
        query.processAllAvailable()
        pair["a"].server.kill9()
        publish(pair, "b", "2")
        until(lambda: "2" in seen or not query.isActive, 120, "the change at the other instance")
    finally:
        query.stop()
    assert query.exception() is None
    assert "2" in seen
