"""Batch reads: the driver opens a consistent export of the topic, and the tasks stream its parts as Arrow batches.

Guarantees:

    [1]  All rows of a DataFrame are of one cut: no record twice, none missing, none expired at the cut's `as_of` (rules
         Q1, Q6).
    [2]  A task yields a whole part or raises. A repeated task reads the same part again.
    [3]  The lease of the export is renewed as long as a task reads, however slowly its rows are taken. An export that
         nobody has begun to read, or whose reading Spark has broken off, ends after `IDLE_LEASE`.
    [4]  Pushed filters change the records that are read, but never the result: Spark also gets all filters back (see
         `sow_spark.filters`). Where Spark keeps one plan for a DataFrame, filters are pushed only on request
         (`pushFilters`): if a DataFrame is loaded once and used with several filters, Spark reads it by the last one.
    [5]  Spark plans a DataFrame once, and may run an action of it much later, when the export has ended. The tasks of
         that action then read one other export, the same for all of them, or fail (rule Q8). Each task takes some of
         its parts, because it need not have as many as were planned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from sow_client import SowError
from sow_spark.connection import connect, kept, retried
from sow_spark.converting import Misfit
from sow_spark.decoding import Decoder
from sow_spark.errors import SowSourceError, translated
from sow_spark.gathering import ROWS, gathered
from sow_spark.options import Connecting, PayloadForm, Reading
from sow_spark.schemas import Layout, check_form, form_of, layout

if TYPE_CHECKING:
    import pyarrow as pa

    from sow_client import Client, Export, PackedColumn, PackedRecords

RENEWALS_PER_LEASE: Final = 3
IDLE_LEASE: Final = timedelta(minutes=1)
"""Long enough for a task that was lost with its executor to begin again."""
_EXECUTION: Final = "spark.sql.execution.id"
"""The local property with the number of the action that a task belongs to."""


@dataclass(frozen=True, repr=False)
class ExportPartition(InputPartition):
    """One part of an export, or the share of one task in an export that has taken its place [5]."""

    export_id: str
    part: int
    parts: int
    """The number of parts of that export."""
    filter: str
    """The filter of the export."""
    lease_seconds: float
    form: PayloadForm
    connecting: Connecting


class SnapshotReader(DataSourceReader):
    """Reads a snapshot of a topic. Spark calls `partitions` in the driver, and `read` in tasks, on a pickled copy that
    was made before. So everything that a task has to know is in its partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        self._reading = reading
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false", new_fields=reading.new_fields)
        self._filters: Sequence[Filter] = ()

    def partitions(self) -> list[InputPartition]:
        """Opens the export."""
        reading = self._reading
        with translated(f"opening a snapshot of topic {reading.topic}"), connect(reading.connecting) as client:
            form = reading.payload
            if form is None or form == "columns":
                topic = retried(reading.connecting, lambda: client.describe_topic(reading.topic))
                form = form_of(reading, self._layout, topic.settings.message_type)
            else:
                check_form(self._layout, form)
            export, text = self._export(client, form)
            connecting = kept(reading.connecting, client)
        lease_seconds = export.lease.total_seconds()
        # Where no record matches, there is no part. A later snapshot may have some, so there is a partition for these.
        # Without a partition Spark makes one of its own, which `read` recognises.
        parts = len(export.parts)
        return [
            ExportPartition(export.id, part, parts, text, lease_seconds, form, connecting)
            for part in range(max(parts, 0 if reading.is_fixed else 1))
        ]

    def _export(self, client: Client, form: PayloadForm) -> tuple[Export, str]:
        """The export, and its filter."""
        reading = self._reading
        if (name := reading.export) is not None:
            export = retried(reading.connecting, lambda: client.renew_export(name))
            if export.topic != reading.topic:
                raise SowSourceError(
                    "OPTION_INVALID", f"option export: {name} is an export of topic {export.topic}, not {reading.topic}"
                )
            return export, ""
        user = reading.filter
        text = user
        if self._filters:
            from sow_spark.filters import combined

            # A payload as one column has no fields.
            fields = self._layout if form == "columns" else replace(self._layout, fields=StructType())
            text = combined(user, self._filters, fields, reading.mode)

        try:
            return opened(client, reading, text), text
        except SowError as error:
            if error.reason != "FILTER_INVALID" or text == user:
                raise
        # Try the user's filter alone. If the fault is in it, the error comes again, with the right position. If not,
        # this server does not accept our text of Spark's filters, and the export is opened without them.
        return opened(client, reading, user), user

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        if not isinstance(partition, ExportPartition):
            return
        reading = self._reading
        decoder = Decoder(self._layout, partition.form, reading.mode, reading.topic)
        reader = None if reading.is_fixed else _reader()
        with connect(partition.connecting) as client:

            def part_of(export_id: str, part: int) -> Iterator[pa.RecordBatch]:
                def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
                    return client.read_export(
                        export_id,
                        part,
                        columns=columns,
                        lines=lines,
                        batch_size=reading.batch_size,
                        fields=decoder.fields,
                        reader=reader,
                    )

                doing = f"reading part {part} of a snapshot of topic {reading.topic}"
                with renewed(lambda: client.renew_export(export_id), partition.lease_seconds), translated(doing):
                    yield from batches(decoder, reading.topic, records, rows=reading.batch_size)

            export_id, parts = partition.export_id, partition.parts
            if reader is not None:
                export_id, parts = self._current(client, partition, reader)
            for part in range(partition.part, parts, max(partition.parts, 1)):
                yield from part_of(export_id, part)

    def _current(self, client: Client, partition: ExportPartition, reader: str) -> tuple[str, int]:
        """The export that the tasks of `reader` read [5], and the number of its parts."""
        reading = self._reading
        with translated(f"opening a snapshot of topic {reading.topic}"):
            export = retried(
                partition.connecting,
                lambda: client.open_export(
                    reading.topic,
                    partition.filter or None,
                    parts=partition.parts,
                    lease=_lease(reading),
                    idle_lease=IDLE_LEASE,
                    successor_of=partition.export_id,
                    reader=reader,
                ),
                full=True,
            )
        return export.id, len(export.parts)


def opened(client: Client, reading: Reading, text: str) -> Export:
    """Opens an export for the options, of the records that match `text`."""
    return retried(
        reading.connecting,
        lambda: client.open_export(
            reading.topic,
            text or None,
            parts=reading.partitions,
            lease=_lease(reading),
            idle_lease=None if reading.is_fixed else IDLE_LEASE,
        ),
        full=True,  # a snapshot that was read in part makes room within a minute
    )


def opened_at_load(reading: Reading) -> Reading:
    """The options with an export that is opened now, which every use of the DataFrame then reads."""
    with translated(f"opening a snapshot of topic {reading.topic}"), connect(reading.connecting) as client:
        export = opened(client, reading, reading.filter)
        return replace(reading, export=export.id, connecting=kept(reading.connecting, client))


def closed(loaded: Reading) -> None:
    """Ends the export of `opened_at_load`, if the server can be reached; otherwise it ends with its lease."""
    assert loaded.export is not None, "it was opened"
    with suppress(SowError), connect(loaded.connecting) as client:
        client.close_export(loaded.export)


def _lease(reading: Reading) -> str | None:
    return f"{reading.lease_micros}us" if reading.lease_micros else None


def _reader() -> str | None:
    """A name for the action of Spark that this task belongs to. None: the task belongs to none, because Spark runs it
    for an RDD. Then nothing tells which tasks belong together."""
    task = TaskContext.get()
    execution = None if task is None else task.getLocalProperty(_EXECUTION)
    return None if execution is None else f"execution {execution}"


class FilteringReader(SnapshotReader):
    """Reads a snapshot with Spark's filters pushed into the export. It is a separate class because Spark refuses a
    reader with `pushFilters` while spark.sql.python.filterPushdown.enabled is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Remembers the filters, and also leaves all of them to Spark [4]."""
        self._filters = tuple(filters)
        return filters


def batches(
    decoder: Decoder,
    topic: str,
    records: Callable[[Sequence[PackedColumn], bool], Iterator[PackedRecords]],
    *,
    rows: int = 0,
) -> Iterator[pa.RecordBatch]:
    """The records of `records(columns, lines)`, as Arrow batches of about `rows` (0: the default).

    Raises SowSourceError (ROW_MALFORMED) for a record that does not fit. It reads again to find the record's key."""
    done = 0
    for packed in gathered(records(decoder.columns, decoder.lines), rows=rows or ROWS):
        try:
            batch = decoder.decode(packed)
        except Misfit as misfit:
            key = _key_at(records(("key",), False), done + misfit.row)
            raise SowSourceError(
                "ROW_MALFORMED",
                f"record {key} of topic {topic}, {misfit}",
                "correct the schema or the record, or read with mode=PERMISSIVE (null) or DROPMALFORMED (left out)",
            ) from None
        done += packed.count
        if batch.num_rows:
            yield batch


def _key_at(records: Iterator[PackedRecords], row: int) -> str:
    """The key of a record by its position. Repeating the call gives the same records."""
    for packed in records:
        if row < packed.count:
            offsets = memoryview(packed.key_offsets).cast("i")
            return repr(packed.keys[offsets[row] : offsets[row + 1]].decode(errors="replace"))
        row -= packed.count
    return "?"


@contextmanager
def renewed(renew: Callable[[], object], lease_seconds: float) -> Iterator[None]:
    """Calls `renew` on a thread, a few times per lease. If a renewal fails, the reading itself raises the error."""
    over = threading.Event()

    def renewing() -> None:
        while not over.wait(lease_seconds / RENEWALS_PER_LEASE):
            try:
                renew()
            except SowError as error:
                if error.reason == "EXPORT_NOT_FOUND":
                    return

    thread = threading.Thread(target=renewing, name="sow-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()  # not joined: it may wait for an answer, and closing the client ends that
