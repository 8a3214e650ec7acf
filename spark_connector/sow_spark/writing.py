"""Batch append: the tasks publish the rows of a DataFrame, or merge them as deltas, as they come.

Each partition of a job is one publisher, `spark-<job>-<partition>`, and one unit of its work. Guarantees:

    [1]  A retried or speculative attempt publishes all of its rows again, under a higher epoch, which fences the
         earlier attempts: of two attempts at most one continues. Rows may come in another order than before, so
         sequences alone would take the wrong rows for duplicates.
    [2]  One commit writes the last rows of an attempt and records the unit as finished. Later attempts change nothing.
         A unit is finished only if the input was whole (`task_input`), and no row was bad, unless bad rows are dropped.
    [3]  An aborted job fences its publishers: a task that still runs somewhere publishes no more.
    [4]  Append is not atomic: rows of a job that fails stay published. Publishing them again is harmless.

The stream writer, whose units are its micro-batches, also uses `publish`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sow_client import NEVER, Ack, Client, Publisher, PublishFailed, Refusal, SowError
from sow_spark.connection import connect, kept, retried
from sow_spark.errors import SowSourceError, translated
from sow_spark.options import Writing
from sow_spark.rows import BadRow, Puts, Removals, RowPlan, look_up_topic, plan_rows, shown
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


class PublishingWriter(DataSourceArrowWriter):
    """The writer of an append. It is made on the driver, pickled to tasks, and used on the driver again for the
    commit."""

    def __init__(self, writing: Writing, schema: StructType) -> None:
        """Raises SowSourceError for a fault in options, schema or topic."""
        with translated(f"writing to {writing.topic}"), connect(writing.connecting) as client:
            topic = retried(writing.connecting, lambda: look_up_topic(client, writing, schema))
            self._writing = replace(writing, connecting=kept(writing.connecting, client, writing.topic))
        self._plan = plan_rows(schema, writing, topic)
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publishes the rows of one partition."""
        task = task_context()
        return publish(
            self._writing, self._plan, iterator, f"spark-{self._job}-{task.partitionId()}", 1, task.partitionId()
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything is published: logs the figures."""
        log_summary(self._writing, "write", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: published rows stay [4], and no more rows are published [3]."""
        log_summary(self._writing, "aborted write", messages)
        fence(self._writing, [f"spark-{self._job}-{partition}" for partition in range(len(messages))])


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
            f"cannot be written to {writing.topic}: {described(self.samples)}",
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
        writing.topic,
        rows,
        len(written),
        len(messages),
        bad,
    )
    if bad:
        samples = islice((sample for message in written for sample in message.samples), SAMPLES_MAX)
        log.warning("%s of %s: %d bad rows were dropped, such as %s", what, writing.topic, bad, described(samples))


def fence(writing: Writing, publisher_ids: Sequence[str]) -> None:
    """Begins a new epoch of each publisher, so that no task continues under an older one. Errors are only logged: the
    job has failed already, and its error is the one to show."""
    try:
        with connect(writing.connecting) as client:
            for publisher_id in publisher_ids[:PARTITIONS_FENCED_MAX]:
                client.open_publisher(publisher_id)
    except SowError as error:
        log.warning("the publishers of an aborted write to %s were not fenced: %s", writing.topic, error)


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


def publish(
    writing: Writing, plan: RowPlan, batches: Iterator[pa.RecordBatch], publisher_id: str, unit: int, partition: int
) -> Written:
    """Publishes all rows of a partition as one unit of a publisher, unless an earlier attempt has [1], [2]."""
    doing = f"writing partition {partition} to {writing.topic}"
    with translated(doing), connect(writing.connecting) as client:
        opened = retried(writing.connecting, lambda: client.open_publisher(publisher_id, unit=unit))
        if opened.unit_done:
            return _rows_again(writing, plan, batches, partition, opened.unit_records)
        try:
            return _publish_new(client, writing, plan, batches, publisher_id, opened.epoch, unit, partition)
        except SowError as error:
            if error.reason != "PUBLISHER_FENCED":
                raise
            # Usual with speculative execution: a newer attempt has begun, or the job was aborted.
            raise SowSourceError(error.reason, f"{doing}: a newer attempt of this task has taken over") from None


def _publish_new(
    client: Client,
    writing: Writing,
    plan: RowPlan,
    batches: Iterator[pa.RecordBatch],
    publisher_id: str,
    epoch: int,
    unit: int,
    partition: int,
) -> Written:
    bad = BadRows()
    acks = _Acks(bad)
    bulk = _Bulk()
    rows = 0
    with client.publisher(
        writing.topic,
        ttl=NEVER if writing.ttl == "never" else writing.ttl,
        durability=writing.durability,
        batch_records=writing.batch_size or ROWS_PER_REQUEST,
        retry_for=writing.connecting.retry_for_micros / 1e6,
        publisher_id=publisher_id,
        epoch=epoch,
        unit=unit,
        on_ack=acks.on_ack,
        on_refusal=lambda _: None,  # `on_ack` counts refusals; it knows their rows
        delta=writing.mode == "delta",
    ) as publisher:
        for batch in batches:
            faults: list[BadRow] = []
            for step in plan.steps(batch, rows, faults):
                acks.handed_over.add(step)
                bulk.add(step)
                if len(bulk.payloads) >= (writing.batch_size or ROWS_PER_REQUEST):
                    bulk.hand_over(publisher)
            bad.add(faults)
            rows += batch.num_rows
            bad.check(writing, partition, last=False)
        bulk.hand_over(publisher)
        require_whole_input()
        bad.check(writing, partition, last=True)
        try:
            publisher.finish_unit()
        except PublishFailed:
            bad.check(writing, partition, last=True)
            if writing.on_bad_row != "drop":
                raise
            # All other rows are published, so the unit is finished. If this process dies just before that, they are
            # published again.
            publisher.finish_unit(without_refused=True)
    return Written(partition, acks.applied, bad.count, tuple(bad.samples))


def _rows_again(
    writing: Writing, plan: RowPlan, batches: Iterator[pa.RecordBatch], partition: int, unit_records: int
) -> Written:
    """An earlier attempt has finished this unit: nothing is published. `unit_records` is the number of its records, and
    also 0 if that is not known because the publisher has finished later units since.

    Another number of rows now means that Spark has divided the rows differently, so some of them may be in no finished
    unit. Spark never repeats a batch once a later one has begun. So a unit before the last one means another batch
    under the same number, as after a change of the checkpoint. Both are errors; otherwise rows would be missing for
    ever.
    """
    rows = published = 0
    for batch in batches:
        for step in plan.steps(batch, rows, []):
            published += len(step.rows)
        rows += batch.num_rows
    require_whole_input()
    fewer_is_usual = writing.on_bad_row == "drop"  # the server may have refused some
    if published < unit_records or (published > unit_records and not fewer_is_usual):
        before = f"with {unit_records} rows" if unit_records else "with no row, or long ago"
        raise SowSourceError(
            "ROWS_DIFFER",
            f"partition {partition} was written to {writing.topic} before, {before}, and now has {published}: Spark "
            "has divided the rows among the partitions differently, or they belong to another batch of that number",
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
