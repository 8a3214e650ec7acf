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
    [3]  For a delete and an expiry the columns hold the removed record. Where that may not be shown, or was never here,
         the fields are null (rules A4, F18). A schema without `_op` gets puts only, because a removed record would look
         like a present one.
    [4]  If the instance is lost, the query goes on at another one that knows its position, and misses nothing; some
         changes come again (rule F18). A micro-batch that is repeated there lacks what that instance has not received.
         So the first instance must not go on behind its end: a pin at the other one notes the move until the next
         micro-batch is finished. A new reader asks the other instances for the note. Where there is one, or an instance
         does not answer, it reads the last micro-batch again.
    [5]  A query whose options do not fit a topic, or whose journals cannot be pinned, does not start, and leaves no
         pin.
    [6]  If a topic moves to another cell, the query of this topic goes on there as at another instance. It knows marks
         of its offset, or of a later position up to which no change lies. A task that is under way reads its range
         there once more, up to the head, and so does a micro-batch that is repeated there. By then all changes of the
         former cell are there (rule C16), so the query may go on behind its end in either cell.
    [7]  A topic of several goes along, too (`CellsReader`). It has marks of its own where another cell knows its
         position, and in the new cell a position of its own, until the micro-batch after the move has been read.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sow_client import ChangesPlan, Client, Topic
from sow_spark.connection import connect, in_cell, retried
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError, translated
from sow_spark.options import Connecting, PayloadForm, Reading
from sow_spark.read_limits import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, SupportsTriggerAvailableNow
from sow_spark.reading import batches
from sow_spark.schemas import Layout, form_of_topic, layout
from sow_spark.stream_instances import ELSEWHERE, Elsewhere, InstanceInUse, cell_at
from sow_spark.stream_offsets import (
    Offset,
    apart,
    bookmark_of,
    epoch_of,
    is_behind,
    joined,
    marked,
    moved_to,
    offset_of,
    plain,
    sequence_of,
    sources_of,
    topics_of,
)
from sow_spark.stream_pins import Pins, check_loss
from sow_spark.stream_plans import Plans

if TYPE_CHECKING:
    import pyarrow as pa

    from sow_client import PackedColumn, PackedRecords

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
    elsewhere: bool
    """True if changes were read at another instance before that this one may lack."""
    after: str
    """The bookmark at which the micro-batch begins, with its marks."""


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a topic. Spark keeps one reader in a separate process for the life of a query. Tasks have pickled copies,
    made before any call, and know only their partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        self._reading = reading
        self._instance = InstanceInUse(reading.connecting, reading.named, "" if reading.several else reading.topic)
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false", new_fields=reading.new_fields)
        self._checked: set[str] = set()  # topics that the schema and the filter fit
        self._plans = Plans(reading, self._instance)
        self._pins = Pins(reading, self._instance)
        self._read_at: tuple[str, str] | None = None  # the end of the last micro-batch, and the instance that read it
        self._target: str | None = None  # the end for AvailableNow
        self.left: Mapping[str, str] = {}
        """With several topics of a cell: those of the last micro-batch that are not there any more, each with the
        bookmark after which it is to be read in another cell [7]."""
        self.planned = (0, 0)
        """Entries and bytes of the micro-batch that was planned last."""
        self._made: list[str] = []  # topics with a pin that the start has made
        self._idle: tuple[str, str, Mapping[str, str]] | None = None
        """The end of the last micro-batch, a later bookmark up to which no change of the topics lies, and those of
        topics that have one of their own there."""
        self._head: str | None = None
        self._behind = (0, 0)  # entries behind the end of the last micro-batch, and the age of the first in seconds
        # For PySpark 4.1, which passes no position. It asks for the end of the first micro-batch before its start, and
        # after a restart it first plans the last micro-batch again.
        self._initial: Offset | None = None
        self._last: Offset | None = None

    @property
    def present(self) -> Mapping[str, Topic]:
        """The topics that were there at the last look, by name."""
        return self._plans.present

    # ---- the offsets of a query ----

    # Spark's stubs say `dict`; the keys are those of Offset.
    def initialOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The start of a new query, by `startingFrom`."""
        if self._initial is None:
            where = self._reading.starting_from
            assert isinstance(where, str | datetime), "bookmarks are of a cell each"
            self._initial = self.begin(where, f"spark-{secrets.token_hex(8)}")
        return self._initial

    def begin(self, where: str | datetime, pin: str) -> Offset:
        """The start of a query here. `pin`: the name of its pins, unless the options have one."""
        epoch = epoch_of(where) if isinstance(where, str) else None
        return self._instance.anywhere(epoch, lambda: self._begin(where, pin))

    def withdraw(self, offset: Offset) -> None:
        """Removes the pins that `begin` has made: the query does not start [5]."""
        self._pins.remove(offset, self._made)

    def _begin(self, where: str | datetime, pin: str) -> Offset:
        present = self._plans.topics()
        starts = [self._start_of(name, where) for name in present]
        start = min(starts, key=sequence_of)
        offset = offset_of(start, None if self._reading.pin_name else pin)
        # Topics whose journals begin later are read from there: older changes were not asked for.
        lenient = where == "earliest" or isinstance(where, datetime)
        self._stamp(offset, {} if lenient and self._reading.several else present)
        for topic, bookmark in zip(present.values(), starts, strict=True):
            self._check_options(topic, bookmark)
        self._made = []
        try:
            for name, bookmark in zip(present, starts, strict=True):
                if self._pins.hold(name, offset, start if where == "latest" else bookmark):
                    self._made.append(name)
        except SowSourceError:
            self.withdraw(offset)
            raise
        return offset

    def _start_of(self, topic: str, where: str | datetime) -> str:
        """The position from which a new query reads a topic. If its journal does not reach back to a bookmark, or the
        bookmark is of an earlier topic of the same name, changes are lost [2]."""
        try:
            return self._plans.plan(topic, f"starting from {where}", where).start
        except SowSourceError as error:
            if error.reason == "BOOKMARK_OTHER_EPOCH" and self._instance.several:
                raise  # the instance of the bookmark may come back
            check_loss(error, self._reading, topic, str(where))
        return self._plans.plan(topic, "looking for the earliest change", "earliest").start

    def _check_options(self, topic: Topic, at: str) -> None:
        """Raises SowSourceError if the schema or the filter does not fit a topic [5]. Each topic is checked once. `at`:
        a position in its journal."""
        if topic.name in self._checked:
            return
        form_of_topic(self._reading, self._layout, topic)
        if (text := self._reading.filter) or self._reading.parameters:
            # The range is empty, so only the filter is looked at.
            self._instance.call(
                "checking the filter",
                lambda client: list(
                    client.read_changes(
                        topic.name,
                        at,
                        at,
                        filter=text,
                        parameters=self._reading.parameters,
                        columns=("version",),
                        history=at,
                    )
                ),
            )
        self._checked.add(topic.name)

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
        check_kind(self._reading, start)
        return self.next_end(start, *self.limits(limit))

    def next_end(self, start: Offset, max_entries: int, max_bytes: int) -> Offset:
        """The end of the micro-batch after `start`, with at most so many entries and bytes; 0: any number."""
        self._last = self._instance.anywhere(start["epoch"], lambda: self._next(start, max_entries, max_bytes))
        return self._last

    def _next(self, start: Offset, max_entries: int, max_bytes: int) -> Offset:
        """The end of the micro-batch after `start`; `start` itself if there is none."""
        self.planned = 0, 0
        at = begin = start if self._is_read(start) else moved_to(start, start["after"], start.get("each_after"))
        if at is start and self._idle is not None and self._idle[0] == bookmark_of(start):
            begin = moved_to(start, *self._idle[1:])
        self._look_for_left(begin, {})  # in case none is there
        if self._target is not None and self._instance.epoch not in (None, offset_of(self._target)["epoch"]):
            self._target = self._present_head()
        end = self._target
        if end is None and self._reading.topic_pattern is not None:
            # The end is known before the topics are listed: a topic that comes later has all of its changes behind it.
            # Otherwise the changes between its creation and the end would be in no micro-batch.
            end = self._present_head()
        present = self._plans.topics()
        self._look_for_left(begin, present)
        if not self._plans.is_foreign(begin):
            self._plans.check_created(begin, present)
            self._pins.hold_all(at)  # where a restarted query begins
        if end is not None and is_behind(bookmark_of(begin), end):
            come = apart(begin) & present.keys()
            if all(is_behind(plain(marked(begin, name)), end) for name in come):
                return start
        end, plans = self._plans.ends(begin, present, end, max_entries, max_bytes)
        self._head = max((plan.head for plan in plans.values()), key=sequence_of)
        self._behind = (
            sum(plan.entries_left for plan in plans.values()),
            max((round(plan.left_age.total_seconds()) for plan in plans.values() if plan.left_age), default=0),
        )
        offset = self._stamp(offset_of(end, start.get("pin")), present)
        marks = joined([plan.marks for plan in plans.values()])
        each = self._each(end, begin, plans, marks)
        idle = all(plan.start == bookmark_of(begin) and not plan.entries for plan in plans.values())
        if idle and at is start and topics_of(offset, "") == topics_of(start, ""):
            if marks or each:  # all up to there was read, as nothing lies between
                self._idle = bookmark_of(start), end + (marks or begin.get("marks", "")), each
            return start  # changes of other topics make no batch
        self.planned = sum(plan.entries for plan in plans.values()), sum(plan.bytes for plan in plans.values())
        for name, plan in plans.items():
            self._check_options(present[name], plan.start)
            if self._plans.is_foreign(begin) or name not in topics_of(begin, self._reading.topic):
                self._pins.hold(name, begin, plan.start)
        if each:
            offset["each"] = each
        if self._instance.several or marks or each or "marks" in begin or "each" in begin:
            self._mark(offset, begin, marks)
            idle_now = {name: each[name] for name, plan in plans.items() if name in each and not plan.entries}
            if after := {**begin.get("each", {}), **idle_now}:
                offset["each_after"] = after
        return offset

    def _each(self, end: str, begin: Offset, plans: Mapping[str, ChangesPlan], marks: str) -> dict[str, str]:
        """The topics with a bookmark of their own at the end of a micro-batch: those that begin behind it, and those
        that more instances know than all topics, as those of another cell do while a topic moves [7]. `marks`: those of
        all topics."""
        if not self._reading.cell:
            return {}
        found, known = {}, sources_of(marks)
        for name, plan in plans.items():
            before = begin.get("each", {}).get(name, "")
            if name in apart(begin) and is_behind(plain(before), end):
                found[name] = before
                continue
            # As in `_mark`: marks of an earlier position hold for this one, too.
            own = plan.marks or ("" if self._plans.is_foreign(begin) else before[len(plain(before)) :])
            if not sources_of(own).keys() <= known.keys():
                found[name] = end + own
        return found

    def _mark(self, offset: Offset, begin: Offset, marks: str) -> None:
        """Adds to an offset whatever is needed to go on at another instance. `marks`: those of its position."""
        held = {**begin.get("held", {}), begin["epoch"]: begin["sequence"]}
        held.pop(offset["epoch"], None)
        reached = sources_of(marks)
        held = {epoch: at for epoch, at in held.items() if reached.get(epoch, -1) < at}
        if not marks and not self._plans.is_foreign(begin):
            marks = begin.get("marks", "")  # marks of an earlier position hold for this one, too
        offset["after"] = marked(begin)
        if marks:
            offset["marks"] = marks
        if held and self._instance.several:  # a cell that takes a topic has everything of the other one (rule C16)
            offset["held"] = held

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """The limit of the options. If there are two, Spark is told one, and both are applied."""
        if self._reading.max_records_per_trigger:
            return ReadMaxRows(self._reading.max_records_per_trigger)
        if self._reading.max_bytes_per_trigger:
            return ReadMaxBytes(self._reading.max_bytes_per_trigger)
        return ReadAllAvailable()

    def limits(self, limit: ReadLimit | None) -> tuple[int, int]:
        """Entries and bytes of a micro-batch, 0 for any number."""
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows, self._reading.max_bytes_per_trigger
        if isinstance(limit, ReadMaxBytes):
            return self._reading.max_records_per_trigger, limit.max_bytes
        return 0, 0

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Sets the end of the query: the present head."""
        self.set_target()

    def set_target(self) -> str:
        """As `prepareForTriggerAvailableNow`. Returns the end."""
        epoch = None if self._last is None else self._last["epoch"]
        self._target = target = self._instance.anywhere(epoch, self._present_head)
        return target

    def _present_head(self) -> str:
        name = next(iter(self._plans.topics()))
        return self._plans.plan(name, "looking for the head", "latest").start

    def reportLatestOffset(self) -> Offset | None:  # type: ignore[override]  # noqa: N802  # Spark's name
        """The head, for the query's progress, and how far the end of the last micro-batch is behind it."""
        if self._head is None:
            return None
        offset = offset_of(self._head)
        offset["recordsBehind"], offset["secondsBehind"] = self._behind
        offset["server"] = self._instance.connecting.server
        if self._last is not None and "pin" in self._last:
            offset["pin"] = self._last["pin"]
        return offset

    # ---- the changes of a micro-batch ----

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # type: ignore[override]  # Spark says dict
        """The changes after `start` up to `end`, in parts."""
        check_kind(self._reading, start)
        self._last = end
        self.left = {}
        if bookmark_of(start) == bookmark_of(end) and not apart(start):
            return []
        return self._instance.anywhere(end["epoch"], lambda: self._parts(start, end))

    def _parts(self, start: Offset, end: Offset) -> list[InputPartition]:
        begin = moved_to(start, end["after"], end.get("each_after")) if "after" in end else start
        self._look_for_left(begin, {}, end)
        present = self._plans.topics()
        self._look_for_left(begin, present, end)
        if not self._plans.is_foreign(end):
            self._plans.check_created(end, present)
        if not self._plans.is_foreign(begin):
            self._pins.hold_all(begin)  # a restarted query begins with this call if its last batch was not finished
        found: list[InputPartition] = []
        upto: str | None = marked(end)
        if self._plans.is_foreign(end) and not self._reading.several:
            upto = None if self._instance.call("looking at its cell", cell_at) else upto  # [6]
        for name in topics_of(end, self._reading.topic):
            if name not in present or name in apart(end):
                continue  # its loss has been told, or another cell has it, or it begins behind the end
            plan = self._plans.plan_from(name, begin, upto)
            if self._plans.is_foreign(end) and epoch_of(plan.start) == self._instance.epoch:
                self._pins.note(name, end, plan.start)
            elsewhere = self._plans.is_foreign(begin) or bool(end.get("held")) or name in apart(begin)
            found += self._parts_of(present[name], plan, marked(begin, name), elsewhere=elsewhere)
        if self._plans.is_foreign(end):
            self._pins.noted = bookmark_of(end)
        self._read_at = bookmark_of(end), self._instance.epoch or end["epoch"]
        return found

    def _parts_of(self, topic: Topic, plan: ChangesPlan, after: str, *, elsewhere: bool) -> list[ChangesPartition]:
        """The parts of a range of one topic."""
        self._check_options(topic, plan.start)
        if not plan.entries:
            return []
        form = form_of_topic(self._reading, self._layout, topic)
        # A repeated batch must have the same partitions, so they depend only on the range and the options.
        shares = min(self._reading.partitions or min(plan.entries // ENTRIES_PER_SHARE + 1, SHARES), SHARES_MAX)
        return [
            ChangesPartition(
                topic.name,
                plan.start,
                plan.end,
                share,
                shares,
                form,
                self._instance.connecting,
                elsewhere=elsewhere,
                after=after,
            )
            for share in range(shares)
        ]

    # ---- topics that move to another cell, or come from one [7] ----

    def look(self) -> None:
        """Looks which topics are here: see `present`."""
        self._instance.anywhere(None, self._plans.topics)

    def come(self, end: Offset, topic: str, bookmark: str) -> Offset:
        """The end of a micro-batch, behind which a topic begins that has come here. `bookmark`: where it was left."""

        def begun() -> Offset:
            try:
                start = self._plans.plan(topic, "following it to another cell", bookmark).start
            except SowSourceError as error:
                check_loss(error, self._reading, topic, bookmark)
                start = self._plans.plan(topic, "looking for the earliest change", "earliest").start
            offset = end.copy()
            offset["topics"] = {**end["topics"], topic: self._plans.present[topic].create_time.isoformat()}
            offset["each"] = {**end.get("each", {}), topic: start}
            self._pins.hold(topic, offset, start)
            if self._target is not None:
                self._target = self._present_head()  # what was there at the other cell may lie behind the former one
            self._idle = None  # it may have changes up to there
            return offset

        return self._instance.anywhere(end["epoch"], begun)

    def parts_from(self, topic: str, bookmark: str) -> Sequence[InputPartition]:
        """The part of a micro-batch that was planned in the cell that the topic has left, up to the head [7]."""

        def planned() -> list[ChangesPartition]:
            try:
                plan = self._plans.plan(topic, "following it to another cell", bookmark)
            except SowSourceError as error:
                check_loss(error, self._reading, topic, bookmark)
                return []
            return self._parts_of(self._plans.present[topic], plan, bookmark, elsewhere=True)

        return self._instance.anywhere(None, planned)

    def _look_for_left(self, begin: Offset, present: Mapping[str, Topic], end: Offset | None = None) -> None:
        """Sets `left`. `end`: of a micro-batch that was planned."""
        if self._reading.cell:
            read = topics_of(begin, "") if end is None else topics_of(end, "").keys() - apart(end)
            self.left = {name: marked(begin, name) for name in read if name not in present}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        assert isinstance(partition, ChangesPartition), "partitions() makes no others"
        reading, topic = self._reading, partition.topic
        decoder = Decoder(self._layout, partition.form, reading.mode, topic, changes=True)

        def rows(client: Client, start: str, end: str, *, elsewhere: bool) -> Iterator[pa.RecordBatch]:
            def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
                return client.read_changes(
                    topic,
                    start,
                    end,
                    filter=reading.filter or None,
                    parameters=reading.parameters,
                    columns=columns,
                    lines=lines,
                    batch_size=reading.batch_size,
                    # No previous record from before the batch is looked up, so a repeated read gives the same changes.
                    history=start if reading.filter else None,
                    share=(partition.share, partition.shares),
                    elsewhere=elsewhere,
                )

            with translated(f"reading the changes of topic {topic} from {start} to {end}"):
                yield from batches(decoder, topic, records, rows=reading.batch_size)

        with connect(partition.connecting) as client:
            try:
                yield from rows(client, partition.start, partition.end, elsewhere=partition.elsewhere)
            except SowSourceError as error:
                has_moved = in_cell(partition.connecting, client, topic) is not partition.connecting
                if not has_moved or error.reason not in (ELSEWHERE, "BOOKMARK_OTHER_EPOCH"):
                    raise
                try:  # [6]
                    with translated(f"reading the changes of topic {topic} in another cell, after {partition.after}"):
                        plan = retried(partition.connecting, lambda: client.plan_changes(topic, start=partition.after))
                except SowSourceError as refused:
                    check_loss(refused, reading, topic, partition.after)
                    return
                yield from rows(client, plan.start, plan.end, elsewhere=True)

    def commit(self, end: Offset) -> None:  # type: ignore[override]  # Spark says dict
        """Releases the journal up to `end`."""
        if self._plans.is_foreign(end) or (self._instance.several and self._instance.epoch is None):
            return  # the next call finds an instance
        try:
            self._pins.hold_all(end)
            self._pins.forget_note(end)
        except Elsewhere:
            return  # the next call pins the journal there
        except SowSourceError as error:
            # The next call shows whether the server is reachable. Until then the journal keeps more than necessary.
            _log.warning("%s", error)

    def stop(self) -> None:
        """Stops renewing the pin, which stays for `pinLease`: the query may be restarted. Spark does not call it
        (stream_pins [3])."""
        self._instance.close()

    # ---- several instances ----

    def _is_read(self, end: Offset) -> bool:
        """True if the micro-batch that ends here was read as far as here [4]."""
        if "after" not in end:
            return True
        if self._read_at is None or self._read_at[0] != bookmark_of(end):
            noted = any(self._pins.is_noted(connecting, end) for connecting in self._instance.others())
            self._read_at = bookmark_of(end), "" if noted else end["epoch"]
        return self._read_at[1] in (end["epoch"], self._instance.epoch)


def check_kind(reading: Reading, offset: Offset) -> None:
    """Raises SowSourceError if the offset is of a query of one topic, and this one has several: it does not tell
    which topic that was."""
    if not reading.several and "cells" in offset:
        raise SowSourceError(
            "OPTION_INVALID",
            "option topic: this checkpoint is of a query of several topics",
            "give a new checkpoint",
        )
    if reading.several and "topics" not in offset:
        name = "topics" if reading.topics else "topicPattern"
        raise SowSourceError(
            "OPTION_INVALID", f"option {name}: this checkpoint is of a query of one topic", "give a new checkpoint"
        )
