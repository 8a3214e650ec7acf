"""Streaming reads: the changes of a topic, in ranges of its journal.

An offset is a position, `{"epoch", "sequence"}`, with the name of the query's pin: the durable subscription that keeps
the journal for it. As the name is in the checkpoint, a query that is started again goes on under it. It also has the
time when the topic was created: another topic of the name, made since, has none of the changes still to be read.

Guarantees:

T1  A micro-batch is a range of positions, and reads the same changes whenever it is read, each change once. Those of
    one key are in one partition, in their order: so what publishes them as they come, into another topic, ends with
    the last one.
T2  What the query has not committed is kept in the journal while it runs, and for `pinLease` after, as far as the
    topic's limits allow. Where it is gone all the same, the query fails (DATA_LOST), or goes on with the earliest
    change there is and says so in the log (failOnDataLoss=false); never silently.
T3  Of a delete and an expiry the columns hold the record that went. A schema without `_op`, in which it would look like
    one that is there, gets puts only.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sow_client import ChangesPlan, Client
from sow_spark.connection import connect, retried
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError, translated
from sow_spark.options import PayloadForm, Reading
from sow_spark.reading import batches, renewed
from sow_spark.schemas import Layout, form_of, layout

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
except ImportError:  # PySpark 4.1 has neither limits nor AvailableNow; it asks for nothing but the head
    if not TYPE_CHECKING:
        ReadAllAvailable = ReadLimit = ReadMaxBytes = ReadMaxRows = SupportsTriggerAvailableNow = object

ENTRIES_PER_SHARE: Final = 20_000
"""Without the option `partitions` a micro-batch has a partition for so many entries,"""
SHARES: Final = 8
"""and at most so many: each goes through the whole range, and leaves the others' keys out."""
SHARES_MAX: Final = 1_000
"""More the server does not divide into."""

_log: Final = logging.getLogger("sow_spark")
_Answer = TypeVar("_Answer")


class Offset(TypedDict, total=False):
    """A position in the journal; `pin` where the user has not named the pin."""

    epoch: str
    sequence: int
    pin: str
    created: str
    """When the topic was created."""


def offset_of(bookmark: str, pin: str | None, created: str | None = None) -> Offset:
    """The offset of a bookmark, which is an epoch, a dot and a sequence."""
    epoch, _, sequence = bookmark.rpartition(".")
    offset = Offset(epoch=epoch, sequence=int(sequence))
    if pin is not None:
        offset["pin"] = pin
    if created is not None:
        offset["created"] = created
    return offset


def bookmark_of(offset: Offset) -> str:
    """The bookmark of an offset."""
    return f"{offset['epoch']}.{offset['sequence']}"


@dataclass(frozen=True, repr=False)
class ChangesPartition(InputPartition):
    """The changes of a micro-batch to a share of the keys."""

    start: str
    end: str
    share: int
    shares: int
    form: PayloadForm


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a topic. Spark keeps one in a process of its own for the life of a query; tasks have pickled copies, made
    before anything was called, and know what is in their partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        if reading.export is not None:
            raise SowSourceError("OPTION_INVALID", "option export: a stream reads changes, not an export")
        self._reading = reading
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false")
        self._life: ExitStack | None = None  # what stop() ends
        self._client: Client | None = None
        self._pinned: str | None = None  # the position that the pin is at
        self._form: PayloadForm | None = None
        self._target: str | None = None  # where AvailableNow ends
        self._head: str | None = None
        self._last: Offset | None = None  # for PySpark 4.1, which does not say where it is

    # ---- where a query begins, and how far it goes ----

    # Spark's stubs say `dict`; the keys are those of Offset.
    def initialOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """Where a new query begins, by `startingFrom`."""
        return self._begin(self._reading.starting_from)

    def _begin(self, where: str | datetime) -> Offset:
        pin = None if self._reading.pin_name else f"spark-{secrets.token_hex(8)}"
        created = self._created()
        offset = offset_of(self._plan(f"starting from {where}", where).start, pin, created)
        self._pin(offset)
        self._last = offset
        return offset

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """Where the next micro-batch ends: at the head, or sooner by the limit that Spark gives."""
        if start is None:
            return self._head_offset()
        created = self._created()
        self._check_created(start, created)
        self._pin(start)
        target = self._target
        if target is not None and offset_of(target, None)["epoch"] == start["epoch"]:
            if offset_of(target, None)["sequence"] <= start["sequence"]:
                return start
        plan = self._plan_from(start, target, *self._limits(limit))
        self._head = plan.head
        if not plan.entries and plan.start == bookmark_of(start) and start.get("created") == created:
            return start  # what happens in other topics is no batch
        return offset_of(plan.end, start.get("pin"), created)

    def _head_offset(self) -> Offset:
        """For PySpark 4.1, which says neither where the query is nor how far to go: the head. What a query that is
        started again has not committed is kept by its former pin until its first commit."""
        if self._last is None:
            return self._begin("latest")
        self._last = offset_of(
            self._plan("looking for the head", "latest").start, self._last.get("pin"), self._last.get("created")
        )
        return self._last

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """The limit of the options; of two of them Spark hears of one, and both count."""
        if self._reading.max_records_per_batch:
            return ReadMaxRows(self._reading.max_records_per_batch)
        if self._reading.max_bytes_per_batch:
            return ReadMaxBytes(self._reading.max_bytes_per_batch)
        return ReadAllAvailable()

    def _limits(self, limit: ReadLimit | None) -> tuple[int, int]:
        """Entries and bytes of a micro-batch, 0 for any number."""
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, self._reading.max_bytes_per_batch
        if isinstance(limit, ReadMaxBytes):
            return self._reading.max_records_per_batch, limit.max_bytes
        return 0, 0

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Settles where the query ends: at the present head."""
        self._target = self._plan("looking for the head", "latest").start

    def reportLatestOffset(self) -> Offset | None:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The head, for the query's progress."""
        return None if self._head is None else offset_of(self._head, None)

    # ---- what a micro-batch reads ----

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # type: ignore[override]
        """The changes after `start` up to `end`, in parts."""
        if bookmark_of(start) == bookmark_of(end):
            return []
        self._check_created(end, self._created())
        self._pin(start)  # a query that is started again begins with this, if its last batch was not finished
        form = self._payload_form()
        plan = self._plan_from(start, bookmark_of(end))
        if not plan.entries:
            return []
        # A batch that is run again has to have the same partitions: they follow from the range and the options alone.
        shares = min(self._reading.partitions or min(plan.entries // ENTRIES_PER_SHARE + 1, SHARES), SHARES_MAX)
        return [ChangesPartition(plan.start, plan.end, share, shares, form) for share in range(shares)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        assert isinstance(partition, ChangesPartition), "partitions() makes no others"
        reading = self._reading
        decoder = Decoder(self._layout, partition.form, reading.mode, only_puts=not self._layout.has_op)
        with connect(reading.connecting) as client:

            def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
                return client.read_changes(
                    reading.topic,
                    partition.start,
                    partition.end,
                    filter=reading.filter or None,
                    columns=columns,
                    lines=lines,
                    batch_size=reading.batch_size,
                    # What records were before the batch is not looked up, so that it is the same when it is read again.
                    history=partition.start if reading.filter else None,
                    share=(partition.share, partition.shares),
                )

            doing = f"reading the changes of topic {reading.topic} from {partition.start} to {partition.end}"
            with translated(doing):
                yield from batches(decoder, reading.topic, records, rows=reading.batch_size)

    def commit(self, end: Offset) -> None:  # type: ignore[override]
        """Lets go of the journal up to `end`."""
        try:
            self._pin(end)
        except SowSourceError as error:
            # The next call will tell whether the server is there; until then the journal keeps more than it must.
            _log.warning("%s", error)

    def stop(self) -> None:
        """Ends the renewing of the pin, which stays for `pinLease`: the query may be started again."""
        if self._life is not None:
            self._life.close()
            self._life = self._client = None

    # ---- the server ----

    def _call(self, doing: str, call: Callable[[Client], _Answer]) -> _Answer:
        """An answer of the server, asked again while it is not there."""
        if self._client is None:
            self._life = ExitStack()
            self._client = self._life.enter_context(connect(self._reading.connecting))
        client = self._client
        with translated(f"{doing}, topic {self._reading.topic}"):
            return retried(self._reading.connecting, lambda: call(client))

    def _plan(
        self,
        doing: str,
        start: str | datetime,
        end: str | None = None,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> ChangesPlan:
        return self._call(
            doing,
            lambda client: client.plan_changes(
                self._reading.topic, start=start, end=end, max_entries=max_entries, max_bytes=max_bytes
            ),
        )

    def _plan_from(self, start: Offset, end: str | None, max_entries: int = 0, max_bytes: int = 0) -> ChangesPlan:
        """The range after an offset; where the journal does not reach back to it, after the earliest position, if that
        is allowed."""
        try:
            return self._plan("planning a micro-batch", bookmark_of(start), end, max_entries, max_bytes)
        except SowSourceError as error:
            self._check_loss(error, start)
        earliest = self._plan("looking for the earliest change", "earliest", None, max_entries, max_bytes)
        if end is None:
            return earliest
        there, wanted = offset_of(earliest.start, None), offset_of(end, None)
        if there["epoch"] != wanted["epoch"] or there["sequence"] >= wanted["sequence"]:
            # All of the range is gone.
            return ChangesPlan(end, end, earliest.head, earliest.earliest, 0, 0, earliest.entries_left, ())
        return self._plan("planning a micro-batch", earliest.start, end, max_entries, max_bytes)

    def _created(self) -> str:
        topic = self._call("looking at it", lambda client: client.describe_topic(self._reading.topic))
        return topic.create_time.isoformat()

    def _check_created(self, offset: Offset, created: str) -> None:
        """Raises DATA_LOST, or says so in the log, where the topic is not the one of the offset any more."""
        if offset.get("created", created) != created:
            self._lost(offset, f"the topic was deleted, and another one created at {created}")

    def _check_loss(self, error: SowSourceError, start: Offset) -> None:
        """Raises DATA_LOST, or says so in the log; any other error is raised as it is."""
        if error.reason not in _LOSSES:
            raise error
        self._lost(start, error.reason)

    def _lost(self, start: Offset, why: str) -> None:
        """Raises DATA_LOST, or says so in the log."""
        lost = SowSourceError(
            "DATA_LOST",
            f"changes of topic {self._reading.topic} after {bookmark_of(start)} are gone ({why})",
            "start a query with a new checkpoint, from a snapshot or from earliest; "
            "or give failOnDataLoss=false to go on with the earliest change there is",
        )
        if self._reading.fail_on_data_loss:
            raise lost
        _log.warning("%s: going on with the earliest change there is", lost.message)

    def _payload_form(self) -> PayloadForm:
        if self._form is None:
            topic = self._call("reading", lambda client: client.describe_topic(self._reading.topic))
            self._form = form_of(self._reading, self._layout, topic.settings.message_type)
        return self._form

    def _pin(self, offset: Offset) -> None:
        """Keeps the journal after an offset, under the query's name, and goes on doing so."""
        name = self._reading.pin_name or offset.get("pin")
        if name is None:
            return  # a checkpoint of a query that had named its pin, and does not any more
        bookmark = bookmark_of(offset)
        if bookmark == self._pinned:
            return  # it is renewed in the background
        lease = f"{self._reading.pin_lease_micros}us"
        try:
            self._call(
                "keeping the journal",
                lambda client: client.pin_journal(self._reading.topic, name, bookmark, idle_ttl=lease),
            )
        except SowSourceError as error:
            self._check_loss(error, offset)
            return
        begin, self._pinned = self._pinned is None, bookmark
        if begin:
            self._renew(name)

    def _renew(self, name: str) -> None:
        """Renews the pin in the background: a micro-batch may take longer than its lease."""
        client, life = self._client, self._life
        assert client is not None, "it has just been called"
        assert life is not None, "it owns the client"

        def again() -> None:
            position = self._pinned
            if position is not None:
                client.pin_journal(self._reading.topic, name, position)

        life.enter_context(renewed(again, self._reading.pin_lease_micros / 1e6))


_LOSSES: Final = frozenset({"BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE", "RESYNC_REQUIRED"})
