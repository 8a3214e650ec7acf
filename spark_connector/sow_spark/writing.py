"""Batch append: the tasks publish the rows of a DataFrame, or merge them as deltas, as they come.

Each partition of a job is one publisher, `spark-<job>-<partition>`, and one unit of its work. Guarantees:

    [1]  A retried or speculative attempt publishes all of its rows again, under a higher epoch, which fences the
         earlier attempts: of two attempts at most one continues. Rows may come in another order than before, so
         sequences alone would take the wrong rows for duplicates.
    [2]  One commit writes the last rows of an attempt and records the unit as finished. Later attempts change nothing.
         A unit is finished only if the input was whole (`task_input`), and no row was bad, unless bad rows are dropped.
    [3]  An aborted job fences its publishers: a task that still runs somewhere publishes no more.
    [4]  Append is not atomic: rows of a job that fails stay published. Publishing them again is harmless.
    [5]  If a column names the topic of each row, each topic of a partition has a publisher and a unit of its own, in
         the cell of the topic (rule C24). [1] and [2] hold for each topic by itself, and [3] does not.

The stream writer, whose units are its micro-batches, also uses `publish`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructType

from sow_client import Ack, Client, Publisher, PublishFailed, Refusal, SowError
from sow_spark.connection import connect, kept, retried
from sow_spark.errors import SowSourceError, option_error, translated
from sow_spark.options import Writing
from sow_spark.rows import BadRow, Puts, Removals, RowPlan, column_named, look_up_topic, plan_rows, shown
from sow_spark.task_input import require_whole_input

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLES_MAX: Final = 5
BAD_ROWS_MAX: Final = 1_000
"""With `onBadRow=fail` a task gives up after this many bad rows. Below that it continues, so that the count is
right."""
PARTITIONS_FENCED_MAX: Final = 10_000
ROWS_PER_REQUEST: Final = 2_000
"""Twice a publisher's default: nobody waits for single rows here."""
IN_FLIGHT: Final = 16
"""Requests of a publisher that are not answered yet."""
IN_FLIGHT_OF_MANY: Final = 2
"""The same, where a task has a publisher for each topic: they hold their rows until then."""
TOPICS_MAX: Final = 256
"""Topics of a partition."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """The result of a task, for the driver."""

    partition: int
    rows: int
    """Rows published by this attempt, or by the earlier one that finished this partition; removals included."""
    bad: int = 0
    samples: tuple[BadRow, ...] = ()
    again: bool = False
    """An earlier attempt had finished the partition: this one published nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """The topic of a write, or the column that names one for each row."""

    writing: Writing
    schema: StructType
    """The columns of the rows, without the one that names topics."""
    plan: RowPlan | None
    """None: each topic has its own."""

    @property
    def column(self) -> str:
        """The column that names topics."""
        assert self.writing.topic_column is not None, "it is asked for where there is no plan"
        return self.writing.topic_column


def target(writing: Writing, schema: StructType) -> Target:
    """The target of a write, in the cell of its topic. Raises SowSourceError for a fault in options, schema or
    topic."""
    if writing.topic_column is not None:
        field = column_named(schema, "topicColumn", writing.topic_column)
        if not isinstance(field.dataType, StringType):
            raise option_error("topicColumn", f"column {field.name} is {field.dataType.simpleString()}, not string")
        rest = StructType([one for one in schema if one.name != field.name])
        return Target(replace(writing, topic_column=field.name), rest, None)
    with translated(f"writing to {writing.topic}"), connect(writing.connecting) as client:
        topic = retried(writing.connecting, lambda: look_up_topic(client, writing, schema))
        writing = replace(writing, connecting=kept(writing.connecting, client, writing.topic))
    return Target(writing, schema, plan_rows(schema, writing, topic))


def plan_of(client: Client, writing: Writing, schema: StructType) -> RowPlan:
    """The roles of the columns in rows of a topic."""
    topic = retried(writing.connecting, lambda: look_up_topic(client, writing, schema))
    return plan_rows(schema, writing, topic)


class PublishingWriter(DataSourceArrowWriter):
    """The writer of an append. It is made on the driver, pickled to tasks, and used on the driver again for the
    commit."""

    def __init__(self, writing: Writing, schema: StructType) -> None:
        """Raises SowSourceError for a fault in options, schema or topic."""
        self._to = target(writing, schema)
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition."""
        task = task_context()
        return publish(self._to, iterator, f"spark-{self._job}-{task.partitionId()}", 1, task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything is published: logs the figures."""
        log_summary(self._to.writing, "write", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: published rows stay [4], and no more rows are published [3]."""
        log_summary(self._to.writing, "aborted write", messages)
        if self._to.plan is not None:  # the driver does not know the topics that a column names [5]
            fence(self._to.writing, [f"spark-{self._job}-{partition}" for partition in range(len(messages))])


def task_context() -> TaskContext:
    """The running task."""
    task = TaskContext.get()
    assert task is not None, "write is called in tasks only"
    return task


# ---- bad rows ----


@dataclass(slots=True)
class BadRows:
    """Counts the rows of a task that were not written, and keeps the first of them. Two threads add to it: the task's
    thread, and the thread of the publisher's answers."""

    count: int = 0
    samples: list[BadRow] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, rows: Sequence[BadRow]) -> None:
        """Adds bad rows."""
        if not rows:
            return
        with self._lock:
            self.count += len(rows)
            self.samples += rows[: SAMPLES_MAX - len(self.samples)]

    def check(self, writing: Writing, partition: int, *, last: bool) -> None:
        """With `onBadRow=fail`, raises SowSourceError once there are `BAD_ROWS_MAX`, or at the end of the rows."""
        if writing.on_bad_row == "drop" or self.count < (1 if last else BAD_ROWS_MAX):
            return
        raise SowSourceError(
            self.samples[0].reason,
            f"{self.count}{'' if last else ' or more'} row{'s' if self.count > 1 else ''} of partition {partition} "
            f"cannot be written to {writing.named}: {described(self.samples)}",
            "correct them, or write the others with onBadRow=drop",
        )


def described(samples: Iterable[BadRow]) -> str:
    """Bad rows for people, on one line."""
    return " | ".join(
        f"row {bad.row}: {bad.message} ({bad.reason})" + (f", in {bad.value}" if bad.value else "") for bad in samples
    )


def log_summary(writing: Writing, what: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Figures of a job, in the driver's log."""
    written = [message for message in messages if isinstance(message, Written)]
    rows = sum(message.rows for message in written)
    bad = sum(message.bad for message in written)
    log.info(
        "%s of %s: %d rows in %d of %d partitions, %d bad rows",
        what,
        writing.named,
        rows,
        len(written),
        len(messages),
        bad,
    )
    if bad:
        samples = islice((sample for message in written for sample in message.samples), SAMPLES_MAX)
        log.warning("%s of %s: %d bad rows were dropped, such as %s", what, writing.named, bad, described(samples))


def fence(writing: Writing, publisher_ids: Sequence[str]) -> None:
    """Begins a new epoch of each publisher, so that no task continues under an older one. Errors are only logged: the
    job has failed already, and its error is the one to show."""
    try:
        with connect(writing.connecting) as client:
            for publisher_id in publisher_ids[:PARTITIONS_FENCED_MAX]:
                client.open_publisher(publisher_id)
    except SowError as error:
        log.warning("the publishers of an aborted write to %s were not fenced: %s", writing.named, error)


# ---- publishing a partition ----


class HandedOver:
    """The rows in a bulk call that are not settled yet, so that an error can show a refused row.

    It holds about as many payloads as the call itself. Two threads use it: the task's, and that of the answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._underway: deque[tuple[int, Puts | Removals]] = deque()
        self._end = 0

    def add(self, step: Puts | Removals) -> None:
        """Adds the rows that are handed over next."""
        with self._lock:
            self._underway.append((self._end, step))
            self._end += len(step.rows)

    def refused(self, refusals: Iterable[Refusal]) -> list[BadRow]:
        """The refused rows. The indexes of refusals count all rows handed over."""
        found = []
        with self._lock:
            for refusal in refusals:
                for first, step in self._underway:
                    at = refusal.index - first
                    if 0 <= at < len(step.rows):
                        found.append(BadRow(step.rows[at], refusal.reason, refusal.message, shown(step.payloads[at])))
                        break
        return found

    def settled(self, rows: int) -> None:
        """Notes that the first `rows` of all rows handed over are settled."""
        with self._lock:
            while self._underway and self._underway[0][0] + len(self._underway[0][1].rows) <= rows:
                self._underway.popleft()


@dataclass(slots=True)
class _Acks:
    """Follows the server's answers, in the publisher's thread."""

    bad: BadRows
    handed_over: HandedOver = field(default_factory=HandedOver)
    applied: int = 0
    settled: int = 0

    def on_ack(self, ack: Ack) -> None:
        """Handles an answer."""
        self.applied += ack.applied + ack.duplicates
        if ack.refusals:
            self.bad.add(self.handed_over.refused(ack.refusals))
        self.settled += ack.records
        self.handed_over.settled(self.settled)


class _Bulk:
    """Puts and removals, in the order of the rows, for one call: those of a small partition are one request, and so one
    commit, with the end of the unit. An attempt that is cut off has published all of them, or none."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.payloads: list[bytes] = []
        self._keys: list[str] = []  # "" stands for none
        self._lifetime_kinds: list[int] = []
        self._lifetime_micros: list[int] = []
        self._removals: list[bool] = []

    def add(self, step: Puts | Removals) -> None:
        """Adds the rows that come next."""
        rows, kinds, micros = len(step.rows), None, None
        if isinstance(step, Puts):
            kinds, micros = step.lifetime_kinds, step.lifetime_micros
        self.payloads += step.payloads
        self._keys += step.keys or [""] * rows
        self._lifetime_kinds += kinds or [0] * rows
        self._lifetime_micros += micros or [0] * rows
        # Of the same unit: a late removal of a fenced attempt removes no record of the newer one.
        self._removals += [isinstance(step, Removals)] * rows

    def hand_over(self, publisher: Publisher) -> None:
        """Gives all rows to a publisher. Raises as `Publisher.publish_columns`."""
        if self.payloads:
            has_lifetimes = any(self._lifetime_kinds)
            publisher.publish_columns(
                self.payloads,
                keys=self._keys if any(self._keys) else None,
                lifetime_kinds=self._lifetime_kinds if has_lifetimes else None,
                lifetime_micros=self._lifetime_micros if has_lifetimes else None,
                removals=self._removals if any(self._removals) else None,
            )
            self._clear()


class _Unit:
    """The rows of a partition for one topic: a unit of a publisher, unless an earlier attempt has finished it [2]."""

    def __init__(
        self,
        client: Client,
        writing: Writing,
        plan: RowPlan,
        publisher_id: str,
        unit: int,
        partition: int,
        life: ExitStack,
    ) -> None:
        """`writing`: with the topic. `life`: ends the publisher."""
        self._writing = writing
        self._plan = plan
        self._partition = partition
        self._rows = 0
        self._bad = BadRows()
        self._acks = _Acks(self._bad)
        self._bulk = _Bulk()
        self._publisher: Publisher | None = None
        where = None if writing.topic_column is None else writing.topic  # None: the client is in its cell
        opened = retried(writing.connecting, lambda: client.open_publisher(publisher_id, unit=unit, topic=where))
        self._done_before = opened.unit_records
        self._published_before = 0
        if not opened.unit_done:
            self._publisher = life.enter_context(
                client.publisher(
                    writing.topic,
                    ttl=plan.ttl(writing),
                    durability=writing.durability,
                    batch_records=self._batch_size,
                    max_in_flight=IN_FLIGHT if writing.topic_column is None else IN_FLIGHT_OF_MANY,
                    retry_for=writing.connecting.retry_for_micros / 1e6,
                    publisher_id=publisher_id,
                    epoch=opened.epoch,
                    unit=unit,
                    on_ack=self._acks.on_ack,
                    on_refusal=lambda _: None,  # `on_ack` counts refusals; it knows their rows
                    delta=writing.mode == "delta",
                )
            )

    @property
    def _batch_size(self) -> int:
        return self._writing.batch_size or ROWS_PER_REQUEST

    def add(self, batch: pa.RecordBatch) -> None:
        """Publishes rows; those of a finished unit are counted."""
        faults: list[BadRow] = []
        for step in self._plan.steps(batch, self._rows, faults):
            if self._publisher is None:
                self._published_before += len(step.rows)
                continue
            self._acks.handed_over.add(step)
            self._bulk.add(step)
            if len(self._bulk.payloads) >= self._batch_size:
                self._bulk.hand_over(self._publisher)
        self._rows += batch.num_rows
        if self._publisher is not None:
            self._bad.add(faults)
            self._bad.check(self._writing, self._partition, last=False)

    def end(self) -> None:
        """There are no more rows."""
        if self._publisher is not None:
            self._bulk.hand_over(self._publisher)

    def finish(self) -> Written:
        """Finishes the unit, once the input is known to be whole."""
        if self._publisher is None:
            return self._again()
        bad, publisher = self._bad, self._publisher
        bad.check(self._writing, self._partition, last=True)
        try:
            publisher.finish_unit()
        except PublishFailed:
            bad.check(self._writing, self._partition, last=True)
            if self._writing.on_bad_row != "drop":
                raise
            # All other rows are published, so the unit is finished. If this process dies just before that, they are
            # published again.
            publisher.finish_unit(without_refused=True)
        return Written(self._partition, self._acks.applied, bad.count, tuple(bad.samples))

    def _again(self) -> Written:
        """An earlier attempt has finished this unit: nothing is published. It tells the number of its records, and also
        0 if that is not known because the publisher has finished later units since.

        Another number of rows now means that Spark has divided the rows differently, so some of them may be in no
        finished unit. Spark never repeats a batch once a later one has begun. So a unit before the last one means
        another batch under the same number, as after a change of the checkpoint. Both are errors; otherwise rows would
        be missing for ever.
        """
        writing, partition = self._writing, self._partition
        published, unit_records = self._published_before, self._done_before
        fewer_is_usual = writing.on_bad_row == "drop"  # the server may have refused some
        if published < unit_records or (published > unit_records and not fewer_is_usual):
            before = f"with {unit_records} rows" if unit_records else "with no row, or long ago"
            raise SowSourceError(
                "ROWS_DIFFER",
                f"partition {partition} was written to {writing.topic} before, {before}, and now has {published}: "
                "Spark has divided the rows among the partitions differently, or they belong to another batch of that "
                "number",
                "give the stream another writerId; then all rows of the batch are written again",
            )
        if published and not unit_records:
            log.warning(
                "partition %d was written to %s before, with an unknown number of rows; %d rows are not written again",
                partition,
                writing.topic,
                published,
            )
        return Written(partition, published, again=True)


def publish(to: Target, batches: Iterator[pa.RecordBatch], publisher_id: str, unit: int, partition: int) -> Written:
    """Publishes all rows of a partition as one unit of a publisher, unless an earlier attempt has [1], [2]. Where a
    column names their topics, the rows of each topic are a unit of a publisher of their own [5]."""
    writing = to.writing
    doing = f"writing partition {partition} to {writing.named}"
    unnamed = BadRows()
    rows_before = 0
    with translated(doing), connect(writing.connecting) as client, ExitStack() as life:
        try:
            if to.plan is not None:
                units = {writing.topic: _Unit(client, writing, to.plan, publisher_id, unit, partition, life)}
                for batch in batches:
                    units[writing.topic].add(batch)
            else:
                units = {}
                for batch in batches:
                    unnamed.add(_without_topic(batch, to.column, rows_before))
                    unnamed.check(writing, partition, last=False)
                    rows_before += batch.num_rows
                    for topic, rows in by_topic(batch, to.column):
                        if topic not in units:
                            if len(units) == TOPICS_MAX:
                                raise _too_many(to.column, partition)
                            named = replace(writing, topic=topic)
                            plan = plan_of(client, named, to.schema)
                            its_id = f"{publisher_id}-{blake2b(topic.encode(), digest_size=8).hexdigest()}"
                            units[topic] = _Unit(client, named, plan, its_id, unit, partition, life)
                        units[topic].add(rows)
            for one in units.values():
                one.end()
            require_whole_input()
            unnamed.check(writing, partition, last=True)
            return _together(partition, [one.finish() for one in units.values()], unnamed)
        except SowError as error:
            if error.reason != "PUBLISHER_FENCED":
                raise
            # Usual with speculative execution: a newer attempt has begun, or the job was aborted.
            raise SowSourceError(error.reason, f"{doing}: a newer attempt of this task has taken over") from None


def _together(partition: int, written: Sequence[Written], unnamed: BadRows) -> Written:
    """The result of a task, of those of its topics, and of the rows without a topic."""
    if len(written) == 1 and not unnamed.count:
        return written[0]
    samples = [*unnamed.samples, *(sample for one in written for sample in one.samples)]
    return Written(
        partition,
        sum(one.rows for one in written),
        sum(one.bad for one in written) + unnamed.count,
        tuple(samples[:SAMPLES_MAX]),
        again=bool(written) and all(one.again for one in written),
    )


# ---- topics that a column names ----


def by_topic(batch: pa.RecordBatch, column: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic that a column names, in their order, without that column."""
    topics = batch.column(column)
    rest = batch.drop_columns([column])
    encoded = topics.dictionary_encode()
    for code, topic in enumerate(encoded.dictionary.to_pylist()):
        alone = len(encoded.dictionary) == 1 and not topics.null_count
        yield topic, rest if alone else rest.filter(pc.equal(encoded.indices, code))


def _without_topic(batch: pa.RecordBatch, column: str, first: int) -> list[BadRow]:
    """The rows of a batch that name no topic. `first`: the number of its first row."""
    topics = batch.column(column)
    if not topics.null_count:
        return []
    wrong = f"column {column} is null: there is no topic"
    return [BadRow(first + at, "ROW_MALFORMED", wrong, "") for at in pc.indices_nonzero(topics.is_null()).to_pylist()]


def _too_many(column: str, partition: int) -> SowSourceError:
    return SowSourceError(
        "OPTION_INVALID",
        f"option topicColumn: partition {partition} has rows of more than {TOPICS_MAX} topics",
        f'write .repartition("{column}"), which puts the rows of a topic together',
    )
