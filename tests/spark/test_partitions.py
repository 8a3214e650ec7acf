"""The partitions of a snapshot: by the size of the topic, and even where its keys are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from sow_client import Client
from sow_spark import over_cells, reading
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.options import Reading
from sow_spark.reading import Share, SnapshotReader, packed_together
from tests.support.servers.server import DYNAMIC, ServerProcess

SCHEMA = StructType([StructField("_key", StringType()), StructField("_version", LongType())])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), DYNAMIC) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


def parts(server: ServerProcess, topic: str, **options: str) -> list[list[str]]:
    """The keys of each partition."""
    reader = SnapshotReader(parse_reading({"server": server.address, "topic": topic, **options}), SCHEMA)
    return [[key for batch in reader.read(part) for key in batch.column(0).to_pylist()] for part in reader.partitions()]


def fill(client: Client, topic: str, keys: list[str]) -> None:
    client.create_topic(topic, key=["/id"])
    client.publish_many(topic, [{"id": key} for key in keys])


def test_a_tiny_topic_is_one_partition_and_an_empty_one_has_nothing_in_it(
    server: ServerProcess, client: Client
) -> None:
    """given topics with no record and with few / when many partitions are asked for / then none has fewer than 100
    records (rule Q6)

    150 records made two of 75.
    """
    fill(client, "none", [])
    fill(client, "few", [str(at) for at in range(90)])
    fill(client, "more", [str(at) for at in range(150)])
    fill(client, "enough", [str(at) for at in range(200)])
    assert parts(server, "none") == [[]]  # a later snapshot may have records
    assert parts(server, "none", partitions="8") == [[]]
    assert parts(server, "none", snapshot="load") == []
    assert [len(part) for part in parts(server, "few")] == [90]
    assert len(parts(server, "few", partitions="8")) == 1
    assert [len(part) for part in parts(server, "more", partitions="8")] == [150]
    assert [len(part) for part in parts(server, "enough", partitions="8")] == [100, 100]
    some = parts(server, "more", partitions="8", filter=f"@key IN ({', '.join(repr(str(at)) for at in range(140))})")
    assert [len(part) for part in some] == [140]


def planned(server: ServerProcess, **options: str) -> list[list[tuple[str, str]]]:
    """Topic and key of each record, of each partition."""
    schema = StructType([StructField("_topic", StringType()), StructField("_key", StringType())])
    reader = SnapshotReader(parse_reading({"server": server.address, **options}), schema)
    return [
        [(row["_topic"], row["_key"]) for batch in reader.read(part) for row in batch.to_pylist()]
        for part in reader.partitions()
    ]


def test_many_small_topics_share_a_partition_and_a_large_one_has_several(server: ServerProcess, client: Client) -> None:
    """given small topics, one without records, and a larger one / when all are read at once / then each record comes
    once, with its topic, in a few partitions"""
    sizes = {"shared.a": 3, "shared.b": 0, "shared.c": 5, "shared.large": 1_000}
    for name, size in sizes.items():
        fill(client, name, [str(at) for at in range(size)])
    expected = sorted((name, str(at)) for name, size in sizes.items() for at in range(size))

    (everything,) = planned(server, topicPattern="shared[.].+")
    assert sorted(everything) == expected
    some = planned(server, topicPattern="shared[.].+", partitions="5")
    assert 4 <= len(some) <= 7
    assert max(map(len, some)) <= 2 * len(expected) / 5
    assert sorted(row for part in some for row in part) == expected
    (listed,) = planned(server, topics="shared.c, shared.a", filter="@key = '2'")
    assert listed == [("shared.c", "2"), ("shared.a", "2")]


def test_a_partition_has_a_hundred_topics_at_most() -> None:
    """given 250 shares of few records, and large ones / when they are put together / then by records and by number"""
    small = [(Share(f"t{at}", at, 0, 1, "columns"), 1) for at in range(250)]
    assert [len(some) for some in packed_together(small, 100_000)] == [100, 100, 50]
    assert [len(some) for some in packed_together(small[:7], 3)] == [3, 3, 1]
    large = [(share, 60) for share, _ in small[:4]]
    assert [len(some) for some in packed_together(large, 100)] == [1, 1, 1, 1]
    assert packed_together([], 100) == []


def test_a_topic_that_is_deleted_while_a_pattern_is_planned_is_left_out(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given topics of a pattern / when one is deleted after the list was made / then the others are read; a listed
    topic that is not there fails"""
    fill(client, "going.a", ["1"])
    fill(client, "going.b", ["2"])
    read = over_cells.cells_read

    @contextmanager
    def deleting(options: Reading) -> Iterator[list[over_cells.CellOf]]:
        with read(options) as found:
            client.delete_topic("going.a")
            yield found

    monkeypatch.setattr(reading, "cells_read", deleting)
    assert planned(server, topicPattern="going[.].") == [[("going.b", "2")]]
    monkeypatch.undo()
    with pytest.raises(SowSourceError, match=r"TOPIC_NOT_FOUND.*topic going\.a is not there"):
        planned(server, topics="going.a,going.b")
    with pytest.raises(SowSourceError, match=r"PATTERN_MATCHES_NOTHING.*no topic matches 'going'"):
        planned(server, topicPattern="going")


def test_partitions_are_even_where_keys_are_not(server: ServerProcess, client: Client) -> None:
    """given a topic in which nearly all keys begin alike / when it is read in eight partitions / then none has more
    than twice its share, and each key comes once"""
    keys = [f"customer-of-the-north-{at:06}" for at in range(20_000)] + [f"{at}" for at in range(400)]
    fill(client, "skewed", keys)
    found = parts(server, "skewed", partitions="8")
    assert len(found) >= 6
    assert max(map(len, found)) <= 2 * len(keys) / len(found)
    assert sorted(key for part in found for key in part) == sorted(keys)


@pytest.mark.long
def test_a_topic_of_more_than_100_000_records_has_several_partitions(server: ServerProcess, client: Client) -> None:
    """given a topic of 250,000 records / when nobody says how many partitions / then each has about 100,000"""
    client.create_topic("large", key=["/id"])
    client.publish_many("large", [b'{"id":%d}' % at for at in range(250_000)], durability="buffered")
    found = parts(server, "large")
    assert len(found) in (2, 3, 4)
    assert sum(map(len, found)) == 250_000
