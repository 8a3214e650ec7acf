"""Streaming reads: the changes of one topic or several, in ranges of the journal.

An offset is a position, `{"epoch", "sequence"}`, which all topics share, with the name of the query's pin: the durable
subscription that keeps the journal of a topic for it. Each topic has one of that name. The name is in the checkpoint,
so a restarted query continues under it. An offset also has the time of the creation of each topic: a topic of the same
name that was created since then has none of the changes still to be read.

Guarantees:

    [1]  A micro-batch is a range of positions. It gives the same changes whenever it is read, each change once. The
         changes of one key are in one partition, in their order. So a query that publishes them to another topic as
         they come ends with the last one of each key.
    [2]  The journal keeps uncommitted changes while the query runs, and for `pinLease` afterwards, as far as the
         topic's limits allow. If they are gone all the same, the query fails (DATA_LOST), or continues with the
         earliest change and logs this (failOnDataLoss=false). It never skips changes silently.
    [3]  For a delete and an expiry the columns hold the removed record. A schema without `_op` gets puts only, because
         a removed record would look like a present one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sow_client import ChangesPlan, Client, SowError, Topic
from sow_spark.connection import connect, kept, retried
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError, translated
from sow_spark.options import Connecting, PayloadForm, Reading
from sow_spark.reading import batches, renewed
from sow_spark.schemas import Layout, form_of, layout, selected
from sow_spark.stream_offsets import Offset, bookmark_of, offset_of, sequence_of, topics_of

if TYPE_CHECKING:
    import pyarrow as pa

    from sow_client import PackedColumn, PackedRecords

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # PySpark 4.1
    if not TYPE_CHECKING:
        from sow_spark.read_limits import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

        SupportsTriggerAvailableNow = object

ENTRIES_PER_SHARE: Final = 20_000
"""Without the option `partitions` a micro-batch has one partition for this many entries, up to `SHARES` partitions."""
SHARES: Final = 8
"""There are not more, because each partition reads the whole range and skips the keys of the others."""
SHARES_MAX: Final = 1_000
"""The server's limit."""

_log: Final = logging.getLogger("sow_spark")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, repr=False)
class ChangesPartition(InputPartition):
    """The changes of a micro-batch to a share of the keys of a topic."""

    topic: str
    start: str
    end: str
    share: int
    shares: int
    form: PayloadForm
    connecting: Connecting


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a topic. Spark keeps one reader in a separate process for the life of a query. Tasks have pickled copies,
    made before any call, and know only their partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        if reading.export is not None:
            raise SowSourceError("OPTION_INVALID", "option export: a stream reads changes, not an export")
        self._reading = reading
        self._connecting = reading.connecting
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false", new_fields=reading.new_fields)
        self._life: ExitStack | None = None  # closed by stop()
        self._client: Client | None = None
        self._pinned: dict[str, str] = {}  # the position of the pin of each topic
        self._renewing = False
        self._target: str | None = None  # the end for AvailableNow
        self._head: str | None = None
        # For PySpark 4.1, which passes no position. It asks for the end of the first micro-batch before its start, and
        # after a restart it first plans the last micro-batch again.
        self._initial: Offset | None = None
        self._last: Offset | None = None

    # ---- the offsets of a query ----

    # Spark's stubs say `dict`; the keys are those of Offset.
    def initialOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The start of a new query, by `startingFrom`."""
        if self._initial is None:
            self._initial = self._begin(self._reading.starting_from)
        return self._initial

    def _begin(self, where: str | datetime) -> Offset:
        present = self._present()
        starts = [self._plan(name, f"starting from {where}", where).start for name in present]
        start = min(starts, key=sequence_of)
        offset = offset_of(start, None if self._reading.pin_name else f"spark-{secrets.token_hex(8)}")
        # Topics whose journals begin later are read from there: older changes were not asked for.
        lenient = where == "earliest" or isinstance(where, datetime)
        self._stamp(offset, {} if lenient and self._reading.several else present)
        for name, bookmark in zip(present, starts, strict=True):
            self._pin(name, offset, start if where == "latest" else bookmark)
        return offset

    def _stamp(self, offset: Offset, present: Mapping[str, Topic]) -> Offset:
        """The offset, with the topics that are read from there."""
        created = {name: topic.create_time.isoformat() for name, topic in present.items()}
        if self._reading.several:
            offset["topics"] = created
        else:
            offset["created"] = created[self._reading.topic]
        return offset

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The end of the next micro-batch: the head, or an earlier position by Spark's limit."""
        if start is None:  # PySpark 4.1 has no limits either, so those of the options count
            start, limit = self._last or self.initialOffset(), self.getDefaultReadLimit()
        self._last = self._next(start, *self._limits(limit))
        return self._last

    def _next(self, start: Offset, max_entries: int, max_bytes: int) -> Offset:
        """The end of the micro-batch after `start`; `start` itself if there is none."""
        present = self._present()
        self._check_created(start, present)
        self._pin_all(start)
        end = self._target
        if end is not None and offset_of(end)["epoch"] == start["epoch"] and sequence_of(end) <= start["sequence"]:
            return start
        if not self._reading.several:
            plan = self._plan_from(self._reading.topic, start, end, max_entries, max_bytes)
            self._head, end, plans = plan.head, plan.end, [plan]
        else:
            end, plans = self._next_of_several(start, present, end, max_entries, max_bytes)
        offset = self._stamp(offset_of(end, start.get("pin")), present)
        idle = all(plan.start == bookmark_of(start) and not plan.entries for plan in plans)
        if idle and topics_of(offset, "") == topics_of(start, ""):
            return start  # changes of other topics make no batch
        return offset

    def _next_of_several(
        self, start: Offset, present: Mapping[str, Topic], end: str | None, max_entries: int, max_bytes: int
    ) -> tuple[str, list[ChangesPlan]]:
        """The end of a micro-batch of all topics, and the ranges of each without limits. A limit is divided among the
        topics by what each has, and the first one that reaches its part ends the micro-batch for all."""
        plans: dict[str, ChangesPlan] = {}
        for name in present:
            plan = plans[name] = self._plan_from(name, start, end)
            if name not in start.get("topics", {}):
                self._pin(name, start, plan.start)
            if end is None:
                self._head = end = plan.head  # one end for all, although more is written meanwhile
        assert end is not None, "there is a topic"
        entries, size = sum(plan.entries for plan in plans.values()), sum(plan.bytes for plan in plans.values())
        if 0 < max_entries < entries or 0 < max_bytes < size:
            limited = [
                self._plan_from(
                    name,
                    start,
                    end,
                    max(1, max_entries * plan.entries // entries) if max_entries else 0,
                    max(1, max_bytes * plan.bytes // size) if max_bytes and size else 0,
                ).end
                for name, plan in plans.items()
                if plan.entries
            ]
            end = min(limited, key=sequence_of)
        return end, list(plans.values())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """The limit of the options. If there are two, Spark is told one, and both are applied."""
        if self._reading.max_records_per_trigger:
            return ReadMaxRows(self._reading.max_records_per_trigger)
        if self._reading.max_bytes_per_trigger:
            return ReadMaxBytes(self._reading.max_bytes_per_trigger)
        return ReadAllAvailable()

    def _limits(self, limit: ReadLimit | None) -> tuple[int, int]:
        """Entries and bytes of a micro-batch, 0 for any number."""
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, self._reading.max_bytes_per_trigger
        if isinstance(limit, ReadMaxBytes):
            return self._reading.max_records_per_trigger, limit.max_bytes
        return 0, 0

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Sets the end of the query: the present head."""
        name = next(iter(self._present()))
        self._target = self._plan(name, "looking for the head", "latest").start

    def reportLatestOffset(self) -> Offset | None:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The head, for the query's progress."""
        return None if self._head is None else offset_of(self._head)

    # ---- the changes of a micro-batch ----

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # type: ignore[override]  # Spark says dict
        """The changes after `start` up to `end`, in parts."""
        self._last = end
        if bookmark_of(start) == bookmark_of(end):
            return []
        present = self._present()
        self._check_created(end, present)
        self._pin_all(start)  # a restarted query begins with this call if its last batch was not finished
        found: list[InputPartition] = []
        for name in topics_of(end, self._reading.topic):
            if name not in present:
                continue  # its loss has been told
            plan = self._plan_from(name, start, bookmark_of(end))
            if not plan.entries:
                continue
            form = self._payload_form(present[name])
            # A repeated batch must have the same partitions, so they depend only on the range and the options.
            shares = min(self._reading.partitions or min(plan.entries // ENTRIES_PER_SHARE + 1, SHARES), SHARES_MAX)
            found += [
                ChangesPartition(name, plan.start, plan.end, share, shares, form, self._connecting)
                for share in range(shares)
            ]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        assert isinstance(partition, ChangesPartition), "partitions() makes no others"
        reading, topic = self._reading, partition.topic
        decoder = Decoder(self._layout, partition.form, reading.mode, topic, only_puts=not self._layout.has_op)
        with connect(partition.connecting) as client:

            def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
                return client.read_changes(
                    topic,
                    partition.start,
                    partition.end,
                    filter=reading.filter or None,
                    columns=columns,
                    lines=lines,
                    batch_size=reading.batch_size,
                    # No previous record from before the batch is looked up, so a repeated read gives the same changes.
                    history=partition.start if reading.filter else None,
                    share=(partition.share, partition.shares),
                )

            doing = f"reading the changes of topic {topic} from {partition.start} to {partition.end}"
            with translated(doing):
                yield from batches(decoder, topic, records, rows=reading.batch_size)

    def commit(self, end: Offset) -> None:  # type: ignore[override]  # Spark says dict
        """Releases the journal up to `end`."""
        try:
            self._pin_all(end)
        except SowSourceError as error:
            # The next call shows whether the server is reachable. Until then the journal keeps more than necessary.
            _log.warning("%s", error)

    def stop(self) -> None:
        """Stops renewing the pin, which stays for `pinLease`: the query may be restarted."""
        if self._life is not None:
            self._life.close()
            self._life = self._client = None

    # ---- the server ----

    def _call(self, doing: str, call: Callable[[Client], _Answer]) -> _Answer:
        """The result of a call, which is repeated while the server is unreachable."""
        if self._client is None:
            self._life = ExitStack()
            self._client = self._life.enter_context(connect(self._connecting))
        client = self._client
        with translated(f"{doing}, {self._reading.named}"):
            answer = retried(self._connecting, lambda: call(client))
        if client.instance is not None:
            # It is one of several. The offsets are bookmarks of this one, so the query waits for it if it goes away.
            self._connecting = kept(self._connecting, client)
            self.stop()
        return answer

    def _plan(
        self,
        topic: str,
        doing: str,
        start: str | datetime,
        end: str | None = None,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> ChangesPlan:
        return self._call(
            doing,
            lambda client: client.plan_changes(
                topic, start=start, end=end, max_entries=max_entries, max_bytes=max_bytes
            ),
        )

    def _plan_from(
        self, topic: str, start: Offset, end: str | None, max_entries: int = 0, max_bytes: int = 0
    ) -> ChangesPlan:
        """The range of a topic after an offset. If its journal does not reach back to it, the range after the earliest
        position, if the topic is new to the query, or the options allow that."""
        try:
            return self._plan(topic, "planning a micro-batch", bookmark_of(start), end, max_entries, max_bytes)
        except SowSourceError as error:
            is_new = topic not in topics_of(start, self._reading.topic)
            if not (is_new and error.reason == "BOOKMARK_TOO_OLD"):
                self._check_loss(error, topic, start)
        earliest = self._plan(topic, "looking for the earliest change", "earliest", None, max_entries, max_bytes)
        if end is None:
            return earliest
        there, wanted = offset_of(earliest.start), offset_of(end)
        if there["epoch"] != wanted["epoch"] or there["sequence"] >= wanted["sequence"]:
            # All of the range is gone.
            return ChangesPlan(end, end, earliest.head, earliest.earliest, 0, 0, earliest.entries_left, ())
        return self._plan(topic, "planning a micro-batch", earliest.start, end, max_entries, max_bytes)

    def _present(self) -> dict[str, Topic]:
        """The topics that are there now, by name."""
        if not self._reading.several:
            name = self._reading.topic
            return {name: self._call("looking at it", lambda client: client.describe_topic(name))}
        topics = self._call("looking at them", lambda client: client.topics())
        return {topic.name: topic for topic in selected(topics, self._reading)}

    def _check_created(self, offset: Offset, present: Mapping[str, Topic]) -> None:
        """Raises or logs DATA_LOST if a topic is no longer the one of the offset."""
        for name, created in topics_of(offset, self._reading.topic).items():
            topic = present.get(name)
            if topic is None:
                if self._reading.topic_pattern is not None:
                    self._lost(name, offset, "the topic was deleted")
            elif created is not None and topic.create_time.isoformat() != created:
                self._lost(
                    name,
                    offset,
                    f"the topic was deleted, and another one created at {topic.create_time.isoformat()}",
                )

    def _check_loss(self, error: SowSourceError, topic: str, start: Offset) -> None:
        """Raises or logs DATA_LOST. Any other error is raised unchanged."""
        if error.reason not in _LOSSES:
            raise error
        self._lost(topic, start, error.reason)

    def _lost(self, topic: str, start: Offset, why: str) -> None:
        """Raises or logs DATA_LOST."""
        lost = SowSourceError(
            "DATA_LOST",
            f"changes of topic {topic} after {bookmark_of(start)} are gone ({why})",
            "start a query with a new checkpoint, from a snapshot or from earliest; "
            "or give failOnDataLoss=false to continue with the earliest change",
        )
        if self._reading.fail_on_data_loss:
            raise lost
        _log.warning("%s: continuing with the earliest change", lost.message)

    def _payload_form(self, topic: Topic) -> PayloadForm:
        return form_of(replace(self._reading, topic=topic.name), self._layout, topic.settings.message_type)

    # ---- pins ----

    def _pin_all(self, offset: Offset) -> None:
        """Pins the journal of each topic that is read from an offset."""
        for name in topics_of(offset, self._reading.topic):
            self._pin(name, offset, bookmark_of(offset))

    def _pin(self, topic: str, offset: Offset, bookmark: str) -> None:
        """Pins the journal of a topic after a bookmark, under the query's pin, and renews the pin from then on."""
        name = self._reading.pin_name or offset.get("pin")
        if name is None:
            return  # a checkpoint of a query that named its pin then, and does not now
        if bookmark == self._pinned.get(topic):
            return  # it is renewed in the background
        lease = f"{self._reading.pin_lease_micros}us"
        try:
            self._call("keeping the journal", lambda client: client.pin_journal(topic, name, bookmark, idle_ttl=lease))
        except SowSourceError as error:
            if error.reason == "TOPIC_NOT_FOUND" and self._reading.several:
                return  # its loss has been told
            self._check_loss(error, topic, offset)
            return
        self._pinned = {**self._pinned, topic: bookmark}  # the thread that renews iterates over the former one
        if not self._renewing:
            self._renewing = True
            self._renew(name)

    def _renew(self, name: str) -> None:
        """Renews the pins in the background: a micro-batch may take longer than their lease."""
        client, life = self._client, self._life
        assert client is not None, "it has just been called"
        assert life is not None, "it owns the client"

        def again() -> None:
            for topic, position in self._pinned.items():
                with suppress(SowError):  # this topic may be gone, and the others need their pins
                    client.pin_journal(topic, name, position)

        life.enter_context(renewed(again, self._reading.pin_lease_micros / 1e6))


_LOSSES: Final = frozenset({"BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE", "RESYNC_REQUIRED"})
