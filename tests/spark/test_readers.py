"""Readers of snapshots with a scripted client: which exports they open, and what each task reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql.datasource import EqualTo, Filter, InputPartition
from pyspark.sql.types import LongType, StringType, StructType

from sow_client import Export, ExportOf, InvalidArgument, NotFound, PackedRecords, SowError, TopicSettings, Unavailable
from sow_spark import over_cells, reading
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

    def cells(self) -> dict[str, Sow]:
        return {"": self}

    @property
    def here(self) -> Sow:
        return self

    def __init__(self) -> None:
        self.records: dict[str, int] = {"orders": 10}
        self.parts: tuple[int, ...] = (10,)
        self.opened: list[list[tuple[str, str | None]]] = []
        """By export: its topics, each with its filter."""
        self.successors: list[tuple[str, str]] = []
        self.read: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self.asked: list[str] = []
        self.given: Sequence[str] = ("orders",)
        """The topics of an export that somebody else has opened."""
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

    def open_export(self, exported: Sequence[ExportOf], **options: Any) -> Export:
        for key in [key for one in exported for key in (one.filter, one.topic)]:
            if key in self.refuses:
                raise self.refuses[key]
        topics = [one.topic for one in exported]
        if options.get("successor_of"):
            self.successors.append((options["successor_of"], options["reader"]))
            return self.export(topics, "later")
        self.opened.append([(one.topic, one.filter) for one in exported])
        return self.export(topics, f"export-{len(self.opened)}")

    def export(self, topics: Sequence[str], name: str) -> Export:
        """Each topic has the same parts."""
        first, *others = topics
        of_parts = tuple([topic for topic in topics for _ in self.parts]) if others else ()
        at, lease = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=1)
        return Export(name, first, None, at, lease, self.parts * len(topics), tuple(others), of_parts)

    def renew_export(self, name: str) -> Export:
        return self.export(self.given, name)

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

    for module in (over_cells, reading):
        monkeypatch.setattr(module, "connect", connect)
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
    assert sow.opened == [[("orders", "/id > 1")]]
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
    assert sow.opened == [[("orders", "(/a = 1) AND /id = 5")]]
    sow.refuses["(/a = 1) AND /id = 5"] = InvalidArgument("no such operator", reason="FILTER_INVALID")
    (partition,) = planned(reader)
    assert sow.opened[1:] == [[("orders", "/a = 1")]]
    assert [one.filter for one in partition.exported] == ["/a = 1"]
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
    assert (sow.opened, partition.export_id) == ([], "given")
    sow.records["quotes"] = 1
    with pytest.raises(SowSourceError, match="given is an export of topic orders, not quotes"):
        SnapshotReader(options(export="given", topic="quotes"), SCHEMA).partitions()


def test_a_frame_reads_its_topics_of_an_export_of_several(sow: Sow) -> None:
    """Q8: so that several frames show one instant."""
    sow.records = {"a": 10, "b": 10, "c": 10, "d": 10}
    sow.given = ("a", "b", "c")
    sow.parts = (5, 5)
    for topics, parts in (("b", [2, 3]), ("c,a", [4, 5, 0, 1])):
        reader = SnapshotReader(parse_reading({"topics": topics, "export": "given"}), SCHEMA)
        assert [row["id"] for one in planned(reader) for row in rows(reader, one)] == parts
    with pytest.raises(SowSourceError, match="given is an export of topics a, b, c, not d"):
        SnapshotReader(parse_reading({"topics": "a,d", "export": "given"}), SCHEMA).partitions()


def test_a_topic_that_is_deleted_while_its_pattern_is_read_has_no_rows(sow: Sow) -> None:
    sow.records = {"a": 1, "b": 1}
    sow.refuses["a"] = NotFound("no topic", reason="TOPIC_NOT_FOUND", details={"topic": "a"})
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


def test_several_topics_are_in_one_export(sow: Sow) -> None:
    sow.records = {"a": 30, "b": 60}
    several = replace(options(filter="/id > 1"), topic="", topic_pattern=".*")
    planned(SnapshotReader(several, SCHEMA))
    assert sow.opened == [[("a", "/id > 1"), ("b", "/id > 1")]]


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


def test_tasks_of_several_topics_share_the_parts_of_each_in_a_later_export(
    sow: Sow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8: all topics of an action are of one export, which has other parts, and parts of a topic that had none."""
    sow.records = {"a": 30, "b": 60}
    sow.parts = ()
    reader = SnapshotReader(replace(options(), topic="", topic_pattern=".*"), SCHEMA)
    (partition,) = planned(reader)
    assert rows(reader, partition) == []
    task = SimpleNamespace(getLocalProperty=lambda name: "7" if name == "spark.sql.execution.id" else None)
    monkeypatch.setattr(TaskContext, "get", lambda: task)
    sow.parts = (3, 3)
    assert [row["id"] for row in rows(reader, partition)] == [0, 1, 2, 3]
    assert sow.successors == [("export-1", "execution 7")], "once for all topics"


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


def test_the_export_of_load_is_that_of_every_use(sow: Sow) -> None:
    sow.records = {"a": 30, "b": 60}
    several = replace(options(snapshot="load"), topic="", topic_pattern=".*")
    (loaded,) = reading.opened_at_load(several)
    assert loaded.export == "export-1"
    assert (loaded.topics, loaded.topic_pattern) == (("a", "b"), None), "topics that come later are not in it"
    reading.closed([loaded])
    assert sow.closed == ["export-1"]
    sow.refuses["b"] = InvalidArgument("no", reason="PERMISSION_DENIED")
    with pytest.raises(SowSourceError, match="PERMISSION_DENIED"):
        reading.opened_at_load(several)
