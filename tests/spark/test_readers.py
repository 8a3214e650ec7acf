"""Readers of snapshots with a scripted client: which exports they open, and what each task reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql.datasource import EqualTo, Filter, InputPartition
from pyspark.sql.types import LongType, StringType, StructType

from sow_client import Export, InvalidArgument, NotFound, PackedRecords, SowError, TopicSettings, Unavailable
from sow_spark import reading
from sow_spark.errors import SowSourceError
from sow_spark.option_parsing import parse_reading
from sow_spark.options import Connecting, Reading
from sow_spark.reading import ExportPartition, FilteringReader, SnapshotReader
from tests.spark.test_decoding import packed

SCHEMA = StructType().add("id", LongType())


class Sow:
    """Has some topics, and the records of any part: one with the number of the part."""

    def instance_of(self, _topic: str) -> None:
        return None

    def servers_of(self, _topic: str) -> str:
        return "127.0.0.1:7450"

    def __init__(self) -> None:
        self.records: dict[str, int] = {"orders": 10}
        self.parts: tuple[int, ...] = (10,)
        self.opened: list[tuple[str, str | None]] = []
        self.successors: list[tuple[str, str]] = []
        self.read: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self.asked: list[str] = []
        self.refuses: dict[str | None, SowError] = {}
        """The errors of exports, by their filter or their topic."""
        self.documents = b'{"id":%d}'

    def _topic(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, settings=TopicSettings(), statistics=SimpleNamespace(live_records=self.records[name])
        )

    def describe_topic(self, name: str) -> Any:
        self.asked.append(name)
        return self._topic(name)

    def topics(self, *, with_statistics: bool = False) -> list[Any]:
        return [self._topic(name) for name in self.records]

    def open_export(self, topic: str, text: str | None, _parameters: Any, *, parts: int, **options: Any) -> Export:
        for key in (text, topic):
            if key in self.refuses:
                raise self.refuses[key]
        if options.get("successor_of"):
            self.successors.append((options["successor_of"], options["reader"]))
            return self.export(topic, "later")
        self.opened.append((topic, text))
        return self.export(topic, f"export-{len(self.opened)}")

    def export(self, topic: str, name: str) -> Export:
        return Export(name, topic, None, datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=1), self.parts)

    def renew_export(self, name: str) -> Export:
        return self.export("orders", name)

    def read_export(self, export: str, part: int, *, lines: bool, **_: Any) -> Iterator[PackedRecords]:
        self.read.append((export, part))
        yield packed([self.documents % part if b"%d" in self.documents else self.documents], lines=lines)

    def close_export(self, name: str) -> None:
        self.closed.append(name)


@pytest.fixture
def sow(monkeypatch: pytest.MonkeyPatch) -> Sow:
    client = Sow()

    @contextmanager
    def connect(_connecting: Connecting) -> Iterator[Sow]:
        yield client

    monkeypatch.setattr(reading, "connect", connect)
    return client


def options(**given: str) -> Reading:
    return parse_reading({"server": "here:1", "retryFor": "0s", "topic": "orders", **given})


def planned(reader: SnapshotReader) -> list[ExportPartition]:
    partitions = reader.partitions()
    assert all(isinstance(one, ExportPartition) for one in partitions)
    return partitions  # type: ignore[return-value]  # as asserted


def rows(reader: SnapshotReader, partition: InputPartition) -> list[dict[str, object]]:
    return [row for batch in reader.read(partition) for row in batch.to_pylist()]


# ---- planning ----


def test_each_part_of_an_export_is_a_partition(sow: Sow) -> None:
    sow.parts = (5, 5)
    reader = SnapshotReader(options(filter="/id > 1"), SCHEMA)
    partitions = planned(reader)
    assert sow.opened == [("orders", "/id > 1")]
    assert [(one.shares[0].part, one.shares[0].parts, one.lease_seconds) for one in partitions] == [
        (0, 2, 3_600),
        (1, 2, 3_600),
    ]
    assert [rows(reader, one) for one in partitions] == [[{"id": 0}], [{"id": 1}]]
    assert sow.read == [("export-1", 0), ("export-1", 1)]


def test_a_payload_of_one_column_needs_no_look_at_the_topic(sow: Sow) -> None:
    reader = SnapshotReader(options(payload="string"), StructType().add("payload", StringType()))
    (partition,) = planned(reader)
    assert sow.asked == []
    assert rows(reader, partition) == [{"payload": '{"id":0}'}]
    with pytest.raises(SowSourceError, match="column id is neither metadata nor payload"):
        SnapshotReader(options(payload="string"), SCHEMA).partitions()


def test_pushed_filters_are_sent_and_left_out_where_a_server_does_not_know_them(sow: Sow) -> None:
    reader = FilteringReader(options(filter="/a = 1"), SCHEMA)
    pushed: list[Filter] = [EqualTo(("id",), 5)]
    assert list(reader.pushFilters(pushed)) == pushed, "Spark keeps all of them"
    planned(reader)
    assert sow.opened == [("orders", "(/a = 1) AND /id = 5")]
    sow.refuses["(/a = 1) AND /id = 5"] = InvalidArgument("no such operator", reason="FILTER_INVALID")
    (partition,) = planned(reader)
    assert sow.opened[1:] == [("orders", "/a = 1")]
    assert partition.shares[0].filter == "/a = 1"
    sow.refuses["/a = 1"] = InvalidArgument("at 0", reason="FILTER_INVALID")
    with pytest.raises(SowSourceError, match="FILTER_INVALID: opening a snapshot of topic orders: at 0"):
        reader.partitions()


def test_another_error_of_an_export_is_passed_on(sow: Sow) -> None:
    sow.refuses["orders"] = InvalidArgument("no", reason="PERMISSION_DENIED")
    with pytest.raises(SowSourceError, match="PERMISSION_DENIED"):
        SnapshotReader(options(), SCHEMA).partitions()


def test_an_export_of_another_topic_is_refused(sow: Sow) -> None:
    reader = SnapshotReader(options(export="given"), SCHEMA)
    (partition,) = planned(reader)
    assert (sow.opened, partition.shares[0].export_id) == ([], "given")
    sow.records["quotes"] = 1
    with pytest.raises(SowSourceError, match="given is an export of topic orders, not quotes"):
        SnapshotReader(options(export="given", topic="quotes"), SCHEMA).partitions()


def test_a_topic_that_is_deleted_while_its_pattern_is_read_has_no_rows(sow: Sow) -> None:
    sow.records = {"a": 1, "b": 1}
    sow.refuses["a"] = NotFound("no topic", reason="TOPIC_NOT_FOUND")
    several = replace(options(), topic="", topic_pattern=".*")
    (partition,) = planned(SnapshotReader(several, SCHEMA))
    assert [share.topic for share in partition.shares] == ["b"]
    with pytest.raises(SowSourceError, match="TOPIC_NOT_FOUND"):
        SnapshotReader(replace(several, topic_pattern=None, topics=("a", "b")), SCHEMA).partitions()


def test_small_topics_share_a_task_and_the_wanted_number_of_partitions_is_divided(sow: Sow) -> None:
    sow.records = {"a": 30, "b": 60, "c": 10}
    several = replace(options(), topic="", topic_pattern=".*")
    (together,) = planned(SnapshotReader(several, SCHEMA))
    assert [share.topic for share in together.shares] == ["a", "b", "c"]
    apart = planned(SnapshotReader(replace(several, partitions=3), SCHEMA))
    assert [[share.topic for share in one.shares] for one in apart] == [["a"], ["b"], ["c"]]


# ---- reading ----


def test_a_partition_that_spark_makes_up_is_empty(sow: Sow) -> None:
    assert list(SnapshotReader(options(), SCHEMA).read(InputPartition(0))) == []


def test_tasks_of_a_later_action_share_the_parts_of_one_new_export(sow: Sow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q8: the export may have ended, and the new one may have other parts."""
    sow.parts = (5, 5)
    reader = SnapshotReader(options(), SCHEMA)
    partitions = planned(reader)
    task = SimpleNamespace(getLocalProperty=lambda name: "7" if name == "spark.sql.execution.id" else None)
    monkeypatch.setattr(TaskContext, "get", lambda: task)
    sow.parts = (3, 3, 3)
    assert [rows(reader, one) for one in partitions] == [[{"id": 0}, {"id": 2}], [{"id": 1}]]
    assert sow.successors == [("export-1", "execution 7")] * 2
    assert sow.read == [("later", 0), ("later", 2), ("later", 1)]


def test_a_record_that_does_not_fit_is_named_by_its_key(sow: Sow) -> None:
    sow.documents = b'{"id":"odd"}'
    reader = SnapshotReader(options(), SCHEMA)
    (partition,) = planned(reader)
    with pytest.raises(SowSourceError) as caught:
        rows(reader, partition)
    assert caught.value.reason == "ROW_MALFORMED"
    assert caught.value.message.startswith("record 'k0' of topic orders, field /id: expected")
    dropping = SnapshotReader(options(mode="DROPMALFORMED"), SCHEMA)
    (partition,) = planned(dropping)
    assert list(dropping.read(partition)) == [], "no empty batch"


def test_the_key_of_a_record_is_found_in_the_batch_that_has_it() -> None:
    records = [packed([b"{}"] * 2), packed([b"{}"] * 3)]
    assert reading._key_at(iter(records), 3) == "'k1'"
    assert reading._key_at(iter(records), 5) == "?", "fewer came than before"


def test_an_export_is_renewed_while_it_is_read_and_until_it_is_gone() -> None:
    renewals: list[int] = []
    gone = threading.Event()

    def renew() -> None:
        renewals.append(1)
        if len(renewals) == 2:
            gone.set()
            raise NotFound("no export", reason="EXPORT_NOT_FOUND")
        raise Unavailable("away", reason="UNREACHABLE")

    with reading.renewed(renew, 0.0):
        assert gone.wait(60)
    for thread in threading.enumerate():
        if thread.name == "sow-renew":
            thread.join(60)
    assert len(renewals) == 2


# ---- snapshot=load ----


def test_exports_of_load_are_those_of_every_use_and_are_closed_with_a_load_that_fails(sow: Sow) -> None:
    sow.records = {"a": 30, "b": 60}
    several = replace(options(snapshot="load"), topic="", topic_pattern=".*")
    loaded = reading.opened_at_load(several)
    assert loaded.exports == (("a", "export-1"), ("b", "export-2"))
    assert (loaded.topics, loaded.topic_pattern) == (("a", "b"), None), "topics that come later have no export"
    reading.closed(loaded)
    assert sow.closed == ["export-1", "export-2"]
    sow.refuses["b"] = InvalidArgument("no", reason="PERMISSION_DENIED")
    with pytest.raises(SowSourceError, match="PERMISSION_DENIED"):
        reading.opened_at_load(several)
    assert sow.closed[2:] == ["export-3"]
