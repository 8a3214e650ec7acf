"""Changes as streams, on a real server: the reader as Spark drives it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.types import DataType, LongType, StringType, StructType, TimestampType

from sow_client import Client, Topic
from sow_spark import reading, stream_pins
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.read_limits import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from sow_spark.reading import SnapshotReader
from sow_spark.stream_offsets import Offset, bookmark_of, offset_of, sequence_of
from sow_spark.stream_plans import Plans
from sow_spark.stream_reading import ChangesReader
from tests.support.servers.server import ServerProcess

CHANGES = StructType().add("n", LongType()).add("_key", StringType()).add("_op", StringType())


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


def reader_of(server: ServerProcess, topic: str, schema: StructType = CHANGES, **options: str) -> ChangesReader:
    return ChangesReader(parse_reading({"server": server.address, "topic": topic, **options}), schema)


def rows_between(reader: ChangesReader, start: Offset, end: Offset) -> list[tuple[object, ...]]:
    return [
        tuple(row.values())
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def publish(client: Client, topic: str, *numbers: int) -> None:
    for number in numbers:
        client.publish(topic, {"n": number}, key=f"k{number % 3}")


def test_puts_and_deletes_come_in_order_from_where_the_query_begins(server: ServerProcess, client: Client) -> None:
    publish(client, "s1", 1)
    early, late = reader_of(server, "s1", startingFrom="earliest"), reader_of(server, "s1")
    first, last = early.initialOffset(), late.initialOffset()
    publish(client, "s1", 2)
    client.sow_delete("s1", keys=["k1"])
    changes = [(1, "k1", "put"), (2, "k2", "put"), (1, "k1", "delete")]
    end = early.latestOffset(first, ReadAllAvailable())
    assert rows_between(early, first, end) == changes
    assert rows_between(late, last, late.latestOffset(last, ReadAllAvailable())) == changes[1:]
    assert early.latestOffset(end, ReadAllAvailable()) == end
    assert rows_between(early, end, end) == []
    told = early.reportLatestOffset()
    assert told is not None
    assert bookmark_of(told) == bookmark_of(end)
    bookmark = reader_of(server, "s1", startingFrom=bookmark_of(last))
    assert bookmark_of(bookmark.initialOffset()) == bookmark_of(last)
    for one in (early, late, bookmark):
        one.stop()


@pytest.mark.parametrize("start", ["nonsense", "no.bookmark", "0d4c5b7e8f90.x", "."])
def test_a_start_that_is_no_bookmark_is_told(server: ServerProcess, client: Client, start: str) -> None:
    """A text with a dot in it, and no number behind, ended in a ValueError of Python."""
    publish(client, "s1.start", 1)
    with pytest.raises(SowSourceError, match=r"BOOKMARK_MALFORMED: .* is no bookmark"):
        reader_of(server, "s1.start", startingFrom=start).initialOffset()


def test_a_query_does_not_begin_in_the_future(server: ServerProcess, client: Client) -> None:
    """It began now."""
    publish(client, "s1b", 1)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    with pytest.raises(SowSourceError) as caught:
        reader_of(server, "s1b", startingFrom=tomorrow).initialOffset()
    assert caught.value.reason == "TIME_IN_FUTURE"


def test_without_an_op_there_are_only_puts(server: ServerProcess, client: Client) -> None:
    """A deleted record would look like one that is there."""
    publish(client, "s2", 1, 2)
    client.sow_delete("s2", keys=["k1"])
    reader = reader_of(server, "s2", StructType().add("n", LongType()), startingFrom="earliest")
    start = reader.initialOffset()
    assert rows_between(reader, start, reader.latestOffset(start, ReadAllAvailable())) == [(1,), (2,)]
    reader.stop()


def test_a_filter_leaves_out_changes_that_match_neither_before_nor_after(server: ServerProcess, client: Client) -> None:
    """And a micro-batch reads the same whenever it is read, though the journal has discarded the changes before it."""
    reader = reader_of(server, "s8", filter="/n > 1")
    client.create_topic("s8")
    start = reader.initialOffset()
    client.publish_many("s8", [{"n": 2}, {"n": 1}, {"n": 0}, {"n": 3}], keys=["a", "a", "a", "a"])
    end = reader.latestOffset(start, ReadAllAvailable())
    rows = [(2, "a", "put"), (1, "a", "put"), (3, "a", "put")]
    assert rows_between(reader, start, end) == rows
    assert rows_between(reader, start, end) == rows
    reader.stop()


def test_pyspark_4_1_has_limits_too(server: ServerProcess, client: Client) -> None:
    """It says neither where the query is nor how far to go, and asks for the end of the first micro-batch before its
    start. After a restart it plans the last micro-batch again before it asks."""
    publish(client, "s9", 0, 1, 2)
    reader = reader_of(server, "s9", startingFrom="earliest", maxRecordsPerTrigger="2")
    end = reader.latestOffset()
    start = reader.initialOffset()
    assert rows_between(reader, start, end) == [(0, "k0", "put"), (1, "k1", "put")]
    again = reader_of(server, "s9", maxRecordsPerTrigger="2")
    assert again.partitions(end, end) == []
    last = again.latestOffset()
    assert rows_between(again, end, last) == [(2, "k2", "put")]
    assert again.latestOffset() == last
    reader.stop()
    again.stop()


def test_pyspark_4_1_begins_at_one_head(server: ServerProcess, client: Client) -> None:
    """given a new query from the head / when a change comes between its two questions / then the first micro-batch ends
    where it begins, or later. It began behind its end, and failed."""
    publish(client, "s9c", 1)
    reader = reader_of(server, "s9c")
    end = reader.latestOffset()
    publish(client, "s9c", 2)
    start = reader.initialOffset()
    assert bookmark_of(start) == bookmark_of(end)
    assert rows_between(reader, end, reader.latestOffset()) == [(2, "k2", "put")]
    reader.stop()


def test_a_query_starts_at_a_time(server: ServerProcess, client: Client) -> None:
    publish(client, "s9d", 1)
    first = client.get("s9d", "k1")
    assert first is not None
    publish(client, "s9d", 2)
    after = first.publish_time + timedelta(microseconds=1)
    reader = reader_of(server, "s9d", startingFrom=after.isoformat())
    start = reader.initialOffset()
    assert rows_between(reader, start, reader.latestOffset(start, ReadAllAvailable())) == [(2, "k2", "put")]
    reader.stop()


def test_limits_are_kept_and_the_whole_is_the_same(server: ServerProcess, client: Client) -> None:
    publish(client, "s3", *range(10))
    reader = reader_of(server, "s3", startingFrom="earliest", maxRecordsPerTrigger="4", partitions="2")
    assert reader.getDefaultReadLimit() == ReadMaxRows(4)
    offset, numbers, sizes = reader.initialOffset(), [], []
    while (end := reader.latestOffset(offset, ReadMaxRows(4))) != offset:
        rows = rows_between(reader, offset, end)
        sizes.append(len(rows))
        numbers += [row[0] for row in rows]
        reader.commit(end)
        offset = end
    assert sorted(map(str, numbers)) == list(map(str, range(10)))
    assert max(sizes) == 4
    assert reader_of(server, "s3", maxBytesPerTrigger="1KiB").getDefaultReadLimit() == ReadMaxBytes(1024)
    assert reader_of(server, "s3").getDefaultReadLimit() == ReadAllAvailable()
    reader.stop()


def test_a_limit_in_bytes_ends_a_micro_batch(server: ServerProcess, client: Client) -> None:
    for number in range(10):
        client.publish("s3c", {"n": number, "text": "x" * 1000}, key=f"k{number}")
    reader = reader_of(server, "s3c", startingFrom="earliest", maxBytesPerTrigger="3KiB")
    offset, numbers, sizes = reader.initialOffset(), [], []
    while (end := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
        rows = rows_between(reader, offset, end)
        sizes.append(len(rows))
        numbers += [row[0] for row in rows]
        offset = end
    assert numbers == list(range(10))
    assert max(sizes) <= 3
    reader.stop()


def test_it_tells_how_far_it_is_behind(server: ServerProcess, client: Client) -> None:
    publish(client, "s3b", *range(5))
    reader = reader_of(server, "s3b", startingFrom="earliest")
    start = reader.initialOffset()
    assert reader.reportLatestOffset() is None
    end = reader.latestOffset(start, ReadMaxRows(2))
    told = reader.reportLatestOffset()
    assert told is not None
    assert (told["recordsBehind"], told["server"]) == (3, server.address)
    plan = client.plan_changes("s3b", start=bookmark_of(start), max_entries=2)
    assert plan.left_age is not None
    assert 0 <= told["secondsBehind"] <= plan.left_age.total_seconds() + 1
    reader.latestOffset(end, ReadAllAvailable())
    told = reader.reportLatestOffset()
    assert told is not None
    assert (told["recordsBehind"], told["secondsBehind"]) == (0, 0)
    assert client.plan_changes("s3b", start="latest").left_age is None
    reader.stop()


def test_the_changes_of_a_key_are_in_one_partition_in_order(server: ServerProcess, client: Client) -> None:
    """Split by position, two tasks would publish the changes of a key at the same time, and either might end last."""
    for round_number in range(3):
        for key in range(20):
            client.publish("shares", {"n": round_number}, key=f"k{key}")
    reader = reader_of(server, "shares", startingFrom="earliest", partitions="3")
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    shares = [[row for batch in reader.read(part) for row in batch.to_pylist()] for part in parts]
    assert [bool(share) for share in shares] == [True] * 3
    assert sum(map(len, shares)) == 60
    for share in shares:
        for key in {row["_key"] for row in share}:
            assert [row["n"] for row in share if row["_key"] == key] == [0, 1, 2]
    reader.stop()


def test_changes_of_other_topics_make_no_batch(server: ServerProcess, client: Client) -> None:
    publish(client, "quiet", 1)
    reader = reader_of(server, "quiet", startingFrom="earliest")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    publish(client, "loud", 1, 2)
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    publish(client, "quiet", 2)
    assert reader.latestOffset(end, ReadAllAvailable()) != end
    reader.stop()


def test_available_now_ends_at_the_head_of_its_beginning(server: ServerProcess, client: Client) -> None:
    publish(client, "s4", 1, 2)
    reader = reader_of(server, "s4", startingFrom="earliest")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    publish(client, "s4", 3)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert [row[0] for row in rows_between(reader, start, end)] == [1, 2]
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()


def test_the_pin_follows_the_committed_offset_which_has_its_name(server: ServerProcess, client: Client) -> None:
    publish(client, "s5", 1, 2)
    reader = reader_of(server, "s5", startingFrom="earliest", pinLease="30m")
    start = reader.initialOffset()
    pin = client.describe_durable("s5", start["pin"])
    assert pin.settings.idle_ttl == "30m"
    assert pin.pin
    assert pin.reader.startswith("Spark 4.")
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["pin"] == start["pin"]
    assert kept(client, start) == 2
    reader.commit(end)
    assert kept(client, start) == 0
    reader.stop()
    named = reader_of(server, "s5", pinName="mine")
    assert "pin" not in named.initialOffset()
    client.describe_durable("s5", "mine")
    named.stop()


def test_a_pin_that_is_made_again_has_the_lease_of_the_query(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given a query whose pin has ended, as after a long sleep of its machine / when the pin is renewed / then it has
    the lease and the reader of the query. It had the server's hour, and no reader."""
    renewals: list[Callable[[], object]] = []
    periods: list[float] = []

    def renewed(renew: Callable[[], object], lease_seconds: float) -> AbstractContextManager[None]:
        periods.append(lease_seconds / reading.RENEWALS_PER_LEASE)
        renewals.append(renew)
        return nullcontext()

    monkeypatch.setattr(stream_pins, "renewed", renewed)
    publish(client, "s5.slept", 1)
    reader = reader_of(server, "s5.slept", startingFrom="earliest", pinLease="30m")
    name = reader.initialOffset()["pin"]
    client.delete_durable("s5.slept", name)
    (renew,) = renewals
    renew()
    pin = client.describe_durable("s5.slept", name)
    assert (pin.settings.idle_ttl, pin.reader) == ("30m", stream_pins.reader())
    reader.stop()
    assert periods == [60.0], "so that one can tell when its query has ended"


def kept(client: Client, offset: Offset) -> int:
    """Entries that the pin of an offset keeps."""
    figures = client.describe_durable("s5", offset["pin"]).figures
    assert figures is not None
    return figures.unacknowledged_entries


def test_lost_changes_fail_the_query_or_are_passed_over_with_a_warning(
    server: ServerProcess, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, "s6", 1)
    reader = reader_of(server, "s6", startingFrom="earliest")
    start = reader.initialOffset()
    other: Offset = {"epoch": "0" * len(start["epoch"]), "sequence": 1}
    with pytest.raises(SowSourceError, match=r"DATA_LOST: .* topic s6 after .* gone \(BOOKMARK_OTHER_EPOCH"):
        reader_of(server, "s6").latestOffset(other, ReadAllAvailable())
    lenient = reader_of(server, "s6", failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "sow_spark"):
        end = lenient.latestOffset(other, ReadAllAvailable())
        assert [row[0] for row in rows_between(lenient, other, end)] == [1]
    assert "continuing with the earliest change" in caplog.text
    for one in (reader, lenient):
        one.stop()


def test_a_new_topic_of_the_same_name_does_not_hide_lost_changes(
    server: ServerProcess, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """given a query / when its topic is deleted with changes still to be read, and made anew / then it fails, or says
    so and goes on with the new one"""
    publish(client, "remade", 1, 2)
    reader = reader_of(server, "remade", startingFrom="earliest")
    lenient = reader_of(server, "remade", failOnDataLoss="false")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    client.delete_topic("remade")
    publish(client, "remade", 3)
    for attempt in (lambda: reader.latestOffset(start, ReadAllAvailable()), lambda: reader.partitions(start, end)):
        with pytest.raises(SowSourceError, match=r"DATA_LOST: .* \(the topic was deleted"):
            attempt()
    with caplog.at_level(logging.WARNING, "sow_spark"):
        end = lenient.latestOffset(start, ReadAllAvailable())
        assert [row[0] for row in rows_between(lenient, start, end)] == [3]
        caplog.clear()
        assert lenient.latestOffset(end, ReadAllAvailable()) == end
    assert not caplog.text
    for one in (reader, lenient):
        one.stop()


def test_a_bookmark_of_an_earlier_topic_of_the_same_name_is_a_loss(
    server: ServerProcess, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """given the last bookmark of a topic / when it is deleted, made anew, and read from there / then the query does not
    start, or says so and begins with the earliest change

    It began as if nothing had happened, where nothing else was written in between.
    """
    publish(client, "anew", 1, 2)
    bookmark = client.open_export("anew").bookmark
    assert bookmark is not None
    client.delete_topic("anew")
    publish(client, "anew", 3)
    reader = reader_of(server, "anew", startingFrom=bookmark)
    with pytest.raises(SowSourceError, match=rf"DATA_LOST: .* topic anew after {bookmark} are gone \(BOOKMARK_TOO_OLD"):
        reader.initialOffset()
    lenient = reader_of(server, "anew", startingFrom=bookmark, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "sow_spark"):
        start = lenient.initialOffset()
    assert "continuing with the earliest change" in caplog.text
    assert rows_between(lenient, start, lenient.latestOffset(start, ReadAllAvailable())) == [(3, "k0", "put")]
    for one in (reader, lenient):
        one.stop()


def test_a_topic_without_a_journal_is_refused_with_a_remedy(server: ServerProcess, client: Client) -> None:
    client.create_topic("s7", journal=False)
    with pytest.raises(SowSourceError, match="NO_JOURNAL"):
        reader_of(server, "s7").initialOffset()


# ---- a query that does not start ----


def pins(client: Client, topic: str) -> list[str]:
    return [durable.name for durable in client.durables() if durable.topic == topic]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"filter": "/n = "}, r"FILTER_INVALID: checking the filter, topic f1: .* at 5"),
        ({"filter": "NOW_MICROS() > 1"}, r"FILTER_INVALID: checking the filter, topic f1: .*NOW_MICROS"),
        ({"payload": "string"}, "SCHEMA_UNSUPPORTED: column n is neither metadata nor payload"),
        ({"pinLease": "8d"}, "OPTION_INVALID: option pinLease: is 8d, and this server allows 7d"),
        ({"startingFrom": "0001-01-01"}, "OPTION_INVALID: option startingFrom: must not be negative"),
        ({"startingFrom": "0123456789ab.x"}, "BOOKMARK_MALFORMED: .*; give startingFrom a bookmark"),
    ],
    ids=str,
)
def test_a_query_with_an_option_that_the_server_refuses_does_not_start_and_leaves_no_pin(
    server: ServerProcess, client: Client, options: dict[str, str], problem: str
) -> None:
    """A filter was looked at by the first task, when the pin was there and the checkpoint had its name. A pin's lease
    was called `idle_ttl_micros`."""
    publish(client, "f1", 1)
    reader = reader_of(server, "f1", CHANGES, **options)
    with pytest.raises(SowSourceError, match=problem):
        reader.initialOffset()
    assert pins(client, "f1") == []
    reader.stop()


def test_a_query_that_goes_on_with_a_filter_that_is_none_fails_before_its_tasks(
    server: ServerProcess, client: Client
) -> None:
    """given a checkpoint / when the query runs again with a wrong filter / then Spark's first call fails, and the pin
    stays for the next run"""
    publish(client, "f2", 1)
    reader = reader_of(server, "f2", startingFrom="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    for attempt in ("latestOffset", "partitions"):
        wrong = reader_of(server, "f2", filter="/n = ")
        with pytest.raises(SowSourceError, match="FILTER_INVALID"):
            wrong.partitions(start, end) if attempt == "partitions" else wrong.latestOffset(start, ReadAllAvailable())
        wrong.stop()
    assert pins(client, "f2") == [start["pin"]]
    reader.stop()


def test_a_query_that_can_pin_one_topic_only_leaves_no_pin(server: ServerProcess, client: Client) -> None:
    """given a durable subscription with a filter on the second topic, which is no pin / when a query takes its name for
    its pins / then it does not start, and the pin of the first topic is gone; a pin that was there before stays"""
    publish(client, "f3.a", 1)
    publish(client, "f3.b", 1)
    with client.durable("f3.b", "mine", filter="/n > 1"):
        pass
    for before in ([], ["mine"]):
        if before:
            client.pin_journal("f3.a", "mine", client.plan_changes("f3.a", start="latest").start)
        reader = several(server, topics="f3.a,f3.b", pinName="mine", startingFrom="earliest")
        with pytest.raises(SowSourceError, match="DURABLE_"):
            reader.initialOffset()
        assert pins(client, "f3.a") == before
        reader.stop()


METADATA = [
    ("_topic", StringType(), ["meta"], ["meta", "meta", "meta"]),
    ("_key", StringType(), ["a"], ["a", "b", "b"]),
    ("_op", StringType(), ["put"], ["put", "put", "delete"]),
    ("_reason", StringType(), [None], [None, None, None]),
    ("_sequence", LongType(), [1], [1, 2, 3]),
    ("_version", LongType(), None, None),
    ("_publish_time", TimestampType(), None, None),
    ("_expire_time", TimestampType(), [None], [None, None, None]),
    ("_origin", StringType(), None, None),
]


@pytest.mark.parametrize(("name", "kind", "record", "changes"), METADATA, ids=[one[0] for one in METADATA])
def test_each_metadata_column_has_its_content_in_both_directions(
    server: ServerProcess,
    client: Client,
    name: str,
    kind: DataType,
    record: list[Any] | None,
    changes: list[Any] | None,
) -> None:
    """given one record that was put, and one that was put and deleted / then the column alone, and beside a field, has
    what docs/spark.md says

    A snapshot with `_op` or `_reason` in its schema failed in its tasks.
    """
    if name == METADATA[0][0]:
        client.publish("meta", {"n": 1}, key="a")
        client.publish("meta", {"n": 2}, key="b")
        client.sow_delete("meta", keys=["b"])
    (stored,) = client.query("meta")
    of_record = {"_version": stored.version, "_publish_time": stored.publish_time, "_origin": stored.origin}
    first = client.plan_changes("meta", start="earliest").start
    for schema in (StructType().add(name, kind), StructType().add("n", LongType()).add(name, kind)):
        snapshot = SnapshotReader(parse_reading({"server": server.address, "topic": "meta"}, "snapshot"), schema)
        (row,) = [row for part in snapshot.partitions() for batch in snapshot.read(part) for row in batch.to_pylist()]
        told = [of_record[name]] if record is None else record
        if name == "_sequence":
            told = [sequence_of(first) + 1]
        assert [row[name]] == told
        reader = reader_of(server, "meta", schema.add("_op", StringType()) if name != "_op" else schema)
        start = offset_of(first)
        rows = [
            row
            for part in reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]
        if name == "_sequence":
            assert [row[name] - sequence_of(first) for row in rows] == changes
        elif changes is not None:
            assert [row[name] for row in rows] == changes
        else:
            assert rows[0][name] == of_record[name]
        reader.stop()


# ---- several topics ----

OF_TOPICS = StructType().add("n", LongType()).add("_topic", StringType())


def several(server: ServerProcess, **options: str) -> ChangesReader:
    return ChangesReader(parse_reading({"server": server.address, **options}), OF_TOPICS)


def test_a_stream_reads_several_topics_within_one_limit(server: ServerProcess, client: Client) -> None:
    """given two topics, one with far more changes / when they are read in limited micro-batches / then each change of
    both comes once, and no micro-batch has more changes than the limit"""
    for number in range(12):
        publish(client, "m.many", number)
        if number % 4 == 0:
            publish(client, "m.few", number)
    reader = several(server, topics="m.many, m.few", startingFrom="earliest", maxRecordsPerTrigger="5")
    offset, rows, sizes = reader.initialOffset(), list[tuple[object, ...]](), list[int]()
    while (end := reader.latestOffset(offset, ReadMaxRows(5))) != offset:
        found = rows_between(reader, offset, end)
        assert rows_between(reader, offset, end) == found
        rows += found
        sizes.append(len(found))
        reader.commit(end)
        offset = end
    assert sorted(row for row in rows if row[1] == "m.many") == [(number, "m.many") for number in range(12)]
    assert sorted(row for row in rows if row[1] == "m.few") == [(0, "m.few"), (4, "m.few"), (8, "m.few")]
    assert max(sizes) <= 5
    assert {one.topic for one in client.durables() if one.name == offset["pin"]} == {"m.many", "m.few"}
    reader.stop()


def test_a_pattern_takes_in_topics_that_come_later(server: ServerProcess, client: Client) -> None:
    publish(client, "p.a", 1)
    publish(client, "other.p.a", 1)
    reader = several(server, topicPattern=r"p\..*")
    start = reader.initialOffset()
    publish(client, "p.a", 2)
    publish(client, "p.b", 3)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert sorted(rows_between(reader, start, end)) == [(2, "p.a"), (3, "p.b")]
    assert client.describe_durable("p.b", end["pin"]) is not None
    reader.commit(end)
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    publish(client, "p.b", 4)
    last = reader.latestOffset(end, ReadAllAvailable())
    assert rows_between(reader, end, last) == [(4, "p.b")]
    reader.stop()


@pytest.mark.parametrize("listing", [1, 2, 3])
def test_no_change_of_a_topic_is_lost_that_comes_while_a_micro_batch_is_planned(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, listing: int
) -> None:
    """given a pattern / when a topic comes right after the topics were listed, before the end of the micro-batch is
    known / then its changes up to that end come, too. They were in no micro-batch: the next one took the topic for a
    new one, and began behind them."""
    publish(client, f"race{listing}.a", 1)
    reader = several(server, topicPattern=f"race{listing}[.].*", startingFrom="earliest")
    offset = reader.initialOffset()
    listings = 0
    list_topics = Plans.topics

    def list_late(self: Plans) -> dict[str, Topic]:
        nonlocal listings
        listings += 1
        found = list_topics(self)
        if listings == listing:
            publish(client, f"race{listing}.b", 2)
            publish(client, f"race{listing}.a", 3)
        return found

    monkeypatch.setattr(Plans, "topics", list_late)
    rows: list[tuple[object, ...]] = []
    for _ in range(3):
        end = reader.latestOffset(offset, ReadAllAvailable())
        rows += rows_between(reader, offset, end)
        offset = end
    assert listings > listing
    a, b = f"race{listing}.a", f"race{listing}.b"
    assert sorted(rows) == [(1, a), (2, b), (3, a)]
    reader.stop()


def test_a_topic_of_a_pattern_that_is_deleted_is_told(
    server: ServerProcess, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, "gone.a", 1)
    publish(client, "gone.b", 1)
    reader = several(server, topicPattern=r"gone\..*", startingFrom="latest")
    lenient = several(server, topicPattern=r"gone\..*", failOnDataLoss="false")
    start = reader.initialOffset()
    client.delete_topic("gone.a")
    with pytest.raises(SowSourceError, match=r"DATA_LOST: .* topic gone.a after .* \(the topic was deleted\)"):
        reader.latestOffset(start, ReadAllAvailable())
    publish(client, "gone.b", 2)
    with caplog.at_level(logging.WARNING, "sow_spark"):
        end = lenient.latestOffset(start, ReadAllAvailable())
        assert rows_between(lenient, start, end) == [(2, "gone.b")]
        assert "gone.a" in caplog.text
        caplog.clear()
        assert lenient.latestOffset(end, ReadAllAvailable()) == end
    assert not caplog.text
    for one in (reader, lenient):
        one.stop()


@pytest.mark.parametrize("option", ["topics", "topicPattern"])
def test_a_checkpoint_of_one_topic_is_none_of_several(server: ServerProcess, client: Client, option: str) -> None:
    """given a checkpoint of a query of one topic / when the query gets several / then it says so. It said that a topic
    with an empty name was deleted."""
    publish(client, "one.a", 1)
    start = reader_of(server, "one.a", startingFrom="earliest").initialOffset()
    reader = several(server, **{option: "one.a"})
    for call in (lambda: reader.latestOffset(start), lambda: reader.partitions(start, start)):
        with pytest.raises(
            SowSourceError, match=f"OPTION_INVALID: option {option}: this checkpoint is of a query of one"
        ):
            call()


def test_topics_that_are_not_there_are_named(server: ServerProcess) -> None:
    with pytest.raises(SowSourceError, match="TOPIC_NOT_FOUND: topic nowhere is not there"):
        several(server, topics="nowhere").initialOffset()
    with pytest.raises(SowSourceError, match=r"PATTERN_MATCHES_NOTHING: no topic with a journal matches 'nowhere.+'"):
        several(server, topicPattern="nowhere.+").initialOffset()
