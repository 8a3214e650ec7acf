"""Batch reads: the driver opens a consistent export of the topic, and the tasks stream its parts as Arrow batches.

Guarantees:

    [1]  All rows of a DataFrame are of one cut: no record twice, none missing, none expired at the cut's `as_of` (rules
         Q1, Q6).
    [2]  A task yields a whole part or raises. A repeated task reads the same part again.
    [3]  The lease of the export is renewed as long as a task reads, however slowly its rows are taken.
    [4]  Pushed filters change the records that are read, but never the result: Spark also gets all filters back (see
         `sow_spark.filters`). Filters are pushed only on request (`pushFilters`): if a DataFrame is loaded once and
         used with several filters, Spark reads it by the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

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


@dataclass(frozen=True, repr=False)
class ExportPartition(InputPartition):
    """One part of an export."""

    export_id: str
    part: int
    lease_seconds: float
    form: PayloadForm
    connecting: Connecting


class SnapshotReader(DataSourceReader):
    """Reads a snapshot of a topic. Spark calls `partitions` in the driver, and `read` in tasks, on a pickled copy that
    was made before. So everything that a task has to know is in its partition."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        """Raises SowSourceError for a schema that cannot be read."""
        self._reading = reading
        self._layout: Layout = layout(schema, metadata=reading.metadata != "false")
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
            export = self._export(client, form)
            connecting = kept(reading.connecting, client)
        lease_seconds = export.lease.total_seconds()
        # A topic without a matching record has no part. Spark then makes a partition of its own, which `read`
        # recognises.
        return [ExportPartition(export.id, part, lease_seconds, form, connecting) for part in range(len(export.parts))]

    def _export(self, client: Client, form: PayloadForm) -> Export:
        reading = self._reading
        if (name := reading.export) is not None:
            export = retried(reading.connecting, lambda: client.renew_export(name))
            if export.topic != reading.topic:
                raise SowSourceError(
                    "OPTION_INVALID", f"option export: {name} is an export of topic {export.topic}, not {reading.topic}"
                )
            return export
        user = reading.filter
        text = user
        if self._filters:
            from sow_spark.filters import combined

            # A payload as one column has no fields.
            fields = self._layout if form == "columns" else replace(self._layout, fields=StructType())
            text = combined(user, self._filters, fields, reading.mode)

        def opened(wanted: str) -> Export:
            return client.open_export(
                reading.topic,
                wanted or None,
                parts=reading.partitions,
                lease=f"{reading.lease_micros}us" if reading.lease_micros else None,
            )

        try:
            return retried(reading.connecting, lambda: opened(text))
        except SowError as error:
            if error.reason != "FILTER_INVALID" or text == user:
                raise
        # Try the user's filter alone. If the fault is in it, the error comes again, with the right position. If not,
        # this server does not accept our text of Spark's filters, and the export is opened without them.
        return retried(reading.connecting, lambda: opened(user))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        if not isinstance(partition, ExportPartition):
            return
        reading = self._reading
        decoder = Decoder(self._layout, partition.form, reading.mode)
        with connect(partition.connecting) as client:

            def records(columns: Sequence[PackedColumn], lines: bool) -> Iterator[PackedRecords]:
                return client.read_export(
                    partition.export_id,
                    partition.part,
                    columns=columns,
                    lines=lines,
                    batch_size=reading.batch_size,
                    fields=decoder.fields,
                )

            doing = f"reading part {partition.part} of a snapshot of topic {reading.topic}"
            with renewed(lambda: client.renew_export(partition.export_id), partition.lease_seconds), translated(doing):
                yield from batches(decoder, reading.topic, records, rows=reading.batch_size)


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
